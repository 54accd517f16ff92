"""Which tensor was the first that is not finite: a step is run again, uncompiled, and every node is looked at.

A bad value spreads, also to other ranks. Its *origin* is a parameter that holds it, or an operation that makes it
from finite inputs; on each rank only the first is kept, and of all ranks' the one that the step computes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from dtrain.program import passes
from dtrain.program.interpret import Calls, Place, Step, Weights, bind, run, unit_path
from dtrain.program.lower import Graph, Program
from dtrain.program.schedule import Action


@dataclass(frozen=True, order=True)
class Bad:
    """The first bad tensor of a rank. `order` compares moments of a step; `text` is for a person."""

    derived: bool
    order: tuple[int, ...]
    rank: int
    text: str = field(compare=False)


def find(
    program: Program, calls: Calls, place: Place, weights: Weights, actions: Sequence[Action], step: Step
) -> Bad | None:
    """Replay a step without its update, on all ranks at once; this rank's first bad tensor, an origin if there is one.

    `calls` are the graphs as FX modules on the right device; `weights` those from before the step.
    """
    found: list[Bad] = []
    current: list[Action] = []
    layers = program.job.layers

    def watched(name: str, graph: str, g: Graph, module: Any) -> Callable[..., list[Tensor]]:
        inputs = dict(zip(module.graph.find_nodes(op="placeholder"), g.inputs, strict=True))

        def see(index: int, node: fx.Node, value: Any, inputs_bad: bool) -> None:
            action = current[-1]
            order, where = _moment(action, index), _where(action, graph, layers, place)
            if node in inputs:
                key = inputs[node].removeprefix("params:")
                if key in program.segments[name].stored:
                    kind, path = _bad(value), unit_path(action.unit, layers, key)
                    what = "gradient of" if graph.startswith("reduce") else "parameter"
                    found.append(
                        Bad(graph.startswith("reduce"), order, place.rank, f"{what} {path} is {kind}, {where}")
                    )
                else:
                    found.append(Bad(True, order, place.rank, f"{inputs[node]} is {_bad(value)}, {where}"))
            else:
                derived = inputs_bad or passes.is_collective(node) or passes.op_name(node) == "wait_tensor"
                text = f"{passes.op_name(node)} at {_line(node)} gives {_bad(value)}, {where}"
                found.append(Bad(derived, order, place.rank, text))

        return lambda *args: walk(module.graph, args, see)

    replayed = {
        (s.name, k): watched(s.name, k, g, calls[s.name, k])
        for s in program.segments.values()
        for k, g in s.graphs.items()
    }
    # The replay must not write where the run goes on, and publishes nothing.
    held = Weights(dict(weights.masters), dict(weights.rest))
    observed = replace(step, update=lambda grads, loss: None, watch=lambda position, action: current.append(action))
    with torch.no_grad():
        run(bind(program, replayed, place, actions), held, observed)
    return min(found, default=None)


def walk(graph: fx.Graph, args: Sequence[Tensor], see: Callable[[int, fx.Node, Any, bool], None]) -> list[Tensor]:
    """Run a graph node by node; `see(index, node, value, an input is bad)` for each value that is not finite."""
    values: dict[fx.Node, Any] = {}
    bad: set[fx.Node] = set()
    readers = {n: len(n.users) for n in graph.nodes}
    given = iter(args)
    for index, node in enumerate(graph.nodes):
        if node.op == "output":
            return list(fx.node.map_arg(node.args[0], lambda n: values[n]))
        if node.op == "placeholder":
            values[node] = next(given)
        else:
            a, k = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*a, **k)
        inputs_bad = any(i in bad for i in node.all_input_nodes)
        for i in node.all_input_nodes:
            readers[i] -= 1
            if not readers[i]:
                values[i] = None
        if not _in_flight(node) and _bad(values[node]) is not None:
            bad.add(node)
            see(index, node, values[node], inputs_bad)
    return []


def _in_flight(node: fx.Node) -> bool:
    """Whether a value is not there before its wait: a collective's result, or one that another graph started."""
    waited = (passes.op_name(user) == "wait_tensor" for user in node.users)
    return passes.is_collective(node) or (node.op == "placeholder" and any(waited))


def _bad(value: Any) -> str | None:
    """`nan` or `inf` if some element is; None if all are finite."""
    tensors = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    if any(bool(t.isnan().any()) for t in floats):
        return "nan"
    return "inf" if any(bool(t.isinf().any()) for t in floats) else None


def _moment(a: Action, index: int) -> tuple[int, ...]:
    """When a step computes something, to be compared over ranks: weights, then forwards, then backwards."""
    if a.kind == "UNSHARD" or a.what == "params":
        return (0, 0, a.unit, index)
    if a.kind == "F":
        return (1, a.mb, a.unit, index)
    return (3 if a.kind == "REDUCE" or a.what == "grads" else 2, a.mb, -a.unit, index)


def _where(a: Action, graph: str, layers: int, place: Place) -> str:
    unit = "embed" if a.unit == 0 else "head" if a.unit > layers else f"layer {a.unit - 1}"
    at = ", ".join(f"{d} {i}" for d, i in place.at.items() if place.mesh.size(d) > 1)
    mb = f" of microbatch {a.mb}" if a.mb >= 0 else ""
    return f"in {graph}{mb} of {unit} on rank {place.rank}" + (f" ({at})" if at else "")


def _line(node: fx.Node) -> str:
    """The model line, of the node or else of the nearest one that it reads."""
    queue, seen = [node], set()
    for n in queue:
        if "line" in n.meta:
            return str(n.meta["line"])
        new = [i for i in n.all_input_nodes if i not in seen]
        seen.update(new)
        queue.extend(new)
    return "an unknown line"


__all__ = ["Bad", "find", "walk"]
