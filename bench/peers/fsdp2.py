"""Peer: torch's FSDP2 (`fully_shard`) over two gloo processes, each with half of the batch.

Settings: each block and the head are compiled on their own, then wrapped, as torchtitan does it; parameters are
gathered for forward and again for backward (`reshard_after_forward=True`, dtrain's `unshard.keep: use`).
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
from torch.distributed.fsdp import fully_shard

from peers.plain_compile import Llama, load, optimizer


class HeadAndLoss(nn.Module):
    """So that logits and loss are compiled together."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Sharded(nn.Module):
    def __init__(self, model: Llama, compiled: bool) -> None:
        super().__init__()
        self.table, self.blocks, self.last = model.table, model.blocks, HeadAndLoss(model.head)
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.blocks, self.last):
            if compiled:
                part.compile(dynamic=False)
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(self, mesh=mesh, reshard_after_forward=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.last(x, labels)


def start(task: Task, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss."""
    dist.init_process_group("gloo")
    llama = Llama(task.shape)
    load(llama, task.weights)
    model = Sharded(llama, compiled)
    optim = optimizer(model)
    each = task.shape.batch // ranks

    def step(number: int) -> float:
        tokens, labels = (torch.from_numpy(x[rank * each : (rank + 1) * each]) for x in task.batch(number))
        loss = model(tokens, labels)
        loss.backward()  # FSDP2 averages over the ranks, and they have as many labels each
        nn.utils.clip_grad_norm_(model.parameters(), tasks.CLIP, foreach=True)
        optim.step()
        optim.zero_grad()
        whole = loss.detach() / ranks
        dist.all_reduce(whole)
        return float(whole)

    return step
