"""The one place that compiles: each distinct graph goes through Inductor once.

Only what computes is compiled. `unshard`, `reduce` and `publish` are collectives and copies, and run as the FX
modules they are. Async tensor parallelism is put into what is compiled.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import ops
from dtrain.program import async_tp
from dtrain.program.interpret import Call, Calls, unit_segment
from dtrain.program.lower import Graph, Program
from dtrain.program.passes import Cut, build, op_name, pieces, results_of
from dtrain.program.schedule import Action
from dtrain.torch_private import cpp_compiler, inductor_compile

GRAPH_OF = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
Name = tuple[str, str]  # (segment, graph)


class CompileError(Exception):
    """The machine cannot compile as asked; one line for a person."""


@dataclass(frozen=True)
class Sharing:
    """How the ranks of one machine share the work: this one is `turn` of `turns` and first compiles its part of
    what any of them calls; all `meet`, and find the rest in Inductor's cache on disk."""

    turn: int = 0
    turns: int = 1
    meet: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Compiled:
    """`calls` for the interpreter, how many graphs were compiled, the `seconds` that took and, where compiling
    was left to the machine and it cannot, the `notice` to give. With async tensor parallelism `fused` says how many
    of the gathers and reduce-scatters over tp went into a product, and of how many."""

    calls: Calls
    graphs: int
    seconds: float
    notice: str | None = None
    fused: tuple[int, int] = (0, 0)


def called(program: Program, actions: Iterable[Action]) -> list[Name]:
    """The graphs that compute in these actions, largest first, each once."""
    layers = program.job.layers
    names = {(unit_segment(a.unit, layers)[0], GRAPH_OF[a.kind]) for a in actions if a.kind in GRAPH_OF}
    graphs = {n: _graph(program, n) for n in names}
    return sorted((n for n, g in graphs.items() if _computes(g)), key=lambda n: (-len(graphs[n].module.graph.nodes), n))


def uncompiled(program: Program, device: str = "cpu") -> Calls:
    """The graphs themselves as what the interpreter calls."""
    return {(s.name, k): _on(g.module, device) for s in program.segments.values() for k, g in s.graphs.items()}


def compile_program(
    program: Program,
    mode: str,
    device: str,
    mine: Iterable[Action],
    everyones: Iterable[Action] = (),
    sharing: Sharing | None = None,
    fuse: bool = False,
) -> Compiled:
    """What to call for each graph, under `mode` on, off or auto (on where the machine can); with `fuse`, collectives
    over tp fused with products (`async_tp`).

    `mine` are the actions of this rank, `everyones` those of all. The names of groups must be registered. Raises
    CompileError for `on` or `fuse` without a compiler.
    """
    started, sharing = time.perf_counter(), sharing or Sharing()
    calls = dict(uncompiled(program, device))
    lacking = missing_compiler(device) if mode != "off" else None
    if mode == "on" and lacking:
        raise CompileError(f"run.compile: on; {lacking}; install it, or use run.compile=off")
    if fuse and lacking:
        raise CompileError(f"kernels.async_tp: true; {lacking}; install it, or use kernels.async_tp=false")
    if mode == "off" or lacking:
        notice = f"run.compile: off, because {lacking}: the same graphs run uncompiled" if lacking else None
        sharing.meet()
        return Compiled(calls, 0, time.perf_counter() - started, notice)
    wanted, shared = called(program, mine), called(program, everyones)
    for name in shared[sharing.turn :: sharing.turns]:
        _compile(program, name, device, fuse)
    sharing.meet()
    done = of = 0
    for name in wanted:
        calls[name], (fused, among) = _compile(program, name, device, fuse)
        done, of = done + fused, of + among
    return Compiled(calls, len(wanted), time.perf_counter() - started, fused=(done, of))


def missing_compiler(device: str) -> str | None:
    """What this machine lacks for compiling, or None."""
    if cpp_compiler() is None:
        return "there is no C++ compiler (g++ or clang++)"
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        return "there is no Triton"
    return None


def _graph(program: Program, name: Name) -> Graph:
    return program.segments[name[0]].graphs[name[1]]


def _computes(g: Graph) -> bool:
    return any(n.op == "call_function" for n in g.module.graph.nodes)


