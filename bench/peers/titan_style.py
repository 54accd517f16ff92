"""Peer: a Llama in PyTorch as torchtitan runs one on a single GPU: modules, each block compiled, fused AdamW.

Settings: fp32 parameters used in bf16, the residual stream in bf16 as under torchtitan's mixed precision; every block
through `torch.compile(fullgraph=True, dynamic=False)`, the last norm, the head and the loss as one more graph; torch's
own choice of attention kernel; fused AdamW, foreach clipping; nothing is recomputed but what the compiler chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain import ops
from dtrain.models.llama import Config

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
Batch = Callable[[int], tuple[Tensor, Tensor]]  # step, the first 1 -> tokens and labels (batch, seq) on the device


class Linear(nn.Linear):
    """Parameters in fp32, used in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype) * self.weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is batch, heads, seq, head_dim."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.head_dim, width, kv = cfg.head_dim, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.norm_attn, self.norm_mlp = RMSNorm(cfg.embed, cfg.norm_eps), RMSNorm(cfg.embed, cfg.norm_eps)
        self.wq, self.wk, self.wv = (Linear(cfg.embed, n, bias=False) for n in (width, kv, kv))
        self.wo = Linear(width, cfg.embed, bias=False)
        self.w_gate, self.w_up = (Linear(cfg.embed, cfg.mlp, bias=False) for _ in range(2))
        self.w_down = Linear(cfg.mlp, cfg.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_attn(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.norm_mlp(x)
        return x + self.w_down(F.silu(self.w_gate(h)) * self.w_up(h))


class Head(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.embed, cfg.norm_eps)
        self.table = Linear(cfg.embed, cfg.vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean negative log-likelihood of the labels, 0-dim."""
        return F.cross_entropy(self.table(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Llama(nn.Module):
    def __init__(self, cfg: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.cfg, self.dtype = cfg, dtype
        self.table = nn.Embedding(cfg.vocab, cfg.embed)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.head = Head(cfg)
        if cfg.tied:
            self.head.table.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.table(tokens).to(self.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss: Tensor = self.head(x, labels)
        return loss


def load(model: Llama, weights: Mapping[str, Tensor]) -> None:
    """Copy in weights by dtrain's paths; nn.Linear keeps its matrices as (out, in)."""
    state = {}
    for path, w in weights.items():
        unit, name = path.split("/")
        if w.ndim == 3:
            w = w.flatten(0, 1) if name == "wo" else w.flatten(1)
        if unit.startswith("block") and w.ndim == 2:
            w = w.T
        unit = "" if unit == "embed" else unit.replace("block", "blocks") + "."
        state[f"{unit}{name}.weight"] = w
    if model.cfg.tied:
        state["head.table.weight"] = state["table.weight"]
    model.load_state_dict(state)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW; no decay on norms."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, WEIGHT_DECAY), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def start(
    cfg: Config,
    weights: Mapping[str, Tensor] | None,
    batch: Batch,
    microbatches: int,
    device: str,
    dtype: torch.dtype,
    compiled: bool,
) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss. Random weights by default."""
    with torch.device(device):
        model = Llama(cfg, dtype)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=cfg.init_std)
    if weights is not None:
        load(model, weights)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
        model.head.compile(fullgraph=True, dynamic=False)
    seq = batch(1)[0].shape[1]
    at = torch.arange(seq, device=device)
    cos, sin = ops.rope_tables(at, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, dtype)
    optim = optimizer(model)

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        pieces = zip(*(x.chunk(microbatches) for x in batch(number)), strict=True)
        for tokens, labels in pieces:
            loss = model(tokens, labels, cos, sin) / microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optim.step()
        optim.zero_grad()
        return float(total)

    return step
