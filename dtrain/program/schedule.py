"""Action lists: what each pipeline coordinate does in a step, in order.

A *unit* is one call of a model segment: embed is 0, layer l is l + 1, the head is the last. A *stage* is a
contiguous run of units, owned by one pipeline *coordinate*; a coordinate may own several stages (chunks).
`compute_order` decides when each stage works on which microbatch, `actions` turns that into the full list
with transfers, gathers and reductions. One process and gradient accumulation are the same with pp = 1.

In training the head has no F: its B is loss and gradient in one, so that its scores of the whole vocabulary need not
wait anywhere, and nothing is computed twice. It has no halves either, for the scores would wait between them.

What runs beside the computes is started by one action and ended by another. UNSHARD(unit) starts the gather of a
unit's parameters, and WAIT params(unit) must come before its first use; REDUCE(unit, mb) or REDUCE(unit) starts a
reduction, and WAIT grads(...) adds its result; RECV posts a receive, and WAIT act(...) or WAIT grad(...) is its end;
SEND starts a send, and WAIT sent(...) releases its buffer. Between the two nothing may read, free or reuse what is
in flight. `prefetch` moves the starts of gathers forward, `defer` places the waits for reductions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

Kind = Literal["UNSHARD", "F", "B", "I", "W", "REDUCE", "SEND", "RECV", "WAIT", "FREE", "UPDATE"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
Keep = Literal["step", "forward", "use"]
Compute = tuple[Kind, int, int]  # kind (F, B, I or W), stage, microbatch

# These read gathered parameters. W too: it may have to recompute activations that I did not need.
COMPUTES: tuple[Kind, ...] = ("F", "B", "I", "W")
# Only the order of transfers depends on these; a backward costs about two forwards.
DURATIONS: Mapping[Kind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a list. `peer` is the pipeline coordinate at the other end of a SEND or RECV, `what` says
    whether it carries the output of `unit` for microbatch `mb` (`act`) or the gradient with respect to that
    output (`grad`). A WAIT says in `what` what it ends: `params` of an UNSHARD, `grads` of a REDUCE, `act` or
    `grad` of a RECV, or a `sent`."""

    kind: Kind
    unit: int = -1
    mb: int = -1
    peer: int = -1
    what: str = ""

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "to" if self.kind == "SEND" else "from"
            return f"{self.kind} {self.what}({self.unit}, {self.mb}) {way} {self.peer}"
        numbers = [str(n) for n in (self.unit, self.mb) if n >= 0]
        name = f"{self.kind} {self.what}" if self.what else self.kind
        return f"{name}({', '.join(numbers)})" if numbers else name


def unit_ranges(layers_per_stage: Sequence[int]) -> list[range]:
    """The units of each stage; the first stage also has the embedding, the last one the head."""
    stops = list(accumulate(layers_per_stage, initial=1))
    stops[0], stops[-1] = 0, stops[-1] + 1
    return [range(start, stop) for start, stop in pairwise(stops)]


def coordinate_of(schedule: Schedule, pp: int, chunks: int) -> list[int]:
    """The pipeline coordinate that owns each of the pp * chunks stages: round after round, but `zbv` turns
    back at the last coordinate, so that the first one owns both ends of the model."""
    if schedule == "zbv":
        return [*range(pp), *reversed(range(pp))]
    return [stage % pp for stage in range(pp * chunks)]


