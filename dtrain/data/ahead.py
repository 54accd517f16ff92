"""Read a step's batch while the step before it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """`get(i)` gives `read(i)`, and begins to read i + 1 on a thread of its own, up to `last`. A batch is a function of
    its step, so nothing is lost if that one is never asked for. `waited` are the seconds spent in `get` so far.
    What `read` raises, `get` raises."""

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self.read, self.last = read, last
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self.next: tuple[int, Future[T]] | None = None
        self.waited = 0.0

    def get(self, index: int) -> T:
        began = time.perf_counter()
        ready, self.next = self.next, None
        batch = ready[1].result() if ready and ready[0] == index else self.read(index)
        self.waited += time.perf_counter() - began
        if index < self.last:
            self.next = index + 1, self.pool.submit(self.read, index + 1)
        return batch

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
