"""Where tokens come from: the sources of a run, opened and checked, and how their sequences are numbered.

A corpus is a stream of documents in a fixed order. It is cut into sequences of equal stride, or sequences are put
together from its documents. Several corpora may be mixed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .. import rng
from . import documents, manifest, sequences, texts, tokenizer, tokens
from .config import SYNTHETIC_TOKENS, DataConfig, From, Part, Source, Texts, length, periods, stride
from .documents import Faults
from .errors import DataError
from .masking import Special, Words
from .order import passes, quotas
from .tokenizer import Tokenizer
from .tokens import Shard, Stream

TOKENS = ("megatron", "tokens")
SOURCES = ("stdlib", "synthetic", *documents.KINDS, *TOKENS)
HASHED = 32 << 20  # arrays over twice this are hashed by their first and last HASHED bytes


def synthetic(cfg: DataConfig, begin: int, ordinary: int) -> Tensor:
    """The tokens of a sequence of the source that is a hash."""
    state = rng.fold(torch.tensor(cfg.seed), rng.site_number("data/synthetic"))
    bits = rng.fold(state, begin + torch.arange(length(cfg)))
    return (bits & 0x7FFFFFFFFFFFFFFF) % ordinary


# ------------------------------------------------------------------------------------------------ opening


def open_source(cfg: DataConfig) -> Source:
    """Find, check and map the corpora. Raises DataError in one line when they cannot serve the run."""
    _check(cfg)
    given = cfg.mix or (From(cfg.source, cfg.paths, cfg.field, cfg.dtype, cfg.stream),)
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
        held_out = replace(given[0], source=kind, paths=cfg.valid_paths, stream=False)
        apart = [_open(whole, held_out, mine, faults, notes)[0]]
        both = {os.path.realpath(p) for f in given for p in _files(f)}
        notes += [f"data: {p} is held out, and trained on too" for p in _files(held_out) if os.path.realpath(p) in both]
    apart = [all_held_out(cfg, part) for part in apart]
    words = None
    if cfg.objective == "masked" and any(f.source != "synthetic" for f in given):
        size = max(cfg.vocab, mine.size + len(tokenizer.BERT))
        known = (torch.from_numpy(f) for f in (mine.continues(), mine.ends()))
        words = Words(*(torch.cat([f, torch.zeros(size - len(f), dtype=torch.bool)]) for f in known))
    notes += [f"data: documents left out ({why}): {n:,}" for why, n in sorted(faults.counts.items()) if n]
    digest = parts[0].hash
    if len(parts) > 1 or apart:
        digest = hashlib.sha256("".join(p.hash for p in [*parts, *apart]).encode()).hexdigest()
    source = Source(cfg, tuple(parts), tuple(apart), quotas(given, parts), special, words, digest, tuple(notes))
    _check_size(source, given)
    return source


def _check(cfg: DataConfig) -> None:
    for name in [f.source for f in cfg.mix] or [cfg.source]:
        if name not in SOURCES:
            raise DataError(f"data.source: {name!r} is unknown; the sources are {', '.join(SOURCES)}")
    for f in cfg.mix or [From(cfg.source, stream=cfg.stream)]:
        if f.stream and f.source not in documents.KINDS:
            raise DataError(f"data.stream: is for texts ({', '.join(documents.KINDS)}), not for source {f.source!r}")
        if f.stream and f.epochs is not None:
            raise DataError("data.mix.epochs: how long a source with stream: true is, nobody knows; leave epochs out")
        if f.stream and cfg.validation and not cfg.valid_paths:
            raise DataError(
                "data.validation: nothing can be held out of what is read as the run goes on; give files of their own, "
                "validation: {path: ...} (dtrain data pack --hold-out makes some), or fraction: 0"
            )
    if not 0 <= cfg.validation < 1:
        raise DataError(f"data.validation: {cfg.validation} must be a fraction from 0 to below 1")
    masked = cfg.objective == "masked"
    shortest = 5 if masked else 1
    if cfg.seq < shortest:
        raise DataError(f"data.seq: {cfg.seq} is too short for a {cfg.objective} model; use at least {shortest}")
    if masked and (cfg.document_mask or cfg.packing == "best-fit"):
        what = "data.document_mask" if cfg.document_mask else "data.packing: best-fit"
        raise DataError(f"{what}: is for causal models; a masked one reads a document a sequence with packing: none")
    if len(cfg.mix) > len(set(twice := [(f.source, f.paths, f.field) for f in cfg.mix])):
        again = next(f for f, key in zip(cfg.mix, twice, strict=True) if twice.count(key) > 1)
        raise DataError(f"data.mix: {name_of(again)} is listed twice; list it once, with the weight of both")
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
    _check_vocab(cfg, given[0], mine)
    pad, cls, sep, mask = (mine.special[name] for name in tokenizer.BERT)
    return Special(pad, cls, sep, mask, mine.size)


def name_of(f: From) -> str:
    """How messages call a source."""
    more = f" and {len(f.paths) - 3} more" if len(f.paths) > 3 else ""
    return f"{f.source} ({', '.join(f.paths[:3])}{more})" if f.paths else f.source


def _open(cfg: DataConfig, f: From, mine: Tokenizer, faults: Faults, notes: list[str]) -> tuple[Part, Part | None]:
    """A corpus, and what is held out of it by document."""
    name = name_of(f)
    if f.source == "synthetic":
        digest = hashlib.sha256(f"synthetic {_special(cfg, mine, [f]).ordinary}".encode()).hexdigest()
        return cut(cfg, name, None, digest, 0), None
    if f.stream:
        return _streamed(cfg, f, mine, name), None
    if f.source in TOKENS:
        shards = [_token_shard(cfg, f, path, mine, notes) for path in _prefixes(f)]
        eos = cfg.eos if type(cfg.eos) is int else _eos_of(shards)
        made = tokens.stream([s for s, _ in shards], eos=eos)
        if cfg.packing != "concat" or cfg.document_mask:
            sequences_need_documents(made)
        known = sum(m.words for _, m in shards if m is not None)
        return cut(cfg, name, made, _sampled_hash(made), known), None
    _check_vocab(cfg, f, mine)
    of_it = texts.byte_streams if mine.name == "bytes" else texts.tokenised
    made, held, words = of_it(cfg, f, mine, faults)
    part = cut(cfg, name, made, _hash(made), words[0])
    return part, (cut(cfg, name, held, _hash(held), words[1]) if held is not None else None)


def _streamed(cfg: DataConfig, f: From, mine: Tokenizer, name: str) -> Part:
    """Texts that are read as the run goes on. Their names, sizes and beginnings tell whether they are the same."""
    _check_vocab(cfg, f, mine)
    bos, eos = texts.marks(cfg, mine)
    files = documents.files(f.paths, f.source)
    sizes = [documents.size(path) for path in files]
    h = hashlib.sha256(f"stream {f.source} {mine.hash}".encode())
    for path, n in zip(files, sizes, strict=True):
        h.update(f"{os.path.basename(path)} {n} ".encode())
        if n >= 0:
            with open(path, "rb") as file:
                h.update(file.read(1 << 12))
    key = f.field or ("messages" if cfg.chat else "text")
    if f.source == "text":  # a file is a document
        with documents.opened(files[0]) as file:
            file.read(1)
    else:
        # What is wrong with its first document is told now.
        next(iter(documents.records(f.source, files[0], key, Faults(cfg.bad == "skip"))), None)
    read = Texts(replace(f, field=key), tuple(files), tuple(sizes), mine, bos, eos)
    return Part(name, None, None, 0, 0, 1, 0, 0, h.hexdigest(), texts=read)


def _check_vocab(cfg: DataConfig, f: From, mine: Tokenizer) -> None:
    """Whether the model has an id for every token of a tokenizer. Raises DataError."""

    def highest() -> str:
        if f.source == "synthetic":
            return "the data are drawn from all of them"
        if f.source in TOKENS:
            found = [tokens.look(_opened(f, path), 1 << 62) for path in _prefixes(f)]
            return f"the highest id that was found in the data is {max(found, default=0)}"
        return texts.highest(cfg, f, mine)

    tokenizer.check_vocab(mine, cfg.vocab, cfg.objective, highest)


def sequences_need_documents(made: Stream) -> None:
    """Raises DataError where nothing tells where the documents of a stream begin."""
    for shard in made.shards:
        tokens.edges(shard, 0, min(1, shard.tokens.size), made.eos)


def cut(cfg: DataConfig, name: str, made: Stream | None, digest: str, words: int) -> Part:
    """A corpus in sequences, of which some are held out."""
    if cfg.packing == "concat" or made is None:
        overlap = length(cfg) - stride(cfg)
        total = max(0, (made.tokens if made else SYNTHETIC_TOKENS) - overlap)
        n = total // stride(cfg)
        bins, dropped = None, total - n * stride(cfg)
    else:
        shift = 1 if cfg.objective == "causal" else 0
        if cfg.packing == "best-fit":
            bins = sequences.best_fit(made, stride(cfg), shift, cfg.max_documents)
        else:
            bins = sequences.one_by_one(made, stride(cfg), shift)
        n, dropped = bins.sequences, 0
    split = cfg.split == "blocks" and not cfg.valid_paths
    period, held = periods(cfg if split else replace(cfg, validation=0.0), n)
    valid = n // period * held + max(0, n % period - (period - held))
    return Part(name, made, bins, n - valid, valid, period, held, dropped, digest, words)


def all_held_out(cfg: DataConfig, part: Part) -> Part:
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
        if part.train == 0 and len(source.parts) > 1 and not part.texts:
            raise DataError(f"data.mix: {part.name} has no sequence of data.seq {cfg.seq} to train on; leave it out")
    if source.train < cfg.batch and not source.streams:
        raise DataError(
            f"data.batch: {cfg.batch} sequences a step, but the {source.tokens:,} tokens of "
            f"{' and '.join(p.name for p in source.parts)} make only {source.train:,} training sequences of "
            f"data.seq {cfg.seq} (and {source.valid:,} held out); add data, or lower data.batch or data.seq"
        )
    for f, part, times in zip(given, source.parts, passes(source, cfg.steps * cfg.batch), strict=True):
        if f.epochs is not None and times > f.epochs:
            raise DataError(
                f"data.mix: {part.name} would be read {times:.2f} times in {cfg.steps:,} steps, but its epochs is "
                f"{f.epochs:g}; lower its weight or run.steps, or raise it"
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
    shard = _opened(f, path)
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
        _check_vocab(cfg, f, mine)
    tokens.look(shard, cfg.vocab)
    return shard, about


def _files(f: From) -> list[str]:
    """The files of a source."""
    return [] if not f.paths else _prefixes(f) if f.source in TOKENS else documents.files(f.paths, f.source)


def _opened(f: From, path: str) -> Shard:
    return tokens.open_megatron(path) if f.source == "megatron" else tokens.open_array(path, f.dtype)


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
