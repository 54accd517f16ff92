"""What is on disk is what was written: the size and the SHA-256 of every file of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

NAME = "manifest.json"
# Read whole even where only sizes are looked at: they are small, and say what the other files are.
_SMALL = ("run.json", ".metadata")


@dataclass(frozen=True)
class Digest:
    """A file's size and the SHA-256 of its content, in hex."""

    bytes: int
    sha256: str


def digest(path: Path, from_disk: bool = False) -> Digest:
    """Read a file through; OSError where that fails. Other threads run meanwhile. `from_disk` reads what is there, not
    what is left in memory of writing it (a hint, which systems follow once the file is flushed)."""
    with open(path, "rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = hashlib.file_digest(file, "sha256")
        return Digest(file.tell(), found.hexdigest())


def write_manifest(path: Path, files: Mapping[str, Digest]) -> None:
    """The last file of a checkpoint, flushed. It has a sum of its own entries too."""
    entries = {name: asdict(d) for name, d in sorted(files.items())}
    with open(path / NAME, "w", encoding="utf-8") as file:
        json.dump({"files": entries, "sha256": _sum(entries)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Digest]:
    """Raises OSError, or another Exception where the text is not what was written."""
    values = json.loads((path / NAME).read_text(encoding="utf-8"))
    if values["sha256"] != _sum(values["files"]):
        raise ValueError("its entries are not what was written")
    return {name: Digest(**d) for name, d in values["files"].items()}


def _sum(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def problems(path: Path, content: bool = True, rank: int = 0, world: int = 1) -> list[str]:
    """What is wrong with a checkpoint's folder, one line each, which begins with the file; none where it is whole.

    Without `content` only names and sizes are looked at, and the small files. Of `world` ranks that ask together each
    reads its share of the content. A checkpoint of format 1 has no manifest: its files must be there and long enough.
    """
    try:
        if not (path / NAME).exists() and _format(path) < 2:
            return _without_manifest(path)
        files = read_manifest(path)
    except OSError as error:
        return [f"{Path(error.filename or path).name} {_reason(error)}"]
    except Exception as error:  # damaged text is anything
        return [f"{NAME if (path / NAME).exists() else 'run.json'} cannot be read: {_reason(error)}"]
    found = []
    for i, (name, want) in enumerate(files.items()):
        try:
            have = os.stat(path / name).st_size
            if have != want.bytes:
                found.append(f"{name} has {have:,} bytes and had {want.bytes:,} when it was written")
            elif (name in _SMALL or (content and i % world == rank)) and digest(path / name) != want:
                found.append(f"{name} is not what was written: its SHA-256 differs")
        except OSError as error:
            found.append(f"{name} {_reason(error)}")
    return found


def _format(path: Path) -> int:
    return int(json.loads((path / "run.json").read_text(encoding="utf-8"))["format"])


def _without_manifest(path: Path) -> list[str]:
    """Of format 1."""
    try:
        metadata = FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    except OSError as error:
        return [f".metadata {_reason(error)}"]
    except Exception as error:  # a damaged pickle raises anything
        return [f".metadata cannot be read: {_reason(error)}"]
    found = []
    for name, end in sorted(ends.items()):
        try:
            if (have := os.stat(path / name).st_size) < end:
                found.append(f"{name} has {have:,} bytes and had at least {end:,} when it was written")
        except OSError as error:
            found.append(f"{name} {_reason(error)}")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "it is truncated or damaged"
    return " ".join(str(error).split())[:120] or type(error).__name__
