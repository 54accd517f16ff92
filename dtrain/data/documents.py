"""Documents out of files: plain text, JSON lines, parquet and Arrow, compressed or not, here or at a URL."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DataError, need

KINDS = ("text", "jsonl", "parquet", "arrow")
STDLIB_BYTES = 16_000_000
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SUFFIXES = {".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_OTHER = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar", ".tgz")  # would be read as text


@dataclass(frozen=True)
class Faults:
    """What to do with a document that cannot be used: an error, or (`skip`) leave it out and count it by reason."""

    skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)


def fault(faults: Faults, reason: str, message: str, cause: Exception | None = None) -> None:
    """Raises DataError, or counts the reason."""
    if not faults.skip:
        raise DataError(f"{message}; mend it, or leave such documents out with data.bad: skip") from cause
    faults.counts[reason] += 1


def kind_of(path: str) -> str:
    """A file's kind, by its name without .gz or .zst: `text` for any that is not known."""
    stem = path.removesuffix(".gz").removesuffix(".zst")
    return "arrow" if is_saved_dataset(path) else _SUFFIXES.get(os.path.splitext(stem)[1], "text")


def is_saved_dataset(path: str) -> bool:
    """Whether a folder is a dataset that Hugging Face's `save_to_disk` wrote."""
    return os.path.isfile(f"{path}/state.json") or os.path.isfile(f"{path}/dataset_dict.json")


def files(paths: Iterable[str], source: str) -> list[str]:
    """The files that paths, globs and URLs name, each once, a glob's in the order of their names. Raises DataError."""
    found: list[str] = []
    for path in paths:
        if "://" in path:
            matches = _remote(path)
        elif is_saved_dataset(path):
            matches = _saved(path)
        elif os.path.isdir(path) and source in _SUFFIXES.values():
            # Not plain .json: in a dataset's folder these tell about it.
            inside = sorted(glob.glob(f"{glob.escape(path)}/**/*", recursive=True))
            matches = [m for m in inside if kind_of(m) == source and not m.endswith(".json")]
        else:
            matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        kept = [m for m in matches if "://" in m or os.path.isfile(m)]
        if not kept:
            why = "matches no file"
            if os.path.isdir(path):
                folder = source in _SUFFIXES.values()
                why = f"holds no {source} file" if folder else "is a folder; add a glob such as /**/*"
            raise DataError(f"data.path: {path!r} {why} (looked from {os.getcwd()})")
        found += kept
    if not found:
        raise DataError(f"data.path: source {source!r} needs a file or a glob such as corpus/**/*.txt")
    for path in found:
        if source in KINDS and path.endswith(_OTHER):
            raise DataError(f"{path}: is packed in a way that is not read; unpack it, or pack it as .gz or .zst")
    once: dict[str, str] = {}
    for path in found:
        once.setdefault(path if "://" in path else os.path.realpath(path), path)  # links may go round in a circle
    return list(once.values())


def size(path: str) -> int:
    """Bytes of a file here, -1 of one at a URL. Raises DataError where it is not there."""
    if "://" in path:
        return -1
    try:
        return os.path.getsize(path)
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from e


def _remote(path: str) -> list[str]:
    fsspec = need("fsspec", f"data.path {path!r}")
    try:
        system, _, names = fsspec.get_fs_token_paths(path)
        return [system.unstrip_protocol(n) for n in sorted(names) if system.isfile(n)]
    except Exception as e:  # of whichever library reads this kind of URL
        raise DataError(f"data.path: {path!r} cannot be reached: {_reason(e)}") from e


def _reason(e: Exception) -> str:
    """What an exception says, on one line."""
    return (e.strerror if isinstance(e, OSError) else None) or " ".join(str(e).split())[:300] or type(e).__name__


def _saved(folder: str) -> list[str]:
    file = Path(folder, "dataset_dict.json")
    if file.is_file():
        splits = _json(file, "splits")
        raise DataError(
            f"data.path: {folder!r} holds the splits {', '.join(splits)}; give one, as {folder}/{splits[0]}"
        )
    state = Path(folder, "state.json")
    if _json(state, "_indices_files", needed=False):
        raise DataError(f"data.path: {folder!r} was saved with an index of its own; save flatten_indices() of it")
    names = [f"{folder}/{f['filename']}" for f in _json(state, "_data_files")]
    missing = [n for n in names if not os.path.isfile(n)]
    if missing:
        raise DataError(f"{missing[0]}: does not exist, but {folder}/state.json names it")
    return names


