"""What a program does to a machine, without its graphs: what each graph launches, and the sizes that the interpreter
handles around them. Small, and apart from any machine's rates: to be kept, and timed again with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.program import async_tp
from dtrain.program.compile import GRAPH_OF
from dtrain.program.cost import Launch, launches
from dtrain.program.lower import Program, Segment
from dtrain.program.passes import Cut, pieces


@dataclass(frozen=True)
class Load:
    """A segment. `graphs` are the launches of each graph; `sums` the elements of the gradients that a graph gives, by
    graph; `early` the elements of the sums of a microbatch that is reduced by itself (None where none is); `owned` the
    elements of its own parameters on a rank, as the optimizer holds them."""

    graphs: Mapping[str, tuple[Launch, ...]]
    sums: Mapping[str, int]
    early: int | None
    owned: int


@dataclass(frozen=True)
class Loads:
    """A program. `act` are the bytes of what one segment hands to the next; `part` and `whole` the bytes of an element
    in the dtype of compute and in that of the masters."""

    segments: Mapping[str, Load]
    act: int
    part: int
    whole: int


def loads_of(program: Program, compiled: bool, fuse: bool = False) -> Loads:
    """The loads of a program whose graphs that compute are compiled, or none; with `fuse`, with collectives over tp in
    one operation with products (`async_tp`)."""
    act = program.segments["embed"].act
    assert act is not None
    return Loads(
        {name: _load(s, compiled, fuse) for name, s in program.segments.items()},
        math.prod(act[0]) * act[1].itemsize,
        program.job.dtype.itemsize,
        program.job.master.itemsize,
    )


def _load(s: Segment, compiled: bool, fuse: bool) -> Load:
    graphs, sums = {}, {}
    for name, g in s.graphs.items():
        compiles = compiled and name in GRAPH_OF.values()
        parts = [Cut(g.module, g.inputs, g.outputs)]
        if compiles and fuse:
            parts = [async_tp.fuse(part).cut for part in pieces(parts[0])]
        graphs[name] = tuple(x for p in parts for x in launches(p.module.graph, p.inputs, p.outputs, compiles))
        sums[name] = sum(math.prod(s.stored[o[12:]].local) for o in g.outputs if o.startswith("grad:params:"))
    early = any(x.grads for x in s.stored.values())
    each = sum(math.prod(x.shape(x.grads)) for x in s.stored.values())
    owned = sum(math.prod(s.stored[n].shape(len(s.stored[n].steps))) for n in s.owned)
    return Load(graphs, sums, each if early else None, owned)
