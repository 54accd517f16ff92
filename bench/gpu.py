"""Speed and memory on one GPU, written for an H200 with torch 2.11: `python bench/gpu.py`.

Trains Llama-3.2-shaped models in bf16 and compares with two peers, then times pieces of larger models: the shard of a
70B block under tp 8 without its collectives, head counts, vocabulary padding, attention kernels; what GPUs idle between
kernels, with steps launched kernel by kernel and replayed as one CUDA graph; and the operations of async tensor
parallelism, alone (their gain takes several GPUs, and is not measured here). Each case runs in a
process of its own, so that its peak memory is its own and one that runs out of memory ends alone. The cases come in
order of importance and share a time budget; one that no longer fits is skipped, and that is said. `--only 3b,heads`
takes those whose name begins so. `--json` prints one object on stdout and the table on stderr.

MFU: model FLOPs as in `dtrain/metrics.py`, no recomputation counted, over the GPU's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import data, hardware, layout, metrics, ops, plan, train
from dtrain.layout import Layout
from dtrain.mesh import join
from dtrain.plan import Plan, predict
from dtrain.plan.measured import tensors
from dtrain.program import capture
from dtrain.program.async_tp import fuse
from dtrain.program.capture import Record, captured, cuda_graph
from dtrain.program.compile import Compiled, compile_program
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import Program, lower
from dtrain.program.passes import Cut
from dtrain.rank import Rank
from dtrain.torch_private import enable_symmetric_memory, join_fake_world, register_group

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
import trainer  # noqa: E402
from peers import hf_compile, titan_style  # noqa: E402

Result = dict[str, Any]
MINUTES = 7.5  # with starting and ending, within 8
MFU_GATE, GATE_CASE = 0.55, "3b-8192"
WARM_STEPS, MOST_STEPS, TIMED_S = 2, 12, 12.0
MICROBATCHES = 4
TP = "vocab: tp, heads: tp, mlp: tp"


@dataclass(frozen=True)
class Setting:
    """What is the same for all cases. `tiny` sizes are for a test on a CPU; `steps` timed ones at most."""

    device: str = "cuda:0"
    tiny: bool = False
    compile: str = "on"
    remat: str = "selective"
    steps: int = MOST_STEPS

    @property
    def gpu(self) -> str:
        """The GPU's name in the catalog."""
        if self.device == "cpu":
            return "cpu"
        name = torch.cuda.get_device_name(self.device).lower()
        known = [g for g in ("h200", "h100", "gb200", "b200", "a100", "v100") if g in name]
        return {"h100": "h100-sxm", "a100": "a100-80"}.get(known[0], known[0]) if known else "cpu"

    @property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s."""
        return hardware.gpu(self.gpu).peak.get("bf16")


@dataclass(frozen=True)
class Case:
    """`needs` is how long it takes at most on an H200 with nothing compiled before, in seconds: an estimate."""

    name: str
    needs: float
    work: Callable[[Setting], Result]


# ------------------------------------------------------------------------------------------- whole training steps


def layout_of(s: Setting, model: str, seq: int, *, batch: int = 1, tp: int = 1) -> Layout:
    """A layout as `dtrain run` would read it; `model` is the text of its section."""
    gpu, folder = s.gpu, tempfile.gettempdir()
    link = "nvlink" if gpu != "cpu" else "loopback"
    rules = f"{TP}, kv_heads: tp" if "llama" in model else TP
    return layout.loads(f"""
