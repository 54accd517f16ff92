"""Writing a checkpoint: all ranks fill `step-N.tmp/`, it is verified, and becomes `step-N/`.

Collectives are called on the main thread only, since their order must be the same on all ranks. What is written in the
background is therefore agreed on before and after; in between a rank's thread tells rank 0's by a file that its part is
done.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dtrain.checkpoint.folder import Record, latest, prune
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
from dtrain.hardware import show_size

T = TypeVar("T")
_SHARED = "run.folder must be on a disk that all nodes share"
_POLL_S, _FINISH_S = 0.05, 60.0


@dataclass(frozen=True)
class SaveConfig:
    """Where and how a run's checkpoints are written. `busy` says what a save does while an earlier one is still being
    written in the background: `wait` for it, or `skip` itself; None writes in the foreground. `keep` is (K, N): the
    last K and each N-th step stay (N 0: no such), None keeps all. Rank 0 waits `patience` seconds for the others."""

    folder: Path
    rank: int = 0
    world: int = 1
    group: Any = None
    busy: str | None = None
    keep: tuple[int, int] | None = None
    patience: float = 1800.0


@dataclass
class _Pending:
    """A checkpoint that is being written in the background."""

    record: Record
    final: Path
    temporary: Path
    thread: threading.Thread | None = None
    written: threading.Event = field(default_factory=threading.Event)  # this rank's part is, or has failed
    abandon: threading.Event = field(default_factory=threading.Event)  # another rank's has
    failure: str | None = None
    warnings: list[str] = field(default_factory=list)
    told: bool = False


class Saver:
    """Writes a run's checkpoints, one at a time. All ranks call the same methods, in the same order."""

    def __init__(self, cfg: SaveConfig) -> None:
        self.cfg = cfg
        self.pending: _Pending | None = None
        self.copies: dict[str, Tensor] = {}  # what the thread writes; kept, as new pinned memory is slow
        self.plan: tuple[SavePlan, Metadata | None] | None = None
        self.lines: list[tuple[int, str]] = []

    def save(self, record: Record, mine: Mapping[str, Piece], last: bool = False, fetch: Fetch | None = None) -> None:
        """Write a checkpoint of the pieces of all ranks, the same ones at each call. In the background this returns
        when they have been copied; the `last` one is in the foreground. Of an earlier one that is still being written
        it waits for the end, or leaves this one out.

        With `fetch` the pieces' own tensors only say what is to come (on `meta`): it gives each by name, one at a time.
        If anything failed, in an earlier save too, its unfinished folder is removed, older checkpoints stay, and
        CheckpointError is raised on every rank.
        """
        cfg = self.cfg
        if self.pending is not None and cfg.busy == "skip" and not last:
            busy = everyone(self.pending.thread is not None and self.pending.thread.is_alive(), cfg.group, cfg.world)
            if busy[0]:  # rank 0's thread is the last to end
                step = self.pending.record.step
                self.lines.append((record.step, f"not saved: step {step} is still being written"))
                return
        self.settle()
        final = cfg.folder / f"step-{record.step}"
        p = _Pending(record, final, final.with_suffix(".tmp"))
        with self._cleaning_up(p):
            _begin(p, cfg)
            self.plan = self.plan or plan_writes(mine, cfg.rank, cfg.world, cfg.group)
            if cfg.busy is None or last:
                fetch = fetch or (lambda name: mine[name].tensor)
                parts = _gathered(_attempt(lambda: self._write(p, fetch)), cfg)
                _first_rank(lambda: self._publish(p, parts), cfg)
                self._tell(p)
                return
        self._copy(record.step, mine)
        p.thread = threading.Thread(target=self._in_background, args=(p,), name="save", daemon=True)
        self.pending = p
        p.thread.start()

    def settle(self) -> None:
        """Wait for the save that is being written. Raises CheckpointError on every rank if it failed on one."""
        p, cfg = self.pending, self.cfg
        if p is None or p.thread is None:
            return
        with self._cleaning_up(p):
            p.written.wait()
            if any(everyone(p.failure, cfg.group, cfg.world)):
                p.abandon.set()
            p.thread.join()
            self.pending = None
            for failure in everyone(p.failure, cfg.group, cfg.world):
                if failure is not None:
                    raise CheckpointError(failure)
            self._tell(p)

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in the background has failed."""
        return self.pending is not None and self.pending.failure is not None

    def news(self) -> list[tuple[int, str]]:
        """What to tell since the last call: of which step, and what."""
        p = self.pending
        if p is not None and p.thread is not None and not p.thread.is_alive() and p.failure is None:
            self._tell(p)
        lines, self.lines = self.lines, []
        return lines

    def _tell(self, p: _Pending) -> None:
        if not p.told:
            p.told = True
            self.lines += [(p.record.step, line) for line in (f"saved {p.final}", *p.warnings)]

    @contextmanager
    def _cleaning_up(self, p: _Pending) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if self.cfg.rank == 0:
                shutil.rmtree(p.temporary, ignore_errors=True)
            left = _left(self.cfg.folder)
            raise CheckpointError(f"no checkpoint of step {p.record.step}: {error}; {left}") from error

    def _write(self, p: _Pending, fetch: Fetch, on_cpu: bool = False) -> Part:
        assert self.plan is not None
        return write_part(p.temporary, self.plan[0], fetch, on_cpu)

    def _publish(self, p: _Pending, parts: Sequence[tuple[Part | None, str | None]]) -> None:
        assert self.plan is not None and self.plan[1] is not None
        publish(p.final, p.temporary, self.plan[1], _whole(parts), p.record)
        if self.cfg.keep is not None:
            p.warnings += [f"warning: {line}" for line in prune(self.cfg.folder, p.record.step, *self.cfg.keep)]

    def _copy(self, step: int, mine: Mapping[str, Piece]) -> None:
        """Copy what this rank will write to the memory of the CPU: training changes it in place."""
        assert self.plan is not None
        parts = {name: mine[name].tensor for name in {item.index.fqn for item in self.plan[0].items}}
        if not self.copies:
            self.copies = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for name, t in parts.items()}
            size = show_size(sum(t.nbytes for t in parts.values()))
            self.lines.append((step, f"being written in the background, from a copy in CPU memory of {size} a rank"))
        for name, t in parts.items():
            self.copies[name].copy_(t, non_blocking=True)
        if any(t.is_cuda for t in parts.values()):
            torch.cuda.current_stream().synchronize()

    def _in_background(self, p: _Pending) -> None:
        try:
            part, failure = _attempt(lambda: self._write(p, self.copies.__getitem__, on_cpu=True))
            if self.cfg.rank:
                failure = _attempt(lambda: _leave(p.temporary, self.cfg.rank, (part, failure)))[1] or failure
            p.failure = failure
            p.written.set()
            if self.cfg.rank == 0 and failure is None:
                p.failure = _attempt(lambda: self._publish(p, [(part, None), *_collect(p, self.cfg)]))[1]
        except Exception as error:  # which this thread cannot raise
            p.failure = f"{type(error).__name__}: {error}"
        finally:
            p.written.set()


@contextmanager
def open_saver(cfg: SaveConfig) -> Iterator[Saver]:
    """A saver. If the run fails, what is being written in the background has a minute to become complete, which it does
    where all ranks have lived to write their parts."""
    saver = Saver(cfg)
    try:
        yield saver
    except Exception:
        if saver.pending is not None and saver.pending.thread is not None:
            saver.pending.thread.join(_FINISH_S)
        raise


def save(
    folder: Path,
    record: Record,
    mine: Mapping[str, Piece],
    rank: int = 0,
    world: int = 1,
    group: Any = None,
    fetch: Fetch | None = None,
) -> Path:
    """Write one checkpoint, as `Saver.save` does in the foreground; returns its folder."""
    Saver(SaveConfig(folder, rank, world, group)).save(record, mine, fetch=fetch)
    return folder / f"step-{record.step}"


def _left(folder: Path) -> str:
    last = latest(folder)
    return "there is no older one" if last is None else f"the last good one is {folder / f'step-{last}'}"


def _begin(p: _Pending, cfg: SaveConfig) -> None:
    """Make the folder that all ranks write to."""

    def make() -> None:
        if p.final.exists():
            raise CheckpointError(f"{p.final} exists already and is not overwritten")
        shutil.rmtree(p.temporary, ignore_errors=True)
        p.temporary.mkdir(parents=True)

    _first_rank(make, cfg)
    seen = everyone(p.temporary.is_dir(), cfg.group, cfg.world)
    if not all(seen):
        raise CheckpointError(f"rank {seen.index(False)} does not see {p.temporary}, which rank 0 made: {_SHARED}")


def _leave(temporary: Path, rank: int, part: tuple[Part | None, str | None]) -> None:
    """Tell rank 0's thread what this rank wrote, or why it could not."""
    new = temporary / f".part-{rank}.tmp"
    new.write_bytes(pickle.dumps(part))
    os.replace(new, temporary / f"part-{rank}")


