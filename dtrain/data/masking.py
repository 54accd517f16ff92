"""Masked language modelling: two segments, tokens to predict, and how these are shown (Devlin et al. 2019).

Shape suffixes: B rows, S positions, L places of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import rng

MASKED = 0.15  # share of tokens that a masked model predicts (Devlin et al. 2019)


@dataclass(frozen=True)
class Special:
    """Ids of [PAD], [CLS], [SEP] and [MASK]; random tokens are drawn below `ordinary`."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: int


@dataclass(frozen=True)
class Masking:
    """What is masked: single tokens, or whole `word`s; in spans of 1 to `ngram` of them, a span of n with a chance
    that falls as 1/n (Lan et al. 2020)."""

    unit: Literal["token", "word"] = "token"
    ngram: int = 1


@dataclass(frozen=True)
class Words:
    """What ids say of a text: whether each goes on with the word before it, and whether a sentence may end with it."""

    continues: Tensor
    ends: Tensor


def span_chance(ngram: int) -> float:
    """With what chance a span has to begin at a unit for a share MASKED of all units to be in one, where spans may
    overlap: 1 - prod over k < ngram of (1 - q P(length > k)) = MASKED, solved by bisection."""
    longer = [sum(1 / n for n in range(k + 1, ngram + 1)) for k in range(ngram)]
    low, high = 0.0, MASKED
    for _ in range(60):
        q, covered = (low + high) / 2, 1.0
        for p in longer:
            covered *= 1 - q * p / longer[0]
        low, high = (low, q) if 1 - covered > MASKED else (q, high)
    return high if ngram > 1 else MASKED


def masked(
    text_BL: Tensor, length_B: Tensor, draws_B: Tensor, special: Special, how: Masking, words: Words | None
) -> dict[str, Tensor]:
    """[CLS] A [SEP] B [SEP] from the two halves of a text, in this order or (one in two) the other (Lan et al. 2020),
    with 15 % of the tokens to predict: 80 % of these shown as [MASK], 10 % as a random token, 10 % as they are. Special
    tokens of the text are not predicted.

    `length_B` tokens of a row are text, the rest is padding. Where there are `words` the halves meet between two
    sentences, if there are some near the middle. `draws_B` are hash states, one a row, so a row's masks do not depend
    on the others'.
    """
    b, n = text_BL.shape
    n_B1 = length_B[:, None]
    first_B1 = (n_B1 + 1) // 2 if words is None else _between_sentences(text_BL, n_B1, words)
    swap_B = rng.uniform(rng.fold(draws_B, rng.site_number("order"))) < 0.5
    cut_B1 = torch.where(swap_B[:, None], n_B1 - first_B1, first_B1)

    # Position j shows place j - 1 of the text before the middle [SEP], which is at cut + 1, and j - 2 after it; the
    # halves the other way round are the text turned by the first half.
    j_S = torch.arange(n + 3)
    middle_BS = j_S == cut_B1 + 1
    after_BS = (j_S > cut_B1 + 1) & (j_S <= n_B1 + 2)
    special_BS = middle_BS | (j_S == 0) | (j_S >= n_B1 + 2)
    place_BS = (j_S - 1 - after_BS.long()).clamp(min=0)
    turned_BS = torch.where(swap_B[:, None], (place_BS + first_B1) % n_B1, place_BS)
    shown_BS = text_BL.gather(1, turned_BS.clamp(max=n - 1))
    marks_BS = torch.where(j_S == 0, special.cls, torch.where(j_S > n_B1 + 2, special.pad, special.sep))
    original_BS = torch.where(special_BS, marks_BS, shown_BS)
    special_BS = special_BS | torch.isin(
        original_BS, torch.tensor([special.pad, special.cls, special.sep, special.mask])
    )

    draws_BS = rng.fold(draws_B[:, None], j_S)
    chosen_BS = _chosen(original_BS, draws_BS, special_BS, after_BS, how, words)
    kind_BS = rng.uniform(rng.fold(draws_BS, 1))
    random_BS = (rng.fold(draws_BS, 2) & 0x7FFFFFFFFFFFFFFF) % special.ordinary
    tokens_BS = torch.where(kind_BS < 0.8, special.mask, torch.where(kind_BS < 0.9, random_BS, original_BS))
    return {
        "tokens": torch.where(chosen_BS, tokens_BS, original_BS),
        "labels": torch.where(chosen_BS, original_BS, -1),
        "types": after_BS.long(),
        "valid": (j_S <= n_B1 + 2).long().expand(b, -1).contiguous(),
        "order": swap_B.long(),
    }


def _between_sentences(text_BL: Tensor, n_B1: Tensor, words: Words) -> Tensor:
    """Where the second half begins: behind the end of a sentence, at the beginning of a word, as near to the middle as
    can be and at most a quarter of the text from it; in the middle where there is no such place."""
    half_B1 = (n_B1 + 1) // 2
    place_L = torch.arange(1, text_BL.shape[1])
    good_BL = words.ends[text_BL[:, :-1]] & ~words.continues[text_BL[:, 1:]]
    far_BL = (place_L - half_B1).abs()
    order_BL = (2 * far_BL + (place_L > half_B1)).masked_fill(~good_BL | (4 * far_BL > n_B1), 4 * text_BL.shape[1])
    least_B, at_B = order_BL.min(1)
    return torch.where((least_B < 4 * text_BL.shape[1])[:, None], at_B[:, None] + 1, half_B1)


def _chosen(
    ids_BS: Tensor, draws_BS: Tensor, special_BS: Tensor, after_BS: Tensor, how: Masking, words: Words | None
) -> Tensor:
    """Which positions are to be predicted."""
    if how == Masking():
        return (rng.uniform(draws_BS) < MASKED) & ~special_BS
    b, s = ids_BS.shape
    j_BS = torch.arange(s).expand(b, -1)
    begins_BS = torch.ones_like(special_BS)
    if how.unit == "word":
        assert words is not None
        begins_BS = ~words.continues[ids_BS] | special_BS | special_BS.roll(1, 1)
    unit_BS = begins_BS.long().cumsum(1) - 1
    at_BS = torch.zeros_like(ids_BS).scatter_reduce(1, unit_BS, j_BS, "amin", include_self=False)
    chance = span_chance(how.ngram)
    weights = torch.tensor([1 / n for n in range(1, how.ngram + 1)], dtype=torch.float64)
    ends = (weights / weights.sum()).cumsum(0)
    out_BS = torch.zeros_like(special_BS)
    for k in range(how.ngram):  # spans that began k units before
        from_BS = at_BS.gather(1, (unit_BS - k).clamp(min=0))
        start_BS = draws_BS.gather(1, from_BS)
        length_BS = 1 + torch.searchsorted(ends, rng.uniform(rng.fold(start_BS, 3))).clamp(max=how.ngram - 1)
        same_BS = after_BS.gather(1, from_BS) == after_BS
        begun_BS = (rng.uniform(start_BS) < chance) & ~special_BS.gather(1, from_BS) & same_BS & (unit_BS >= k)
        out_BS |= begun_BS & (length_BS > k)
    return out_BS & ~special_BS