def _on(module: fx.GraphModule, device: str) -> fx.GraphModule:
    """Graphs are traced on fake CPU tensors; what they create themselves must be made on the device."""
    if device == "cpu":
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device(device))
    return fx.GraphModule(module, graph)


def _compile(program: Program, name: Name, device: str, fuse: bool) -> tuple[Call, tuple[int, int]]:
    """A graph's call; how many of its collectives over tp were fused with products, and of how many."""
    g, what = _graph(program, name), f"{name[0]}.{name[1]}"
    parts, done, of = pieces(Cut(g.module, g.inputs, g.outputs)), 0, 0
    if fuse:
        after = [async_tp.fuse(p) for p in parts]
        parts, done, of = [a.cut for a in after], sum(a.fused for a in after), sum(a.of for a in after)
    calls = [_compile_piece(p, what, device) for p in parts]
    return (calls[0] if len(calls) == 1 else _in_turn(g.inputs, parts, calls)), (done, of)


def _in_turn(inputs: Sequence[str], parts: Sequence[Cut], calls: Sequence[Call]) -> Call:
    """Pieces of a graph as one call; what crosses is dropped after its last reader."""
    last = {k: i for i, p in enumerate(parts) for k in p.inputs}
    ends = [[k for k, at in last.items() if at == i and k.startswith("part:")] for i in range(len(parts))]

    def run(*args: Tensor) -> Sequence[Tensor]:
        there = dict(zip(inputs, args, strict=True))
        for part, call, done in zip(parts[:-1], calls[:-1], ends[:-1], strict=True):
            there.update(zip(part.outputs, call(*[there[k] for k in part.inputs]), strict=True))
            for k in done:
                del there[k]
        return calls[-1](*[there[k] for k in parts[-1].inputs])

    return run


def _compile_piece(g: Cut, what: str, device: str) -> Call:
    # Strides count: Inductor writes code for the layout that was traced.
    examples = [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)
        for v in (n.meta["val"] for n in g.module.graph.find_nodes(op="placeholder"))
    ]
    with torch.no_grad():
        module, tables = _tables(_on(g.module, device))
        given = [*examples, *tables]
        if device == "cpu":
            # Attention as what runs here: Inductor then fuses its copies, and a call is spared the way through a
            # custom operation, which small layers feel.
            module = make_fx(module, decomposition_table=ops.OPAQUE, tracing_mode="fake")(*given)
        call = inductor_compile(module, given)
    return _checked(call, what, g.inputs, examples, tables)


def _tables(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Make tables that depend on nothing (rotary cosines) into further inputs, and compute them, once.

    Inductor would compute them again, in float64, in every element that reads them.
    """
    costly: set[fx.Node] = set()  # such values, with a sine or the like on their way
    free: set[fx.Node] = set()
    for n in module.graph.nodes:
        if n.op == "call_function" and all(a in free for a in n.all_input_nodes):
            free.add(n)
            if op_name(n) in ("cos", "sin") or any(a in costly for a in n.all_input_nodes):
                costly.add(n)
    read = [n for n in module.graph.nodes if n in costly and any(u not in free for u in n.users)]
    if not read:
        return module, []
    names = tuple(f"table:{i}" for i in range(len(read)))
    tables = list(build(module.graph, {}, read, names).module())
    holes = module.graph.find_nodes(op="placeholder")
    keep = {h: h.name for h in holes} | dict(zip(read, names, strict=True))
    return build(module.graph, keep, results_of(module.graph), ()).module, tables


def _checked(call: Call, what: str, keys: Sequence[str], examples: Sequence[Tensor], tables: Sequence[Tensor]) -> Call:
    """Compiled code holds for one set of shapes: another is an error, never a recompilation."""
    want = [(e.shape, e.dtype, e.stride()) for e in examples]

    def run(*args: Tensor) -> Sequence[Tensor]:
        if [(x.shape, x.dtype, x.stride()) for x in args] == want:  # nearly always, and this is on every call's way
            return call(*args, *tables)
        given = []
        for key, x, (shape, dtype, stride) in zip(keys, args, want, strict=True):
            if x.shape != shape or x.dtype != dtype:
                raise RuntimeError(
                    f"{what} was compiled for {key} {tuple(shape)} {dtype}, not {tuple(x.shape)} {x.dtype}"
                )
            given.append(x if x.stride() == stride else x.new_empty_strided(shape, stride).copy_(x))
        return call(*given, *tables)

    return run
