"""The model families against Hugging Face's, and how a layout's words become a model."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import models, ops, reference, rng
from dtrain.axes import ALONE
from dtrain.models import bert, gpt2, llama

EXAMPLE = Path(__file__).parent.parent / "layouts" / "my_model.py"

LLAMA = llama.Config(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=61)
GPT2 = gpt2.Config(layers=2, embed=32, heads=4, vocab=61, positions=40, dropout=0.0, attention_dropout=0.0)
BERT = bert.Config(layers=2, embed=32, heads=4, vocab=61, positions=40, dropout=0.0, attention_dropout=0.0)
MODELS: dict[str, tuple[ModuleType, Any]] = {
    "llama": (llama, LLAMA),
    "llama-tied-scaled": (llama, dataclasses.replace(LLAMA, tied=True, rope_scaling=ops.RopeScaling())),
    "gpt2": (gpt2, GPT2),
    "gpt2-dropout": (gpt2, dataclasses.replace(GPT2, dropout=0.1, attention_dropout=0.1)),
    "bert-post": (bert, BERT),
    "bert-pre": (bert, dataclasses.replace(BERT, norm="pre")),
    "bert-dropout": (bert, dataclasses.replace(BERT, dropout=0.1, attention_dropout=0.1)),
    "example": (models.load_file(EXAMPLE), LLAMA),
}


def batch_of(module: ModuleType, cfg: Any, batch: int = 2, seq: int = 40, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    out = {
        "tokens": torch.randint(cfg.vocab, (batch, seq), generator=g),
        "labels": torch.randint(-3, cfg.vocab, (batch, seq), generator=g),
        "sample": torch.arange(batch) + 100,
    }
    if "order" in module.BATCH:
        valid = torch.ones(batch, seq, dtype=torch.int64)
        valid[0, seq - 5 :] = 0
        out |= {
            "types": (torch.arange(seq) > seq // 2).long().expand(batch, seq).contiguous(),
            "valid": valid,
            "order": torch.arange(batch) % 2,
        }
    assert set(out) == set(module.BATCH)
    return out


def noisy(module: ModuleType, cfg: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters with every norm and bias away from its initial one or zero, so that none can go missing."""
    g = torch.Generator().manual_seed(1)
    params = reference.init(module, cfg, dtype=torch.float64)
    return {n: (t + 0.1 * torch.randn(t.shape, generator=g, dtype=torch.float64)).to(dtype) for n, t in params.items()}


# --- equal to Hugging Face's ---


