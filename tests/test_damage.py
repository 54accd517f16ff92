"""Damaged checkpoints: each kind is named, and the newest whole one is what a run goes on from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dtrain import checkpoint
from dtrain.checkpoint import CheckpointError, Piece, Record

BENCH = Path(__file__).parents[1] / "bench"
GOLDEN = Path(__file__).parents[1] / "checkpoints" / "golden"
DATA = "__0_0.distcp"
FILES = (DATA, ".metadata", "run.json", "manifest.json")


def save(folder: Path, *steps: int, resume: int | None = None) -> None:
    for step in steps:
        mine = {"master/a": Piece(torch.full((50,), float(step)), (0,), (50,))}
        checkpoint.save(folder, Record(step, {"run": {"resume": resume}}, ""), mine)


def load(folder: Path, step: int) -> float:
    out = {"master/a": Piece(torch.zeros(50), (0,), (50,))}
    checkpoint.restore(folder / f"step-{step}", out, {"master/a"}, None, 1)
    (value,) = set(out["master/a"].tensor.tolist())
    return float(value)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)  # a loop, which root cannot open either


KINDS: tuple[Callable[[Path], None], ...] = (truncate, empty, flip, unreadable, Path.unlink)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_named_and_an_older_checkpoint_taken(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    for name in FILES:
        folder = tmp_path / name
        save(folder, 9, 10)
        assert checkpoint.problems(folder / "step-10") == []
        kind(folder / "step-10" / name)
        (line,) = checkpoint.problems(folder / "step-10")
        assert line.startswith(name) and "\n" not in line
        with pytest.raises(CheckpointError, match=f"^run.resume 10: {folder}/step-10 is damaged: {name}"):
            checkpoint.choose(folder, asked=10)
        record, said = checkpoint.choose(folder)
        assert record is not None and record.step == 9 and load(folder, 9) == 9.0
        assert said[0] == f"warning: {folder}/step-10 is damaged and skipped: {line}"
        assert said[1] == f"{folder}/step-10 is now step-10.aside: the run goes on from step 9"
        save(folder, 10)  # where the damaged one was
        record, said = checkpoint.choose(folder)
        assert record is not None and record.step == 10 and said == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """In any byte of any file: it is found, or it was none that counts (white space in the manifest)."""
    save(tmp_path, 1)
    found = total = 0
    for name in FILES:
        file = tmp_path / "step-1" / name
        good = file.read_bytes()
        for at in range(0, len(good), 5):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            file.write_bytes(bad)
            total += 1
            with contextlib.suppress(CheckpointError):  # and nothing else
                checkpoint.open_tensors(tmp_path / "step-1")
            if checkpoint.problems(tmp_path / "step-1"):
                found += 1
            else:
                assert name == "manifest.json" and json.loads(bad) == json.loads(good)
        file.write_bytes(good)
    assert found > 0.95 * total and checkpoint.problems(tmp_path / "step-1") == []


def test_the_quick_look_reads_small_files_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-1" / DATA)
    flip(tmp_path / "step-2" / ".metadata")
    truncate(tmp_path / "step-3" / DATA)
    assert [bool(checkpoint.problems(tmp_path / f"step-{n}", content=False)) for n in (1, 2, 3)] == [False, True, True]


def test_ranks_read_a_share_each(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip(tmp_path / "step-1" / DATA)
    found = [checkpoint.problems(tmp_path / "step-1", True, rank, 3) for rank in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]


def test_where_none_is_whole_nothing_starts_over(tmp_path: Path) -> None:
    assert checkpoint.choose(tmp_path) == (None, [])
    save(tmp_path, 4, 8)
    truncate(tmp_path / "step-4" / DATA)
    (tmp_path / "step-8" / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint that is whole \(step-8: run.json is missing; step-4: "):
        checkpoint.choose(tmp_path)
    assert checkpoint.steps(tmp_path) == [4, 8]  # as they were


def test_a_chosen_step_and_what_was_made_from_it(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    with pytest.raises(CheckpointError, match=r"step-7 does not exist; .* has step-4, step-8$"):
        checkpoint.choose(tmp_path, asked=7)
    record, said = checkpoint.choose(tmp_path, asked=4)
    assert record is not None and record.step == 4
    assert said == [f"{tmp_path}/step-8 is now step-8.aside: the run goes on from step 4"]
    save(tmp_path, 8, 12, resume=4)  # the run goes on, is stopped, and the same command comes again
    record, said = checkpoint.choose(tmp_path, asked=4)
    assert record is not None and record.step == 12 and said == []
    flip(tmp_path / "step-12" / DATA)
    record, said = checkpoint.choose(tmp_path, asked=4)
    assert record is not None and record.step == 8 and "step-12 is damaged and skipped" in said[0]
    record, said = checkpoint.choose(tmp_path, asked=8)
    assert record is not None and record.step == 8 and said == []


def test_format_1_has_no_manifest(tmp_path: Path) -> None:
    """What can be told without one: a file that is missing, too short, or makes no sense."""
    (step,) = checkpoint.steps(GOLDEN)
    old = GOLDEN / f"step-{step}"
    assert json.loads((old / "run.json").read_text())["format"] == 1 and checkpoint.problems(old) == []
    for name in (DATA, ".metadata", "run.json"):
        for kind in (truncate, empty, unreadable, Path.unlink):
            copy = tmp_path / name / kind.__name__
            shutil.copytree(old, copy)
            kind(copy / name)
            (line,) = checkpoint.problems(copy)
            assert line.startswith((name, "manifest.json")), line


def test_killed_full_and_damaged_the_newest_whole_one_loads() -> None:
    """The short version of `bench/crash.py`, whose counts are in `bench/results/crash.json`."""
    command = [sys.executable, str(BENCH / "crash.py"), "--kills=6", "--disks=2", "--damages=3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    counts = json.loads(done.stdout)["counts"]
    assert [c["good"] for c in counts.values()] == [6, 2, 3, 3, 3, 3], done.stdout + done.stderr
    kept = json.loads((BENCH / "results" / "crash.json").read_text())["counts"]
    assert kept.keys() == counts.keys() and all(c["good"] == c["tried"] for c in kept.values())
