"""Simulated streams: bubbles follow the known formulas, transfers meet, collectives overlap as far as they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from dtrain.plan.seconds import Piece
from dtrain.plan.timeline import COMPUTE, Timeline, simulate
from dtrain.program.schedule import Action, Keep, Schedule, actions, compute_order, coordinate_of, unit_ranges

HALVES = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def lists(
    schedule: Schedule, pp: int, chunks: int, microbatches: int, keep: Keep = "step", gathered: Sequence[int] = ()
) -> list[list[Action]]:
    """A layer a stage; the embedding and the head besides."""
    stages, owner = unit_ranges([1] * pp * chunks), coordinate_of(schedule, pp, chunks)
    return actions(compute_order(schedule, pp, chunks, microbatches), stages, owner, keep=keep, gathered=gathered)


def run(
    todo: Sequence[Sequence[Action]],
    took: Mapping[str, float],
    transfer: float = 0.0,
    wire: float = 0.0,
    **starts: float,
) -> Timeline:
    """Layers take `took` by kind, with `wire` seconds of collectives in each; the embedding and the head take nothing.
    `unshard` and `reduce` are the seconds of a collective that an action starts."""
    head = max(a.unit for todo in todo for a in todo)

    def work(pp: int, a: Action) -> Sequence[Piece]:
        if a.kind in took:
            return (Piece("run", took[a.kind], wire),) if 0 < a.unit < head else ()
        if 0 < a.unit < head and a.kind in ("UNSHARD", "REDUCE") and a.kind.lower() in starts:
            return (Piece("start", starts[a.kind.lower()], stream=a.kind.lower(), name="x"),)
        if 0 < a.unit < head and a.what in ("params", "grads"):
            return (Piece("wait", name="x"),) if {"params": "unshard", "grads": "reduce"}[a.what] in starts else ()
        return ()

    return simulate(todo, work, lambda pp, a: transfer)


# ------------------------------------------------------------------------------------------------------ bubbles


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (4, 1), (4, 4), (4, 32), (8, 24)])
def test_the_bubble_of_1f1b_and_gpipe(schedule: Schedule, pp: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1) of the step (Narayanan et al. 2021, section 2.2)."""
    got = run(lists(schedule, pp, 1, microbatches), HALVES)
    assert got.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert got.step == pytest.approx(3 * (microbatches + pp - 1))
    assert got.busy == pytest.approx([3.0 * microbatches] * pp) and got.exposed == 0


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(4, 2, 8), (4, 3, 16), (8, 2, 24)])
def test_the_bubble_of_interleaved(pp: int, chunks: int, microbatches: int) -> None:
    """(p - 1) / (v m + p - 1): v chunks make it v times smaller (the same section)."""
    got = run(lists("interleaved", pp, chunks, microbatches), HALVES)
    assert got.bubble == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_the_bubble_of_zero_bubble(pp: int, microbatches: int) -> None:
    """ZB-H1: (p - 1) F idle in 3 m F + (p - 1) F, a third of 1F1B's (Qi et al. 2023, section 2.3)."""
    got = run(lists("zero-bubble", pp, 1, microbatches), HALVES)
    assert got.bubble == pytest.approx((pp - 1) / (3 * microbatches + pp - 1))


def test_zbv_idles_least() -> None:
    """Two chunks a coordinate: p - 1 stages' F, where the interleaved schedule idles p - 1 F, I and W."""
    pp, m = 4, 12
    zbv, interleaved = (run(lists(s, pp, 2, m), HALVES) for s in ("zbv", "interleaved"))
    assert zbv.busy == interleaved.busy == pytest.approx([6.0 * m] * pp)
    assert zbv.bubble * zbv.step == pytest.approx(pp - 1)
    assert interleaved.bubble * interleaved.step == pytest.approx(3 * (pp - 1))


# ----------------------------------------------------------------------------------------------------- transfers


def test_transfers_stand_in_the_way_of_one_microbatch() -> None:
    """F, send, F, B, send, B: nothing can hide."""
    got = run(lists("1f1b", 2, 1, 1), HALVES, transfer=0.5)
    assert got.step == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)
    # Each coordinate waits half a second for what is on its way, and the rest for the other one.
    assert got.exposed == pytest.approx(0.5 * 2 / 2 / 7 + 0.5 / 7 / 2, abs=0.05)
    sent = [s for s in got.spans[0] if s.stream == "pp/act"]
    assert [(s.action.kind, s.start, s.end) for s in sent] == [("SEND", 1.0, 1.5)]
    assert [(s.start, s.end) for s in got.spans[1] if s.stream == "pp/act"] == [(1.0, 1.5)]


def test_transfers_hide_behind_other_microbatches() -> None:
    """In the steady state of GPipe's forwards a transfer runs beside the next microbatch: only the first is seen."""
    free, slow = (run(lists("gpipe", 2, 1, 16), HALVES, transfer=t) for t in (0.0, 0.5))
    assert slow.step - free.step == pytest.approx(2 * 0.5)


