"""Random numbers: pinned values, independence of placement, and the statistics one relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain import rng
from dtrain.rng import Key

MASK = (1 << 64) - 1
PINNED: dict[str, Any] = {
    "site": 1707845401110799533,
    "fold": 2668075672707532151,
    "normal": [-0.7541223594263803, 2.4949453659357075, -0.885140978596134, -0.6168483355777294],
    "kept": "1111011010011111",
}


def splitmix(z: int) -> int:
    """The finaliser as its authors print it, on unsigned integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def number(n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.int64)


def key(seed: int = 0, step: int = 1, layer: int = 0) -> Key:
    return Key(number(seed), number(step), number(layer))


def test_mix_is_splitmix64() -> None:
    words = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    assert [int(z) & MASK for z in rng.mix(torch.tensor(words))] == [splitmix(w & MASK) for w in words]
    assert [rng._mix_int(w) & MASK for w in words] == [splitmix(w & MASK) for w in words]
    # The first outputs of splitmix64 seeded with 1234567 (a published test vector).
    gamma, state, out = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + gamma) & MASK
        out.append(int(rng.mix(number(state - (1 << 64) if state >> 63 else state))) & MASK)
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_pinned_values() -> None:
    """These are in every checkpoint and loss curve: a change of them is a change of every run."""
    assert rng.site_number("embed/table") == PINNED["site"]
    state = rng.fold(number(0), rng.site_number("embed/table"))
    assert int(state) == PINNED["fold"]
    got = rng.normal(rng.fold(state, torch.arange(4)))
    assert got.tolist() == pytest.approx(PINNED["normal"], abs=1e-15)
    kept = rng.keep_mask(key(), "attention_residual", torch.arange(16), 0.5)
    assert "".join("1" if k else "0" for k in kept) == PINNED["kept"]


def test_a_number_folds_as_a_tensor_does() -> None:
    for n in (0, 5, -5, 2**62 + 1):
        assert torch.equal(rng.fold(number(3), n), rng.fold(number(3), number(n)))


def test_order_and_every_word_count() -> None:
    a, b = number(1), number(2)
    assert rng.fold(rng.fold(number(0), a), b) != rng.fold(rng.fold(number(0), b), a)
    index = torch.arange(256)
    masks = [
        rng.keep_mask(k, site, index, 0.5)
        for k, site in [(key(), "a"), (key(), "b"), (key(seed=1), "a"), (key(step=2), "a"), (key(layer=1), "a")]
    ]
    for i, x in enumerate(masks):
        for y in masks[:i]:
            assert 64 < int((x == y).sum()) < 192  # unrelated masks agree on half


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_a_part_draws_what_the_whole_draws(parts: int) -> None:
    index = torch.arange(42).view(6, 7)
    whole = rng.normal(rng.fold(number(9), index))
    for piece, want in zip(index.tensor_split(parts), whole.tensor_split(parts), strict=True):
        assert torch.equal(rng.normal(rng.fold(number(9), piece)), want)
    assert torch.equal(rng.normal(rng.fold(number(9), index.t())), whole.t())
    mask = rng.keep_mask(key(), "x", index, 0.3)
    assert torch.equal(rng.keep_mask(key(), "x", index[:, 2:5], 0.3), mask[:, 2:5])


def test_no_two_blocks_are_equal() -> None:
    draws = rng.normal(rng.fold(number(0), torch.arange(4096))).view(8, 512)
    assert len({tuple(row.tolist()) for row in draws}) == 8


def test_moments() -> None:
    n = 1 << 17
    u = rng.uniform(rng.fold(number(4), torch.arange(n)))
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
    x = rng.normal(rng.fold(number(4), torch.arange(n)))
    assert x.dtype == torch.float64
    assert abs(float(x.mean())) < 5 / n**0.5
    assert abs(float(x.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((x[1:] * x[:-1]).mean())) < 5 / n**0.5  # neighbours are independent


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_kept_share(rate: float) -> None:
    n = 1 << 16
    kept = rng.keep_mask(key(), "x", torch.arange(n), rate)
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / n) ** 0.5
    groups = kept.view(-1, 4).sum(1)
    assert set(groups.tolist()) == {0, 1, 2, 3, 4}  # groups of four neighbours are not all alike
    assert rng.keep_mask(key(), "x", torch.arange(64), 0.0).all()