def hugging_face(cls: str, config: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """A transformers model in evaluation mode holding `state`, every tensor of which must be used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"transformers|torch\.jit|importlib")
        import transformers

        model = getattr(transformers, cls)(getattr(transformers, config.pop("config"))(**config)).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "lm_head.weight",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }
    model.tie_weights()
    return model


def into(w: Tensor) -> Tensor:
    """(in, ...out) -> torch.nn.Linear's (out, in)."""
    return w.flatten(1).T


def out_of(w: Tensor) -> Tensor:
    """(...in, out) -> (out, in)."""
    return w.flatten(0, -2).T


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": True, "kv_heads": 1},
        {"kv_heads": 4, "head_dim": 6},
        {"rope_theta": 1e4, "rope_scaling": ops.RopeScaling(factor=4.0, original=16)},
    ],
    ids=str,
)
def test_llama_logits_equal_hugging_face(change: dict[str, Any]) -> None:
    cfg = dataclasses.replace(LLAMA, **{"head_dim": 8, **change})
    params, batch = noisy(llama, cfg), batch_of(llama, cfg)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if (s := cfg.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low,
            "high_freq_factor": s.high,
        }
        rope |= {"original_max_position_embeddings": s.original}
    state = {"model.embed_tokens.weight": params["embed/table"], "model.norm.weight": params["head/norm"]}
    if not cfg.tied:
        state["lm_head.weight"] = params["head/table"]
    for i in range(cfg.layers):
        p = {n.split("/")[1]: t for n, t in params.items() if n.startswith(f"block.{i}/")}
        state |= {
            f"model.layers.{i}.{name}": t
            for name, t in {
                "input_layernorm.weight": p["norm_attn"],
                "self_attn.q_proj.weight": into(p["wq"]),
                "self_attn.k_proj.weight": into(p["wk"]),
                "self_attn.v_proj.weight": into(p["wv"]),
                "self_attn.o_proj.weight": out_of(p["wo"]),
                "post_attention_layernorm.weight": p["norm_mlp"],
                "mlp.gate_proj.weight": into(p["w_gate"]),
                "mlp.up_proj.weight": into(p["w_up"]),
                "mlp.down_proj.weight": into(p["w_down"]),
            }.items()
        }
    config = dict(
        config="LlamaConfig", vocab_size=cfg.vocab, hidden_size=cfg.embed, num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads, head_dim=cfg.head_dim,
        intermediate_size=cfg.mlp, rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tied,
        rope_parameters=rope, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = hugging_face("LlamaForCausalLM", config, state)
    with torch.no_grad():
        got, want = reference.logits(llama, cfg, params, batch), model(batch["tokens"]).logits
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_gpt2_logits_equal_hugging_face() -> None:
    params, batch = noisy(gpt2, GPT2), batch_of(gpt2, GPT2)
    state = {
        "transformer.wte.weight": params["embed/table"],
        "transformer.wpe.weight": params["embed/positions"],
        "transformer.ln_f.weight": params["head/norm"],
        "transformer.ln_f.bias": params["head/norm_bias"],
    }
    for i in range(GPT2.layers):
        p = {n.split("/")[1]: t for n, t in params.items() if n.startswith(f"block.{i}/")}
        state |= {
            f"transformer.h.{i}.{name}": t
            for name, t in {
                "ln_1.weight": p["norm_attn"],
                "ln_1.bias": p["norm_attn_bias"],
                "attn.c_attn.weight": torch.cat([p[n].flatten(1) for n in ("wq", "wk", "wv")], 1),
                "attn.c_attn.bias": torch.cat([p[n].flatten() for n in ("bq", "bk", "bv")]),
                "attn.c_proj.weight": p["wo"].flatten(0, 1),
                "attn.c_proj.bias": p["bo"],
                "ln_2.weight": p["norm_mlp"],
                "ln_2.bias": p["norm_mlp_bias"],
                "mlp.c_fc.weight": p["w_up"],
                "mlp.c_fc.bias": p["b_up"],
                "mlp.c_proj.weight": p["w_down"],
                "mlp.c_proj.bias": p["b_down"],
            }.items()
        }
    config = dict(
        config="GPT2Config", vocab_size=GPT2.vocab, n_embd=GPT2.embed, n_layer=GPT2.layers, n_head=GPT2.heads,
        n_positions=GPT2.positions, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = hugging_face("GPT2LMHeadModel", config, state)
    with torch.no_grad():
        got, want = reference.logits(gpt2, GPT2, params, batch), model(batch["tokens"]).logits
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_bert_logits_equal_hugging_face(norm: str) -> None:
    """Pre-norm is Megatron-BERT, which transformers has as a model of its own."""
    cfg = dataclasses.replace(BERT, norm=norm)
    params, batch = noisy(bert, cfg), batch_of(bert, cfg)
    state = {
        "bert.embeddings.word_embeddings.weight": params["embed/table"],
        "bert.embeddings.position_embeddings.weight": params["embed/positions"],
        "bert.embeddings.token_type_embeddings.weight": params["embed/types"],
        "cls.predictions.transform.dense.weight": params["head/w_mlm"].T,
        "cls.predictions.transform.dense.bias": params["head/b_mlm"],
        "cls.predictions.transform.LayerNorm.weight": params["head/norm_mlm"],
        "cls.predictions.transform.LayerNorm.bias": params["head/norm_mlm_bias"],
        "cls.predictions.bias": params["head/b_vocab"],
        "bert.pooler.dense.weight": params["head/w_pool"].T,
        "bert.pooler.dense.bias": params["head/b_pool"],
        "cls.seq_relationship.weight": params["head/w_order"].T,
        "cls.seq_relationship.bias": params["head/b_order"],
    }
    where = "embed" if norm == "post" else "head"
    name = "bert.embeddings.LayerNorm" if norm == "post" else "bert.encoder.ln"
    state |= {f"{name}.weight": params[f"{where}/norm"], f"{name}.bias": params[f"{where}/norm_bias"]}
    norms = ("attention.output.LayerNorm", "output.LayerNorm") if norm == "post" else ("attention.ln", "ln")
    for i in range(cfg.layers):
        p = {n.split("/")[1]: t for n, t in params.items() if n.startswith(f"block.{i}/")}
        state |= {
            f"bert.encoder.layer.{i}.{name}": t
            for name, t in {
                "attention.self.query.weight": into(p["wq"]),
                "attention.self.query.bias": p["bq"].flatten(),
                "attention.self.key.weight": into(p["wk"]),
                "attention.self.key.bias": p["bk"].flatten(),
                "attention.self.value.weight": into(p["wv"]),
                "attention.self.value.bias": p["bv"].flatten(),
                "attention.output.dense.weight": out_of(p["wo"]),
                "attention.output.dense.bias": p["bo"],
                f"{norms[0]}.weight": p["norm_attn"],
                f"{norms[0]}.bias": p["norm_attn_bias"],
                "intermediate.dense.weight": into(p["w_up"]),
                "intermediate.dense.bias": p["b_up"],
                "output.dense.weight": out_of(p["w_down"]),
                "output.dense.bias": p["b_down"],
                f"{norms[1]}.weight": p["norm_mlp"],
                f"{norms[1]}.bias": p["norm_mlp_bias"],
            }.items()
        }
    family = "Bert" if norm == "post" else "MegatronBert"
    config = dict(
        config=f"{family}Config", vocab_size=cfg.vocab, hidden_size=cfg.embed, num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads, intermediate_size=cfg.mlp, max_position_embeddings=cfg.positions,
        layer_norm_eps=cfg.norm_eps,
    )  # fmt: skip
    model = hugging_face(f"{family}ForPreTraining", config, state)
    with torch.no_grad():
        want = model(batch["tokens"], attention_mask=batch["valid"], token_type_ids=batch["types"])
        x = reference.last_activation(bert, cfg, params, batch)
        head = reference.segments(bert, cfg, params)[-1]
    assert want.prediction_logits.std() > 0.1
    torch.testing.assert_close(bert.logits(cfg, head, x, ALONE), want.prediction_logits, rtol=0, atol=1e-5)
    got = bert.order_logits(cfg, head, x, ALONE)
    torch.testing.assert_close(got, want.seq_relationship_logits, rtol=0, atol=1e-5)


# --- parameters ---


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, count: int) -> None:
    module, cfg = models.resolve(preset=preset)
    assert sum(math.prod(p.shape) for p in reference.parameters(module, cfg).values()) == count


def test_presets_of_the_megatron_paper() -> None:
    _, gpt = models.resolve(preset="gpt2-8.3b")
    assert (gpt.layers, gpt.embed, gpt.heads, gpt.vocab, gpt.positions) == (72, 3072, 32, 50257, 1024)
    _, big = models.resolve(preset="bert-3.9b")
    assert (big.layers, big.embed, big.heads, big.vocab, big.positions, big.norm) == (
        48,
        2560,
        40,
        30522,
        512,
        "pre",
    )
    for preset, billions in (("gpt2-8.3b", 8.3), ("bert-3.9b", 3.9)):
        module, cfg = models.resolve(preset=preset)
        count = sum(math.prod(p.shape) for p in reference.parameters(module, cfg).values())
        assert round(count / 1e9, 1) == billions


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_have_the_stated_spread(name: str) -> None:
    module, cfg = MODELS[name]
    cfg = dataclasses.replace(cfg, layers=8, embed=64)
    tree = module.params(cfg)
    values = reference.init(module, cfg)
    for path, t in values.items():
        segment, leaf = path.split("/")
        p = tree[segment.split(".")[0]][leaf]
        if leaf.startswith(("norm", "b")):
            scale = leaf.startswith("norm") and not leaf.endswith("bias")
            assert not p.decay and bool((t == (1.0 if scale else 0.0)).all())
            continue
        std = 0.02 / math.sqrt(2 * 8) if leaf in ("wo", "w_down") else 0.02
        assert p.decay and p.init.std == std
        if t.numel() >= 1024:
            assert t.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * t.numel()))
            assert abs(t.mean().item()) < 5 * std / math.sqrt(t.numel())
    layers = [values[f"block.{i}/w_up"] for i in range(8)]
    assert len({t.sum().item() for t in layers}) == 8  # no two layers alike
    assert not torch.equal(layers[0][:32], layers[0][32:64])


