"""The folder of a run: which checkpoints it holds, and which of them a run goes on from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.checkpoint.manifest import problems
from dtrain.checkpoint.tensors import CheckpointError, everyone

FORMAT = 2  # 1 had no manifest.json
_STEP = re.compile(r"step-(\d+)")

# What makes a run the one it is. Where and how it is computed (mesh, rules, schedule, kernels, ...) is free, since none
# of that changes the mathematics or what is on disk; so is how long it goes on, and at what rate.
_SAME = ("model", "data", "run.seed", "run.precision", "optim.name")
# Of paths the content counts: of the data its hash, of a loaded model what it brought.
_FREE = (
    "model.vocab_pad", "model.load", "data.microbatch", "data.path", "data.max_documents", "data.validation.batches"
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself: the step that was done last, the layout, the hash of the data, how many
    updates were skipped (fp16), the last held-out loss, and where streams of data stand (`data.Reader.cursors`)."""

    step: int
    layout: dict[str, Any]
    data: str
    skipped: int = 0
    valid_loss: float | None = None
    cursors: list[dict[str, Any] | None] = field(default_factory=list)
    format: int = FORMAT


def steps(folder: Path) -> list[int]:
    """The steps with a checkpoint, whole or damaged, in order. Other names (`step-100.backup`) are somebody else's, and
    so is an empty folder: a checkpoint gets its name when it is complete."""
    if not folder.is_dir():
        return []
    found = [(_STEP.fullmatch(p.name), p) for p in folder.iterdir()]
    return sorted(int(m[1]) for m, p in found if m and p.is_dir() and not _empty(p))


def _empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:  # something, which may not be read
        return False


