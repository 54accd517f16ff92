"""Where tokens come from: the sources of a run, opened and checked, and how their sequences are numbered.

A corpus is a stream of documents in a fixed order. It is cut into sequences of equal stride, or sequences are put
together from its documents. Several corpora may be mixed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import rng
from . import documents, encode, manifest, sequences, tokenizer, tokens
from .config import SYNTHETIC_TOKENS, DataConfig, From, Part, Source, length, periods, stride
from .documents import Faults
from .errors import DataError
from .masking import Special
from .order import passes, quotas
from .tokenizer import Tokenizer
from .tokens import Shard, Stream

SOURCES = ("stdlib", "synthetic", *documents.KINDS, "megatron", "tokens")
HASHED = 32 << 20  # arrays over twice this are hashed by their first and last HASHED bytes
IN_MEMORY = 256 << 20  # bytes of text that are tokenised when a run starts; more has to be packed first


def synthetic(cfg: DataConfig, begin: int, ordinary: int) -> Tensor:
    """The tokens of a sequence of the source that is a hash."""
    state = rng.fold(torch.tensor(cfg.seed), rng.site_number("data/synthetic"))
    bits = rng.fold(state, begin + torch.arange(length(cfg)))
    return (bits & 0x7FFFFFFFFFFFFFFF) % ordinary


# ------------------------------------------------------------------------------------------------ opening


def open_source(cfg: DataConfig) -> Source:
    """Find, check and map the corpora. Raises DataError in one line when they cannot serve the run."""
    _check(cfg)
    given = cfg.mix or (From(cfg.source, cfg.paths, cfg.field, cfg.dtype),)
    mine = tokenizer.load(cfg.tokenizer)
    special, faults = _special(cfg, mine, given), Faults(cfg.bad == "skip")
    parts: list[Part] = []
    apart: list[Part] = []
    notes: list[str] = []
    for f in given:
        train, held = _open(replace(cfg, stride=0), f, mine, faults, notes)
        parts.append(train)
        apart += [held] if held else []
    if cfg.valid_paths:
        kind = given[0].source if given[0].source not in ("stdlib", "synthetic") else "text"
        whole = replace(cfg, split="blocks", validation=0.0)
        part, _ = _open(whole, replace(given[0], source=kind, paths=cfg.valid_paths), mine, faults, notes)
        apart = [part]
    apart = [_all_held_out(cfg, part) for part in apart]
    continues = None
    if cfg.objective == "masked" and cfg.masking.unit == "word":
        continues = torch.from_numpy(mine.continues())
        continues = torch.cat([continues, torch.zeros(max(0, special.ordinary - len(continues)) + 8, dtype=torch.bool)])
    notes += [f"data: {n:,} documents left out: {why}" for why, n in sorted(faults.counts.items()) if why != "empty"]
    if faults.counts["empty"]:
        notes.append(f"data: {faults.counts['empty']:,} documents are empty")
    digest = parts[0].hash
    if len(parts) > 1 or apart:
        digest = hashlib.sha256("".join(p.hash for p in [*parts, *apart]).encode()).hexdigest()
    source = Source(cfg, tuple(parts), tuple(apart), quotas(given, parts), special, continues, digest, tuple(notes))
    _check_size(source, given)
    return source


def _check(cfg: DataConfig) -> None:
    for name in [f.source for f in cfg.mix] or [cfg.source]:
        if name not in SOURCES:
            raise DataError(f"data.source: {name!r} is unknown; the sources are {', '.join(SOURCES)}")
    if not 0 <= cfg.validation < 1:
        raise DataError(f"data.validation: {cfg.validation} must be a fraction from 0 to below 1")
    masked = cfg.objective == "masked"
    shortest = 5 if masked else 1
    if cfg.seq < shortest:
        raise DataError(f"data.seq: {cfg.seq} is too short for a {cfg.objective} model; use at least {shortest}")
    if masked and (cfg.document_mask or cfg.packing == "best-fit"):
        what = "data.document_mask" if cfg.document_mask else "data.packing: best-fit"
        raise DataError(f"{what}: is for causal models; a masked one reads a document a sequence with packing: none")
    if cfg.chat and masked:
        raise DataError("data.chat: is for causal models")
    if cfg.stride and (masked or cfg.stride > cfg.seq):
        raise DataError(f"data.validation.stride: {cfg.stride}; is at most data.seq ({cfg.seq}), for causal models")


def _special(cfg: DataConfig, mine: Tokenizer, given: Sequence[From]) -> Special:
    """The ids that a masked model's marks have: the tokenizer's, or four that follow the bytes."""
    first = mine.size if {f.source for f in given} != {"synthetic"} else cfg.vocab - len(tokenizer.BERT)
    if cfg.objective == "causal":
        return Special(0, 0, 0, 0, cfg.vocab)
    if first < 1:
        raise DataError(f"model.vocab: {cfg.vocab} leaves no ordinary ids beside {', '.join(tokenizer.BERT)}")
    if cfg.tokenizer == "bytes":
        return Special(first, first + 1, first + 2, first + 3, first)
    tokenizer.check_vocab(mine, cfg.vocab, cfg.objective)
    pad, cls, sep, mask = (mine.special[name] for name in tokenizer.BERT)
    return Special(pad, cls, sep, mask, mine.size)


def _open(cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults, notes: list[str]) -> tuple[Part, Part | None]:
    """A corpus, and what is held out of it by document."""
    name = f"{f.source} ({', '.join(f.paths)})" if f.paths else f.source
    if f.source == "synthetic":
        digest = hashlib.sha256(f"synthetic {_special(cfg, mine, [f]).ordinary}".encode()).hexdigest()
        return _part(cfg, name, None, digest, 0), None
    if f.source in ("megatron", "tokens"):
        shards = [_token_shard(cfg, f, path, mine, notes) for path in _prefixes(f)]
        eos = cfg.eos if type(cfg.eos) is int else _eos_of(shards)
        made = tokens.stream([s for s, _ in shards], eos=eos)
        if cfg.packing != "concat" or cfg.document_mask:
            sequences_need_documents(made)
        known = sum(m.words for _, m in shards if m is not None)
        return _part(cfg, name, made, _sampled_hash(made), known), None
    if mine.name == "bytes":
        needed = 256 + (len(tokenizer.BERT) if cfg.objective == "masked" else 0)
        made, held, words = _byte_streams(cfg, f, mine, faults)
        _check_bytes(cfg, made, needed)
    else:
        tokenizer.check_vocab(mine, cfg.vocab, cfg.objective)
        made, held, words = _tokenised(cfg, f, mine, faults)
    part = _part(cfg, name, made, _hash(made), words[0])
    return part, (_part(cfg, name, held, _hash(held), words[1]) if held is not None else None)


def sequences_need_documents(made: Stream) -> None:
    """Raises DataError where nothing tells where the documents of a stream begin."""
    for shard in made.shards:
        tokens.edges(shard, 0, min(1, shard.tokens.size), made.eos)


def _part(cfg: DataConfig, name: str, made: Stream | None, digest: str, words: int) -> Part:
    if cfg.packing == "concat" or made is None:
        overlap = length(cfg) - stride(cfg)
        total = max(0, (made.tokens if made else SYNTHETIC_TOKENS) - overlap)
        n = total // stride(cfg)
        bins, dropped = None, total - n * stride(cfg)
    else:
        put = sequences.best_fit if cfg.packing == "best-fit" else sequences.one_by_one
        bins = put(made, stride(cfg), 1 if cfg.objective == "causal" else 0)
        n, dropped = bins.sequences, 0
    split = cfg.split == "blocks" and not cfg.valid_paths
    period, held = periods(cfg if split else replace(cfg, validation=0.0), n)
    valid = n // period * held + max(0, n % period - (period - held))
    return Part(name, made, bins, n - valid, valid, period, held, dropped, digest, words)


def _all_held_out(cfg: DataConfig, part: Part) -> Part:
    """A corpus of which nothing is trained on, in overlapping windows if these are asked for: the last one may reach
    past the end, so that every token but the first is predicted once."""
    n, dropped = part.train + part.valid, part.dropped
    if cfg.stride and part.stream is not None:
        n, dropped = 1 + max(0, -(-(part.stream.tokens - 1 - cfg.seq) // cfg.stride)), 0
    stride = cfg.stride if part.stream is not None else 0
    return replace(part, train=0, valid=n, held=0, dropped=dropped, bins=None if stride else part.bins, stride=stride)


def _check_size(source: Source, given: Sequence[From]) -> None:
    cfg = source.cfg
    for part in source.parts:
        if part.train == 0 and len(source.parts) > 1:
            raise DataError(f"data.mix: {part.name} has no sequence of data.seq {cfg.seq} to train on; leave it out")
    if source.train < cfg.batch:
        where = f" ({', '.join(cfg.paths)})" if cfg.paths else ""
        raise DataError(
            f"data.batch: {cfg.batch} sequences a step, but the {source.tokens:,} tokens of "
            f"source {cfg.source!r}{where} make only {source.train:,} training sequences of "
            f"data.seq {cfg.seq} (and {source.valid:,} held out); add data, or lower data.batch or data.seq"
        )
    for f, part, times in zip(given, source.parts, passes(source, cfg.steps * cfg.batch), strict=True):
        if f.epochs is not None and times > f.epochs:
            raise DataError(
                f"data.mix: {part.name} would be read {times:.2f} times in {cfg.steps:,} steps, but its epochs is "
                f"{f.epochs:g}; lower its weight or run.steps, or raise it"
            )


# ------------------------------------------------------------------------------------------------ texts


def _by_share(cfg: DataConfig, share: float) -> bool:
    return cfg.split == "documents" and not cfg.valid_paths and share < cfg.validation


def _records(cfg: DataConfig, f: From, faults: Faults) -> Iterable[tuple[str, Iterable[tuple[str, Any]]]]:
    if f.source == "stdlib":
        for where, content in documents.stdlib():
            yield where, [(where, content)]
        return
    key = f.field or ("messages" if cfg.chat else "text")
    for path in documents.files(f.paths, f.source):
        yield path, documents.records(f.source, path, key, faults)


def _byte_streams(
    cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults
) -> tuple[Stream, Stream | None, tuple[int, int]]:
    """Bytes as tokens, with a 0 between documents unless `data.eos` is false; plain files are mapped."""
    gap = 0 if cfg.eos is False else 1
    shards: tuple[list[Shard], list[Shard]] = ([], [])
    words = [0, 0]
    whole = cfg.split == "blocks" or bool(cfg.valid_paths)
    if f.source == "text" and whole and not cfg.chat and not cfg.stride:
        for path in documents.files(f.paths, f.source):
            if "://" in path or path.endswith((".gz", ".zst")):
                ((_, content),) = documents.records("text", path, "", faults)
                array: Any = np.frombuffer(content, np.uint8)
            else:
                array = _map(path)
            faults.counts["empty"] += not array.size
            shards[0].append(Shard(path, array, np.zeros(1, np.int64)))
        return tokens.stream(shards[0], gap), None, (0, 0)
    for path, found in _records(cfg, f, faults):
        texts: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
        for d in encode.encode(found, mine, None, None, cfg.chat, faults):
            held_out = _by_share(cfg, d.share)
            texts[held_out].append(d)
            words[held_out] += d.words
        for side, of_it in enumerate(texts):
            shards[side].append(_flat(path, of_it, "u1", gap))
    held = None if whole else tokens.stream(shards[1], gap)
    return tokens.stream(shards[0], gap), held, (words[0], words[1])


def _map(path: str) -> Any:
    try:
        return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.zeros(0, np.uint8)
    except OSError as e:
        raise DataError(f"data.path: {path!r} cannot be read: {e.strerror}") from e


def _tokenised(
    cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults
) -> tuple[Stream, Stream | None, tuple[int, int]]:
    """Texts tokenised now, into memory."""
    bos, eos = (tokenizer.token(mine, asked, what) for asked, what in ((cfg.bos, "bos"), (_words(cfg.eos), "eos")))
    sides: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
    size = 0
    for _, found in _records(cfg, f, faults):
        for d in encode.encode(found, mine, bos, eos, cfg.chat, faults):
            sides[_by_share(cfg, d.share)].append(d)
            size += d.size
            if size > IN_MEMORY:
                raise DataError(
                    f"data.path: more than {IN_MEMORY >> 20} MiB of text; tokenise it once, with `dtrain data pack "
                    f"'{' '.join(f.paths)}' OUT tokenizer={cfg.tokenizer}`, and use source: megatron, path: OUT"
                )
    kind = manifest.dtype_for(mine.size)
    train, held = (tokens.stream([_flat(f.source, side, kind, 0)], eos=eos) for side in sides)
    words = (sum(d.words for d in sides[0]), sum(d.words for d in sides[1]))
    return train, (held if cfg.split == "documents" and not cfg.valid_paths else None), words


def _words(asked: bool | str | int) -> bool | str:
    if type(asked) is int:
        raise DataError(f"data.eos: {asked}; a number is for source: tokens; give true, false or a token's name")
    return asked  # type: ignore[return-value]


def _flat(name: str, found: Sequence[encode.Encoded], dtype: str, gap: int) -> Shard:
    """Documents one after another in one array, `gap` zeros between them."""
    found = [d for d in found if d.ids.size]
    sizes = np.array([d.ids.size + gap for d in found], np.int64)
    starts = np.cumsum(sizes) - sizes
    flat = np.zeros(max(0, int(sizes.sum()) - gap), dtype)
    learn = np.ones(len(flat), np.uint8) if any(d.learn is not None for d in found) else None
    for at, d in zip(starts.tolist(), found, strict=True):
        flat[at : at + d.ids.size] = d.ids
        if learn is not None and d.learn is not None:
            learn[at : at + d.ids.size] = d.learn
    return Shard(name, flat, starts, learn=learn)


def _check_bytes(cfg: DataConfig, made: Stream, needed: int) -> None:
    # Ids outside the model's table would be silent zeros or a device assert far from the cause.
    if cfg.vocab < needed:
        highest = max((int(s.tokens.max()) for s in made.shards), default=0)
        extra = f" and {', '.join(tokenizer.BERT)}" if needed > 256 else ""
        raise DataError(
            f"model.vocab: {cfg.vocab} is smaller than the {needed} ids of the byte tokeniser "
            f"(256 bytes{extra}; the highest id in the data is {highest}); set at least {needed}"
        )


# ------------------------------------------------------------------------------------------------ token files


def _prefixes(f: From) -> list[str]:
    if f.source == "tokens":
        return documents.files(f.paths, f.source)
    found = []
    for path in f.paths:
        stem = path.removesuffix(".idx").removesuffix(".bin")
        matches = documents.files([f"{stem}.idx"], f.source) if "*" in stem else [stem]
        found += [m.removesuffix(".idx") for m in matches]
    if not found:
        raise DataError(f"data.path: source {f.source!r} needs the name that its .bin and .idx have in common")
    return list(dict.fromkeys(found))


def _token_shard(
    cfg: DataConfig, f: From, path: str, mine: Tokenizer, notes: list[str]
) -> tuple[Shard, manifest.Manifest | None]:
    about = manifest.read(path) if f.source == "megatron" else None
    if about is not None:
        manifest.check(path, about)
    shard = tokens.open_megatron(path) if f.source == "megatron" else tokens.open_array(path, f.dtype)
    if about is not None:
        if about.highest >= cfg.vocab:
            raise DataError(
                f"model.vocab: {cfg.vocab} is smaller than what {path} needs: its highest id is {about.highest:,}, its "
                f"tokenizer {about.tokenizer} has {about.vocab:,} ids; set at least {about.highest + 1:,}"
            )
        if cfg.tokenizer != "bytes" and mine.hash != about.tokenizer_hash:
            raise DataError(
                f"data.tokenizer: {cfg.tokenizer!r} is not the one that {path} was packed with ({about.tokenizer})"
            )
    elif cfg.tokenizer != "bytes":
        tokenizer.check_vocab(mine, cfg.vocab, cfg.objective)
    tokens.look(shard, cfg.vocab)
    return shard, about


def _eos_of(shards: Sequence[tuple[Shard, manifest.Manifest | None]]) -> int | None:
    found = {m.eos for _, m in shards if m is not None}
    return found.pop() if len(found) == 1 else None


def _hash(made: Stream) -> str:
    h = hashlib.sha256()
    for s in made.shards:
        d = s.tokens
        h.update(d.size.to_bytes(8, "big"))
        most = HASHED // d.itemsize
        for part in (d,) if d.size <= 2 * most else (d[:most], d[-most:]):
            h.update(np.ascontiguousarray(part).data)
    return h.hexdigest()


def _sampled_hash(made: Stream) -> str:
    """Of sizes and of SAMPLES places in each file: it does not take longer for a larger corpus."""
    h = hashlib.sha256()
    for s in made.shards:
        h.update(s.tokens.size.to_bytes(8, "big"))
        for first in range(0, s.tokens.size, max(1, s.tokens.size // tokens.SAMPLES)):
            h.update(np.ascontiguousarray(s.tokens[first : first + 1024]).data)
    return h.hexdigest()