cluster: {{gpus_per_node: {tp}, gpu: {gpu}}}
mesh: {f"{{tp: {{size: {tp}, link: {link}}}}}" if tp > 1 else "{}"}
shard: {f"{{params: {{{rules}}}, compute: {{{rules}, res_seq: tp}}}}" if tp > 1 else "{}"}
model: {{{model}}}
optim: {{lr: 3e-4, schedule: constant}}
data: {{source: synthetic, seq: {seq}, batch: {batch}, microbatch: 1}}
run: {{steps: 1000000, precision: bf16, remat: {s.remat}, compile: {s.compile}, folder: {folder}}}
""")


def llama(s: Setting, preset: str, seq: int) -> Layout:
    tiny = ", layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 96, vocab: 256" if s.tiny else ""
    return layout_of(s, f"preset: {preset}{tiny}", seq // 128 if s.tiny else seq, batch=MICROBATCHES)


def dtrain_start(made: Plan, device: str, graph: bool = False) -> tuple[Callable[[int], float], Program, Result]:
    """The function that makes one step, as `dtrain/train.py` does; the program, and what it took to get there. With
    `graph` steps are replayed as one CUDA graph (`run.cuda_graph`)."""
    began = time.perf_counter()
    r, state = trainer.begin(made, Rank(0, 1, 0, device, "none"))
    seconds = time.perf_counter() - began
    take = train.taking(r, state, r.rank.stopping)
    if graph:
        replay = captured(r.steps, state, r.config, recorder(device))
        take = lambda step, lr: replay(step, lr, False)  # noqa: E731
    return trainer.stepping(r, state, take), r.program, {"prepare_s": seconds}


def recorder(device: str) -> Record:
    """What records a step; on a CPU a replay is the work once more."""

    def once_more(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    return once_more if device == "cpu" else cuda_graph


def peer_start(peer: Any, made: Plan, s: Setting, weights: Mapping[str, Tensor] | None) -> Callable[[int], float]:
    source = data.open_source(train.data_config(made))
    rows = range(made.layout.data.batch)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        read = data.batch(source, number - 1, rows)
        return read["tokens"].to(s.device), read["labels"].to(s.device)

    dtype, compiled = made.job.dtype, s.compile == "on"
    step: Callable[[int], float] = peer.start(
        made.job.config, weights, batch, made.microbatches, s.device, dtype, compiled
    )
    return step


def training(preset: str, seq: int, who: str) -> Callable[[Setting], Result]:
    """A case: steps of one model by dtrain or by a peer."""

    def work(s: Setting) -> Result:
        made = plan.plan(llama(s, preset, seq))
        out: Result = {}
        if who == "dtrain":
            step, program, out = dtrain_start(made, s.device)
            said = predict.read(made, program)
            out |= {"predicted_bytes": tensors(said), "predicted_s": said.step_seconds if said.timed else None}
        else:
            step = peer_start({"titan": titan_style, "hf": hf_compile}[who], made, s, None)
        if s.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for number in range(1, WARM_STEPS + 1):
            out["loss"] = step(number)
        synchronize(s.device)
        out["warm_s"] = time.perf_counter() - began
        times: list[float] = []
        while len(times) < s.steps and (len(times) < 3 or sum(times) < TIMED_S):
            began = time.perf_counter()
            step(WARM_STEPS + 1 + len(times))
            synchronize(s.device)
            times.append(time.perf_counter() - began)
        d = made.layout.data
        rate = metrics.tokens_per_s(d.batch, d.seq, statistics.median(times))
        out |= {
            "step_s": statistics.median(times),
            "spread": [min(times), max(times)],
            "tokens_per_s": rate,
            "mfu": metrics.mfu(rate, train.flops_per_token(made), 1, s.peak),
            "peak_bytes": metrics.peak_memory(torch.device(s.device)),
        }
        return out

    return work


def launch_gaps(s: Setting) -> Result:
    """The 1B model's step, kernel by kernel and as one CUDA graph: how long it takes, how long the GPU idles between
    its kernels within a step, and the loss, which differs by no more than the rate's rounding to fp32 does."""
    out: Result = {}
    for name in ("launched", "graph"):
        step, _, _ = dtrain_start(plan.plan(llama(s, "llama3.2-1b", 4096)), s.device, name == "graph")
        if s.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        first = capture.WARM_STEPS + 2  # of those that are replayed, the second
        losses = [step(number) for number in range(1, first + s.steps)]
        times = []
        for number in range(first + s.steps, first + 2 * s.steps):
            synchronize(s.device)
            began = time.perf_counter()
            losses.append(step(number))
            times.append(time.perf_counter() - began)
        spans = device_spans(lambda: step(first + 2 * s.steps), s.device)  # noqa: B023
        busy, idle = busy_and_idle(spans)
        peak = metrics.peak_memory(torch.device(s.device))
        out[name] = {
            "step_s": statistics.median(times),
            "kernels": len(spans),
            "busy_s": busy,
            "idle_s": idle,
            "idle_share": idle / (busy + idle),
            "peak_bytes": peak,
            "loss": losses[-1],
            "losses": losses,
        }
    pairs = zip(out["launched"].pop("losses"), out["graph"].pop("losses"), strict=True)
    off = max(abs(a / b - 1) for a, b in pairs)
    return {**out, "losses_differ_by": off, "speedup": out["launched"]["step_s"] / out["graph"]["step_s"]}


