"""Files of tokens, memory-mapped: Megatron-LM's .bin/.idx, NumPy arrays, and raw arrays as nanoGPT writes them.

Opening one reads a header and a few samples, whatever its size; nothing is read before a batch needs it.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError

Ints = npt.NDArray[Any]  # of any integer type

# Megatron-LM's codes. 7 has been float64 and float32; the size of the .bin tells which.
DTYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_MAPPED = b"MMIDIDX\x00\x00"
_OLD = b"TNTIDX\x00\x00"
SAMPLES = 64  # places of a file that are looked at when it is opened
_LOOK = 1 << 14  # tokens looked at in each


@dataclass(frozen=True)
class Shard:
    """`tokens`, one array of `name`, in which documents begin at `starts / unit`, or, where `groups` has indices into
    `starts`, at these (Megatron-LM's sentences of a document). Without `starts` documents end at the token `eos`.
    `learn` is 0 where a token is no target of training."""

    name: str
    tokens: Ints
    starts: Ints | None = None
    unit: int = 1
    groups: Ints | None = None
    learn: Ints | None = None


@dataclass(frozen=True)
class Stream:
    """Shards one after another, with `gap` zeros between two of them; shard i begins at `offsets[i]`."""

    shards: tuple[Shard, ...]
    offsets: npt.NDArray[np.int64]
    tokens: int
    gap: int = 0
    eos: int | None = None


def stream(shards: Iterable[Shard], gap: int = 0, eos: int | None = None) -> Stream:
    """Shards as one stream; empty ones are left out."""
    kept = tuple(s for s in shards if s.tokens.size)
    ends = np.cumsum([0] + [s.tokens.size + gap for s in kept], dtype=np.int64)
    return Stream(kept, ends[:-1], max(0, int(ends[-1]) - gap), gap, eos)


def documents(shard: Shard) -> int | None:
    """How many documents a shard has, None where only the text tells."""
    if shard.groups is not None:
        return len(shard.groups) - 1
    return None if shard.starts is None else len(shard.starts)


def edges(shard: Shard, begin: int, end: int, eos: int | None = None) -> Ints:
    """Where documents begin, of the tokens begin..end-1 of a shard: int64, ascending."""
    if shard.starts is None:
        if eos is None:
            raise DataError(f"{shard.name} does not say where documents begin; set data.eos to the id that ends them")
        before = shard.tokens[max(0, begin - 1) : end - 1]
        found = np.flatnonzero(before == eos) + max(1, begin)
        return np.concatenate([[0], found]) if begin == 0 else found
    _check_whole(f"the index of {shard.name}", shard.starts)
    # Not np.searchsorted: it would copy the whole index, which is not aligned in the file.
    i, j = (bisect_left(shard.starts, n * shard.unit) for n in (begin, end))
    if shard.groups is None:
        found = shard.starts[i:j]
    else:
        i, j = (min(bisect_left(shard.groups, n), len(shard.groups) - 1) for n in (i, j))
        sentences = np.unique(shard.groups[i:j])
        found = shard.starts[sentences[sentences < len(shard.starts)]]
    found = found.astype(np.int64)
    if found.size and (found[0] < begin * shard.unit or found[-1] >= end * shard.unit or np.any(np.diff(found) < 0)):
        raise DataError(f"{shard.name}: its index is damaged: documents near token {begin:,} do not begin in order")
    return np.unique(found // shard.unit)


def read(source: Stream, begin: int, n: int, vocab: int) -> Ints:
    """n tokens (int64) from place `begin` of the stream. Raises DataError where an id is outside `vocab`."""
    out = np.zeros(n, np.int64)  # zeros: separators need no copying
    for shard, at, first, last in _parts(source, begin, n):
        piece = shard.tokens[first:last]
        check_ids(shard, piece, first, vocab)
        out[at : at + piece.size] = piece
    return out


def read_learn(source: Stream, begin: int, n: int) -> Ints | None:
    """Whether each of n tokens is a target of training (bool), or None where nothing says otherwise."""
    out = None
    for shard, at, first, last in _parts(source, begin, n):
        if shard.learn is not None:
            out = np.ones(n, bool) if out is None else out
            out[at : at + last - first] = shard.learn[first:last] != 0
    return out


def read_edges(source: Stream, begin: int, n: int) -> Ints:
    """Where documents begin among n tokens from place `begin`, counted from there."""
    found = [edges(s, first, last, source.eos) - first + at for s, at, first, last in _parts(source, begin, n)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _parts(source: Stream, begin: int, n: int) -> Iterable[tuple[Shard, int, int, int]]:
    """The shards that n tokens from `begin` lie in: shard, place among the n, first and last + 1 in the shard."""
    i = int(np.searchsorted(source.offsets, begin, side="right")) - 1
    while i < len(source.shards) and source.offsets[i] < begin + n:
        shard, here = source.shards[i], begin - int(source.offsets[i])
        first, last = max(0, here), min(here + n, shard.tokens.size)
        if first < last:
            _check_whole(shard.name, shard.tokens)
            yield shard, first - here, first, last
        i += 1


def _check_whole(name: str, array: Ints) -> None:
    """Raises DataError where the file under an array is shorter than when it was opened: reading past its end would
    kill the process without a word."""
    under: Any = array
    while isinstance(under, np.ndarray):
        under = under.base
    pages = getattr(under, "obj", None)
    if isinstance(pages, mmap.mmap) and pages.size() < len(pages):
        raise DataError(f"{name}: had {len(pages):,} bytes when the run started and has {pages.size():,} now")


def check_ids(shard: Shard, piece: Ints, first: int, vocab: int) -> None:
    """Raises DataError for an id that the model's table does not have; `first` is where the piece lies."""
    if piece.dtype.kind == "f" and (found := np.flatnonzero((piece != np.floor(piece)) | np.isinf(piece))).size:
        at = int(found[0])  # a fraction, or no number at all
        raise DataError(f"{shard.name}: token {first + at:,} is {piece[at]} ({piece.dtype}); token ids are whole")
    if piece.size and (piece.max() >= vocab or (piece.dtype.kind != "u" and piece.min() < 0)):
        bad = int(np.flatnonzero((piece >= vocab) | (piece < 0))[0])
        raise DataError(
            f"{shard.name}: token {first + bad:,} has id {int(piece[bad]):,}, but model.vocab is {vocab:,}; ids are "
            f"0 to {vocab - 1:,}: is it of another tokenizer, or data.dtype wrong?"
        )


def look(shard: Shard, vocab: int) -> int:
    """The highest id of a shard, of samples spread over it where it is large. Raises DataError as `check_ids`."""
    size, highest = shard.tokens.size, 0
    step = max(_LOOK, size // SAMPLES)
    for first in sorted({*range(0, size, step), max(0, size - _LOOK)}):
        piece = shard.tokens[first : first + _LOOK]
        check_ids(shard, piece, first, vocab)
        highest = max(highest, int(piece.max(initial=0)))
    return highest


def mapped(path: str | Path, dtype: Any) -> Ints:
    """A file as an array, mapped for reading here and there: without this advice the kernel reads ahead around every
    page that is touched, on some disks megabytes of it. Raises OSError."""
    if not os.path.getsize(path):
        return np.zeros(0, dtype)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype)


# ------------------------------------------------------------------------------------------------ plain arrays


def open_array(path: str, dtype: str) -> Shard:
    """A raw array of integers, or a .npy file, which says its own type. Raises DataError."""
    try:
        if path.endswith(".npy"):
            array = np.load(path, mmap_mode="r")
            if isinstance(array, np.memmap) and array.size:
                array = mapped(path, np.uint8)[array.offset :].view(array.dtype).reshape(array.shape)
        else:
            size, item = os.path.getsize(path), np.dtype(dtype).itemsize
            if size % item:
                raise DataError(
                    f"{path}: {size:,} bytes are no whole number of {dtype} ({item} bytes each): "
                    "the file is cut short, or data.dtype is another"
                )
            array = mapped(path, dtype)
    except (OSError, ValueError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"{path}: cannot be read as an array: {' '.join(str(e).split())}") from e
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path}: is {array.ndim}-dimensional {array.dtype}; a token file is one row of whole numbers")
    return Shard(path, array)