def compute_order(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """The F and B (or F, I and W) of each coordinate, in order. Every number of microbatches works, fewer
    than coordinates too.

    gpipe: all forwards, then all backwards. 1f1b: Narayanan et al. 2021 (arXiv 2104.04473) section 2.2, at
    most pp - r microbatches in flight on coordinate r. interleaved: the same section, as in Megatron-LM.
    zero-bubble: ZB-H1 of Qi et al. 2023 (arXiv 2401.10241), nowhere more in flight than 1F1B's pp and a third
    of its bubble when F, I and W take equal times. zbv: section 6 there.

    Raises ValueError for numbers that the schedule does not have.
    """
    for name, value in (("pp", pp), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    wanted = {"interleaved": chunks, "zbv": 2}.get(schedule, 1)
    if chunks != wanted:
        raise ValueError(f"chunks is {chunks}; schedule {schedule} has {wanted} on each pipeline coordinate")

    singles = [[(rank, mb) for mb in range(microbatches)] for rank in range(pp)]
    match schedule:
        case "gpipe":
            return [_alternate(work, work, microbatches) for work in singles]
        case "1f1b":
            return [_alternate(work, work, pp - 1 - rank) for rank, work in enumerate(singles)]
        case "zero-bubble":
            # Coordinate r may hold as many microbatches as the first one, pp: it puts off W by r of them.
            return [_alternate(work, work, pp - 1 - rank, lag=rank) for rank, work in enumerate(singles)]
        case "interleaved":
            whole = [_interleaved(pp, chunks, -(-microbatches // pp), rank) for rank in range(pp)]
        case "zbv":
            whole = [_zbv(pp, max(microbatches, 2 * pp - 1), rank) for rank in range(pp)]
    # These two are written for enough microbatches; without the surplus ones every dependency still holds.
    return [[compute for compute in order if compute[2] < microbatches] for order in whole]


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warmup: int,
    lag: int | None = None,
) -> list[Compute]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards left. With a `lag`
    each backward is split, and its weight half comes `lag` backwards later."""
    warmup = min(warmup, len(forwards))
    out: list[Compute] = []
    for step in range(len(forwards) + warmup):
        if step < len(forwards):
            out.append(("F", *forwards[step]))
        done = step - warmup
        if done < 0:
            continue
        out.append(("B" if lag is None else "I", *backwards[done]))
        if lag is not None and done >= lag:
            out.append(("W", *backwards[done - lag]))
    if lag:
        out += [("W", *work) for work in backwards[-lag:]]
    return out


def _interleaved(pp: int, chunks: int, rounds: int, rank: int) -> list[Compute]:
    """Each round takes pp microbatches through the first chunk, then the same ones through the next."""
    order = [(chunk, turn * pp + mb) for turn in range(rounds) for chunk in range(chunks) for mb in range(pp)]
    forwards = [(chunk * pp + rank, mb) for chunk, mb in order]
    backwards = [((chunks - 1 - chunk) * pp + rank, mb) for chunk, mb in order]
    # A single chunk is plain 1F1B, which need not run ahead twice as far.
    warmup = pp - 1 - rank if chunks == 1 else (chunks - 1) * pp + 2 * (pp - 1 - rank)
    return _alternate(forwards, backwards, warmup)


def _zbv(pp: int, microbatches: int, rank: int) -> list[Compute]:
    down, up = rank, 2 * pp - 1 - rank
    count: Counter[tuple[Kind, int]] = Counter()
    out: list[Compute] = []

    def do(times: int, *steps: tuple[Kind, int]) -> None:
        for step in steps * times:
            out.append((*step, count[step]))
            count[step] += 1

    do(2 * (pp - rank) - 1, ("F", down))
    do(rank, ("F", up), ("F", down))
    do(pp - rank, ("F", up), ("I", up), ("W", up))
    while count["F", up] < microbatches:
        if count["F", down] < microbatches:
            do(1, ("F", down))
        do(1, ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    do(rank, ("I", down), ("I", up))
    do(pp - rank, ("I", down), ("W", down))
    for stage in (up, down):
        do(microbatches - count["W", stage], ("W", stage))
    return out


def timing(
    order: Sequence[Sequence[Compute]],
    coordinate: Sequence[int],
    durations: Mapping[Kind, float] = DURATIONS,
) -> dict[Compute, tuple[float, float]]:
    """When each compute starts and ends if every one starts as soon as its inputs exist, in units of
    `durations` for a whole stage, transfers free. Raises ValueError if the order waits for itself."""
    spans: dict[Compute, tuple[float, float]] = {}
    ended: dict[tuple[str, int, int], float] = {}
    at, free = [0] * len(order), [0.0] * len(order)

    def inputs(kind: Kind, stage: int, mb: int) -> list[tuple[str, int, int]]:
        if kind == "F":
            return [("F", stage - 1, mb)] if stage else []
        if kind == "W":
            return [("grad", stage, mb)]
        after = [("grad", stage + 1, mb)] if stage + 1 < len(coordinate) else []
        return [("F", stage, mb), *after]

    moved = True
    while moved:
        moved = False
        for rank, computes in enumerate(order):
            for compute in computes[at[rank] :]:
                needs = inputs(*compute)
                if not all(need in ended for need in needs):
                    break
                kind, stage, mb = compute
                start = max([free[rank], *(ended[need] for need in needs)])
                free[rank] = start + durations[kind]
                spans[compute] = (start, free[rank])
                ended["grad" if kind in ("B", "I") else kind, stage, mb] = free[rank]
                at[rank] += 1
                moved = True
    for rank, computes in enumerate(order):
        if at[rank] < len(computes):
            raise ValueError(f"coordinate {rank} waits for ever before {computes[at[rank]]}")
    return spans


def actions(
    order: Sequence[Sequence[Compute]],
    stages: Sequence[range],
    coordinate: Sequence[int],
    *,
    keep: Keep,
    gathered: Collection[int],
    reduce_each: Collection[int] = (),
    tied: Iterable[tuple[int, int]] = (),
    prefetched: int = 0,
    deferred: int = 0,
) -> list[list[Action]]:
    """The whole training step of each coordinate, ending with UPDATE.

    `stages` are the units of each stage, `coordinate` its owner. `gathered` are the units whose gathered
    parameters are freed again, when `keep` says: after the last use of the `step`, when no microbatch is
    between its `forward` and its backward, or after each `use`, but not where the next compute is the unit's own; any
    other unit gets one UNSHARD and no FREE.
    REDUCE follows a unit's last accumulation; a unit in `reduce_each` also has a REDUCE of its own for every
    microbatch, into a sharded accumulator. `tied` are pairs of units that share a parameter: their REDUCE of
    the step meets the other coordinate, so these come last and in one order everywhere. A unit may be in one
    pair. Gathers start `prefetched` computes early, and `deferred` reductions may be in flight.

    Raises ValueError where stages, owners or ties do not fit together.
    """
    _check_stages(stages, coordinate)
    pairs = sorted(tied)
    late = [unit for pair in pairs for unit in pair]
    if len(set(late)) < len(late):
        raise ValueError(f"tied is {pairs}; a unit may be tied to one other unit")
    return [
        defer(prefetch(_with_gathers(_with_reduces(todo, late, reduce_each), keep, gathered), prefetched), deferred)
        for todo in map(_apart, _with_transfers(order, stages, coordinate, True))
    ]


def forward_only(
    stages: Sequence[range],
    coordinate: Sequence[int],
    microbatches: int,
    *,
    keep: Keep,
    gathered: Collection[int],
    prefetched: int = 0,
) -> list[list[Action]]:
    """The lists of an evaluation: no backward, no REDUCE, no UPDATE. `keep` forward is the same as use here."""
    _check_stages(stages, coordinate)
    # As in the interleaved schedule: pp microbatches through one chunk, then the same ones through the next.
    pp = max(coordinate) + 1
    turns = [range(start, min(start + pp, microbatches)) for start in range(0, microbatches, pp)]
    mine = [[stage for stage, owner in enumerate(coordinate) if owner == rank] for rank in range(pp)]
    order: list[list[Compute]] = [
        [("F", stage, mb) for turn in turns for stage in owned for mb in turn] for owned in mine
    ]
    return [
        prefetch(_with_gathers(todo, "step" if keep == "step" else "use", gathered), prefetched)
        for todo in map(_apart, _with_transfers(order, stages, coordinate, False))
    ]


def _check_stages(stages: Sequence[range], coordinate: Sequence[int]) -> None:
    if len(stages) != len(coordinate):
        raise ValueError(f"{len(stages)} stages were given for a schedule with {len(coordinate)}")
    start = 0
    for stage, units in enumerate(stages):
        if units.start != start or len(units) == 0:
            raise ValueError(f"stage {stage} has units {units}; it must have at least one, from {start} on")
        start = units.stop


def _with_transfers(
    order: Sequence[Sequence[Compute]], stages: Sequence[range], coordinate: Sequence[int], train: bool
) -> list[list[Action]]:
    """Stage computes as unit actions, with every SEND and RECV.

    All computes (by their start) and transfers (by the end of their producer) are put into one global order,
    and each list is what one coordinate has of it. So the first unfinished event of the global order can
    always proceed: the lists finish even if a SEND blocks until its RECV is reached and nothing is buffered.
    """
    Event = tuple[tuple[float, int, int, int, int], list[tuple[int, Action]]]
    events: list[Event] = []
    whole = stages[-1][-1] if train else -1  # the head, whose B is all of it
    for (kind, stage, mb), (start, end) in timing(order, coordinate).items():
        rank = coordinate[stage]
        units = stages[stage] if kind == "F" else stages[stage][::-1]
        todo = [(rank, Action("B" if unit == whole and kind == "I" else kind, unit, mb)) for unit in units]
        if kind in ("F", "W"):
            todo = [(rank, action) for rank, action in todo if action.unit != whole]
        events.append(((start, 1, rank, stage, mb), todo))
        target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
        if 0 <= target < len(stages) and coordinate[target] != rank:
            what, unit = ("act", stages[stage][-1]) if kind == "F" else ("grad", stages[stage][0] - 1)
            peer = coordinate[target]
            send, recv = Action("SEND", unit, mb, peer, what), Action("RECV", unit, mb, rank, what)
            events.append(((end, 0, rank, stage, mb), [(rank, send), (peer, recv)]))
    lists: list[list[Action]] = [[] for _ in order]
    for _, entries in sorted(events, key=lambda event: event[0]):
        for rank, action in entries:
            lists[rank].append(action)
    return lists


def _apart(todo: Sequence[Action]) -> list[Action]:
    """Transfers that run beside the computes.

    A RECV is posted one compute of a stage early, unless the last message of its direction is not taken up yet, and
    its WAIT stands before its reader; the WAIT for a send comes before the next SEND of its direction, or at the end.
    No RECV comes later than before and the transfers of a direction keep their order. So the lists still finish,
    without buffers and with each direction in order: what a WAIT waits for is earlier in the global order.
    """
    out: list[Action] = []
    coming: dict[tuple[str, int, int], None] = {}
    sending: dict[str, Action] = {}

    def sent(a: Action) -> Action:
        return Action("WAIT", a.unit, a.mb, what="sent")

    for action in todo:
        if action.kind == "SEND":
            out += [sent(sending[action.what])] if action.what in sending else []
            sending[action.what] = action
        if action.kind == "RECV":
            ahead = any(what == action.what for what, _, _ in coming)
            coming[action.what, action.unit, action.mb] = None
            at, crossed = len(out), None
            while not ahead and at and out[at - 1].what != action.what:
                before = out[at - 1]
                if before.kind in COMPUTES and (before.kind, before.mb) != (crossed or (before.kind, before.mb)):
                    break
                crossed = (before.kind, before.mb) if before.kind in COMPUTES else crossed
                at -= 1
            out.insert(at, action)
            continue
        if action.kind in ("F", "B", "I"):
            for reads in (("act", action.unit - 1, action.mb), ("grad", action.unit, action.mb)):
                if reads in coming:
                    del coming[reads]
                    out.append(Action("WAIT", reads[1], reads[2], what=reads[0]))
        out.append(action)
    return out + [sent(a) for a in sending.values()]


def _with_reduces(computes: Sequence[Action], late: Sequence[int], reduce_each: Collection[int]) -> list[Action]:
    left = Counter(a.unit for a in computes if a.kind in ("B", "W"))
    here = set(left)
    out: list[Action] = []
    due: list[Action] = []
    for action in computes:
        # Another stage waits for a transfer, nobody for a REDUCE.
        if action.kind not in ("SEND", "RECV") and action.what != "sent":
            out += due
            due = []
        out.append(action)
        if action.kind in ("B", "W"):
            unit = action.unit
            left[unit] -= 1
            if unit in reduce_each:
                due.append(Action("REDUCE", unit, action.mb))
            if left[unit] == 0 and unit not in late:
                due.append(Action("REDUCE", unit))
    return [*out, *due, *(Action("REDUCE", unit) for unit in late if unit in here), Action("UPDATE")]


def _with_gathers(computes: Sequence[Action], keep: Keep, gathered: Collection[int]) -> list[Action]:
    left = Counter(a.unit for a in computes if a.kind in COMPUTES)
    flying: Counter[int] = Counter()
    present: set[int] = set()
    out: list[Action] = []
    units = iter([*[a.unit for a in computes if a.kind in COMPUTES][1:], -1])
    for action in computes:
        unit = action.unit
        if action.kind not in COMPUTES:
            out.append(action)
            continue
        if unit not in present:
            out += [Action("UNSHARD", unit), Action("WAIT", unit, what="params")]
            present.add(unit)
        out.append(action)
        left[unit] -= 1
        flying[unit] = max(0, flying[unit] + {"F": 1, "I": 0}.get(action.kind, -1))  # the head has no F
        done = {"step": left[unit] == 0, "forward": flying[unit] == 0, "use": True}[keep]
        again = next(units) == unit
        if unit in gathered and done and not again:
            out.append(Action("FREE", unit))
            present.remove(unit)
    return out


def prefetch(todo: Sequence[Action], distance: int) -> list[Action]:
    """Start each gather before the `distance`-th compute ahead of its own place, so that it runs beside that many.
    Costs as many more units' gathered parameters. A unit's gather stays behind the FREE of its last copy, and gathers
    keep their order."""
    out = list(todo)
    for i, action in enumerate(todo):
        if action.kind != "UNSHARD":
            continue
        at, crossed = i, 0
        for k in reversed(range(i)):
            blocked = out[k].unit == action.unit and out[k].kind in (*COMPUTES, "FREE")
            if crossed == distance or blocked or out[k].kind == "UNSHARD":
                break
            if out[k].kind in COMPUTES:
                at, crossed = k, crossed + 1
        out.insert(at, out.pop(i))
    return out


def defer(todo: Sequence[Action], most: int) -> list[Action]:
    """Place the waits for reductions anew: each only when `most` of its sort (of a microbatch, of the step) are in
    flight and another starts, or at UPDATE; with 0 at once. The step's REDUCE of a unit comes behind the waits for
    those of its microbatches, so that the last of these runs beside the next unit's backward too. Costs that many
    units' packed gradients."""
    out: list[Action] = []
    flying: dict[bool, list[Action]] = {False: [], True: []}  # waits for reductions of microbatches, and of the step
    held: list[Action] = []  # the step's REDUCEs from the first on whose unit has a microbatch's in flight

    def start(action: Action) -> None:
        mine = flying[action.mb < 0]
        out.extend(mine.pop(0) for _ in range(min(len(mine), len(mine) - most + 1)))
        out.append(action)
        mine.append(Action("WAIT", action.unit, action.mb, what="grads"))
        if not most:
            out.append(mine.pop())
        while held and all(a.unit != held[0].unit for a in flying[False]):
            start(held.pop(0))

    for action in todo:
        if action.kind == "WAIT" and action.what == "grads":
            continue
        if action.kind == "UPDATE":
            out += flying[False]
            flying[False].clear()
            while held:
                start(held.pop(0))
            out += flying[True]
        if action.kind != "REDUCE":
            out.append(action)
        elif action.mb < 0 and (held or any(a.unit == action.unit for a in flying[False])):
            held.append(action)
        else:
            start(action)
    return out
