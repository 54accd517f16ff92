"""What a graph costs, counted off its nodes: FLOPs, bytes on the wire, and the kernels that run it with the bytes
that each reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dtrain.program import passes

PRODUCTS = ("mm", "addmm", "bmm")
VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "detach", "alias", "unsqueeze", "squeeze",
    "slice", "select", "split", "split_with_sizes", "unbind", "chunk",
)  # fmt: skip

# Half the products of a causal attention are masked away, and fused kernels leave them out.
_CAUSAL = 0.5


@dataclass(frozen=True)
class Rates:
    """Peaks of one device: FLOP/s in the dtype of compute, bytes/s of its memory, and for each group its ranks and
    the bytes/s that one of them sends."""

    flops: float
    memory: float
    wire: Mapping[str, tuple[int, float]]


def size(node: fx.Node) -> int:
    """Bytes of a node's result; 0 where it is not one tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def flops(node: fx.Node) -> float:
    """Floating-point operations of products and attention, forward or backward; 0 for everything else.

    A product (M, K) x (K, N) is 2 M K N. Attention is two products forward, and backward five (the scores are
    computed again), each 2 b h s t d, halved under a causal mask (Dao 2023, arXiv 2307.08691, section 4.1).
    """
    name = passes.op_name(node)
    inputs = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if name in PRODUCTS:
        return float(2 * math.prod(node.meta["val"].shape) * inputs[-2].shape[-1])
    if name in ("attention", "attention_backward"):
        q, k = inputs[:2] if name == "attention" else inputs[1:3]
        causal = node.args[4] if name == "attention" else node.args[7]
        whole = float(2 * q.numel() * k.shape[1] * (2 if name == "attention" else 5))
        return whole * _CAUSAL if causal else whole
    return 0.0


def sent(node: fx.Node, ranks: int) -> float:
    """Bytes that a rank sends for a collective over `ranks` ranks, by a ring: (n-1)/n of the whole tensor, and
    twice that for an all-reduce (Thakur et al. 2005)."""
    whole = size(node)
    name = passes.op_name(node)
    if name == "reduce_scatter_tensor":
        whole *= ranks
    return whole * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)


def solid(node: fx.Node) -> bool:
    """Whether a node reads its inputs from memory and writes its result there: a product, attention or a collective
    (and what they return), or a view of what such a node reads."""
    name = passes.op_name(node) if node.op == "call_function" else ""
    if name in VIEWS or name == "getitem":
        return any(map(solid, node.users))
    return name in (*PRODUCTS, "attention", "attention_backward", "wait_tensor") or passes.is_collective(node)


# ---------------------------------------------------------------------------------------------------- kernels

_ROW_SUMS = ("mean", "sum", "amax", "max", "argmax", "logsumexp", "var", "var_mean", "any", "_softmax", "_log_softmax")
# They read rows of their first input, as many as their result has.
_LOOKUPS = ("embedding", "index", "index_select", "gather")
_SCATTERS = ("embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add", "_index_put_impl_")
# A value that is read more than once is written when computing it again would read more than this many tensors
# (Inductor's `realize_reads_threshold`).
_READS = 4


@dataclass(frozen=True)
class Kernel:
    """A launch on a GPU. `node` is its product, attention or collective, or else the last node of a fused chain;
    `after` the position in the graph up to which it must have run; `read` and `written` bytes of memory; `steps` how
    many 32-bit instructions its pointwise work takes, over all elements, and `wide` how many in float64."""

    node: fx.Node
    read: int
    written: int
    steps: float = 0.0
    wide: float = 0.0


def kernels(graph: fx.Graph, fused: bool = True) -> list[Kernel]:
    """The kernels of a graph in order, collectives among them (waits are none).

    Fused, as Inductor does it: pointwise work is computed where it is read, and so is what would be read only to be
    computed; values are written for an operation that is not fused, for the graph's caller, for a reduction's
    readers, and where computing them again would read more than four tensors. What is written at the same depth
    (operations that are not fused on its way) from common inputs is one kernel, in which each input is read once;
    sums over columns are kernels of their own. Otherwise every operation but a view reads its inputs and writes its
    result.
    """
    return _fused(graph) if fused else _apart(graph)


def _apart(graph: fx.Graph) -> list[Kernel]:
    out = []
    for node in graph.nodes:
        name = passes.op_name(node) if node.op == "call_function" else ""
        if not name or name in VIEWS or name in ("getitem", "wait_tensor"):
            continue
        read = sum(_seen(node, a) for a in node.all_input_nodes)
        out.append(Kernel(node, read, _result(node), *_work([node])))
    return out


def _seen(reader: fx.Node, read: fx.Node) -> int:
    """Bytes of an input that a node touches."""
    return min(size(read), _result(reader)) if passes.op_name(reader) in _LOOKUPS else size(read)


