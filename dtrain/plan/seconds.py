"""Seconds of a kernel, of a graph and of a collective on the layout's machine.

A kernel takes as long as the slower of its arithmetic and its memory traffic (Williams et al. 2009, the roofline
model), and then the gap to the next. Peaks are those of `dtrain.hardware`; what a program reaches of them is a few
constants for each class of GPU, and curves that were measured: attention by kernel and sequence, and the all-reduce
inside a node by size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtrain import hardware, ops
from dtrain import layout as layouts
from dtrain.layout import Layout
from dtrain.plan.ledger import Level, sent
from dtrain.program import cost
from dtrain.program.cost import UNKNOWN, Attention, Kernel, Product


@dataclass(frozen=True)
class Constants:
    """What programs reach of a GPU's published figures. One set for each class, for all publications alike.

    `matmul`: share of the peak that a large, well-shaped product reaches. `memory`: share of the memory rate.
    `gap`: seconds from the end of a kernel to the start of the next. `link`: share of the rate of NVLink or PCIe
    that a ring reaches. `net`: share of a NIC's rate that collectives across nodes reach. `overlap`: seconds that
    computation loses for each second of collectives beside it, which take multiprocessors and memory from it.
    """

    matmul: float
    memory: float
    gap: float
    link: float
    net: float
    overlap: float


CONSTANTS: Mapping[str, Constants] = {
    # matmul: 95 of 125 TFLOP/s under sustained load; link: NCCL's 20 GB/s of each of six 25 GB/s links (tuning.cc).
    "volta": Constants(0.76, 0.85, 3e-6, 0.80, 0.75, 0.1),
    # matmul: 271 of 312 is the best shape that stas00's MAMF finder found, 5 % off between GPUs of a node; link: 235 of
    # 300 GB/s, an all-reduce on 8 GPUs.
    "ampere": Constants(0.83, 0.87, 2.5e-6, 0.78, 0.75, 0.1),
    # matmul: 794 of 989 is MAMF's best shape, less under sustained power; link: 361 of 450 GB/s, gathers on 8 GPUs.
    "hopper": Constants(0.72, 0.87, 2.5e-6, 0.80, 0.72, 0.1),
    # matmul: 1745 of 2250; link: 682 of 900 GB/s, a ring on 8 GPUs; net: 37 of 50 GB/s a NIC on 4 x 8 GPUs.
    "blackwell": Constants(0.72, 0.87, 2.5e-6, 0.76, 0.74, 0.1),
    # Local processes over gloo, on cores that nobody knows: only their ratios mean something.
    "cpu": Constants(0.8, 0.8, 1e-5, 0.5, 0.5, 0.5),
}

_PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Machine:
    """What seconds are counted for: the GPU and its constants, bytes/s of each link for one GPU when all of a node
    use it, whether graphs that compute are compiled, and whether only deterministic kernels may run."""

    gpu: hardware.Gpu
    constants: Constants
    links: Mapping[str, float]
    compiled: bool = True
    deterministic: bool = False

    def flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of products in a dtype. One that the tensor cores lack runs as fp32."""
        peak = self.gpu.peak
        return peak.get(_PRECISION.get(dtype, "fp32")) or peak.get("fp32") or UNKNOWN[0]

    @property
    def memory(self) -> float:
        """Bytes/s of device memory that kernels reach."""
        return (self.gpu.memory_rate or UNKNOWN[1]) * self.constants.memory


def machine(layout: Layout, constants: Constants | None = None) -> Machine:
    """The machine of a layout, with its class's constants or others."""
    gpu = layout.cluster.device
    return Machine(
        gpu,
        constants or CONSTANTS[gpu.kind],
        {link: layouts.link_rate(layout, link) for link in layout.cluster.links},
        layout.run.compile != "off",
        layout.run.deterministic,
    )


# ------------------------------------------------------------------------------------------------------ kernels


def kernel(on: Machine, k: Kernel) -> float:
    """Seconds of a kernel that is no collective, with the gap after it."""
    if isinstance(k.does, cost.Product):
        busy = product(on, k.does)
    elif isinstance(k.does, cost.Attention):
        busy = attention(on, k.does)
    else:
        fp32 = on.gpu.peak.get("fp32", UNKNOWN[0]) / 2  # a fused multiply-add is two FLOPs
        fp64 = min(fp32, on.gpu.peak.get("fp64", UNKNOWN[0]) / 2)
        busy = k.steps / fp32 + k.wide / fp64
    return max(busy, moved(on, k.read + k.written)) + on.constants.gap


