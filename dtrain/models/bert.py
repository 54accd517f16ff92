"""BERT: bidirectional, with a masked-token and a sentence-pair loss (Devlin et al. 2019; Lan et al. 2020).

`norm: post` is the original; `norm: pre` moves LayerNorm to the input of each sublayer, with a last one
before the heads and none after the embedding: the placement that scales (Shoeybi et al. 2019, Fig. 7(b)).

Shapes: B batch, S seq, E embed, H heads, K head_dim, M mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from dtrain import ops
from dtrain.axes import Here, Init, On, Param, ParamTree
from dtrain.models import ModelError, check, check_divides
from dtrain.rng import Key

ACT = "batch res_seq embed"
BATCH = {
    "tokens": "batch seq",
    "labels": "batch seq",  # the original token where masked, else negative
    "types": "batch seq",  # 0 in the first sentence, 1 in the second
    "valid": "batch seq",  # 1 may be attended, 0 padding
    "order": "batch",  # class of the sentence pair, negative to ignore
    "sample": "batch",
}


@dataclass(frozen=True)
class Config:
    """Sizes. `mlp` 0 means 4 embed and is filled in; `types` sentence types, `classes` of the sentence head.

    `dropout` is the rate after the embedding and on each residual branch, `attention_dropout` that on
    attention probabilities, which only the `math` kernel has (`auto` takes it then): set it to 0 for the
    fast kernels. `loss_chunks` are the pieces that head and loss work on.
    """

    layers: int
    embed: int
    heads: int
    vocab: int = 30522
    positions: int = 512
    types: int = 2
    classes: int = 2
    mlp: int = 0
    norm: Literal["pre", "post"] = "post"
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12
    init_std: float = 0.02
    attention: str = "auto"
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp", self.mlp or 4 * self.embed)
        check(self)
        check_divides(self, "heads", "embed")
        if self.norm not in ("pre", "post"):
            raise ModelError(f"model.norm: {self.norm!r} does not exist; allowed: pre, post", "norm")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


PRESETS: dict[str, dict[str, object]] = {
    "bert-large": {"layers": 24, "embed": 1024, "heads": 16},
    "bert-3.9b": {"layers": 48, "embed": 2560, "heads": 40, "norm": "pre"},
}


def params(cfg: Config) -> ParamTree:
    """Abstract parameters: `embed`, one `block`, `head`."""
    std = Init("normal", cfg.init_std)
    residual = Init("normal", cfg.init_std / (2 * cfg.layers) ** 0.5)
    E, H, K, M = cfg.embed, cfg.heads, cfg.head_dim, cfg.mlp
    scale = Param((E,), ("embed",), Init("ones"), decay=False)
    bias = Param((E,), ("embed",), Init("zeros"), decay=False)
    square = Param((E, E), ("embed", "embed_out"), std)
    square_bias = Param((E,), ("embed_out",), Init("zeros"), decay=False)
    into_heads = Param((E, H, K), ("embed", "heads", "head_dim"), std)
    head_bias = Param((H, K), ("heads", "head_dim"), Init("zeros"), decay=False)
    table = Param((cfg.vocab, E), ("vocab", "embed"), std)
    embed = {
        "table": table,
        "positions": Param((cfg.positions, E), ("positions", "embed"), std),
        "types": Param((cfg.types, E), ("types", "embed"), std),
    }
    block = {
        "norm_attn": scale,
        "norm_attn_bias": bias,
        "wq": into_heads,
        "bq": head_bias,
        "wk": into_heads,
        "bk": head_bias,
        "wv": into_heads,
        "bv": head_bias,
        "wo": Param((H, K, E), ("heads", "head_dim", "embed"), residual),
        "bo": bias,
        "norm_mlp": scale,
        "norm_mlp_bias": bias,
        "w_up": Param((E, M), ("embed", "mlp"), std),
        "b_up": Param((M,), ("mlp",), Init("zeros"), decay=False),
        "w_down": Param((M, E), ("mlp", "embed"), residual),
        "b_down": bias,
    }
    head = {
        "w_mlm": square,
        "b_mlm": square_bias,
        "norm_mlm": scale,
        "norm_mlm_bias": bias,
        "table": Param(table.shape, table.axes, std, tied_to="embed/table" if cfg.tied else None),
        "b_vocab": Param((cfg.vocab,), ("vocab",), Init("zeros"), decay=False),
        "w_pool": square,
        "b_pool": square_bias,
        "w_order": Param((E, cfg.classes), ("embed", "classes"), std),
        "b_order": Param((cfg.classes,), ("classes",), Init("zeros"), decay=False),
    }
    norm = {"norm": scale, "norm_bias": bias}
    if cfg.norm == "post":
        return {"embed": {**embed, **norm}, "block": block, "head": head}
    return {"embed": embed, "block": block, "head": {**norm, **head}}


def counts(cfg: Config, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Valid items of each loss term in this batch, 0-dim int64: masked tokens and sentence pairs."""
    return {"mlm": (batch["labels"] >= 0).sum(), "sop": (batch["order"] >= 0).sum()}


