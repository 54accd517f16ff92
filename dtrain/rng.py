"""Counter-based random numbers.

A draw is a hash of (seed, what it is for, global index), so it does not depend on how tensors are placed, on
the number of ranks, on recomputation or on what was drawn before. The mixer is splitmix64 (Steele, Lea &
Flood 2014) in wrapping int64 arithmetic, the same on every device and torch version.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, library

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
# z ^= z >>> by; z *= factor
ROUNDS = (
    (30, -4658895280553007687),  # 0xBF58476D1CE4E5B9
    (27, -7723592293110705685),  # 0x94D049BB133111EB
    (31, 1),
)
_WORD = (1 << 64) - 1
_ROUNDS = tuple((by, factor & _WORD) for by, factor in ROUNDS)  # for Python's own integers


@dataclass(frozen=True)
class Key:
    """Identifies the draws of one call of a segment: 0-dim int64 tensors, so that one graph serves all."""

    seed: Tensor
    step: Tensor
    layer: Tensor


def _mix(z: Tensor) -> Tensor:
    for by, factor in ROUNDS:
        z = z ^ (torch.bitwise_right_shift(z, by) & ((1 << (64 - by)) - 1))
        z = z if factor == 1 else z * factor
    return z


# One node in every graph. Each round reads z twice, and compilers that inline what a value is made of would write out
# a chain of rounds again and again: twice as often with each.
library.define("dtrain::mix", "(Tensor z) -> Tensor", tags=torch.Tag.pointwise)
library.impl("dtrain::mix", "default", _mix)


def mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (any shape)."""
    out: Tensor = torch.ops.dtrain.mix.default(z)
    return out


def site_number(name: str) -> int:
    """A stable 62-bit number for a name (a parameter's path, a dropout site)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _mix_int(z: int) -> int:
    """`mix` on a Python integer (taken modulo 2^64), as int64."""
    z &= _WORD
    for by, factor in _ROUNDS:
        z = ((z ^ (z >> by)) * factor) & _WORD
    return z - (1 << 64) if z >= 1 << 63 else z


def fold(state: Tensor, value: Tensor | int) -> Tensor:
    """Mix another word into a hash state (broadcasts)."""
    word = _mix_int(value + _GAMMA) if isinstance(value, int) else mix(value + _GAMMA)
    return mix((state ^ word) + _GAMMA)


def fold_int(state: int, value: int) -> int:
    """`fold` of two numbers: for a few of them much faster than tensors."""
    return _mix_int((state ^ _mix_int(value + _GAMMA)) + _GAMMA)


def uniform(bits: Tensor) -> Tensor:
    """Hash words -> float64 in (0, 1), from the upper 53 bits."""
    return ((torch.bitwise_right_shift(bits, 11) & 0x1FFFFFFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-53


def normal(bits: Tensor) -> Tensor:
    """Hash words -> standard normal float64 (Box-Muller)."""
    u, v = uniform(bits), uniform(mix(bits + _GAMMA))
    return torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)


def keep_mask(key: Key, site: str, index: Tensor, rate: float) -> Tensor:
    """Dropout's boolean mask: True (keep) with probability 1 - rate.

    `index` (any shape, int64) must identify each element globally: sample, position, feature already mixed
    by `fold`. The same element gets the same answer under every layout, schedule and recompute policy.
    """
    state = fold(fold(fold(key.seed, site_number(site)), key.step), key.layer)
    return uniform(fold(state, index)) >= rate
