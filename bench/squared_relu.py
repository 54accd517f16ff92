"""Llama with the MLP of Nemotron-4: squared ReLU, no gate (Parmar et al. 2024, arXiv 2402.16819)."""

import torch.nn.functional as F

from dtrain import ops
from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, logits  # noqa: F401
from dtrain.models.llama import params as llama_params


def params(cfg):
    """The parameters of each segment; the MLP has no gate."""
    tree = llama_params(cfg)
    return {**tree, "block": {name: p for name, p in tree["block"].items() if name != "w_gate"}}


def block(cfg, p, x, batch, key, on):
    """One layer, `batch res_seq embed` -> the same."""
    w = {name: on.gather(t) for name, t in p.items()}

    def attend(here, q, k, v):
        at = ops.positions(here, q, "seq", 1)
        cos, sin = ops.rope_tables(at, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, q.dtype)
        q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
        return ops.attention(q, k, v, causal=True, kernel=cfg.attention)

    h = on.constrain(ops.rms_norm(x, w["norm_attn"], cfg.norm_eps), "batch seq embed")
    q, k, v = (ops.to_heads(h, w[name]) for name in ("wq", "wk", "wv"))
    heads, kv = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    a = on.island(attend, (heads, kv, kv), heads)(q, k, v)
    x = x + on.constrain(ops.from_heads(a, w["wo"]), ACT)
    h = on.constrain(ops.rms_norm(x, w["norm_mlp"], cfg.norm_eps), "batch seq embed")
    m = F.relu(h @ w["w_up"]).square()
    return x + on.constrain(m @ w["w_down"], ACT)
