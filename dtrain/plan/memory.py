"""Bytes that a rank holds while each action of a step runs, read off the lowered graphs and the action list: the
interpreter's own steps, with bytes in place of tensors.

What a graph allocates follows from the storages of its traced values. A view has its base's storage; a storage lives
from the node that makes it to the last node that reads any value in it, what is given or returned longer; what a
collective reads, until it has been waited for. In a graph that is not compiled every value counts. In a compiled one
pointwise work, sums and copies are fused: such a value takes memory only where something else reads it (a product,
attention, a collective) or the graph returns it, and then in the place of a value of its shape that it is the last to
read; what is read instead of a fused value lives as long as its readers.

All ranks of a pipeline coordinate hold the same. 0-dim tensors, of which there are a few, are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import ops
from dtrain.axes import parse
from dtrain.layout import Layout
from dtrain.plan import Plan
from dtrain.program import cost, passes
from dtrain.program.compile import GRAPH_OF
from dtrain.program.interpret import owned, storage_path, unit_path, unit_segment
from dtrain.program.lower import Graph, Program, Segment
from dtrain.program.schedule import Action
from dtrain.torch_private import storage_key

# CUDA's context, its kernels and NCCL's buffers, which torch's counters do not see: what nvidia-smi showed beside them
# in logs of training runs, 1.1 GB on V100 and 1.27 to 1.57 GB on A100, the highest taken.
CONTEXT = {7: 1_100_000_000, 8: 1_570_000_000}
# Of all other bytes, what the caching allocator loses to rounding and to blocks that fit nothing.
FRAGMENTS = 0.03
# A compiled graph stores a fused value that reads more than so many stored ones (Inductor's
# realize_acc_reads_threshold).
MOST_READS = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at a pipeline coordinate. The first nine are what the peak is made of:

    `parameters` shards at rest; `gradients` sums between microbatches and what is reduced; `optimizer` moments, and
    masters where the shards at rest are not the masters themselves; `saved` kept from forward to backward, with the
    segment's input, over all microbatches in flight; `gathered` copies of parameters in use; `carried` the batch,
    activations and gradients between segments, buffers of the pipeline; `transient` what the running action allocates;
    `buffers` packed parameters and gradients in flight; `reserve` a stated allowance for what torch does not count.

    `moment` is the index in the action list of the peak, `over_time` the bytes while each action runs.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    gathered: int
    carried: int
    transient: int
    buffers: int
    reserve: int
    peak: int
    moment: int
    over_time: tuple[int, ...]


def capacity(layout: Layout) -> int | None:
    """Bytes of a GPU of the layout that a process can use; None where that is the machine's own affair."""
    return layout.cluster.device.memory


def context(layout: Layout) -> int:
    """Bytes that CUDA and NCCL take for themselves; 0 on a CPU."""
    capability = layout.cluster.device.capability
    return CONTEXT[min(capability[0], max(CONTEXT))] if capability else 0


def total(held: int, layout: Layout) -> int:
    """Bytes that a rank needs of its GPU, which holds so many: with the reserve for what torch does not count."""
    outside = context(layout)
    return held + int((FRAGMENTS if outside else 0.0) * held) + outside


def memory(plan: Plan, program: Program, pp: int) -> Memory:
    """What a rank at a pipeline coordinate holds."""
    return _walk(plan, program, pp, flows(plan, program))


def memories(plan: Plan, program: Program) -> tuple[Memory, ...]:
    """The same of every coordinate, each graph read once."""
    found = flows(plan, program)
    return tuple(_walk(plan, program, pp, found) for pp in range(len(plan.train)))


# ------------------------------------------------------------------------------------------------------- graphs


@dataclass(frozen=True)
class Flow:
    """What a graph does with memory. `peak` are the most bytes of its own that it holds at one time, results
    included; `sizes` those of the new storages that outlive it; `results` says of each output in which of them it
    lies, or in which input's storage; `pending` the same of what collectives read that the graph does not wait for.
    """

    peak: int
    sizes: tuple[int, ...]
    results: tuple[int | str, ...]
    pending: tuple[int | str, ...] = ()


Flows = Mapping[tuple[str, str], Flow]  # by segment and graph


def flows(plan: Plan, program: Program) -> Flows:
    """The flow of every graph as the layout runs it."""
    compiled, gpu = plan.layout.run.compile != "off", plan.layout.cluster.device
    inside = partial(_inside, capability=gpu.capability, fused=compiled)
    return {
        (s.name, name): flow(g, fused=compiled and name in GRAPH_OF.values(), inside=inside)
        for s in program.segments.values()
        for name, g in s.graphs.items()
    }


