"""What `dtrain data pack` says of its output, in PREFIX.json: counts, checksums, and what it was made with."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from .errors import DataError

FORMAT = 1
_BLOCK = 1 << 16
_BLOCKS = 64


@dataclass(frozen=True)
class Manifest:
    """`files` by suffix: bytes, sha256 of all, and `quick`, of their size and up to 64 blocks spread over them, which
    a run compares when it starts. `left_out` are documents by reason."""

    tokenizer: str
    tokenizer_hash: str
    vocab: int
    dtype: str
    documents: int
    tokens: int
    words: int
    bytes: int
    highest: int
    bos: int | None
    eos: int | None
    chat: bool
    left_out: dict[str, int]
    files: dict[str, dict[str, str | int]]
    format: int = FORMAT


def dtype_for(vocab: int) -> str:
    """The smallest type of token that holds all ids below `vocab`: 16 bits up to 65,536, 32 above."""
    return "u2" if vocab <= 1 << 16 else "i4"


def read(prefix: str) -> Manifest | None:
    """PREFIX.json, None where there is none (other programs' data). Raises DataError."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] > FORMAT:
            raise DataError(f"{path}: has format {values['format']}; this dtrain reads up to {FORMAT}: update it")
        return Manifest(**values)
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"{path}: cannot be read as a manifest: {' '.join(str(e).split())}") from e


def write(prefix: str, made: Manifest) -> None:
    """Last of all and at once: where PREFIX.json is, the rest is complete."""
    path = Path(f"{prefix}.json")
    new = path.with_name(path.name + ".tmp")
    new.write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def about(path: Path) -> dict[str, str | int]:
    """What a manifest says of a file; reads all of it."""
    h = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            h.update(block)
    return {"bytes": path.stat().st_size, "sha256": h.hexdigest(), "quick": quick(path)}


def quick(path: Path) -> str:
    """A hash of a file's size and of blocks spread over it, the first and the last among them."""
    size = path.stat().st_size
    h = hashlib.sha256(str(size).encode())
    last = max(0, size - _BLOCK)
    with open(path, "rb") as file:
        for at in np.unique(np.linspace(0, last, _BLOCKS).astype(np.int64)).tolist():
            file.seek(at)
            h.update(file.read(_BLOCK))
    return h.hexdigest()


def check(prefix: str, made: Manifest, whole: bool = False) -> None:
    """Raises DataError where a file is not the one that the manifest describes: by size and samples, or `whole`."""
    for suffix, said in made.files.items():
        path = Path(prefix + suffix)
        if not path.is_file():
            raise DataError(f"{path}: does not exist, but {prefix}.json names it")
        size = path.stat().st_size
        if size != said["bytes"]:
            raise DataError(
                f"{path}: has {size:,} bytes; {prefix}.json says {said['bytes']:,}: it changed or is cut short"
            )
        same = about(path)["sha256"] == said["sha256"] if whole else quick(path) == said["quick"]
        if not same:
            raise DataError(f"{path}: is not what {prefix}.json describes: it changed since it was packed")
