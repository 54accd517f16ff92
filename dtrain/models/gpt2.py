"""GPT-2: learned positions, LayerNorm, tanh-GELU, biases, dropout, tied head (Radford et al. 2019).

Shapes: B batch, S seq, E embed, H heads, K head_dim, M mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dtrain import ops
from dtrain.axes import Here, Init, On, Param, ParamTree
from dtrain.models import ModelError, check, check_divides, starts
from dtrain.rng import Key

ACT = "batch res_seq embed"
BATCH = {"tokens": "batch seq", "labels": "batch seq", "sample": "batch"}


@dataclass(frozen=True)
class Config:
    """Sizes. `mlp` 0 means 4 embed and is filled in.

    `dropout` is the rate after the embedding and on each residual branch, `attention_dropout` that on
    attention probabilities, which only the `math` kernel has (`auto` takes it then): set it to 0 for the
    fast kernels. `loss_chunks` are the pieces that head and loss work on. With `document_mask` attention stops at
    documents, whose positions each begin at 0 (batch field `start`), up to `max_documents` a sequence (None: any
    number).
    """

    layers: int
    embed: int
    heads: int
    vocab: int = 50257
    positions: int = 1024
    mlp: int = 0
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-5
    init_std: float = 0.02
    attention: str = "auto"
    loss_chunks: int = 1
    document_mask: bool = False
    max_documents: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp", self.mlp or 4 * self.embed)
        check(self)
        check_divides(self, "heads", "embed")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


PRESETS: dict[str, dict[str, object]] = {
    "gpt2": {"layers": 12, "embed": 768, "heads": 12},
    "gpt2-xl": {"layers": 48, "embed": 1600, "heads": 25},
    "gpt2-8.3b": {"layers": 72, "embed": 3072, "heads": 32},
}


def params(cfg: Config) -> ParamTree:
    """Abstract parameters: `embed`, one `block`, `head`."""
    std = Init("normal", cfg.init_std)
    residual = Init("normal", cfg.init_std / (2 * cfg.layers) ** 0.5)
    E, H, K, M = cfg.embed, cfg.heads, cfg.head_dim, cfg.mlp
    scale = Param((E,), ("embed",), Init("ones"), decay=False)
    bias = Param((E,), ("embed",), Init("zeros"), decay=False)
    into_heads = Param((E, H, K), ("embed", "heads", "head_dim"), std)
    head_bias = Param((H, K), ("heads", "head_dim"), Init("zeros"), decay=False)
    table = Param((cfg.vocab, E), ("vocab", "embed"), std)
    head = Param(table.shape, table.axes, std, tied_to="embed/table" if cfg.tied else None)
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
    return {
        "embed": {"table": table, "positions": Param((cfg.positions, E), ("positions", "embed"), std)},
        "block": block,
        "head": {"norm": scale, "norm_bias": bias, "table": head},
    }


def counts(cfg: Config, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Valid items of each loss term in this batch, 0-dim int64."""
    return {"tokens": (batch["labels"] >= 0).sum()}


def _dropout(cfg: Config, x: Tensor, batch: Mapping[str, Tensor], key: Key, site: str, on: On) -> Tensor:
    if cfg.dropout == 0:
        return x

    def drop(here: Here, x: Tensor, sample: Tensor) -> Tensor:
        return ops.dropout(here, x, ACT, sample, key, site, cfg.dropout)

    return on.island(drop, (ACT, "batch"), ACT)(x, batch["sample"])