def test_initial_values_depend_on_seed_and_path_and_not_on_padding() -> None:
    a = reference.init(llama, LLAMA)
    assert all(torch.equal(t, reference.init(llama, LLAMA)[n]) for n, t in a.items())
    b = reference.init(llama, LLAMA, seed=1)
    assert not any(torch.equal(t, b[n]) for n, t in a.items() if not n.split("/")[1].startswith("norm"))
    longer = reference.init(llama, dataclasses.replace(LLAMA, vocab=64))
    assert torch.equal(longer["embed/table"][:61], a["embed/table"])


def test_a_tied_head_has_no_storage_of_its_own() -> None:
    assert "head/table" in reference.parameters(llama, LLAMA)
    for name in ("llama-tied-scaled", "gpt2", "bert-post"):
        module, cfg = MODELS[name]
        assert module.params(cfg)["head"]["table"].tied_to == "embed/table"
        assert "head/table" not in reference.parameters(module, cfg)


def test_the_gradient_of_a_tied_table_is_the_sum_of_both_uses() -> None:
    untied, tied = LLAMA, dataclasses.replace(LLAMA, tied=True)
    params, batch = noisy(llama, tied, torch.float64), batch_of(llama, tied)
    _, got = reference.loss_and_grads(llama, tied, params, batch)
    _, parts = reference.loss_and_grads(llama, untied, {**params, "head/table": params["embed/table"]}, batch)
    torch.testing.assert_close(got["embed/table"], parts["embed/table"] + parts["head/table"])


