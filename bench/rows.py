"""Rows of published runs as layouts. A column that the layout has no key for is given by what the run's framework does.

Columns are explained in data/published.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import layout as layouts
from dtrain.layout import Layout, LayoutError

Row = Mapping[str, str]
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Framework:
    """What a training framework does of its own. `fused`: norms, rotations and losses are kernels of its own or of a
    compiler; else operations of the model, as an uncompiled run of dtrain has them. `attention`: its kernel where the
    row names none; `dropout`: the rate it trains GPT with; `async_tp`: whether gathers and reduce-scatters of the
    sequence travel beside the products that they feed."""

    fused: bool
    attention: str
    dropout: float = 0.0
    async_tp: bool = False


# Fused kernels for bias, gelu, dropout, masks and softmax, attention as products of matrices.
MEGATRON = Framework(fused=True, attention="math", dropout=0.1)
# Megatron-Core in NeMo and Megatron-Bridge: Transformer Engine's kernels.
CORE = Framework(fused=True, attention="auto", async_tp=True)
# Models with kernels for norms and rotations: nanotron's; Composer's and GPT-NeoX's of 2023, with the first
# FlashAttention, which is as fast as the memory-efficient kernel.
KERNELS = Framework(fused=True, attention="flash")
FLASH_1 = Framework(fused=True, attention="efficient")
# Models of plain operations, RMS norm among them, unless a row says otherwise: torchtitan, FMS, Aleph Alpha's.
EAGER = Framework(fused=False, attention="flash")
XLA = Framework(fused=True, attention="math")
FRAMEWORKS = {
    **dict.fromkeys(("meg19", "meg20", "meg20blog", "nar21", "meg21jan", "meg21", "kor22", "mtnlg", "zb"), MEGATRON),
    **dict.fromkeys(("bloompre", "bloom", "bs1b3"), MEGATRON),
    **dict.fromkeys(("mcore24", "nemo2407", "nemolong", "dgxc", "mb", "mbskill", "nemotron4", "megascale"), CORE),
    **dict.fromkeys(("mosaic", "pythia"), FLASH_1),
    "nano": KERNELS,
    **dict.fromkeys(("tt24", "tt25", "tt24apr", "tt24aug", "fms", "aa"), EAGER),
    "alpa": XLA,
}

GPUS = {
    "A100-SXM-80GB": "a100-80",
    'A100 ("Ampere")-80GB': "a100-80",
    "A100-SXM-40GB": "a100-40",
    "A100-SXM (DGX-A100)": "a100-40",
    "V100-SXM2-16GB (p3.16xlarge)": "v100-16",
    "V100-SXM2-32GB": "v100-32",
    "V100-SXM3-32GB (DGX-2)": "v100-32",
    "V100-SXM3-32GB (DGX-2H, 450W)": "v100-450w",
    "H100-SXM-80GB": "h100-sxm",
    "H100-SXM-80GB (700W)": "h100-sxm",
    "H100-96GB-HBM2e (2.4TB/s, 500W)": "h100-96",
    "H800-SXM-80GB": "h800",
    "H200-SXM-141GB": "h200",
    "B200-SXM-180GB": "b200",
    "B300-SXM-288GB": "b300",
    "GB200-186GB": "gb200",
    "GB300-288GB": "gb300",
}

# The fields without which a row is no layout.
NEEDED = (
    *("layers", "hidden", "heads", "ffn", "vocab", "seq", "n_gpus", "tp", "pp", "dp"),
    *("micro_batch", "global_batch", "recompute", "precision"),
)
ONE_LAYER = "printed: ONE transformer layer"


class SkipError(Exception):
    """Why a row is not modelled."""


def source_of(row: Row) -> str:
    """The publication, as the table of data/published.md calls it."""
    key = row["id"].split("-")[0]
    return re.match(r"(dgxc|mb)\d", key)[1] if re.match(r"(dgxc|mb)\d", key) else key  # type: ignore[index]


def complete(row: Row) -> bool:
    """Whether a row has every layout field and a step time."""
    return bool(row["step_s_target"]) and all(row[k] for k in NEEDED)


def sweep_of(row: Row) -> tuple[str, ...]:
    """What rows have in common that differ in their layout alone."""
    keys = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpu", "n_gpus", "global_batch", "precision")
    return (source_of(row), *(row[k] for k in keys))


def layout_of(row: Row) -> Layout:
    """The layout of a row. Raises SkipError with the reason where there is none."""
    if row["confidence"] == "from-memory":
        raise SkipError("from memory")
    if row["measured"] == "0":
        raise SkipError("not measured")
    missing = [k for k in NEEDED if not row[k]]
    if missing:
        raise SkipError(f"{', '.join(missing)} not stated")
    if row["cp"] not in ("", "1"):
        raise SkipError("context parallel")
    if row["ep"] not in ("", "1"):
        raise SkipError("experts")
    if "offload" in row["fsdp"]:
        raise SkipError("optimizer on the CPU")
    if source_of(row) not in FRAMEWORKS:
        raise SkipError("framework unknown")
    try:
        return layouts.loads(json.dumps(_values(row)), str(HERE / f"{row['id']}.yaml"))
    except LayoutError as error:
        raise SkipError(str(error).partition(": ")[2] or str(error)) from None


def _values(row: Row) -> dict[str, Any]:
    """The layout as plain values."""
    n = {k: int(row[k]) for k in ("n_gpus", "gpus_per_node", "tp", "pp", "dp", "micro_batch", "global_batch", "seq")}
    if n["tp"] * n["pp"] * n["dp"] != n["n_gpus"]:
        raise SkipError("dims do not multiply to the GPUs")
    framework, kernels = FRAMEWORKS[source_of(row)], row["compile_kernels"]
    fused = framework.fused or kernels.startswith("compile") or "RMS kernel" in kernels
    mesh, shard = _sharding(row)
    node = min(n["gpus_per_node"], n["n_gpus"])
    model = _model(row, framework)
    pipeline = _pipeline(row)
    return {
        "cluster": {
            "nodes": n["n_gpus"] // node,
            "gpus_per_node": node,
            "gpu": GPUS[row["gpu"]],
            "links": _links(row, node),
        },
        "mesh": mesh,
        "shard": shard,
        "pipeline": pipeline,
        "model": model,
        "data": {
            "source": "synthetic",
            "seq": n["seq"],
            "batch": n["global_batch"],
            "microbatch": n["micro_batch"],
        },
        # No framework of these cuts the loss into pieces.
        "kernels": {
            "attention": _attention(row, framework),
            "async_tp": _async_tp(row, framework),
            "loss_chunks": 1,
        },
        "run": {
            "steps": 1,
            "precision": _precision(row),
            "remat": _remat(row),
            "compile": "on" if fused else "off",
        },
        "allow": ["tp-across-nodes"],
    }


def _links(row: Row, node: int) -> dict[str, Any]:
    """Rates that the row tells; the others are the GPU's."""
    out: dict[str, Any] = {}
    if near := re.search(r"(\d+)GB/s/dir", row["intra_link"]):
        out["nvlink"] = f"{near[1]}GB/s"
    elif "4-link" in row["intra_link"]:  # four links of 25 GB/s
        out["nvlink"] = "100GB/s"
    far = row["inter_link"]
    if nics := re.search(r"(\d+)x(\d+)Gb", far):
        out["ib"] = {"rate": f"{int(nics[2]) / 8}GB/s", "per_node": int(nics[1])}
    elif whole := re.search(r"(\d+)Gb/node", far):
        out["ib"] = f"{int(whole[1]) / 8 / int(row['gpus_per_node'])}GB/s"
    elif one := re.match(r"(\d+)Gb", far):
        out["ib"] = f"{int(one[1]) / 8}GB/s"
    return out


