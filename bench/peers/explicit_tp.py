"""Peer: tensor parallel 2 written by hand as in Megatron-LM (Shoeybi et al. 2019), over gloo.

Column-parallel projections into the heads and the MLP, row-parallel ones out of them, an all-reduce after each
row-parallel one and in the backward of what feeds the column-parallel ones; table, logits and loss split over the
vocabulary. Settings: the whole model with its loss is one compiled graph, static shapes; fused AdamW on each rank's
part; the gradient norm is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import task as tasks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Shape, Task
from torch import Tensor, nn

from peers.plain_compile import rope_tables, rotate

c10d = torch.ops._c10d_functional


def all_reduce(x: Tensor, how: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, how, dist.group.WORLD.group_name))


class Copy(torch.autograd.Function):
    """Into the split part: identity, and an all-reduce of the gradient (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad.contiguous())


class Reduce(torch.autograd.Function):
    """Out of the split part: an all-reduce, and identity for the gradient (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


class VocabParallelLoss(torch.autograd.Function):
    """The mean negative log-likelihood over split logits (tokens, vocab / ranks)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        local = labels - first
        mine = (local >= 0) & (local < logits.shape[1])
        shifted = logits - all_reduce(logits.amax(-1), "max")[:, None]
        target = shifted.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].masked_fill(~mine, 0.0)
        e = shifted.exp()
        total, target = all_reduce(torch.stack((e.sum(-1), target)))
        ctx.save_for_backward(e / total[:, None], local)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, local = ctx.saved_tensors
        hot = torch.arange(probabilities.shape[1]) == local[:, None]
        return (probabilities - hot.float()) * (grad / probabilities.shape[0]), None, None


class Llama(nn.Module):
    """One rank's part. Matrices are (out, in), as nn.Linear's are."""

    cos: Tensor
    sin: Tensor

    def __init__(self, task: Task, rank: int, ranks: int) -> None:
        super().__init__()
        self.shape: Shape = task.shape
        self.first = rank * task.shape.vocab // ranks

        def part(path: str, at: int | None) -> nn.Parameter:
            """A weight, cut along its axis `at`."""
            w = torch.tensor(task.weights[path])
            w = w if at is None else w.chunk(ranks, at)[rank]
            if w.ndim == 3:
                w = w.flatten(0, 1) if path.endswith("wo") else w.flatten(1)
            inner = path.startswith("block") and w.ndim == 2
            return nn.Parameter((w.T if inner else w).contiguous())

        cut = {"norm_attn": None, "norm_mlp": None, "wo": 0, "w_down": 0}
        names = ("norm_attn", "wq", "wk", "wv", "wo", "norm_mlp", "w_gate", "w_up", "w_down")
        self.blocks = nn.ModuleList(
            nn.ParameterDict({n: part(f"block.{i}/{n}", cut.get(n, 1)) for n in names})
            for i in range(task.shape.layers)
        )
        self.table = part("embed/table", 0)
        self.norm, self.out = part("head/norm", None), part("head/table", 0)
        cos, sin = rope_tables(task.shape)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        local = tokens - self.first
        rows = F.embedding(local.clamp(0, self.table.shape[0] - 1), self.table)
        mine = (local >= 0) & (local < self.table.shape[0])
        x = Reduce.apply(rows.masked_fill(~mine[..., None], 0.0))
        for p in self.blocks:
            h = Copy.apply(F.rms_norm(x, (self.shape.embed,), p["norm_attn"], tasks.NORM_EPS))
            q, k, v = (
                F.linear(h, p[w]).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for w in ("wq", "wk", "wv")
            )
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + Reduce.apply(F.linear(y.transpose(1, 2).flatten(2), p["wo"]))
            h = Copy.apply(F.rms_norm(x, (self.shape.embed,), p["norm_mlp"], tasks.NORM_EPS))
            x = x + Reduce.apply(F.linear(F.silu(F.linear(h, p["w_gate"])) * F.linear(h, p["w_up"]), p["w_down"]))
        h = Copy.apply(F.rms_norm(x, (self.shape.embed,), self.norm, tasks.NORM_EPS))
        return VocabParallelLoss.apply(F.linear(h, self.out).flatten(0, 1), labels.flatten(), self.first)


def start(task: Task, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss."""
    dist.init_process_group("gloo")
    model = Llama(task, rank, ranks)
    split = [p for n, p in model.named_parameters() if tasks.decays(n)]
    whole = [p for n, p in model.named_parameters() if not tasks.decays(n)]  # norms, the same on all ranks
    groups = [{"params": split, "weight_decay": tasks.WEIGHT_DECAY}, {"params": whole, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=tasks.LR, betas=(tasks.BETA1, tasks.BETA2), eps=tasks.EPS, fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(x) for x in task.batch(number))
        loss = forward(tokens, labels)
        loss.backward()
        square, same = (nn.utils.get_total_norm([p.grad for p in ps], foreach=True).square() for ps in (split, whole))
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(split + whole, tasks.CLIP, (square + same).sqrt(), foreach=True)
        optim.step()
        optim.zero_grad()
        return float(loss.detach())

    return step
