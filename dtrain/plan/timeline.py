"""When every action of a step runs, on every pipeline coordinate: the lists of `dtrain run` on simulated streams.

A GPU works through its kernels in the order that the interpreter issues them, far ahead of them: one stream for
kernels, and one for each communicator. A collective starts when the kernels issued before it have ended and its
communicator is free; waiting for it holds up the kernels issued after. What stands in a graph that computes is
waited for at once. A transfer between coordinates is a rendezvous, as NCCL's are: it starts when both ends have
reached it. All ranks at one coordinate do the same, so the cost does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from dtrain import layout as layouts
from dtrain.mesh import base
from dtrain.plan import Plan
from dtrain.plan import seconds as sec
from dtrain.plan.ledger import Level, levels
from dtrain.plan.loads import Loads, loads_of
from dtrain.plan.seconds import Constants, Machine, Piece
from dtrain.program.compile import GRAPH_OF
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import Program
from dtrain.program.schedule import COMPUTES, Action

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a stream, in seconds from the start of the step: kernels (`stream` is "compute") or a collective or
    transfer (the communicator's name). `wire` is how much of a compute span waits for collectives in its graph."""

    stream: str
    action: Action
    start: float
    end: float
    wire: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step. `spans` are those of each pipeline coordinate, in order of issue; `step` its seconds; `busy` the seconds
    of kernels of each coordinate.

    `exposed` is the share of the step in which a coordinate waits for communication that is under way (the mean over
    coordinates); `bubble` the share in which it does nothing: it waits for what another has not sent yet, or for the
    last coordinate to end.
    """

    spans: tuple[tuple[Span, ...], ...]
    step: float
    busy: tuple[float, ...]
    bubble: float
    exposed: float


Work = Callable[[int, Action], Sequence[Piece]]  # what an action of a coordinate does, in order of its list


def timeline(plan: Plan, program: Program, constants: Constants | None = None) -> Timeline:
    """A training step of a plan on its layout's machine."""
    loads = loads_of(program, plan.layout.run.compile != "off", plan.layout.kernels.async_tp)
    return timed(plan, loads, constants)


def timed(plan: Plan, of: Loads, constants: Constants | None = None) -> Timeline:
    """The same of a program's loads."""
    on = sec.machine(plan.layout, constants)
    members = {"world": tuple(range(len(plan.train)))}
    if plan.job.tied_across:
        members["pp@" + "+".join(map(str, plan.job.tied_across))] = plan.job.tied_across
    return simulate(plan.train, work(plan, of, on), transfers(plan, of, on), members, on.constants.overlap)


# ------------------------------------------------------------------------------------------- what actions take


def work(plan: Plan, loads: Loads, on: Machine) -> Work:
    """Seconds of the graphs that each action runs, and of what the interpreter does around them. To be asked in the
    order of the lists: the first gradients of a unit become its sums, later ones are added to them."""
    layers = plan.job.layers
    summed: set[tuple[int, int]] = set()

    @cache
    def group(name: str) -> tuple[Level, ...]:
        return levels(plan.layout, name)

    @cache
    def graph(segment: str, name: str) -> tuple[Piece, ...]:
        return sec.pieces(on, loads.segments[segment].graphs.get(name, ()), group)

    @cache
    def computes(segment: str, name: str, first: bool) -> tuple[Piece, ...]:
        busy, wire = sec.at_once(graph(segment, name))
        elements = loads.segments[segment].sums[name]
        return (Piece("run", busy + (_accumulating(on, loads, elements, first) if elements else 0.0), wire),)

    @cache
    def added(segment: str, first: bool) -> tuple[Piece, ...]:
        bytes = 3 * loads.whole * (loads.segments[segment].early or 0)
        return graph(segment, "reduce_early_wait") + (() if first else (_run(on, bytes),))

    @cache
    def update(pp: int) -> tuple[Piece, ...]:
        agreed = sec.collective(on, "all_reduce", 24, group("world")) if plan.job.mesh.world > 1 else 0.0
        names = [unit_segment(u, layers)[0] for u in plan.units[pp]]
        norms, adamw = _updating(on, loads.whole * sum(loads.segments[name].owned for name in names))
        return (
            norms,
            Piece("start", agreed, stream="world", name="agree"),
            Piece("wait", name="agree"),
            adamw,
            *(p for name in names for p in graph(name, "publish")),
        )

    def of(pp: int, a: Action) -> Sequence[Piece]:
        segment = unit_segment(a.unit, layers)[0] if a.unit >= 0 else ""
        first = (pp, a.unit) not in summed
        if a.kind in GRAPH_OF:
            early = loads.segments[segment].early is not None
            if a.kind in ("B", "W") and not early:
                summed.add((pp, a.unit))
            return computes(segment, GRAPH_OF[a.kind], first or early)
        if a.kind == "UNSHARD" or (a.kind == "WAIT" and a.what == "params"):
            return graph(segment, "unshard" if a.kind == "UNSHARD" else "unshard_wait")
        if a.kind == "REDUCE":
            return graph(segment, "reduce_early" if a.mb >= 0 else "reduce")
        if a.kind == "WAIT" and a.what == "grads":
            if a.mb < 0:
                return graph(segment, "reduce_wait")
            summed.add((pp, a.unit))
            return added(segment, first)
        return update(pp) if a.kind == "UPDATE" else ()

    return of


