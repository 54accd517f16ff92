from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.program.schedule import (
    Action,
    actions,
    compute_order,
    coordinate_of,
    forward_only,
    timing,
    unit_ranges,
)

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
EQUAL = {"F": 1, "B": 1, "I": 1, "W": 1}
CHUNKS = {"interleaved": 2, "zbv": 2}


def makespan(schedule, pp, microbatches, durations, chunks=1):
    order = compute_order(schedule, pp, chunks, microbatches)
    return max(end for _, end in timing(order, coordinate_of(schedule, pp, chunks), durations).values())


def peaks(order):
    """Peak number of (stage, microbatch) pairs between F and B or W."""
    out = []
    for computes in order:
        held, peak = 0, 0
        for kind, _, _ in computes:
            held += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            peak = max(peak, held)
        out.append(peak)
    return out


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 3), st.integers(1, 20))
def test_every_order_is_complete_and_can_run(schedule, pp, chunks, microbatches):
    chunks = {"interleaved": chunks, "zbv": 2}.get(schedule, 1)
    order = compute_order(schedule, pp, chunks, microbatches)
    owner = coordinate_of(schedule, pp, chunks)
    kinds = "FIW" if schedule.startswith("z") else "FB"
    for rank, computes in enumerate(order):
        mine = [stage for stage in range(pp * chunks) if owner[stage] == rank]
        assert sorted(computes) == sorted((k, s, m) for k in kinds for s in mine for m in range(microbatches))
    spans = timing(order, owner)
    assert len(spans) == sum(map(len, order))
    for (kind, stage, mb), (start, _) in spans.items():
        if kind == "F" and stage:
            assert spans["F", stage - 1, mb][1] <= start
        if kind in "BI":
            assert spans["F", stage, mb][1] <= start
            if stage + 1 < pp * chunks:
                assert spans[kind, stage + 1, mb][1] <= start
        if kind == "W":
            assert spans["I", stage, mb][1] <= start


def test_orders_written_out():
    def text(*args):
        return [" ".join(f"{k}{s}{m}" for k, s, m in computes) for computes in compute_order(*args)]

    assert text("gpipe", 2, 1, 2) == ["F00 F01 B00 B01", "F10 F11 B10 B11"]
    assert text("1f1b", 2, 1, 3) == ["F00 F01 B00 F02 B01 B02", "F10 B10 F11 B11 F12 B12"]
    assert text("zero-bubble", 2, 1, 2) == ["F00 F01 I00 W00 I01 W01", "F10 I10 F11 I11 W10 W11"]
    assert text("interleaved", 2, 2, 2)[1] == "F10 F11 F30 B30 F31 B31 B10 B11"
    assert text("1f1b", 1, 1, 2) == ["F00 B00 F01 B01"]


def test_fewer_microbatches_than_stages():
    for schedule in SCHEDULES:
        for microbatches in (1, 2, 3):
            span = makespan(schedule, 4, microbatches, EQUAL, CHUNKS.get(schedule, 1))
            assert span <= 4 * (microbatches + 3) * CHUNKS.get(schedule, 1)


def test_bubbles_are_those_of_the_papers():
    for pp in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 5, 16):
            for schedule in ("gpipe", "1f1b"):
                span = makespan(schedule, pp, microbatches, EQUAL)
                assert (span - 2 * microbatches) / span == pytest.approx((pp - 1) / (microbatches + pp - 1))
            whole = {"F": 1, "B": 2, "I": 1, "W": 1}
            one, split = (makespan(s, pp, microbatches, whole) for s in ("1f1b", "zero-bubble"))
            assert split < one or pp == 1
            if microbatches >= pp:
                # ZB-H1: (pp - 1)(F + I - W); 1F1B: (pp - 1)(F + I + W); interleaved: that over the chunks.
                assert split - 3 * microbatches == pp - 1
                assert one - 3 * microbatches == 3 * (pp - 1)
            if microbatches % pp == 0:
                for chunks in (2, 3):
                    span = makespan("interleaved", pp, microbatches, whole, chunks)
                    assert span - 3 * microbatches * chunks == 3 * (pp - 1)
            if microbatches >= 2 * pp - 1:
                assert makespan("zbv", pp, microbatches, whole, 2) - 6 * microbatches == pp - 1


