"""`dtrain data show`: what there is, how long documents are, and samples as the model will see them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import manifest, tokenizer
from .config import DataConfig, Part, Source, stride
from .order import passes
from .sequences import count_documents, describe
from .sources import open_source
from .streaming import Reader
from .tokenizer import Tokenizer
from .tokens import edges

_LOOK = 1 << 24  # tokens of a shard whose documents the histogram counts
_BARS = 40


def show(cfg: DataConfig, samples: int, whole: bool = False) -> Iterator[str]:
    """Lines for a person. `whole` compares the checksum of every packed file. Raises DataError."""
    source = open_source(cfg)
    used = tokenizer.load(cfg.tokenizer)
    yield f"tokenizer {used.name}: {used.size:,} ids; model.vocab {cfg.vocab:,}"
    for kind, part in _parts(source):
        yield from _counts(source, part, kind)
        yield from histogram(_lengths(part))
    for part, quota, times in zip(source.parts, source.quotas, passes(source, cfg.steps * cfg.batch), strict=True):
        share = f"{quota / sum(source.quotas):.1%} of the samples, " if len(source.parts) > 1 else ""
        often = "read as the run goes on" if part.texts else f"read {times:.3g} times in {cfg.steps:,} steps"
        yield f"{part.name}: {share}{often}"
    yield from source.notes
    if whole:
        yield from _whole(source)
    steps = -(-(samples if source.streams else min(samples, source.train)) // cfg.batch)
    reader = Reader(source, range(cfg.batch))
    documents = []
    for step in range(steps):
        whole_batch = reader.read(step)
        for row in range(min(cfg.batch, samples - step * cfg.batch)):
            yield f"sample {step * cfg.batch + row} (step {step + 1}, row {row}):"
            yield from _sample(cfg, used, {k: v[row].tolist() for k, v in whole_batch.items()})
            documents += [len(set(whole_batch["start"][row].tolist()))] if cfg.document_mask else []
    if documents:
        yield f"documents in one of these {len(documents):,} sequences: {min(documents):,} to {max(documents):,}"
    yield from reader.notes()


def counts(source: Source) -> Iterator[str]:
    """What there is of each corpus, and what of it no sequence has."""
    for kind, part in _parts(source):
        yield from _counts(source, part, kind)


def _parts(source: Source) -> list[tuple[str, Part]]:
    return [*(("train", p) for p in source.parts), *(("held out", p) for p in source.apart)]


def _counts(source: Source, part: Part, kind: str) -> Iterator[str]:
    if part.texts is not None:
        size = sum(part.texts.sizes)
        many = "" if min(part.texts.sizes) < 0 else f", {size / 1e6:,.1f} MB"
        yield f"{kind}: {part.name}: {_files(len(part.texts.files))}{many}"
        return
    if part.stream is None:
        yield f"{kind}: {part.name}: {part.train:,} sequences drawn from a hash"
        return
    n = count_documents(part.stream)
    many = "documents as data.eos says" if n is None else f"{n:,} documents"
    used = f"{part.train:,} sequences to train on, {part.valid:,} held out"
    if kind == "held out":
        used = f"{part.valid:,} sequences"
    yield (
        f"{kind}: {part.name}: {part.stream.tokens:,} tokens in {_files(len(part.stream.shards))}, {many}; "
        f"{used}, {part.dropped:,} tokens left at the end"
    )
    if part.bins is not None:
        d = describe(part.bins, stride(source.cfg))
        yield (
            f"  {source.cfg.packing}: {d['pieces']:,} pieces in {d['sequences']:,} sequences, {d['filled']:.1%} "
            f"of their places filled; {d['short']:,} documents too short to learn from"
        )


def _files(n: int) -> str:
    return "1 file" if n == 1 else f"{n:,} files"


def _lengths(part: Part) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = [np.zeros(0, np.int64)]
    if part.stream is None:
        return found[0]
    for shard in part.stream.shards:
        if shard.starts is None and part.stream.eos is None:
            continue
        end = min(shard.tokens.size, _LOOK)
        found.append(np.diff(edges(shard, 0, end, part.stream.eos), append=end))
    return np.concatenate(found)


def histogram(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[str]:
    """Documents by length, in powers of two."""
    lengths = lengths[lengths > 0]
    if not lengths.size:
        return []
    power = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(power)
    middle = f"median {np.median(lengths):,.0f}"
    lines = [f"  {lengths.size:,} documents of {lengths.min():,} to {lengths.max():,} tokens, {middle}"]
    for p in range(int(power.min()), len(counts)):
        bar = "#" * round(_BARS * counts[p] / counts.max())
        lines.append(f"  {1 << p:>9,} to {(2 << p) - 1:>9,} tokens {counts[p]:>9,} {bar}")
    return lines


def _whole(source: Source) -> Iterator[str]:
    for part in (*source.parts, *source.apart):
        for shard in part.stream.shards if part.stream else ():
            prefix = shard.name.removesuffix(".bin")
            about = manifest.read(prefix)
            if about is not None:
                manifest.check(prefix, about, whole=True)
                yield f"{prefix}: every byte is as packed (sha256)"


def _sample(cfg: DataConfig, used: Tokenizer, out: dict[str, list[int]]) -> Iterator[str]:
    """A sequence in runs of tokens that belong together: of one document, and all targets or none."""
    tokens, labels = out["tokens"], out["labels"]
    masked = cfg.objective == "masked"
    group = out["types"] if masked else out["start"]
    # A causal label is the next token: what is learnt at place i is the token at i + 1.
    learnt = (
        [n >= 0 for n in labels] if masked else [False, *(a == b for a, b in zip(labels, tokens[1:], strict=False))]
    )
    begin = 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or (group[i], learnt[i]) != (group[begin], learnt[begin]):
            text = used.decode(tokens[begin:i])
            where = f"segment {group[begin]}" if masked else f"document from {group[begin]}"
            what = "predicted" if learnt[begin] else "given"
            more = ""
            if masked and learnt[begin]:
                more = f", in truth {used.decode(labels[begin:i])!r}"
            elif not masked and labels[i - 1] >= 0 and (i == len(tokens) or not learnt[i]):
                more = f", then predicted {used.decode(labels[i - 1 : i])!r}"
            yield f"  {begin:>6} to {i - 1:>6}  {where:<20} {what:<9} {text!r}{more}"
            begin = i