def _collect(p: _Pending, cfg: SaveConfig) -> list[tuple[Part | None, str | None]]:
    """What the other ranks wrote, once they have. Raises CheckpointError where one does not."""
    out: list[tuple[Part | None, str | None]] = []
    end = time.monotonic() + cfg.patience
    for rank in range(1, cfg.world):
        file = p.temporary / f"part-{rank}"
        while not file.exists():
            if p.abandon.is_set() or time.monotonic() > end:
                raise CheckpointError(f"rank {rank} has not written its part (run.timeouts.save is {cfg.patience:g} s)")
            time.sleep(_POLL_S)
        out.append(pickle.loads(file.read_bytes()))
        file.unlink()
    return out


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


def _first_rank(work: Callable[[], None], cfg: SaveConfig) -> None:
    """Done by one rank; its failure is everyone's."""
    failure = _attempt(work)[1] if cfg.rank == 0 else None
    failure = everyone(failure, cfg.group, cfg.world)[0]
    if failure is not None:
        raise CheckpointError(failure)


def _gathered(value: T, cfg: SaveConfig) -> list[T]:
    """What each rank gave, on the first one."""
    if cfg.world == 1:
        return [value]
    out: list[Any] = [None] * cfg.world
    dist.gather_object(value, out if cfg.rank == 0 else None, group=cfg.group, group_dst=0)
    return out


def _sync(folder: Path) -> None:
    """Make renames and new names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