# --- loss and training ---


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_loss_is_the_mean_over_valid_tokens(name: str) -> None:
    module, cfg = MODELS[name]
    params, batch = noisy(module, cfg, torch.float64), batch_of(module, cfg)
    scores = reference.logits(module, cfg, params, batch)
    want = F.cross_entropy(scores.flatten(0, 1), batch["labels"].clamp(min=-1).flatten(), ignore_index=-1)
    torch.testing.assert_close(reference.loss(module, cfg, params, batch), want)


def test_bert_counts_masked_tokens_only_and_class_zero_too() -> None:
    params, batch = noisy(bert, BERT, torch.float64), batch_of(bert, BERT)
    labels = torch.full_like(batch["labels"], -1)
    labels[0, 3], labels[1, 30] = 0, 7
    batch |= {"labels": labels, "order": torch.tensor([0, -1])}
    assert {n: int(t) for n, t in bert.counts(BERT, batch).items()} == {"mlm": 2, "sop": 1}
    scores = reference.logits(bert, BERT, params, batch).log_softmax(-1)
    x = reference.last_activation(bert, BERT, params, batch)
    order = bert.order_logits(BERT, reference.segments(bert, BERT, params)[-1], x, ALONE).log_softmax(-1)
    want = -(scores[0, 3, 0] + scores[1, 30, 7]) / 2 - order[0, 0]
    torch.testing.assert_close(reference.loss(bert, BERT, params, batch), want)
    assert batch["labels"][0, 3] == 0 and (batch["tokens"] >= 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_ignored_labels_alone_give_a_finite_step_without_gradient(name: str) -> None:
    module, cfg = MODELS[name]
    batch = batch_of(module, cfg)
    batch = {n: torch.full_like(t, -1) if n in ("labels", "order") else t for n, t in batch.items()}
    loss, grads = reference.loss_and_grads(module, cfg, noisy(module, cfg), batch)
    assert loss == 0 and not any(g.any() for g in grads.values())


@pytest.mark.parametrize("name", MODELS)
def test_microbatches_with_global_counts_add_up_to_the_batch(name: str) -> None:
    module, cfg = MODELS[name]
    params, batch = noisy(module, cfg, torch.float64), batch_of(module, cfg, batch=4)
    loss, grads = reference.loss_and_grads(module, cfg, params, batch, seed=3, step=5)
    counts = module.counts(cfg, batch)
    parts = [
        reference.loss_and_grads(module, cfg, params, {n: t[i : i + 1] for n, t in batch.items()}, 3, 5, counts)
        for i in range(4)
    ]
    torch.testing.assert_close(sum(p[0] for p in parts), loss)
    for path, g in grads.items():
        torch.testing.assert_close(sum(p[1][path] for p in parts), g)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_finite_differences(name: str) -> None:
    """Along one random direction in all parameters at once."""
    module, cfg = MODELS[name]
    params, batch = noisy(module, cfg, torch.float64), batch_of(module, cfg, seq=12)
    g = torch.Generator().manual_seed(2)
    way = {n: torch.randn(t.shape, generator=g, dtype=torch.float64) for n, t in params.items()}
    _, grads = reference.loss_and_grads(module, cfg, params, batch)
    slope = sum(float((grads[n] * way[n]).sum()) for n in params)
    ahead, behind = (
        float(reference.loss(module, cfg, {n: t + h * way[n] for n, t in params.items()}, batch)) for h in (1e-5, -1e-5)
    )
    assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2-dropout", "bert-dropout"])
def test_dropout_follows_seed_step_and_sample(name: str) -> None:
    module, cfg = MODELS[name]
    params, batch = noisy(module, cfg, torch.float64), batch_of(module, cfg)
    base = float(reference.loss(module, cfg, params, batch))
    assert base == float(reference.loss(module, cfg, params, batch))
    assert base != float(reference.loss(module, cfg, params, batch, seed=1))
    assert base != float(reference.loss(module, cfg, params, batch, step=1))
    assert base != float(reference.loss(module, cfg, params, {**batch, "sample": batch["sample"] + 1}))
    off = dataclasses.replace(cfg, dropout=0.0, attention_dropout=0.0)
    assert base != float(reference.loss(module, off, params, batch))
    # Each kind of dropout takes part by itself.
    for kind in ("dropout", "attention_dropout"):
        assert float(reference.loss(module, dataclasses.replace(off, **{kind: 0.1}), params, batch)) not in (
            base,
            float(reference.loss(module, off, params, batch)),
        )


@pytest.mark.parametrize("name", ["gpt2-dropout", "bert-dropout"])
def test_no_two_dropouts_draw_the_same_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, cfg = MODELS[name]
    drawn: list[tuple[str, int]] = []
    original = rng.keep_mask

    def keep_mask(key: rng.Key, site: str, index: Tensor, rate: float) -> Tensor:
        drawn.append((site, int(key.layer)))
        return original(key, site, index, rate)

    monkeypatch.setattr(rng, "keep_mask", keep_mask)
    reference.loss(module, cfg, noisy(module, cfg), batch_of(module, cfg))
    assert len(drawn) == len(set(drawn)) == 1 + 3 * cfg.layers


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_of_adamw_learn_a_batch(name: str) -> None:
    module, cfg = MODELS[name]
    params, batch = reference.init(module, cfg), batch_of(module, cfg, seq=12)
    decayed = {n: p.decay for n, p in reference.parameters(module, cfg).items()}
    moments, losses = None, []
    for step in range(1, 11):
        loss, grads = reference.loss_and_grads(module, cfg, params, batch, step=step)
        params, moments = reference.adamw(params, grads, moments, decayed, step, lr=1e-2, weight_decay=0.1, clip=1.0)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5


def test_adamw_of_the_reference_is_torchs_and_decays_what_it_should() -> None:
    g = torch.Generator().manual_seed(0)
    start = {n: torch.randn(3, 4, generator=g, dtype=torch.float64) for n in ("w", "norm")}
    leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
    groups = [
        {"params": [leaves["w"]], "weight_decay": 0.1},
        {"params": [leaves["norm"]], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    params, moments = start, None
    for step in range(1, 4):
        grads = {n: torch.randn(3, 4, generator=g, dtype=torch.float64) for n in start}
        for n, t in leaves.items():
            t.grad = grads[n]
        torchs.step()
        params, moments = reference.adamw(params, grads, moments, {"w": True, "norm": False}, step, 0.05, 0.1)
        for n, t in leaves.items():
            torch.testing.assert_close(params[n], t.detach())
    zero = {n: torch.zeros(3, 4, dtype=torch.float64) for n in start}
    after, _ = reference.adamw(start, zero, None, {"w": True, "norm": False}, 1, lr=0.1, weight_decay=0.1)
    torch.testing.assert_close(after["w"], start["w"] * 0.99)
    assert torch.equal(after["norm"], start["norm"])


# --- shape and tracing ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_each_segment_traces_on_fake_tensors_as_one_joint_graph(name: str, dtype: torch.dtype) -> None:
    module, cfg = MODELS[name]
    batch = batch_of(module, cfg, seq=8)
    counts = {n: t.to(torch.float64) for n, t in module.counts(cfg, batch).items()}
    units = reference.segments(module, cfg, reference.init(module, cfg, dtype=dtype))
    x0 = torch.randn(2, 8, cfg.embed, generator=torch.Generator().manual_seed(0)).to(dtype)
    for segment, p in (("embed", units[0]), ("block", units[1]), ("head", units[-1])):

        def joint(
            p: dict[str, Tensor], x: Tensor, batch: dict[str, Tensor], counts: dict[str, Tensor], key:
            rng.Key, segment: str = segment,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            p = {n: t.detach().requires_grad_() for n, t in p.items()}
            x = x.detach().requires_grad_()
            if segment == "embed":
                out = module.embed(cfg, p, batch, key, ALONE)
            elif segment == "block":
                out = module.block(cfg, p, x, batch, key, ALONE)
            else:
                out = module.head_and_loss(cfg, p, x, batch, counts, key, ALONE)
            inputs = [*p.values()] if segment == "embed" else [*p.values(), x]
            return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

        def flat(*args: Any, joint: Any = joint) -> tuple[Tensor, ...]:
            return joint(*args[:-3], rng.Key(*args[-3:]))

        args = (p, x0, batch, counts, *(torch.tensor(n) for n in (3, 4, 5)))
        graph = make_fx(flat, tracing_mode="fake")(*args)
        want = flat(*args)
        for a, b in zip(graph(*args), want, strict=True):
            assert torch.equal(a, b)
        assert all(g.dtype == t.dtype for g, t in zip(want[1:], (*p.values(), x0), strict=False))
        if segment == "head":
            assert want[0].ndim == 0 and torch.finfo(want[0].dtype).bits >= 32
        else:
            assert want[0].dtype == dtype and want[0].shape == x0.shape


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    for module, cfg in (MODELS["gpt2"], MODELS["bert-post"]):
        batch = batch_of(module, cfg, seq=41)
        with pytest.raises(models.ModelError, match=r"41 tokens does not fit model\.positions, 40"):
            reference.last_activation(module, cfg, noisy(module, cfg), batch)


def test_the_llama_block_places_activations_four_times_and_the_example_twice() -> None:
    for name, want in (("llama", 4), ("example", 2)):
        module, cfg = MODELS[name]
        asked: list[str] = []

        def constrain(x: Tensor, axes: str, asked: list[str] = asked) -> Tensor:
            asked.append(axes)
            return x

        p = reference.segments(module, cfg, reference.init(module, cfg))[1]
        on = dataclasses.replace(ALONE, constrain=constrain)
        module.block(cfg, p, torch.zeros(2, 8, cfg.embed), batch_of(module, cfg, seq=8), reference.key(0, 0, 1), on)
        assert asked == ["batch seq embed", "batch res_seq embed"] * (want // 2)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_gathered_once(name: str) -> None:
    module, cfg = MODELS[name]
    batch = batch_of(module, cfg, seq=8)
    units = reference.segments(module, cfg, reference.init(module, cfg))
    seen: list[int] = []

    def gather(t: Tensor) -> Tensor:
        seen.append(id(t))
        return t

    on, key = dataclasses.replace(ALONE, gather=gather), reference.key(0, 0, 0)
    x = module.embed(cfg, units[0], batch, key, on)
    x = module.block(cfg, units[1], x, batch, key, on)
    module.head_and_loss(cfg, units[-1], x, batch, module.counts(cfg, batch), key, on)
    tied = any(p.tied_to for p in module.params(cfg)["head"].values())
    assert len(seen) == len(set(seen)) + tied == sum(len(units[i]) for i in (0, 1, -1))


# --- from words to it ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"family": "lama"}, "family 'lama' does not exist; did you mean 'llama'?"),
        ({"preset": "llama3-7b"}, "preset 'llama3-7b' does not exist; did you mean 'llama3-70b'|'llama3-8b'"),
        ({"file": "nowhere.py"}, "model file '.*nowhere.py' does not exist"),
        ({}, "exactly one of family, preset and file"),
        ({"family": "llama", "preset": "llama3-8b"}, "exactly one of family, preset and file"),
        ({"family": "gpt2", "fields": {"layers": 2}}, "model: missing embed, heads"),
        ({"preset": "gpt2", "fields": {"layer": 2}}, "unknown key 'layer'; did you mean 'layers'?"),
        (
            {"preset": "gpt2", "fields": {"layers": "2"}},
            "model.layers: '2' is not allowed; give a whole number",
        ),
        (
            {"preset": "gpt2", "fields": {"layers": 2.0}},
            "model.layers: 2.0 is not allowed; give a whole number",
        ),
        (
            {"preset": "gpt2", "fields": {"layers": True}},
            "model.layers: True is not allowed; give a whole number",
        ),
        ({"preset": "gpt2", "fields": {"tied": 1}}, "model.tied: 1 is not allowed; give true or false"),
        ({"preset": "gpt2", "fields": {"layers": 0}}, "model.layers: 0 is not allowed"),
        (
            {"preset": "gpt2", "fields": {"dropout": 1}},
            "model.dropout: 1.0 is not allowed; give a rate from 0 to below 1",
        ),
        (
            {"preset": "gpt2", "fields": {"heads": 7}},
            "model.heads: 7 does not divide embed, 768; allowed: 1, 2, 3, 4, 6",
        ),
        (
            {"preset": "llama3-8b", "fields": {"kv_heads": 3}},
            "model.kv_heads: 3 does not divide heads, 32; allowed: 1, 2",
        ),
        ({"preset": "llama3-8b", "fields": {"head_dim": 5}}, "model.head_dim: 5 is odd"),
        (
            {"preset": "gpt2", "fields": {"attention": "flsh"}},
            "model.attention: 'flsh' does not exist; did you mean 'flash'?",
        ),
        (
            {"preset": "gpt2", "fields": {"attention": "flash"}},
            "'flash' has no dropout, but attention_dropout is 0.1",
        ),
        (
            {"preset": "bert-large", "fields": {"norm": "mid"}},
            "model.norm: 'mid' is not allowed; give 'pre' or 'post'",
        ),
        (
            {"preset": "llama3-8b", "fields": {"rope_scaling": {"kind": "yarn"}}},
            "model.rope_scaling.kind: 'yarn' is not allowed; give 'llama3'",
        ),
        (
            {"preset": "llama3-8b", "fields": {"rope_scaling": {"facter": 8}}},
            "model.rope_scaling: unknown key 'facter'; did you mean 'factor'?",
        ),
        (
            {"preset": "llama3-8b", "fields": {"rope_scaling": 8}},
            "model.rope_scaling: 8 is not allowed; give a table of",
        ),
    ],
    ids=str,
)
def test_wrong_words_are_refused_in_one_line(words: dict[str, Any], message: str) -> None:
    with pytest.raises(models.ModelError, match=message.replace("?", r"\?")) as e:
        models.resolve(**words)
    assert "\n" not in str(e.value)


def test_words_become_a_model() -> None:
    assert set(models.presets().values()) == set(models.FAMILIES)
    for preset, family in models.presets().items():
        module, cfg = models.resolve(preset=preset)
        assert module.__name__ == f"dtrain.models.{family}"
        assert module.params(cfg)
    module, cfg = models.resolve(preset="llama3-8b", fields={"layers": 2, "rope_scaling": {"factor": 8}})
    assert (cfg.layers, cfg.embed, cfg.head_dim) == (2, 4096, 128)
    assert cfg.rope_scaling == ops.RopeScaling(factor=8.0)
    _, cfg = models.resolve(family="gpt2", fields={"layers": 2, "embed": 64, "heads": 4, "dropout": 0})
    assert cfg.mlp == 256 and cfg.dropout == 0.0 and cfg.head_dim == 16


def test_the_example_is_a_model_of_ones_own() -> None:
    fields = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "vocab": 61}
    module, cfg = models.resolve(file=EXAMPLE.name, fields=fields, base=EXAMPLE.parent)
    assert module is models.load_file(EXAMPLE)
    params, batch = noisy(module, cfg, torch.float64), batch_of(module, cfg)
    assert not any("norm_mlp" in n for n in params)

    # The parallel block, written out: x + attention(norm(x)) + mlp(norm(x)).
    x = torch.randn(2, 40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = reference.segments(module, cfg, params)[1]
    got = module.block(cfg, p, x, batch, reference.key(0, 0, 1), ALONE)
    h = F.rms_norm(x, (32,), p["norm_attn"], cfg.norm_eps)
    cos, sin = ops.rope_tables(torch.arange(40), 8, cfg.rope_theta, None, torch.float64)
    q, k, v = (torch.einsum("bse,ehk->bshk", h, p[n]) for n in ("wq", "wk", "wv"))
    q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    q, k, v = (rearrange(t, "b s h k -> b h s k") for t in (q, k, v))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    a = torch.einsum("bhsk,hke->bse", a, p["wo"])
    m = (F.silu(h @ p["w_gate"]) * (h @ p["w_up"])) @ p["w_down"]
    torch.testing.assert_close(got, x + a + m)


def test_broken_model_files_are_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    with pytest.raises(models.ModelError, match=r"broken.py' fails to import: ModuleNotFoundError"):
        models.resolve(file=broken)
    half = tmp_path / "half.py"
    half.write_text("from dtrain.models.llama import ACT, BATCH, Config, PRESETS, counts, embed, params\n")
    with pytest.raises(models.ModelError, match=r"half.py' lacks block, head_and_loss; a model has Config"):
        models.resolve(file=half)
    half.write_text(half.read_text() + "from dtrain.models.llama import block, head_and_loss\n")
    assert models.load_file(half).block is llama.block  # an edited file is read again
    data = tmp_path / "model.yaml"
    data.write_text("")
    with pytest.raises(models.ModelError, match="is not Python"):
        models.resolve(file=data)
