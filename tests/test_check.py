from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.program.check import (
    Deadlock,
    Mismatched,
    ScheduleError,
    Unordered,
    effects,
    finish,
    happens_before,
    in_flight,
)
from dtrain.program.schedule import Action, actions, compute_order, coordinate_of, forward_only, unit_ranges


@dataclass(frozen=True)
class Program:
    lists: list[list[Action]]
    units: int
    microbatches: int
    gathered: frozenset[int]
    reduce_each: frozenset[int]
    tied: list[tuple[int, int]]
    train: bool

    def check(self, lists=None):
        lists = self.lists if lists is None else lists
        finish(lists, self.tied)
        happens_before(
            lists,
            units=self.units,
            microbatches=self.microbatches,
            gathered=self.gathered,
            reduce_each=self.reduce_each,
            train=self.train,
        )


@st.composite
def programs(draw, trains=(True, True, True, False)):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]))
    pp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = {"interleaved": draw(st.integers(1, 3)), "zbv": 2}.get(schedule, 1)
    microbatches = draw(st.integers(1, 9))
    owner = coordinate_of(schedule, pp, chunks)
    layers = draw(st.lists(st.integers(1, 3), min_size=len(owner), max_size=len(owner)))
    if len(layers) > 1:  # the embedding or the head may be alone on its stage
        layers[0] -= draw(st.booleans())
        layers[-1] -= draw(st.booleans())
    units = sum(layers) + 2
    gathered = draw(st.frozensets(st.integers(0, units - 1)))
    tied = draw(st.sampled_from([[], [(0, units - 1)], [(0, units - 1), (1, units - 2)]]))
    tied = tied if units > 3 else tied[:1]
    keep = draw(st.sampled_from(["step", "forward", "use"]))
    reduce_each = draw(st.frozensets(st.integers(0, units - 1)))
    train = draw(st.sampled_from(trains))
    prefetched = draw(st.integers(0, 3))
    stages = unit_ranges(layers)
    if train:
        lists = actions(
            compute_order(schedule, pp, chunks, microbatches),
            stages,
            owner,
            keep=keep,
            gathered=gathered,
            reduce_each=reduce_each,
            tied=tied,
            prefetched=prefetched,
            deferred=draw(st.integers(0, 3)),
        )
    else:
        lists = forward_only(stages, owner, microbatches, keep=keep, gathered=gathered, prefetched=prefetched)
    return Program(lists, units, microbatches, gathered, reduce_each, tied, train)


@settings(deadline=None, max_examples=300)
@given(programs())
def test_every_list_finishes_and_is_ordered(program):
    program.check()


