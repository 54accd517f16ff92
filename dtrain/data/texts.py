"""Texts that are tokenised when a run starts: into memory, or mapped where their bytes are the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import documents, encode, manifest, tokenizer, tokens
from .config import DataConfig, From
from .documents import Faults
from .errors import DataError
from .tokenizer import Tokenizer
from .tokens import Shard, Stream

IN_MEMORY = 256 << 20  # bytes of text that are tokenised when a run starts; more has to be packed first
_SAMPLE = 1 << 20  # bytes of text that a refusal looks at


def _by_share(cfg: DataConfig, share: float) -> bool:
    return cfg.split == "documents" and not cfg.valid_paths and share < cfg.validation


def _records(cfg: DataConfig, f: From, faults: Faults) -> Iterable[tuple[str, Iterable[tuple[str, Any]]]]:
    if f.source == "stdlib":
        for where, content in documents.stdlib():
            yield where, [(where, content)]
        return
    key = f.field or ("messages" if cfg.chat else "text")
    for path in documents.files(f.paths, f.source):
        if f.source == "text" and not f.stream:  # a document, read at once
            _bounded(cfg, f, documents.size(path))
        yield path, documents.records(f.source, path, key, faults)


def marks(cfg: DataConfig, mine: Tokenizer) -> tuple[int | None, int | None]:
    """What begins and what ends each document."""
    return tokenizer.token(mine, cfg.bos, "bos"), tokenizer.token(mine, by_name(cfg.eos), "eos")


def highest(cfg: DataConfig, f: From, mine: Tokenizer) -> str:
    """What is said of the ids that the data really have, where the model's vocabulary is too small: of all of them, or
    of the first megabyte."""
    bos, eos = (None, None) if mine.name == "bytes" else marks(cfg, mine)
    faults, most, size = Faults(skip=True), 0, 0
    for path, found in _records(cfg, replace(f, stream=True), faults):
        if f.source == "text":
            with documents.opened(path) as file:
                found = [(path, file.read(_SAMPLE).decode("utf-8", "ignore"))]
        for d in encode.encode(found, mine, bos, eos, cfg.chat, faults):
            most, size = max(most, int(d.ids.max(initial=0))), size + d.size
            if size >= _SAMPLE:
                return f"the highest id in the first {size / 1e6:.1f} MB of the data is {most}"
    return f"the highest id in the data is {most}"


def byte_streams(
    cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults
) -> tuple[Stream, Stream | None, tuple[int, int]]:
    """Bytes as tokens, with a 0 between documents unless `data.eos` is false; plain files are mapped."""
    gap = 0 if marks(cfg, mine)[1] is None else 1
    shards: tuple[list[Shard], list[Shard]] = ([], [])
    words, size = [0, 0], 0
    whole = cfg.split == "blocks" or bool(cfg.valid_paths)
    if f.source == "text" and whole and not cfg.chat and not cfg.stride:
        for path in documents.files(f.paths, f.source):
            if "://" in path or path.endswith((".gz", ".zst")):
                ((_, content),) = documents.records("text", path, "", faults)
                array: Any = np.frombuffer(content, np.uint8)
                size = _bounded(cfg, f, size + array.size)
            else:
                array = _map(path)
            faults.counts["empty"] += not array.size
            shards[0].append(Shard(path, array, np.zeros(1, np.int64)))
        return tokens.stream(shards[0], gap), None, (0, 0)
    for path, found in _records(cfg, f, faults):
        texts: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
        for d in encode.encode(found, mine, None, None, cfg.chat, faults):
            size = _bounded(cfg, f, size + d.size)
            held_out = _by_share(cfg, d.share)
            texts[held_out].append(d)
            words[held_out] += d.words
        for side, of_it in enumerate(texts):
            shards[side].append(flat(path, of_it, "u1", gap))
    held = None if whole else tokens.stream(shards[1], gap)
    return tokens.stream(shards[0], gap), held, (words[0], words[1])


def _map(path: str) -> Any:
    try:
        return tokens.mapped(path, np.uint8)
    except OSError as e:
        raise DataError(f"data.path: {path!r} cannot be read: {e.strerror}") from e


def tokenised(
    cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults
) -> tuple[Stream, Stream | None, tuple[int, int]]:
    """Texts tokenised now, into memory."""
    bos, eos = marks(cfg, mine)
    sides: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
    size = 0
    for _, found in _records(cfg, f, faults):
        for d in encode.encode(found, mine, bos, eos, cfg.chat, faults):
            sides[_by_share(cfg, d.share)].append(d)
            size = _bounded(cfg, f, size + d.size)
    kind = manifest.dtype_for(mine.size)
    train, held = (tokens.stream([flat(f.source, side, kind, 0)], eos=eos) for side in sides)
    words = (sum(d.words for d in sides[0]), sum(d.words for d in sides[1]))
    return train, (held if cfg.split == "documents" and not cfg.valid_paths else None), words


def _bounded(cfg: DataConfig, f: From, size: int) -> int:
    """The bytes of text so far. Raises DataError where they are too many to be kept in memory."""
    if size > IN_MEMORY:
        raise DataError(
            f"data.path: more than {IN_MEMORY >> 20} MiB of text; tokenise it once, with `dtrain data pack "
            f"'{' '.join(f.paths)}' OUT tokenizer={cfg.tokenizer}`, and use source: megatron, path: OUT; "
            "or read it as the run goes on, with stream: true"
        )
    return size


def by_name(asked: bool | str | int) -> bool | str:
    if type(asked) is int:
        raise DataError(f"data.eos: {asked}; a number is for source: tokens; give true, false or a token's name")
    return asked  # type: ignore[return-value]


def flat(name: str, found: Sequence[encode.Encoded], dtype: str, gap: int) -> Shard:
    """Documents one after another in one array, `gap` zeros between them."""
    found = [d for d in found if d.ids.size]
    sizes = np.array([d.ids.size + gap for d in found], np.int64)
    starts = np.cumsum(sizes) - sizes
    out = np.zeros(max(0, int(sizes.sum()) - gap), dtype)
    learn = np.ones(len(out), np.uint8) if any(d.learn is not None for d in found) else None
    for at, d in zip(starts.tolist(), found, strict=True):
        out[at : at + d.ids.size] = d.ids
        if learn is not None and d.learn is not None:
            learn[at : at + d.ids.size] = d.learn
    return Shard(name, out, starts, learn=learn)