def _dropout(cfg: Config, x: Tensor, batch: Mapping[str, Tensor], key: Key, site: str, on: On) -> Tensor:
    if cfg.dropout == 0:
        return x

    def drop(here: Here, x: Tensor, sample: Tensor) -> Tensor:
        return ops.dropout(here, x, ACT, sample, key, site, cfg.dropout)

    return on.island(drop, (ACT, "batch"), ACT)(x, batch["sample"])


def embed(cfg: Config, p: Mapping[str, Tensor], batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """Token ids, types and positions -> the first activation (ACT)."""
    w = {name: on.gather(t) for name, t in p.items()}
    tokens = batch["tokens"]
    if tokens.shape[1] > cfg.positions:
        raise ModelError(
            f"a sequence of {tokens.shape[1]} tokens does not fit model.positions, {cfg.positions}",
            "positions",
        )

    def add_positions(here: Here, x: Tensor, positions: Tensor, types: Tensor, ids: Tensor) -> Tensor:
        at = ops.positions(here, x, "res_seq", 1)
        kind = ids[:, at - here.offset("seq"), None] == torch.arange(cfg.types, device=ids.device)
        # A product with 0/1 sums the few rows' gradients in fp32, where an index would add them in x's dtype.
        return x + positions[at] + kind.to(x.dtype) @ types

    x = on.island(ops.embedding, ("vocab embed", "batch seq"), "batch seq embed +vocab")(w["table"], tokens)
    x = on.constrain(x, ACT)
    x = on.island(add_positions, (ACT, "positions embed", "types embed", "batch seq"), ACT)(
        x, w["positions"], w["types"], batch["types"]
    )
    if cfg.norm == "post":
        x = ops.layer_norm(x, w["norm"], w["norm_bias"], cfg.norm_eps)
    return _dropout(cfg, x, batch, key, "embed", on)


def block(cfg: Config, p: Mapping[str, Tensor], x: Tensor, batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """One layer, ACT -> ACT."""
    w = {name: on.gather(t) for name, t in p.items()}
    rate, pre = cfg.attention_dropout, cfg.norm == "pre"

    def attend(here: Here, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, sample: Tensor) -> Tensor:
        if rate == 0:
            return ops.attention(q, k, v, causal=False, kernel=cfg.attention, valid_BT=valid)
        drop = partial(
            ops.dropout,
            here,
            axes="batch heads seq seq",
            sample_B=sample,
            key=key,
            site="attention",
            rate=rate,
        )
        return ops.attention(q, k, v, causal=False, kernel="math", valid_BT=valid, drop=drop)

    def norm(x: Tensor, name: str) -> Tensor:
        return ops.layer_norm(x, w[name], w[f"{name}_bias"], cfg.norm_eps)

    Q = "batch seq heads head_dim"
    h = on.constrain(norm(x, "norm_attn") if pre else x, "batch seq embed")
    q, k, v = (ops.to_heads(h, w[f"w{n}"]) + w[f"b{n}"] for n in "qkv")
    a = on.island(attend, (Q, Q, Q, "batch seq", "batch"), Q)(q, k, v, batch["valid"], batch["sample"])
    # A bias comes after the sum over ranks, so that it is added once.
    o = on.constrain(ops.from_heads(a, w["wo"]), ACT) + w["bo"]
    x = x + _dropout(cfg, o, batch, key, "attention_residual", on)
    x = x if pre else norm(x, "norm_attn")

    h = on.constrain(norm(x, "norm_mlp") if pre else x, "batch seq embed")
    m = ops.gelu(h @ w["w_up"] + w["b_up"])
    o = on.constrain(m @ w["w_down"], ACT) + w["b_down"]
    x = x + _dropout(cfg, o, batch, key, "mlp_residual", on)
    return x if pre else norm(x, "norm_mlp")


def _heads(
    cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On
) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
    """The transformed last activation (`batch seq embed`), what makes scores of every token of it (`batch seq vocab`),
    and the scores of the sentence pair (`batch classes`)."""
    w = {name: on.gather(t) for name, t in p.items()}
    if cfg.norm == "pre":
        x = ops.layer_norm(x, w["norm"], w["norm_bias"], cfg.norm_eps)

    def first_token(here: Here, x: Tensor) -> Tensor:
        return x[:, 0] * (here.offset("res_seq") == 0)

    first = on.constrain(on.island(first_token, (ACT,), "batch embed +res_seq")(x), "batch embed")
    pooled = torch.tanh(first @ w["w_pool"] + w["b_pool"])
    order = pooled @ w["w_order"] + w["b_order"]

    # Each rank transforms its own positions. An island, because DTensor cannot flatten (batch, res_seq) for a
    # product when different dims cut both.
    def transform(here: Here, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    h = on.island(transform, (ACT, "embed embed_out"), "batch res_seq embed_out")(x, w["w_mlm"])
    h = ops.gelu(h + w["b_mlm"])
    h = ops.layer_norm(h, w["norm_mlm"], w["norm_mlm_bias"], cfg.norm_eps)
    table = rearrange(w["table"], "v e -> e v")
    return on.constrain(h, "batch seq embed"), lambda h: h @ table + w["b_vocab"], order


def logits(cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On) -> Tensor:
    """The last activation -> scores of every token, `batch seq vocab`."""
    h, scores, _ = _heads(cfg, p, x, on)
    return scores(h)


def order_logits(cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On) -> Tensor:
    """The last activation -> scores of the sentence pair's classes, `batch classes`."""
    return _heads(cfg, p, x, on)[2]


def head_and_loss(
    cfg: Config,
    p: Mapping[str, Tensor],
    x: Tensor,
    batch: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    key: Key,
    on: On,
) -> Tensor:
    """Masked-token plus sentence loss in nats, 0-dim: each this batch's sum over valid items / its count."""

    def token_loss(here: Here, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(here, logits, labels, cfg.vocab).sum() / counts["mlm"]

    def order_loss(here: Here, logits: Tensor, order: Tensor, labels: Tensor) -> Tensor:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        picked = scores.log_softmax(-1).gather(1, order.clamp(min=0)[:, None])[:, 0]
        loss = -picked.masked_fill(order < 0, 0.0).sum() / counts["sop"]
        return loss * (here.offset("seq") == 0)  # counted once where `seq` is split

    h, scores, order = _heads(cfg, p, x, on)

    def chunk(h: Tensor, labels: Tensor) -> Tensor:
        return on.island(token_loss, ("batch seq vocab", "batch seq"), "+batch +seq")(scores(h), labels)

    mlm = ops.in_chunks(chunk, cfg.loss_chunks, h, batch["labels"])
    sop = on.island(order_loss, ("batch classes", "batch", "batch seq"), "+batch +seq")(
        order, batch["order"], batch["labels"]
    )
    return mlm + sop
