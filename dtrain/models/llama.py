"""Llama 3: grouped-query attention, rotary positions, RMSNorm, SwiGLU (Grattafiori et al. 2024).

Shapes: B batch, S seq, E embed, H query heads, G key/value heads, K head_dim, M mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    """Sizes. `kv_heads` 0 means as many as `heads`, `head_dim` 0 means embed / heads; both are filled in.

    `attention` is the kernel (`ops.KERNELS`), `loss_chunks` the pieces that head and loss work on; with
    `document_mask` attention stops at documents, whose positions each begin at 0 (batch field `start`), up to
    `max_documents` a sequence (None: any number);
    `rope_scaling` Llama 3.1's table {factor, low, high, original}, `init_std` the standard
    deviation of the weights, those before a residual scaled by 1/sqrt(2 layers).
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: ops.RopeScaling | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    attention: str = "auto"
    loss_chunks: int = 1
    document_mask: bool = False
    max_documents: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if not self.head_dim:
            check_divides(self, "heads", "embed")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        check(self)
        check_divides(self, "kv_heads", "heads")
        if self.head_dim % 2:
            raise ModelError(f"model.head_dim: {self.head_dim} is odd; rotary positions need an even one", "head_dim")


PRESETS: dict[str, dict[str, object]] = {
    "llama3-8b": {"layers": 32, "embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 128256},
    "llama3-70b": {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocab": 128256},
    "llama3.1-405b": {
        "layers": 126, "embed": 16384, "heads": 128, "kv_heads": 8, "mlp": 53248, "vocab": 128256,
        "rope_scaling": {"factor": 8.0},
    },
    "llama3.2-1b": {
        "layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocab": 128256, "tied": True,
        "rope_scaling": {"factor": 32.0},
    },
    "llama3.2-3b": {
        "layers": 28, "embed": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192, "vocab": 128256, "tied": True,
        "rope_scaling": {"factor": 32.0},
    },
}  # fmt: skip


def params(cfg: Config) -> ParamTree:
    """Abstract parameters: `embed`, one `block`, `head`."""
    std = Init("normal", cfg.init_std)
    residual = Init("normal", cfg.init_std / (2 * cfg.layers) ** 0.5)
    E, H, G, K, M = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.mlp
    norm = Param((E,), ("embed",), Init("ones"), decay=False)
    table = Param((cfg.vocab, E), ("vocab", "embed"), std)
    head = Param(table.shape, table.axes, std, tied_to="embed/table" if cfg.tied else None)
    block = {
        "norm_attn": norm,
        "wq": Param((E, H, K), ("embed", "heads", "head_dim"), std),
        "wk": Param((E, G, K), ("embed", "kv_heads", "head_dim"), std),
        "wv": Param((E, G, K), ("embed", "kv_heads", "head_dim"), std),
        "wo": Param((H, K, E), ("heads", "head_dim", "embed"), residual),
        "norm_mlp": norm,
        "w_gate": Param((E, M), ("embed", "mlp"), std),
        "w_up": Param((E, M), ("embed", "mlp"), std),
        "w_down": Param((M, E), ("mlp", "embed"), residual),
    }
    return {"embed": {"table": table}, "block": block, "head": {"norm": norm, "table": head}}


def counts(cfg: Config, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Valid items of each loss term in this batch, 0-dim int64."""
    return {"tokens": (batch["labels"] >= 0).sum()}


def embed(cfg: Config, p: Mapping[str, Tensor], batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """Token ids -> the first activation (ACT)."""
    w = {name: on.gather(t) for name, t in p.items()}
    x = on.island(ops.embedding, ("vocab embed", "batch seq"), "batch seq embed +vocab")(w["table"], batch["tokens"])
    return on.constrain(x, ACT)


def block(cfg: Config, p: Mapping[str, Tensor], x: Tensor, batch: Mapping[str, Tensor], key: Key, on: On) -> Tensor:
    """One layer, ACT -> ACT."""
    w = {name: on.gather(t) for name, t in p.items()}

    start = starts(cfg, batch)

    def attend(here: Here, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None) -> Tensor:
        at = ops.positions(here, q, "seq", 1)
        at = at if start is None else at - start
        cos, sin = ops.rope_tables(at, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, q.dtype)
        q = ops.rotate(q, cos, sin)
        k, v = here.cached(ops.rotate(k, cos, sin), v)
        most = cfg.max_documents or 0
        return ops.attention(q, k, v, causal=True, kernel=cfg.attention, start_BS=start, documents=most)

    Q, KV = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    h = on.constrain(ops.rms_norm(x, w["norm_attn"], cfg.norm_eps), "batch seq embed")
    q, k, v = (ops.to_heads(h, w[name]) for name in ("wq", "wk", "wv"))
    a = on.island(attend, (Q, KV, KV, *["batch seq" for _ in start]), Q)(q, k, v, *start)
    x = x + on.constrain(ops.from_heads(a, w["wo"]), ACT)

    h = on.constrain(ops.rms_norm(x, w["norm_mlp"], cfg.norm_eps), "batch seq embed")
    m = ops.swiglu(h @ w["w_gate"], h @ w["w_up"]) @ w["w_down"]
    return x + on.constrain(m, ACT)


def _last(cfg: Config, p: Mapping[str, Tensor], x: Tensor, on: On) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The last activation, normed (`batch seq embed`), and what makes scores of it (`batch seq vocab`)."""
    w = {name: on.gather(t) for name, t in p.items()}
    table = rearrange(w["table"], "v e -> e v")
    h = on.constrain(ops.rms_norm(x, w["norm"], cfg.norm_eps), "batch seq embed")
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