def moved(on: Machine, bytes: float) -> float:
    """Seconds to move bytes from and to device memory."""
    return bytes / on.memory


# Tiles that libraries cut a product's result into, and the share of the largest tile's rate that each reaches: a
# smaller one reads more for each FLOP.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65))
_SLICE = 64  # of the inner dimension
_SPLITS = (1, 2, 4, 8)  # of the inner dimension, where the result has too few tiles


def product(on: Machine, of: Product) -> float:
    """Seconds of arithmetic of products.

    The result is cut into tiles, each multiprocessor computes one at a time, and the last wave of tiles takes as long
    as a full one (NVIDIA, "Matrix Multiplication Background User's Guide"); of the usual tiles and splits of the
    inner dimension the fastest is taken, as libraries do. Rows that do not start at 16 bytes halve the rate.
    """
    m, n, k, batch = of.m, of.n, of.k, of.batch
    rate = on.flops(of.dtype) * on.constants.matmul
    if on.gpu.processors == 1:
        return 2.0 * batch * m * n * k / rate
    each = rate / on.gpu.processors
    times = []
    for rows, columns, share in _TILES:
        for split in _SPLITS:
            tiles = batch * -(-m // rows) * -(-n // columns) * split
            waves = -(-tiles // on.gpu.processors)
            inner = -(-k // (_SLICE * split)) * _SLICE
            # The parts of a split are added up through memory, in fp32.
            extra = moved(on, 8.0 * batch * m * n * split) if split > 1 else 0.0
            times.append(waves * 2.0 * rows * columns * inner / (each * share) + extra)
    aligned = all(d * of.dtype.itemsize % 16 == 0 for d in (n, k))
    return min(times) * (1 if aligned else 2)


# TFLOP/s of fused attention, forward and backward together, by sequence 512, 1k, 2k, 4k, 8k, 16k: published figures
# of FlashAttention-2 (Dao 2023, arXiv 2307.08691, causal, A100 and H100) and of cuDNN's forward on H100 (Shah et al.
# 2024, arXiv 2407.08608), whose backward reaches 0.8 of it: 447 TFLOP/s for both in a training step at 8k
# (stas00/ml-engineering), and 834 on a B200.
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_FLASH_A100 = {64: (88, 119, 140, 156, 165, 171), 128: (99, 133, 155, 173, 182, 189)}
_FLASH_H100 = {64: (145, 198, 239, 265, 279, 297), 128: (163, 221, 265, 294, 308, 328)}
_CUDNN_H100 = {64: (224, 294, 349, 374, 381, 390), 128: (268, 347, 410, 439, 447, 457)}
_CUDNN_B200 = {d: tuple(1.87 * x for x in curve) for d, curve in _CUDNN_H100.items()}
_CURVES: Mapping[tuple[str, str], tuple[Mapping[int, Sequence[float]], float]] = {  # and the peak that they are of
    ("flash", "ampere"): (_FLASH_A100, 312e12),
    ("cudnn", "ampere"): (_FLASH_A100, 312e12),
    ("flash", "hopper"): (_FLASH_H100, 989.4e12),
    ("cudnn", "hopper"): (_CUDNN_H100, 989.4e12),
    ("flash", "blackwell"): (_FLASH_H100, 2250e12),  # its instructions are those of Hopper and before
    ("cudnn", "blackwell"): (_CUDNN_B200, 2250e12),
}
# The others, as a share of the peak. The memory-efficient kernel as FlashAttention-1, 80 to 97 of 312 TFLOP/s on an
# A100 as sequences grow, and since Hopper what FlashAttention-2 gains there without its instructions, 328 for 189;
# plain operations, 25 of 312 (the same figures).
_EFFICIENT_A100 = (80, 83, 87, 90, 94, 97)
_GAINED = {"hopper": 328 / 189 * 312 / 989.4, "blackwell": 328 / 189 * 312 / 2250}
_PLAIN = {"math": 0.08, "cpu": 0.5}
_ROWS = 128  # query positions that a multiprocessor works on


def attention_kernel(on: Machine, a: Attention) -> str:
    """Which kernel attention runs on this GPU, with a current cuDNN and without FlashAttention-3."""
    device = "cpu" if on.gpu.capability is None else "cuda"
    if a.kernel == "auto" and on.gpu.kind in ("hopper", "blackwell") and not on.deterministic:
        try:
            return ops.kernel_for("cudnn", device, a.dtype, a.width, a.masked, on.gpu.capability)
        except ops.OpError:
            pass
    return ops.kernel_for(a.kernel, device, a.dtype, a.width, a.masked, on.gpu.capability, a.documents)


def attention(on: Machine, a: Attention) -> float:
    """Seconds of arithmetic of attention: its FLOPs (a causal half left out) at the kernel's measured rate for its
    sequence and head_dim, longer where batch x heads x blocks of queries do not fill the multiprocessors."""
    used = attention_kernel(on, a)
    if (used, on.gpu.kind) not in _CURVES:
        share = _at(_EFFICIENT_A100, a.length) / 312 * _GAINED.get(on.gpu.kind, 1.0)
        return a.flops / (_PLAIN.get(used, share) * on.flops(a.dtype))
    curves, peak = _CURVES[used, on.gpu.kind]
    filled = -(-a.width // 32) * 32
    low, high = _at(curves[64], a.length), _at(curves[128], a.length)
    rate = (low if filled <= 64 else high if filled >= 128 else low + (high - low) * (filled - 64) / 64) * 1e12
    blocks = a.batch * a.heads * -(-a.length // _ROWS)
    waves = -(-blocks // on.gpu.processors) * on.gpu.processors / blocks
    return a.flops / (rate * on.flops(a.dtype) / peak * a.width / filled) * waves


def _at(curve: Sequence[float], length: int) -> float:
    """A curve over _LENGTHS, linear in the logarithm of the length; below 512 in proportion, above 16k level."""
    if length <= _LENGTHS[0]:
        return curve[0] * length / _LENGTHS[0]
    return _between([math.log2(n) for n in _LENGTHS], curve, math.log2(length))


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation; level outside."""
    if x <= xs[0] or x >= xs[-1]:
        return ys[0] if x <= xs[0] else ys[-1]
    i = bisect.bisect_right(xs, x)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


# -------------------------------------------------------------------------------------------------- collectives

# All-reduce on the eight H100 of a node, added up in the switch: bytes and microseconds (NCCL tests, one node, as
# NVIDIA's dgxc-benchmarking repository prints them). What exceeds the bytes' own time at 480 GB/s is latency, which
# grows with the message: NCCL changes protocols, and a pipeline has to fill.
_MEASURED = {
    2**10: 17.0, 2**16: 19.5, 2**18: 20.4, 2**20: 27.4, 2**21: 42.2, 2**22: 54.2, 2**23: 83.0, 2**24: 124.0,
    2**25: 199.0, 2**26: 325.0, 2**27: 586.0, 2**28: 1113.0,
}  # fmt: skip
_SENT = [math.log2(1.75 * n) for n in _MEASURED]
_EXCESS = [t * 1e-6 - 1.75 * n / 480e9 for n, t in _MEASURED.items()]
# A sum in the switch reaches more than a ring: 480 for 361 GB/s on H100 and H200, 838 for 682 on B200.
_IN_SWITCH = {"hopper": 480 / 361, "blackwell": 838 / 682}
# NCCL's own model (src/graph/tuning.cc): seconds to begin, and for each hop over NVLink and over the network, of a ring
# and of a tree, and the share of the bandwidth that is left, by protocol.
_PROTOCOLS = {
    "LL": ((6.6e-6, 0.6e-6, 2.7e-6), (6.8e-6, 0.6e-6, 5.0e-6), 0.25),
    "LL128": ((14e-6, 1.9e-6, 4.0e-6), (14e-6, 1.25e-6, 8.5e-6), 0.92),
    "Simple": ((8.4e-6, 3.4e-6, 14e-6), (8.4e-6, 4.0e-6, 14e-6), 1.0),
}
_GLOO = 1e-4  # seconds of a message between processes of one machine


def collective(on: Machine, op: str, bytes: float, levels: Sequence[Level]) -> float:
    """Seconds of a collective on a tensor of `bytes` (the whole: what a gather makes, what a reduce-scatter takes) over
    a group with these levels, inner first; of a send to one peer.

    Every level moves its bytes (`ledger.sent`) at the same time, so the slowest counts, after the latency. Inside a
    node or an NVLink domain that is the measured one above, scaled by the hops of other groups; across nodes it is
    NCCL's model of a ring or, for an all-reduce, a tree, with the best protocol, and what the measured one grows by.
    """
    ranks = math.prod(level.ranks for level in levels)
    if ranks < 2:
        return 0.0
    shares = sent("send" if op == "recv" else op, bytes, [level.ranks for level in levels])
    by_link: dict[str, float] = {}
    for level, share in zip(levels, shares, strict=False):
        by_link[level.link] = by_link.get(level.link, 0.0) + share
    busy = max(n / (on.links[link] * _share(on, link, op)) for link, n in by_link.items())
    if op in ("send", "recv"):
        return busy + (_GLOO if "loopback" in by_link else 2 * _PROTOCOLS["Simple"][0][0])
    if "loopback" in by_link:
        return busy + _GLOO * math.ceil(math.log2(ranks))
    times_over = 2 if op == "all_reduce" else 1
    excess = _between(_SENT, _EXCESS, math.log2(max(1.0, sum(shares))))
    if "ib" not in by_link:
        begin, hop, _ = _PROTOCOLS["LL128"][0]
        hops = (begin + times_over * (ranks - 1) * hop) / (begin + 14 * hop)
        in_switch = op == "all_reduce" and on.gpu.kind in _IN_SWITCH
        return busy + excess * (min(hops, 1.0) if in_switch else hops)
    nodes = math.prod(level.ranks for level in levels if level.link == "ib")
    times = []
    for ring, tree, left in _PROTOCOLS.values():
        across = times_over * min(nodes, ranks - 1)
        near = max(0, times_over * (ranks - 1) - across)
        times.append(ring[0] + near * ring[1] + across * ring[2] + busy / left)
        if op == "all_reduce":
            near, far = ranks // nodes - 1, math.log2(nodes)
            times.append(tree[0] + 2 * (near * tree[1] + far * tree[2]) + busy / left)
    return min(times) + excess - _EXCESS[0]


def _share(on: Machine, link: str, op: str) -> float:
    """The share of a link's rate that an operation reaches."""
    c = on.constants
    if link == "ib":
        return c.net
    return c.link * (_IN_SWITCH.get(on.gpu.kind, 1.0) if link == "nvlink" and op == "all_reduce" else 1.0)


# ------------------------------------------------------------------------------------------------------- graphs


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of what a graph does, in order: `run` seconds of kernels (and `wire` seconds in which they wait for
    collectives), `start` a collective of so many seconds on a communicator, or `wait` for the one of that name."""

    kind: str
    seconds: float = 0.0
    wire: float = 0.0
    stream: str = ""
    name: str = ""


def pieces(
    on: Machine, launches: Iterable[cost.Launch], levels: Callable[[str], tuple[Level, ...]]
) -> tuple[Piece, ...]:
    """What a graph launches as the streams of its rank see it."""
    out: list[Piece] = []
    for one in launches:
        if isinstance(one, cost.Collective):
            took = collective(on, one.op, one.bytes, levels(one.group))
            out.append(Piece("start", took, stream=one.group, name=one.name))
        elif isinstance(one, cost.Wait):
            out.append(Piece("wait", name=one.name))
        else:
            run, wire = together(on, one, levels) if isinstance(one, cost.Together) else (kernel(on, one), 0.0)
            if out and out[-1].kind == "run":
                last = out.pop()
                run, wire = run + last.seconds, wire + last.wire
            out.append(Piece("run", run, wire))
    return tuple(out)


def together(on: Machine, of: cost.Together, levels: Callable[[str], tuple[Level, ...]]) -> tuple[float, float]:
    """Seconds of the kernels of a collective that is one operation with them, and seconds that they wait for it.

    Over n ranks there are n parts, of which one stays here: kernels work on a part while the next one travels, so that
    all of it takes as long as the kernels, or as the n - 1 transfers and the kernels of one part (Wang et al. 2023,
    "Overlap Communication with Dependent Computation via Decomposition", section 3). Transfers are copies, which take
    no multiprocessors.
    """
    run = sum(kernel(on, k) for k in of.kernels)
    wire = collective(on, of.collective.op, of.collective.bytes, levels(of.collective.group))
    return run, max(0.0, wire + run / of.ranks - run)


def at_once(parts: Iterable[Piece]) -> tuple[float, float]:
    """Seconds of kernels, and seconds that they wait for collectives, of a graph that ends with nothing in flight."""
    now = busy = 0.0
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    for p in parts:
        if p.kind == "run":
            now, busy = now + p.seconds + p.wire, busy + p.seconds
        elif p.kind == "start":
            free[p.stream] = ends[p.name] = max(now, free.get(p.stream, 0.0)) + p.seconds
        else:
            now = max(now, ends[p.name])
    return busy, now - busy
