"""What a graph costs, counted off its nodes: FLOPs, bytes on the wire, and the kernels that run it with the bytes
that each reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from dtrain.program import passes

PRODUCTS = ("mm", "addmm", "bmm")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")  # a collective and its products (`async_tp`)
VIEWS = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "detach", "alias", "unsqueeze", "squeeze",
    "slice", "select", "split", "split_with_sizes", "unbind", "chunk",
)  # fmt: skip

# Half the products of a causal attention are masked away, and fused kernels leave them out.
_CAUSAL = 0.5


# FLOP/s and bytes/s where a device's peaks are unknown (a CPU): only their ratio matters.
UNKNOWN = (1e11, 1e10)


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
    if name not in (*PRODUCTS, "attention", "attention_backward"):
        return 0.0
    inputs = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if name in PRODUCTS:
        return float(2 * math.prod(node.meta["val"].shape) * inputs[-2].shape[-1])
    q, k = inputs[:2] if name == "attention" else inputs[1:3]
    causal = asked(node).causal
    whole = float(2 * q.numel() * k.shape[1] * (2 if name == "attention" else 5))
    return whole * _CAUSAL if causal else whole


@dataclass(frozen=True, slots=True)
class Asked:
    """How a node of attention, forward or backward, is asked to compute: the last arguments of `ops.attention`."""

    causal: bool
    kernel: str
    start: Any = None
    documents: int = 0


def asked(node: fx.Node) -> Asked:
    last: Any = node.args[4 if passes.op_name(node) == "attention" else 7 :]
    return Asked(*last)


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
    own = (*PRODUCTS, *FUSED, "attention", "attention_backward", "wait_tensor")
    return name in own or passes.is_collective(node)


# ---------------------------------------------------------------------------------------------------- kernels

_SUMS = ("mean", "sum", "amax", "max", "argmax", "logsumexp", "var", "var_mean", "any", "_softmax", "_log_softmax")
# They read rows of their first input, as many as their result has.
_LOOKUPS = ("embedding", "index", "index_select", "gather")
_SCATTERS = ("embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add", "_index_put_impl_")
# A value that is read more than once is written when computing it again would read more than this many tensors
# (Inductor's `realize_reads_threshold`).
_READS = 4


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` products (m, k) x (k, n), and the dtype of what is multiplied."""

    m: int
    n: int
    k: int
    batch: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention, forward or backward: the kernel that is asked for, the shape of the queries, whether a mask comes
    with them, of how many documents a sequence at most (0: nobody knows), and the FLOPs, those of the mask included."""

    kernel: str
    batch: int
    length: int
    heads: int
    width: int
    dtype: torch.dtype
    masked: bool
    documents: int
    flops: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch on a GPU. `op` is its product or attention (then `does` says of what shape), or else the last operation
    of a fused chain; `read` and `written` bytes of memory; `steps` how many 32-bit instructions its pointwise work
    takes, over all elements, and `wide` how many in float64."""

    op: str
    read: int
    written: int
    steps: float = 0.0
    wide: float = 0.0
    does: Product | Attention | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on a tensor of `bytes` (the whole: what a gather makes, what a reduce-scatter takes)."""

    op: str
    group: str
    bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Kernels launched from here on wait for the collective of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Together:
    """A collective over `ranks` ranks and the kernels that it is one operation with: what one part of the tensor needs
    is computed while other parts travel."""

    collective: Collective
    ranks: int
    kernels: tuple[Kernel, ...]


Launch = Kernel | Collective | Wait | Together


def launches(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str], fused: bool = False) -> list[Launch]:
    """What a graph launches, in order. A collective is called after the graph's output that it is, where it is one: an
    input of that name is what a later graph waits for."""
    names = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    names |= {n: o for n, o in zip(passes.results_of(graph), outputs, strict=True) if n not in names}
    kernel_of = kernels(graph, fused)
    out: list[Launch] = []
    for node in graph.nodes:
        if passes.is_collective(node):
            op = passes.op_name(node)
            whole = node.all_input_nodes[0] if op == "reduce_scatter_tensor" else node
            out.append(Collective(op, passes.group_of(node), size(whole), names.get(node, node.name)))
        elif node.op == "call_function" and passes.op_name(node) == "wait_tensor":
            source = node.all_input_nodes[0]
            out.append(Wait(names.get(source, source.name)))
        elif node in kernel_of:
            out.append(_together(node) if passes.op_name(node) in FUSED else kernel_of[node])
    return out


def _together(node: fx.Node) -> Together:
    """An operation of `async_tp`: gathered rows times one matrix or several, or the sum over ranks of a product."""
    gathers = passes.op_name(node) == FUSED[0]
    given, rights = node.all_input_nodes[0], node.all_input_nodes[1:]
    if gathers:
        left, results = node.meta["val"][0], node.meta["val"][1]
    else:  # every rank's rows of the product
        left = given.meta["val"]
        results = [left.new_empty((*left.shape[:-1], rights[0].meta["val"].shape[-1]))]
    kernels = []
    for right, result in zip(rights, results, strict=True):
        shape = Product(left.numel() // left.shape[-1], result.shape[-1], left.shape[-1], 1, left.dtype)
        kernels.append(Kernel("mm", left.nbytes + size(right), result.nbytes, does=shape))
    whole = left.nbytes if gathers else results[0].nbytes
    part = size(given) if gathers else size(node)
    if not gathers:
        kernels.append(Kernel("sum", whole, part))  # of the parts that came
    op = "all_gather_into_tensor" if gathers else "reduce_scatter_tensor"
    return Together(Collective(op, str(node.args[-1]), whole, node.name), whole // part, tuple(kernels))


def kernels(graph: fx.Graph, fused: bool = True) -> dict[fx.Node, Kernel]:
    """The kernels of a graph in order, each by its last node, collectives among them (waits are none).

    Fused, as Inductor does it: pointwise work is computed where it is read. Values are written for an operation that is
    not fused, for the graph's caller, for a reduction's readers, and where computing them again would read more than
    four tensors. What is written at the same depth (operations on its way that are not fused) from common inputs is
    one kernel, which reads each input once; sums over columns are kernels of their own. Tables that depend on nothing
    are only read (`compile` computes them once).

    Not fused, every operation but a view reads its inputs and writes its result.
    """
    return _fused(graph) if fused else _apart(graph)


def _kernel(node: fx.Node, read: int, written: int, body: Iterable[fx.Node]) -> Kernel:
    return Kernel(passes.op_name(node), read, written, *_work(body), _does(node))


def _does(node: fx.Node) -> Product | Attention | None:
    name = passes.op_name(node)
    tensors = [a.meta["val"] if isinstance(a, fx.Node) else None for a in node.args]
    if name in PRODUCTS:
        *batch, m, n = node.meta["val"].shape
        left = tensors[-2]
        assert left is not None
        return Product(m, n, left.shape[-1], math.prod(batch), left.dtype)
    if name in ("attention", "attention_backward"):
        forward = name == "attention"
        q = tensors[0 if forward else 1]
        assert q is not None
        how = asked(node)
        masked = tensors[3 if forward else 6] is not None or how.start is not None
        batch, length, heads, width = q.shape
        return Attention(how.kernel, batch, length, heads, width, q.dtype, masked, how.documents, flops(node))
    return None


def _apart(graph: fx.Graph) -> dict[fx.Node, Kernel]:
    out = {}
    for node in graph.nodes:
        name = passes.op_name(node) if node.op == "call_function" else ""
        if name and name not in (*VIEWS, "getitem", "wait_tensor"):
            read = sum(_seen(node, a) for a in node.all_input_nodes)
            out[node] = _kernel(node, read, _result(node), [node])
    return out


def _seen(reader: fx.Node, read: fx.Node) -> int:
    """Bytes of an input that a node touches."""
    return min(size(read), _result(reader)) if passes.op_name(reader) in _LOOKUPS else size(read)


def _result(node: fx.Node) -> int:
    """Bytes of a node's results, of all of them where it has several."""
    value = node.meta.get("val")
    return sum(v.numel() * v.element_size() for v in tree_leaves(value) if isinstance(v, Tensor))


