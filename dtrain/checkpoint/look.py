"""What `dtrain checkpoint` says: which checkpoints there are, what one holds, whether it is whole, how two differ.

One process, no model: a checkpoint is read as the names and tensors that are in it, one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.folder import Record, find, flat, latest, read, steps
from dtrain.checkpoint.manifest import problems
from dtrain.checkpoint.tensors import CheckpointError, described, open_tensors
from dtrain.hardware import show_size


def resolve(path: Path) -> Path:
    """A checkpoint: the folder itself, or the latest of a run's folder. Raises CheckpointError."""
    if (step := latest(path)) is not None:
        return find(path, step)
    if not any((path / name).exists() for name in ("run.json", "manifest.json", ".metadata")):
        what = "is no checkpoint, nor a run's folder with one" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}")
    return path


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run's folder: when it was written, its bytes, and what is wrong with it, if anything is."""

    name: str
    when: str
    bytes: int
    wrong: str | None


def listed(folder: Path) -> list[Listed]:
    """The checkpoints of a run's folder by step, and those that were never finished. Content is not read: see
    `problems`. Raises CheckpointError where there is none."""
    found = [(folder / f"step-{step}", None) for step in steps(folder)]
    unfinished = sorted(p for p in folder.glob("step-*.tmp") if p.is_dir())
    if not found and not unfinished:
        what = "has no checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give a run's folder, as in checkpoints/quickstart")
    out = [_listed(path, next(iter(problems(path, content=False)), None)) for path, _ in found]
    return out + [_listed(path, "was never finished") for path in unfinished]


def _listed(path: Path, wrong: str | None) -> Listed:
    try:
        files = [f.stat() for f in path.iterdir()]
        written = max((f.st_mtime for f in files), default=path.stat().st_mtime)
        when = datetime.fromtimestamp(written).astimezone().isoformat(" ", "seconds")
        return Listed(path.name, when, sum(f.st_size for f in files), wrong)
    except OSError as error:
        return Listed(path.name, "unknown", 0, wrong or f"cannot be read: {error.strerror}")


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint, `dtype` as torch calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def held(path: Path) -> list[Held]:
    """The tensors of a checkpoint, layers in order. Raises CheckpointError."""
    there = {name: _held(name, t) for name, t in described(path).items()}
    return [there[name] for name in sorted(there, key=_in_order)]


def _held(name: str, t: Tensor) -> Held:
    return Held(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes)


def _in_order(name: str) -> list[str | int]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class Differing:
    """A tensor of two checkpoints that is not the same: `what` says how (None: in its values alone), `most` is the
    largest absolute difference, nan where one of them has a nan and the other has not."""

    name: str
    what: str | None
    most: float


@dataclass(frozen=True)
class Compared:
    """How two checkpoints differ: keys of their records, `was -> is`, and tensors. `equal` have the same bits."""

    record: dict[str, str]
    tensors: list[Differing]
    equal: int

    @property
    def same(self) -> bool:
        return not self.record and not self.tensors


def compared(a: Path, b: Path) -> Compared:
    """Two checkpoints, a tensor of each in memory at a time. Raises CheckpointError."""
    first, second = (_by_key(read(path)) for path in (a, b))
    keys = sorted({*first, *second})
    record = {k: f"{_word(first.get(k))} -> {_word(second.get(k))}" for k in keys if first.get(k) != second.get(k)}
    ours, theirs = described(a), described(b)
    (_, one), (_, other) = open_tensors(a), open_tensors(b)
    found, equal = [], 0
    for name in sorted({*ours, *theirs}, key=_in_order):
        x, y = ours.get(name), theirs.get(name)
        if x is None or y is None:
            found.append(Differing(name, f"only in {b if x is None else a}", math.nan))
        elif x.shape != y.shape or x.dtype != y.dtype:
            words = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (x, y))
            found.append(Differing(name, " -> ".join(words), math.nan))
        elif (most := _most(one(name), other(name))) is None:
            equal += 1
        else:
            found.append(Differing(name, None, most))
    return Compared(record, found, equal)


def _by_key(record: Record) -> dict[str, Any]:
    """What a record says of the run, keys of the layout as they are written there."""
    about = {"step": record.step, "data": record.data, "skipped": record.skipped, "valid_loss": record.valid_loss}
    return about | flat(record.layout)


def _most(x: Tensor, y: Tensor) -> float | None:
    """The largest absolute difference; None where all bits are the same."""
    if torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
        return None
    apart = (x.double() - y.double()).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0  # infinities too
    return float(apart.max())


def _word(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------- as text


def list_lines(found: Iterable[Listed]) -> Iterator[str]:
    """A row a checkpoint."""
    rows = [(c.name, c.when, show_size(c.bytes), c.wrong or "whole") for c in found]
    yield from table([("checkpoint", "written", "size", ""), *rows])


def show_lines(path: Path, record: Record, tensors: list[Held]) -> Iterator[str]:
    """The record by key, then the tensors, a row for equal ones of consecutive layers."""
    yield f"{path}: step {record.step}, format {record.format}"
    yield from table([(k, _word(v)) for k, v in _by_key(record).items() if v not in (None, "") and k != "step"])
    yield ""
    rows = [("tensor", "dtype", "shape", "bytes")]
    rows += [(name, t.dtype, str(list(t.shape)), f"{t.bytes:,}") for name, t in _joined(tensors)]
    yield from table(rows)
    yield f"{len(tensors)} tensors, {show_size(sum(t.bytes for t in tensors))}"


def _joined(tensors: Iterable[Held]) -> Iterator[tuple[str, Held]]:
    """`block.0/wq` ... `block.3/wq` -> `block.0..3/wq`, where they are alike; at the place of the first."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, Held]]] = {}
    for t in tensors:
        head, layer, tail = re.fullmatch(r"(?:(.*/block\.)(\d+)(/.*)|.*)", t.name).groups()  # type: ignore[union-attr]
        key = (f"{head}*{tail}" if layer else t.name, t.dtype, t.shape)
        alike.setdefault(key, []).append((int(layer or 0), t))
    for (name, _, _), members in alike.items():
        layers = [i for i, _ in members]
        if len(members) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
            yield name.replace("*", f"{layers[0]}..{layers[-1]}"), members[0][1]
        else:
            yield from ((t.name, t) for _, t in members)


def diff_lines(a: Path, b: Path, found: Compared) -> Iterator[str]:
    """What differs, the record first."""
    yield f"{a} -> {b}"
    yield from table([(k, v) for k, v in found.record.items()])
    yield from table([(d.name, d.what or f"differs by up to {d.most:.3g}") for d in found.tensors])
    yield f"{found.equal} tensors are the same bits" + (f", {len(found.tensors)} differ" if found.tensors else "")


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(values: Any) -> Any:
    """Dataclasses as dicts; nan, which JSON has not, as null."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    if isinstance(values, Mapping):
        return {str(k): as_json(v) for k, v in values.items()}
    if isinstance(values, (list, tuple)):
        return [as_json(v) for v in values]
    if isinstance(values, Path):
        return str(values)
    return None if isinstance(values, float) and math.isnan(values) else values