def device_spans(work: Callable[[], Any], device: str) -> list[tuple[float, float]]:
    """When each kernel and copy ran, in seconds; on a CPU torch's operations stand for them."""
    kind = torch.autograd.DeviceType.CPU if device == "cpu" else torch.autograd.DeviceType.CUDA
    with torch.profiler.profile(acc_events=True) as profiler:  # 2.11 warns without
        work()
        synchronize(device)
    events = (e for e in profiler.events() if e.device_type == kind and not e.is_user_annotation)
    return [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events]


def busy_and_idle(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Seconds in which at least one span runs, and seconds between the first and the last in which none does."""
    busy, until, first = 0.0, -math.inf, None
    for start, end in sorted(spans):
        first = start if first is None else first
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return (0.0, 0.0) if first is None else (busy, until - first - busy)


def async_tp(s: Setting) -> Result:
    """What async tensor parallelism does to the blocks of the 70B model under tp 8, and its two operations on a GPU, as
    a group of one rank: their error against product and collective, and the time of each. In a group of one nothing
    travels, so this says that they run here and what they cost besides."""
    tiny = ", layers: 2, embed: 128, heads: 16, kv_heads: 8, mlp: 128, vocab: 1024" if s.tiny else ", layers: 2"
    program = lower(plan.plan(layout_of(s, f"preset: llama3-70b{tiny}", 64 if s.tiny else 4096, tp=8)).job)
    out: Result = {}
    for graph in ("forward", "backward"):
        g = program.segments["block"].graphs[graph]
        after = fuse(Cut(g.module, g.inputs, g.outputs))
        out[graph] = {"fused": after.fused, "of": after.of}
    if s.device == "cpu":
        return out | {"operations": {"left_out": "symmetric memory needs CUDA"}}
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device(s.device))
    try:
        register_group("tp", dist.new_group([0]))
        enable_symmetric_memory("tp")
        generator = torch.Generator(s.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=s.device).bfloat16()

        x, w = random(1, 4096, 8192), random(8192, 8192 // 8)
        ops = torch.ops.symm_mem
        gather = lambda: ops.fused_all_gather_matmul(x, [w], 1, "tp", return_A=False)[1][0]  # noqa: E731
        scatter = lambda: ops.fused_matmul_reduce_scatter(x, w, "sum", 1, "tp")  # noqa: E731
        for name, call in (("gather_product", gather), ("product_scatter", scatter), ("product", lambda: x @ w)):
            error = float((call().float() - (x @ w).float()).abs().max() / (x @ w).abs().max())
            out[name] = {"error": error, "ms": milliseconds(call, s)}
    finally:
        dist.destroy_process_group()
    return out


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------ single graphs


@contextmanager
def alone(program: Program) -> Iterator[None]:
    """Groups whose collectives do nothing: what one rank computes, timed without the others."""
    mesh = program.job.mesh
    if mesh.world == 1:
        yield
        return
    join_fake_world(mesh.world)
    join(mesh, program.groups(), 0, "fake", 60.0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def time_segment(s: Setting, lay: Layout, segment: str) -> Result:
    """Forward and backward of one segment on rank 0: milliseconds, and the share of the GPU's peak."""
    made = plan.plan(lay)
    program = lower(made.job)
    wanted = [a for a in made.train[0] if unit_segment(max(a.unit, 0), made.job.layers)[0] == segment]
    if s.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad(), alone(program):
        compiled = compile_program(program, s.compile, s.device, wanted)
        calls = graphs_of(program, compiled, segment, s.device)
        times = {f"{name}_ms": milliseconds(call, s) for name, call in calls.items()}
    seg, job = program.segments[segment], made.job
    weights = sum(math.prod(seg.stored[n].local) for n in seg.stored)
    heads = job.config.heads // job.mesh.size("tp") if segment == "block" else 0
    flops = metrics.flops_per_token(weights, 1, heads, job.config.head_dim, job.seq) * job.batch * job.seq
    total = sum(times.values())
    return {
        **times,
        "pass_ms": total,
        "tflops_per_s": flops / total / 1e9,
        "of_peak": None if s.peak is None else flops / (total / 1e3) / s.peak,
        "saved_bytes": seg.saved_bytes,
        "compile_s": compiled.seconds,
        "peak_bytes": metrics.peak_memory(torch.device(s.device)),
    }


def graphs_of(program: Program, compiled: Compiled, segment: str, device: str) -> dict[str, Callable[[], Any]]:
    """Calls of a segment's forward and backward with arguments of the right shapes; the head's backward is both."""
    graphs = program.segments[segment].graphs
    generator = torch.Generator(device).manual_seed(0)

    def inputs(name: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for key, node in zip(graphs[name].inputs, graphs[name].module.graph.find_nodes(op="placeholder"), strict=True):
            v = node.meta["val"]
            if key in given:
                out[key] = given[key]
            elif v.dtype.is_floating_point:
                x = torch.randn(v.shape, generator=generator, device=device, dtype=torch.float32)
                x = x.abs() + 1 if key.startswith("count:") else x * 0.02
                out[key] = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device).copy_(x)
            else:
                out[key] = torch.ones(v.shape, dtype=v.dtype, device=device)
        return out

    def call(name: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(graphs[name].outputs, compiled.calls[segment, name](*given.values()), strict=True))

    if segment == "head":
        only = inputs("backward", {})
        return {"backward": lambda: call("backward", only)}
    first = inputs("forward", {})
    second = inputs("backward", first | call("forward", first))
    return {"forward": lambda: call("forward", first), "backward": lambda: call("backward", second)}


def milliseconds(call: Callable[[], Any], s: Setting, repeat: int = 20) -> float:
    """The median time of a call; several calls are in flight, as in a run."""
    repeat = 2 if s.device == "cpu" else repeat
    for _ in range(2):
        call()
    if s.device == "cpu":
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def shard_70b(s: Setting) -> Result:
    """One rank's part of Llama-3 70B under tp 8 with sequence parallelism: to hold `dtrain plan` to."""
    tiny = ", layers: 2, embed: 128, heads: 16, kv_heads: 8, mlp: 128, vocab: 1024" if s.tiny else ", layers: 2"
    lay = layout_of(s, f"preset: llama3-70b{tiny}", 64 if s.tiny else 4096, tp=8)
    return {segment: time_segment(s, lay, segment) for segment in ("block", "head")}


def whole_blocks(s: Setting) -> Result:
    """Uncut blocks of 8B and 70B."""
    tiny = ", layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 96, vocab: 256" if s.tiny else ", layers: 2"
    seq = 64 if s.tiny else 8192
    return {p: time_segment(s, layout_of(s, f"preset: {p}{tiny}", seq), "block") for p in ("llama3-8b", "llama3-70b")}


def head_counts(s: Setting) -> Result:
    """A layer of the 8.3B GPT-2 of Shoeybi et al. 2019 (table 7) under tp 8 with 16, 24 and 32 heads: the more
    heads, the smaller their matrices. Without dropout, to see the multiplications."""
    width, seq = (192, 32) if s.tiny else (3072, 1024)
    out = {}
    for heads in (16, 24, 32):
        model = f"preset: gpt2-8.3b, layers: 2, embed: {width}, heads: {heads}, dropout: 0.0, attention_dropout: 0.0"
        lay = layout_of(s, model + (", vocab: 1024" if s.tiny else ""), seq, tp=8)
        out[str(heads)] = time_segment(s, lay, "block")
        out[str(heads)]["head_dim"] = width // heads
    for r in out.values():
        r["of_16_heads"] = r["pass_ms"] / out["16"]["pass_ms"]
    return out


def vocabulary_padding(s: Setting) -> Result:
    """GPT-2's head on 50,257 classes as they are and padded to 51,200 as by Shoeybi et al. 2019."""
    small = ", layers: 2, embed: 64, heads: 4" if s.tiny else ", layers: 2, embed: 3072, heads: 24"
    out = {}
    for classes in (50257, 51200):
        model = f"preset: gpt2, vocab_pad: {classes}{small}, positions: 8192"
        out[str(classes)] = time_segment(s, layout_of(s, model, 16 if s.tiny else 8192), "head")
    out["padded_over_unpadded"] = out["51200"]["pass_ms"] / out["50257"]["pass_ms"]
    return out


def attention_kernels(s: Setting) -> Result:
    """Every attention kernel at the 3B model's shape: its error against `math` in fp32 (relative to the largest value,
    of the result and three gradients) on a short sequence, and the time on a long one. `documents`: the same of those
    with masks, for 16 documents a sequence where 64 may be."""
    out: Result = {"auto_is": "cpu", "flash_attention_3": False}
    kernels = ["flash", "math"]
    heads, kv_heads, head_dim = 24, 8, 16 if s.tiny else 128
    if s.device != "cpu":
        out["auto_is"] = ops.kernel_for("auto", "cuda", torch.bfloat16, head_dim, False)
        out["flash_attention_3"] = ops.flash_attention_3(torch.cuda.get_device_capability())
        kernels = ["flash", "cudnn", "efficient", "math"]
    generator = torch.Generator(s.device).manual_seed(0)

    def tensors(seq: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = [(1, seq, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
        made = [torch.randn(shape, generator=generator, device=s.device).to(dtype) for shape in shapes]
        return [t.requires_grad_() for t in made[:3]] + made[3:]

    def both(kernel: str, documents: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        start = None
        if documents > 1:
            at, each = torch.arange(q.shape[1], device=s.device), q.shape[1] // documents
            start = (at - at % each)[None]
        y = ops.attention(q, k, v, causal=True, kernel=kernel, start_BS=start, documents=4 * documents)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), g)]

    def measured(kernel: str, documents: int) -> Result:
        try:
            got = both(kernel, documents, *short)
            exact = both("math", documents, *(t.detach().float().requires_grad_() for t in short[:3]), short[3].float())
            errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)]
            if kernel == "math" and not s.tiny:
                return {"error": max(errors)}  # its scores would be whole: 24 x 8192 x 8192
            seq = 64 if s.tiny else 8192
            long = tensors(seq, torch.bfloat16)
            ms = milliseconds(lambda: both(kernel, documents, *long), s)
            flops = 12 * heads * head_dim * seq * seq * 0.5 / documents
            return {"error": max(errors), "ms": ms, "tflops_per_s": flops / ms / 1e9}
        except (RuntimeError, ops.OpError) as error:  # one kernel's failure is a finding, not the end
            return {"failed": " ".join(str(error).split())[:300]}

    short = tensors(64 if s.tiny else 512, torch.bfloat16)
    out |= {kernel: measured(kernel, 1) for kernel in kernels}
    return out | {"documents": {kernel: measured(kernel, 16) for kernel in kernels if kernel != "cudnn"}}


