"""A run that is asked to stop has so long to do it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


@contextmanager
def grace(seconds: float | None, signals: Collection[int], late: Callable[[int], None]) -> Iterator[None]:
    """While open, `late(signal)` is called in a thread `seconds` after the first of `signals`; never if None.

    They must have Python handlers. The interpreter tells of them in its wakeup descriptor at once, so that a main
    thread that is somewhere in C++, which runs no handler, is late too. Does nothing outside of the main thread.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait, args=(ours, seconds, signals, late), name="grace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()  # which ends the thread
        thread.join()
        ours.close()


def _wait(ours: socket.socket, seconds: float, signals: Collection[int], late: Callable[[int], None]) -> None:
    number = 0
    while number not in signals:
        got = ours.recv(1)
        if not got:
            return
        number = got[0]
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ours.settimeout(left)
        try:
            if not ours.recv(1):
                return
        except TimeoutError:
            break
    late(number)
