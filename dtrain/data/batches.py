"""Batches as a pure function of (seed, step): nothing to save, nothing to restore, no matter how many ranks.

Shape suffixes: B rows asked for, S positions, L tokens read for a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import rng
from .sources import Source, periods, read, stride

MASKED = 0.15  # share of tokens that a masked model predicts (Devlin et al. 2018)
_ROUNDS = 6


def permute(index: int, n: int, state: int) -> int:
    """Where `index` (0..n-1) goes under the permutation of n that the hash `state` (int64) names.

    A Feistel network on the smallest even number of bits that holds n, walked until it lands below n (Black &
    Rogaway 2002): O(1) memory, at most 4 walks expected. On plain numbers: a batch has few sequences.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [rng.fold_int(state, r) for r in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (rng.fold_int(key, right) & mask)
        index = left << half | right
        if index < n:
            return index


def validation_batches(source: Source) -> int:
    """Steps of the "valid" split that cover every held-out sequence once (0 when nothing is held out)."""
    return -(-source.valid // source.cfg.batch)


def batch(
    source: Source, step: int, rows: Sequence[int], split: Literal["train", "valid"] = "train"
) -> dict[str, Tensor]:
    """Rows of one step's global batch, all int64 on the CPU.

    `step` counts from 0 (the first batch of the first epoch); `rows` are indices 0..batch-1 of the global
    batch. Sample `step * batch + row` walks through the training sequences, in a new permutation each epoch,
    which may begin inside a batch. "valid" walks once through the held-out ones, labels -1 past the end.

    Causal: tokens, labels ("batch seq"), sample ("batch"). Masked, also: types, valid ("batch seq") and order
    ("batch", 1 where the halves were swapped); labels are -1 where nothing is predicted.
    """
    cfg = source.cfg
    n = source.train if split == "train" else source.valid
    if n == 0:
        raise ValueError(f"the {split} split is empty")
    sample_B = step * cfg.batch + torch.tensor(list(rows), dtype=torch.int64)
    shuffle = rng.fold_int(cfg.seed, rng.site_number(f"data/{split}"))
    places = [permute(i % n, n, rng.fold_int(shuffle, i // n)) for i in sample_B.tolist()]
    index_B = torch.tensor(places, dtype=torch.int64)
    period, held = periods(cfg, source.train + source.valid)
    if split == "train":
        index_B = index_B // (period - held) * period + index_B % (period - held)
    else:
        index_B = index_B // held * period + (period - held) + index_B % held
    read_BL = read(source, index_B * stride(cfg))
    if cfg.objective == "causal":
        out = {"tokens": read_BL[:, :-1].contiguous(), "labels": read_BL[:, 1:].contiguous()}
    else:
        draws = rng.fold(rng.fold(torch.tensor(cfg.seed), rng.site_number(f"data/masked/{split}")), sample_B)
        out = _masked(read_BL, draws, source.specials)
    if split == "valid":
        past_B = sample_B >= n
        out["labels"][past_B] = -1
        if "order" in out:
            out["order"][past_B] = -1
    return out | {"sample": sample_B}


def _masked(text_BL: Tensor, draws_B: Tensor, specials: int) -> dict[str, Tensor]:
    """[CLS] A [SEP] B [SEP] from the two halves of a text, in this order or (one in two) the other, with 15 %
    of the tokens to predict: 80 % of these shown as [MASK], 10 % as a random token, 10 % as they are."""
    _, cls, sep, mask = range(specials, specials + 4)
    b, n = text_BL.shape
    first = (n + 1) // 2
    swap_B = rng.uniform(rng.fold(draws_B, rng.site_number("order"))) < 0.5
    swapped_BL = torch.cat([text_BL[:, first:], text_BL[:, :first]], 1)
    text_BL = torch.where(swap_B[:, None], swapped_BL, text_BL)
    cut_B = torch.where(swap_B, n - first, first)

    # Position j shows text[j - 1] before the middle [SEP], which is at cut + 1, and text[j - 2] after it.
    j_S = torch.arange(n + 3)
    middle_BS = j_S == cut_B[:, None] + 1
    after_BS = j_S > cut_B[:, None] + 1
    special_BS = middle_BS | (j_S == 0) | (j_S == n + 2)
    original_BS = text_BL.gather(1, (j_S - 1 - after_BS.long()).clamp(0, n - 1))
    original_BS = torch.where(special_BS, torch.where(j_S == 0, cls, sep), original_BS)

    draws_BS = rng.fold(draws_B[:, None], j_S)
    chosen_BS = (rng.uniform(draws_BS) < MASKED) & ~special_BS
    how_BS = rng.uniform(rng.fold(draws_BS, 1))
    random_BS = (rng.fold(draws_BS, 2) & 0x7FFFFFFFFFFFFFFF) % specials
    shown_BS = torch.where(how_BS < 0.8, mask, torch.where(how_BS < 0.9, random_BS, original_BS))
    return {
        "tokens": torch.where(chosen_BS, shown_BS, original_BS),
        "labels": torch.where(chosen_BS, original_BS, -1),
        "types": after_BS.long(),
        "valid": torch.ones(b, n + 3, dtype=torch.int64),
        "order": swap_B.long(),
    }
