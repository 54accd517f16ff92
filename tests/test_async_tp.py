"""Fused gathers and scatters compute what the graphs compute without, wherever the pattern is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import tiny
import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed import _symmetric_memory

from dtrain.mesh import Groups, Mesh, join, simulate, stand_ins
from dtrain.program import async_tp
from dtrain.program import compile as compiling
from dtrain.program.compile import CompileError, compile_program
from dtrain.program.lower import Graph
from dtrain.program.passes import Cut, op_name
from dtrain.torch_private import enable_symmetric_memory, join_fake_world, unregister_group

OPS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """torch has these operations for CUDA alone; its own description of them (what it gives to fake tensors) computes
    the same with a collective and a product."""
    stand_in = library.Library("symm_mem", "IMPL")
    for op in OPS:
        stand_in.impl(op, getattr(_symmetric_memory, f"_{op}_fallback"), "CPU")
    yield
    stand_in._destroy()


def cut_of(g: Graph) -> Cut:
    return Cut(g.module, g.inputs, g.outputs)


def fused(family: str, segment: str, graph: str, *more: str, tp: int = 2) -> async_tp.Fused:
    return async_tp.fuse(cut_of(tiny.segment(family, segment, f"tp{tp}", more).graphs[graph]))


@pytest.mark.parametrize(("family", "microbatch"), [("llama", 1), ("llama", 2), ("gpt2", 1), ("bert", 2)])
def test_what_is_fused(family: str, microbatch: int) -> None:
    """All of a block's forward; in backward what is not hidden behind gradients of weights."""
    more = f"data.microbatch={microbatch}"
    forward = fused(family, "block", "forward", more)
    assert (forward.fused, forward.of) == (4, 4)
    ops = Counter(op_name(n) for n in forward.cut.module.graph.nodes)
    assert [ops[op] for op in OPS] == [2, 2]
    assert not ops["all_gather_into_tensor"] and not ops["reduce_scatter_tensor"]
    backward = fused(family, "block", "backward", more)
    # Gradients that two or three products add up to are not: Llama's of both inputs, the others' of attention's.
    assert (backward.fused, backward.of) == (2 if family == "llama" else 3, 6)
    head = fused(family, "head", "backward", more)
    assert (head.fused, head.of) == (2, 2)


def test_without_sequence_parallelism_there_is_nothing_to_fuse() -> None:
    plain = fused("llama", "block", "forward", "shard.compute.res_seq=[]")
    assert (plain.fused, plain.of) == (0, 0)


def inputs(g: Graph, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    out = []
    for key, node in zip(g.inputs, g.module.graph.find_nodes(op="placeholder"), strict=True):
        v = node.meta["val"]
        if v.dtype.is_floating_point:
            out.append(torch.rand(v.shape, generator=generator, dtype=v.dtype))
        else:
            out.append(torch.full(v.shape, rank if key == "at:tp" else 1))
    return out


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("family", "segment", "graph", "microbatch", "tp"),
    [
        ("llama", "block", "forward", 1, 2),
        ("llama", "block", "forward", 2, 4),
        ("llama", "block", "backward", 2, 2),
        ("llama", "block", "backward_input", 1, 2),
        ("llama", "head", "backward", 1, 2),
        ("bert", "block", "backward", 2, 2),
    ],
)
def test_a_fused_graph_computes_the_same(family: str, segment: str, graph: str, microbatch: int, tp: int) -> None:
    g = tiny.segment(family, segment, f"tp{tp}", (f"data.microbatch={microbatch}",)).graphs[graph]
    after = async_tp.fuse(cut_of(g))
    assert after.fused and after.cut.inputs == g.inputs and after.cut.outputs == g.outputs
    mesh = tiny.make(family, f"tp{tp}").job.mesh

    def work(rank: int, groups: Groups) -> list[tuple[Tensor, Tensor]]:
        given = inputs(g, rank)
        return list(zip(g.module(*given), after.cut.module(*given), strict=True))

    for results in simulate(mesh, ["tp"], work):
        for want, got in results:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_compiled_computes_the_same(inductor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not inductor:
        monkeypatch.setattr(compiling, "inductor_compile", lambda graph, examples: graph)
    made, program = tiny.make("llama", "tp2"), tiny.program("llama", "tp2")
    forwards = [a for a in made.train[0] if a.kind == "F" and a.unit == 1]
    with stand_ins(made.job.mesh, program.groups()):
        compiled = compile_program(program, "on", "cpu", forwards, fuse=True)
    assert compiled.graphs == 1 and compiled.fused == (4, 4)
    g = program.segments["block"].graphs["forward"]

    def work(rank: int, groups: Groups) -> list[tuple[Tensor, Tensor]]:
        given = inputs(g, rank)
        return list(zip(g.module(*given), compiled.calls["block", "forward"](*given), strict=True))

    for results in simulate(made.job.mesh, ["tp"], work):
        for want, got in results:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cpp_compiler", lambda: None)
    with pytest.raises(CompileError, match=r"^kernels.async_tp: true; there is no C\+\+ compiler .*async_tp=false$"):
        compile_program(tiny.program("llama", "tp2"), "auto", "cpu", [], fuse=True)


def test_symmetric_memory_takes_the_name_of_a_dim() -> None:
    mesh = Mesh((("tp", 2),))
    join_fake_world(mesh.world)
    try:
        join(mesh, ["tp"], 0, "fake", 60.0)
        enable_symmetric_memory("tp")
        assert _symmetric_memory.is_symm_mem_enabled_for_group("tp")
    finally:
        _symmetric_memory._group_name_to_store.pop("tp", None)
        unregister_group("tp")
        dist.destroy_process_group()