# ------------------------------------------------------------------------------------------------ Megatron-LM


def open_megatron(prefix: str) -> Shard:
    """PREFIX.bin with PREFIX.idx of either version, mapped; PREFIX.learn beside them, if it is there.
    Raises DataError naming the file, the offset, and what was expected and found."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise DataError(f"{path}: does not exist; Megatron data are a .bin and an .idx of one name")
    with open(index, "rb") as file:
        head = file.read(48)
    if head[:9] == _MAPPED:
        shard = _mapped(index, data, head)
    elif head[:8] == _OLD:
        shard = _old(index, data, head)
    else:
        raise DataError(f"{index}: at offset 0: is no Megatron index (begins with {head[:9]!r}, not {_MAPPED!r})")
    learn = Path(f"{prefix}.learn")
    if not learn.is_file():
        return shard
    if learn.stat().st_size != shard.tokens.size:
        raise DataError(f"{learn}: {learn.stat().st_size:,} bytes for the {shard.tokens.size:,} tokens of {data}")
    flags = mapped(learn, np.uint8)
    return Shard(shard.name, shard.tokens, shard.starts, shard.unit, shard.groups, flags)


def _mapped(index: Path, data: Path, head: bytes) -> Shard:
    if len(head) < 34:
        raise DataError(f"{index}: at offset {len(head)}: ends within its header of 34 bytes")
    version, code, sequences, groups = struct.unpack("<QBQQ", head[9:34])
    if version != 1:
        raise DataError(f"{index}: at offset 9: version {version}; this dtrain reads 1")
    sizes_at = 34
    starts_at = sizes_at + 4 * sequences
    groups_at = starts_at + 8 * sequences
    raw = _map(index, groups_at + 8 * groups)
    sizes = raw[sizes_at:starts_at].view("<i4")
    starts = raw[starts_at:groups_at].view("<i8")
    item = _item(index, 17, code)
    if code == 7 and sequences and _ends(starts, sizes, 8) == data.stat().st_size:
        item = np.dtype("f8")
    expected = _ends(starts, sizes, item.itemsize)
    tokens = _tokens(index, data, item, expected)
    for i in _some(sequences - 1):
        if int(starts[i]) + int(sizes[i]) * item.itemsize != int(starts[i + 1]) or sizes[i] < 0:
            raise DataError(
                f"{index}: at offset {starts_at + 8 * (i + 1)}: sequence {i + 1} begins at {int(starts[i + 1]):,}, "
                f"not at {int(starts[i]) + int(sizes[i]) * item.itemsize:,}, where the one before it ends"
            )
    found = raw[groups_at : groups_at + 8 * groups].view("<i8")
    _check_groups(index, found, sequences, groups_at)
    whole = groups == sequences + 1  # every sequence is a document
    return Shard(str(data), tokens, starts, item.itemsize, None if whole or not groups else found)


def _old(index: Path, data: Path, head: bytes) -> Shard:
    if len(head) < 48:
        raise DataError(f"{index}: at offset {len(head)}: ends within its header of 48 bytes")
    version, code, item_size, sequences, sizes, groups = struct.unpack("<6Q", head[8:] + _rest(index, 48, 8))
    if version != 1:
        raise DataError(f"{index}: at offset 8: version {version}; this dtrain reads 1")
    offsets_at = 56 + 8 * (sequences + 1)
    sizes_at = offsets_at + 8 * (sequences + 1)
    groups_at = sizes_at + 8 * sizes
    raw = _map(index, groups_at + 8 * groups)
    item = _item(index, 16, code)
    if item.kind == "f":  # 6 and 7 have been float32 and float64 either way round
        item = np.dtype(f"f{item_size}")
    if item.itemsize != item_size:
        raise DataError(f"{index}: at offset 24: {item_size} bytes a token, but its type {item} has {item.itemsize}")
    starts = raw[offsets_at:sizes_at].view("<i8")
    tokens = _tokens(index, data, item, int(starts[-1]) * item_size)
    found = raw[groups_at : groups_at + 8 * groups].view("<i8")
    _check_groups(index, found, sequences, groups_at)
    whole = groups == sequences + 1
    return Shard(str(data), tokens, starts[:-1], 1, None if whole or not groups else found)


def _rest(path: Path, offset: int, n: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        rest = file.read(n)
    if len(rest) < n:
        raise DataError(f"{path}: at offset {offset + len(rest)}: ends within its header of {offset + n} bytes")
    return rest


def _item(index: Path, offset: int, code: int) -> np.dtype[Any]:
    if code not in DTYPES:
        raise DataError(f"{index}: at offset {offset}: unknown type of token {code}; known are 1 to {max(DTYPES)}")
    return np.dtype(DTYPES[code])


def _map(index: Path, expected: int) -> npt.NDArray[np.uint8]:
    size = index.stat().st_size
    if size < expected:
        raise DataError(f"{index}: at offset {size:,}: ends, but its header promises {expected:,} bytes: cut short")
    return mapped(index, np.uint8)


def _ends(starts: Ints, sizes: Ints, item: int) -> int:
    return int(starts[-1]) + int(sizes[-1]) * item if len(starts) else 0


def _tokens(index: Path, data: Path, item: np.dtype[Any], expected: int) -> Ints:
    size = data.stat().st_size
    if size != expected:
        raise DataError(
            f"{data}: has {size:,} bytes, but {index.name} describes {expected:,} ({item}): "
            f"{'it is cut short' if size < expected else 'they do not belong together'}"
        )
    tokens = mapped(data, item)
    if item.kind == "f" and any(not float(tokens[i]).is_integer() for i in _some(tokens.size)):
        raise DataError(f"{data}: holds numbers with fractions ({item}); token ids are whole")
    return tokens


def _check_groups(index: Path, groups: Ints, sequences: int, at: int) -> None:
    if len(groups) and (int(groups[0]) != 0 or int(groups[-1]) > sequences):
        raise DataError(
            f"{index}: at offset {at}: documents run from sequence {int(groups[0])} to {int(groups[-1])}, "
            f"but there are {sequences}"
        )


def _some(n: int) -> Iterable[int]:
    """Up to 127 of the numbers below n, spread evenly: as many for a large file as for a small one."""
    return range(0, max(0, n), max(1, n // SAMPLES))


def write_index(path: Path, dtype: np.dtype[Any], sizes: Ints) -> None:
    """An .idx (MMIDIDX) of documents with these sizes in tokens, written in blocks; `sizes` may be mapped."""
    code = next(k for k, v in DTYPES.items() if np.dtype(v) == dtype)
    n, block = sizes.size, 1 << 20
    cuts = range(0, n, block)
    with open(path, "wb") as file:
        file.write(_MAPPED + struct.pack("<QBQQ", 1, code, n, n + 1))
        for i in cuts:
            file.write(sizes[i : i + block].astype("<i4").tobytes())
        at = 0
        for i in cuts:
            ends = at + np.cumsum(sizes[i : i + block], dtype=np.int64) * dtype.itemsize
            file.write(np.concatenate([[at], ends[:-1]]).astype("<i8").tobytes())
            at = int(ends[-1])
        for i in range(0, n + 1, block):
            file.write(np.arange(i, min(i + block, n + 1), dtype="<i8").tobytes())
