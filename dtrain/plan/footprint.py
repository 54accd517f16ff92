"""Bytes that a rank holds while each action of a step runs: the interpreter's own steps (`dtrain.program.interpret`),
with bytes in place of tensors. All ranks of a pipeline coordinate hold the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtrain.axes import parse
from dtrain.plan import Plan
from dtrain.plan.liveness import Flow, Flows, flows, tensors_of
from dtrain.program import cost, passes
from dtrain.program.interpret import owned, storage_path, unit_path, unit_segment
from dtrain.program.lower import Graph, Program, Segment
from dtrain.program.schedule import Action

KINDS = ("parameters", "gradients", "optimizer", "saved", "gathered", "carried", "buffers")


@dataclass
class _Block:
    """A piece of memory, which several holders may share."""

    bytes: int
    kind: str
    holders: int = 1


@dataclass
class _Held:
    """What a rank holds at one point of its list: the slots of the interpreter. `most` are the most bytes since the
    current action began, and `then` what they were made of."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    total: int = 0
    most: int = -1
    then: dict[str, int] = field(default_factory=dict)

    masters: dict[str, _Block] = field(default_factory=dict)
    rest: list[_Block] = field(default_factory=list)
    params: dict[int, _Block] = field(default_factory=dict)
    act: dict[tuple[int, int], _Block] = field(default_factory=dict)
    grad: dict[tuple[int, int], _Block] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[str, _Block]] = field(default_factory=dict)
    partial: dict[int, _Block] = field(default_factory=dict)
    sums: dict[str, _Block] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    reduced: list[_Block] = field(default_factory=list)
    flying: dict[tuple[str, int, int], list[_Block]] = field(default_factory=dict)

    def mark(self, transient: int = 0) -> None:
        """Notice what is held, with so many bytes more for the moment."""
        total = self.total + transient
        if total > self.most:
            self.most, self.then = total, {**self.bytes, "transient": transient}

    def new(self, bytes: int, kind: str) -> _Block:
        self.bytes[kind] += bytes
        self.total += bytes
        return _Block(bytes, kind)

    def drop(self, *blocks: _Block) -> None:
        for block in blocks:
            block.holders -= 1
            if not block.holders:
                self.bytes[block.kind] -= block.bytes
                self.total -= block.bytes

    def keep(self, block: _Block, kind: str) -> _Block:
        """One more holder, which makes it of this kind."""
        block.holders += 1
        return self.turn(block, kind)

    def turn(self, block: _Block, kind: str) -> _Block:
        self.bytes[block.kind] -= block.bytes
        self.bytes[kind] += block.bytes
        block.kind = kind
        return block

    def results(self, f: Flow, given: Mapping[str, _Block], of: Sequence[int | str], kind: str) -> list[_Block]:
        """The blocks of results of a graph, each with one more holder; new ones are of this kind."""
        made: dict[int | str, _Block] = {}
        out = []
        for r in of:
            block = made.get(r) or given.get(str(r))
            if block is None:
                block = made[r] = self.new(f.sizes[r] if isinstance(r, int) else 0, kind)
            else:
                block.holders += 1
            out.append(block)
        return out


# ----------------------------------------------------------------------------------------------------- segments


@dataclass(frozen=True)
class _Sum:
    """A parameter's gradient as a backward gives it: the bytes of its sum, and whether it becomes that itself."""

    name: str
    bytes: int
    itself: bool


@dataclass(frozen=True)
class _Grads:
    """What B or W returns: `results` are the bytes of all but `grad:x`, `partial` those of the gradients where the
    microbatch is reduced by itself, which are among the results if `same`."""

    sums: tuple[_Sum, ...]
    results: int
    partial: int
    same: bool


@dataclass(frozen=True)
class _Part:
    """A segment as the interpreter runs it, in bytes.

    A forward keeps `short` until B or I and `long` until B or W, and `kept` of the tensors at its borders (`x`, `y`);
    I keeps `half` for W, and `carried` of `x`, `y`, `grad` and `grad:x`. `reducing` is a microbatch's reduction in
    flight; `gathering` and `gathered` are a gather in flight and its result.
    """

    segment: Segment
    flows: Mapping[str, Flow]
    kept: frozenset[str]
    short: int
    long: int
    carried: frozenset[str]
    half: int
    grads: Mapping[str, _Grads]
    early: bool
    reducing: int
    gathering: int
    gathered: int

    def root(self, graph: str, output: str) -> int | str:
        """Where an output of a graph lies: the number of a new storage, or an input."""
        return self.flows[graph].results[self.segment.graphs[graph].outputs.index(output)]


