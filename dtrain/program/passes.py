"""Pure functions Graph -> Graph: cutting the joint graph, and reading collectives off a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)


def op_name(node: fx.Node) -> str:
    """`all_gather_into_tensor`, `mm`, ..."""
    target = node.target
    return target.__name__.split(".")[0] if not isinstance(target, str) else target


def is_collective(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") == "_c10d_functional"
        and op_name(node) in _COLLECTIVES
    )


def group_of(node: fx.Node) -> str:
    """The group a collective runs over: its last argument that is not a reduction's name."""
    return str(node.args[-1])


def results_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns."""
    results: Any = graph.output_node().args[0]
    return list(results)


def rename_groups(graph: fx.Graph, names: Mapping[str, str]) -> None:
    for node in graph.nodes:
        if is_collective(node):
            node.args = (*node.args[:-1], names[group_of(node)])


@dataclass(frozen=True)
class Cut:
    """A graph with named inputs and outputs, as cut from a larger one."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


# Whether a forward value is kept for backward, given the values that depend on parameters only.
Save = Callable[[fx.Node, Container[fx.Node]], bool]


@dataclass(frozen=True)
class Joint:
    """A joint graph: outputs y, then the gradients with respect to `wrt`.

    `name_of` names its inputs, `forward` are the nodes that y needs, `fixed` those that depend on parameters only,
    or on nothing, `reads` what backward takes directly from forward and the inputs.
    """

    graph: fx.Graph
    name_of: Mapping[fx.Node, str]
    wrt: tuple[str, ...]
    forward: Container[fx.Node]
    fixed: Container[fx.Node]
    reads: tuple[fx.Node, ...]


def joint(graph: fx.Graph, inputs: tuple[str, ...], wrt: tuple[str, ...]) -> Joint:
    """Name the inputs of a joint graph, and tell its forward part from its backward part."""
    name_of: dict[fx.Node, str] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    params = {h for h, name in name_of.items() if name.startswith("params:")}
    mark_wide(graph)
    y, *grads = results_of(graph)
    forward: dict[fx.Node, None] = dict.fromkeys(ancestors([y]))
    # All results of a forward operation are forward's, though y may need only one (attention's log-sum-exp).
    parts = [n for n in graph.nodes if op_name(n) == "getitem" and n.all_input_nodes[0] in forward]
    forward.update(dict.fromkeys(parts))
    body = [n for n in ancestors(grads, graph) if n not in forward and n.op != "placeholder"]
    both = {a for n in body for a in n.all_input_nodes} | set(grads)
    reads = tuple(n for n in graph.nodes if n in both and (n in forward or n.op == "placeholder"))
    return Joint(graph, name_of, wrt, forward, _depends_only_on(graph, params), reads)


def mark_wide(graph: fx.Graph) -> None:
    """Mark copies in a wider floating-point type, and what is computed from them element by element in that type
    (`meta["wide"]`): the inside of norms and softmax in fp32. The narrow value that they come from says as much."""

    def floats(node: fx.Node) -> Tensor | None:
        value = node.meta.get("val")
        return value if isinstance(value, Tensor) and value.is_floating_point() else None

    for node in graph.nodes:
        value = floats(node)
        if node.op != "call_function" or value is None:
            continue
        alike = [(a, x) for a in node.all_input_nodes if (x := floats(a)) is not None and x.numel() == value.numel()]
        if any(x.dtype.itemsize < value.dtype.itemsize or "wide" in a.meta for a, x in alike) and all(
            x.dtype.itemsize <= value.dtype.itemsize for _, x in alike
        ):
            node.meta["wide"] = True


@dataclass(frozen=True)
class Division:
    """What backward needs of forward: values that are kept, nodes that are computed again, inputs that are read;
    each in the graph's order."""

    saved: list[fx.Node]
    again: list[fx.Node]
    read: list[fx.Node]


def divide(j: Joint, save: Save) -> Division:
    """Go from backward towards the inputs, as far as what `save` keeps. A value that depends on parameters only, or
    on nothing, is never kept."""
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = list(j.reads)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            continue
        if node not in j.fixed and isinstance(node.meta.get("val"), Tensor) and save(node, j.fixed):
            saved.add(node)
        else:
            stack.extend(node.all_input_nodes)
    order = [n for n in j.graph.nodes if n in seen]
    return Division(
        [n for n in order if n in saved],
        [n for n in order if n not in saved and n.op != "placeholder"],
        [n for n in order if n.op == "placeholder"],
    )


