"""A checkpoint of any layout, restored under any other: the same bits in every tensor, and the run goes on."""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import equality
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain import checkpoint, plan, verify
from dtrain import layout as layouts
from dtrain.checkpoint import Piece, Record, tensors
from dtrain.program.interpret import Place
from dtrain.program.lower import Program, lower
from dtrain.program.update import State, UpdateConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAYERS, BATCH = 4, 12
common = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make(family: str, data: st.DataObject, tied: bool, which: str) -> tuple[equality.Case, plan.Plan]:
    """A drawn layout of one fixed model: 61 classes (padded), 2 KV heads (shared where tp is 4), 4 layers."""
    products = [(), *equality.PRODUCTS]
    first = zlib.crc32(f"{family}{which}".encode())  # so that the simplest example is another one everywhere
    dims = products[(first + data.draw(st.integers(0, len(products) - 1), label="dims")) % len(products)]
    sizes = dict(dims)
    replicas, pp = sizes.get("dp", 1) * sizes.get("fsdp", 1), sizes.get("pp", 1)
    micro = data.draw(st.sampled_from([m for m in (1, 2, 3) if BATCH % (replicas * m) == 0]), label="microbatch")
    legal = [s for s in equality.SCHEDULES if s != "interleaved" or (pp == 2 and BATCH // (replicas * micro) % pp == 0)]
    triple = (dims, data.draw(st.sampled_from(legal), label="schedule"), family)
    fixed = {"kv_heads": 2, "vocab": 61, "tied": tied, "norm": "post", "dropout": 0.2, "uneven": False, "seed": 3}
    fixed |= {"labels": "some", "clip": 0.5, "kernel": "auto"}
    drawn = equality.chooser(triple, lambda n: data.draw(st.integers(0, n - 1)))
    case = equality.draw_case(triple, lambda name, options: fixed.get(name, drawn(name, options)))
    stages = pp * (2 if triple[1] == "interleaved" else 1)
    per_stage = [LAYERS // stages + (i < LAYERS % stages) for i in range(stages)]
    overrides = [f"model.layers={LAYERS}", f"data.batch={BATCH}", f"data.microbatch={micro}"]
    overrides += [f"pipeline.layers_per_stage={per_stage}"] if pp > 1 else []
    return case, plan.plan(layouts.loads(case.layout, "layout.yaml", overrides))


Held = list[dict[str, Piece]]  # by rank


def whole(held: Held) -> dict[str, Tensor]:
    """The global tensors that ranks hold together; copies must be the same bits, and nothing may be missing."""
    out: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for mine in held:
        for name, p in mine.items():
            there = tuple(slice(o, o + n) for o, n in zip(p.offsets, p.tensor.shape, strict=True))
            full = out.setdefault(name, torch.zeros(p.shape, dtype=p.tensor.dtype))
            seen = filled.setdefault(name, torch.zeros(p.shape, dtype=torch.bool))
            assert torch.equal(full[there][seen[there]], p.tensor[seen[there]]), name
            full[there], seen[there] = p.tensor, True
    assert all(bool(f.all()) for f in filled.values())
    return out


def moved(family: str, data: st.DataObject, more: int) -> None:
    """A step under a drawn layout, a checkpoint that its ranks write, `more` steps from it under the same layout and
    under another, and each equal to the uninterrupted run."""
    tied = family != "bert" and data.draw(st.booleans(), label="tied")
    case, old = make(family, data, tied, "old")
    _, new = make(family, data, tied, "new")
    assert checkpoint.compare(*(p.layout.model_dump(mode="json") for p in (old, new)))[0] == {}
    batches = equality.make_batches(case, old, 1 + more)
    programs = {id(p): lower(p.job) for p in (old, new)}
    every = tensors.names(programs[id(old)], scaled=False)

    def go(made: plan.Plan, path: Path | None = None) -> tuple[verify.Trained, dict[int, Held]]:
        """All steps, or those after the checkpoint at `path`, and what ranks hold after each."""
        held: dict[int, Held] = {}
        first = 1 if path else 0

        def enter(program: Program, place: Place, state: State) -> None:
            assert path is not None
            for t in state.weights.masters.values():
                t.zero_()  # as train.restore begins: padding is zero
            checkpoint.restore(path, checkpoint.pieces(program, place, state), every, None, 1)
            after(first, program, place, state)

        def after(number: int, program: Program, place: Place, state: State) -> None:
            mine = checkpoint.pieces(program, place, state)
            held.setdefault(number, []).append({k: replace(p, tensor=p.tensor.clone()) for k, p in mine.items()})

        counts = [made.job.module.counts(made.job.config, b) for b in batches[first:]]
        config = UpdateConfig(equality.ADAMW, case.clip)
        lr = lambda step: equality.LR / step  # noqa: E731
        entry = enter if path else None
        program = programs[id(made)]
        return verify.train(
            made, batches[first:], counts, config, lr, case.seed, program, done=first, enter=entry, after=after
        ), held

    straight, held = go(old)
    saved, end = whole(held[1]), whole(held[1 + more])
    assert saved.keys() == every
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        tiny.save_ranks(path, Record(1, {}, ""), held[1])
        again, same = go(old, path)
        other, close = go(new, path)
    for restored in (whole(same[1]), whole(close[1])):
        assert restored.keys() == every and all(torch.equal(restored[k], saved[k]) for k in saved)
    assert repr(again.reports) == repr(straight.reports[1:])  # under the same layout bitwise
    ended = whole(same[1 + more])
    assert all(torch.equal(ended[k], end[k]) for k in end)
    for ours, theirs in zip(other.reports, straight.reports[1:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-9)
    for k, t in whole(close[1 + more]).items():
        assert torch.allclose(t.double(), end[k].double(), rtol=0, atol=1e-9), k


@pytest.mark.parametrize("family", equality.FAMILIES)
@settings(max_examples=2, **common)
@given(data=st.data())
def test_saved_under_one_layout_and_restored_under_another(family: str, data: st.DataObject) -> None:
    moved(family, data, more=1)


@pytest.mark.long
@pytest.mark.parametrize("family", equality.FAMILIES)
@settings(max_examples=20, **common)
@given(data=st.data())
def test_ten_steps_after_a_move(family: str, data: st.DataObject) -> None:
    moved(family, data, more=10)