def embed(cfg: Config, p: Mapping[str, Tensor], batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """Token ids -> the first activation (ACT)."""
    w = {name: on.gather(t) for name, t in p.items()}
    tokens = batch["tokens"]
    if tokens.shape[1] > cfg.positions:
        raise ModelError(
            f"a sequence of {tokens.shape[1]} tokens does not fit model.positions, {cfg.positions}",
            "positions",
        )

    start = starts(cfg, batch)

    def add_positions(here: Here, x: Tensor, table: Tensor, start: Tensor | None = None) -> Tensor:
        at = ops.positions(here, x, "res_seq", 1)
        return x + (table[at] if start is None else F.embedding(at - start[:, at - here.offset("seq")], table))

    x = on.island(ops.embedding, ("vocab embed", "batch seq"), "batch seq embed +vocab")(w["table"], tokens)
    x = on.constrain(x, ACT)
    axes = (ACT, "positions embed", *["batch seq" for _ in start])
    x = on.island(add_positions, axes, ACT)(x, w["positions"], *start)
    return _dropout(cfg, x, batch, key, "embed", on)


def block(cfg: Config, p: Mapping[str, Tensor], x: Tensor, batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """One layer, ACT -> ACT."""
    w = {name: on.gather(t) for name, t in p.items()}
    rate = cfg.attention_dropout

    start = starts(cfg, batch)

    def attend(here: Here, q: Tensor, k: Tensor, v: Tensor, sample: Tensor, start: Tensor | None = None) -> Tensor:
        k, v = here.cached(k, v)
        if rate == 0:
            most = cfg.max_documents or 0
            return ops.attention(q, k, v, causal=True, kernel=cfg.attention, start_BS=start, documents=most)
        drop = partial(
            ops.dropout,
            here,
            axes="batch heads seq seq",
            sample_B=sample,
            key=key,
            site="attention",
            rate=rate,
        )
        return ops.attention(q, k, v, causal=True, kernel="math", start_BS=start, drop=drop)

    Q = "batch seq heads head_dim"
    h = ops.layer_norm(x, w["norm_attn"], w["norm_attn_bias"], cfg.norm_eps)
    h = on.constrain(h, "batch seq embed")
    q, k, v = (ops.to_heads(h, w[f"w{n}"]) + w[f"b{n}"] for n in "qkv")
    axes = (Q, Q, Q, "batch", *["batch seq" for _ in start])
    a = on.island(attend, axes, Q)(q, k, v, batch["sample"], *start)
    # A bias comes after the sum over ranks, so that it is added once.
    o = on.constrain(ops.from_heads(a, w["wo"]), ACT) + w["bo"]
    x = x + _dropout(cfg, o, batch, key, "attention_residual", on)

    h = ops.layer_norm(x, w["norm_mlp"], w["norm_mlp_bias"], cfg.norm_eps)
    h = on.constrain(h, "batch seq embed")
    m = ops.gelu_tanh(h @ w["w_up"] + w["b_up"])
    o = on.constrain(m @ w["w_down"], ACT) + w["b_down"]
    return x + _dropout(cfg, o, batch, key, "mlp_residual", on)


def _last(cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The last activation, normed (`batch seq embed`), and what makes scores of it (`batch seq vocab`)."""
    w = {name: on.gather(t) for name, t in p.items()}
    table = rearrange(w["table"], "v e -> e v")
    h = on.constrain(ops.layer_norm(x, w["norm"], w["norm_bias"], cfg.norm_eps), "batch seq embed")
    return h, lambda h: h @ table


def logits(cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On) -> Tensor:
    """The last activation -> scores of every token, `batch seq vocab`."""
    h, scores = _last(cfg, p, x, on)
    return scores(h)


def head_and_loss(
    cfg: Config,
    p: Mapping[str, Tensor],
    x: Tensor,
    batch: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    key: Key,
    on: On,
) -> Tensor:
    """The sum of -log p(label) over this batch's valid tokens, divided by `counts["tokens"]`: nats, 0-dim."""

    h, scores = _last(cfg, p, x, on)

    def loss(here: Here, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(here, logits, labels, cfg.vocab).sum() / counts["tokens"]

    def chunk(h: Tensor, labels: Tensor) -> Tensor:
        return on.island(loss, ("batch seq vocab", "batch seq"), "+batch +seq")(scores(h), labels)

    return ops.in_chunks(chunk, cfg.loss_chunks, h, batch["labels"])