def _result(node: fx.Node) -> int:
    """Bytes of a node's results, of all of them where it has several."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return sum(v.numel() * v.element_size() for v in parts if isinstance(v, Tensor))


def _work(nodes: list[fx.Node]) -> tuple[float, float]:
    """32-bit instructions and float64 ones of pointwise nodes. A 64-bit integer takes about three of the first."""
    steps = wide = 0.0
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not solid(node):
            if value.dtype == torch.float64:
                wide += value.numel()
            else:
                steps += value.numel() * (3 if value.dtype == torch.int64 else 1)
    return steps, wide


@dataclass
class _Value:
    """What computing a fused node means: `leaves` are the written tensors it reads (each with the views it reads them
    through), `body` the nodes it computes on the way, `depth` how many operations that are not fused come before."""

    leaves: dict[fx.Node, dict[fx.Node, int]]
    body: dict[fx.Node, None]
    depth: int


def _fused(graph: fx.Graph) -> list[Kernel]:
    values: dict[fx.Node, _Value] = {}
    written: dict[fx.Node, None] = {}  # by a fused kernel
    constant: set[fx.Node] = set()
    outputs = set(passes.results_of(graph))
    order: list[fx.Node] = []  # what gets a kernel: unfused operations and written values
    base: dict[fx.Node, fx.Node] = {}  # the tensor that a view is of

    def reads(node: fx.Node, reader: fx.Node) -> _Value:
        """What reading a node means to a fused reader."""
        whole = base.get(node, node)
        if whole in values and whole not in written:
            return values[whole]
        depth = values[whole].depth if whole in values else 0
        return _Value({whole: {node: _seen(reader, node)}}, {}, depth)

    def leaves_memory(node: fx.Node) -> bool:
        """Whether an unfused operation or the caller reads it, through views too."""
        return any(
            user in outputs_of(user) or solid(user) or (is_view(user) and leaves_memory(user)) for user in node.users
        )

    def outputs_of(user: fx.Node) -> tuple[fx.Node, ...]:
        return (user,) if user.op == "output" else ()

    def is_view(node: fx.Node) -> bool:
        name = passes.op_name(node) if node.op == "call_function" else ""
        return name in VIEWS or (name == "getitem" and base.get(node.all_input_nodes[0]) is not None)

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name, inputs = passes.op_name(node), node.all_input_nodes
        if inputs and (name in VIEWS or name in ("getitem", "wait_tensor")):
            whole = base.get(inputs[0], inputs[0])
            base[node] = whole
            if inputs[0] in constant:
                constant.add(node)
            continue
        if all(a in constant for a in inputs):
            # Tables that depend on nothing are computed once (`compile`); the rest is counting.
            constant.add(node)
            continue
        parts = [reads(a, node) for a in inputs if a not in constant]
        depth = max((p.depth for p in parts), default=0)
        if solid(node):
            values[node] = _Value({}, {}, depth + 1)
            written[node] = None  # by itself
            order.append(node)
            continue
        leaves: dict[fx.Node, dict[fx.Node, int]] = {}
        for p in parts:
            for leaf, views in p.leaves.items():
                leaves.setdefault(leaf, {}).update(views)
        for a in inputs:
            if a in constant and size(a) and name not in _LOOKUPS:
                leaves.setdefault(a, {})[a] = size(a) if any(passes.op_name(c) in ("cos", "sin") for c in _up(a)) else 0
        body = dict.fromkeys(n for p in parts for n in p.body) | {node: None}
        values[node] = _Value(leaves, body, depth)
        large = [leaf for leaf in leaves if 8 * size(leaf) > size(node)]
        several = len(node.users) > 1 and len(large) > _READS
        if name in _ROW_SUMS or name in _SCATTERS or several or leaves_memory(node):
            written[node] = None
            order.append(node)
    return _grouped(order, values, base, outputs)


def _up(node: fx.Node, most: int = 4) -> list[fx.Node]:
    """A constant and what it is made of, a few steps up."""
    out, front = [node], [node]
    for _ in range(most):
        front = [a for n in front for a in n.all_input_nodes]
        out += front
    return [n for n in out if n.op == "call_function"]


def _columns(node: fx.Node) -> bool:
    """Whether a reduction sums over columns: its rows' last dimension is still there."""
    if passes.op_name(node) not in _ROW_SUMS or not node.all_input_nodes:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not before.ndim or not after.ndim:
        return False
    return before.shape[-1] == after.shape[-1] and before.numel() > after.numel()


def _grouped(
    order: list[fx.Node], values: Mapping[fx.Node, _Value], base: Mapping[fx.Node, fx.Node], outputs: set[fx.Node]
) -> list[Kernel]:
    group: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    meeting: dict[tuple[fx.Node, int], fx.Node] = {}  # (tensor, depth) -> a kernel that reads or writes it
    for node in order:
        group[node] = node
        if solid(node) or _columns(node):
            continue
        for leaf in (node, *values[node].leaves):
            other = meeting.setdefault((leaf, values[node].depth), node)
            group[find(node)] = find(other)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        members.setdefault(find(node), []).append(node)
    last = {nodes[-1]: nodes for nodes in members.values()}
    return [_kernel(node, last[node], values, base, outputs) for node in order if node in last]


def _kernel(
    node: fx.Node,
    members: list[fx.Node],
    values: Mapping[fx.Node, _Value],
    base: Mapping[fx.Node, fx.Node],
    outputs: set[fx.Node],
) -> Kernel:
    if solid(node):
        read = sum({base.get(a, a): size(a) for a in node.all_input_nodes}.values())
        return Kernel(node, read, _result(node))
    inside = set(members)
    views: dict[fx.Node, dict[fx.Node, int]] = {}
    for m in members:
        for leaf, seen in values[m].leaves.items():
            if leaf not in inside:
                views.setdefault(leaf, {}).update(seen)
    read = sum(min(size(leaf) or sum(seen.values()), sum(seen.values())) for leaf, seen in views.items())
    body = {n for m in members for n in values[m].body}

    def stays(m: fx.Node) -> bool:
        """Whether only this kernel reads it."""
        return m not in outputs and all(u in body or (base.get(u) is m and stays_view(u)) for u in m.users)

    def stays_view(v: fx.Node) -> bool:
        return v not in outputs and all(u in body or (u in base and stays_view(u)) for u in v.users)

    return Kernel(node, read, sum(_result(m) for m in members if not stays(m)), *_work(list(body)))