def _part(program: Program, name: str, found: Flows) -> _Part:
    segment, backward = program.segments[name], program.segments[name].graphs["backward"]
    flows = {g: found[name, g] for g in segment.graphs}
    border = {"forward": "y", "backward_input": "grad:x"}

    def storage(key: str) -> str | tuple[str, int]:
        """What a value that a forward or I hands on lies in: x, y, grad, grad:x, or a graph's new storage."""
        graph = {"y": "forward", "saved": "forward", "grad:x": "backward_input", "half": "backward_input"}.get(
            key if key in border.values() else key.partition(":")[0]
        )
        if graph is None:
            return key
        at = segment.graphs[graph].outputs.index
        root = flows[graph].results[at(key)]
        if isinstance(root, str):
            return storage(root)
        edge = border[graph]
        same = edge in segment.graphs[graph].outputs and flows[graph].results[at(edge)] == root
        return edge if same else (graph, root)

    def size(storages: Iterable[str | tuple[str, int]], graph: str) -> int:
        return sum(flows[s[0]].sizes[s[1]] for s in storages if isinstance(s, tuple) and s[0] == graph)

    kept, carried = set(), set()
    if name != "head":
        x = ("x",) if "x" in backward.inputs else ()
        kept = {storage(k) for k in (*segment.graphs["forward"].outputs[1:], *x)}
        later = segment.graphs["backward_weight"].inputs
        carried = {storage(k) for k in later if k in ("x", "grad") or k.startswith(("saved:", "half:"))}
    early = any(s.grads for s in segment.stored.values())
    start = dict(zip(segment.graphs["unshard"].outputs, flows["unshard"].results, strict=True))
    landed = {start[r] for r in flows["unshard_wait"].results if isinstance(r, str)}
    return _Part(
        segment,
        flows,
        frozenset(s for s in kept if isinstance(s, str)),
        size(kept - carried, "forward"),
        size(kept & carried, "forward"),
        frozenset(s for s in carried if isinstance(s, str)),
        size(carried, "backward_input"),
        {
            g: _grads(segment.graphs[g], flows[g], program.job.master)
            for g in ("backward", "backward_weight")
            if g in flows
        },
        early,
        _in_flight(segment.graphs["reduce_early"], flows["reduce_early"]) if early else 0,
        sum(flows["unshard"].sizes),
        sum(flows["unshard_wait"].sizes) + sum(flows["unshard"].sizes[r] for r in landed if isinstance(r, int)),
    )


def _grads(graph: Graph, f: Flow, master: torch.dtype) -> _Grads:
    root = dict(zip(graph.outputs, f.results, strict=True))
    value = {k: tensors_of(n)[0] for k, n in zip(graph.outputs, passes.results_of(graph.module.graph), strict=True)}
    names = [k for k in graph.outputs if k.startswith("grad:params:")]
    times = Counter(f.results)

    def own(k: str) -> bool:
        r, x = root[k], value[k]
        return isinstance(r, int) and times[r] == 1 and f.sizes[r] == x.numel() * x.element_size() and x.dtype == master

    sums = tuple(_Sum(k.removeprefix("grad:params:"), value[k].numel() * master.itemsize, own(k)) for k in names)
    same = all(value[k].dtype == master for k in names)
    new = {k: r for k, r in root.items() if isinstance(r, int) and r != root.get("grad:x")}
    partial = sum(f.sizes[r] for r in {new[k] for k in names if k in new}) if same else sum(s.bytes for s in sums)
    return _Grads(sums, sum(f.sizes[r] for r in {*new.values()}), partial, same)


def _in_flight(graph: Graph, f: Flow) -> int:
    """Bytes between the start of a reduction and its end: new storages, and inputs that it hands on."""
    holes = dict(zip(graph.inputs, graph.module.graph.find_nodes(op="placeholder"), strict=True))
    through = {r for r in f.results if isinstance(r, str)}
    return sum(f.sizes) + sum(cost.size(holes[r]) for r in through)


# ------------------------------------------------------------------------------------------------------- a step


@dataclass(frozen=True)
class Moment:
    """One action: the most bytes while it runs and what they are, by the names of `Memory`; and what is left held."""

    most: int
    then: Mapping[str, int]
    after: Mapping[str, int]


def held(plan: Plan, program: Program, pp: int, found: Flows | None = None) -> Iterator[Moment]:
    """What a rank at a pipeline coordinate holds, action by action; without the reserve."""
    layers, units = program.job.layers, plan.units[pp]
    found = found or flows(plan, program)
    parts = {name: _part(program, name, found) for name in {unit_segment(u, layers)[0] for u in units}}
    run = _Run(program, units, parts, _Held(), plan.layout.run.cuda_graph)
    for s, _, _ in owned(program, units).values():
        size = math.prod(s.shape(len(s.steps))) * program.job.master.itemsize
        run.held.new(size, "optimizer" if len(s.steps) > s.rest else "parameters")
        run.held.new(2 * size, "optimizer")
    _publish(run)
    # A step that is replayed reads its batch from a place of its own.
    run.held.new(_batch_bytes(plan, parts) * (2 if run.replayed else 1), "carried")
    for action in plan.train[pp]:
        run.held.most = -1
        run.held.mark()
        _do(run, action)
        run.held.mark()
        yield Moment(run.held.most, run.held.then, dict(run.held.bytes))