def run(program):
    """Gradients of sum over m of (m + 1) * w_0 * ... * w_last, by running the lists on integers."""
    weights = [2 + unit % 3 for unit in range(program.units)]
    head = program.units - 1
    values = [{} for _ in program.lists]
    wires, posted = defaultdict(list), Counter()
    at = [0] * len(program.lists)
    while any(at[rank] < len(todo) for rank, todo in enumerate(program.lists)):
        before = list(at)
        for rank, todo in enumerate(program.lists):
            here = values[rank]
            while at[rank] < len(todo):
                a = todo[at[rank]]
                u, m = a.unit, a.mb
                if a.kind == "WAIT" and a.what in ("act", "grad"):
                    wire, number = here["receiving", a.what, u, m]
                    if len(wire) <= number:
                        break
                at[rank] += 1
                if a.kind == "UNSHARD":
                    here["gathering", u] = weights[u]
                elif a.what == "params":
                    here["params", u] = here.pop(("gathering", u))
                elif a.what == "grads":
                    into = "accum" if m >= 0 else "reduced"
                    here[into, u] = here.get((into, u), 0) + here.pop(("reducing", u, m))
                elif a.kind == "FREE":
                    del here["params", u]
                elif a.kind == "F":
                    x = here.pop(("act", u - 1, m)) if u else m + 1
                    here["saved", u, m] = x
                    here["act", u, m] = x * here["params", u]
                elif a.kind in ("B", "I"):
                    grad = here.pop(("grad", u, m)) if u < head else 1
                    here["grad", u - 1, m] = grad * here["params", u]
                    here["wsaved", u, m] = grad * here.pop(("saved", u, m) if u < head else ("act", u - 1, m))
                elif a.kind == "SEND":
                    wires[rank, a.peer, a.what].append(here.pop((a.what, u, m)))
                elif a.kind == "RECV":
                    number = posted[a.peer, rank, a.what]
                    here["receiving", a.what, u, m] = (wires[a.peer, rank, a.what], number)
                    posted[a.peer, rank, a.what] += 1
                elif a.what in ("act", "grad"):
                    wire, number = here.pop(("receiving", a.what, u, m))
                    here[a.what, u, m] = wire[number]
                elif a.kind == "REDUCE":
                    here["reducing", u, m] = here.pop(("accum" if m < 0 else "partial", u))
                if a.kind in ("B", "W"):
                    assert ("params", u) in here
                    into = "partial" if u in program.reduce_each else "accum"
                    here[into, u] = here.get((into, u), 0) + here.pop(("wsaved", u, m))
        assert at != before
    found = {key[1]: value for here in values for key, value in here.items() if key[0] == "reduced"}
    inputs = sum(range(1, program.microbatches + 1))
    assert found == {u: inputs * prod(weights) // weights[u] for u in range(program.units)}


@settings(deadline=None, max_examples=100)
@given(programs(trains=(True,)))
def test_what_passes_computes_the_gradient(program):
    run(program)


@settings(deadline=None, max_examples=200)
@given(programs(), st.data())
def test_a_dropped_or_doubled_action_is_always_caught(program, data):
    rank = data.draw(st.integers(0, len(program.lists) - 1))
    index = data.draw(st.integers(0, len(program.lists[rank]) - 1))
    action = program.lists[rank][index]
    for instead in ([], [action, action]):
        faulty = [list(todo) for todo in program.lists]
        faulty[rank][index : index + 1] = instead
        with pytest.raises(ScheduleError) as caught:
            program.check(faulty)
        assert "\n" not in str(caught.value)


def pipeline(schedule="1f1b", pp=2, microbatches=2, tied=(), gathered=(0, 1, 2, 3)):
    lists = actions(
        compute_order(schedule, pp, 1, microbatches),
        unit_ranges([1] * pp),
        list(range(pp)),
        keep="use",
        gathered=set(gathered),
        tied=tied,
    )
    return Program(lists, pp + 2, microbatches, frozenset(gathered), frozenset(), list(tied), True)


def moved(program, rank, action, *, to):
    """The lists with `action` put directly after the action `to`, or first where that is None."""
    lists = [list(todo) for todo in program.lists]
    lists[rank].remove(action)
    lists[rank].insert(0 if to is None else lists[rank].index(to) + 1, action)
    return lists


ACT = {"unit": 1, "what": "act"}
GRAD = {"unit": 1, "what": "grad"}


def test_deadlock_of_two_that_both_wait_for_their_sends():
    """Each end waits for its send before it posts the receive that the other one's send waits for."""
    program = pipeline()
    lists = [list(todo) for todo in program.lists]
    forward, back = Action("SEND", mb=1, peer=1, **ACT), Action("SEND", mb=0, peer=0, **GRAD)
    for todo, send, receive in (
        (lists[0], forward, Action("RECV", mb=0, peer=1, **GRAD)),
        (lists[1], back, Action("RECV", mb=1, peer=0, **ACT)),
    ):
        wait = Action("WAIT", send.unit, send.mb, what="sent")
        todo.remove(wait)
        todo.remove(receive)
        i = todo.index(send)
        todo[i + 1 : i + 1] = [wait, receive]
    with pytest.raises(Deadlock) as caught:
        finish(lists)
    i, j = lists[0].index(forward) + 1, lists[1].index(back) + 1
    assert str(caught.value) == (
        f"coordinate 0 at {i} WAIT sent(1, 1) is blocked; "
        "coordinate 0's SEND act(1, 1) to 1 waits for RECV act(1, 1) from 0; "
        f"coordinate 1 at {j} WAIT sent(1, 0) is blocked; "
        "coordinate 1's SEND grad(1, 0) to 0 waits for RECV grad(1, 0) from 1"
    )
    finish(program.lists)


def test_deadlock_of_a_receive_posted_too_early():
    """A direction runs in order: a send behind a receive waits for what that one waits for."""
    program = pipeline(pp=3, microbatches=4)
    lists = [list(todo) for todo in program.lists]
    receives = [a for a in lists[1] if a.kind == "RECV" and a.what == "act"]
    assert len(receives) == 4
    finish([lists[0], receives[:3] + [a for a in lists[1] if a not in receives[:3]], lists[2]])
    with pytest.raises(Deadlock, match=r"coordinate 1's RECV act\(1, 3\) from 0 waits for SEND act\(1, 3\) to 1"):
        finish([lists[0], receives + [a for a in lists[1] if a not in receives], lists[2]])


def test_deadlock_of_a_ring():
    ring = [
        [
            Action("SEND", unit=r, mb=0, peer=(r + 1) % 3, what="act"),
            Action("RECV", unit=(r - 1) % 3, mb=0, peer=(r - 1) % 3, what="act"),
        ]
        for r in range(3)
    ]
    with pytest.raises(Deadlock, match=r"coordinate 0's SEND .*coordinate 1's SEND .*coordinate 2's SEND"):
        finish(ring)
    finish([ring[0], ring[1][::-1], ring[2]])  # one that receives first is enough


def test_deadlock_of_a_tied_reduce_before_a_transfer():
    program = pipeline(tied=[(0, 3)])
    lists = moved(program, 1, Action("REDUCE", 3), to=Action("B", 3, 1))
    with pytest.raises(Deadlock, match=r"REDUCE\(3\) waits for REDUCE\(0\) on coordinate 0"):
        finish(lists, program.tied)
    finish(lists)  # untied it is allowed


def test_deadlock_of_two_ties_in_two_orders():
    a, b = [Action("REDUCE", 0), Action("REDUCE", 1)], [Action("REDUCE", 3), Action("REDUCE", 2)]
    finish([a, b], [(0, 3), (1, 2)])
    with pytest.raises(Deadlock):
        finish([a, b[::-1]], [(0, 3), (1, 2)])
    with pytest.raises(Deadlock, match="any coordinate"):
        finish([a, b[:1]], [(0, 3), (1, 2)])


def test_deadlock_of_an_update_that_one_lacks():
    with pytest.raises(Deadlock, match="UPDATE"):
        finish([[Action("UPDATE")], []])


def test_mismatched_order():
    program = pipeline("gpipe")
    first, second = (Action("SEND", mb=m, peer=1, **ACT) for m in (0, 1))
    lists = moved(program, 0, first, to=second)
    with pytest.raises(Mismatched, match=r"transfer 0 from coordinate 0 to 1: SEND act\(1, 1\)"):
        finish(lists)


def test_mismatched_value():
    lists = [list(todo) for todo in pipeline().lists]
    index = lists[1].index(Action("SEND", mb=0, peer=0, **GRAD))
    lists[1][index] = replace(lists[1][index], what="act")
    with pytest.raises(Mismatched, match=r"from coordinate 1 to 0: SEND act\(1, 0\) to 0, but nothing received"):
        finish(lists)


def test_mismatched_number():
    lists = [list(todo) for todo in pipeline().lists]
    lists[1].remove(Action("RECV", mb=1, peer=0, **ACT))
    with pytest.raises(Mismatched, match="nothing received"):
        finish(lists)


GATHERED = Action("WAIT", 0, what="params")
REDUCED = Action("WAIT", 3, what="grads")
ARRIVED = Action("WAIT", 1, 1, what="act")
SENT = Action("WAIT", 1, 0, what="sent")


@pytest.mark.parametrize(
    "rank, action, to, message",
    [
        (0, Action("UNSHARD", 0), Action("F", 0, 0), r"WAIT params\(0\) needs gathering\(0\), not made before"),
        (0, GATHERED, Action("F", 0, 0), r"F\(0, 0\) needs params\(0\), still in flight: gathering\(0\)"),
        (0, Action("FREE", 0), Action("UNSHARD", 0), r"FREE\(0\) needs params\(0\), still in flight"),
        (0, Action("FREE", 0), GATHERED, r"frees params\(0\) before anything has read it"),
        (0, Action("B", 1, 1), Action("B", 0, 1), r"B\(0, 1\) needs grad\(0, 1\)"),
        (0, Action("SEND", mb=0, peer=1, **ACT), Action("F", 0, 0), r"needs act\(1, 0\), not made before"),
        (
            0,
            Action("RECV", mb=1, peer=1, **GRAD),
            Action("B", 1, 1),
            r"WAIT grad\(1, 1\) needs receiving grad\(1, 1\), not made",
        ),
        (1, Action("REDUCE", 3), Action("B", 3, 0), r"adds to accum\(3\) after its REDUCE"),
        (1, Action("UPDATE"), Action("REDUCE", 3), r"UPDATE needs reduced\(3\), still in flight"),
        (1, REDUCED, Action("UPDATE"), r"UPDATE needs reduced\(3\), still in flight"),
        (1, REDUCED, Action("B", 3, 1), r"WAIT grads\(3\) needs reducing\(3\), not made before"),
        (1, Action("UPDATE"), REDUCED, r"UPDATE must be last"),
        (1, ARRIVED, Action("F", 2, 1), r"F\(2, 1\) needs act\(1, 1\), still in flight: receiving act\(1, 1\)"),
        (1, ARRIVED, None, r"WAIT act\(1, 1\) needs receiving act\(1, 1\), not made before"),
        (0, SENT, Action("F", 1, 0), r"WAIT sent\(1, 0\) needs sending\(1, 0\), not made before"),
    ],
)
def test_an_action_moved_to_the_wrong_place(rank, action, to, message):
    program = pipeline(gathered=(0, 3))
    happens_before(program.lists, units=4, microbatches=2, gathered=program.gathered)
    faulty = moved(program, rank, action, to=to)
    with pytest.raises(Unordered, match=message):
        happens_before(faulty, units=4, microbatches=2, gathered=program.gathered)


def test_a_read_after_free():
    program = pipeline(gathered=(1,))
    lists = [list(todo) for todo in program.lists]
    first = lists[0].index(Action("FREE", 1))
    second = lists[0].index(Action("UNSHARD", 1), first)
    del lists[0][second : second + 2]
    with pytest.raises(Unordered, match=rf"needs params\(1\), freed at {first} FREE\(1\)"):
        program.check(lists)


def test_a_buffer_written_while_in_use():
    program = pipeline()
    lists = [list(todo) for todo in program.lists]
    lists[0].insert(2, Action("UNSHARD", 0))
    with pytest.raises(Unordered, match=r"UNSHARD\(0\) overwrites params\(0\), which is still in use"):
        program.check(lists)
    lists[0][2], lists[0][1] = lists[0][1], lists[0][2]
    with pytest.raises(Unordered, match=r"UNSHARD\(0\) overwrites gathering\(0\), which is still in use"):
        program.check(lists)


def early(microbatches=2):
    """A list of one process whose unit 1 is reduced every microbatch."""
    order = compute_order("1f1b", 1, 1, microbatches)
    lists = actions(order, [range(3)], [0], keep="use", gathered={1}, reduce_each={1}, prefetched=1, deferred=1)
    program = Program(lists, 3, microbatches, frozenset({1}), frozenset({1}), [], True)
    program.check()
    return program


def without(program, *gone):
    return [[a for a in program.lists[0] if a not in gone]]


def test_faults_of_reductions_in_flight():
    program = early()
    first, last = (Action("WAIT", 1, mb, what="grads") for mb in (0, 1))
    with pytest.raises(Unordered, match=r"adds to accum\(1\) after its REDUCE"):
        program.check(moved(program, 0, last, to=Action("REDUCE", 1)))
    with pytest.raises(Unordered, match=r"WAIT grads\(1, 0\) needs reducing\(1, 0\), not made before"):
        program.check(moved(program, 0, first, to=Action("B", 2, 0)))
    with pytest.raises(Unordered, match=r"UPDATE needs reduced\(1, 0\), still in flight"):
        program.check(without(program, first))
    with pytest.raises(Unordered, match=r"WAIT grads\(1, 0\) needs reducing\(1, 0\), freed at"):
        program.check([[*program.lists[0][:-1], first, Action("UPDATE")]])


def test_faults_of_transfers_in_flight():
    program = pipeline()
    lists = [list(todo) for todo in program.lists]
    lists[0].remove(SENT)
    with pytest.raises(Unordered, match=r"coordinate 0 ends with sending\(1, 0\) left over"):
        program.check(lists)
    receive = Action("RECV", mb=1, peer=0, **ACT)
    with pytest.raises(Unordered, match=r"RECV act\(1, 1\) from 0 overwrites receiving act\(1, 1\)"):
        twice = [receive, *program.lists[1]]
        happens_before([program.lists[0], twice], units=4, microbatches=2, gathered=program.gathered)
    with pytest.raises(Unordered, match=r"RECV act\(1, 1\) from 0 overwrites act\(1, 1\), which is still in use"):
        i = program.lists[1].index(ARRIVED)
        again = [*program.lists[1][: i + 1], receive, *program.lists[1][i + 1 :]]
        happens_before([program.lists[0], again], units=4, microbatches=2, gathered=program.gathered)


def test_faults_of_gathers_in_flight():
    program = early()
    wait, gather = Action("WAIT", 1, what="params"), Action("UNSHARD", 1)
    with pytest.raises(Unordered, match=r"F\(1, 0\) needs params\(1\), still in flight: gathering\(1\)"):
        program.check(moved(program, 0, wait, to=Action("F", 1, 0)))
    with pytest.raises(Unordered, match=r"overwrites gathering\(1\), which is still in use"):
        program.check([[gather, *program.lists[0]]])
    with pytest.raises(Unordered, match=r"ends with gathering\(1\) left over"):
        program.check([[*program.lists[0][:-1], gather, Action("UPDATE")]])
    with pytest.raises(Unordered, match=r"WAIT params\(1\) needs gathering\(1\)"):
        program.check(without(program, gather))


def test_leaks():
    program = pipeline()
    lists = [list(todo) for todo in program.lists]
    index = len(lists[0]) - 1 - lists[0][::-1].index(Action("FREE", 0))
    del lists[0][index]
    with pytest.raises(Unordered, match=r"coordinate 0 ends with params\(0\) left over"):
        program.check(lists)
    del lists[0][lists[0].index(Action("REDUCE", 0))]
    with pytest.raises(Unordered, match=r"WAIT grads\(0\) needs reducing\(0\)"):
        program.check(lists)


def test_a_microbatch_too_few_or_too_many():
    program = pipeline()
    kwargs = {"units": 4, "gathered": program.gathered}
    with pytest.raises(Unordered, match="unit 0, microbatch 2: 0 F, 0 B, 0 I and 0 W"):
        happens_before(program.lists, microbatches=3, **kwargs)
    with pytest.raises(Unordered, match="is not among 4 units and 1 microbatches"):
        happens_before(program.lists, microbatches=1, **kwargs)


def test_in_flight():
    assert in_flight(pipeline("gpipe", 4, 8, gathered=()).lists) == [8, 8, 8, 8]
    assert in_flight(pipeline("1f1b", 4, 8, gathered=()).lists) == [4, 3, 2, 1]
    assert in_flight(pipeline("1f1b", 4, 2, gathered=()).lists) == [2, 2, 2, 1]
    assert in_flight(pipeline("zero-bubble", 4, 8, gathered=()).lists) == [4, 4, 4, 4]
    assert in_flight(pipeline("1f1b", 1, 8, gathered=()).lists) == [1]


def test_effects_of_the_ends():
    assert effects(Action("F", 0, 5), head=3).reads == (("params", 0, -1),)
    assert effects(Action("F", 2, 5), head=3).writes == (("act", 2, 5), ("saved", 2, 5))
    assert effects(Action("F", 3, 5), head=3, train=False).writes == ()
    assert effects(Action("B", 3, 5), head=3).frees == (("act", 2, 5),)  # loss and gradient in one
    assert effects(Action("B", 0, 5), head=3).writes == ()
    assert effects(Action("B", 0, 5), head=3).adds == (("accum", 0, -1),)
    assert effects(Action("B", 0, 5), head=3, reduce_each={0}).writes == (("partial", 0, -1),)
    assert effects(Action("I", 0, 5), head=3).writes == (("wsaved", 0, 5),)
