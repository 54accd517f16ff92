"""The interpreter: what is alive when, what is freed, and what is seen of it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from dtrain import optim, storage, verify
from dtrain.mesh import Groups, Mesh, pipeline_groups, simulate
from dtrain.plan import rows
from dtrain.program import interpret, schedule
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Calls, Place, Step, initial_weights, owned, owns_for_norm, publish, unit_path
from dtrain.program.schedule import Action
from dtrain.program.update import UpdateConfig


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


Watch = Callable[[int, int, Action], None]


def run_step(
    key: tuple[str, str, tuple[str, ...]],
    watch: Watch,
    wrap: Callable[[Calls], Calls] = lambda calls: calls,
    evaluate: bool = False,
) -> list[tuple[Place, Tensor, dict[str, Tensor]]]:
    """One step of a tiny model on simulated ranks; `watch(rank, position, action)` sees every action. Of each rank
    its place, its part of the loss and the gradients it reduced."""
    made, program = tiny.make(*key), tiny.program(*key)
    calls = wrap(uncompiled(program))
    batch = verify.random_batch(made, 0, 1)
    counts = made.job.module.counts(made.job.config, batch)
    names = {*program.groups(), *(["world"] if made.job.mesh.world > 1 else []), *pipeline_groups(made.job.mesh)}

    def work(rank: int, groups: Groups) -> tuple[Place, Tensor, dict[str, Tensor]]:
        place = Place(made.job.mesh, rank, groups, made.units[made.job.mesh.coordinates(rank).get("pp", 0)])
        weights = publish(program, calls, place, initial_weights(program, place, 0))
        seen: dict[str, Tensor] = {}

        def local(mb: int) -> Mapping[str, Tensor]:
            return {k: v[list(rows(made, place.at, mb))] for k, v in batch.items()}

        step = Step(
            1, 0, local, counts, torch.ones(()), lambda grads, loss: seen.update(grads), functools.partial(watch, rank)
        )
        actions = (made.evaluate if evaluate else made.train)[place.at.get("pp", 0)]
        loss = interpret.run(interpret.bind(program, calls, place, actions), weights, step)
        return place, loss, seen

    return simulate(made.job.mesh, sorted(names), work)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """The values in flight of every rank's step, by thread."""
    found: dict[int, Any] = {}
    right = interpret._Slots

    def make(*args: Any) -> Any:
        found[threading.get_ident()] = made = right(*args)
        return made

    monkeypatch.setattr(interpret, "_Slots", make)
    return found


PIPELINE = ("model.layers=4", "data.batch=8", "pipeline.schedule=1f1b")


def test_microbatches_in_flight_under_1f1b(slots: dict[int, Any]) -> None:
    """Four stages, eight microbatches: 4, 3, 2 and 1 are between their forward and their backward."""
    key = ("llama", "pp4", PIPELINE)
    peak: dict[int, int] = defaultdict(int)

    def watch(rank: int, position: int, action: Action) -> None:
        flying = {mb for _, mb in slots[threading.get_ident()].saved}
        peak[rank] = max(peak[rank], len(flying))

    run_step(key, watch)
    assert [peak[r] for r in range(4)] == [4, 3, 2, 1]


def test_gpipe_holds_every_microbatch(slots: dict[int, Any]) -> None:
    key = ("llama", "pp4", (*PIPELINE[:2], "pipeline.schedule=gpipe"))
    peak: dict[int, int] = defaultdict(int)

    def watch(rank: int, position: int, action: Action) -> None:
        peak[rank] = max(peak[rank], len({mb for _, mb in slots[threading.get_ident()].saved}))

    run_step(key, watch)
    assert [peak[r] for r in range(4)] == [8] * 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_nothing_is_left_at_the_end(schedule: str, slots: dict[int, Any]) -> None:
    key = ("llama", "pp2 fsdp2", (f"pipeline.schedule={schedule}", "unshard.keep=step"))
    run_step(key, lambda *a: None)
    assert len(slots) == 4
    for s in slots.values():
        assert not s.saved and not s.act and not s.grad and not s.accumulated and not s.params and not s.flying


