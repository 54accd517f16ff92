"""The folder of a run: `step-200/` appears when it is complete, and nothing else in the folder is touched."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.checkpoint.tensors import CheckpointError, Fetch, Piece, everyone, files, write

FORMAT = 1
_STEP = re.compile(r"step-(\d+)")

# What makes a run the one it is. Where and how it is computed (mesh, rules, schedule, kernels, ...) is free, since none
# of that changes the mathematics or what is on disk; so is how long it goes on, and at what rate.
_SAME = ("model", "data", "run.seed", "run.precision", "optim.name")
# Of paths the content counts: of the data its hash, of a loaded model what it brought.
_FREE = ("model.vocab_pad", "model.load", "data.microbatch", "data.path", "data.validation.batches")


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself: the step that was done last, the layout, the hash of the data, how many
    updates were skipped (fp16) and the last held-out loss."""

    step: int
    layout: dict[str, Any]
    data: str
    skipped: int = 0
    valid_loss: float | None = None
    format: int = FORMAT


def steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint, in order. Other names (`step-100.backup`) are somebody else's."""
    if not folder.is_dir():
        return []
    found = [(_STEP.fullmatch(p.name), p) for p in folder.iterdir()]
    return sorted(int(m[1]) for m, p in found if m and (p / "run.json").is_file())


def latest(folder: Path) -> int | None:
    """The last step with a complete checkpoint, None without one."""
    return max(steps(folder), default=None)


def find(folder: Path, step: int) -> Path:
    """The checkpoint of a step. Raises CheckpointError naming the steps there are."""
    there = steps(folder)
    if step not in there:
        has = f"has {', '.join(f'step-{s}' for s in there)}" if there else "has no checkpoint"
        raise CheckpointError(f"{folder / f'step-{step}'} does not exist; {folder} {has}")
    return folder / f"step-{step}"


def read(path: Path) -> Record:
    """A checkpoint's record. Raises CheckpointError."""
    try:
        values = json.loads((path / "run.json").read_text(encoding="utf-8"))
        if values["format"] > FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; this dtrain reads up to {FORMAT}: update it")
        return Record(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / 'run.json'} cannot be read: {' '.join(str(error).split())}") from error


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Two layouts as nested dicts -> what forbids going on, and what merely changes: key -> `old -> new`."""
    old, new = _flat(saved), _flat(now)
    forbidden: dict[str, str] = {}
    changed: dict[str, str] = {}
    for key in sorted({**old, **new}):
        was, is_ = old.get(key), new.get(key)
        if was != is_:
            free = _starts(key, _FREE) or not _starts(key, _SAME)
            (changed if free else forbidden)[key] = f"{_show(was)} -> {_show(is_)}"
    return forbidden, changed


def _starts(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == s or key.startswith(s + ".") for s in sections)


def _show(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{key}.")
        elif value not in ({}, [], ()):
            out[prefix + key] = value
    return out


def save(
    folder: Path,
    record: Record,
    mine: Mapping[str, Piece],
    rank: int = 0,
    world: int = 1,
    group: Any = None,
    fetch: Fetch | None = None,
) -> Path:
    """Write a checkpoint, on all ranks at once; returns its folder. `fetch` is that of `write`.

    It is written as `step-N.tmp` and renamed when every rank's part is on disk. If anything fails, the unfinished
    folder is removed, older checkpoints stay, and CheckpointError is raised on every rank.
    """
    final = folder / f"step-{record.step}"
    temporary = folder / f"step-{record.step}.tmp"

    def first_rank(work: Callable[[], None]) -> None:
        """Done by one rank; its failure is everyone's."""
        failure = None
        if rank == 0:
            try:
                work()
            except (OSError, CheckpointError) as error:
                failure = str(error) if isinstance(error, CheckpointError) else f"{final}: {error.strerror or error}"
        failure = everyone(failure, group, world)[0]
        if failure is not None:
            raise CheckpointError(failure)

    def begin() -> None:
        if final.exists():
            raise CheckpointError(f"{final} exists already and is not overwritten")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        missing = sorted(f for f in files(temporary) if not (temporary / f).is_file())
        if missing:
            raise CheckpointError(
                f"{temporary} lacks {missing[0]}, which another rank wrote: run.folder must be on a disk "
                "that all nodes share"
            )
        with open(temporary / "run.json", "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        os.rename(temporary, final)
        _sync(folder)

    try:
        first_rank(begin)
        write(temporary, mine, group, world, fetch)
        first_rank(finish)
    except CheckpointError as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        last = latest(folder)
        kept = "there is no older one" if last is None else f"the last good one is {folder / f'step-{last}'}"
        raise CheckpointError(f"no checkpoint of step {record.step}: {error}; {kept}") from error
    return final


def _sync(folder: Path) -> None:
    """Make renames and new names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
