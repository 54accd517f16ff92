"""What is compiled, when, and that compiled code computes the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import data, metrics, ops, optim, plan, rng, train, verify
from dtrain import layout as layouts
from dtrain.mesh import stand_ins
from dtrain.plan import Plan
from dtrain.program import compile as compiling
from dtrain.program import interpret
from dtrain.program.compile import CompileError, Sharing, called, compile_program, uncompiled
from dtrain.program.lower import Program, lower
from dtrain.program.passes import op_name
from dtrain.program.schedule import Action
from dtrain.program.update import UpdateConfig, make_update
from dtrain.rank import Rank
from dtrain.torch_private import inductor_compile


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make(schedule: str = "1f1b", mesh: str = "pp: {size: 2}, tp: {size: 2}") -> tuple[Plan, Program]:
    tp = ("layers: pp, " if "pp" in mesh else "") + "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"
    made = plan.plan(
        layouts.loads(
            f"""
cluster: {{gpus_per_node: {4 if "pp" in mesh else 1}}}
mesh: {{{mesh}}}
shard: {{params: {{{tp}}}, compute: {{{tp}, res_seq: tp}}}}
pipeline: {{schedule: {schedule}}}
model: {{family: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: 61}}
data: {{source: synthetic, seq: 16, batch: 4, microbatch: 2}}
run: {{steps: 2}}
"""
        )
    )
    return made, lower(made.job)


def test_only_what_the_actions_call_is_compiled() -> None:
    made, program = make()
    first, last = (called(program, actions) for actions in made.train)
    assert set(first) == {(s, g) for s in ("embed", "block") for g in ("forward", "backward")}
    assert set(last) == {("block", "forward"), ("block", "backward"), ("head", "backward")}
    assert first[0] == ("block", "backward")  # the largest first
    assert {g for _, g in called(program, made.evaluate[0])} == {"forward"}
    made, program = make("zero-bubble")
    graphs = set(called(program, made.train[0]))
    assert {("block", "backward_input"), ("block", "backward_weight")} <= graphs
    assert ("block", "backward") not in graphs
    assert ("embed", "backward_input") not in graphs  # computes nothing


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
def test_a_compiled_segment_equals_the_uncompiled_one() -> None:
    made, program = make()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(2):
        tokens = torch.randint(0, 61, (4, 17), generator=generator)
        batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample": torch.arange(4) + 4 * i})
    counts = [made.job.module.counts(made.job.config, b) for b in batches]
    config = UpdateConfig(optim.Adamw(), 1.0)
    head = [a for a in chain(*made.train, *made.evaluate) if a.unit == made.job.layers + 1]
    with stand_ins(made.job.mesh, program.groups()):
        compiled = compile_program(program, "on", "cpu", head)
    assert compiled.graphs == 2 and compiled.seconds > 0 and compiled.notice is None
    plain = uncompiled(program)
    assert [k for k in plain if compiled.calls[k] is not plain[k]] == [("head", "forward"), ("head", "backward")]
    a = verify.train(made, batches, counts, config, lambda step: 1e-3, program=program)
    b = verify.train(made, batches, counts, config, lambda step: 1e-3, program=program, calls=compiled.calls)
    assert a.reports != b.reports  # it was compiled code that ran
    for x, y in zip(a.reports, b.reports, strict=True):
        assert (y.loss, y.norm) == pytest.approx((x.loss, x.norm), rel=1e-5)
    for path, g in a.grads[-1].items():
        torch.testing.assert_close(b.grads[-1][path], g, rtol=1e-4, atol=1e-6)

    # Static shapes: another one is an error, not a silent recompilation.
    g = program.segments["head"].graphs["forward"]
    given = [
        torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in g.module.graph.find_nodes(op="placeholder")
    ]
    given[g.inputs.index("x")] = torch.zeros(3, 8, 32)
    with pytest.raises(
        RuntimeError, match=r"head.forward was compiled for x \(2, 8, 32\) torch.float32, not \(3, 8, 32\)"
    ):
        compiled.calls["head", "forward"](*given)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_nothing_is_compiled_after_the_first_step(tmp_path: Path) -> None:
    lay = layouts.loads(
        f"""