def test_saved_values_and_gathered_parameters_are_freed() -> None:
    """By weak reference: dead after the backward, and after the FREE, that are their last readers."""
    key = ("llama", "fsdp2", ("unshard.keep=use", "data.batch=4"))
    kept: dict[tuple[int, str, int], list[weakref.ref[Tensor]]] = defaultdict(list)
    current: dict[int, Action] = {}
    freed = {"B": 0, "FREE": 0}
    ranks: dict[int, int] = {}

    def note(name: tuple[str, str], fn: Any) -> Any:
        def call(*args: Tensor) -> Any:
            out = fn(*args)
            me = threading.get_ident()
            a = current.get(me)
            if a is not None and name[1] in ("unshard", "forward"):
                kind = "params" if name[1] == "unshard" else f"saved {a.mb}"
                fresh = out if name[1] == "unshard" else out[1:]
                inputs = {id(x) for x in args}
                kept[me, kind, a.unit] = [weakref.ref(x) for x in fresh if id(x) not in inputs]
            return out

        return call

    def watch(rank: int, position: int, action: Action) -> None:
        me = threading.get_ident()
        ranks[me] = rank
        last = current.get(me)
        if last is not None and last.kind in ("B", "FREE"):
            kind = "params" if last.kind == "FREE" else f"saved {last.mb}"
            refs = kept.pop((me, kind, last.unit), [])
            assert all(r() is None for r in refs), f"after {last}"
            freed[last.kind] += len(refs)
        current[me] = action

    run_step(key, watch, lambda calls: {k: note(k, v) for k, v in calls.items()})
    assert freed["B"] > 0 and freed["FREE"] > 0


@pytest.mark.parametrize("keep", ["step", "forward", "use"])
def test_free_drops_gathered_parameters(keep: str, slots: dict[int, Any]) -> None:
    key = ("llama", "fsdp2", (f"unshard.keep={keep}", "data.batch=4"))
    peak: dict[int, int] = defaultdict(int)

    def watch(rank: int, position: int, action: Action) -> None:
        mine = slots[threading.get_ident()]
        coming = {unit for what, unit, _ in mine.flying if what == "params"}
        peak[rank] = max(peak[rank], len(set(mine.params) | coming))
        if action.kind in ("F", "B"):
            assert action.unit in mine.params

    run_step(key, watch)
    assert peak[0] == {"step": 4, "forward": 4, "use": 2}[keep]  # one is gathered ahead


def test_watch_sees_every_action_before_it_runs() -> None:
    key = ("llama", "pp2", ("data.batch=4",))
    seen: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    run_step(key, lambda rank, position, action: seen[rank].append((position, action)))
    for rank in range(2):
        assert [p for p, _ in seen[rank]] == list(range(len(tiny.make(*key).train[rank])))
        assert [a for _, a in seen[rank]] == list(tiny.make(*key).train[rank])


def test_the_loss_is_on_the_last_stage_alone() -> None:
    key = ("llama", "pp2", ("data.batch=4",))
    (_, first, _), (_, last, _) = run_step(key, lambda *a: None)
    assert float(first) == 0.0 and 3 < float(last) < 6  # ln 61 = 4.1


def test_evaluation_keeps_nothing(slots: dict[int, Any]) -> None:
    key = ("llama", "fsdp2", ("unshard.keep=use",))
    run_step(key, lambda *a: None, evaluate=True)
    assert all(not s.saved and not s.params and not s.flying for s in slots.values())


def test_paths_of_units() -> None:
    assert [unit_path(u, 2, "w") for u in range(4)] == ["embed/w", "block.0/w", "block.1/w", "head/w"]


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp2 tp2", ()),
        ("tp4", ()),
        ("dp2 fsdp2", ()),
        ("dp2 tp2", ("shard.optimizer.embed=dp",)),
        ("pp2 tp2", ("model.tied=true",)),
        ("fsdp3 tp2", ("data.batch=6",)),
    ],
)
def test_each_element_is_counted_once(mesh: str, more: tuple[str, ...]) -> None:
    """Over all ranks, `owns_for_norm` picks every element of every parameter exactly once."""
    program = tiny.program("llama", mesh, more)
    made = tiny.make("llama", mesh, more)
    hits: dict[str, Tensor] = {}
    for rank in range(made.job.mesh.world):
        place = Place(made.job.mesh, rank, {}, made.units[made.job.mesh.coordinates(rank).get("pp", 0)])
        for path, (s, _, _) in owned(program, place.units).items():
            hits.setdefault(s.param.tied_to or path, torch.zeros(s.real, dtype=torch.int64))
            if owns_for_norm(program, place, path, s):
                spans = storage.spans(s, place.mesh, place.at, len(s.steps))
                hits[path][tuple(slice(p.start, p.stop) for p in spans)] += 1
    assert len(hits) == 2 * 9 + 2 + ("model.tied=true" not in more)
    for path, count in hits.items():
        assert (count == 1).all(), path


