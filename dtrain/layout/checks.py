"""Checks of numbers: what a run asks, stages and layers, divisibility; and checks of the machine."""

from __future__ import annotations

import glob
import math
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch

from dtrain import ops
from dtrain.axes import ParamTree
from dtrain.hardware import show_size
from dtrain.layout.derived import data_parallel, family, lengths, stages
from dtrain.layout.errors import at, divisors, fail, listed, show_dims
from dtrain.layout.reader import show
from dtrain.layout.schema import FILES, STREAMS, Data, Layout, Mixed, Run

_GRID = 65_535  # blocks of a kernel along its second dimension, in which FlashAttention counts documents
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def check_run(layout: Layout) -> None:
    optim, run, data = layout.optim, layout.run, layout.data
    length = optim.length or run.steps
    if optim.warmup > length:
        fail(layout, "optim.warmup", f"{optim.warmup}; must be at most the schedule's length, {length} steps")
    if optim.schedule == "wsd" and not optim.decay:
        fail(layout, "optim.schedule", "wsd; needs optim.decay, the steps of its final fall")
    if optim.schedule != "wsd" and optim.decay:
        fail(layout, "optim.decay", f"{optim.decay}; is for schedule: wsd only, not {optim.schedule}")
    if optim.warmup + optim.decay > length:
        fail(
            layout,
            "optim.decay",
            f"{optim.decay}; warmup {optim.warmup} + decay may take at most the schedule's length, {length}",
        )
    if optim.min_lr > optim.lr:
        fail(layout, "optim.min_lr", f"{optim.min_lr:g}; must be at most optim.lr ({optim.lr:g})")
    if run.loss_scale is not None and run.precision != "fp16":
        fail(layout, "run.loss_scale", f"is for precision: fp16 only, not {run.precision}; remove it")
    if run.loss_scale is not None and not run.loss_scale.least <= run.loss_scale.start <= run.loss_scale.most:
        fail(layout, "run.loss_scale.start", f"{run.loss_scale.start:g}; must lie between least and most")
    peak = layout.cluster.device.peak
    if peak and run.precision not in peak:
        have = [p for p in get_args(Run.model_fields["precision"].annotation) if p in peak]
        fail(layout, "run.precision", f"{run.precision}; {layout.cluster.gpu} computes in {', '.join(have)}")
    if run.profile is not None:
        first, last = run.profile.steps
        if first > last or last > run.steps:
            fail(
                layout,
                "run.profile.steps",
                f"[{first}, {last}]; must be [first, last] within run.steps ({run.steps})",
            )
        if max(run.profile.ranks, default=0) >= layout.world:
            fail(layout, "run.profile.ranks", f"{show(run.profile.ranks)}; ranks are 0 to {layout.world - 1}")
    if run.eval_every is not None and data.validation.fraction == 0:
        fail(layout, "run.eval_every", f"{run.eval_every}; needs data.validation.fraction above 0")
    _check_data(layout)


def _check_data(layout: Layout) -> None:
    data = layout.data
    if data.mix:
        for key in ("source", "path", "field", "dtype", "stream"):
            if f"data.{key}" in layout._where:
                fail(layout, f"data.{key}", "is written for each source of data.mix; remove it here")
    sources = {f"data.mix.{i}": (m.source, m.path) for i, m in enumerate(data.mix)}
    for key, (source, path) in (sources or {"data": (data.source, data.path)}).items():
        if source in FILES and not path:
            fail(layout, f"{key}.source", f"{source}; needs {key}.path: a file, a list of files or a glob")
        if source not in FILES and path:
            use = f"text or jsonl (or {', '.join(FILES[2:])})"
            fail(layout, f"{key}.path", f"{show(path)}; source {source} reads no files; use source: {use}")
    given_by_key: dict[str, Mixed | Data] = {f"data.mix.{i}": m for i, m in enumerate(data.mix)} or {"data": data}
    _check_used(layout, given_by_key)
    streams = {key: given for key, given in given_by_key.items() if given.stream}
    for key, given in streams.items():
        if given.source not in STREAMS:
            fail(layout, f"{key}.stream", f"true; is for texts ({', '.join(STREAMS)}), not for source {given.source}")
        if data.validation.fraction and not data.validation.path:
            fail(
                layout,
                "data.validation.fraction",
                f"{data.validation.fraction:g}; nothing can be held out of what is read as the run goes on "
                f"({key}.stream: true): give files of their own, validation: {{path: ...}}, or write fraction: 0",
            )
        if isinstance(given, Mixed) and (given.epochs is not None or given.weight is None):
            what, do = ("epochs", "leave it out") if given.epochs is not None else ("weight", "give every source one")
            fail(layout, f"{key}.{what}", f"{show(getattr(given, what))}; how long a stream is, nobody knows; {do}")
    if "data.shuffle" in layout._where and not streams:
        fail(layout, "data.shuffle", f"{data.shuffle}; is for stream: true; what can be indexed is shuffled whole")
    if data.max_documents and not data.document_mask:
        fail(layout, "data.max_documents", f"{data.max_documents}; is for document_mask: true; remove it")
    if data.validation.stride and not data.validation.path:
        fail(
            layout, "data.validation.stride", f"{data.validation.stride}; needs data.validation.path, a text of its own"
        )
    if data.validation.path and "data.validation.fraction" in layout._where:
        fail(layout, "data.validation.fraction", "nothing else is held out with data.validation.path; remove one")


