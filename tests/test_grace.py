"""The time from a signal to leaving."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from dtrain.grace import grace
from dtrain.launch import SIGNALS


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = {number: signal.signal(number, lambda number, frame: None) for number in (*SIGNALS, signal.SIGUSR2)}
    yield
    for number, old in before.items():
        signal.signal(number, old)


def test_late_is_called_so_long_after_the_first_signal() -> None:
    late: list[tuple[int, float]] = []
    with grace(0.3, SIGNALS, lambda number: late.append((number, time.monotonic()))):
        os.kill(os.getpid(), signal.SIGUSR2)  # not one of those
        time.sleep(0.4)
        assert late == []
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)  # a second one changes nothing
        time.sleep(0.5)
    ((number, at),) = late
    assert number == signal.SIGTERM and 0.3 <= at - began < 0.5


@pytest.mark.parametrize("seconds", [0.2, None])
def test_in_time_it_is_not(seconds: float | None) -> None:
    late: list[int] = []
    with grace(seconds, SIGNALS, late.append):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    assert late == [] and signal.set_wakeup_fd(-1) == -1
