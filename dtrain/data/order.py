"""Which sequence a sample is: permutations of an epoch and mixtures of sources, in O(1) memory."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from .. import rng
from .config import From, Part, Source
from .errors import DataError

MIX = 1 << 12  # in so many samples one after another every source of a mixture has exactly its share
_ROUNDS = 6


def permute(index: int, n: int, state: int) -> int:
    """Where `index` (0..n-1) goes under the permutation of n that the hash `state` (int64) names.

    A Feistel network on the smallest even number of bits that holds n, walked until it lands below n (Black &
    Rogaway 2002): O(1) memory, at most 4 walks expected. On plain numbers: a batch has few sequences.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _keys(state)
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (rng.fold_int(key, right) & mask)
        index = left << half | right
        if index < n:
            return index


@functools.lru_cache(maxsize=64)
def _keys(state: int) -> tuple[int, ...]:
    """The keys of each round: those of an epoch, which all its samples have in common, are made once."""
    return tuple(rng.fold_int(state, r) for r in range(_ROUNDS))


def order_of(source: Source, split: Literal["train", "valid"], part: int = 0) -> int:
    """The hash that the order of a part's sequences comes from; held-out parts have one together."""
    shuffle = rng.fold_int(source.cfg.seed, rng.site_number(f"data/{split}"))
    return shuffle if split == "valid" or len(source.parts) == 1 else rng.fold_int(shuffle, part)


def turn(source: Source, sample: int) -> tuple[int, int]:
    """The part that a training sample is of, and how many samples before it are of that part."""
    if len(source.parts) == 1:
        return 0, sample
    shuffle = rng.fold_int(source.cfg.seed, rng.site_number("data/train"))
    block, index = divmod(sample, MIX)
    slot = permute(index, MIX, rng.fold_int(rng.fold_int(shuffle, rng.site_number("mix")), block))
    ends = list(accumulate(source.quotas))
    k = bisect_right(ends, slot)
    return k, block * source.quotas[k] + slot - (ends[k - 1] if k else 0)


def locate(source: Source, sample: int, split: Literal["train", "valid"]) -> tuple[int, int, int]:
    """A sample's part, sequence of that part, and epoch of that part. Training samples 0, 1, 2, ... take each part's
    sequences in a new permutation each epoch; held-out ones are numbered part after part."""
    if split == "train":
        k, nth = turn(source, sample)
        n = source.parts[k].train
        epoch, index = divmod(nth, n)
        return k, permute(index, n, rng.fold_int(order_of(source, split, k), epoch)), epoch
    n = source.valid
    epoch, index = divmod(sample, n)
    place = permute(index, n, rng.fold_int(order_of(source, split), epoch))
    ends = list(accumulate(p.valid for p in source.apart or source.parts))
    k = bisect_right(ends, place)
    return k, place - (ends[k - 1] if k else 0), epoch


def place(part: Part, index: int, split: Literal["train", "valid"]) -> int:
    """A train or valid sequence's number among all sequences of its part."""
    if part.train == 0 or part.held == 0:
        return index
    period, held = part.period, part.held
    if split == "train":
        return index // (period - held) * period + index % (period - held)
    return index // held * period + (period - held) + index % held


def quotas(given: Sequence[From], parts: Sequence[Part]) -> tuple[int, ...]:
    """How many of MIX samples come from each part: by weight, rounded by largest remainder."""
    if len(parts) == 1:
        return (MIX,)
    weights = [p.train if f.weight is None else f.weight for f, p in zip(given, parts, strict=True)]
    if any(f.weight is None for f in given) and any(f.weight is not None for f in given):
        raise DataError("data.mix: give every source a weight, or none (then each counts by its size)")
    if any(f.weight is None and p.texts for f, p in zip(given, parts, strict=True)):
        raise DataError("data.mix: the size of a source with stream: true is not known; give every source a weight")
    exact = [w * MIX / sum(weights) for w in weights]
    out = [int(e) for e in exact]
    for k in sorted(range(len(out)), key=lambda k: out[k] - exact[k])[: MIX - sum(out)]:
        out[k] += 1
    if min(out) == 0:
        few = parts[out.index(0)].name
        raise DataError(f"data.mix: {few} would be less than one in {MIX:,} samples; raise its weight or leave it out")
    return tuple(out)


def passes(source: Source, samples: int) -> list[float]:
    """How often `samples` training samples go through each part, 0 where nobody knows how long it is."""
    parts = zip(source.quotas, source.parts, strict=True)
    return [0.0 if p.texts else samples * q / MIX / max(1, p.train) for q, p in parts]