def _check_used(layout: Layout, given_by_key: Mapping[str, Mixed | Data]) -> None:
    """Whether the sources have a use for what is written of them."""
    data = layout.data
    keyed: tuple[str, ...] = ("jsonl", "parquet", "arrow")
    texts = (*STREAMS, "stdlib")
    for key, given in given_by_key.items():
        for name, kinds in {"field": keyed, "dtype": ("tokens",)}.items():
            if f"{key}.{name}" in layout._where and given.source not in kinds:
                value, meant = show(getattr(given, name)), ", ".join(kinds)
                fail(layout, f"{key}.{name}", f"{value}; is for {meant}, not for source {given.source}; remove it")
    sources = {given.source for given in given_by_key.values()}
    for name, kinds in (("chat", keyed), ("bos", texts), ("validation.split", texts)):
        value = data.validation.split if name == "validation.split" else getattr(data, name)
        if value not in (False, "blocks") and not sources <= {*kinds}:
            other = ", ".join(sorted(sources - {*kinds}))
            fail(layout, f"data.{name}", f"{show(value)}; is for {', '.join(kinds)}, not for source {other}")
    if data.validation.path and data.validation.split != "blocks":
        fail(layout, "data.validation.split", "nothing else is held out with data.validation.path; remove one")


def check_kernels(layout: Layout, module: ModuleType, cfg: Any) -> None:
    """Whether the model can mask documents, and the layout's GPU do the attention kernel that was asked for."""
    if layout.data.document_mask and not hasattr(cfg, "document_mask"):
        fail(layout, "data.document_mask", "true; this model has no masks of documents (llama and gpt2 have)")
    causal = {*module.BATCH} <= {"tokens", "labels", "sample"}
    if causal and any(key.startswith("data.masking") for key in layout._where):
        fail(layout, "data.masking", "is for masked models (bert), and this one is causal; remove it")
    kernel, gpu = layout.kernels.attention, layout.cluster.device
    most = layout.data.max_documents or 0
    if most * layout.data.microbatch > _GRID and gpu.capability is not None:
        at_most = _GRID // layout.data.microbatch
        fail(
            layout, "data.max_documents", f"{most}; is at most {at_most} with microbatches of {layout.data.microbatch}"
        )
    if kernel in ("auto", "math") or not hasattr(cfg, "attention"):  # a model of the user's own may have none
        return
    if kernel == "cudnn" and layout.run.deterministic:
        fail(layout, "kernels.attention", "cudnn; its backward is not deterministic; use auto, flash or math")
    device, dtype = "cpu" if gpu.capability is None else "cuda", _DTYPES[layout.run.precision]
    masked = "valid" in module.BATCH or layout.data.document_mask
    try:
        ops.kernel_for(
            kernel, device, dtype, cfg.head_dim, masked, gpu.capability, getattr(cfg, "max_documents", 0) or 0
        )
    except ops.OpError as error:
        fail(layout, "kernels.attention", str(error).removeprefix("attention kernel "))


def check_async_tp(layout: Layout) -> None:
    """Whether gathers and reduce-scatters of the sequence over tp can be fused with products."""
    if not layout.kernels.async_tp:
        return
    lacking = None
    if layout.cluster.device.capability is None:
        lacking = f"GPUs: their symmetric memory, which {layout.cluster.gpu} has not"
    elif layout.sizes["tp"] == 1 or layout.shard.compute.get("res_seq") != ("tp",):
        lacking = "sequence parallelism over tp: shard: {compute: {res_seq: tp}} and a mesh.tp.size of at least 2"
    elif layout.mesh["tp"].link != ("nvlink",):
        lacking = f"tp over nvlink alone, not {show_dims(layout.mesh['tp'].link or ())}"
    elif layout.run.compile == "off":
        lacking = "compiled graphs: run: {compile: on}"
    if lacking:
        fail(layout, "kernels.async_tp", f"true; needs {lacking}; or remove it")


