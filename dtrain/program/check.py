"""Proofs about action lists, without a device: they finish, and every value is there when it is read.

A value is named by a triple (name, unit, microbatch), the microbatch -1 where there is none: `params`
(gathered), `act` (the output of a unit), `grad` (the gradient with respect to it), `saved` (what a forward
keeps for its backward), `wsaved` (what I keeps for W), `partial` (one microbatch's gradient, where it is
reduced by itself), `accum` (the gradient sum) and `reduced` (the gradient for the update). What has been started
and not waited for is another value, that only its WAIT reads: `gathering`, `reducing`, `receiving act`,
`receiving grad` or `sending`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

from dtrain.program.schedule import Action

Value = tuple[str, int, int]
# What a value becomes: while it is in flight, the other one cannot be there or be used.
LANDS = {"gathering": "params", "receiving act": "act", "receiving grad": "grad"}


class ScheduleError(ValueError):
    """An action list is wrong; the message is one line."""


class Deadlock(ScheduleError):  # noqa: N818
    """Some coordinates wait for each other for ever."""


class Mismatched(ScheduleError):  # noqa: N818
    """What one coordinate sends to another is not what that one receives, in that order."""


class Unordered(ScheduleError):  # noqa: N818
    """A value is read too early or too late, overwritten, or never used."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What an action does to the values of its coordinate, in this order. A write makes a value, an add makes
    it or adds to it."""

    reads: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    adds: tuple[Value, ...] = ()


def effects(action: Action, head: int, *, train: bool = True, reduce_each: Collection[int] = ()) -> Effects:
    """The values that an action reads, frees, writes and adds to; `head` is the head's unit, and without
    `train` forwards save nothing. UPDATE has none here: it takes whatever was reduced on its coordinate."""
    unit, mb = action.unit, action.mb
    params: tuple[Value, ...] = (("params", unit, -1),)
    x: tuple[Value, ...] = (("act", unit - 1, mb),) if unit > 0 else ()
    y: tuple[Value, ...] = (("act", unit, mb),) if unit < head else ()
    grad_x: tuple[Value, ...] = (("grad", unit - 1, mb),) if unit > 0 else ()
    grad_y: tuple[Value, ...] = (("grad", unit, mb),) if unit < head else ()  # the head starts from its loss
    saved: tuple[Value, ...] = (("saved", unit, mb),) if unit != head else x  # the head's B is its forward too
    wsaved: tuple[Value, ...] = (("wsaved", unit, mb),)
    partial: tuple[Value, ...] = (("partial", unit, -1),)
    accum: tuple[Value, ...] = (("accum", unit, -1),)
    moved: tuple[Value, ...] = ((action.what, unit, mb),)
    gathering: tuple[Value, ...] = (("gathering", unit, -1),)
    reducing: tuple[Value, ...] = (("reducing", unit, mb),)
    receiving: tuple[Value, ...] = ((f"receiving {action.what}", unit, mb),)
    sending: tuple[Value, ...] = (("sending", unit, mb),)
    apart, summed = (partial, ()) if unit in reduce_each else ((), accum)
    match action.kind:
        case "UNSHARD":
            return Effects(writes=gathering)
        case "WAIT" if action.what == "params":
            return Effects(reads=gathering, frees=gathering, writes=params)
        case "WAIT" if action.what == "sent":
            return Effects(reads=sending, frees=sending)
        case "WAIT" if action.what in ("act", "grad"):
            return Effects(reads=receiving, frees=receiving, writes=moved)
        case "WAIT":
            into = accum if mb >= 0 else (("reduced", unit, -1),)
            return Effects(reads=reducing, frees=reducing, adds=into)
        case "FREE":
            return Effects(frees=params)
        case "F":
            return Effects(reads=params + x, frees=x, writes=y + saved if train else y)
        case "B":
            used = saved + grad_y
            return Effects(reads=params + used, frees=used, writes=grad_x + apart, adds=summed)
        case "I":
            used = saved + grad_y
            return Effects(reads=params + used, frees=used, writes=grad_x + wsaved)
        case "W":
            return Effects(reads=params + wsaved, frees=wsaved, writes=apart, adds=summed)
        case "REDUCE" if mb >= 0:
            return Effects(reads=partial, frees=partial, writes=reducing)
        case "REDUCE":
            return Effects(reads=accum, frees=accum, writes=reducing)
        case "SEND":
            return Effects(reads=moved, frees=moved, writes=sending)
        case "RECV":
            return Effects(writes=receiving)
        case "UPDATE":
            return Effects()


def finish(lists: Sequence[Sequence[Action]], tied: Iterable[tuple[int, int]] = ()) -> None:
    """Run the lists as on a device with nothing buffered: SEND and RECV put a transfer in the queue of their
    coordinate and direction, a transfer happens when it is the first in the queues of both its ends, and a WAIT for
    it blocks until then.

    The step's REDUCEs of two `tied` units meet if they are on different coordinates (their start blocks here, which
    is stricter than a device), and UPDATE, which needs the global gradient norm, meets on all. Raises Mismatched or
    Deadlock.
    """
    _check_order(lists)
    other = {a: b for pair in tied for a, b in (pair, pair[::-1])}
    home = {a.unit: rank for rank, todo in enumerate(lists) for a in todo if a.kind == "REDUCE"}
    at = [0] * len(lists)
    queues: dict[tuple[int, str], deque[Action]] = defaultdict(deque)
    done: list[set[Value]] = [set() for _ in lists]

    def current(rank: int) -> Action | None:
        return lists[rank][at[rank]] if 0 <= rank < len(lists) and at[rank] < len(lists[rank]) else None

    def meets(rank: int, action: Action) -> dict[int, Action]:
        """Where each other coordinate has to be for this action to run."""
        match action.kind:
            case "UPDATE":
                return {peer: action for peer in range(len(lists)) if peer != rank}
            case "REDUCE" if action.unit in other and action.mb < 0:
                peer = home.get(other[action.unit], -1)
                return {} if peer == rank else {peer: Action("REDUCE", other[action.unit])}
        return {}

    def transfer(rank: int, what: str) -> bool:
        """Let the first transfer of a queue happen, if the other end is as far."""
        first = next(iter(queues[rank, what]), None)
        there = next(iter(queues[first.peer, what]), None) if first else None
        if first is None or there is None or there != _other_end(first, rank):
            return False
        for end, a in ((rank, first), (first.peer, there)):
            queues[end, what].popleft()
            done[end].add(("sent" if a.kind == "SEND" else what, a.unit, a.mb))
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(lists)):
            while (action := current(rank)) is not None:
                wanted = meets(rank, action)
                if any(current(peer) != there for peer, there in wanted.items()):
                    break
                if action.kind == "WAIT" and action.what in ("sent", "act", "grad"):
                    if (action.what, action.unit, action.mb) not in done[rank]:
                        break
                elif action.kind in ("SEND", "RECV"):
                    queues[rank, action.what].append(action)
                for peer in (rank, *wanted):
                    at[peer] += 1
                moved = True
        for rank, what in list(queues):
            while transfer(rank, what):
                moved = True
    waiting = []
    for rank in range(len(lists)):
        if (action := current(rank)) is not None:
            for peer, there in meets(rank, action).items():
                if current(peer) != there:
                    who = f"coordinate {peer}" if peer >= 0 else "any coordinate"
                    waiting.append(f"coordinate {rank} at {at[rank]} {action} waits for {there} on {who}")
            if action.kind == "WAIT":
                waiting.append(f"coordinate {rank} at {at[rank]} {action} is blocked")
        for what in ("act", "grad"):
            if queue := queues[rank, what]:
                waiting.append(f"coordinate {rank}'s {queue[0]} waits for {_other_end(queue[0], rank)}")
    if waiting:
        raise Deadlock("; ".join(waiting))


def _other_end(a: Action, rank: int) -> Action:
    return Action("RECV" if a.kind == "SEND" else "SEND", a.unit, a.mb, rank, a.what)


def _check_order(lists: Sequence[Sequence[Action]]) -> None:
    for source, target, what in product(range(len(lists)), range(len(lists)), ("act", "grad")):
        sent = [a for a in lists[source] if (a.kind, a.peer, a.what) == ("SEND", target, what)]
        received = [a for a in lists[target] if (a.kind, a.peer, a.what) == ("RECV", source, what)]
        for index, (out, into) in enumerate(zip_longest(sent, received)):
            if not out or not into or (out.unit, out.mb) != (into.unit, into.mb):
                raise Mismatched(
                    f"transfer {index} from coordinate {source} to {target}: "
                    f"{out or 'nothing sent'}, but {into or 'nothing received'}"
                )


def happens_before(
    lists: Sequence[Sequence[Action]],
    *,
    units: int,
    microbatches: int,
    gathered: Collection[int],
    reduce_each: Collection[int] = (),
    train: bool = True,
) -> None:
    """Every unit's forward and backward of every microbatch is done once, each read follows its producer, and
    nothing is overwritten, freed early, added to after its REDUCE, or left over at the end.

    A list is checked by itself; that a RECV follows its SEND is what `finish` shows. Raises Unordered.
    """
    count: Counter[Action] = Counter()
    for rank, todo in enumerate(lists):
        _check_values(rank, todo, units - 1, gathered, reduce_each, train)
        count.update(a for a in todo if a.kind in ("F", "B", "I", "W"))
    for unit in range(units):
        for mb in range(microbatches):
            f, b, i, w = (count.pop(Action(kind, unit, mb), 0) for kind in ("F", "B", "I", "W"))
            allowed: tuple[tuple[int, ...], ...] = ((1, 1, 0, 0), (1, 0, 1, 1)) if train else ((1, 0, 0, 0),)
            if train and unit == units - 1:
                allowed = ((0, 1, 0, 0),)
            if (f, b, i, w) not in allowed:
                raise Unordered(f"unit {unit}, microbatch {mb}: {f} F, {b} B, {i} I and {w} W")
    if count:
        raise Unordered(f"{next(iter(count))} is not among {units} units and {microbatches} microbatches")


def _check_values(
    rank: int,
    todo: Sequence[Action],
    head: int,
    gathered: Collection[int],
    reduce_each: Collection[int],
    train: bool,
) -> None:
    live: set[Value] = set()
    unread: set[Value] = set()
    freed: dict[Value, int] = {}
    for index, action in enumerate(todo):
        where = f"coordinate {rank} at {index} {action}"
        does = effects(action, head, train=train, reduce_each=reduce_each)
        for value in does.reads + does.frees:
            if value not in live:
                at = freed.get(value, -1)
                past = f"freed at {at} {todo[at]}" if at >= 0 else "not made before"
                if flying := [v for v in live if LANDS.get(v[0]) == value[0] and v[1:] == value[1:]]:
                    past = f"still in flight: {_name(flying[0])}"
                raise Unordered(f"{where} needs {_name(value)}, {past}")
        unread.difference_update(does.reads)
        for value in does.frees:
            if value in unread:
                raise Unordered(f"{where} frees {_name(value)} before anything has read it")
            live.remove(value)
            freed[value] = index
        for value in does.writes:
            for there in (value, (LANDS.get(value[0], ""), *value[1:])):
                if there in live:
                    raise Unordered(f"{where} overwrites {_name(there)}, which is still in use")
        for value in does.adds:
            if value[0] == "accum" and any((name, *value[1:]) in live for name in ("reducing", "reduced")):
                raise Unordered(f"{where} adds to {_name(value)} after its REDUCE")
        live.update(does.writes, does.adds)
        unread.update(does.writes)
        if action.kind == "UPDATE":
            if flying := sorted(v for v in live if v[0] == "reducing"):
                raise Unordered(f"{where} needs {_name(('reduced', *flying[0][1:]))}, still in flight")
            if index + 1 < len(todo):
                raise Unordered(f"{where} is followed by {todo[index + 1]}; UPDATE must be last")
            live = {value for value in live if value[0] != "reduced"}
    if train and (not todo or todo[-1].kind != "UPDATE"):
        raise Unordered(f"coordinate {rank} does not end with UPDATE")
    left = sorted(v for v in live if v[0] != "params" or v[1] in gathered or v in unread)
    if left:
        raise Unordered(f"coordinate {rank} ends with {', '.join(map(_name, left))} left over")


def _name(value: Value) -> str:
    name, unit, mb = value
    return f"{name}({unit}, {mb})" if mb >= 0 else f"{name}({unit})"


def in_flight(lists: Sequence[Sequence[Action]]) -> list[int]:
    """The largest number of microbatches for which each coordinate holds saved values at one time."""
    peaks = []
    head = max((a.unit for todo in lists for a in todo), default=-1)
    for todo in lists:
        held: Counter[int] = Counter()
        peak = 0
        for action in todo:
            does = effects(action, head)
            held.update(mb for name, _, mb in does.writes if name in ("saved", "wsaved"))
            held.subtract(mb for name, _, mb in does.frees if name in ("saved", "wsaved"))
            peak = max(peak, sum(n > 0 for n in held.values()))
        peaks.append(peak)
    return peaks