def flow(graph: Graph, *, fused: bool, inside: Callable[[fx.Node], int] = lambda node: 0) -> Flow:
    """Liveness of a graph. `inside` gives the bytes that a node allocates beside its results while it runs."""
    nodes = list(graph.module.graph.nodes)
    same: dict[int, int] = {}  # the result of a wait is what was waited for, though traced as a new storage

    def keys(node: fx.Node) -> list[int]:
        return [same.get(k, k) for k in map(storage_key, _tensors(node))]

    size: dict[int, int] = {}
    given: dict[int, str] = {}
    place: dict[int, int | str] = {}
    made: dict[fx.Node, list[int]] = {}
    names = iter(graph.inputs)
    for node in nodes:
        if passes.op_name(node) == "wait_tensor":
            same[storage_key(_tensors(node)[0])] = keys(node.all_input_nodes[0])[0]
        new = [k for k in dict.fromkeys(keys(node)) if k not in size]
        size |= {k: x.untyped_storage().nbytes() for k, x in zip(keys(node), _tensors(node), strict=True) if k in new}
        if node.op == "placeholder":
            name = next(names)
            given |= dict.fromkeys(new, name)
        elif new:
            made[node] = new
    returned = [keys(n)[0] for n in passes.results_of(graph.module.graph)]
    solid = {n for n in nodes if not fused or _solid(n)}
    # A value takes memory where it is made, read or returned by what is not fused. Sums are stored, and are small.
    stored = [n for n in made if n in solid or torch.Tag.reduction in getattr(n.target, "tags", ())]
    real = {*given, *returned, *(k for n in stored for k in made[n])}
    real |= {k for n in solid for a in n.all_input_nodes for k in keys(a)}

    sources: dict[int, frozenset[int]] = {k: frozenset([k]) for k in real}  # what a reader of this reads instead
    steps: list[tuple[fx.Node, list[int], frozenset[int]]] = []
    last: dict[int, int] = {}
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        new = made.get(node, [])
        reads = frozenset(s for a in node.all_input_nodes for k in keys(a) for s in sources[k])
        if len(reads) > MOST_READS:
            real.update(new)
        sources |= {k: reads if k not in real else frozenset([k]) for k in new}
        kept = [k for k in new if k in real]
        if kept or node in solid:
            last |= dict.fromkeys([*reads, *kept], len(steps))
            steps.append((node, kept, reads))
    at = {node: i for i, (node, _, _) in enumerate(steps)}
    pending: list[int] = []
    for node in nodes:
        if not passes.is_collective(node) or passes.op_name(node) == "all_reduce":  # that one works on a copy
            continue
        waits = [at[u] for u in node.users if passes.op_name(u) == "wait_tensor"]
        for k in keys(node.all_input_nodes[0]):
            last[k] = max([last[k], *waits])
            pending += [] if waits else [k]

    stay = {*given, *returned, *pending}
    ends: dict[int, list[int]] = {}
    for k, i in last.items():
        if k not in stay:
            ends.setdefault(i, []).append(k)
    shapes = {k: (x.shape, x.dtype) for n in made for k, x in zip(keys(n), _tensors(n), strict=True)}
    held = peak = 0
    for i, (node, new, _) in enumerate(steps):
        free = ends.get(i, [])
        over = fused and node not in solid  # a fused value may be written over one that it is the last to read
        taken = next((k for k in free if over and k not in new and shapes[k] == shapes[new[0]]), None)
        held += sum(size[k] for k in new) - (size[taken] if taken is not None else 0)
        peak = max(peak, held + inside(node))
        held -= sum(size[k] for k in free if k != taken)
    fresh = {k: i for i, k in enumerate(k for k in dict.fromkeys([*returned, *pending]) if k not in given)}
    place.update(fresh)
    place.update(given)
    return Flow(
        peak, tuple(size[k] for k in fresh), tuple(place[k] for k in returned), tuple(place[k] for k in pending)
    )


def _tensors(node: fx.Node) -> list[Tensor]:
    value: Any = node.meta.get("val")
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]


# Fused by a compiler beside what torch tags as pointwise or a reduction, and views: copies, lookups, constants. What is
# put together of pieces (cat) is stored.
_FUSED = (
    *("_to_copy", "_unsafe_view", "getitem", "constant_pad_nd", "select_backward", "slice_backward"),
    *("embedding", "gather", "index", "_softmax", "_softmax_backward_data", "_log_softmax"),
    *(
        "_log_softmax_backward_data",
        "arange",
        "full",
        "full_like",
        "new_zeros",
        "new_full",
        "zeros_like",
        "scalar_tensor",
    ),
)