def check_cuda_graph(layout: Layout) -> None:
    """Whether a rank's whole step can be recorded once and replayed."""
    if not layout.run.cuda_graph:
        return
    lacking, pp = None, layout.sizes["pp"]
    if layout.cluster.device.capability is None:
        lacking = f"GPUs, not {layout.cluster.gpu}"
    elif pp > 1:
        lacking = f"one pipeline stage, not pp {pp}: a recorded rank cannot meet the transfers of others in between"
    elif layout.run.precision == "fp16":
        lacking = "a constant loss scale, which fp16 has not; use precision: bf16"
    if lacking:
        fail(layout, "run.cuda_graph", f"true; needs {lacking}; or remove it")


def check_pipeline(layout: Layout, cfg: Any) -> None:
    pipe, pp, n = layout.pipeline, layout.sizes["pp"], cfg.layers
    count = stages(layout)
    chunks = pipe.chunks or 1
    if pipe.schedule == "interleaved" and chunks < 2:
        fail(
            layout,
            "pipeline.chunks",
            f"{chunks}; interleaved needs at least 2; with one chunk it is schedule: 1f1b",
        )
    if pipe.schedule != "interleaved" and chunks != (wanted := 2 if pipe.schedule == "zbv" else 1):
        fail(
            layout,
            "pipeline.chunks",
            f"{chunks}; {pipe.schedule} has {wanted}; only interleaved leaves the choice",
        )
    if pipe.layers_per_stage is not None:
        parts = pipe.layers_per_stage
        if len(parts) != count or sum(parts) != n:
            fail(
                layout,
                "pipeline.layers_per_stage",
                f"{show(parts)}; must be {count} numbers (pp {pp} x chunks {chunks}) that add up to "
                f"the model's {n} layers, not {len(parts)} that add up to {sum(parts)}",
            )
        return
    where = "pipeline.chunks" if chunks > 1 else "mesh.pp.size" if pp > 1 else "model"
    if count > n:
        fail(
            layout,
            where,
            f"{count} stages (pp {pp} x chunks {chunks}), but the model has {n} layers; use at most {n}",
        )
    if n % count:
        base, more = divmod(n, count)
        example = [base + (count - more <= i) for i in range(count)]
        fail(
            layout,
            where,
            f"{count} stages (pp {pp} x chunks {chunks}) do not divide the model's {n} layers; use "
            f"{listed(divisors(n))} stages, or pipeline: {{layers_per_stage: {show(example)}}}",
        )


