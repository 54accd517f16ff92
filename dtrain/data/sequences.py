"""How a stream of documents becomes sequences: cut every so many tokens, or put together from whole documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .tokens import Stream, documents, edges

Long = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Sequences made of pieces of documents: sequence i has the pieces first[i] to first[i + 1], and a piece is
    `count` tokens of the stream from `begin` on. `short` documents have too few tokens to learn from."""

    first: Long
    begin: Long
    count: Long
    short: int

    @property
    def sequences(self) -> int:
        return len(self.first) - 1


def document_spans(source: Stream) -> tuple[Long, Long]:
    """Where the documents of a stream begin and how many tokens they have; separators belong to none."""
    begins, sizes = [], []
    for shard, offset in zip(source.shards, source.offsets, strict=True):
        found = edges(shard, 0, shard.tokens.size, source.eos).astype(np.int64)
        begins.append(found + offset)
        sizes.append(np.diff(found, append=shard.tokens.size))
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *begins]), np.concatenate([none, *sizes])


def count_documents(source: Stream) -> int | None:
    """Documents of a stream, None where only reading it would tell."""
    counts = [documents(s) for s in source.shards]
    return None if None in counts else sum(c for c in counts if c is not None)


def one_by_one(source: Stream, length: int, shift: int) -> Bins:
    """A sequence for each document, and several for one that is longer than `length`. Of a document of n tokens
    n - `shift` are read, as the last is only a label where labels are shifted."""
    begin, count, short = _pieces(source, length, shift)
    return Bins(np.arange(len(begin) + 1), begin, count, short)


def best_fit(source: Stream, length: int, shift: int, most: int = 0) -> Bins:
    """Pieces of documents in sequences of `length` tokens: the longest first, each into the fullest sequence that it
    still fits (best-fit decreasing; Ding et al. 2024, arXiv 2404.10830, pack language models so). Documents longer
    than a sequence are cut, others never. A sequence of more than `most` pieces (0: any number) becomes several."""
    begin, count, short = _pieces(source, length, shift)
    where = fit(count, length)
    if most:
        order = np.argsort(where, kind="stable")
        nth = np.arange(len(where)) - np.searchsorted(where[order], where[order])
        where[order] = np.unique(np.stack([where[order], nth // most]), axis=1, return_inverse=True)[1].ravel()
    order = np.argsort(where, kind="stable")
    first = np.searchsorted(where[order], np.arange(int(where.max(initial=-1)) + 2))
    return Bins(first.astype(np.int64), begin[order], count[order], short)


def _pieces(source: Stream, length: int, shift: int) -> tuple[Long, Long, int]:
    begin, size = document_spans(source)
    inputs = size - shift
    useful = inputs > 0 if shift else inputs > 1  # a masked model needs two halves
    begin, inputs = begin[useful], inputs[useful]
    parts = -(-inputs // length)
    nth = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    counts = np.minimum(np.repeat(inputs, parts) - nth * length, length)
    begins = np.repeat(begin, parts) + nth * length
    enough = counts > (0 if shift else 1)
    return begins[enough], counts[enough], int((~useful).sum())


def fit(counts: Long, length: int) -> Long:
    """Best-fit decreasing: the bin of each item (1..length tokens), bins of `length`. Items of one size are placed
    together, so the time grows with the number of different sizes."""
    if not len(counts):
        return np.zeros(0, np.int64)
    order = np.argsort(-counts, kind="stable")
    sizes, starts = np.unique(-counts[order], return_index=True)
    ends = np.append(starts[1:], len(order))
    where = np.empty(len(counts), np.int64)
    room: list[list[Long]] = [[] for _ in range(length + 1)]  # bins by the tokens that they still take
    free = np.zeros(length + 1, np.int64)  # how many there are
    bins = 0
    for size, at, end in zip((-sizes).tolist(), starts.tolist(), ends.tolist(), strict=True):
        while at < end:
            fits = np.flatnonzero(free[size:])
            left = int(fits[0]) + size if len(fits) else length
            each = left // size  # the next of the same size goes where the last one went, while it fits
            wanted = -(-(end - at) // each)
            if len(fits):
                chosen = room[left].pop()
                if len(chosen) > wanted:
                    room[left].append(chosen[wanted:])
                    chosen = chosen[:wanted]
                free[left] -= len(chosen)
            else:
                chosen = np.arange(bins, bins + wanted)
                bins += wanted
            put = min(end - at, len(chosen) * each)
            where[order[at : at + put]] = np.repeat(chosen, each)[:put]
            at += put
            last = put - (len(chosen) - 1) * each  # items in the last bin
            for some, n in ((chosen[:-1], each), (chosen[-1:], last)):
                if len(some):
                    room[left - n * size].append(some)
                    free[left - n * size] += len(some)
    return where


def describe(bins: Bins, length: int) -> dict[str, Any]:
    """Sequences, pieces, and the share of places that hold a token."""
    used = int(bins.count.sum())
    return {
        "sequences": bins.sequences,
        "pieces": len(bins.begin),
        "filled": used / max(1, bins.sequences * length),
        "short": bins.short,
    }