def _batch_bytes(plan: Plan, parts: Mapping[str, _Part]) -> int:
    """A rank whose segments read the batch reads its rows of all microbatches at once, in int64."""
    if not any(k.startswith("batch:") for p in parts.values() for g in p.segment.graphs.values() for k in g.inputs):
        return 0
    row = sum(math.prod(plan.job.seq for a in parse(spec)[0] if a == "seq") for spec in plan.job.module.BATCH.values())
    return plan.microbatches * plan.job.batch * row * 8


@dataclass(frozen=True)
class _Run:
    """`replayed`: the whole step is one CUDA graph, whose results are copied to where the next step begins."""

    program: Program
    units: Sequence[int]
    parts: Mapping[str, _Part]
    held: _Held
    replayed: bool

    def part(self, unit: int) -> _Part:
        return self.parts[unit_segment(unit, self.program.job.layers)[0]]


def _do(run: _Run, a: Action) -> None:
    """What an action does to what is held."""
    held, here = run.held, (a.unit, a.mb)
    match a.kind:
        case "UNSHARD":
            part = run.part(a.unit)
            held.mark(part.flows["unshard"].peak)
            held.flying["params", *here] = [held.new(part.gathering, "buffers")]
        case "WAIT" if a.what == "params":
            part = run.part(a.unit)
            held.mark(part.flows["unshard_wait"].peak)
            held.params[a.unit] = held.new(part.gathered, "gathered")
            held.drop(*held.flying.pop(("params", *here)))
        case "FREE":
            held.drop(held.params.pop(a.unit))
        case "F":
            _forward(run, a.unit, a.mb)
        case "B":
            _backward(run, a.unit, a.mb, "backward")
        case "I":
            _backward_input(run, a.unit, a.mb)
        case "W":
            _backward(run, a.unit, a.mb, "backward_weight")
        case "REDUCE" if a.mb >= 0:
            part = run.part(a.unit)
            held.mark(part.flows["reduce_early"].peak)
            held.drop(held.partial.pop(a.unit))
            held.flying["grads", *here] = [held.new(part.reducing, "buffers")]
        case "WAIT" if a.what == "grads" and a.mb >= 0:
            _add_early(run, a.unit, a.mb)
        case "REDUCE":
            part, owned = run.part(a.unit), run.part(a.unit).segment.owned
            f = part.flows["reduce"]
            held.mark(f.peak)
            given = {n: held.sums.pop(unit_path(a.unit, run.program.job.layers, n)) for n in owned}
            held.flying["grads", *here] = held.results(f, given, [*f.results, *f.pending], "buffers")
            held.drop(*given.values())
        case "WAIT" if a.what == "grads":
            part = run.part(a.unit)
            f, flying = part.flows["reduce_wait"], held.flying.pop(("grads", *here))
            held.mark(f.peak)
            crossing = dict(zip(part.segment.graphs["reduce_wait"].inputs, flying, strict=False))
            held.reduced += [held.turn(b, "gradients") for b in held.results(f, crossing, f.results, "gradients")]
            held.drop(*flying)
        case "SEND":
            _send(run, a)
        case "RECV":
            shape, dtype = run.program.segments["embed"].act  # type: ignore[misc]
            held.flying[a.what, *here] = [held.new(math.prod(shape) * dtype.itemsize, "carried")]
        case "WAIT" if a.what == "sent":
            held.drop(*held.flying.pop(("sent", *here)))
        case "WAIT":
            (held.act if a.what == "act" else held.grad)[here] = held.flying.pop((a.what, *here))[0]
        case "UPDATE":
            held.drop(*held.params.values(), *held.reduced)
            _publish(run)


def _forward(run: _Run, unit: int, mb: int) -> None:
    held, part, x = run.held, run.part(unit), run.held.act.pop((unit - 1, mb), None)
    f, given = part.flows["forward"], {"x": x} if x else {}
    held.mark(f.peak)
    (y,) = held.results(f, given, [part.root("forward", "y")], "carried")
    borders = {**given, "y": y}
    held.saved[unit, mb] = {
        "short": held.new(part.short, "saved"),
        "long": held.new(part.long, "saved"),
        **{k: held.keep(borders[k], "saved") for k in part.kept},
    }
    held.act[unit, mb] = y
    held.drop(*given.values())


