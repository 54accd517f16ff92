"""What one step frees, the next takes again without asking the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrain import heap, launch, layout

# Allocates, touches and frees 50 MB as tensors of 1 MB, three times, and prints the page faults of the last time.
ROUNDS = """
import ctypes, resource, sys
from dtrain import heap
if sys.argv[1] == "keep":
    print(heap.keep())
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [c.malloc(1 << 20) for _ in range(50)]
    for at in held:
        ctypes.memset(at, 1, 1 << 20)
    for at in held:
        c.free(at)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, check=True)
    return ran.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is what is told")
def test_freed_memory_is_kept() -> None:
    pages = 50 * (1 << 20) // 4096
    assert int(faults("not")[-1]) > 0.9 * pages  # what happens otherwise, or this test says nothing
    took, again = faults("keep")
    assert took == "True" and int(again) < 0.01 * pages


def test_a_rank_on_a_cpu_keeps_its_heap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[None] = []
    monkeypatch.setattr(heap, "keep", lambda: asked.append(None))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    made = layout.loads(
        "model: {preset: llama3-8b}\ndata: {source: synthetic, seq: 128, batch: 1, microbatch: 1}\nrun: {steps: 1}\n"
    )
    seat = launch.Seat(0, 1, 0, "alone", "")
    for value, times in ((None, 1), ("131072", 1)):  # whoever sets glibc's own variable, decides
        monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
        if value:
            monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", value)
        launch._rank(made, seat, tmp_path, lambda: False, lambda step, what: None)
        assert len(asked) == times
