"""A step that is recorded once and replayed on the same memory trains as steps that come one by one do."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtrain import layout as layouts
from dtrain import optim
from dtrain import train as run_loop
from dtrain.mesh import Groups, simulate
from dtrain.plan import rows
from dtrain.program.capture import Record, captured
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, Step, bind, initial_weights, publish, run
from dtrain.program.update import Report, State, UpdateConfig, make_update
from dtrain.rank import Rank

STEPS = 6
CONFIG = UpdateConfig(optim.Adamw(), 0.5)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


class Recorder(TorchDispatchMode):
    """As a CUDA graph: keeps every operation with the memory that it read and wrote, and does them again on that
    memory, without the Python in between. Reading a number on the host is an error, as it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out

    def again(self) -> None:
        flying: dict[int, Tensor] = {}  # of collectives, what this replay started

        def given(x: Any) -> Any:
            return flying.get(id(x), x)

        for func, args, kwargs, out in self.done:
            new = func(*tree_map(given, args), **tree_map(given, kwargs))
            if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
                flying[id(out)] = new
                continue
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


def recorder(work: Callable[[], None]) -> Callable[[], None]:
    with (mode := Recorder()):
        work()
    return mode.again


Told = tuple[list[Report], dict[str, Tensor], dict[str, Tensor]]


def train(family: str, mesh: str, more: tuple[str, ...], record: Record | None, warm: int = 2) -> list[Told]:
    """Some steps on simulated ranks, with other data and another rate each: the reports, the masters and the weights
    at rest. The last step is asked to stop."""
    made, program = tiny.make(family, mesh, more), tiny.program(family, mesh, more)
    calls, job = uncompiled(program), made.job
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (STEPS, 8, 9), generator=generator)

    def work(rank: int, groups: Groups) -> Told:
        place = Place(job.mesh, rank, groups, made.units[0])
        bound = bind(program, calls, place, made.train[0])
        weights = publish(program, calls, place, initial_weights(program, place, 0))
        state = State(weights, optim.init(list(weights.masters.values())), None)
        take = captured(bound, state, CONFIG, record, warm) if record else None
        reports = []
        for number in range(1, STEPS + 1):
            whole = {"tokens": tokens[number - 1, :, :-1], "labels": tokens[number - 1, :, 1:]}
            whole |= {"sample": torch.arange(8) + 8 * number}
            counts = job.module.counts(job.config, whole)

            def local(mb: int, whole: Mapping[str, Tensor] = whole) -> Mapping[str, Tensor]:
                return {k: v[list(rows(made, place.at, mb))] for k, v in whole.items()}

            step, lr, stop = Step(number, 0, local, counts, torch.ones(())), number * 2.0**-9, number == STEPS
            if take is None:
                update = make_update(program, place, state, CONFIG, lr, lambda stop=stop: stop, reports.append)
                run(bound, state.weights, Step(number, 0, local, counts, torch.ones(()), update))
            else:
                reports.append(take(step, lr, stop))
        return reports, state.weights.masters, state.weights.rest

    return simulate(job.mesh, sorted({*program.groups(), *(["world"] if job.mesh.world > 1 else [])}), work)


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("gpt2", "", ("run.precision=fp32", "data.microbatch=4")),  # with dropout, which depends on the step
        ("llama", "", ("run.precision=bf16",)),
        ("llama", "dp2", ("shard.optimizer={embed: dp}", "run.precision=bf16")),  # weights at rest are others each step
        ("llama", "fsdp2", ("run.precision=fp32",)),
    ],
)
def test_replayed_steps_are_bitwise_those_one_by_one(family: str, mesh: str, more: tuple[str, ...]) -> None:
    plain = train(family, mesh, more, None)
    replayed = train(family, mesh, more, recorder)
    for (want, masters, rest), (got, masters_now, rest_now) in zip(plain, replayed, strict=True):
        assert got == want
        assert len({r.loss for r in want}) == STEPS and [r.stop for r in want] == [False] * (STEPS - 1) + [True]
        for now, before in ((masters_now, masters), (rest_now, rest)):
            assert now.keys() == before.keys()
            assert all(torch.equal(now[k], before[k]) for k in before)


def test_it_is_recorded_once_after_the_steps_that_warm_up() -> None:
    seen: list[str] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()
        seen.append("recorded")

        def again() -> None:
            seen.append("replayed")
            work()

        return again

    train("llama", "", (), record, warm=3)
    assert seen == ["recorded", *["replayed"] * (STEPS - 4)]


def test_a_run_with_cuda_graph_writes_what_a_run_without_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[None] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append(None)
        return recorder(work)

    monkeypatch.setattr(run_loop, "captured", functools.partial(captured, record=record))
    wrote = {}
    for graph in (False, True):
        folder = tmp_path / str(graph)
        layout = layouts.loads(
            "cluster: {gpus_per_node: 1, gpu: h100-sxm}\n"
            "model: {family: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: 256}\n"
            "optim: {lr: 0.0009765625, schedule: constant, warmup: 0}\n"  # 2 ** -10: when recorded, a rate is fp32
            "data: {source: synthetic, seq: 16, batch: 4, microbatch: 2, validation: {batches: 1}}\n"
            f"run: {{steps: {STEPS}, eval_every: 2, compile: off, folder: {folder}}}\n",
            "layout.yaml",
            [f"run.cuda_graph={str(graph).lower()}"],
        )
        run_loop.train(layout, Rank(0, 1, 0, "cpu", "gloo"), quiet=True)  # on a CPU, as if it were the GPU
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        wanted = ("step", "loss", "grad_norm", "valid_loss")
        files = json.loads((folder / f"step-{STEPS}" / "manifest.json").read_text())["files"]
        wrote[graph] = [{k: v for k, v in line.items() if k in wanted} for line in lines], files["__0_0.distcp"]
    assert recorded == [None]
    assert wrote[True] == wrote[False]
    assert len({line["valid_loss"] for line in wrote[True][0] if "valid_loss" in line}) == 1 + STEPS // 2