def _sharding(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mesh and rules: pp outside, then data parallel, tp inside."""
    tp, pp, dp = (int(row[k]) for k in ("tp", "pp", "dp"))
    zero, node = row["fsdp"], int(row["gpus_per_node"])
    tensor = {axis: "tp" for axis in ("vocab", "heads", "mlp") if tp > 1}
    tensor |= {"kv_heads": "tp"} if tp > 1 and row["mlp"] != "gelu" else {}
    stages = {"layers": "pp"} if pp > 1 else {}
    params: dict[str, Any] = {**stages, **tensor}
    compute: dict[str, Any] = {**stages, **tensor}
    compute |= {"res_seq": "tp"} if row["sp"] == "1" and tp > 1 else {}
    rules: dict[str, Any] = {"params": params, "compute": compute}
    data: dict[str, int] = {}
    if dp > 1:
        if "zero3" in zero or zero == "hsdp":
            within = re.search(r"over (\d+) ranks", zero)
            fsdp = min(dp, int(within[1])) if within else min(dp, node) if zero == "hsdp" else dp
            data = ({"dp": dp // fsdp} if dp > fsdp else {}) | {"fsdp": fsdp}
            params["embed"] = "fsdp"
            rules["grads"] = {"embed": "fsdp"}
        else:
            data = {"dp": dp}
            if zero.startswith(("zero1", "zero2")):
                rules["optimizer"] = {"embed": "dp"}
            if zero.startswith("zero2"):
                rules["grads"] = {"embed": "dp"}
        compute["batch"] = list(data)
    sizes = ({"pp": pp} if pp > 1 else {}) | data | ({"tp": tp} if tp > 1 else {})
    return {dim: {"size": n} for dim, n in sizes.items()}, rules


def _model(row: Row, framework: Framework) -> dict[str, Any]:
    sizes = {
        "layers": int(row["layers"]),
        "embed": int(row["hidden"]),
        "heads": int(row["heads"]),
        "mlp": int(row["ffn"]),
        "vocab": int(row["vocab"]),
    }
    if row["mlp"] == "gelu":
        rate = framework.dropout
        return {
            "family": "gpt2",
            **sizes,
            "positions": int(row["seq"]),
            "dropout": rate,
            "attention_dropout": rate if _attention(row, framework) == "math" else 0.0,
        }
    kv = {"kv_heads": int(row["kv_heads"] or row["heads"])}
    if row["mlp"] == "squared-relu":
        return {"file": "squared_relu.py", **sizes, **kv}
    return {"family": "llama", **sizes, **kv}


def _attention(row: Row, framework: Framework) -> str:
    kernels = row["compile_kernels"].lower()
    if "flash" in kernels:
        return "efficient" if "v1" in kernels else framework.attention
    return "math" if "softmax" in kernels or kernels in ("torch", "fused") else framework.attention


def _async_tp(row: Row, framework: Framework) -> bool:
    """Where there are sequences over tp, inside a node."""
    there = row["sp"] == "1" and 1 < int(row["tp"]) <= int(row["gpus_per_node"])
    return there and ("asyncTP" in row["compile_kernels"] or framework.async_tp)


def _pipeline(row: Row) -> dict[str, Any]:
    pp, chunks, layers = int(row["pp"]), int(row["vpp"] or 1), int(row["layers"])
    stages = pp * chunks
    if pp == 1:
        return {}
    if layers < stages:
        raise SkipError("more stages than layers")
    out: dict[str, Any] = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {"schedule": "1f1b"}
    if layers % stages:  # the first and the last have the embedding and the head besides
        most = math.ceil(layers / stages)
        short = most * stages - layers
        fewer = [i for pair in zip(range(stages - 1, -1, -1), range(stages), strict=True) for i in pair][:short]
        out["layers_per_stage"] = [most - (i in fewer) for i in range(stages)]
    return out


def _precision(row: Row) -> str:
    said = row["precision"].lower()
    if "fp8" in said or "fp4" in said:
        raise SkipError("products in fp8")
    found = re.search(r"bf16|fp16|fp32", said)
    if not found:
        raise SkipError(f"precision {row['precision']}")
    return found[0]


def _remat(row: Row) -> str:
    """full and none are the same everywhere; Megatron's selective (attention's core) and torchtitan's (products and
    attention are kept) multiply nothing again, as dtrain's."""
    said = row["recompute"]
    for word in ("full", "none"):
        if said.startswith(word):
            return word
    if said.startswith(("selective op", "selective (attention")):
        return "selective"
    raise SkipError("some layers computed again, others not")