def _solid(node: fx.Node) -> bool:
    """Whether a node is an operation of its own in a compiled graph: it reads memory and writes memory."""
    if node.op != "call_function" or passes.op_name(node) in _FUSED:
        return False
    return not passes.is_view(node) and not {torch.Tag.pointwise, torch.Tag.reduction} & {
        *getattr(node.target, "tags", ())
    }


def _inside(node: fx.Node, capability: tuple[int, int] | None, fused: bool) -> int:
    """Bytes that an attention allocates beside its results on a GPU of this capability (None: on a CPU)."""
    name = passes.op_name(node) if node.op == "call_function" else ""
    if name not in ("attention", "attention_backward"):
        return 0
    tensors, how = 4 if name == "attention" else 7, cost.asked(node)
    nodes = (*node.args[:tensors], how.start)
    given: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in nodes]
    q, k = given[:2] if name == "attention" else given[1:3]
    device = "cpu" if capability is None else "cuda"
    masked = any(x is not None for x in given[tensors - 1 :])
    used = ops.kernel_for(how.kernel, device, q.dtype, q.shape[3], masked, capability, how.documents)
    here = [x for x in given if x is not None]
    by: Callable[..., Any] = ops.attention_by if name == "attention" else ops.attention_backward_by

    def run(*values: Tensor) -> list[Tensor]:
        it = iter(values)
        *local, start = [None if x is None else next(it) for x in given]
        return list(by(used, *local, how.causal, start, how.documents))

    graph = make_fx(run, tracing_mode="fake")(*here)
    graph.graph.eliminate_dead_code()
    out = flow(Graph(graph, tuple(map(str, range(len(here)))), ()), fused=fused and capability is None)
    backward = name == "attention_backward" and used not in ("math", "cpu")
    apart = how.documents if how.start is not None and used == "flash" else 0
    return out.peak - sum(out.sizes) + (_workspace(q, k, used, apart) if backward else 0)


def _workspace(q: Tensor, k: Tensor, kernel: str, documents: int) -> int:
    """Bytes that a fused backward of attention allocates itself: the gradient of q in fp32 and a number for each of
    its rows; FlashAttention-2 also k's and v's gradients for each query head, where heads share them (its
    `mha_bwd`), and 128 more rows for each of up to `documents` documents of a sequence (`mha_varlen_bwd`)."""
    more = 2 * q.numel() * q.element_size() if kernel == "flash" and k.shape[2] != q.shape[2] else 0
    rows = q.shape[0] * (q.shape[1] + 128 * documents) * q.shape[2]
    return 4 * rows * q.shape[3] + 4 * rows + more


# ------------------------------------------------------------------------------------------------- what is held

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
    value = {k: _tensors(n)[0] for k, n in zip(graph.outputs, passes.results_of(graph.module.graph), strict=True)}
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


def _walk(plan: Plan, program: Program, pp: int, found: Flows) -> Memory:
    """Run a coordinate's list on bytes."""
    most, moment, over_time, then = -1, 0, [], {}
    for position, step in enumerate(held(plan, program, pp, found)):
        over_time.append(total(step.most, plan.layout))
        if step.most > most:
            most, moment, then = step.most, position, dict(step.then)
    peak = total(most, plan.layout)
    return Memory(**then, reserve=peak - most, peak=peak, moment=moment, over_time=tuple(over_time))


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
    run = _Run(program, units, parts, _Held())
    for s, _, _ in owned(program, units).values():
        size = math.prod(s.shape(len(s.steps))) * program.job.master.itemsize
        run.held.new(size, "optimizer" if len(s.steps) > s.rest else "parameters")
        run.held.new(2 * size, "optimizer")
    _publish(run)
    run.held.new(_batch_bytes(plan, parts), "carried")
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
    program: Program
    units: Sequence[int]
    parts: Mapping[str, _Part]
    held: _Held

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
    whole = _tensors(node)[0].is_contiguous()
    held.flying["sent", a.unit, a.mb] = [
        held.keep(block, block.kind) if whole else held.new(cost.size(node), "carried")
    ]
    held.mark()
    held.drop(block)


def _publish(run: _Run) -> None:
    """Shards at rest anew, where they are not the masters themselves."""
    held = run.held
    held.drop(*held.rest)
    held.rest.clear()
    for unit in run.units:
        part = run.part(unit)
        if "publish" in part.flows:
            f, stored = part.flows["publish"], [part.segment.stored[n] for n in part.segment.owned]
            held.mark(f.peak)
            cut = [r for r, s in zip(f.results, stored, strict=True) if len(s.steps) > s.rest]
            held.rest += held.results(f, {}, cut, "parameters")
