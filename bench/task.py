"""What every side of a benchmark trains: shapes, constants, and the weights and batches that they start from.

Needs nothing but NumPy, so that a peer in another framework can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
THETA, NORM_EPS, SEED = 500_000.0, 1e-5, 0


@dataclass(frozen=True)
class Shape:
    """A Llama 3 and its global batch: `seq` tokens in each of `batch` sequences, in fp32."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    seq: int
    batch: int
    vocab: int = 256

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


SHAPES = {
    "large": Shape(layers=8, embed=512, heads=8, kv_heads=4, mlp=1536, seq=512, batch=8),
    "small": Shape(layers=4, embed=128, heads=4, kv_heads=2, mlp=384, seq=128, batch=4),
    "tiny": Shape(layers=2, embed=32, heads=4, kv_heads=2, mlp=64, seq=16, batch=4),  # for tests
}


@dataclass(frozen=True)
class Task:
    """`weights` by dtrain's paths (`block.0/wq`, embed heads head_dim); `tokens` and `labels`, step batch seq."""

    shape: Shape
    weights: Mapping[str, np.ndarray[Any, Any]]
    tokens: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]

    def batch(self, step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The global batch of a step; the first is 1."""
        return self.tokens[step - 1], self.labels[step - 1]


def write(task: Task, path: Path) -> None:
    np.savez(path, shape=list(asdict(task.shape).values()), tokens=task.tokens, labels=task.labels, **task.weights)


def read(path: Path) -> Task:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    shape = Shape(*(int(n) for n in arrays.pop("shape")))
    tokens, labels = arrays.pop("tokens"), arrays.pop("labels")
    return Task(shape, arrays, tokens, labels)


def decays(path: str) -> bool:
    """Whether weight decay applies: not to norms."""
    return "norm" not in path
