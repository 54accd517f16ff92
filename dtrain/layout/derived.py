"""What follows from a layout by arithmetic alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dtrain import models
from dtrain.axes import ParamTree, Rules
from dtrain.hardware import nearest
from dtrain.layout.errors import fail, home
from dtrain.layout.schema import Layout


class Tables(NamedTuple):
    """The complete rules of each table: what `shard` says, with `optimizer` laid over `params`."""

    params: Rules
    compute: Rules
    optimizer: Rules
    grads: Rules


def tables(layout: Layout) -> Tables:
    """Each table complete, so that `axes.split(axes, tables(layout).optimizer)` places a tensor."""
    shard = layout.shard
    axes = dict.fromkeys([*shard.params, *shard.optimizer])
    both = {axis: shard.params.get(axis, ()) + shard.optimizer.get(axis, ()) for axis in axes}
    return Tables(shard.params, shard.compute, both, shard.compute if shard.grads is None else shard.grads)


# Fields of a model's config that are keys of other sections.
_ELSEWHERE = {"attention": "kernels", "loss_chunks": "kernels", "document_mask": "data", "max_documents": "data"}


def family(layout: Layout) -> tuple[Any, Any]:
    """The model: its module (`params`, `embed`, `block`, `head_and_loss`, ...) and its frozen config."""
    model = layout.model
    ways = {"family": model.family, "preset": model.preset, "file": model.file}
    given = [way for way, name in ways.items() if name is not None]
    if len(given) != 1:
        meant = next((f"{key}{nearest(key, ways)}; " for key in model.fields if nearest(key, ways)), "")
        has = f"{' and '.join(given)} are both given" if given else "says none of family, preset, file, load"
        fail(layout, "model", f"{meant}{has}; write exactly one of them")
    for key, section in _ELSEWHERE.items():
        if key in model.fields:
            fail(layout, f"model.{key}", f"{model.fields[key]}; is written under {section}: {key}")
    try:
        module, cfg = models.resolve(**ways, fields=model.fields, base=Path(layout._folder))
        if hasattr(cfg, "attention"):  # a model of the user's own may have none
            cfg = dataclasses.replace(cfg, attention=layout.kernels.attention)
        if hasattr(cfg, "document_mask"):
            cfg = dataclasses.replace(cfg, document_mask=layout.data.document_mask)
        if hasattr(cfg, "max_documents"):
            cfg = dataclasses.replace(cfg, max_documents=layout.data.max_documents)
        return module, cfg
    except models.ModelError as error:
        _blame(layout, error)


def _blame(layout: Layout, error: models.ModelError) -> NoReturn:
    """The model's error, which begins with the section (`model.rope_scaling: ...`), at the key it blames."""
    section, colon, reason = str(error).partition(": ")
    if not colon or section.split(".")[0] != "model":
        section, reason = "model", str(error)
    if error.key == "attention":
        fail(layout, "kernels.attention", reason.replace("attention: math", "kernels: {attention: math}"))
    key = error.key or ""
    path = next((p for p in (f"{section}.{key}", f"model.{key}", section) if p in layout._where), "model")
    fail(layout, path, f"{reason}{home(key, section) if 'unknown key' in reason else ''}")


def lengths(tree: ParamTree) -> dict[str, int]:
    """The length of every axis that the parameters have."""
    return {a: n for params in tree.values() for p in params.values() for a, n in zip(p.axes, p.shape, strict=True)}


def data_parallel(layout: Layout) -> int:
    """Replicas of the model: the product of the dims that cut the batch."""
    return math.prod(layout.sizes[d] for d in layout.shard.compute.get("batch", ()))


def microbatches(layout: Layout) -> int:
    """Microbatches a step on each replica, for accumulation and pipeline alike."""
    return layout.data.batch // (data_parallel(layout) * layout.data.microbatch)


def stages(layout: Layout) -> int:
    """Pipeline stages, virtual ones counted: pp x chunks."""
    return layout.sizes["pp"] * (layout.pipeline.chunks or 1)


def stage_layers(layout: Layout) -> tuple[int, ...]:
    """How many layers each stage holds, in model order."""
    if layout.pipeline.layers_per_stage is not None:
        return layout.pipeline.layers_per_stage
    _, cfg = family(layout)
    return (cfg.layers // stages(layout),) * stages(layout)


def stage_of(layout: Layout, segment: str, layer: int = 0) -> int:
    """The (virtual) stage of a segment; `embed` is on the first, `head` on the last, layers count from 0."""
    if segment != "block":
        return 0 if segment == "embed" else stages(layout) - 1
    for stage, end in enumerate(itertools.accumulate(stage_layers(layout))):
        if layer < end:
            return stage
    raise ValueError(f"layer {layer} of a model with {sum(stage_layers(layout))} layers")


def pp_of(layout: Layout, stage: int) -> int:
    """The pp coordinate that runs a stage: stages go round the ranks; in zbv they turn back at the last."""
    pp = layout.sizes["pp"]
    return 2 * pp - 1 - stage if layout.pipeline.schedule == "zbv" and stage >= pp else stage % pp


def pad(layout: Layout) -> dict[str, int]:
    """Axes that are padded in compute and their padded length, as in `{"vocab": 51200}`.

    `auto` is the next multiple of 128 times the dims of vocab, as Megatron-LM pads: 128 fills matrix tiles.
    """
    module, cfg = family(layout)
    real = lengths(module.params(cfg)).get("vocab")
    if real is None:
        return {}
    if layout.model.vocab_pad != "auto":
        return {"vocab": layout.model.vocab_pad}
    unit = 128 * math.prod(layout.sizes[d] for d in layout.shard.compute.get("vocab", ()))
    return {"vocab": -(-real // unit) * unit}


# Scores of the vocabulary that a rank holds at one time: 256 MiB in fp32.
_SCORES = 2**26


def loss_chunks(layout: Layout) -> int:
    """Into how many pieces of the sequence head and loss are cut: as few as keep the scores of a piece small."""
    if layout.kernels.loss_chunks != "auto":
        return layout.kernels.loss_chunks
    _, cfg = family(layout)
    length = pad(layout).get("vocab", cfg.vocab)
    local = length // math.prod(layout.sizes[d] for d in layout.shard.compute.get("vocab", ()))
    seq, per_token = layout.data.seq, layout.data.microbatch * local
    return next(n for n in range(1, seq + 1) if seq % n == 0 and (seq // n * per_token <= _SCORES or n == seq))


def coords(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank is on each dim of the mesh; the last dim varies fastest."""
    out: dict[str, int] = {}
    for dim, d in reversed(layout.mesh.items()):
        rank, out[dim] = divmod(rank, d.size)
    return {dim: out[dim] for dim in layout.mesh}


def groups(layout: Layout, dim: str) -> list[tuple[int, ...]]:
    """The groups of ranks that differ only on `dim`, in rank order."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(layout.world):
        rest = tuple((d, i) for d, i in coords(layout, rank).items() if d != dim)
        found.setdefault(rest, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]
