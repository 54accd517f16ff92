"""What a rank allocates while it restores: its own shards, and one tensor's shard beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_convert
import tiny
import torch
from torch.distributed.checkpoint import FileSystemReader

from dtrain import checkpoint, optim, plan, train
from dtrain import layout as layouts
from dtrain.checkpoint import Record
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, Weights, initial_weights
from dtrain.program.lower import Program, lower
from dtrain.program.update import State

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SLACK = 16 * 1024  # scalars, indices


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def made(mesh: str) -> tuple[plan.Plan, Program]:
    """A model whose two largest tensors, 512 KiB each, follow each other on disk, as those of a large model do."""
    dims, params, compute = test_convert.MESHES[mesh]
    heads = "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"
    world = math.prod(int(word.split("}")[0]) for word in dims.split("size: ")[1:])
    p = plan.plan(
        layouts.loads(
            f"cluster: {{gpus_per_node: {world}}}\nmesh: {{{dims}}}\n"
            f"shard: {{params: {{{params.replace('HEADS', heads)}}}, compute: {{{compute.replace('HEADS', heads)}}}}}\n"
            "model: {family: llama, layers: 2, embed: 64, heads: 4, mlp: 2048, vocab: 1000, tied: true}\n"
            "data: {source: synthetic, seq: 8, batch: 12}\nrun: {steps: 2}\n"
        )
    )
    return p, lower(p.job)


def place_of(mesh: str, rank: int) -> Place:
    p, _ = made(mesh)
    return Place(p.job.mesh, rank, {}, p.units[p.job.mesh.coordinates(rank).get("pp", 0)])


def saved(mesh: str, folder: Path) -> Path:
    """A checkpoint that all ranks of a mesh wrote, each its part; moments are twice the weights, and their squares."""
    _, program = made(mesh)
    held = []
    for rank in range(made(mesh)[0].job.mesh.world):
        place = place_of(mesh, rank)
        masters = initial_weights(program, place, 7)
        moments = optim.init(list(masters.values()))
        for i, w in enumerate(masters.values()):
            moments.exp_avg[i].copy_(2 * w)
            moments.exp_avg_sq[i].copy_(w * w)
        held.append(checkpoint.pieces(program, place, State(Weights(masters, masters), moments, None)))
    tiny.save_ranks(folder / "step-1", Record(1, {}, ""), held)
    return folder / "step-1"


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes of tensors at a time, by torch's own count of its allocations."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        kept = work()  # noqa: F841  (what it returns is part of it)
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def largest_on_disk(path: Path) -> int:
    every = FileSystemReader(path).read_metadata().state_dict_metadata.values()
    return max(4 * c.sizes.numel() for t in every for c in t.chunks)  # type: ignore[union-attr]


CASES = [("one", "tp2", 1), ("tp4", "one", 0), ("fsdp3", "tp2xpp2", 3), ("tp2", "fsdp3", 2), ("tp2", "tp2", 0)]


@pytest.mark.parametrize(("before", "after", "rank"), CASES)
def test_a_rank_holds_its_shards_and_one_tensor_beside_them(before: str, after: str, rank: int, tmp_path: Path) -> None:
    path = saved(before, tmp_path)
    (p, program), place = made(after), place_of(after, rank)
    shards = [w.nbytes for w in initial_weights(program, place, 0).values()]
    one = max(*shards, largest_on_disk(path))
    alone: Any = SimpleNamespace(
        program=program, place=place, calls=uncompiled(program), layout=p.layout, folder=tmp_path,
        config=train.update_config(p.layout), rank=SimpleNamespace(world=1, rank=0),
    )  # fmt: skip
    restored: list[State] = []
    with torch.no_grad():
        train.restore(alone, 1)  # what is loaded at the first use of anything is nobody's shard
        most = most_allocated(lambda: restored.append(train.restore(alone, 1)))
        weights = most_allocated(lambda: checkpoint.starting_weights(path, program, place))
    assert 3 * sum(shards) <= most <= 3 * sum(shards) + one + SLACK, (most - 3 * sum(shards)) / one
    assert sum(shards) <= weights <= sum(shards) + one + SLACK, (weights - sum(shards)) / one
    right = initial_weights(program, place, 7)
    (state,) = restored
    for i, (name, w) in enumerate(right.items()):
        assert torch.equal(state.weights.masters[name], w), name
        assert torch.equal(state.moments.exp_avg[i], 2 * w) and torch.equal(state.moments.exp_avg_sq[i], w * w)
