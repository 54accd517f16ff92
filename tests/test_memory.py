"""What a plan says a rank holds is what a rank holds: by kind after every action, and at the peak.

A rank runs alone, among groups whose other members never answer: it allocates what it would among real ones.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import optim, verify
from dtrain.mesh import SimulatedGroup, _Meeting, group_size, pipeline_groups
from dtrain.plan import Plan
from dtrain.plan.footprint import held
from dtrain.plan.liveness import flow
from dtrain.plan.memory import memory
from dtrain.program import interpret
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, Step, bind, initial_weights, publish, run
from dtrain.program.lower import Graph, Program, lower
from dtrain.program.schedule import Action
from dtrain.program.update import State, UpdateConfig, make_update
from dtrain.torch_private import register_group, unregister_group

GRAPH = "run.cuda_graph=true"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# ----------------------------------------------------------------------------------------- one rank by itself


class Going(dist.Work):
    """As on a device, what a collective reads is held until it has been waited for."""

    on: ClassVar[weakref.WeakSet[Going]] = weakref.WeakSet()

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.on.add(self)

    def wait(self, timeout: Any = None) -> bool:
        self.given = []
        return True


class Silent(SimulatedGroup):
    """One end of a group whose other members never answer: everything that comes is zero."""

    def _start(self, outs: list[Tensor], ins: list[Tensor], combine: Any, scatter: bool = False) -> dist.Work:
        for out in outs:
            out.zero_()
        return Going(ins)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        return Going(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        return Going([tensors[0].zero_()])


@contextmanager
def alone(made: Plan, program: Program) -> Iterator[Mapping[str, Any]]:
    mesh = made.job.mesh
    names = {*program.groups(), *pipeline_groups(mesh), *(["world"] if mesh.world > 1 else [])}
    groups = {n: Silent(0, _Meeting(n, range(group_size(mesh, n)), threading.Event()), {}) for n in names}
    for name, group in groups.items():
        register_group(name, group)
    try:
        yield groups
    finally:
        for name in groups:
            unregister_group(name)


def step_of(
    made: Plan,
    program: Program,
    pp: int,
    calls: Any = None,
    watch: Callable[[int, Action, State], None] | None = None,
    around: Callable[[State, Callable[[], None]], None] = lambda state, go: go(),
) -> None:
    """One training step of a rank at a pipeline coordinate; `around(state, go)` calls `go()`, which runs it."""
    mesh = made.job.mesh
    calls = calls or uncompiled(program)
    with alone(made, program) as groups, torch.no_grad():
        place = Place(mesh, mesh.rank({"pp": pp}), groups, made.units[pp])
        weights = publish(program, calls, place, initial_weights(program, place, 0))
        state = State(weights, optim.init(list(weights.masters.values())), None)
        size = made.job.batch
        batch = verify.random_batch(made, 0, 1)
        counts = made.job.module.counts(made.job.config, batch)
        mine = {k: v[: made.microbatches * size].clone() for k, v in batch.items()}
        del batch
        update = make_update(
            program, place, state, UpdateConfig(optim.Adamw(), 1.0), 0.01, lambda: False, lambda r: None
        )
        see = watch and (lambda position, action: watch(position, action, state))
        rows = lambda mb: {k: v[mb * size : (mb + 1) * size] for k, v in mine.items()}  # noqa: E731
        step = Step(1, 0, rows, counts, torch.ones(()), update, see)
        bound = bind(program, calls, place, made.train[pp])
        around(state, lambda: run(bound, state.weights, step) and None)


def seen(slots: Any, state: State) -> dict[str, int]:
    """What a rank holds, by kind."""
    found: dict[str, int] = tiny.bench("trust").holds(slots, state, [x for g in Going.on for x in g.given])
    return found


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    right = interpret._Slots

    def make(*args: Any) -> Any:
        found[:] = [right(*args)]
        return found[0]

    monkeypatch.setattr(interpret, "_Slots", make)
    return found


FSDP = "shard.grads={embed: fsdp}"
ZERO1 = "shard.optimizer={embed: dp}"
ZERO2 = (ZERO1, "shard.grads={embed: dp}")
BF16 = "run.precision=bf16"
LAYOUTS = {
    "one process, tied": ("gpt2", "", ("data.batch=3", "run.remat=none", "model.tied=true")),
    "zero-2, odd sizes": ("llama", "dp3", (*ZERO2, "data.batch=6", BF16)),
    "zero-3, keep use": ("llama", "fsdp2", (FSDP, "unshard.keep=use", "data.batch=6", BF16)),
    "hsdp x tp": ("llama", "dp2 fsdp2 tp2", (FSDP, "data.batch=8", "run.remat=full")),
    "1f1b x tp": ("llama", "pp2 tp2", ("data.batch=6", "pipeline.schedule=1f1b")),
    "interleaved, tied": (
        "gpt2",
        "pp2 dp2",
        ("model.layers=4", "pipeline={schedule: interleaved, chunks: 2}", ZERO1, "data.batch=8", BF16),
    ),
    "zero-bubble x fsdp": (
        "llama",
        "pp2 fsdp2",
        (FSDP, "pipeline.schedule=zero-bubble", "data.batch=12", "unshard.keep=use", BF16),
    ),
}
MORE = {
    "dp, loss in chunks": ("llama", "dp2", (BF16, "data.batch=4", "kernels.loss_chunks=2")),
    "zero-1": ("bert", "dp2", (ZERO1, BF16, "data.batch=4")),
    "zero-3, keep forward": ("gpt2", "fsdp2", ("unshard.keep=forward", "data.batch=6", "run.remat=full")),
    "zero-3, keep step, tied": ("gpt2", "fsdp2", ("unshard.keep=step", FSDP, "data.batch=6", BF16)),
    "tp, scores kept": ("bert", "tp2", ("data.batch=2", "run.remat=none", BF16, "kernels.attention=math")),
    "tp, whole sequences": ("gpt2", "tp2", ("data.batch=2", "shard.compute.res_seq=[]", "run.remat=[matmul]")),
    "zbv": ("gpt2", "pp2", ("model.layers=4", "pipeline.schedule=zbv", "data.batch=5", "run.remat=none")),
    "gpipe": ("my_model", "pp2", ("pipeline.schedule=gpipe", "data.batch=4", BF16)),
    "a budget": ("llama", "fsdp2", ("run.remat={budget: 30KiB}", "data.batch=4")),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_what_is_held_and_the_peak(name: str, slots: list[Any]) -> None:
    """Parameters, gradients with what is packed, optimizer, saved values, gathered parameters and what is between
    segments: after every action exactly the bytes that the plan says. And the most that torch had allocated is what the
    plan says, up to what kernels allocate themselves and 0-dim tensors."""
    key = (LAYOUTS | MORE)[name]
    made, program = tiny.make(*key), tiny.program(*key)
    for pp, actions in enumerate(made.train):
        said = list(held(made, program, pp))
        batch = said[-1].after["carried"]
        wrong: list[str] = []
        slots.clear()

        def watch(position: int, action: Action, state: State, said: Any = said, batch: int = batch) -> None:
            if position and not wrong:  # noqa: B023
                got = seen(slots[0], state)
                want = {k: sum(said[position - 1].after[word] for word in k.split(", ")) for k in got}
                want["carried"] -= batch
                if got != want:
                    wrong.append(f"before {position} {action}: {got}, not {want}")  # noqa: B023

        got = measured_peak(made, program, pp, watch=watch)
        assert not wrong
        peak = memory(made, program, pp).peak
        assert peak == max(moment.most for moment in said)
        bucket = max(
            sum(math.prod(p.local) for p in s.stored.values()) * program.job.master.itemsize
            for s in program.segments.values()
        )
        assert 0.95 * peak <= got <= peak + bucket, f"pp {pp}: {got} of {peak}, {len(actions)} actions"


def measured_peak(
    made: Plan,
    program: Program,
    pp: int,
    calls: Any = None,
    watch: Callable[[int, Action, State], None] | None = None,
) -> int:
    """The most bytes that a rank had allocated during a step: what it held before, and torch's own count since."""
    found: list[int] = []

    def around(state: State, go: Callable[[], None]) -> None:
        at_rest = tiny.bench("trust").storages(
            state.weights.rest.values(), state.weights.masters.values(), state.moments.exp_avg, state.moments.exp_avg_sq
        )
        # oneDNN's products in bf16 have scratch memory, which is a CPU's own affair.
        before = torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
        try:
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
                go()
        finally:
            torch.backends.mkldnn.set_flags(before[0])  # type: ignore[no-untyped-call]
        now = most = sum(at_rest.values())
        for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        found.append(most)

    step_of(made, program, pp, calls, watch, around)
    # The batch is read before a rank's first action.
    return found[0] + list(held(made, program, pp))[-1].after["carried"]


