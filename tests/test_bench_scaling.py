"""bench/scaling.py and bench/compile.py measure what they say."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parent.parent / "bench"
sys.path[:0] = [str(BENCH)]

import scaling  # noqa: E402


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_line_and_its_worst_deviation() -> None:
    assert scaling.fit([1, 2, 4], [5.0, 7.0, 11.0]) == pytest.approx((3.0, 2.0, 0.0), abs=1e-12)
    assert scaling.fit([1, 2, 3], [10.0, 10.0, 16.0]) == pytest.approx((6.0, 3.0, 0.2))  # 12 where 10 was measured


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the mark is Linux's")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_point_is_timed_and_its_peak_is_of_its_steps() -> None:
    found = scaling.point(2, 16, 2, "off", 32)
    assert 0 < found["step_s"] < 60
    scaling.reset_peak()
    before = scaling.peak()
    held = bytearray(64 << 20)
    assert scaling.peak() - before == pytest.approx(64 << 20, rel=0.2)
    del held
    scaling.reset_peak()
    assert scaling.peak() - before < 32 << 20


def test_the_verdict_on_compiling() -> None:
    def row(seconds: float, compiled: int, calls: int = 0) -> dict[str, float]:
        times = {"plan_s": 0.0, "lower_s": 1.0, "compile_s": seconds, "cpu_s": 2 * seconds}
        return {**times, "graphs": 6, "compiled": compiled, "compiler_calls": calls}

    rows = {
        "4 layers, cold": row(9.0, 6, 6),
        "80 layers, cold": row(11.0, 6, 6),
        "80 layers, again": row(1.0, 0),
        "4 layers, 2 ranks, cold": row(9.0, 6),
    }
    assert load("compile").verdict(rows, (4, 80)) == {
        "deepest_over_shallowest": 1.2,
        "deepest_over_shallowest_cpu": pytest.approx(11 / 9),
        "graphs_at_each_depth": [6, 6],
        "compiled_again": 0,
        "compiled_by_two_ranks_over_graphs": 1.0,
    }


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_depth_does_not_matter_a_second_start_compiles_nothing_and_ranks_share() -> None:
    compile = load("compile")
    rows = compile.measure((2, 3))
    found = compile.verdict(rows, (2, 3))
    assert rows["2 layers, cold"]["graphs"] == rows["2 layers, cold"]["compiled"] > 0
    assert rows["2 layers, cold"]["compiler_calls"] > 0 == found["compiled_again"]
    assert found["graphs_at_each_depth"] == [6, 6] and found["compiled_by_two_ranks_over_graphs"] == 1.0