def test_peaks_of_saved_activations():
    assert peaks(compute_order("gpipe", 4, 1, 8)) == [8, 8, 8, 8]
    assert peaks(compute_order("1f1b", 4, 1, 8)) == [4, 3, 2, 1]
    assert peaks(compute_order("interleaved", 4, 2, 8)) == [11, 9, 7, 5]
    assert peaks(compute_order("zero-bubble", 4, 1, 8)) == [4, 4, 4, 4]
    assert max(peaks(compute_order("zbv", 4, 2, 16))) == 8  # as 1F1B: a chunk is half a stage


@pytest.mark.parametrize("pp, microbatches", [(1, 1), (2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 16)])
def test_orders_equal_torch(pp, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def plain(rank_actions):
        computes = [a for a in rank_actions if a and a.computation_type.name in letters]
        return [(letters[a.computation_type.name], a.stage_index, a.microbatch_index) for a in computes]

    def torch_order(name, chunks, rank):
        # The generators only read these fields; building the real objects needs modules and process groups.
        schedule = object.__new__(getattr(schedules, name))
        schedule.pp_group_size, schedule.n_local_stages = pp, chunks
        schedule._num_stages = schedule.num_stages = pp * chunks
        schedule._n_microbatches = microbatches
        schedule.number_of_rounds = max(1, microbatches // pp)
        schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
        if name in ("ScheduleGPipe", "Schedule1F1B"):
            return plain(schedule._get_pipeline_order()[rank])
        return plain(schedule._calculate_single_rank_operations(rank))

    cases = [("gpipe", "ScheduleGPipe", 1), ("1f1b", "Schedule1F1B", 1)]
    cases += [("zero-bubble", "ScheduleInterleavedZeroBubble", 1), ("zbv", "ScheduleZBVZeroBubble", 2)]
    if microbatches % pp == 0:  # torch makes uneven rounds of other numbers, we leave the last one short
        cases += [("interleaved", "ScheduleInterleaved1F1B", chunks) for chunks in (2, 3)]
    compared = 0
    for ours, name, chunks in cases:
        order = compute_order(ours, pp, chunks, microbatches)
        for rank in range(pp):
            try:
                theirs = torch_order(name, chunks, rank)
            except AttributeError:  # private, and it moves between versions
                continue
            if name == "Schedule1F1B" and rank == pp - 1:
                # torch numbers this rank's forwards from 1 (it only prints this list): compare the rest.
                theirs = [(kind, stage, mb - (kind == "F")) for kind, stage, mb in theirs]
            assert theirs == order[rank], (ours, rank)
            compared += 1
    assert compared >= 3 * pp


def test_wrong_numbers_are_refused_in_one_line():
    for args, name in [
        (("1f1b", 2, 2, 4), "chunks"),
        (("zbv", 2, 1, 4), "chunks"),
        (("gpipe", 2, 1, 0), "microbatches"),
        (("gpipe", 0, 1, 2), "pp"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name} is \d") as raised:
            compute_order(*args)
        assert "\n" not in str(raised.value)


def test_an_order_that_waits_for_itself_is_refused():
    order = [[("F", 0, 0), ("B", 0, 0)], [("B", 1, 0), ("F", 1, 0)]]
    with pytest.raises(ValueError, match="waits for ever"):
        timing(order, [0, 1])


def test_stages():
    assert unit_ranges([3, 4]) == [range(0, 4), range(4, 9)]
    assert unit_ranges([2]) == [range(0, 4)]
    assert unit_ranges([0, 2, 0]) == [range(0, 1), range(1, 3), range(3, 4)]
    assert coordinate_of("interleaved", 2, 2) == [0, 1, 0, 1]
    assert coordinate_of("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]
    order = compute_order("1f1b", 3, 1, 1)
    keep = {"keep": "step", "gathered": set()}
    with pytest.raises(ValueError, match="stage 1 has units"):
        actions(order, unit_ranges([1, 0, 1]), [0, 1, 2], **keep)
    with pytest.raises(ValueError, match="2 stages were given"):
        actions(order, unit_ranges([1, 1]), [0, 1, 2], **keep)
    with pytest.raises(ValueError, match="tied"):
        actions(order, unit_ranges([1, 1, 1]), [0, 1, 2], **keep, tied=[(0, 4), (0, 3)])


def text(todo):
    """A list with waits that follow their start at once left out: they are there, and nowhere else."""
    out, before = [], None
    for a in todo:
        at_once = a.kind == "WAIT" and before is not None and before.kind in ("UNSHARD", "REDUCE")
        if at_once:
            assert (a.unit, a.mb) == (before.unit, before.mb)
            assert a.what == {"UNSHARD": "params", "REDUCE": "grads"}[before.kind]
        else:
            out.append(str(a))
        assert at_once or before is None or before.kind not in ("UNSHARD", "REDUCE")
        before = a
    return " ".join(out)


def one_process(keep, **kwargs):
    order = compute_order("1f1b", 1, 1, 2)
    (todo,) = actions(order, [range(3)], [0], keep=keep, **kwargs)
    return text(todo)


def test_lists_of_one_process_written_out():
    assert one_process("step", gathered=set()) == (
        "UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) UNSHARD(2) B(2, 0) B(1, 0) B(0, 0) "
        "F(0, 1) F(1, 1) B(2, 1) REDUCE(2) B(1, 1) REDUCE(1) B(0, 1) REDUCE(0) UPDATE"
    )
    assert one_process("step", gathered={1}, tied=[(0, 2)]) == (
        "UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) UNSHARD(2) B(2, 0) B(1, 0) B(0, 0) "
        "F(0, 1) F(1, 1) B(2, 1) B(1, 1) FREE(1) REDUCE(1) B(0, 1) REDUCE(0) REDUCE(2) UPDATE"
    )
    assert one_process("forward", gathered={1}, reduce_each={0, 1}, tied=[(0, 2)]) == (
        "UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) UNSHARD(2) "
        "B(2, 0) B(1, 0) FREE(1) REDUCE(1, 0) B(0, 0) REDUCE(0, 0) "
        "F(0, 1) UNSHARD(1) F(1, 1) "
        "B(2, 1) B(1, 1) FREE(1) REDUCE(1, 1) REDUCE(1) B(0, 1) REDUCE(0, 1) REDUCE(0) REDUCE(2) UPDATE"
    )
    assert one_process("use", gathered={1}) == (
        "UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) FREE(1) UNSHARD(2) "
        "B(2, 0) UNSHARD(1) B(1, 0) FREE(1) B(0, 0) F(0, 1) UNSHARD(1) F(1, 1) FREE(1) "
        "B(2, 1) REDUCE(2) UNSHARD(1) B(1, 1) FREE(1) REDUCE(1) B(0, 1) REDUCE(0) UPDATE"
    )


def test_a_pipeline_written_out():
    lists = actions(compute_order("1f1b", 2, 1, 1), [range(2), range(2, 4)], [0, 1], keep="use", gathered={1, 2})
    assert text(lists[0]) == (
        "RECV grad(1, 0) from 1 UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) SEND act(1, 0) to 1 "
        "WAIT grad(1, 0) B(1, 0) FREE(1) REDUCE(1) B(0, 0) WAIT sent(1, 0) REDUCE(0) UPDATE"
    )
    assert text(lists[1]) == (
        "RECV act(1, 0) from 0 WAIT act(1, 0) UNSHARD(2) F(2, 0) FREE(2) UNSHARD(3) "
        "B(3, 0) REDUCE(3) UNSHARD(2) B(2, 0) FREE(2) SEND grad(1, 0) to 0 WAIT sent(1, 0) REDUCE(2) UPDATE"
    )


def test_receives_are_posted_one_compute_early_and_sends_waited_for_late():
    lists = actions(compute_order("1f1b", 2, 1, 3), [range(2), range(2, 4)], [0, 1], keep="step", gathered=())
    moving = ("SEND", "RECV", "WAIT", "F", "B")
    first, last = (
        " ".join(str(a) for a in todo if a.kind in moving and a.unit in (1, 2) and a.what not in ("params", "grads"))
        for todo in lists
    )
    assert first == (
        "F(1, 0) RECV grad(1, 0) from 1 SEND act(1, 0) to 1 F(1, 1) WAIT sent(1, 0) SEND act(1, 1) to 1 "
        "WAIT grad(1, 0) B(1, 0) RECV grad(1, 1) from 1 F(1, 2) WAIT sent(1, 1) SEND act(1, 2) to 1 "
        "WAIT grad(1, 1) RECV grad(1, 2) from 1 B(1, 1) WAIT grad(1, 2) B(1, 2) WAIT sent(1, 2)"
    )
    assert last == (
        "RECV act(1, 0) from 0 WAIT act(1, 0) RECV act(1, 1) from 0 F(2, 0) B(2, 0) SEND grad(1, 0) to 0 "
        "WAIT act(1, 1) F(2, 1) RECV act(1, 2) from 0 B(2, 1) WAIT sent(1, 0) SEND grad(1, 1) to 0 "
        "WAIT act(1, 2) F(2, 2) B(2, 2) WAIT sent(1, 1) SEND grad(1, 2) to 0 WAIT sent(1, 2)"
    )


def test_evaluation_lists():
    lists = forward_only([range(2), range(2, 3)], [0, 1], 2, keep="step", gathered={1})
    assert text(lists[0]) == (
        "UNSHARD(0) F(0, 0) UNSHARD(1) F(1, 0) SEND act(1, 0) to 1 "
        "F(0, 1) F(1, 1) FREE(1) WAIT sent(1, 0) SEND act(1, 1) to 1 WAIT sent(1, 1)"
    )
    assert text(lists[1]) == (
        "RECV act(1, 0) from 0 WAIT act(1, 0) RECV act(1, 1) from 0 UNSHARD(2) F(2, 0) WAIT act(1, 1) F(2, 1)"
    )


def test_keep_decides_how_often_a_unit_is_gathered():
    def gathers(schedule, keep):
        order = compute_order(schedule, 2, 1, 4)
        lists = actions(order, unit_ranges([1, 1]), [0, 1], keep=keep, gathered=range(4))
        return [sum(a == Action("UNSHARD", unit) for todo in lists for a in todo) for unit in range(4)]

    # Two uses of each unit a microbatch, three where backward is halved; the head's loss and gradient are one. A use
    # that follows at once needs no gather: unit 1's first backward after its last forward, unit 2's forwards in a row.
    for schedule, uses in (
        ("gpipe", [8, 8 - 1, 8 - 3, 4]),
        # F0 F1 B0 F2 B1 F3 B2 B3 on the first coordinate: twice from B to F, at unit 0, and from F to B three times
        ("1f1b", [8 - 2, 8 - 3, 8 - 3, 4]),
        # F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3, and F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3, where I ends and all else is 2
        ("zero-bubble", [12 - 2, 12 - 3, 12 - 7, 4]),
    ):
        assert gathers(schedule, "step") == [1, 1, 1, 1]
        assert gathers(schedule, "use") == uses
    assert gathers("gpipe", "forward") == [1, 1, 1, 4]
    assert gathers("1f1b", "forward") == [1, 1, 1, 4]  # unit 2 has one microbatch at a time, and the next at once


@pytest.mark.parametrize("keep", ["use", "forward"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_nothing_is_freed_to_be_gathered_at_once(schedule, keep):
    lists = actions(compute_order(schedule, 2, 1, 4), unit_ranges([1, 2]), [0, 1], keep=keep, gathered=range(5))
    for todo in lists:
        kept = [a for a in todo if a.kind in ("F", "B", "I", "W", "UNSHARD", "FREE")]
        freed = [(a.unit, b.unit) for a, b in pairwise(kept) if (a.kind, b.kind) == ("FREE", "UNSHARD")]
        assert any(a.kind == "FREE" for a in kept) and all(a != b for a, b in freed)


def test_prefetch_written_out():
    order = compute_order("1f1b", 1, 1, 1)

    def todo(distance, keep="use"):
        return " ".join(map(str, actions(order, [range(4)], [0], keep=keep, gathered={1, 2}, prefetched=distance)[0]))

    assert todo(1) == (
        "UNSHARD(0) WAIT params(0) UNSHARD(1) F(0, 0) WAIT params(1) UNSHARD(2) F(1, 0) FREE(1) "
        "WAIT params(2) UNSHARD(3) F(2, 0) FREE(2) WAIT params(3) UNSHARD(2) "
        "B(3, 0) REDUCE(3) WAIT grads(3) WAIT params(2) UNSHARD(1) B(2, 0) FREE(2) REDUCE(2) WAIT grads(2) "
        "WAIT params(1) B(1, 0) FREE(1) REDUCE(1) WAIT grads(1) B(0, 0) REDUCE(0) WAIT grads(0) UPDATE"
    )
    assert todo(2).startswith(
        "UNSHARD(0) WAIT params(0) UNSHARD(1) UNSHARD(2) F(0, 0) WAIT params(1) UNSHARD(3) F(1, 0) FREE(1) "
        "WAIT params(2) F(2, 0) FREE(2) WAIT params(3) UNSHARD(2) UNSHARD(1) B(3, 0)"
    )


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_passes_move_starts_and_waits_and_nothing_else(schedule, pp, microbatches, distance, most):
    """All else keeps its order, but the step's REDUCE of a unit comes behind its microbatches' waits; at most one unit
    more is gathered for each of the distance, and no more than `most` reductions of a sort are in flight."""
    order = compute_order(schedule, pp, CHUNKS.get(schedule, 1), microbatches)
    owner = coordinate_of(schedule, pp, CHUNKS.get(schedule, 1))
    stages = unit_ranges([1] * len(owner))
    units = range(stages[-1].stop)
    kwargs = {"keep": "use", "gathered": units, "reduce_each": units}
    plain = actions(order, stages, owner, **kwargs)
    for todo in plain:
        sending = 0
        for a in todo:
            sending += (a.kind == "SEND") - (a.what == "sent")
            assert sending <= 2  # one a direction
    for before, after in zip(
        plain, actions(order, stages, owner, prefetched=distance, deferred=most, **kwargs), strict=True
    ):
        for moving in ("UNSHARD", "WAIT"):
            assert [a for a in before if a.kind == moving and a.what != "grads"] == [
                a for a in after if a.kind == moving and a.what != "grads"
            ]

        def still(a):
            return a.kind not in ("UNSHARD", "WAIT") and (a.kind, a.mb) != ("REDUCE", -1)

        assert list(filter(still, before)) == list(filter(still, after))
        held, flying = 0, {False: [], True: []}
        for a in after:
            held += {"UNSHARD": 1, "FREE": -1}.get(a.kind, 0)
            if a.kind == "REDUCE":
                assert a.mb >= 0 or all(unit != a.unit for unit, _ in flying[False])
                flying[a.mb < 0].append((a.unit, a.mb))
            elif a.kind == "WAIT" and a.what == "grads":
                flying[a.mb < 0].remove((a.unit, a.mb))
            assert held <= 1 + distance and all(len(f) <= max(1, most) for f in flying.values())
        assert not any(flying.values())
        assert {a for a in before if a.kind == "REDUCE"} == {a for a in after if a.kind == "REDUCE"}


def test_reductions_are_waited_for_late():
    order = compute_order("1f1b", 1, 1, 2)

    def todo(most):
        (out,) = actions(order, [range(3)], [0], keep="step", gathered=(), reduce_each={1}, deferred=most)
        text = " ".join(map(str, out))
        return text[text.index("B(2, 1)") :]

    assert todo(1) == (
        "B(2, 1) REDUCE(2) B(1, 1) WAIT grads(1, 0) REDUCE(1, 1) B(0, 1) WAIT grads(1, 1) WAIT grads(2) REDUCE(1) "
        "WAIT grads(1) REDUCE(0) WAIT grads(0) UPDATE"
    )
    assert todo(2) == (
        "B(2, 1) REDUCE(2) B(1, 1) REDUCE(1, 1) B(0, 1) WAIT grads(1, 0) WAIT grads(1, 1) REDUCE(1) WAIT grads(2) "
        "REDUCE(0) WAIT grads(1) WAIT grads(0) UPDATE"
    )
