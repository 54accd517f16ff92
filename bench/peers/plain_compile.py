"""Peer: a plain single-process training loop in PyTorch: modules, autograd, torch.compile, fused AdamW.

Settings: the whole model with its loss is one compiled graph, static shapes, default mode; AdamW is torch's fused
kernel, clipping its foreach one. The loss is read every step, as a log would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import task as tasks
import torch
import torch.nn.functional as F
from task import Shape, Task
from torch import Tensor, nn


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, (seq, head_dim / 2)."""
    half = shape.head_dim // 2
    frequencies = tasks.THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(shape.seq, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is batch, heads, seq, head_dim."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, kv = shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.embed, shape.embed, bias=False)
        self.k = nn.Linear(shape.embed, kv, bias=False)
        self.v = nn.Linear(shape.embed, kv, bias=False)
        self.o = nn.Linear(shape.embed, shape.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1: the number of heads is a part of the model's where these layers are split over processes.
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.embed, shape.mlp, bias=False)
        self.up = nn.Linear(shape.embed, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attn = nn.RMSNorm(shape.embed, tasks.NORM_EPS)
        self.attn = Attention(shape)
        self.norm_mlp = nn.RMSNorm(shape.embed, tasks.NORM_EPS)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm_attn(x), cos, sin)
        return x + self.mlp(self.norm_mlp(x))


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.embed, tasks.NORM_EPS)
        self.out = nn.Linear(shape.embed, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocab, shape.embed)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Head(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean negative log-likelihood of the labels, 0-dim."""
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def load(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy in the weights that all sides start from. nn.Linear keeps its matrices as (out, in)."""
    names = {"norm_attn": "norm_attn", "norm_mlp": "norm_mlp", "wq": "attn.q", "wk": "attn.k", "wv": "attn.v"}
    names |= {"wo": "attn.o", "w_gate": "mlp.gate", "w_up": "mlp.up", "w_down": "mlp.down"}
    state = {}
    for path, value in weights.items():
        unit, name = path.split("/")
        w = torch.tensor(value)
        if unit == "embed":
            state["table.weight"] = w
        elif unit == "head":
            state["head.norm.weight" if name == "norm" else "head.out.weight"] = w
        else:
            w = w.flatten(0, 1) if name == "wo" else w.flatten(1) if w.ndim == 3 else w
            state[f"blocks.{unit.split('.')[1]}.{names[name]}.weight"] = w.T.contiguous() if w.ndim == 2 else w
    model.load_state_dict(state, strict=False)
    missing = {name for name, _ in model.named_parameters()} ^ state.keys()
    if missing:
        raise KeyError(f"weights and model differ in {sorted(missing)}")


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW; no decay on norms."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if tasks.decays(n) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, tasks.WEIGHT_DECAY), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=tasks.LR, betas=(tasks.BETA1, tasks.BETA2), eps=tasks.EPS, fused=True)


def start(task: Task, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss."""
    assert ranks == 1
    model = Llama(task.shape)
    load(model, task.weights)
    optim = optimizer(model)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(x) for x in task.batch(number))
        loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), tasks.CLIP, foreach=True)
        optim.step()
        optim.zero_grad()
        return float(loss.detach())

    return step
