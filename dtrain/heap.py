"""The C library's heap on CPUs: what a step frees, the next step takes again."""

from __future__ import annotations

import ctypes

# Of glibc's <malloc.h>. The largest threshold that it takes is half of the largest heap of a thread: 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, NEVER, MOST = -1, -3, -1, 32 << 20


def keep() -> bool:
    """Have this process keep the memory that it frees; says whether the C library took it (only glibc does).

    By default glibc hands the top of its heap back to the system once enough of it is free, and takes anew what it
    needs next. Where that falls on a step's end, each step pays for thousands of page faults: by chance of where
    tensors came to lie, in some starts of a run and not in others (bench/LOG.md). Allocations of 32 MiB and more are
    still mapped one by one and handed back when freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Setting one of the two ends glibc's own adjusting of the other, so both are set.
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, MOST)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