def _work(nodes: Iterable[fx.Node]) -> tuple[float, float]:
    """32-bit instructions and float64 ones of pointwise nodes. A 64-bit integer takes about three of the first, and
    `rng.mix` is eleven operations."""
    steps = wide = 0.0
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not solid(node):
            if value.dtype == torch.float64:
                wide += value.numel()
            else:
                each = 11 if passes.op_name(node) == "mix" else 1
                steps += value.numel() * each * (3 if value.dtype == torch.int64 else 1)
    return steps, wide


@dataclass(frozen=True)
class _Value:
    """What computing a value means: `leaves` are the stored tensors that it reads, each with the bytes of the views
    that it reads them through; `body` the nodes that it computes; `depth` how many operations that are not fused come
    before it."""

    leaves: Mapping[fx.Node, Mapping[fx.Node, int]]
    body: tuple[fx.Node, ...]
    depth: int


def _fused(graph: fx.Graph) -> dict[fx.Node, Kernel]:
    values: dict[fx.Node, _Value] = {}
    stored: dict[fx.Node, None] = {}  # values that are written, each by a kernel
    constant: set[fx.Node] = set()
    tables: set[fx.Node] = set()  # constants that are costly, so kept
    base: dict[fx.Node, fx.Node] = {}  # the tensor that a view is of
    for node in graph.nodes:
        name, inputs = passes.op_name(node) if node.op == "call_function" else "", node.all_input_nodes
        if not name:
            continue
        if node.op == "call_function" and all(a in constant for a in inputs):
            constant.add(node)
            if name in ("cos", "sin") or any(a in tables for a in inputs):
                tables.add(node)
        elif name in (*VIEWS, "getitem", "wait_tensor"):
            base[node] = base.get(inputs[0], inputs[0])
        elif solid(node):
            depth = max((values[w].depth for w in (base.get(a, a) for a in inputs) if w in values), default=0)
            values[node] = _Value({}, (), depth + 1)
            stored[node] = None
        else:
            leaves: dict[fx.Node, dict[fx.Node, int]] = {}
            body: dict[fx.Node, None] = {}
            depth = 0
            for a in inputs:
                whole = base.get(a, a)
                value = values.get(whole)
                depth = max(depth, value.depth if value else 0)
                if value and whole not in stored:
                    body.update(dict.fromkeys(value.body))
                    for leaf, views in value.leaves.items():
                        leaves.setdefault(leaf, {}).update(views)
                elif a not in constant or a in tables:
                    leaves.setdefault(whole, {})[a] = _seen(node, a)
            values[node] = _Value(leaves, (*body, node), depth)
            large = sum(8 * size(leaf) > size(node) for leaf in leaves)
            again = len(node.users) > 1 and large > _READS
            if again or name in _SUMS or name in _SCATTERS or _needed(node):
                stored[node] = None
    return _grouped(list(stored), values, base)