# ------------------------------------------------------------------------------------------------ counted by hand

S, E = 8, 16  # of a tiny model: positions of a sequence, width


def per_layer(made: Plan, program: Program) -> int:
    """Bytes that a layer keeps of a microbatch: what the second layer's first forward adds."""
    said, actions = list(held(made, program, 0)), made.train[0]
    first, second = (actions.index(Action("F", unit, 0)) for unit in (1, 2))
    return said[second].after["saved"] - said[first].after["saved"]


@pytest.mark.parametrize("mesh", ["", "tp2", "tp2 whole"])
def test_a_layer_beside_the_paper(mesh: str) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), bytes of a GPT layer and microbatch, 2 an element: without its
    attention core 34 s b h; s b h (10 + 24/t) under tensor parallelism, s b h 34/t with sequence parallelism too;
    2 s b h (over t) where all is computed again.

    Of the 34 not kept here, as they are computed again from the rest: the outputs of the two norms (2 + 2), that of the
    activation (8), two dropout masks (1 + 1). Beyond it: the attention kernel's log-sum-exp, 4 bytes a head and token.
    The second norm's input is kept as the product before it.
    """
    t, whole = (2 if mesh else 1), mesh.endswith("whole")
    more = (BF16, "data.batch=2", *(["shard.compute.res_seq=[]"] if whole else []))
    s, H = S, 4
    for remat in ("selective", "full"):
        key = ("gpt2", mesh.partition(" ")[0], (*more, f"run.remat={remat}"))
        made = tiny.make(*key)
        assert (made.job.seq, made.job.config.embed, made.job.config.heads, made.job.batch) == (s, E, H, 1)
        got = per_layer(made, tiny.program(*key))
        if remat == "full":
            assert got == 2 * s * E / (1 if whole else t)
            continue
        paper = s * E * (10 + 24 / t) if whole else 34 * s * E / t
        # Tensor parallelism alone leaves the norms' outputs and the masks whole.
        less = s * E * (2 + 2 + 1 + 1) / (1 if whole else t) + s * E * 8 / t
        assert got == paper - less + 4 * s * H / t


def test_a_product_of_known_size(tmp_path: Path) -> None:
    """A model with more in a layer, tanh(h W) with W (embed, 48), brought back by a second product, (48, embed): it has
    two weights, their gradients and moments, and keeps the first product's result for backward. No other byte moves."""
    text = (tiny.LAYOUTS / "my_model.py").read_text()
    more = text.replace(
        'return {**tree, "block": {',
        'extra = {"w_in": Param((cfg.embed, 48), ("embed", "classes"), Init("normal", 0.02)), '
        '"w_out": Param((48, cfg.embed), ("classes", "embed"), Init("normal", 0.02))}\n'
        '    return {**tree, "block": extra | {',
    ).replace("    return x +", '    m = m + (h @ w["w_in"]).tanh() @ w["w_out"]\n    return x +')
    more = more.replace("from dtrain import ops\n", "from dtrain import ops\nfrom dtrain.axes import Init, Param\n")
    found = []
    for name, code in (("plain", text), ("wider", more)):
        (tmp_path / f"{name}.py").write_text(code)
        made = tiny.make("my_model", "pp2", (f"model.file={tmp_path / name}.py", "run.precision=fp32", "data.batch=6"))
        program = lower(made.job)
        found.append([list(held(made, program, pp)) for pp in range(2)])
    for pp, (plain, wider) in enumerate(zip(*found, strict=True)):
        weights = 4 * 2 * E * 48  # of the one layer here
        kept = 4 * S * 48  # of a microbatch
        for action, a, b in zip(made.train[pp], plain, wider, strict=True):
            moved = {k: b.after[k] - a.after[k] for k in a.after}
            assert moved["parameters"] == weights and moved["optimizer"] == 2 * weights, str(action)
            assert moved["gradients"] in (0, weights) and moved["gathered"] == moved["carried"] == 0
            assert moved["saved"] in (0, kept, 2 * kept) and moved["buffers"] == 0
        most = max(b.after["saved"] - a.after["saved"] for a, b in zip(plain, wider, strict=True))
        assert most == kept * (2 - pp)  # 1f1b: two microbatches in flight on the first coordinate, one on the last


