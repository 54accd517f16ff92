"""A rank's shards as pieces of global tensors, written and read by torch.distributed.checkpoint (DCP).

A tensor on disk is the global, unpadded one: no trace of ranks, padding or the order of dims. Copies are written
once. A tied parameter is stored under the name that it is tied to.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dtrain import storage
from dtrain.checkpoint.manifest import Digest, digest
from dtrain.program.interpret import Place, owned
from dtrain.program.lower import Program
from dtrain.program.update import State
from dtrain.strict import Allow, Differences, differences

Fetch = Callable[[str], Tensor]
STRICT = Allow()


class CheckpointError(Exception):
    """A checkpoint cannot be written or read; one line for a person."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor: `tensor` (a view of this rank's memory) begins at `offsets` in `shape`."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(program: Program, place: Place, state: State) -> dict[str, Piece]:
    """Everything a rank saves: `master/PATH`, `exp_avg/PATH`, `exp_avg_sq/PATH`, `updates`, and fp16's
    `loss_scale/scale` and `loss_scale/good_steps`. Pieces that are all padding are left out."""
    out = {}
    for i, (path, (s, _, _)) in enumerate(owned(program, place.units).items()):
        spans = storage.spans(s, place.mesh, place.at, len(s.steps))
        lengths = [p.stop - p.start for p in spans]
        if 0 in lengths:
            continue
        here = tuple(slice(0, n) for n in lengths)
        tensors = {
            "master": state.weights.masters[path],
            "exp_avg": state.moments.exp_avg[i],
            "exp_avg_sq": state.moments.exp_avg_sq[i],
        }
        for kind, t in tensors.items():
            out[f"{kind}/{s.param.tied_to or path}"] = Piece(t[here], tuple(p.start for p in spans), s.real)
    out["updates"] = Piece(state.moments.step, (), ())
    out |= {f"loss_scale/{k}": Piece(t, (), ()) for k, t in (state.scale or {}).items()}
    return out


def names(program: Program, scaled: bool) -> set[str]:
    """The tensors of a whole checkpoint, of all ranks together."""
    every = owned(program, range(program.job.layers + 2))
    paths = {s.param.tied_to or path for path, (s, _, _) in every.items()}
    out = {f"{kind}/{path}" for kind in ("master", "exp_avg", "exp_avg_sq") for path in paths} | {"updates"}
    return out | ({"loss_scale/scale", "loss_scale/good_steps"} if scaled else set())


@dataclass(frozen=True)
class Part:
    """What one rank wrote: its files, and where in them each tensor is, as DCP says it."""

    files: dict[str, Digest]
    results: list[WriteResult]


def plan_writes(
    mine: Mapping[str, Piece], rank: int = 0, world: int = 1, group: Any = None
) -> tuple[SavePlan, Metadata | None]:
    """What this rank writes of its pieces, so that of copies one is written, and on rank 0 what all tensors are.
    Called by all ranks of `group`; the same pieces, whatever is in them, give the same plan."""
    plan = local_plan(mine)
    if world == 1:
        (only,), every = global_plan([plan])
        return only, every
    plans: list[Any] = [None] * world
    dist.gather_object(plan, plans if rank == 0 else None, group=group, group_dst=0)
    shared, metadata = global_plan(plans) if rank == 0 else (None, None)
    out: list[Any] = [None]
    dist.scatter_object_list(out, shared, group=group, group_src=0)
    return out[0], metadata


def local_plan(mine: Mapping[str, Piece]) -> SavePlan:
    """All pieces that a rank has."""
    return _Writing(mine).create_local_plan()


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What each rank writes, so that of copies one is written, and what all tensors are."""
    shared, metadata = _Writing({}).create_global_plan(plans)
    return FileSystemWriter("").prepare_global_plan(shared), metadata  # which gives each rank's file its name


def write_part(path: Path, plan: SavePlan, fetch: Fetch, on_cpu: bool = False) -> Part:
    """Write this rank's tensors into a folder, flush them, and read them back. `fetch` gives one by its name; they may
    all be `on_cpu`. Raises CheckpointError. Talks to nobody, so any thread can call it."""
    files: dict[str, Digest] = {}
    # Copying ahead from a GPU uses the thread's current device, which only the main thread has set.
    writer = FileSystemWriter(path, per_thread_copy_ahead=0 if on_cpu else 10_000_000)
    writer.fs = _Hashing(files)
    planner = _Writing({}, fetch)
    with _in_one_line(f"{path} cannot be written"):
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        for name, written in files.items():
            if digest(path / name, from_disk=True) != written:
                raise CheckpointError(f"{path / name}: what is on the disk is not what was written to it")
    return Part(files, results)


def write_metadata(path: Path, metadata: Metadata, parts: Sequence[Part]) -> None:
    """DCP's `.metadata` of what all ranks wrote. Raises CheckpointError."""
    with _in_one_line(f"{path} cannot be written"):
        FileSystemWriter(path).finish(metadata, [part.results for part in parts])


