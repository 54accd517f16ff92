"""bench/step.py: every peer trains the same model on the same data as dtrain, and what is made of the times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


STEPS = 6


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """bench/step.py, imported as it runs: from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import step

        yield step


@pytest.fixture(scope="module")
def task(bench: ModuleType) -> object:
    return bench.trainer.make_task(bench.SHAPES["tiny"], STEPS)


@pytest.fixture(scope="module")
def losses(bench: ModuleType) -> list[float]:
    """dtrain's, in one process."""
    step = bench.trainer.start("one", bench.SHAPES["tiny"], 0, 1, False)
    out = [step(i) for i in range(1, STEPS + 1)]
    assert out[-1] < out[0] - 0.01  # it learns
    return out


def losses_of(bench: ModuleType, task: object, folder: Path, *side: object) -> list[float]:
    """A peer's, in the processes that it is measured in."""
    path = folder / "task.npz"
    bench.tasks.write(task, path)
    with ExitStack() as stack:
        running = bench.Running(bench.Side(*side), 1, path, False, sys.executable, stack)
        running.ready()
        turns = running.turn(1, STEPS)
    assert all(seconds > 0 and cpu > 0 for seconds, cpu, _ in turns)
    return [loss for _, _, loss in turns]


def test_plain_compile(bench: ModuleType, task: object, losses: list[float]) -> None:
    from peers import plain_compile

    step = plain_compile.start(task, 0, 1, False)
    assert [step(i) for i in range(1, STEPS + 1)] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("peer", ["explicit_tp", "parallelize_module", "fsdp2"])
def test_peers_on_two_processes(
    bench: ModuleType, task: object, losses: list[float], tmp_path: Path, peer: str
) -> None:
    assert losses_of(bench, task, tmp_path, peer, 2) == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_jax_model(bench: ModuleType, task: object, losses: list[float], tmp_path: Path, devices: int) -> None:
    pytest.importorskip("jax")
    assert losses_of(bench, task, tmp_path, "jax_model", 1, devices) == pytest.approx(losses, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain_compile", "explicit_tp", "fsdp2"])
def test_a_comparison(bench: ModuleType, name: str) -> None:
    said: list[str] = []
    result = bench.compare(bench.PAIRS[name], "tiny", 1, 2, 2, 1, 2, False, sys.executable, said.append)
    assert result["losses_apart"]["all_steps"] <= 1e-5
    assert result["ratio"]["pairs"] == 2 and result["ratio"]["median"] > 0
    assert said[-1].startswith("start 1/1, 2 pairs")


def test_losses_that_differ_are_an_error(bench: ModuleType) -> None:
    bench.check_same("a", "b", [5.0, 4.0, 3.0], [5.0, 4.0005, 3.0])
    for other in ([5.0, 4.1, 3.0], [5.0, float("nan"), 3.0]):
        with pytest.raises(bench.BenchError, match="a and b do not compute the same"):
            bench.check_same("a", "b", [5.0, 4.0, 3.0], other)


def test_a_side_that_fails_says_why(bench: ModuleType) -> None:
    pair = bench.Pair(bench.Side("dtrain:one"), bench.Side("no_such_peer"), 1.0)
    with pytest.raises(bench.BenchError, match=r"no_such_peer, rank 0, ended:\n(.|\n)*No module named"):
        bench.compare(pair, "tiny", 1, 1, 1, 1, 1, False, sys.executable, lambda text: None)


def test_ratio_and_bar(bench: ModuleType) -> None:
    b = [1.0 + 0.01 * (i % 5) for i in range(20)]
    same = bench.ratio([[2 * t for t in b]] * 2, [b] * 2)
    assert same["median"] == pytest.approx(2.0) and same["pairs"] == 40 and same["starts"] == 2
    assert same["low"] <= same["median"] <= same["high"] <= 2 * 1.04
    luck = bench.ratio([b, [1.1 * t for t in b]], [b, b])  # one start is slower as a whole: the interval says so
    assert luck["high"] > 1.09 and luck["low"] < 1.01
    assert bench.met({"median": 1.02, "low": 0.99}, 1.0)
    assert not bench.met({"median": 1.04, "low": 0.99}, 1.0)  # the median is too far above
    assert not bench.met({"median": 1.02, "low": 1.01}, 1.0)  # surely above
    assert bench.met({"median": 0.99, "low": 0.9}, None)
    assert not bench.met({"median": 1.0, "low": 1.0}, None)
