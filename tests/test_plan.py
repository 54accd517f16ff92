"""What a layout becomes without a device: the job, the units of each coordinate, the rows of each replica."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch

from dtrain import layout, plan
from dtrain.plan import rows
from dtrain.program.schedule import Action


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("mesh", ["", "dp2", "fsdp4", "dp2 fsdp2", "fsdp2 dp2", "tp2", "tp2 dp2", "pp2 dp2 tp2"])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_rows_are_the_same_batch_under_every_layout(mesh: str, microbatch: int) -> None:
    """Every row of the global batch on exactly one replica and in one microbatch, alike on all its ranks."""
    made = tiny.make("llama", mesh, (f"data.microbatch={microbatch}",))
    m = made.job.mesh
    owners: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(m.world):
        at = m.coordinates(rank)
        replica = tuple(at[d] for d in made.data_dims)
        mine = [list(rows(made, at, mb)) for mb in range(made.microbatches)]
        assert all(len(part) == microbatch for part in mine)
        assert sorted(itertools.chain(*mine)) == list(rows(made, at))
        for row in itertools.chain(*mine):
            owners.setdefault(row, set()).add(replica)
    assert sorted(owners) == list(range(8))
    assert all(len(replicas) == 1 for replicas in owners.values())
    assert made.replicas * made.microbatches * microbatch == 8


def test_the_order_of_rows_follows_the_mesh() -> None:
    made = tiny.make("llama", "dp2 fsdp2")
    assert [list(rows(made, made.job.mesh.coordinates(r))) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("mesh", "more", "units"),
    [
        ("", (), [(0, 1, 2, 3)]),
        ("pp2", (), [(0, 1), (2, 3)]),
        ("pp2", ("model.layers=5", "pipeline.layers_per_stage=[2, 3]"), [(0, 1, 2), (3, 4, 5, 6)]),
        ("pp2", ("model.layers=4", "pipeline.schedule=interleaved"), [(0, 1, 3), (2, 4, 5)]),
        ("pp3", ("model.layers=3", "data.batch=9"), [(0, 1), (2,), (3, 4)]),
    ],
)
def test_every_unit_is_on_one_coordinate(mesh: str, more: tuple[str, ...], units: list[tuple[int, ...]]) -> None:
    made = tiny.make("llama", mesh, more)
    assert list(made.units) == units
    assert sorted(itertools.chain(*made.units)) == list(range(made.job.layers + 2))
    for actions, mine in zip(made.train, made.units, strict=True):
        assert {a.unit for a in actions if a.kind in ("F", "B")} == set(mine)
        assert actions[-1] == Action("UPDATE")


def test_what_is_gathered_and_reduced_early_follows_the_rules() -> None:
    def kinds(mesh: str, *more: str) -> set[tuple[str, bool]]:
        return {(a.kind, a.mb >= 0) for a in tiny.make("llama", mesh, more).train[0]}

    assert ("FREE", False) not in kinds("dp2")
    assert ("FREE", False) in kinds("fsdp2", "unshard.keep=use")
    assert ("REDUCE", True) not in kinds("fsdp2")
    assert ("REDUCE", True) in kinds("fsdp2", "shard.grads={embed: fsdp}")
    evaluated = {a.kind for a in tiny.make("llama", "pp2 fsdp2").evaluate[0]}
    assert evaluated <= {"UNSHARD", "WAIT", "F", "SEND", "RECV", "FREE"}


def test_the_job_has_what_lowering_needs() -> None:
    made = tiny.make("llama", "pp2 dp2 tp2", ("model.tied=true", "run.precision=bf16"))
    job = made.job
    assert (job.dtype, job.master) == (torch.bfloat16, torch.float32)
    assert job.trace_dims == ("dp", "tp")
    assert job.tied_across == (0, 1)
    assert job.pad == {"vocab": 256}
    assert "layers" not in job.compute and "layers" not in job.params
    assert tiny.make("llama", "tp2", ("model.tied=true",)).job.tied_across is None
    assert tiny.make("llama", "tp2").job.master == torch.float64  # of fp64


def test_the_70b_layout_is_what_its_comment_says() -> None:
    """20 layers a node, 8 query heads and one KV head a GPU, at most 4 - s microbatches on stage s."""
    made = plan.plan(layout.load(tiny.LAYOUTS / "llama3-70b-4x8-h100.yaml"))
    assert [sum(0 < u <= 80 for u in units) for units in made.units] == [20] * 4
    assert made.microbatches == 128
    from dtrain.program.lower import store_tree

    block = store_tree(made.job)["block"]
    assert block["wq"].local == (8192, 8, 128) and block["wk"].local == (8192, 1, 128)
    assert block["wk"].share == 1
    for stage, actions in enumerate(made.train):
        flying = peak = 0
        last = max(u for u in made.units[stage] if u <= 80)
        for a in actions:
            flying += (a.kind == "F" and a.unit == last) - (a.kind == "B" and a.unit == last)
            peak = max(peak, flying)
        assert peak == 4 - stage
