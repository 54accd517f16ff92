"""What a graph allocates, read off the storages of its traced values.

A view has its base's storage; a storage lives from the node that makes it to the last node that reads any value in it,
what is given or returned longer; what a collective reads, until it has been waited for. In a graph that is not compiled
every value counts. In a compiled one pointwise work, sums and copies are fused: such a value takes memory only where
something else reads it (a product, attention, a collective) or the graph returns it, and then in the place of a value
of its shape that it is the last to read; what is read instead of a fused value lives as long as its readers.

0-dim tensors, of which there are a few, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import ops
from dtrain.plan import Plan
from dtrain.program import cost, passes
from dtrain.program.compile import GRAPH_OF
from dtrain.program.lower import Graph, Program
from dtrain.torch_private import storage_key

# A compiled graph stores a fused value that reads more than so many stored ones (Inductor's
# realize_acc_reads_threshold).
MOST_READS = 8


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
        return [same.get(k, k) for k in map(storage_key, tensors_of(node))]

    size: dict[int, int] = {}
    given: dict[int, str] = {}
    place: dict[int, int | str] = {}
    made: dict[fx.Node, list[int]] = {}
    names = iter(graph.inputs)
    for node in nodes:
        if passes.op_name(node) == "wait_tensor":
            same[storage_key(tensors_of(node)[0])] = keys(node.all_input_nodes[0])[0]
        new = [k for k in dict.fromkeys(keys(node)) if k not in size]
        size |= {k: x.untyped_storage().nbytes() for k, x in zip(keys(node), tensors_of(node), strict=True) if k in new}
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
    shapes = {k: (x.shape, x.dtype) for n in made for k, x in zip(keys(n), tensors_of(n), strict=True)}
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


def tensors_of(node: fx.Node) -> list[Tensor]:
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