def split_joint(j: Joint, save: Save) -> dict[str, Cut]:
    """Cut a joint graph into `forward`, `backward` and backward's halves `backward_input` and `backward_weight`.

    What backward reads of forward is kept where `save` allows and else computed again, just before its first use, as
    is whatever else does not depend on the gradient.
    """
    y, *grads = results_of(j.graph)
    saved = divide(j, save).saved
    saved_names = {n: f"saved:{i}" for i, n in enumerate(saved)}
    out = {"forward": build(j.graph, j.name_of, [y, *saved], ("y", *saved_names.values()))}
    labels = tuple(f"grad:{w}" for w in j.wrt)
    out["backward"] = build(j.graph, {**j.name_of, **saved_names}, grads, labels, late=_before_backward(j))
    out.update(_halves(out["backward"]))
    return {**out, "backward": overlap(out["backward"])}


def join(j: Joint) -> dict[str, Cut]:
    """A joint graph as `forward` and as `backward` with the forward in it: y and the gradients, what does not depend
    on the gradient just before its first use: of a loss in chunks, one chunk is there at a time."""
    y, *grads = results_of(j.graph)
    labels = tuple(f"grad:{w}" for w in j.wrt)
    both = build(j.graph, j.name_of, [y, *grads], ("y", *labels), late=_before_backward(j))
    return {"forward": build(j.graph, j.name_of, [y], ("y",)), "backward": add_products(both)}


def _before_backward(j: Joint) -> Container[fx.Node]:
    """The nodes of a joint graph that do not depend on the gradient that comes in."""
    after = {h for h, name in j.name_of.items() if name == "grad"}
    for node in j.graph.nodes:
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
    return {n for n in j.graph.nodes if n not in after}


def add_products(cut: Cut) -> Cut:
    """Sums of products, as the chunks of a loss leave them for a weight, one after the other: each product adds the
    sum so far (`addmm`). A compiler would fuse the additions and, to do them all at once, hold all products."""
    aten, graph = torch.ops.aten, cut.module.graph

    def under(node: fx.Node) -> fx.Node:
        """What a transposition transposes, where nothing else reads it."""
        return node.all_input_nodes[0] if op_name(node) == "t" and len(node.users) == 1 else node

    for node in list(graph.nodes):
        if op_name(node) != "add" or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        total, more = node.all_input_nodes
        last, sum_ = under(more), under(total)
        flat = (more is last) == (total is sum_)
        alike = [x.meta["val"] for x in (last, sum_)]
        if not flat or op_name(last) != "mm" or len(last.users) != 1 or op_name(sum_) not in ("mm", "addmm"):
            continue
        if alike[0].shape != alike[1].shape or alike[0].dtype != alike[1].dtype:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.addmm.default, (sum_, *last.args))
            new.meta = {**last.meta, "chunk": True}
            sum_.meta["chunk"] = True
            if more is not last:
                new = graph.call_function(aten.t.default, (new,))
                new.meta = {**node.meta}
        node.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    cut.module.recompile()
    return cut


def overlap(cut: Cut) -> Cut:
    """A backward in which gradients of parameters are computed while a sum or gather for the gradient of x is on its
    way: behind a collective's start comes what only they need, and then its wait and what else depends on it.
    Megatron does so by hand (`LinearWithGradAccumulationAndAsyncCommunication`). Until then what they are made of is
    held: at most the inputs of the products between two collectives."""
    graph = cut.module.graph
    if not any(map(is_collective, graph.nodes)):
        return cut
    results = results_of(graph)
    ends = [n for n, name in zip(results, cut.outputs, strict=True) if not name.startswith("grad:params:")]
    urgent = ancestors([*ends, *(n for n in graph.nodes if is_collective(n))])
    holes = dict(zip(graph.find_nodes(op="placeholder"), cut.inputs, strict=True))
    # Products only: what is pointwise is fused with its like behind the wait, and the earliest place holds for all.
    products = [n for n in graph.nodes if op_name(n) in ("mm", "addmm", "bmm") and n not in urgent]
    order: dict[fx.Node, None] = dict.fromkeys(holes)
    for node in filter(is_collective, graph.nodes):
        order.update(dict.fromkeys(ancestors([node], graph)))
        for product in products:
            needs = ancestors([product], graph)
            if all(n in order or not (is_collective(n) or n.all_input_nodes[:1] == [node]) for n in needs):
                order.update(dict.fromkeys(needs))
    order.update(dict.fromkeys(ancestors(ends, graph)))
    return build(graph, holes, results, cut.outputs, order=[*order, *graph.nodes])


