"""bench/overhead.py runs end to end; its figure is for the bench, where nothing else runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parent.parent / "bench" / "overhead.py"


@pytest.fixture(scope="module")
def overhead() -> Any:
    spec = importlib.util.spec_from_file_location("overhead", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
