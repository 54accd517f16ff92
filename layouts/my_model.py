"""A model of your own: `model: {file: my_model.py, layers: 2, embed: 64, heads: 4, mlp: 128, vocab: 256}`.

A model is a module with the parts that `dtrain.models` lists; take from a family what you like and write the
rest. Here Llama's block is replaced by a parallel one (as in PaLM): attention and MLP read the same norm and
are added together, so a layer places activations twice instead of four times, and its tensor-parallel
traffic is half.
"""

from dtrain import ops
from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, logits  # noqa: F401
from dtrain.models.llama import params as llama_params


def params(cfg):
    """The parameters of each segment; the parallel block has one norm."""
    tree = llama_params(cfg)
    return {**tree, "block": {name: p for name, p in tree["block"].items() if name != "norm_mlp"}}


def block(cfg, p, x, batch, key, on):
    """One layer, `batch res_seq embed` -> the same: parameters by gather, activations by constrain."""
    w = {name: on.gather(t) for name, t in p.items()}

    def attend(here, q, k, v):  # an island: runs on this rank's heads
        at = ops.positions(here, q, "seq", 1)
        cos, sin = ops.rope_tables(at, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, q.dtype)
        q = ops.rotate(q, cos, sin)
        k, v = here.cached(ops.rotate(k, cos, sin), v)  # for `dtrain sample`, which calls a token at a time
        return ops.attention(q, k, v, causal=True, kernel=cfg.attention)

    h = on.constrain(ops.rms_norm(x, w["norm_attn"], cfg.norm_eps), "batch seq embed")
    q, k, v = (ops.to_heads(h, w[name]) for name in ("wq", "wk", "wv"))
    heads, kv = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    a = ops.from_heads(on.island(attend, (heads, kv, kv), heads)(q, k, v), w["wo"])
    m = ops.swiglu(h @ w["w_gate"], h @ w["w_up"]) @ w["w_down"]
    return x + on.constrain(a + m, ACT)
