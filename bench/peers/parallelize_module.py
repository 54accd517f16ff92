"""Peer of a peer: tensor parallel 2 by torch's own `parallelize_module` with torch.compile.

Only there to show that `explicit_tp.py` is no straw man. Settings: column- and row-wise parallel linear layers, the
table split over the vocabulary, `loss_parallel` for the split logits; the whole model with its loss is compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import task as tasks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from peers.plain_compile import Llama, load, optimizer


class WithLoss(nn.Module):
    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.model.table(tokens)
        for block in self.model.blocks:
            x = block(x, self.model.cos, self.model.sin)
        return F.cross_entropy(self.model.head(x).flatten(0, 1), labels.flatten())


def start(task: Task, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    llama = Llama(task.shape)
    load(llama, task.weights)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head.out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(llama, mesh, plan)
    model = WithLoss(llama)
    optim = optimizer(model)  # its two groups are the split parameters and the whole ones
    forward = torch.compile(model, dynamic=False) if compiled else model
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(x) for x in task.batch(number))
        with loss_parallel():
            loss = forward(tokens, labels)
            loss.backward()
        parts = [nn.utils.get_total_norm([p.grad for p in ps], foreach=True) for ps in (split, whole)]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in parts]).norm()
        for ps in (split, whole):
            nn.utils.clip_grads_with_norm_(ps, tasks.CLIP, norm, foreach=True)
        optim.step()
        optim.zero_grad()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step
