"""Where tokens come from: files read as bytes, the standard library's own sources, or a hash.

A token is a byte, so the vocabulary is 256; a masked model's four extra ids follow it. A corpus is one
stream: documents in a fixed order with a 0 byte between them, cut into sequences of equal stride.
Shape suffixes: B rows of a batch, L tokens of a sequence.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import rng

Bytes = npt.NDArray[np.uint8]

SOURCES = ("stdlib", "text", "jsonl", "synthetic")
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")  # ids source.specials + 0..3, for masked models only
STDLIB_BYTES = 16_000_000
SYNTHETIC_TOKENS = 1 << 40
HASHED = 32 << 20  # documents over twice this are hashed by their first and last HASHED bytes
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SEPARATOR = np.zeros(1, np.uint8)


class DataError(ValueError):
    """The data cannot serve the run; the message is one line for a person."""


@dataclass(frozen=True)
class DataConfig:
    """What to read. `seq` is tokens a sequence, `batch` sequences a step over all ranks, `vocab` the model's
    real vocabulary, `validation` the fraction of sequences held out, `paths` files or globs (text, jsonl)."""

    source: str
    seq: int
    batch: int
    vocab: int
    seed: int = 0
    paths: tuple[str, ...] = ()
    objective: Literal["causal", "masked"] = "causal"
    validation: float = 0.05


@dataclass(frozen=True)
class Source:
    """An open corpus: `documents` with their `starts` in the stream of `tokens` tokens (none for synthetic).

    The stream is cut into `train + valid` sequences; the `dropped` tokens at its end do not fill one.
    `specials` is the first id that no document holds. `hash` names the content, for checking a resumed run.
    """

    cfg: DataConfig
    documents: tuple[Bytes, ...]
    starts: npt.NDArray[np.int64]
    tokens: int
    train: int
    valid: int
    dropped: int
    specials: int
    hash: str


def stride(cfg: DataConfig) -> int:
    """Tokens from one sequence to the next: `seq`, or what [CLS] A [SEP] B [SEP] leaves of it."""
    return cfg.seq if cfg.objective == "causal" else cfg.seq - 3


def length(cfg: DataConfig) -> int:
    """Tokens that a sequence reads: one more than `seq` for a causal model, whose labels are shifted by one
    before the cut, so that no label is lost at the seams."""
    return cfg.seq + 1 if cfg.objective == "causal" else cfg.seq - 3


def periods(cfg: DataConfig, sequences: int) -> tuple[int, int]:
    """(period, held): the last `held` sequences of every `period` are for validation.

    At most 16 contiguous blocks spread over the corpus, so that the held-out text resembles the rest, and
    fewer in a small one, where blocks of a few sequences would round the fraction coarsely."""
    if cfg.validation == 0:
        return max(sequences, 1), 0
    blocks = max(1, min(16, int(sequences * min(cfg.validation, 1 - cfg.validation) / 4)))
    period = max(1, sequences // blocks)
    return period, max(1, round(period * cfg.validation))


def open_source(cfg: DataConfig) -> Source:
    """Find, check and map the corpus. Raises DataError in one line when it cannot serve the run."""
    if cfg.source not in SOURCES:
        raise DataError(f"data.source: {cfg.source!r} is unknown; the sources are {', '.join(SOURCES)}")
    if not 0 <= cfg.validation < 1:
        raise DataError(f"data.validation: {cfg.validation} must be a fraction from 0 to below 1")
    masked = cfg.objective == "masked"
    shortest = 5 if masked else 1
    if cfg.seq < shortest:
        raise DataError(f"data.seq: {cfg.seq} is too short for a {cfg.objective} model; use at least {shortest}")
    if cfg.source == "synthetic":
        specials = cfg.vocab - len(SPECIALS) if masked else cfg.vocab
        if specials < 1:
            raise DataError(f"model.vocab: {cfg.vocab} leaves no ordinary ids beside {', '.join(SPECIALS)}")
        documents: tuple[Bytes, ...] = ()
        tokens, digest = SYNTHETIC_TOKENS, hashlib.sha256(f"synthetic {specials}".encode()).hexdigest()
    else:
        documents = tuple(d for d in _documents(cfg) if d.size)
        specials, tokens = 256, sum(d.size for d in documents) + max(0, len(documents) - 1)
        _check_vocab(cfg, documents, specials + (len(SPECIALS) if masked else 0))
        digest = _hash(documents)
    overlap = length(cfg) - stride(cfg)
    sequences = max(0, tokens - overlap) // stride(cfg)
    period, held = periods(cfg, sequences)
    valid = sequences // period * held + max(0, sequences % period - (period - held))
    source = Source(
        cfg,
        documents,
        np.cumsum([0] + [d.size + 1 for d in documents[:-1]], dtype=np.int64),
        tokens,
        sequences - valid,
        valid,
        max(0, tokens - overlap) - sequences * stride(cfg),
        specials,
        digest,
    )
    if source.train < cfg.batch:
        where = f" ({', '.join(cfg.paths)})" if cfg.paths else ""
        raise DataError(
            f"data.batch: {cfg.batch} sequences a step, but the {tokens:,} tokens of "
            f"source {cfg.source!r}{where} make only {source.train:,} training sequences of "
            f"data.seq {cfg.seq} (and {valid:,} held out); add data, or lower data.batch or data.seq"
        )
    return source


def read(source: Source, starts_B: Tensor) -> Tensor:
    """The tokens (int64, B x L) of the sequences that begin at these positions of the stream."""
    n = length(source.cfg)
    if source.cfg.source == "synthetic":
        state = rng.fold(torch.tensor(source.cfg.seed), rng.site_number("data/synthetic"))
        bits_BL = rng.fold(state, starts_B[:, None] + torch.arange(n))
        return (bits_BL & 0x7FFFFFFFFFFFFFFF) % source.specials
    out_BL = np.zeros((len(starts_B), n), np.int64)  # zeros: separators need no copying
    for row, start in zip(out_BL, starts_B.tolist(), strict=True):
        i = int(np.searchsorted(source.starts, start, side="right")) - 1
        while i < len(source.documents) and source.starts[i] < start + n:
            begin = int(source.starts[i]) - start
            piece = source.documents[i][max(0, -begin) : n - begin]
            row[max(0, begin) : max(0, begin) + piece.size] = piece
            i += 1
    return torch.from_numpy(out_BL)


def _documents(cfg: DataConfig) -> Iterable[Bytes]:
    if cfg.source == "stdlib":
        return _stdlib()
    return map(_map if cfg.source == "text" else _jsonl, _files(cfg))


def _files(cfg: DataConfig) -> list[str]:
    if not cfg.paths:
        raise DataError(f"data.path: source {cfg.source!r} needs a file or a glob such as corpus/**/*.txt")
    found: list[str] = []
    for path in cfg.paths:
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        files = [m for m in matches if os.path.isfile(m)]
        if not files:
            why = "is a folder; add a glob such as /**/*" if os.path.isdir(path) else "matches no file"
            raise DataError(f"data.path: {path!r} {why} (looked from {os.getcwd()})")
        found += files
    return list(dict.fromkeys(found))


def _map(path: str) -> Bytes:
    try:
        return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else _SEPARATOR[:0]
    except OSError as e:
        raise DataError(f"data.path: {path!r} cannot be read: {e.strerror}") from e


def _jsonl(path: str) -> Bytes:
    texts: list[bytes] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    texts.append(_text(line, f"{path}:{number}"))
    except OSError as e:
        raise DataError(f"data.path: {path!r} cannot be read: {e.strerror}") from e
    return np.frombuffer(b"\0".join(t for t in texts if t), np.uint8)


def _text(line: bytes, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as e:
        raise DataError(f'{where}: not JSON ({e}); each line must be like {{"text": "..."}}') from e
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no string under the key "text"; each line must be like {{"text": "..."}}')
    return text.encode("utf-8", "surrogatepass")


def _stdlib() -> Iterable[Bytes]:
    """The .py files of this Python, by relative path, up to STDLIB_BYTES. They differ between versions."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    left = STDLIB_BYTES
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        document = np.fromfile(path, np.uint8)[:left]
        left -= document.size
        yield document
    if left == STDLIB_BYTES:
        raise DataError(f"data.source: no .py files in {root}; use source: text with a path of your own")


def _check_vocab(cfg: DataConfig, documents: tuple[Bytes, ...], needed: int) -> None:
    # Ids outside the model's table would be silent zeros or a device assert far from the cause.
    if cfg.vocab < needed:
        highest = max((int(d.max()) for d in documents), default=0)
        extra = f" and {', '.join(SPECIALS)}" if needed > 256 else ""
        raise DataError(
            f"model.vocab: {cfg.vocab} is smaller than the {needed} ids of the byte tokeniser "
            f"(256 bytes{extra}; the highest id in the data is {highest}); set at least {needed}"
        )


def _hash(documents: tuple[Bytes, ...]) -> str:
    h = hashlib.sha256()
    for d in documents:
        h.update(d.size.to_bytes(8, "big"))
        for part in (d,) if d.size <= 2 * HASHED else (d[:HASHED], d[-HASHED:]):
            h.update(np.ascontiguousarray(part).data)
    return h.hexdigest()