def _run(on: Machine, bytes: float) -> Piece:
    return Piece("run", sec.moved(on, bytes) + on.constants.gap)


def _accumulating(on: Machine, loads: Loads, elements: int, first: bool) -> float:
    """Seconds of taking up a microbatch's gradients: the first become the sums, converted, later ones are added."""
    if first and loads.part == loads.whole:
        return 0.0
    return _run(on, elements * (loads.part + loads.whole * (1 if first else 2))).seconds


def _updating(on: Machine, bytes: int) -> tuple[Piece, Piece]:
    """The kernels of the end of a step, for masters of so many bytes: norms read the gradients; AdamW reads and writes
    masters, gradients (which it divides by the norm) and two moments."""
    return _run(on, bytes), _run(on, 8 * bytes)


def transfers(plan: Plan, loads: Loads, on: Machine) -> Callable[[int, Action], float]:
    """Seconds of a SEND of a coordinate."""

    @cache
    def between(one: int, other: int) -> float:
        link = layouts.link_between(plan.layout, "pp", (one, other))
        return sec.collective(on, "send", loads.act, (Level("pp", link, 2),))

    return lambda pp, a: between(pp, a.peer)


# ------------------------------------------------------------------------------------------------- the streams


@dataclass(slots=True)
class _Flight:
    """A collective or transfer: which coordinates have reached it, when and by which action; and when it runs, once all
    its `ends` have."""

    ends: int
    seconds: float = 0.0
    reached: list[tuple[int, float, Action]] = field(default_factory=list)
    start: float = math.inf
    end: float = math.inf


@dataclass(slots=True)
class _Rank:
    """The streams of one coordinate. `now` is when the kernels issued so far have ended; `free` when each communicator
    is, `since` the moment from which on it has been busy. `at` is the next action, `piece` the next of its pieces."""

    actions: Sequence[Action]
    at: int = 0
    piece: int = 0
    parts: Sequence[Piece] = ()
    began: float = -1.0
    stalled: float = 0.0
    now: float = 0.0
    busy: float = 0.0
    exposed: float = 0.0
    spans: list[Span] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    flying: dict[tuple[str, int, int], dict[str, _Flight]] = field(default_factory=dict)