def check_sizes(layout: Layout, tree: ParamTree) -> None:
    data, sizes, compute, length = layout.data, layout.sizes, layout.shard.compute, lengths(tree)

    def degree(axis: str) -> int:
        return math.prod(sizes[d] for d in compute.get(axis, ()))

    for axis in ("heads", "mlp"):
        if axis in length and length[axis] % degree(axis):
            fail(
                layout,
                f"shard.compute.{axis}",
                f"{show_dims(compute[axis])}; the model's {axis} ({length[axis]}) must be divisible by "
                f"{_degree(layout, compute[axis])}; legal: {listed(divisors(length[axis]))}",
            )
    if "kv_heads" in length:
        kv, n = length["kv_heads"], degree("kv_heads")
        if kv % n and n % kv:
            heads = [d for d in divisors(length["heads"]) if kv % d == 0 or d % kv == 0]
            fail(
                layout,
                "shard.compute.kv_heads",
                f"{show_dims(compute['kv_heads'])}; {_degree(layout, compute['kv_heads'])} must divide "
                f"the model's {kv} kv_heads or be a multiple of them; legal: {listed(heads)}",
            )
    spread = math.prod(sizes[d] for d in dict.fromkeys(compute.get("seq", ()) + compute.get("res_seq", ())))
    if data.seq % spread:
        low = data.seq // spread * spread
        cut = dict.fromkeys(compute.get("seq", ()) + compute.get("res_seq", ()))
        nearby = [n for n in (low, low + spread) if n > 0]
        fail(
            layout,
            "data.seq",
            f"{data.seq}; must be divisible by {_degree(layout, cut)}; use {listed(nearby, ' or ')}",
        )
    if (chunks := layout.kernels.loss_chunks) != "auto" and data.seq % chunks:
        legal = listed(divisors(data.seq))
        fail(layout, "kernels.loss_chunks", f"{chunks}; must divide data.seq ({data.seq}); legal: {legal}")
    if "positions" in length and data.seq > length["positions"]:
        fail(layout, "data.seq", f"{data.seq}; the model has {length['positions']} positions; use at most that")

    replicas = data_parallel(layout)
    unit = replicas * data.microbatch
    dims = compute.get("batch", ())
    spread_over = f"{_degree(layout, dims)} replicas" if replicas > 1 else "1 replica"
    if data.batch % replicas:
        low = data.batch // replicas * replicas
        nearby = [n for n in (low, low + replicas) if n > 0]
        legal = listed(nearby, " or ")
        fail(layout, "data.batch", f"{data.batch}; must be divisible by {spread_over}; use {legal}")
    if data.batch % unit:
        each = data.batch // replicas
        fail(
            layout,
            "data.microbatch",
            f"{data.microbatch}; must divide the {each} sequences of each replica (data.batch {data.batch} "
            f"over {spread_over}); use {listed(divisors(each))}",
        )

    if "vocab" not in length:
        return
    padding, n = layout.model.vocab_pad, degree("vocab")
    if padding != "auto":
        if padding < length["vocab"]:
            fail(
                layout,
                "model.vocab_pad",
                f"{padding}; must be at least the vocabulary, {length['vocab']}; or auto",
            )
        if padding % n:
            up = -(-padding // n) * n
            fail(
                layout,
                "model.vocab_pad",
                f"{padding}; must be divisible by {_degree(layout, compute['vocab'])}; use {up} or auto",
            )


def _degree(layout: Layout, dims: Collection[str]) -> str:
    """`tp 2`, or `dp 2 x fsdp 4 = 8`."""
    words = [f"{d} {layout.sizes[d]}" for d in dims]
    product = math.prod(layout.sizes[d] for d in dims)
    return " x ".join(words) + (f" = {product}" if len(words) > 1 else "")


def check_place(layout: Layout) -> list[str]:
    """What this machine lacks for the layout, a line each: errors for `run`, notes for `plan`.

    Looks at the GPUs, the data files and the disk of the node it is called on; starts nothing.
    """
    cluster, data, found = layout.cluster, layout.data, []
    if cluster.gpu != "cpu":
        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if have < cluster.gpus_per_node:
            found.append(
                f"{at(layout, 'cluster.gpus_per_node')}: cluster.gpus_per_node: {cluster.gpus_per_node}; "
                f"this machine has {have} GPUs"
            )
    asked = [("data.path", data.path, data.source), ("data.validation.path", data.validation.path, data.source)]
    asked += [(f"data.mix.{i}.path", m.path, m.source) for i, m in enumerate(data.mix)]
    for key, paths, source in asked:
        for path in paths:
            name = f"{path}.idx" if source == "megatron" and not path.endswith((".idx", ".bin")) else path
            if "://" not in path and not glob.glob(name, recursive=True):
                found.append(f"{at(layout, key)}: {key}: {path!r}; matches no file from {os.getcwd()}")
    folder = _nearest_folder(layout)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        found.append(f"{at(layout, 'run.folder')}: run.folder: {layout.run.folder!r}; {folder} cannot be written to")
    else:
        need, free = _checkpoint_bytes(layout), shutil.disk_usage(folder).free
        if need > free:
            found.append(
                f"{at(layout, 'run.folder')}: run.folder: {layout.run.folder!r}; a checkpoint takes "
                f"{show_size(need)} and {folder} has {show_size(free)} free"
            )
    return found


def room_notes(layout: Layout) -> list[str]:
    """A line where one checkpoint fits on the disk, and those that a new run comes to hold do not."""
    run, folder = layout.run, _nearest_folder(layout)
    older = range(run.save_every or run.steps, run.steps, run.save_every or 1)  # than the last one
    count = len(older) + 1
    if run.keep:  # an old one goes once the new one is there
        every = run.keep.every or run.steps
        count = min(count, run.keep.last + 1 + sum(step % every == 0 for step in older[: -run.keep.last]))
    one, free = _checkpoint_bytes(layout), shutil.disk_usage(folder).free
    if not one <= free < count * one:
        return []
    return [
        f"{at(layout, 'run.folder')}: run.folder: {layout.run.folder!r}; {count} checkpoints of {show_size(one)} "
        f"do not fit: {folder} has {show_size(free)} free; run.keep removes old ones"
    ]


def _nearest_folder(layout: Layout) -> Path:
    """`run.folder`, or what is there of the path to it."""
    folder = Path(layout.run.folder or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _checkpoint_bytes(layout: Layout) -> int:
    """Master weights and two moments, in fp32 (fp64 under fp64)."""
    module, cfg = family(layout)
    tree = module.params(cfg)
    times = {"block": cfg.layers}
    count: int = sum(
        math.prod(p.shape) * times.get(s, 1) for s, params in tree.items() for p in params.values() if not p.tied_to
    )
    return count * 3 * (8 if layout.run.precision == "fp64" else 4)