def pieces(whole: Cut) -> list[Cut]:
    """A graph as several that run one after the other, cut where a chunk has been added up (`add_products`) and the
    next one begins: a compiler may compute the scores of all chunks before it uses any. What crosses is `part:I`."""
    graph = whole.module.graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    holes = dict(zip(graph.find_nodes(op="placeholder"), whole.inputs, strict=True))
    after = {h for h, name in holes.items() if name == "grad"}
    for node in nodes:
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
    # The next chunk begins with the first value that is not the gradient's.
    begins = [i for i, n in enumerate(nodes) if n not in after and not is_view(n)]
    ended = [i for i, n in enumerate(nodes) if "chunk" in n.meta][:-1]
    starts = sorted({next((b for b in begins if b > e), 0) for e in ended} - {0})
    if not starts:
        return [whole]

    def base(node: fx.Node) -> fx.Node:
        return base(node.all_input_nodes[0]) if is_view(node) else node

    group = {n: sum(i >= start for start in starts) for i, n in enumerate(nodes)}
    results = results_of(graph)
    crossing = {
        base(a): None
        for n in nodes
        for a in n.all_input_nodes
        if group.get(base(a), group[n]) < group[n] and not is_view(n)
    }
    crossing |= {base(n): None for n in results if group.get(base(n), len(starts)) < len(starts)}
    names = {n: f"part:{i}" for i, n in enumerate(crossing)}
    out = []
    for k in range(len(starts) + 1):
        given = holes | {n: name for n, name in names.items() if group[n] < k}
        made = [n for n in names if group[n] == k]
        if k == len(starts):
            out.append(build(graph, given, results, whole.outputs))
        else:
            out.append(build(graph, given, made, tuple(names[n] for n in made)))
    return out


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in its input's memory."""
    if op_name(node) == "getitem":
        return is_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return shares or op_name(node) == "_unsafe_view"


def _halves(backward: Cut) -> dict[str, Cut]:
    """backward -> the part that the previous stage waits for, and the rest. What depends on parameters only is made
    from them in both: it may be a view of one, which would outlive its FREE."""
    graph = backward.module.graph
    holes = dict(zip(graph.find_nodes(op="placeholder"), backward.inputs, strict=True))
    results = results_of(graph)
    has_x = backward.outputs[0] == "grad:x"
    first = results[:1] if has_x else []
    rest = results[1:] if has_x else results
    fixed = _depends_only_on(graph, {h for h, name in holes.items() if name.startswith("params:")})
    done = {n for n in ancestors(first) if n not in fixed}
    crossing = {
        a: None
        for n in ancestors(rest, graph)
        for a in ([n] if n in done and n in rest else [b for b in n.all_input_nodes if b in done and n not in done])
        if a.op != "placeholder"
    }
    names = {n: f"half:{i}" for i, n in enumerate(crossing)}
    return {
        "backward_input": build(graph, holes, [*first, *crossing], (*backward.outputs[: len(first)], *names.values())),
        "backward_weight": build(graph, {**holes, **names}, rest, backward.outputs[len(first) :]),
    }


def build(
    graph: fx.Graph,
    given: Mapping[fx.Node, str],
    results: Iterable[fx.Node],
    outputs: tuple[str, ...],
    late: Container[fx.Node] = (),
    order: Iterable[fx.Node] | None = None,
) -> Cut:
    """The part of `graph` that computes `results` from the nodes in `given` (only those used become inputs),
    in `order` (by default the graph's), except that nodes in `late` stand just before their first reader."""
    results = list(results)
    needed: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in given:
                stack.extend(node.all_input_nodes)
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    used = [n for n in given if n in needed]
    for node in used:
        env[node] = new.placeholder(given[node].replace(":", "_").replace(".", "_"))
        env[node].meta = dict(node.meta)

    def emit(node: fx.Node) -> None:
        for a in node.all_input_nodes:
            if a not in env:
                emit(a)
        env[node] = new.node_copy(node, lambda a: env[a])

    for node in graph.nodes if order is None else order:
        if node in needed and node not in env and node not in late:
            emit(node)
    for node in results:
        if node not in env:
            emit(node)
    new.output([env[n] for n in results])
    return Cut(fx.GraphModule(torch.nn.Module(), new), tuple(given[n] for n in used), outputs)


def ancestors(results: Iterable[fx.Node], graph: fx.Graph | None = None) -> Collection[fx.Node]:
    """Nodes that `results` depend on, themselves included; as a list in graph order if the graph is given."""
    seen: dict[fx.Node, None] = {}
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    return seen if graph is None else [n for n in graph.nodes if n in seen]


def _depends_only_on(graph: fx.Graph, roots: set[fx.Node]) -> frozenset[fx.Node]:
    """Values computed from `roots` alone, or from nothing."""
    out = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and all(a in out for a in node.all_input_nodes):
            out.add(node)
    return frozenset(out)
