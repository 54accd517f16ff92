"""bench/overhead.py and bench/prefetch.py run end to end; their figures are for the bench, where nothing else runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def load(name: str) -> Any:
    if str(BENCH) not in sys.path:  # processes that a bench spawns must find it as well
        sys.path.append(str(BENCH))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def overhead() -> Any:
    return load("overhead")


def test_a_list_runs_over_graphs_of_real_arity(overhead: Any) -> None:
    program, calls, _, bound = overhead.prepare(4, 2, 4, 0)
    block = program.segments["block"]
    assert len(block.stored) == 12 and len(block.graphs["forward"].outputs) == 26
    assert len(calls["block", "backward"]()) == 13
    found = overhead.measure(2, 4, 2, 4)
    assert found["actions"] == len(bound.actions) > 30
    assert 0 < found["us_per_action_least"] <= found["us_per_action"] <= found["us_per_action_most"]
    assert found["list_bytes_per_action"] < 1000


def test_the_list_grows_by_its_actions_alone(overhead: Any) -> None:
    """Ops are shared between microbatches: eight times as many cost no more than their own entries."""
    few, many = (overhead.prepare(8, 2, m, 0)[3] for m in (8, 64))
    each = (overhead.list_bytes(many) - overhead.list_bytes(few)) / (len(many.actions) - len(few.actions))
    assert each < 120
    assert len(set(map(id, many.ops))) == len(set(map(id, few.ops)))


@pytest.mark.long
def test_prefetch_is_measured_on_two_processes(capfd: pytest.CaptureFixture[str]) -> None:
    prefetch = load("prefetch")
    prefetch.main(["--rounds", "2", "--json"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [(v["prefetch"], v["in_flight"]) for v in found["variants"]] == list(prefetch.VARIANTS)
    assert found["variants"][0]["ratio"] == 1.0 and all(v["ms"] > 0 for v in found["variants"])