def test_another_schedule() -> None:
    """Layers in flight times what one keeps: 1f1b has as many microbatches as coordinates, gpipe all of them."""
    for schedule, flying in (("1f1b", 2), ("gpipe", 6)):
        key = ("llama", "pp2", ("data.batch=6", f"pipeline.schedule={schedule}"))
        made, program = tiny.make(*key), tiny.program(*key)
        said, actions = list(held(made, program, 0)), made.train[0]
        first = actions.index(Action("F", 1, 0))
        layer = said[first].after["saved"]
        assert layer and max(m.after["saved"] for m in said) == flying * layer


def test_a_replayed_step() -> None:
    """A CUDA graph reads a copy of the batch (4 rows of 8 tokens, labels and a number), and makes new weights at rest
    before they are copied over the old ones."""
    more = ("cluster.gpu=h100-sxm", "run.precision=bf16", "shard.optimizer={embed: dp}")
    made, program = tiny.make("llama", "dp2", more), tiny.program("llama", "dp2", more)
    plain, replayed = (list(held(tiny.make("llama", "dp2", key), program, 0)) for key in (more, (*more, GRAPH)))
    batch, rest = 4 * (8 + 8 + 1) * 8, plain[-1].after["parameters"]
    assert made.train[0][-1].kind == "UPDATE" and rest
    for a, b in zip(plain[:-1], replayed[:-1], strict=True):
        assert b.most - a.most == b.after["carried"] - a.after["carried"] == batch
    assert sum(replayed[-1].after.values()) == sum(plain[-1].after.values()) + batch
    assert replayed[-1].most >= sum(replayed[-1].after.values()) + rest