model: {{family: llama, layers: 2, embed: 32, heads: 4, mlp: 64, vocab: 256}}
data: {{source: stdlib, seq: 16, batch: 4, microbatch: 2}}
run: {{steps: 9, eval_every: 1, compile: on, folder: {tmp_path}}}
"""
    )
    made = plan.plan(lay)
    source = data.open_source(train.data_config(made))

    def compilations() -> dict[str, int]:
        """Graphs through Inductor, found on disk or not, and whatever Dynamo compiled."""
        counters = torch._dynamo.utils.counters
        return {**counters["inductor"], **counters["aot_autograd"], **counters["frames"], **counters["stats"]}

    before = compilations()
    with metrics.open_log(metrics.LogConfig(tmp_path, 9, 1, False, True)) as log:
        r = train.prepare(made, Rank(0, 1, 0, "cpu", "none"), source, log)
    with torch.no_grad():
        state, held_out = train.initialise(r), train.HeldOut(r)
        seen = []
        for number in range(1, 4):
            step, _ = train.training_step(r, number, state)
            update = make_update(r.program, r.place, state, r.config, 1e-3, lambda: False, lambda report: None)
            interpret.run(r.steps, state.weights, replace(step, update=update))
            held_out.loss(state, number)
            seen.append(compilations())
    assert seen[0] != before  # the count does see what preparing compiled
    assert seen[1:] == [seen[0], seen[0]]


def test_tables_are_computed_once_and_given() -> None:
    _, program = make(mesh="tp: {size: 1}")
    generator = torch.Generator().manual_seed(0)
    for name in ("forward", "backward"):
        g = program.segments["block"].graphs[name].module
        left, tables = compiling._tables(g)
        assert {op_name(n) for n in g.graph.nodes} >= {"cos", "sin"}
        assert not {op_name(n) for n in left.graph.nodes} & {"cos", "sin", "exp", "arange"}
        assert tables and sum(t.numel() for t in tables) <= 4 * 16 * 8  # positions by frequencies, for q and k
        given = [example(n, generator) for n in g.graph.find_nodes(op="placeholder")]
        for x, y in zip(g(*given), left(*given, *tables), strict=True):
            assert torch.equal(x, y)
    same, none = compiling._tables(program.segments["embed"].graphs["forward"].module)
    assert same is program.segments["embed"].graphs["forward"].module and none == []


def test_opened_attention_is_the_opaque_one() -> None:
    _, program = make(mesh="tp: {size: 1}")
    generator = torch.Generator().manual_seed(0)
    for name in ("forward", "backward"):
        g = program.segments["block"].graphs[name].module
        given = [example(n, generator) for n in g.graph.find_nodes(op="placeholder")]
        opened = make_fx(g, decomposition_table=ops.OPAQUE, tracing_mode="fake")(*given)
        assert any(getattr(n.target, "namespace", "") == "dtrain" for n in g.graph.nodes)
        assert not any(getattr(n.target, "namespace", "") == "dtrain" for n in opened.graph.nodes)
        for x, y in zip(g(*given), opened(*given), strict=True):
            assert torch.equal(x, y)


def example(node: torch.fx.Node, generator: torch.Generator) -> Tensor:
    """A value for an input of a graph."""
    value = node.meta["val"]
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.randn(value.shape, generator=generator, dtype=value.dtype)


def test_compile_off_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    made, program = make()
    actions = made.train[0]
    off = compile_program(program, "off", "cpu", actions)
    assert (off.graphs, off.notice, off.calls) == (0, None, uncompiled(program))
    monkeypatch.setattr(compiling, "cpp_compiler", lambda: None)
    auto = compile_program(program, "auto", "cpu", actions)
    assert auto.calls == uncompiled(program)
    assert auto.notice == (
        "run.compile: off, because there is no C++ compiler (g++ or clang++): the same graphs run uncompiled"
    )
    with pytest.raises(CompileError, match=r"no C\+\+ compiler.*run.compile=off"):
        compile_program(program, "on", "cpu", actions)


@pytest.mark.parametrize("turns", [1, 3])
def test_ranks_share_the_work_and_meet_before_they_load(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    made, program = make()
    everything = set(called(program, chain(*made.train)))
    compiled_first: list[tuple[str, str]] = []

    def compile_one(program: Program, name: tuple[str, str], device: str, fuse: bool) -> tuple[list[Tensor], Any]:
        events.append(name)
        return [], (0, 0)

    for turn in range(turns):
        events: list[object] = []
        monkeypatch.setattr(compiling, "_compile", compile_one)
        sharing = Sharing(turn, turns, lambda e=events: e.append("meet"))  # type: ignore[misc]
        compile_program(program, "on", "cpu", made.train[1], chain(*made.train), sharing)
        before, after = events[: events.index("meet")], events[events.index("meet") + 1 :]
        compiled_first += before  # type: ignore[arg-type]
        assert set(after) == set(called(program, made.train[1]))
    assert sorted(compiled_first) == sorted(everything)  # each once


def test_graphs_that_create_tensors_create_them_on_the_device() -> None:
    _, program = make()
    moved = uncompiled(program, "meta")["block", "forward"]
    kwargs = [n.kwargs["device"] for n in moved.graph.nodes if "device" in n.kwargs]  # type: ignore[attr-defined]
    assert kwargs and set(kwargs) == {torch.device("meta")}
    here = program.segments["block"].graphs["forward"].module.graph
    assert {n.kwargs["device"] for n in here.nodes if "device" in n.kwargs} == {torch.device("cpu")}


def test_an_action_that_computes_nothing_calls_no_graph() -> None:
    _, program = make()
    assert called(program, [Action("SEND", 1, 0, 1, "act"), Action("UPDATE", -1)]) == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
def test_random_bits_are_one_node_and_compile_to_the_same_bits() -> None:
    """Opaque in graphs: inlined, each of a hash's rounds would double what Inductor writes out."""
    graph = fx.symbolic_trace(lambda z: [rng.fold(rng.fold(z, 3)[:, None], z)])
    words = torch.randint(-(2**63), 2**63 - 1, (64,), generator=torch.Generator().manual_seed(0))
    words[:3] = torch.tensor([0, -(2**63), 2**63 - 1])
    traced = make_fx(graph, tracing_mode="fake")(words)
    names = [op_name(n) for n in traced.graph.nodes if n.op == "call_function"]
    assert names.count("mix") == 3 and "bitwise_right_shift" not in names

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.dtrain.mix.default  # compiled, not called
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        call = inductor_compile(traced, [words])
        with Seen():
            (got,) = call(words)
    assert torch.equal(got, graph(words)[0])