def _taken(run: _Run, unit: int, mb: int) -> dict[str, _Block]:
    """What a backward takes and nobody needs after it."""
    held, head = run.held, unit == run.program.job.layers + 1
    if head:
        return {"x": held.act.pop((unit - 1, mb))}
    grad = held.grad.pop((unit, mb), None)
    return {**held.saved.pop((unit, mb)), **({"grad": grad} if grad else {})}


def _gradient_of_x(run: _Run, unit: int, mb: int, graph: str, given: Mapping[str, _Block]) -> dict[str, _Block]:
    held, part = run.held, run.part(unit)
    if "grad:x" not in part.segment.graphs[graph].outputs:
        return {}
    (block,) = held.results(part.flows[graph], given, [part.root(graph, "grad:x")], "carried")
    held.grad[unit - 1, mb] = block
    return {"grad:x": block}


def _backward(run: _Run, unit: int, mb: int, graph: str) -> None:
    held, part = run.held, run.part(unit)
    given, grads = _taken(run, unit, mb), part.grads[graph]
    held.mark(part.flows[graph].peak)
    _gradient_of_x(run, unit, mb, graph, given)
    held.drop(*given.values())
    if part.early:
        held.partial[unit] = held.new(grads.partial, "gradients")
        held.mark(grads.results - (grads.partial if grads.same else 0))
        return
    itself = 0
    if unit not in held.summed:
        paths = {s: storage_path(run.program, unit, s.name) for s in grads.sums}
        for s, path in paths.items():
            if path not in held.sums:
                held.sums[path] = held.new(s.bytes, "gradients")
                itself += s.bytes if s.itself else 0
        held.summed.add(unit)
    held.mark(grads.results - itself)


def _backward_input(run: _Run, unit: int, mb: int) -> None:
    held, part, given = run.held, run.part(unit), _taken(run, unit, mb)
    held.mark(part.flows["backward_input"].peak)
    borders = given | _gradient_of_x(run, unit, mb, "backward_input", given)
    held.saved[unit, mb] = {
        "long": held.keep(given["long"], "saved"),
        "half": held.new(part.half, "saved"),
        **{k: held.keep(borders[k], "saved") for k in part.carried},
    }
    held.drop(*given.values())


def _add_early(run: _Run, unit: int, mb: int) -> None:
    """The end of a microbatch's own reduction: its part is added to the sums, or becomes them."""
    held, part = run.held, run.part(unit)
    wait, start = part.flows["reduce_early_wait"], part.flows["reduce_early"]
    held.mark(wait.peak)
    held.drop(*held.flying.pop(("grads", unit, mb)))
    if unit in held.summed:
        return
    held.summed.add(unit)
    crossing = dict(zip(part.segment.graphs["reduce_early"].outputs, start.results, strict=True))
    made: dict[tuple[int, int | str], _Block] = {}
    for (name, s), r in zip(part.segment.stored.items(), wait.results, strict=True):
        path = storage_path(run.program, unit, name)
        if path in held.sums:
            continue
        if not s.grads:  # comes back as it was given, and is copied
            held.sums[path] = held.new(math.prod(s.local) * run.program.job.master.itemsize, "gradients")
            continue
        key, size = (0, r), wait.sizes[r] if isinstance(r, int) else 0
        if isinstance(r, str):
            there = crossing[r]
            key, size = (1, there), start.sizes[there] if isinstance(there, int) else 0
        if key in made:
            held.sums[path] = held.keep(made[key], "gradients")
        else:
            held.sums[path] = made[key] = held.new(size, "gradients")


def _send(run: _Run, a: Action) -> None:
    """What is sent must be contiguous, and is held until it has left."""
    held, act, graphs = run.held, a.what == "act", run.part(a.unit if a.what == "act" else a.unit + 1).segment.graphs
    block = (held.act if act else held.grad).pop((a.unit, a.mb))
    graph, output = ("forward", "y") if act else ("backward", "grad:x")
    node = passes.results_of(graphs[graph].module.graph)[graphs[graph].outputs.index(output)]
    whole = tensors_of(node)[0].is_contiguous()
    held.flying["sent", a.unit, a.mb] = [
        held.keep(block, block.kind) if whole else held.new(cost.size(node), "carried")
    ]
    held.mark()
    held.drop(block)


def _publish(run: _Run) -> None:
    """Shards at rest anew, where they are not the masters themselves."""
    held = run.held
    old = list(held.rest)
    held.rest.clear()
    if not run.replayed:
        held.drop(*old)
    for unit in run.units:
        part = run.part(unit)
        if "publish" in part.flows:
            f, stored = part.flows["publish"], [part.segment.stored[n] for n in part.segment.owned]
            held.mark(f.peak)
            cut = [r for r, s in zip(f.results, stored, strict=True) if len(s.steps) > s.rest]
            held.rest += held.results(f, {}, cut, "parameters")
    if run.replayed and old:
        held.mark()
        held.drop(*held.rest)
        held.rest[:] = old