# --------------------------------------------------------------------------------------------------------- a graph


def graph_of(fn: Callable[..., list[Tensor]], *shapes: tuple[int, ...]) -> Graph:
    given = [torch.empty(shape) for shape in shapes]
    module = make_fx(fn, tracing_mode="fake")(*given)
    return Graph(module, tuple(f"in:{i}" for i in range(len(given))), ())


N = 4 * 64  # bytes of an 8 x 8 tensor


def test_values_live_from_their_making_to_their_last_reader() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        a = x.sin()
        b = a.cos()
        c = b.view(64).view(8, 8) @ b  # views take nothing
        return [c.t(), x, c]

    every = flow(graph_of(fn, (8, 8)), fused=False)
    assert (every.peak, every.sizes, every.results) == (2 * N, (N,), (0, "in:0", 0))


def test_fused_values_take_no_memory_and_their_sources_live_on() -> None:
    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        a = x @ w
        b = a.sin().cos()  # fused into what reads them
        c = x @ x
        return [b + c, (b * c) @ w]

    g = graph_of(fn, (8, 8), (8, 8))
    # a, c and b + c; then b * c in the place of a; then b + c, b * c and the last product.
    assert flow(g, fused=True).peak == 3 * N
    assert flow(g, fused=False).peak == 4 * N  # b, c, b + c, b * c: a is gone
    one = graph_of(lambda x, w: [((x @ w).sin() @ w)], (8, 8), (8, 8))
    assert (flow(one, fused=True).peak, flow(one, fused=False).peak) == (2 * N, 2 * N)
    two = graph_of(lambda x, w: [(x @ w).sin().cos().exp()], (8, 8), (8, 8))
    assert (flow(two, fused=True).peak, flow(two, fused=False).peak) == (N, 2 * N)  # written over the product


def test_chunks_of_a_loss_are_there_one_at_a_time() -> None:
    """8 tokens, 4,096 words, 16 wide, fp32. In four chunks the gradient of the table is there twice, while a product
    adds to it, not four times, and beside it at most three tensors of scores of 2 tokens; in one, of all 8."""
    table, score = 4 * 4096 * E, 4 * 4096
    peak = {}
    for chunks in (1, 4):
        more = ("model.vocab=4096", f"kernels.loss_chunks={chunks}", "run.precision=fp32")
        g = tiny.segment("llama", "head", "", more).graphs["backward"]
        peak[chunks] = [flow(g, fused=mode).peak for mode in (False, True)]
    assert peak[1][0] >= 3 * 8 * score
    assert all(2 * table < p <= 2 * table + 3 * 2 * score for p in peak[4])