def simulate(
    lists: Sequence[Sequence[Action]],
    work: Work,
    transfer: Callable[[int, Action], float],
    members: Mapping[str, Sequence[int]] | None = None,
    overlap: float = 0.0,
) -> Timeline:
    """Run action lists on simulated streams. `transfer` are the seconds of a SEND; `members` the coordinates that meet
    in a communicator, where it is not each coordinate's own; kernels lose `overlap` seconds for each second of
    collectives beside them. Raises ValueError where the lists wait for each other for ever."""
    ranks = [_Rank(actions) for actions in lists]
    meeting = members or {}
    numbers: dict[tuple[str, int, int, int], int] = {}  # how many flights of a channel an end has reached
    channels: dict[tuple[str, int, int], list[_Flight]] = {}
    through: dict[tuple[str, int, int], tuple[int, float]] = {}  # how many of a channel have run, and until when

    def reach(channel: tuple[str, int, int], pp: int, ends: int, seconds: float, a: Action) -> _Flight:
        """A coordinate reaches the next flight of a channel; those that all ends have reached run, in order."""
        number = numbers.get((*channel, pp), 0)
        numbers[(*channel, pp)] = number + 1
        flights = channels.setdefault(channel, [])
        if number == len(flights):
            flights.append(_Flight(ends))
        flight = flights[number]
        flight.seconds = max(flight.seconds, seconds)
        flight.reached.append((pp, ranks[pp].now, a))
        done, free = through.get(channel, (0, 0.0))
        while done < len(flights) and len(flights[done].reached) == flights[done].ends:
            f = flights[done]
            f.start = max(free, *(t for _, t, _ in f.reached))
            f.end = free = f.start + f.seconds
            done += 1
            if f.seconds:
                for member, _, action in f.reached:
                    ranks[member].spans.append(Span(channel[0], action, f.start, f.end))
        through[channel] = (done, free)
        return flight

    def launch(pp: int, rank: _Rank, p: Piece, a: Action) -> _Flight:
        """A coordinate starts a collective."""
        who = meeting.get(base(p.stream))
        if who is not None:
            return reach((p.stream, -1, -1), pp, len(who), p.seconds, a)
        free = rank.free.get(p.stream, -1.0)
        start = max(rank.now, free)
        if start > free:
            rank.since[p.stream] = start
        rank.free[p.stream] = start + p.seconds
        rank.spans.append(Span(p.stream, a, start, start + p.seconds))
        return _Flight(1, p.seconds, [], start, start + p.seconds)

    def compute(rank: _Rank, p: Piece) -> None:
        """Kernels, and collectives that they wait for at once."""
        if rank.began < 0:
            rank.began = rank.now
        until, busy = rank.now + p.seconds + p.wire, p.seconds
        if overlap and rank.free and p.seconds:
            beside = sum(max(0.0, min(until, rank.free[s]) - max(rank.now, t)) for s, t in rank.since.items())
            busy *= 1 + overlap * beside / (p.seconds + p.wire)
        rank.busy += busy
        rank.stalled += p.wire
        rank.exposed += p.wire
        rank.now += busy + p.wire

    def landed(rank: _Rank, flight: _Flight) -> bool:
        """Let the kernels wait for a flight; False where nobody knows yet when it ends."""
        if flight.end == math.inf:
            return False
        if flight.end > rank.now:
            rank.exposed += flight.end - max(rank.now, flight.start)
            rank.stalled += (flight.end - rank.now) * (rank.began >= 0)
            rank.now = flight.end
        return True

    def act(pp: int, rank: _Rank, a: Action) -> bool:
        """Do an action, or as much of it as can be done now."""
        if a.kind in ("SEND", "RECV"):
            mine = a.kind == "SEND"
            channel = (f"pp/{a.what}", *((pp, a.peer) if mine else (a.peer, pp)))
            flight = reach(channel, pp, 2, transfer(pp, a) if mine else 0.0, a)
            rank.flying["sent" if mine else a.what, a.unit, a.mb] = {"": flight}
            return True
        if a.kind == "WAIT" and a.what not in ("params", "grads"):
            if not landed(rank, rank.flying[a.what, a.unit, a.mb][""]):
                return False
            del rank.flying[a.what, a.unit, a.mb]
            return True
        if not rank.piece:
            rank.parts, rank.began, rank.stalled = work(pp, a), -1.0, 0.0
        key = (a.what or {"UNSHARD": "params", "REDUCE": "grads"}.get(a.kind, ""), a.unit, a.mb)
        flights = rank.flying.setdefault(key, {}) if rank.parts and a.kind not in COMPUTES else {}
        while rank.piece < len(rank.parts):
            p = rank.parts[rank.piece]
            if p.kind == "run":
                compute(rank, p)
            elif p.kind == "start":
                flights[p.name] = launch(pp, rank, p, a)
            elif not landed(rank, flights[p.name]):
                return False
            rank.piece += 1
        rank.piece = 0
        if rank.began >= 0:
            rank.spans.append(Span(COMPUTE, a, rank.began, rank.now, rank.stalled))
        if a.kind == "WAIT":
            rank.flying.pop(key, None)
        return True

    moved = True
    while moved:
        moved = False
        for pp, rank in enumerate(ranks):
            while rank.at < len(rank.actions) and act(pp, rank, rank.actions[rank.at]):
                rank.at, moved = rank.at + 1, True
    for pp, rank in enumerate(ranks):
        if rank.at < len(rank.actions):
            raise ValueError(f"coordinate {pp} waits for ever at {rank.actions[rank.at]}")
    step = max((rank.now for rank in ranks), default=0.0)
    whole = step * len(ranks) or 1.0
    busy = tuple(rank.busy for rank in ranks)
    exposed = sum(rank.exposed for rank in ranks) / whole
    bubble = max(0.0, 1 - exposed - sum(busy) / whole)
    return Timeline(tuple(tuple(rank.spans) for rank in ranks), step, busy, bubble, exposed)
