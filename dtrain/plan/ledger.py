"""Every collective of one training step: what, over which group and link, how often, how many bytes, and the model
line that caused it. Read off the lowered graphs and the action list, so it is what `dtrain run` does.

Bytes on the wire are those that one rank sends in a ring. Over n ranks a gather or a reduce-scatter of a tensor of
S bytes (the whole: result of the one, input of the other) sends (n-1)/n S, an all-reduce 2 (n-1)/n S, a send S.
A group that spans several dims or links is booked level by level, the inner one first: n = a b ranks, a of them
inner, send (a-1)/a S there and (b-1)/b S/a outside, which add up to (n-1)/n S.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor, fx

from dtrain import layout as layouts
from dtrain.layout import Layout
from dtrain.plan import Plan
from dtrain.program import passes
from dtrain.program.compile import GRAPH_OF
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import Program
from dtrain.program.schedule import Action

K = TypeVar("K", bound=Hashable)

PHASES = ("unshard", "forward", "backward", "reduce", "publish", "pipeline", "update")
_PHASE_OF = {"reduce_early": "reduce", "backward_input": "backward", "backward_weight": "backward"}


@dataclass(frozen=True)
class Level:
    """A part of a group: `ranks` ranks along one dim that one link joins."""

    dim: str
    link: str
    ranks: int


@dataclass(frozen=True)
class Entry:
    """A collective, or an end of a transfer, that one rank takes part in `count` times a step.

    `op` is all_gather_into_tensor, reduce_scatter_tensor, all_reduce, send or recv; `graph` the graph that it stands
    in, or the function outside of graphs; `levels` the parts of its group, inner first; `bytes` those of the whole
    tensor; `line` the model line that asked for it, as `llama.py:115`, or nothing where the layout did.
    """

    op: str
    phase: str
    segment: str
    graph: str
    group: str
    levels: tuple[Level, ...]
    count: int
    bytes: int
    line: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(level.ranks for level in self.levels)

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.dim for level in self.levels))

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.link for level in self.levels))

    @property
    def shares(self) -> tuple[float, ...]:
        """Bytes that this rank sends at one call, by level."""
        return sent(self.op, self.bytes, [level.ranks for level in self.levels])

    @property
    def wire(self) -> float:
        """Bytes that this rank sends in a step."""
        return self.count * sum(self.shares)


def sent(op: str, bytes: float, ranks: Sequence[int]) -> tuple[float, ...]:
    """Bytes that a rank sends for a collective on a tensor of `bytes`, by level of its group, inner first."""
    if op in ("send", "recv"):
        return (float(bytes) if op == "send" else 0.0,)
    out, rest = [], bytes * (2.0 if op == "all_reduce" else 1.0)
    for n in ranks:
        out.append((n - 1) / n * rest)
        rest /= n
    return tuple(out)


# ------------------------------------------------------------------------------------------------- from a plan


def ledger(plan: Plan, program: Program, pp: int = 0) -> list[Entry]:
    """The entries of one rank at a pipeline coordinate; all ranks at that coordinate have the same."""
    layers, found = program.job.layers, []
    runs = Counter(
        (unit_segment(unit, layers)[0], graph)
        for action in plan.train[pp]
        for unit, graph in graphs_run(program, plan.units[pp], action)
    )
    for (name, graph), count in runs.items():
        for node in program.segments[name].graphs[graph].module.graph.nodes:
            if passes.is_collective(node):
                found.append(_entry(plan, name, graph, node, count))
    return _merged([*found, *_transfers(plan, program, pp), *_agreements(plan, program, pp)])


def graphs_run(program: Program, units: Sequence[int], action: Action) -> list[tuple[int, str]]:
    """The graphs that an action runs on a rank with these units, each with its unit. What is not a graph (transfers,
    waits, frees) runs none."""
    if action.kind in GRAPH_OF:
        return [(action.unit, GRAPH_OF[action.kind])]
    if action.kind == "UNSHARD":
        return [(action.unit, "unshard")]
    if action.kind == "REDUCE":
        return [(action.unit, "reduce_early" if action.mb >= 0 else "reduce")]
    if action.kind == "UPDATE":
        layers = program.job.layers
        return [(u, "publish") for u in units if "publish" in program.segments[unit_segment(u, layers)[0]].graphs]
    return []


def levels(layout: Layout, group: str) -> tuple[Level, ...]:
    """The parts of a named group, inner first. The one place that reads names: `tp`, `dp.fsdp`, `tp%2`, `pp@0+3`,
    `world`, each perhaps with a suffix that tells communicators apart (`fsdp/reduce`)."""
    name = group.partition("/")[0]
    if "@" in name:
        dim, _, places = name.partition("@")
        numbers = [int(p) for p in places.split("+")]
        return (Level(dim, layouts.link_between(layout, dim, numbers), len(numbers)),)
    if "%" in name:
        dim, _, block = name.partition("%")
        return tuple(Level(dim, link, n) for link, n in layouts.levels(layout, dim, int(block)))
    dims = list(layout.mesh) if name == "world" else name.split(".")
    sizes = layout.sizes
    return tuple(Level(d, link, n) for d in reversed(dims) for link, n in layouts.levels(layout, d, sizes[d]))


def _entry(plan: Plan, segment: str, graph: str, node: fx.Node, count: int) -> Entry:
    op, group = passes.op_name(node), passes.group_of(node)
    whole = node.all_input_nodes[0] if op == "reduce_scatter_tensor" else node
    line = Path(node.meta.get("site", "")).name
    phase = _PHASE_OF.get(graph, graph)
    return Entry(op, phase, segment, graph, group, levels(plan.layout, group), count, _bytes(whole), line)


def _bytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _transfers(plan: Plan, program: Program, pp: int) -> list[Entry]:
    act = program.segments["embed"].act
    assert act is not None
    size = math.prod(act[0]) * act[1].itemsize
    out = []
    for a in plan.train[pp]:
        if a.kind in ("SEND", "RECV"):
            link = layouts.link_between(plan.layout, "pp", (pp, a.peer))
            level = Level("pp", link, 2)
            segment = unit_segment(a.unit, program.job.layers)[0]
            out.append(Entry(a.kind.lower(), "pipeline", segment, a.what, "pp", (level,), 1, size))
    return out


def _agreements(plan: Plan, program: Program, pp: int) -> list[Entry]:
    """What ranks agree on outside of graphs: valid labels before the head's first forward (`train.global_counts`),
    and norm, loss and whether to stop (`update.agree`), in float64."""
    mesh, out = plan.job.mesh, []
    terms = sum(key.startswith("count:") for key in program.segments["head"].graphs["forward"].inputs)
    if plan.data_dims and program.job.layers + 1 in plan.units[pp]:
        group = ".".join(plan.data_dims)
        parts = levels(plan.layout, group)
        out.append(Entry("all_reduce", "forward", "head", "global_counts", group, parts, 1, 8 * terms))
    if mesh.world > 1:
        out.append(Entry("all_reduce", "update", "", "agree", "world", levels(plan.layout, "world"), 1, 3 * 8))
    return out


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that differ in their count only, as one; in the order of phases."""
    counts: Counter[Entry] = Counter()
    for e in entries:
        counts[replace(e, count=0)] += e.count
    return sorted((replace(e, count=n) for e, n in counts.items()), key=lambda e: PHASES.index(e.phase))


# ---------------------------------------------------------------------------------------------------- totals


def by_phase(entries: Iterable[Entry]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by phase."""
    return _totals((e.phase, e.wire) for e in entries)


def by_dim(entries: Iterable[Entry]) -> dict[str, float]:
    """The same by mesh dim."""
    return _totals((level.dim, e.count * n) for e in entries for level, n in zip(e.levels, e.shares, strict=True))


def by_link(entries: Iterable[Entry]) -> dict[str, float]:
    """The same by link."""
    return _totals((level.link, e.count * n) for e in entries for level, n in zip(e.levels, e.shares, strict=True))


def by_dim_and_phase(entries: Iterable[Entry]) -> dict[tuple[str, str], float]:
    """The same by both."""
    return _totals(
        ((level.dim, e.phase), e.count * n) for e in entries for level, n in zip(e.levels, e.shares, strict=True)
    )


def _totals(parts: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Sums by key, without what is 0."""
    out: dict[K, float] = {}
    for key, n in parts:
        out[key] = out.get(key, 0.0) + n
    return {key: n for key, n in out.items() if n}
