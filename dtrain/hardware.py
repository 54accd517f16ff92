"""GPUs, links and the units they are written in.

Every figure is a published peak of one GPU; what a run reaches of it is for the plan to say.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Decimal for rates and datasheets (kB, GB), binary for memory (GiB).
_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_FLOPS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([GTP])FLOP/s\s*")
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]+)\s*")

# nvlink joins the GPUs of an NVLink domain, pcie and loopback those (or the processes) of a node, ib all.
LINKS = ("nvlink", "ib", "pcie", "loopback")

# Architectures, with their compute capability.
CLASSES: Mapping[str, tuple[int, int] | None] = {
    "volta": (7, 0),
    "ampere": (8, 0),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "cpu": None,
}
PRECISIONS = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")


@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    `memory` is bytes as CUDA reports the total (a little under the datasheet's), None: the machine's own.
    `memory_rate` is bytes/s of device memory. `peak` is dense FLOP/s by dtype, no sparsity; a dtype that is
    missing is one the hardware lacks, and no entries at all means unknown. `links` is bytes/s per GPU, one
    direction, in the vendor's reference node. `kind` is the architecture (one of CLASSES), which says what share of
    these peaks programs reach; `processors` is the number of its streaming multiprocessors.
    """

    name: str
    memory: int | None
    memory_rate: float | None
    peak: Mapping[str, float]
    links: Mapping[str, float]
    kind: str = "cpu"
    processors: int = 1

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, which kernels ask for; None for a CPU."""
        return CLASSES[self.kind]


def _bytes(text: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"must be a number and a unit, one of {', '.join(_UNITS)}")
    return float(match[1]) * _UNITS[match[2]]


def parse_size(text: object) -> int:
    """`"60GiB"` -> bytes. Raises ValueError that says what is allowed."""
    if not isinstance(text, str):
        raise ValueError("must be a size with its unit, as in 60GiB")
    return round(_bytes(text))


def parse_rate(text: object) -> float:
    """`"450GB/s"` -> bytes/s. Raises ValueError that says what is allowed."""
    if not isinstance(text, str) or not text.strip().endswith("/s"):
        raise ValueError("must be a rate with its unit, as in 450GB/s (bytes, one direction)")
    rate = _bytes(text.strip().removesuffix("/s"))
    if rate <= 0:
        raise ValueError("must be a rate above zero, as in 450GB/s")
    return rate


def parse_flops(text: object) -> float:
    """`"989TFLOP/s"` -> FLOP/s. Raises ValueError that says what is allowed."""
    match = _FLOPS.fullmatch(text) if isinstance(text, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError("must be a rate above zero with its unit, as in 989TFLOP/s (dense; GFLOP/s and PFLOP/s too)")
    return float(match[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[match[2]]


def show_size(size: float) -> str:
    """Bytes -> `"60GiB"`, `"1.5MiB"`."""
    unit = next(u for u in ("GiB", "MiB", "KiB", "B") if size >= _UNITS[u] or u == "B")
    return f"{size / _UNITS[unit]:.4g}{unit}"


def show_rate(rate: float) -> str:
    """Bytes/s -> `"12.5GB/s"`."""
    return f"{rate / 1e9:g}GB/s"


def nearest(word: object, options: Iterable[str], cutoff: float = 0.6) -> str:
    """`"; did you mean lr?"`, or nothing when no option looks like the word, begins it or is its initials."""
    text, known = str(word), list(options)
    initials = "".join(part[:1] for part in text.split("_"))
    close = difflib.get_close_matches(text, known, n=1, cutoff=cutoff)
    close = close or [o for o in known if o == initials or (len(o) > 2 and text.startswith(o))]
    return f"; did you mean {close[0]}?" if close else ""


def _gib(n: float) -> int:
    return round(n * 2**30)


# Peaks: V100 datasheet (SXM2): 125 TFLOP/s fp16 tensor cores, 15.7 fp32, 7.8 fp64; no bfloat16.
_V100 = {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}
# V100 datasheet: NVLink 300 GB/s both directions. DGX-1 and DGX-2 user guides: one 100 Gb/s NIC for two GPUs.
_V100_LINKS = {"nvlink": 150e9, "pcie": 16e9, "ib": 6.25e9}
# A100 datasheet: 312 TFLOP/s bf16 and fp16 dense, 156 tf32, 19.5 fp32, 9.7 fp64 (19.5 on tensor cores).
_A100 = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}
# A100 datasheet: NVLink 600 GB/s both directions, PCIe gen 4 64. DGX A100 user guide: one 200 Gb/s NIC a GPU.
_A100_LINKS = {"nvlink": 300e9, "pcie": 32e9, "ib": 25e9}
# H100 datasheet (SXM column; its tensor-core figures are with sparsity, halved here): 989.4 bf16, 494.7 tf32,
# 1978.9 fp8, 66.9 fp32, 66.9 fp64 on tensor cores.
_H100 = {
    "fp8": 1978.9e12,
    "bf16": 989.4e12,
    "fp16": 989.4e12,
    "tf32": 494.7e12,
    "fp32": 66.9e12,
    "fp64": 66.9e12,
}
# H100 datasheet: NVLink 900 GB/s both directions, PCIe gen 5 128. DGX H100 guide: one 400 Gb/s NIC a GPU.
_H100_LINKS = {"nvlink": 450e9, "pcie": 64e9, "ib": 50e9}
# DGX B200 datasheet: 72 PFLOP/s fp8 with sparsity over 8 GPUs; HGX B200: 75 fp32, 37 fp64 a GPU.
_B200 = {"fp8": 4500e12, "bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp64": 37e12}
# GB200 NVL72 datasheet over 72 GPUs: 360 PFLOP/s bf16 with sparsity, 5,760 TFLOP/s fp32, 2,880 fp64.
_GB200 = {"fp8": 5000e12, "bf16": 2500e12, "fp16": 2500e12, "tf32": 1250e12, "fp32": 80e12, "fp64": 40e12}
# Blackwell: NVLink 1.8 TB/s both directions (HGX B200 and GB200 NVL72 datasheets), one 400 Gb/s NIC a GPU.
_B200_LINKS = {"nvlink": 900e9, "pcie": 64e9, "ib": 50e9}
# Blackwell Ultra: ConnectX-8 at 800 Gb/s a GPU over PCIe gen 6 (DGX B300 and GB300 NVL72 datasheets).
_B300_LINKS = {"nvlink": 900e9, "pcie": 128e9, "ib": 100e9}

# Memory: totals as CUDA's out-of-memory messages and nvidia-smi print them. Memory rates: the datasheets named above.
# Multiprocessors: NVIDIA's whitepapers of each architecture.
_GPUS = (
    Gpu("v100-16", _gib(15.77), 900e9, _V100, _V100_LINKS, "volta", 80),
    Gpu("v100-32", _gib(31.74), 900e9, _V100, _V100_LINKS, "volta", 80),
    # The 450 W V100 of the DGX-2H, whose datasheet says 2.1 PFLOP/s over 16; eight 100 Gb/s NICs a node, as in DGX-2.
    Gpu("v100-450w", _gib(31.74), 900e9, {**_V100, "fp16": 131e12}, _V100_LINKS, "volta", 80),
    Gpu("a100-40", _gib(39.39), 1555e9, _A100, _A100_LINKS, "ampere", 108),
    Gpu("a100-80", _gib(79.15), 2039e9, _A100, _A100_LINKS, "ampere", 108),
    Gpu("h100-sxm", _gib(79.1), 3350e9, _H100, _H100_LINKS, "hopper", 132),
    # H100 datasheet, PCIe column: 756 TFLOP/s bf16 dense, 2 TB/s; NVLink only by bridges between two cards.
    Gpu(
        "h100-pcie",
        _gib(79.1),
        2000e9,
        {"fp8": 1513e12, "bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12, "fp64": 51.2e12},
        {"pcie": 64e9, "ib": 50e9},
        "hopper",
        114,
    ),
    # The H100 of torchtitan's published numbers (its benchmarks/ folder): 96 GB of HBM2e at 2.4 TB/s, 500 W. Its peak
    # is the SXM's scaled by what 500 of 700 W leave of the clock under load, taken as the cube root: 0.894.
    Gpu("h100-96", _gib(94.99), 2400e9, {p: 0.894 * f for p, f in _H100.items()}, _H100_LINKS, "hopper", 132),
    # The H100 with NVLink cut to 400 GB/s both directions (H800 product brief).
    Gpu("h800", _gib(79.1), 3350e9, _H100, {**_H100_LINKS, "nvlink": 200e9}, "hopper", 132),
    # H200 datasheet: the H100's compute, 141 GB at 4.8 TB/s.
    Gpu("h200", _gib(139.7), 4800e9, _H100, _H100_LINKS, "hopper", 132),
    # DGX B200 datasheet: 64 TB/s over 8 GPUs.
    Gpu("b200", _gib(178.3), 8000e9, _B200, _B200_LINKS, "blackwell", 148),
    # DGX B300 datasheet: 72 PFLOP/s fp8 with sparsity over 8 GPUs, 8 TB/s a GPU; fp64 cut to 1.2 TFLOP/s.
    Gpu("b300", _gib(268.6), 8000e9, {**_B200, "fp64": 1.2e12}, _B300_LINKS, "blackwell", 148),
    # GB200 NVL72 datasheet: 576 TB/s over 72 GPUs.
    Gpu("gb200", _gib(184.3), 8000e9, _GB200, _B200_LINKS, "blackwell", 148),
    # GB300 NVL72 datasheet over 72 GPUs: bf16 as GB200, 576 TB/s, 100 TFLOP/s fp64.
    Gpu("gb300", _gib(277.5), 8000e9, {**_GB200, "fp64": 1.4e12}, _B300_LINKS, "blackwell", 148),
    # Local processes over gloo: peaks and memory are the machine's own; the rate is a laptop's, rounded.
    Gpu("cpu", None, None, {}, {"loopback": 2e9}),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}
ALIASES: Mapping[str, str] = {"v100": "v100-32"}


def gpu(name: str) -> Gpu:
    """A GPU of the catalog by name or alias. Raises ValueError that lists the names."""
    name = ALIASES.get(name, name)
    if name not in GPUS:
        raise ValueError(f"must be one of {', '.join([*GPUS, *ALIASES])}{nearest(name, [*GPUS, *ALIASES])}")
    return GPUS[name]