def _json(file: Path, key: str, needed: bool = True) -> Any:
    """What a saved dataset's file says under a key."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found[key] if needed else found.get(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{file}: is not what save_to_disk writes: {type(e).__name__}: {_reason(e)}") from e


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """A file as plain bytes, .gz and .zst unpacked. Raises DataError if it cannot be read or is damaged."""
    try:
        start: Any = need("fsspec", path).open if "://" in path else open
        with start(path, "rb") as file:
            if path.endswith(".gz"):
                yield gzip.GzipFile(fileobj=file)
            elif path.endswith(".zst"):
                zstandard = need("zstandard", path)
                yield io.BufferedReader(_Zst(zstandard, file))
            else:
                yield file
    except DataError:
        raise
    except Exception as e:
        # Libraries of object stores raise exceptions of their own.
        if "://" not in path and not isinstance(e, (OSError, EOFError, zlib.error)):
            raise
        raise DataError(f"{path}: cannot be read: {_reason(e)}") from e


class _Zst(io.RawIOBase):
    """A zstd stream as a file, of any window (`zstd --long=31`); unlike the library's own reader it tells a file that
    was cut short."""

    def __init__(self, module: Any, file: Any) -> None:
        self.file, self.module = file, module
        self.unpack = self._frame()
        self.left = b""
        self.begun = False

    def _frame(self) -> Any:
        return self.module.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            data = self.unpack.unused_data if self.unpack.eof else b""
            if self.unpack.eof:  # several frames may follow each other
                self.unpack, self.begun = self._frame(), False
            data = data or self.file.read(1 << 16)
            if not data:
                if self.begun:
                    raise EOFError("the compressed file ends early")
                return 0
            self.begun = True
            try:
                self.left = self.unpack.decompress(data)
            except self.module.ZstdError as e:
                raise OSError(f"damaged zstd data: {e}") from e
        n = min(len(buffer), len(self.left))
        buffer[:n], self.left = self.left[:n], self.left[n:]
        return n


def records(kind: str, path: str, key: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    """The documents of a file with their places (`corpus.jsonl:17`): bytes of a text file, otherwise what is under
    `key`, a string or, for chats, a list. Raises DataError."""
    if kind == "text":
        with opened(path) as file:
            yield path, file.read()
    elif kind == "jsonl":
        yield from _jsonl(path, key, faults)
    else:
        yield from _columns(kind, path, key, faults)


def _jsonl(path: str, key: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    example = f'each line must be like {{"{key}": "..."}}'
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as e:  # nested a thousand times, as no document is
                what = "not UTF-8" if isinstance(e, UnicodeDecodeError) else "not JSON"
                fault(faults, what, f"{where}: {what} ({e}); {example}", e)
                continue
            value = record.get(key) if isinstance(record, dict) else None
            if isinstance(value, (str, list)):
                yield where, value
            elif isinstance(record, dict) and key not in record:
                has = ", ".join(map(repr, list(record)[:8])) or "none"
                message = f"{where}: has no key {key!r}; its keys are {has} (data.field chooses one)"
                fault(faults, f"no {key!r}", message)
            else:
                fault(faults, f"no {key!r}", f'{where}: no string under the key "{key}"; {example}')


def _columns(kind: str, path: str, key: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    pyarrow = need("pyarrow", path)
    with opened(path) as file:
        try:
            if kind == "parquet":
                table = need("pyarrow.parquet", path).ParquetFile(file)
                names = table.schema_arrow.names
                batches = table.iter_batches(1024, columns=[key] if key in names else [])
            else:
                names, batches = _arrow(pyarrow, file)
            if key not in names:
                raise DataError(f"{path}: has no column {key!r}; it has {', '.join(names)}: choose one with data.field")
            row = 0
            for batch in batches:
                for value in batch.column(key):
                    row += 1
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as e:
                        fault(faults, "not UTF-8", f"{path}: row {row}: not UTF-8 ({e})", e)
                        continue
                    if isinstance(text, (str, bytes, list)):
                        yield f"{path}: row {row}", text
                    else:
                        holds = "is null" if text is None else f"holds {type(text).__name__}"
                        fault(faults, f"no {key!r}", f"{path}: row {row}: column {key!r} {holds}, not a text")
        except pyarrow.ArrowException as e:
            raise DataError(f"{path}: is no {kind} file, or damaged: {' '.join(str(e).split())[:200]}") from e


def _arrow(pyarrow: Any, file: Any) -> tuple[list[str], Iterable[Any]]:
    """Columns and batches of an Arrow stream, as Hugging Face writes them, or file."""
    try:
        stream = pyarrow.ipc.open_stream(file)
        return stream.schema.names, stream
    except pyarrow.ArrowInvalid:
        file.seek(0)
        whole = pyarrow.ipc.open_file(file)
        return whole.schema.names, (whole.get_batch(i) for i in range(whole.num_record_batches))


def stdlib() -> Iterator[tuple[str, bytes]]:
    """The .py files of this Python, by relative path, up to STDLIB_BYTES. They differ between versions."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    left = STDLIB_BYTES
    for path in sorted(found, key=lambda p: p.relative_to(root).as_posix()):
        content = path.read_bytes()[:left]
        left -= len(content)
        yield str(path), content
    if left == STDLIB_BYTES:
        raise DataError(f"data.source: no .py files in {root}; use source: text with a path of your own")