def test_a_send_is_a_rendezvous() -> None:
    """It starts when the other end has reached its RECV, which comes after that coordinate's own work."""
    todo = [
        [Action("F", 1, 0), Action("SEND", 1, 0, 1, "act"), Action("WAIT", 1, 0, what="sent")],
        [Action("F", 9, 0), Action("RECV", 1, 0, 0, "act"), Action("WAIT", 1, 0, what="act")],
    ]
    got = simulate(todo, lambda pp, a: [Piece("run", 4.0 if pp else 1.0)] if a.kind == "F" else [], lambda pp, a: 0.25)
    assert {(s.start, s.end) for spans in got.spans for s in spans if s.stream == "pp/act"} == {(4.0, 4.25)}
    assert got.step == 4.25 and got.busy == (1.0, 4.0)
    assert got.exposed == pytest.approx(2 * 0.25 / (2 * 4.25))
    assert got.bubble == pytest.approx(3.0 / (2 * 4.25))


def test_lists_that_wait_for_each_other_are_an_error() -> None:
    todo = [[Action("RECV", 1, 0, 1, "act"), Action("WAIT", 1, 0, what="act")], [Action("F", 1, 0)]]
    with pytest.raises(ValueError, match=r"coordinate 0 waits for ever at WAIT act\(1, 0\)"):
        simulate(todo, lambda pp, a: [], lambda pp, a: 0.0)


# ---------------------------------------------------------------------------------------------------- collectives


def test_gathers_hide_behind_the_layer_before() -> None:
    """FSDP on one coordinate, prefetched by one unit: only what a layer's work does not cover is seen."""
    todo = actions(
        compute_order("1f1b", 1, 1, 1), unit_ranges([4]), [0], keep="use", gathered=[1, 2, 3, 4], prefetched=1
    )

    def exposed(unshard: float) -> float:
        got = run(todo, HALVES, unshard=unshard)
        assert got.busy == (12.0,)
        return got.step - 12.0

    # Forward: the first gather is seen, or its part that the (free) embedding does not cover; the next three are
    # beside layers of 1 s. Backward: the last layer's gather is not covered (the head is free), three hide behind 2 s.
    assert exposed(0.5) == pytest.approx(2 * 0.5)
    assert exposed(1.5) == pytest.approx(2 * 1.5 + 3 * 0.5)


def test_kernels_lose_time_to_collectives_beside_them() -> None:
    work = {"UNSHARD": [Piece("start", 4.0, stream="fsdp", name="x")], "F": [Piece("run", 3.0)], "WAIT": []}
    todo = [[Action("UNSHARD", 2), Action("F", 1, 0)]]
    for overlap, end in ((0.0, 3.0), (0.1, 3.3)):
        got = simulate(todo, lambda pp, a: work[a.kind], lambda pp, a: 0.0, overlap=overlap)
        assert got.busy == (pytest.approx(end),)


def test_collectives_inside_graphs_hold_kernels_up() -> None:
    got = run(lists("1f1b", 1, 1, 2), HALVES, wire=0.25)
    assert got.step == pytest.approx(2 * (1 + 2 + 2 * 0.25))
    assert got.exposed * got.step == pytest.approx(4 * 0.25)
    assert all(s.wire == 0.25 for s in got.spans[0] if s.stream == COMPUTE and s.action.kind in HALVES)


def test_one_communicator_works_in_order_and_two_at_once() -> None:
    def step(*streams: str) -> float:
        parts = [Piece("start", 1.0, stream=s, name=str(i)) for i, s in enumerate(streams)]
        waits = [Piece("wait", name=str(i)) for i in range(len(streams))]
        return simulate([[Action("UPDATE")]], lambda pp, a: [*parts, *waits], lambda pp, a: 0.0).step

    assert step("dp", "dp") == 2.0 and step("dp", "dp/reduce") == 1.0


def test_coordinates_meet_in_what_they_share() -> None:
    """The reduction of a tied table, and the end of a step: both start when the last one is there."""
    todo = [[Action("F", 1, 0), Action("UPDATE")], [Action("F", 2, 0), Action("UPDATE")]]

    def work(pp: int, a: Action) -> Sequence[Piece]:
        if a.kind == "F":
            return [Piece("run", 1.0 + pp)]
        return [Piece("start", 0.5, stream="pp@0+1/reduce", name="x"), Piece("wait", name="x")]

    got = simulate(todo, work, lambda pp, a: 0.0, {"pp@0+1": (0, 1)})
    assert got.step == 2.5
    assert {(s.start, s.end) for spans in got.spans for s in spans if s.stream != COMPUTE} == {(2.0, 2.5)}
    assert got.bubble == pytest.approx(1.0 / 5) and got.exposed == pytest.approx(2 * 0.5 / 5)
