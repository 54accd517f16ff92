"""Writing in the background, on one rank and on several, and which checkpoints stay."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_train import alone, make, rows, tensors

from dtrain import checkpoint
from dtrain.checkpoint import CheckpointError, Piece, Record, SaveConfig, Saver, saving
from dtrain.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def pieces(value: float, rank: int = 0, world: int = 1) -> dict[str, Piece]:
    """A rank's rows of a tensor, and one that all ranks hold."""
    mine = Piece(torch.full((4, 3), value), (4 * rank, 0), (4 * world, 3))
    return {"master/a": mine, "updates": Piece(torch.tensor(value), (), ())}


def values(folder: Path, step: int, world: int = 1) -> set[float]:
    out = {"master/a": Piece(torch.zeros(4 * world, 3), (0, 0), (4 * world, 3))}
    checkpoint.restore(folder / f"step-{step}", out, {"master/a", "updates"}, None, 1)
    assert checkpoint.problems(folder / f"step-{step}") == []
    return set(out["master/a"].tensor.flatten().tolist())


class Gate:
    """Holds up what writes, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.calls = threading.Event(), 0
        original: Callable[..., Any] = saving.write_part

        def write(*args: Any) -> Any:
            self.calls += 1
            assert self.open.wait(20)
            return original(*args)

        monkeypatch.setattr(saving, "write_part", write)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, mine = Gate(monkeypatch), pieces(1.0)
    saver = Saver(SaveConfig(tmp_path, busy="wait"))
    saver.save(Record(2, {}, ""), mine)
    mine["master/a"].tensor.fill_(7.0)  # the next step's update is in place
    assert checkpoint.latest(tmp_path) is None and (tmp_path / "step-2.tmp").is_dir()
    ((step, line),) = saver.news()
    assert step == 2 and "from a copy in CPU memory of 52B" in line
    gate.open.set()
    saver.settle()
    assert values(tmp_path, 2) == {1.0}
    assert saver.news() == [(2, f"saved {tmp_path / 'step-2'}")] and saver.news() == []


def test_a_second_save_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(SaveConfig(tmp_path, busy="wait"))
    saver.save(Record(2, {}, ""), pieces(2.0))
    threading.Timer(0.2, gate.open.set).start()
    saver.save(Record(4, {}, ""), pieces(4.0))
    assert checkpoint.steps(tmp_path)[0] == 2
    saver.save(Record(5, {}, ""), pieces(5.0), last=True)
    assert checkpoint.steps(tmp_path) == [2, 4, 5]
    assert [values(tmp_path, step) for step in (2, 4, 5)] == [{2.0}, {4.0}, {5.0}]


def test_or_is_left_out_but_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(SaveConfig(tmp_path, busy="skip"))
    saver.save(Record(2, {}, ""), pieces(2.0))
    saver.save(Record(4, {}, ""), pieces(4.0))
    assert saver.news()[-1] == (4, "not saved: step 2 is still being written")
    threading.Timer(0.2, gate.open.set).start()
    saver.save(Record(6, {}, ""), pieces(6.0), last=True)
    assert checkpoint.steps(tmp_path) == [2, 6] and values(tmp_path, 6) == {6.0}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
def test_a_failure_in_the_background_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    saver = Saver(SaveConfig(tmp_path, busy="wait"))
    saver.save(Record(2, {}, ""), pieces(2.0))
    saver.settle()

    def full(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(saving, "write_part", full)
    saver.save(Record(4, {}, ""), pieces(4.0))
    while not saver.failed:
        time.sleep(0.01)
    text = "No space left on device" if isinstance(error, OSError) else "RuntimeError: a bug"
    with pytest.raises(CheckpointError, match=f"^no checkpoint of step 4: {text}; the last good one is .*step-2$"):
        saver.save(Record(6, {}, ""), pieces(6.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_run_that_fails_completes_what_it_was_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with pytest.raises(ZeroDivisionError), checkpoint.open_saver(SaveConfig(tmp_path, busy="wait")) as saver:
        saver.save(Record(2, {}, ""), pieces(2.0))
        threading.Timer(0.2, gate.open.set).start()
        _ = 1 / 0
    assert values(tmp_path, 2) == {2.0}


# ------------------------------------------------------------------------------------------------- several ranks


def forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dtrain.train", "torch.distributed.checkpoint", "dtrain.models.llama"])
    return context


def _rank(rank: int, world: int, port: int, folder: Path, work: Callable[..., Any], out: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    cfg = SaveConfig(folder, rank, world, None, "wait", None, patience=20)
    try:
        out.put((rank, work(cfg)))
    except BaseException as error:
        out.put((rank, f"{type(error).__name__}: {error}"))


def on_ranks(world: int, folder: Path, work: Callable[..., Any]) -> list[Any]:
    """What `work(config)` gave in a process a rank, over gloo, or the error that it raised."""
    context = forkserver()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, world, port, folder, work, out)) for r in range(world)]
    for p in ranks:
        p.start()
    try:
        return [value for _, value in sorted(out.get(timeout=60) for _ in ranks)]
    finally:
        for p in ranks:
            p.join(5)
            p.kill()


def _three_saves(cfg: SaveConfig) -> list[tuple[int, str]]:
    with checkpoint.open_saver(cfg) as saver:
        for step in (1, 2, 3):
            mine = pieces(step, cfg.rank, cfg.world)
            saver.save(Record(step, {}, ""), mine, last=step == 3)
            mine["master/a"].tensor.fill_(9.0)
        return saver.news()


def _one_is_full(cfg: SaveConfig) -> None:
    original = saving.write_part

    def write(*args: Any) -> Any:
        if cfg.rank == 1:
            raise OSError(28, "No space left on device")
        return original(*args)

    with checkpoint.open_saver(cfg) as saver:
        saver.save(Record(1, {}, ""), pieces(1.0, cfg.rank, cfg.world))
        saver.settle()
        saving.write_part = write  # type: ignore[assignment]
        saver.save(Record(2, {}, ""), pieces(2.0, cfg.rank, cfg.world))
        saver.save(Record(3, {}, ""), pieces(3.0, cfg.rank, cfg.world), last=True)


def test_ranks_write_a_part_each(tmp_path: Path) -> None:
    said = on_ranks(3, tmp_path, _three_saves)
    assert [line for _, line in said[0] if line.startswith("saved")] == [
        f"saved {tmp_path / f'step-{n}'}" for n in (1, 2, 3)
    ]
    assert [values(tmp_path, step, 3) for step in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    names = {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata", "run.json", "manifest.json"}
    assert {p.name for p in (tmp_path / "step-1").iterdir()} == names


def test_the_failure_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    said = on_ranks(2, tmp_path, _one_is_full)
    assert len(set(said)) == 1
    assert said[0].startswith("CheckpointError: no checkpoint of step 2: ") and "No space left on device" in said[0]
    assert said[0].endswith(f"the last good one is {tmp_path / 'step-1'}")
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def _a_disk_of_its_own(cfg: SaveConfig) -> None:
    mine = replace(cfg, folder=cfg.folder / f"node-{cfg.rank}")
    Saver(mine).save(Record(1, {}, ""), pieces(1.0, cfg.rank, cfg.world))


def test_a_folder_that_is_another_one_on_each_node(tmp_path: Path) -> None:
    """The first save tells, not the day when the run is to go on."""
    for rank, said in enumerate(on_ranks(2, tmp_path, _a_disk_of_its_own)):
        assert f"rank 1 does not see {tmp_path}/node-{rank}/step-1.tmp, which rank 0 made: run.folder must" in said
        assert said.endswith("be on a disk that all nodes share; there is no older one")
    assert not list(tmp_path.rglob("step-*"))


# --------------------------------------------------------------------------------------------------------- a run


def _slow_at_the_second(layout: Layout) -> None:
    original, calls = saving.write_part, [0]

    def write(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            args[0].joinpath("__0_0.distcp").write_bytes(b"the first bytes")
            time.sleep(600)
        return original(*args)

    saving.write_part = write  # type: ignore[assignment]
    alone(layout)


def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4 is being written in the background when the process is killed: step 2 is still there, and is told."""
    options = ("run.steps=6", "run.save_every=2", "run.background_save=wait", "run.keep={last: 1}")
    layout = make(tmp_path, *options)
    process = forkserver().Process(target=_slow_at_the_second, args=(layout,))
    process.start()
    end = time.monotonic() + 60
    while not (tmp_path / "step-4.tmp" / "__0_0.distcp").exists():
        assert time.monotonic() < end and process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    assert checkpoint.steps(tmp_path) == [2] and checkpoint.problems(tmp_path / "step-2") == []
    alone(layout, quiet=False)
    assert f"going on after step 2, from {tmp_path / 'step-2'}" in capsys.readouterr().out
    assert [step for step, _ in rows(layout, "loss")] == [1, 2, 3, 4, 5, 6]
    assert {p.name for p in tmp_path.glob("step-*")} == {"step-6"}


