"""Batches as a pure function of (seed, step): nothing to save, nothing to restore, no matter how many ranks.

Shape suffixes: B rows asked for, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import rng
from . import masking, tokens
from .config import DataConfig, Part, Source, length, stride
from .errors import DataError
from .order import locate, place
from .sequences import Long
from .sources import synthetic


@dataclass(frozen=True)
class Read:
    """A sequence as it was read: `ids` (with one more than the sequence for a causal model), the `labels` of a causal
    model, how many tokens `count`, and where in it documents begin (None: not asked)."""

    ids: Long
    labels: Long | None
    count: int
    begins: Long | None


def validation_batches(source: Source) -> int:
    """Steps of the "valid" split that cover every held-out sequence once (0 when nothing is held out)."""
    return -(-source.valid // source.cfg.batch)


def batch(
    source: Source, step: int, rows: Sequence[int], split: Literal["train", "valid"] = "train"
) -> dict[str, Tensor]:
    """Rows of one step's global batch, all int64 on the CPU. Raises DataError for an id outside the vocabulary, and for
    a training batch of what is read as the run goes on (see `Reader`).

    `step` counts from 0 (the first batch of the first epoch); `rows` are indices 0..batch-1 of the global
    batch. Sample `step * batch + row` walks through the training sequences, in a new permutation each epoch,
    which may begin inside a batch. "valid" walks once through the held-out ones, labels -1 past the end.

    Causal: tokens, labels, start ("batch seq": the place in the row where a token's document begins; 0 everywhere
    unless documents are apart), sample ("batch"). Masked, instead of start: types, valid ("batch seq") and order
    ("batch", 1 where the halves were swapped). Labels are -1 where nothing is predicted.
    """
    if split == "train" and source.streams:
        raise DataError("a batch of a stream has no number of its own: read them one after another")
    if (source.train if split == "train" else source.valid) == 0:
        raise ValueError(f"the {split} split is empty")
    samples = [step * source.cfg.batch + row for row in rows]
    return assemble(source, samples, [read(source, s, split) for s in samples], split)


def assemble(
    source: Source, samples: Sequence[int], found: Sequence[Read], split: Literal["train", "valid"]
) -> dict[str, Tensor]:
    """The batch of these samples, of which `found` are the sequences."""
    cfg = source.cfg
    sample_B = torch.tensor(samples, dtype=torch.int64)
    ids = torch.from_numpy(np.stack([r.ids for r in found]))
    if cfg.objective == "causal":
        out = _causal(ids, found)
    else:
        draws = rng.fold(rng.fold(torch.tensor(cfg.seed), rng.site_number(f"data/masked/{split}")), sample_B)
        counts = torch.tensor([r.count for r in found])
        out = masking.masked(ids, counts, draws, source.special, cfg.masking, source.words)
    if split == "valid":
        past_B = sample_B >= source.valid
        out["labels"][past_B] = -1
        if "order" in out:
            out["order"][past_B] = -1
    return out | {"sample": sample_B}


def read(source: Source, sample: int, split: Literal["train", "valid"]) -> Read:
    """A sample's sequence."""
    k, index, _ = locate(source, sample, split)
    part = (source.parts if split == "train" or not source.apart else source.apart)[k]
    return sequence(source, part, place(part, index, split))


def sequence(source: Source, part: Part, number: int) -> Read:
    """One sequence of one part. The labels are final: where documents are apart, the last token of one predicts
    nothing."""
    cfg = source.cfg
    n = length(cfg)
    if part.stream is None:
        ids = synthetic(cfg, number * stride(cfg), source.special.ordinary).numpy()
        return Read(ids, ids[1:], n, None)
    if part.bins is not None:
        return _from_bins(source, part, number)
    begin = number * (part.stride or stride(cfg))
    ids = tokens.read(part.stream, begin, n, cfg.vocab)
    begins = tokens.read_edges(part.stream, begin, n) if cfg.document_mask else None
    if cfg.objective == "masked":
        return Read(ids, None, n, None)
    labels = _labels(part, begin, ids)
    if part.stride:  # the first window counts whole, of the others what is new
        labels[: (cfg.seq - part.stride) if number else 0] = -1
        labels[max(0, part.stream.tokens - 1 - begin) :] = -1
    if begins is not None:
        labels[begins[begins > 0] - 1] = -1
        _check_documents(cfg, part, begin, 1 + int(((begins > 0) & (begins < cfg.seq)).sum()))
    return Read(ids, labels, n, begins)


def _check_documents(cfg: DataConfig, part: Part, begin: int, documents: int) -> None:
    if cfg.max_documents and documents > cfg.max_documents:
        raise DataError(
            f"data.max_documents: {cfg.max_documents}; the sequence from token {begin:,} of {part.name} has "
            f"{documents} documents; allow as many (a run goes on with it), or use packing: best-fit"
        )


def _labels(part: Part, begin: int, ids: Long) -> Long:
    """The next token of each but the last, -1 where it is not to be learnt."""
    assert part.stream is not None
    labels: Long = ids[1:].copy()
    learn = tokens.read_learn(part.stream, begin, len(ids))
    if learn is not None:
        labels[~learn[1:]] = -1
    return labels


def _from_bins(source: Source, part: Part, number: int) -> Read:
    assert part.stream is not None and part.bins is not None
    cfg, bins = source.cfg, part.bins
    shift = length(cfg) - stride(cfg)
    ids = np.full(length(cfg), source.special.pad, np.int64)
    labels = np.full(stride(cfg), -1, np.int64)
    begins, at = [], 0
    for i in range(int(bins.first[number]), int(bins.first[number + 1])):
        begin, count = int(bins.begin[i]), int(bins.count[i])
        piece = tokens.read(part.stream, begin, count + shift, cfg.vocab)
        ids[at : at + count] = piece[:count]
        if shift:
            labels[at : at + count] = _labels(part, begin, piece)
        begins.append(at)
        at += count
    return Read(ids, labels if shift else None, at, np.array(begins, np.int64) if cfg.document_mask else None)


def _causal(ids_BL: Tensor, found: Sequence[Read]) -> dict[str, Tensor]:
    """Labels shifted before the cut, so that none is lost at the seams."""
    tokens_BS = ids_BL[:, :-1].clone()
    labels_BS = torch.from_numpy(np.stack([r.labels for r in found if r.labels is not None]))
    start_BS = torch.zeros_like(tokens_BS)
    if found[0].begins is not None:
        for row, r in enumerate(found):
            assert r.begins is not None
            inside = torch.from_numpy(r.begins[(r.begins > 0) & (r.begins < start_BS.shape[1])])
            start_BS[row, inside] = inside
        start_BS = start_BS.cummax(1).values
    return {"tokens": tokens_BS, "labels": labels_BS, "start": start_BS}
