"""YAML -> Layout: typed, frozen, checked. Every error is one line with the place it was written at.

reader     text and overrides -> plain values and where each was written
schema     the keys and their types
errors     one-line messages
placement, rules, checks     everything that can be known before a process starts
derived    what follows by arithmetic: microbatches, stages, padding, groups
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtrain.hardware import nearest
from dtrain.layout import checks, placement, rules
from dtrain.layout.checks import check_place, room_notes
from dtrain.layout.derived import (
    Tables,
    coords,
    data_parallel,
    family,
    groups,
    loss_chunks,
    microbatches,
    pad,
    pp_of,
    stage_layers,
    stage_of,
    stages,
    tables,
)
from dtrain.layout.errors import at, fail, first
from dtrain.layout.placement import levels, link_between, link_rate
from dtrain.layout.reader import LayoutError, Where, override, read
from dtrain.layout.schema import DIFFERENCES, Layout, Link, LossScale, Model, RematBudget, completed, schema_keys
from dtrain.layout.start import started

__all__ = [
    "DIFFERENCES",
    "Layout",
    "LayoutError",
    "RematBudget",
    "Tables",
    "at",
    "check_place",
    "completed",
    "coords",
    "data_parallel",
    "fail",
    "family",
    "groups",
    "levels",
    "link_between",
    "link_rate",
    "load",
    "loads",
    "loss_chunks",
    "microbatches",
    "pad",
    "pp_of",
    "room_notes",
    "schema_keys",
    "stage_layers",
    "stage_of",
    "stages",
    "tables",
    "vary",
]


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Layout:
    """A layout file, with `key.path=value` overrides, loaded and checked. Raises LayoutError, one line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LayoutError(f"{path}: no such file{_similar(Path(path))}") from None
    except OSError as error:
        raise LayoutError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LayoutError(f"{path}: is not UTF-8 text; a layout is a YAML file") from None
    return loads(text, os.fspath(path), overrides)


def loads(text: str, name: str = "layout.yaml", overrides: Iterable[str] = ()) -> Layout:
    """The same from text; `name` is how errors call it."""
    data, where = read(text, name)
    return _made(data, where, name, overrides)


def vary(layout: Layout, overrides: Iterable[str]) -> Layout:
    """The layout as its file with these overrides (after its own) would load, without reading it again."""
    data, where, name = layout._written
    return _made(copy.deepcopy(data), dict(where), name, overrides)


def _made(data: dict[str, Any], where: Where, name: str, overrides: Iterable[str]) -> Layout:
    """Plain values and where each was written -> a checked layout."""
    for line in overrides:
        override(data, where, line)
    written = (copy.deepcopy(data), dict(where), name)
    data = {key: {} if value is None and key in _SECTIONS else value for key, value in data.items()}
    model = data.get("model")
    if isinstance(model, dict):
        model = started(model, where)
        own = [key for key in Model.model_fields if key != "fields"]
        rest = {key: value for key, value in model.items() if key not in own}
        data["model"] = {key: model[key] for key in own if key in model} | {"fields": rest}
    try:
        layout = Layout.model_validate(data)
    except ValidationError as error:
        raise first(error, where) from None
    layout._where, layout._folder, layout._written = where, str(Path(name).parent), written
    layout = _filled(layout, Path(name).stem)
    _check(layout)
    return layout


_SECTIONS = tuple(key for key in Layout.model_fields if key != "allow")


def _similar(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    return nearest(path.name, [p.name for p in folder.glob("*.yaml")])


def _filled(layout: Layout, stem: str) -> Layout:
    """The layout with its open defaults filled in."""
    cluster, shard, run, optim = layout.cluster, layout.shard, layout.run, layout.optim
    links = {k: Link.model_construct(rate=rate) for k, rate in cluster.device.links.items()}
    cluster = cluster.model_copy(
        update={
            "links": links | cluster.links,
            "nvlink_domain": cluster.nvlink_domain or cluster.gpus_per_node,
        }
    )
    runs_over = placement.resolve_links(cluster, layout.mesh, layout.mesh)
    own = (shard.grads or {}).items()
    grads = {axis: tuple(dict.fromkeys(shard.compute.get(axis, ()) + dims)) for axis, dims in own}
    chunks = layout.pipeline.chunks or (2 if layout.pipeline.schedule in ("interleaved", "zbv") else 1)
    if run.precision == "fp16" and run.loss_scale is None:
        run = run.model_copy(update={"loss_scale": LossScale()})
    return layout.model_copy(
        update={
            "cluster": cluster,
            "mesh": {dim: d.model_copy(update={"link": runs_over[dim]}) for dim, d in layout.mesh.items()},
            "shard": shard.model_copy(update={"grads": shard.compute | grads}),
            "pipeline": layout.pipeline.model_copy(update={"chunks": chunks}),
            "optim": optim.model_copy(update={"length": optim.length or run.steps}),
            "run": run.model_copy(update={"folder": run.folder or f"checkpoints/{stem}"}),
        }
    )


def _check(layout: Layout) -> None:
    """Everything that can be known without the machine; the first fault raises LayoutError."""
    placement.check_mesh(layout)
    checks.check_run(layout)
    module, cfg = family(layout)
    checks.check_kernels(layout, module, cfg)
    checks.check_async_tp(layout)
    checks.check_cuda_graph(layout)
    tree = module.params(cfg)
    rules.check_rules(layout, module, tree)
    rules.check_collisions(layout, tree)
    rules.check_grads(layout, tree)
    checks.check_pipeline(layout, cfg)
    checks.check_sizes(layout, tree)
