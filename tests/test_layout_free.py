"""A checkpoint of any layout, restored under any other: the same bits in every tensor, and the run goes on."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import equality
import pytest
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


def whole(held: list[tuple[Program, Place, State]]) -> dict[str, Tensor]:
    """The global tensors that ranks hold together; copies must be the same bits, and nothing may be missing."""
    out: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for program, place, state in held:
        for name, p in checkpoint.pieces(program, place, state).items():
            there = tuple(slice(o, o + n) for o, n in zip(p.offsets, p.tensor.shape, strict=True))
            full = out.setdefault(name, torch.zeros(p.shape, dtype=p.tensor.dtype))
            seen = filled.setdefault(name, torch.zeros(p.shape, dtype=torch.bool))
            assert torch.equal(full[there][seen[there]], p.tensor[seen[there]]), name
            full[there], seen[there] = p.tensor, True
    assert all(bool(f.all()) for f in filled.values())
    assert out.keys() == tensors.names(held[0][0], scaled=False)
    return out


def moved(family: str, data: st.DataObject, more: int, before: int = 1) -> None:
    """`before` steps under a drawn layout, a checkpoint, `more` steps under it and under another, and each equal to the
    uninterrupted run."""
    tied = family != "bert" and data.draw(st.booleans(), label="tied")
    case, old = make(family, data, tied, "old")
    _, new = make(family, data, tied, "new")
    assert checkpoint.compare(*(p.layout.model_dump(mode="json") for p in (old, new)))[0] == {}
    batches = equality.make_batches(case, old, before + more)

    Result = tuple[verify.Trained, dict[str, Tensor]]

    programs = {id(p): lower(p.job) for p in (old, new)}

    def go(made: plan.Plan, first: int, last: int, path: Path | None = None) -> Result:
        """Steps first + 1 to last; from the checkpoint at `path`, which must come back bit for bit."""
        held: list[tuple[Program, Place, State]] = []
        entered: list[tuple[Program, Place, State]] = []

        def enter(program: Program, place: Place, state: State) -> None:
            assert path is not None
            for t in state.weights.masters.values():
                t.zero_()  # as train.restore begins: padding is zero
            pieces = checkpoint.pieces(program, place, state)
            checkpoint.restore(path, pieces, tensors.names(program, scaled=False), None, 1)
            clones = [[t.clone() for t in ts] for ts in (state.moments.exp_avg, state.moments.exp_avg_sq)]
            moments = type(state.moments)(*clones, state.moments.step.clone())
            masters = {k: v.clone() for k, v in state.weights.masters.items()}
            entered.append((program, place, State(type(state.weights)(masters, state.weights.rest), moments, None)))

        todo = batches[first:last]
        counts = [made.job.module.counts(made.job.config, b) for b in todo]
        trained = verify.train(
            made,
            todo,
            counts,
            UpdateConfig(equality.ADAMW, case.clip),
            lambda step: equality.LR / step,
            case.seed,
            programs[id(made)],
            done=first,
            enter=enter if path else None,
            leave=lambda *state: held.append(state),
        )
        if path:
            back = whole(entered)
            assert back.keys() == saved.keys()
            assert all(torch.equal(back[k], saved[k]) for k in saved)
        return trained, whole(held)

    straight, end = go(old, 0, before + more)
    _, saved = go(old, 0, before)
    with tempfile.TemporaryDirectory() as folder:
        mine = {k: Piece(t, (0,) * t.ndim, tuple(t.shape)) for k, t in saved.items()}
        path = checkpoint.save(Path(folder), Record(before, {}, ""), mine)
        again, same = go(old, before, before + more, path)
        other, close = go(new, before, before + more, path)
    assert repr(again.reports) == repr(straight.reports[before:])  # under the same layout bitwise
    assert all(torch.equal(same[k], end[k]) for k in end)
    for ours, theirs in zip(other.reports, straight.reports[before:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-9)
    for k in end:
        assert torch.allclose(close[k].double(), end[k].double(), rtol=0, atol=1e-9), k


@pytest.mark.parametrize("family", equality.FAMILIES)
@settings(max_examples=2, **common)
@given(data=st.data())
def test_saved_under_one_layout_and_restored_under_another(family: str, data: st.DataObject) -> None:
    moved(family, data, more=2)


@pytest.mark.long
@pytest.mark.parametrize("family", equality.FAMILIES)
@settings(max_examples=20, **common)
@given(data=st.data())
def test_ten_steps_after_a_move(family: str, data: st.DataObject) -> None:
    moved(family, data, more=10)