@pytest.mark.long  # compiles 15 graphs
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
def test_recomputation_and_dropout_under_compile_are_the_uncompiled_run() -> None:
    """GPT-2 with dropout on two shards: every policy, compiled, against no recomputation, uncompiled."""
    batches = []
    for i in range(2):
        tokens = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(i))
        batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample": torch.arange(4) + 4 * i})

    def losses(remat: str, mode: str) -> list[float]:
        made = plan.plan(
            layouts.loads(
                "cluster: {gpus_per_node: 2}\nmesh: {fsdp: {size: 2}}\n"
                "shard: {params: {embed: fsdp}, compute: {batch: fsdp}}\n"
                "model: {family: gpt2, layers: 2, embed: 256, heads: 4, vocab: 61, positions: 16, dropout: 0.1, "
                "attention_dropout: 0.1}\n"
                "data: {source: synthetic, seq: 16, batch: 4, microbatch: 2}\n"
                f"run: {{steps: 2, remat: {remat}}}\n"
            )
        )
        program = lower(made.job)
        with stand_ins(made.job.mesh, program.groups()):
            calls = compile_program(program, mode, "cpu", chain(*made.train)).calls
        counts = [made.job.module.counts(made.job.config, b) for b in batches]
        config = UpdateConfig(optim.Adamw(), 1.0)
        out = verify.train(made, batches, counts, config, lambda step: 1e-2, program=program, calls=calls)
        return [r.loss for r in out.reports]

    want = losses("none", "off")
    assert want[0] != want[1]
    for remat in ("none", "selective", "full"):
        assert losses(remat, "on") == pytest.approx(want, abs=1e-4), remat