def test_one_process_needs_no_groups() -> None:
    key = ("gpt2", "", ("data.batch=2",))
    ((place, loss, grads),) = run_step(key, lambda *a: None)
    assert place.mesh == Mesh(()) and float(loss) > 0
    assert grads.keys() == owned(tiny.program(*key), place.units).keys()


def test_a_gradient_becomes_its_own_sum_only_where_its_memory_is_its_own() -> None:
    """A graph may return a tensor twice, a view of an input, or a piece of something larger."""
    given, whole = torch.ones(2), torch.arange(4.0)
    fresh, twice, half = torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    out = [fresh, twice, twice, given.view(2), whole[:2], half]
    busy = interpret._addresses([given]) + interpret._addresses(out)
    keys = ["fresh", "twice", "again", "input", "piece", "bf16"]
    sums: dict[Any, Tensor] = {}
    interpret._accumulate(sums, keys, out, busy, torch.float32)
    assert sums["fresh"] is fresh  # no copy
    for key, x in zip(keys[1:], out[1:], strict=True):
        assert sums[key].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert sums[key].dtype == torch.float32
    more = [torch.full((2,), float(i)) for i in range(6)]
    interpret._accumulate(sums, keys, more, busy, torch.float32)
    assert [float(sums[k][1]) for k in keys] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert given.tolist() == [1.0, 1.0] and twice.tolist() == [1.0, 1.0] and whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_actions_that_differ_in_their_microbatch_share_what_is_bound() -> None:
    made, program = tiny.make("llama", "", ("data.batch=8",)), tiny.program("llama", "", ("data.batch=8",))
    place = Place(made.job.mesh, 0, {}, made.units[0])
    bound = interpret.bind(program, uncompiled(program), place, made.train[0])
    assert len(bound.ops) == len(made.train[0]) > 64
    alike = {(a.kind, a.unit, a.mb < 0, a.what) for a in bound.actions}
    assert len({id(op) for op in bound.ops}) == len(alike)


@pytest.mark.parametrize(
    "key",
    [
        ("llama", "fsdp2", ("shard.grads={embed: fsdp}", "data.batch=6")),
        ("gpt2", "pp2 fsdp2", ("pipeline.schedule=zero-bubble", "unshard.keep=forward", "data.batch=6")),
        ("llama", "dp2 tp2", ("shard.optimizer.embed=dp", "shard.grads={embed: dp}", "data.batch=6")),
    ],
)
def test_overlap_changes_no_bit(key: tuple[str, str, tuple[str, ...]]) -> None:
    """Two steps under every pair of prefetch distance and reductions in flight: losses, gradients and parameters."""
    program = tiny.program(*key)
    batches = [verify.random_batch(tiny.make(*key), 0, n) for n in (1, 2)]
    results = []
    for distance, most in [(0, 0), (1, 1), (2, 0), (0, 2), (2, 2)]:
        made = tiny.make(key[0], key[1], (*key[2], f"unshard.prefetch={distance}"))
        lists = tuple(tuple(schedule.defer(todo, most)) for todo in made.train)
        if most == 1:
            assert lists == made.train
        made = replace(made, train=lists)
        counts = [made.job.module.counts(made.job.config, b) for b in batches]
        config = UpdateConfig(optim.Adamw(), 1.0)
        results.append(verify.train(made, batches, counts, config, lambda step: 0.01, 0, program))
    first = results[0]
    for other in results[1:]:
        assert other.reports == first.reports
        for a, b in ((first.grads, other.grads), (first.params, other.params)):
            for x, y in zip(a, b, strict=True):
                assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