# ------------------------------------------------------------------------------------------------------ the cases


def trainings(preset: str, seq: int, name: str) -> list[Case]:
    needs = {"dtrain": 70.0, "titan": 60.0, "hf": 110.0}
    return [Case(f"{name}-{seq}:{who}", t, training(preset, seq, who)) for who, t in needs.items()]


def cases() -> list[Case]:
    """All of them, the most important first."""
    return [
        Case("attention", 25.0, attention_kernels),
        *trainings("llama3.2-3b", 8192, "3b"),
        Case("launch-gaps", 45.0, launch_gaps),
        Case("70b-tp8", 45.0, shard_70b),
        Case("async-tp", 25.0, async_tp),
        *trainings("llama3.2-1b", 4096, "1b"),
        Case("vocab", 40.0, vocabulary_padding),
        Case("heads", 50.0, head_counts),
        Case("blocks", 50.0, whole_blocks),
        *trainings("llama3.2-1b", 8192, "1b"),
        *trainings("llama3.2-3b", 4096, "3b"),
    ]


def perform(case: Case, s: Setting) -> Result:
    """One case in this process; running out of memory, or a fault of the case, is its result."""
    try:
        return case.work(s)
    except torch.OutOfMemoryError as error:
        return {"failed": "out of memory: " + " ".join(str(error).split())[:200]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def apart(case: Case, s: Setting, seconds: float) -> Result:
    """The same in a process of its own, which is ended when the time is up."""
    flags = ["--device", s.device, "--compile", s.compile, "--remat", s.remat, "--steps", str(s.steps)]
    command = [sys.executable, __file__, "--case", case.name, *flags, *(["--tiny"] if s.tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after the {seconds:.0f} s that were left"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"failed": f"exit code {done.returncode}: {last[:300]}"}
    result: Result = json.loads(lines[-1])
    return result


def machine(s: Setting) -> Result:
    out: Result = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "device": "cpu"}
    if s.device != "cpu":
        p = torch.cuda.get_device_properties(s.device)
        out |= {"device": p.name, "memory_bytes": p.total_memory, "cuda": torch.version.cuda}
        out |= {"cudnn": torch.backends.cudnn.version()}
    return out


def gate(results: Mapping[str, Result]) -> Result:
    """At least 55 % MFU at 8192 tokens for the 3B shape and ahead of both peers; `met` None where it is not known."""
    rates = {who: results.get(f"{GATE_CASE}:{who}", {}).get("tokens_per_s") for who in ("dtrain", "titan", "hf")}
    mfu, (ours, *theirs) = results.get(f"{GATE_CASE}:dtrain", {}).get("mfu"), rates.values()
    ratios = {f"over_{who}": ours / r for who, r in rates.items() if who != "dtrain" and ours and r}
    known = mfu is not None and ours is not None and all(theirs)
    met = (mfu >= MFU_GATE and all(ours > r for r in theirs)) if known else None
    return {"mfu": mfu, "at_least": MFU_GATE, **ratios, "met": met}


def show(name: str, r: Result) -> str:
    """A case's lines for a person."""
    if "failed" in r or "skipped" in r:
        return f"{name:<18} {'FAILED: ' + r['failed'] if 'failed' in r else 'skipped: ' + r['skipped']}"
    if "tokens_per_s" in r:
        text = f"{name:<18} {r['tokens_per_s']:>10,.0f} tokens/s  step {r['step_s'] * 1e3:.1f} ms "
        text += f"({r['spread'][0] * 1e3:.1f} to {r['spread'][1] * 1e3:.1f})  peak {r['peak_bytes'] / 2**30:.2f} GiB"
        text += f" (predicted {r['predicted_bytes'] / 2**30:.2f})" if "predicted_bytes" in r else ""
        text += f"  predicted step {r['predicted_s'] * 1e3:.1f} ms" if r.get("predicted_s") else ""
        return text + ("" if r["mfu"] is None else f"  MFU {r['mfu']:.1%}")
    lines = []
    for part, values in r.items():
        if isinstance(values, dict):
            words = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items() if v is not None]
            lines.append(f"{name + ' ' + part:<18} {'  '.join(words)}")
        else:
            lines.append(
                f"{name + ' ' + part:<18} {values:.4g}" if isinstance(values, float) else f"{name} {part} {values}"
            )
    return "\n".join(lines)


def measure(
    s: Setting, only: Sequence[str], minutes: float, isolate: bool, say: Callable[[str], None]
) -> dict[str, Result]:
    """Run the cases that were asked for while there is time."""
    end = time.monotonic() + 60 * minutes
    results: dict[str, Result] = {}
    for case in cases():
        if only and not any(case.name.startswith(word) for word in only):
            continue
        left = end - time.monotonic()
        needs = 5.0 if s.tiny else case.needs
        if left < needs:
            results[case.name] = {"skipped": f"needs about {needs:.0f} s, {left:.0f} s are left of {minutes:g} min"}
        else:
            results[case.name] = apart(case, s, left) if isolate else perform(case, s)
        say(show(case.name, results[case.name]))
    return results


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated beginnings of case names")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all cases")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu (with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--remat", default="selective", help="dtrain's run.remat")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="timed steps at most")
    parser.add_argument("--together", action="store_true", help="all cases in this process")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args(args)
    if asked.device != "cpu" and not torch.cuda.is_available():
        print("bench/gpu.py: no CUDA GPU is here; to try the script on a CPU: --device cpu --tiny", file=sys.stderr)
        return 2
    s = Setting(asked.device, asked.tiny, asked.compile, asked.remat, asked.steps)
    known = {case.name: case for case in cases()}
    if asked.case:
        print(json.dumps(perform(known[asked.case], s)))
        return 0
    only = [word for word in asked.only.split(",") if word]
    wrong = [word for word in only if not any(name.startswith(word) for name in known)]
    if wrong:
        print(f"bench/gpu.py: no case begins with {wrong[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(line, file=sys.stderr if asked.json else sys.stdout, flush=True)

    say("  ".join(f"{k} {v}" for k, v in machine(s).items()))
    results = measure(s, only, asked.minutes, not asked.together, say)
    verdict = gate(results)
    word = {True: "met", False: "NOT met", None: "not judged (needs the three 3b-8192 cases and a known peak)"}
    say(f"gate: {MFU_GATE:.0%} MFU at {GATE_CASE} and ahead of both peers: {word[verdict['met']]}")
    if asked.json:
        print(json.dumps({"machine": machine(s), "setting": vars(s), "cases": results, "gate": verdict}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
