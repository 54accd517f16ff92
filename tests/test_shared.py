"""Programs cut of shared traces are those that lowering the jobs themselves gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch

from dtrain.program import lower, shared
from dtrain.program.lower import Program


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


ZERO = ("shard.optimizer={embed: dp}", "shard.grads={embed: [fsdp, dp]}")
JOBS = (
    ("dp4 tp2", ("shard.optimizer={embed: dp}",)),
    ("fsdp2 tp2", ("run.remat=full",)),
    ("pp2 dp2 fsdp2 tp2", ("run.remat=none", "pipeline.schedule=zero-bubble", *ZERO)),
)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_trace_serves_every_storage_and_pipeline(family: str) -> None:
    """GPT-2 has dropout, which asks where a rank is along the batch's dims; and its table is tied across stages."""
    jobs = [tiny.make(family, mesh, more).job for mesh, more in JOBS]
    (key,) = {repr(shared.alike(job)): shared.alike(job) for job in jobs}.values()
    traced = lower.trace(key)
    for job in jobs:
        same(shared.cut_of(job, traced), lower.lower(job))


def same(one: Program, other: Program) -> None:
    assert one.hashes() == other.hashes()
    for name, s in one.segments.items():
        t = other.segments[name]
        assert replace(s, graphs={}) == replace(t, graphs={})
        assert {k: (g.inputs, g.outputs) for k, g in s.graphs.items()} == {
            k: (g.inputs, g.outputs) for k, g in t.graphs.items()
        }


def test_a_job_alone_is_not_traced_as_one_of_many() -> None:
    alone, many = tiny.make("gpt2", "tp2").job, tiny.make("gpt2", "dp2 tp2").job
    assert shared.alike(alone).trace_dims == ("tp",) and shared.alike(many).trace_dims == ("dp", "tp")