def _needed(node: fx.Node) -> bool:
    """Whether an operation that is not fused reads a value, or the graph's caller, perhaps through views."""
    return any(
        u.op == "output" or solid(u) or (passes.op_name(u) in (*VIEWS, "getitem") and _needed(u)) for u in node.users
    )


def _columns(node: fx.Node) -> bool:
    """Whether a reduction sums over columns: the last dimension is still there."""
    if passes.op_name(node) not in _SUMS:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(after.ndim and before.shape[-1] == after.shape[-1] and before.numel() > after.numel())


def _grouped(
    order: Sequence[fx.Node], values: Mapping[fx.Node, _Value], base: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Kernel]:
    """Stored values that one kernel computes, as kernels."""
    group = {node: node for node in order}

    def first(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    meeting: dict[tuple[fx.Node, int], fx.Node] = {}  # a value that reads or is this tensor, by depth
    for node in order:
        if not solid(node) and not _columns(node):
            for leaf in (node, *values[node].leaves):
                group[first(node)] = first(meeting.setdefault((leaf, values[node].depth), node))
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        members.setdefault(first(node), []).append(node)
    outside = {
        leaf for node in order for leaf in values[node].leaves if leaf in group and first(leaf) is not first(node)
    }
    out = {}
    for nodes in members.values():
        views: dict[fx.Node, dict[fx.Node, int]] = {}
        for node in nodes:
            for leaf, seen in values[node].leaves.items():
                if leaf not in nodes:
                    views.setdefault(leaf, {}).update(seen)
        if solid(nodes[0]):
            views = {base.get(a, a): {a: size(a)} for a in nodes[0].all_input_nodes}
        read = sum(min(_result(leaf), sum(seen.values())) for leaf, seen in views.items())
        written = sum(_result(node) for node in nodes if solid(node) or node in outside or _needed(node))
        body = dict.fromkeys(n for node in nodes for n in values[node].body)
        out[nodes[-1]] = _kernel(nodes[-1], read, written, body)
    return {node: out[node] for node in order if node in out}