def test_a_run_that_saves_in_the_background_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each checkpoint has the bits of one written in the foreground, though its writer is slow."""
    options = ("run.steps=5", "run.save_every=2")
    fore = make(tmp_path / "fore", *options)
    back = make(tmp_path / "back", *options, "run.background_save=wait", "run.keep={last: 2, every: 5}")
    alone(fore)
    original: Callable[..., Any] = saving.write_part
    monkeypatch.setattr(saving, "write_part", lambda *args: (time.sleep(0.2), original(*args))[1])
    alone(back, quiet=False)
    assert "step 2/5  saved " in capsys.readouterr().out
    assert rows(back, "loss", "grad_norm") == rows(fore, "loss", "grad_norm")
    assert checkpoint.steps(tmp_path / "back") == [4, 5]  # 2 was pruned
    for step in (4, 5):
        a, b = tensors(tmp_path / "fore", step), tensors(tmp_path / "back", step)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_stops_soon_after_a_failure_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_part", full)
    layout = make(tmp_path, "run.steps=400", "run.save_every=2", "run.background_save=skip")
    with pytest.raises(CheckpointError, match="of step 2: No space left on device; there is no older one"):
        alone(layout)
    assert len(rows(layout)) < 100


# ------------------------------------------------------------------------------------------------ what stays


def folder_of(path: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.save(path, Record(step, {}, ""), pieces(step))
    return path


def test_pruning_keeps_the_last_and_each_so_many(tmp_path: Path) -> None:
    """Numbers count as numbers, and names of others are left alone."""
    folder_of(tmp_path, 0, 9, 10, 20, 25)
    for name in ("step-10.backup", "foo-step-5", "step-7.tmp", "step-1000.tmp"):
        (tmp_path / name).mkdir()
    saver = Saver(SaveConfig(tmp_path, keep=(2, 10)))
    saver.save(Record(100, {}, ""), pieces(1.0))
    assert checkpoint.steps(tmp_path) == [0, 10, 20, 25, 100]  # 0 is what the run began with
    saver.save(Record(101, {}, ""), pieces(1.0))
    assert checkpoint.steps(tmp_path) == [0, 10, 20, 100, 101]
    names = {p.name for p in tmp_path.iterdir()}
    assert {"step-10.backup", "foo-step-5", "step-1000.tmp"} <= names and "step-7.tmp" not in names


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    folder_of(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / "run.json").unlink()
    Saver(SaveConfig(tmp_path, keep=(2, 0))).save(Record(4, {}, ""), pieces(4.0))
    assert checkpoint.steps(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize("call", ["os.rename", "shutil.rmtree"])
def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folder_of(tmp_path, 1)

    def refuse(path: Path, *rest: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    saver = Saver(SaveConfig(tmp_path, keep=(1, 0)))
    original = saving.publish

    def publish(*args: Any) -> None:
        original(*args)
        monkeypatch.setattr(call, refuse)

    monkeypatch.setattr(saving, "publish", publish)
    saver.save(Record(2, {}, ""), pieces(2.0))
    (_, saved), (_, warning) = saver.news()
    assert saved == f"saved {tmp_path / 'step-2'}"
    assert warning.startswith(f"warning: {tmp_path}/step-1") and warning.endswith(
        "cannot be removed: Permission denied"
    )
    monkeypatch.undo()
    saver.save(Record(3, {}, ""), pieces(3.0))
    assert {p.name for p in tmp_path.iterdir()} == {"step-3"}
