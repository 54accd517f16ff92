"""Pure functions Graph -> Graph: cutting the joint graph, recompute, and reading collectives off a graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
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


Save = Callable[[fx.Node, frozenset[fx.Node]], bool]


def policy(remat: str) -> Save:
    """A recompute policy: which forward values may be kept for backward (given the parameter-only values).

    `none` keeps what backward reads; `selective` keeps products with weights, attention and reduced sums, and
    recomputes pointwise work, gathers of the sequence and attention's inner products, as Megatron's selective
    recompute does (Korthikanti et al. 2022, section 5); `full` keeps only the segment's input.
    """
    if remat == "none":
        return lambda node, fixed: True
    if remat == "full":
        return lambda node, fixed: False

    def selective(node: fx.Node, fixed: frozenset[fx.Node]) -> bool:
        name = op_name(node)
        if name in ("mm", "addmm", "bmm"):
            return any(a in fixed for a in node.all_input_nodes)
        if name == "wait_tensor":
            return op_name(node.all_input_nodes[0]) != "all_gather_into_tensor"
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        return name == "getitem" and source is not None and op_name(source) == "attention"

    return selective


def split_joint(graph: fx.Graph, inputs: tuple[str, ...], wrt: tuple[str, ...], save: Save) -> dict[str, Cut]:
    """Cut a joint graph (outputs: y, then gradients with respect to `wrt`) into `forward`, `backward` and
    backward's halves `backward_input` and `backward_weight`.

    What backward reads of forward is saved where `save` allows and else recomputed, just before its first
    use. A value that depends on parameters only, or on nothing, is never saved.
    """
    holes = list(graph.find_nodes(op="placeholder"))
    name_of = dict(zip(holes, inputs, strict=True))
    y, *grads = results_of(graph)
    forward = ancestors([y])
    fixed = _depends_only_on(graph, {h for h in holes if name_of[h].startswith("params:")})
    body = [n for n in ancestors(grads, graph) if n not in forward and n.op != "placeholder"]

    keep: dict[fx.Node, None] = {}  # ordered
    visited: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in visited or node.op == "placeholder" or node not in forward:
            return
        visited.add(node)
        if node not in fixed and isinstance(node.meta.get("val"), Tensor) and save(node, fixed):
            keep[node] = None
            return
        for a in node.all_input_nodes:
            visit(a)

    for n in [*body, *grads]:
        for a in n.all_input_nodes if n in body else [n]:
            visit(a)
    saved = [n for n in graph.nodes if n in keep]
    saved_names = {n: f"saved:{i}" for i, n in enumerate(saved)}
    out = {"forward": build(graph, {h: name_of[h] for h in holes}, [y, *saved], ("y", *saved_names.values()))}
    given = {**{h: name_of[h] for h in holes}, **saved_names}
    labels = tuple(f"grad:{w}" for w in wrt)
    out["backward"] = build(graph, given, grads, labels, late=forward)
    out.update(_halves(out["backward"]))
    return out


def _halves(backward: Cut) -> dict[str, Cut]:
    """backward -> the part that the previous stage waits for, and the rest."""
    graph = backward.module.graph
    holes = dict(zip(graph.find_nodes(op="placeholder"), backward.inputs, strict=True))
    results = results_of(graph)
    has_x = backward.outputs[0] == "grad:x"
    first = results[:1] if has_x else []
    rest = results[1:] if has_x else results
    done = ancestors(first)
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
) -> Cut:
    """The part of `graph` that computes `results` from the nodes in `given` (only those used become inputs),
    in the original order, except that nodes in `late` stand just before their first reader."""
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

    for node in graph.nodes:
        if node in needed and node not in env and node not in late:
            emit(node)
    for node in results:
        if node not in env:
            emit(node)
    new.output([env[n] for n in results])
    return Cut(fx.GraphModule(torch.nn.Module(), new), tuple(given[n] for n in used), outputs)


def ancestors(results: Iterable[fx.Node], graph: fx.Graph | None = None) -> dict[fx.Node, None] | list[fx.Node]:
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
