"""Writing a checkpoint: all ranks fill `step-N.tmp/`, it is verified, and becomes `step-N/`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dtrain.checkpoint.folder import Record, latest
from dtrain.checkpoint.manifest import digest, problems, write_manifest
from dtrain.checkpoint.tensors import (
    CheckpointError,
    Fetch,
    Part,
    Piece,
    everyone,
    plan_writes,
    write_metadata,
    write_part,
)

T = TypeVar("T")
_SHARED = "run.folder must be on a disk that all nodes share"


def save(
    folder: Path,
    record: Record,
    mine: Mapping[str, Piece],
    rank: int = 0,
    world: int = 1,
    group: Any = None,
    fetch: Fetch | None = None,
) -> Path:
    """Write a checkpoint, on all ranks at once; returns its folder.

    With `fetch` the pieces' own tensors only say what is to come (on `meta`): it gives each by name, one at a time.
    If anything fails, the unfinished folder is removed, older checkpoints stay, and CheckpointError is raised on every
    rank.
    """
    final = folder / f"step-{record.step}"
    temporary = folder / f"step-{record.step}.tmp"
    try:
        _begin(final, temporary, rank, world, group)
        plan, metadata = plan_writes(mine, rank, world, group)
        part, failure = _attempt(lambda: write_part(temporary, plan, fetch or (lambda name: mine[name].tensor)))
        parts = _gathered((part, failure), rank, world, group)

        def finish() -> None:
            assert metadata is not None
            publish(final, temporary, metadata, _whole(parts), record)

        _first_rank(finish, rank, world, group)
    except CheckpointError as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        last = latest(folder)
        kept = "there is no older one" if last is None else f"the last good one is {folder / f'step-{last}'}"
        raise CheckpointError(f"no checkpoint of step {record.step}: {error}; {kept}") from error
    return final


def _begin(final: Path, temporary: Path, rank: int, world: int, group: Any) -> None:
    """Make the folder that all ranks write to."""

    def make() -> None:
        if final.exists():
            raise CheckpointError(f"{final} exists already and is not overwritten")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    _first_rank(make, rank, world, group)
    seen = everyone(temporary.is_dir(), group, world)
    if not all(seen):
        raise CheckpointError(f"rank {seen.index(False)} does not see {temporary}, which rank 0 made: {_SHARED}")


def publish(final: Path, temporary: Path, metadata: Metadata, parts: Sequence[Part], record: Record) -> None:
    """What one rank does when all parts are on disk: what says where tensors are, the record, the manifest; a look at
    all of it; the rename. Raises OSError or CheckpointError."""
    write_metadata(temporary, metadata, parts)
    with open(temporary / "run.json", "w", encoding="utf-8") as file:
        json.dump(asdict(record), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    files = {name: d for part in parts for name, d in part.files.items()}
    write_manifest(temporary, files | {name: digest(temporary / name) for name in (".metadata", "run.json")})
    if wrong := problems(temporary, content=False):  # each rank has read back the content of its own
        raise CheckpointError(f"{temporary}: {wrong[0]}; {_SHARED}")
    _sync(temporary)
    os.rename(temporary, final)
    _sync(final.parent)


def _whole(parts: Sequence[tuple[Part | None, str | None]]) -> list[Part]:
    """The parts of all ranks. Raises CheckpointError naming the first rank that could not write its own."""
    for rank, (_, failure) in enumerate(parts):
        if failure is not None:
            raise CheckpointError(f"rank {rank}: {failure}" if len(parts) > 1 else failure)
    return [part for part, _ in parts if part is not None]


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What work gives, or why it failed."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return None, f"{name}{error.strerror or error}"


def _first_rank(work: Callable[[], None], rank: int, world: int, group: Any) -> None:
    """Done by one rank; its failure is everyone's."""
    failure = _attempt(work)[1] if rank == 0 else None
    failure = everyone(failure, group, world)[0]
    if failure is not None:
        raise CheckpointError(failure)


def _gathered(value: Any, rank: int, world: int, group: Any) -> list[Any]:
    """What each rank gave, on the first one."""
    if world == 1:
        return [value]
    out: list[Any] = [None] * world
    dist.gather_object(value, out if rank == 0 else None, group=group, group_dst=0)
    return out


def _sync(folder: Path) -> None:
    """Make renames and new names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