class _Hashing(FileSystem):
    """Files that are hashed while they are written."""

    def __init__(self, files: dict[str, Digest]) -> None:
        self.files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
            self.files[Path(path).name] = Digest(hashing.count, hashing.sha256.hexdigest())


class _HashingStream:
    """The part of a file that DCP uses to write one from its beginning to its end."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.sha256, self.count = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.stream.write(data)
        self.count += len(data)
        return len(data)

    def tell(self) -> int:
        return self.count

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()


def restore(
    path: Path, mine: Mapping[str, Piece], wanted: Collection[str], group: Any, world: int, allow: Allow = STRICT
) -> Differences:
    """Fill the pieces of this rank. `wanted` are the tensors that the folder must hold, no more and no less, unless
    differences are allowed: pieces of tensors that it lacks stay as they are. Raises CheckpointError on all ranks."""
    shapes = {name: tuple(t.shape) for name, t in described(path).items()}
    own = {name: mine[name].shape if name in mine else shapes.get(name, ()) for name in wanted}
    here = differences(shapes, own)
    shaped = dict.fromkeys(fault for each in everyone(here.shaped, group, world) for fault in each)
    found = replace(here, shaped=tuple(shaped))
    if fault := found.refused(allow):
        raise CheckpointError(f"{path} is of another model: {fault}")
    failure = None
    try:
        read_pieces(path, {name: piece for name, piece in mine.items() if name in shapes})
    except CheckpointError as error:
        failure = str(error)
    failures = [f"rank {r}: {line}" for r, line in enumerate(everyone(failure, group, world)) if line]
    if failures:
        raise CheckpointError(failures[0] if world > 1 else str(failure))
    return found


def described(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on `meta`: their shapes and dtypes. Raises CheckpointError."""
    with _readable(path / ".metadata"):
        return {
            name: torch.empty(t.size, dtype=t.properties.dtype, device="meta")
            for name, t in _metadata(path).state_dict_metadata.items()
            if isinstance(t, TensorStorageMetadata)
        }


def open_tensors(path: Path) -> tuple[dict[str, tuple[int, ...]], Fetch]:
    """The shape of each tensor of a checkpoint, and what reads a whole one, in one process. Raises CheckpointError."""
    every, metadata = described(path), _metadata(path)

    def read(name: str) -> Tensor:
        whole = torch.empty_like(every[name], device="cpu")
        read_pieces(path, {name: Piece(whole, (0,) * whole.ndim, tuple(whole.shape))}, metadata)
        return whole

    return {name: tuple(t.shape) for name, t in every.items()}, read


def read_pieces(path: Path, mine: Mapping[str, Piece], metadata: Metadata | None = None) -> None:
    """Fill these pieces, whatever else the checkpoint holds, alone: other ranks may want others. Of what is on disk one
    tensor, as a rank wrote it, is in memory at a time. Raises CheckpointError."""
    metadata = metadata or _metadata(path)
    reader, planner = FileSystemReader(path), _Reading(False, False)
    with _readable(path):
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner(mine, metadata, is_coordinator=True)
        # Reading them all in one call would hold two at a time: the last one read, and the next.
        for item in planner.create_local_plan().items:
            reader.read_data(LoadPlan([item]), planner).wait()


def _metadata(path: Path) -> Metadata:
    with _readable(path / ".metadata"):
        return FileSystemReader(path).read_metadata()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Damaged files raise anything -> CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """DCP's errors -> CheckpointError. Its CheckpointException is a BaseException that holds each rank's own."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        rank, cause = next(((f"rank {r}: ", wrapped[0]) for r, wrapped in error.failures.items()), ("", error))
        raise CheckpointError(f"{what}: {rank}{_reason(cause)}") from error
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error
    except RuntimeError as error:  # torch.save's, when the write below it failed
        if not isinstance(error.__context__, OSError):
            raise
        raise CheckpointError(f"{what}: {_reason(error.__context__)}") from error


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


class _Writing(DefaultSavePlanner):
    """DCP's extension point for state that is not its own kinds of tensors."""

    def __init__(self, mine: Mapping[str, Piece], fetch: Fetch | None = None) -> None:
        super().__init__(False, False)
        self.mine, self.fetch = mine, fetch

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, torch.Size(p.offsets)),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(p), TensorProperties.create_from_tensor(p.tensor), torch.Size(p.shape)
                    ),
                )
                for name, p in self.mine.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert self.fetch is not None
        return self.fetch(index.fqn)


class _Reading(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        metadata: Metadata | None = self.metadata
        assert metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            have: Any = metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, have, [_chunk(piece)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece: Any = self.state_dict[index.fqn]
        tensor: Tensor = piece.tensor
        return tensor


def everyone(value: Any, group: Any, world: int) -> list[Any]:
    """What each rank of `group` gave."""
    if world == 1:
        return [value]
    out: list[Any] = [None] * world
    dist.all_gather_object(out, value, group=group)
    return out
