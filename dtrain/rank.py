"""One process of a run, as the code that trains sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rank:
    """One rank's place: `device` is `cpu` or `cuda:N`, `backend` gloo or nccl.

    `stopping()` says whether a signal asked this rank to stop; all ranks agree on it in the step's own
    all-reduce. `beat(step, what)` is called before each action (`what` as it prints) and with `start` and
    `save` before those phases; it costs about a microsecond.
    """

    rank: int
    world: int
    local_rank: int
    device: str
    backend: str
    stopping: Callable[[], bool] = field(default=lambda: False)
    beat: Callable[[int, str], None] = field(default=lambda step, what: None)