def latest(folder: Path) -> int | None:
    """The last step with a checkpoint, None without one."""
    return max(steps(folder), default=None)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a run's folder, and keep other runs out of it while open: two would write over each other's checkpoints.

    Raises CheckpointError where another process has it. A disk that knows no locks keeps nobody out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY) if os.name != "nt" else None
    except OSError as error:
        raise CheckpointError(f"run.folder {folder}: {error.strerror}") from error
    try:
        if handle is not None and _taken(handle):
            raise CheckpointError(
                f"run.folder {folder}: another run is still writing to it; wait for its end, or choose another one"
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _taken(handle: int) -> bool:
    import fcntl  # not on Windows

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


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


def candidates(folder: Path, asked: int | None = None) -> list[int]:
    """The steps that a run may go on from, the best first: all there are, the newest first; or, where `run.resume` asks
    for one, that one, after those that a run with the same `run.resume` has made since (so that the same command goes
    on where it was stopped)."""
    every = [step for step in reversed(steps(folder)) if step > 0]
    if asked is None:
        return every
    find(folder, asked)
    return [step for step in every if step > asked and _asked(folder / f"step-{step}") in (asked, None)] + [asked]


def _asked(path: Path) -> int | None:
    """The `run.resume` of the run that made a checkpoint: 0 where it had none, None where that cannot be read."""
    try:
        return int(json.loads((path / "run.json").read_text(encoding="utf-8"))["layout"]["run"].get("resume") or 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def choose(
    folder: Path, asked: int | None = None, rank: int = 0, world: int = 1, group: Any = None
) -> tuple[Record | None, list[str]]:
    """The record of the checkpoint that a run goes on from, None for a new run, and what to say to the user. Called by
    all ranks of `group`, which read a share of the files each; all get the same.

    It is the first of `candidates` that is whole. Newer ones, damaged or of another branch, are set aside: they would
    be in the way of this run's own. Raises CheckpointError where none is whole, or the one that is `asked` for is not.
    """
    seen = everyone(candidates(folder, asked), group, world)
    if any(other != seen[0] for other in seen):
        other = next(s for s in seen if s != seen[0])
        raise CheckpointError(
            f"run.folder {folder}: rank 0 finds {_names(seen[0])} there, another rank {_names(other)}; "
            "it must be on a disk that all nodes share"
        )
    damaged: dict[int, str] = {}
    for step in seen[0]:
        path = folder / f"step-{step}"
        found = _problems(path, rank, world, group)
        if not found:
            record = read(path)
            lines = [f"warning: {folder / f'step-{s}'} is damaged and skipped: {line}" for s, line in damaged.items()]
            return record, lines + _set_aside(folder, step, rank, world, group)
        damaged[step] = found[0]
    if asked is not None:
        raise CheckpointError(f"run.resume {asked}: {folder / f'step-{asked}'} is damaged: {damaged[asked]}")
    if damaged:
        every = "; ".join(f"step-{step}: {line}" for step, line in damaged.items())
        raise CheckpointError(
            f"{folder} has no checkpoint that is whole ({every}); repair one, or choose another run.folder"
        )
    return None, []


def verify(path: Path, rank: int = 0, world: int = 1, group: Any = None) -> None:
    """Raises CheckpointError on all ranks of `group` where a checkpoint is damaged; each reads a share of the files."""
    if found := _problems(path, rank, world, group):
        raise CheckpointError(f"{path} is damaged: {found[0]}")


def _problems(path: Path, rank: int, world: int, group: Any) -> list[str]:
    """What any rank finds wrong, the same on all."""
    return [line for lines in everyone(problems(path, True, rank, world), group, world) for line in lines]


def _names(steps: list[int]) -> str:
    return ", ".join(f"step-{s}" for s in steps) or "no checkpoint"


def _set_aside(folder: Path, step: int, rank: int, world: int, group: Any) -> list[str]:
    """Rename what is newer than `step`."""
    said: list[str] = []
    failure = None
    if rank == 0:
        try:
            for newer in [s for s in steps(folder) if s > step]:
                old = folder / f"step-{newer}"
                new = next(p for p in _aside(old) if not p.exists())
                os.rename(old, new)
                said.append(f"{old} is now {new.name}: the run goes on from step {step}")
        except OSError as error:
            failure = f"{error.filename} cannot be renamed: {error.strerror}"
    failure, said = everyone((failure, said), group, world)[0]
    if failure is not None:
        raise CheckpointError(failure)
    return said


def _aside(path: Path) -> Iterator[Path]:
    yield path.with_name(f"{path.name}.aside")
    yield from (path.with_name(f"{path.name}.aside-{n}") for n in range(2, 10**6))


def prune(folder: Path, step: int, last: int, every: int) -> list[str]:
    """Remove checkpoints older than `step`, which has just been written, all but the last ones (`last` with this one)
    and those of each `every`-th step (0: no such). Returns what could not be removed, and why.

    Damaged ones neither count nor go, nor does step 0, the weights that a run began with. A crash in between leaves a
    `step-N.tmp`, which the next call removes.
    """
    older = [s for s in steps(folder) if 0 < s < step and not problems(folder / f"step-{s}", content=False)]
    stay = {*older[max(0, len(older) - last + 1) :], *(s for s in older if every and s % every == 0)}
    failed = []
    for path in [folder / f"step-{old}" for old in older if old not in stay]:
        try:
            os.rename(path, path.with_suffix(".tmp"))
        except OSError as error:
            failed.append(f"{path} cannot be removed: {error.strerror}")
    for path in sorted(folder.glob("step-*.tmp")):
        if (m := _STEP.fullmatch(path.stem)) and int(m[1]) < step:
            try:
                shutil.rmtree(path)
            except OSError as error:
                failed.append(f"{path} cannot be removed: {error.strerror}")
    return failed


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Two layouts as nested dicts -> what forbids going on, and what merely changes: key -> `old -> new`."""
    old, new = flat(saved), flat(now)
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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted key; what is empty is left out."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        elif value not in ({}, [], ()):
            out[prefix + key] = value
    return out
