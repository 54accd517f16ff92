"""Starting, watching and ending ranks. Real processes talk over gloo; what they do is a small stand-in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from dtrain import checkpoint, launch, watch
from dtrain.launch import LaunchError, Seat, claim, device_of, first_host, seat_of
from dtrain.layout import Layout, LayoutError, load
from dtrain.rank import Rank
from dtrain.watch import Beat, Report

LAYOUT = """
cluster: {{nodes: {nodes}, gpus_per_node: {each}, gpu: {gpu}}}
mesh: {{dp: {{size: {world}}}}}
shard: {{compute: {{batch: dp}}}}
model: {{family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 11}}
data: {{source: synthetic, seq: 8, batch: {world}}}
run: {{steps: {steps}, folder: {folder}, timeouts: {{start: 60, step: {limit}, save: 60}}}}
"""


def layout_file(folder: Path, world: int, nodes: int = 1, steps: int = 6, limit: float = 60, gpu: str = "cpu") -> str:
    path, each = folder / "x.yaml", world // nodes
    path.write_text(
        LAYOUT.format(nodes=nodes, each=each, gpu=gpu, world=world, steps=steps, folder=folder / "run", limit=limit)
    )
    return str(path)


# What the ranks do: a loop of all-reduces over gloo; the fault is named by the environment.


def loop(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    import torch
    import torch.distributed as dist

    fault, _, who = os.environ.get("FAULT", "").partition(":")
    mine = who == str(rank.rank)
    rank.beat(0, "start")
    if rank.world == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PATIENCE", "60"))))
    Path(layout.run.folder or "").mkdir(exist_ok=True)
    for step in range(1, layout.run.steps + 1):
        rank.beat(step, "B(1, 0)")
        time.sleep(0.2 if fault in ("slow", "deaf") else 0)
        if mine and step == 3:
            if fault == "raise":
                raise ValueError("a bad\nvalue")
            if fault == "user":
                raise LayoutError("x.yaml:1: data.path: no such file")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exit":
                os._exit(7)
            if fault == "sleep":
                time.sleep(600)
            if fault in ("term", "linger"):
                os.kill(os.getpid(), signal.SIGTERM)
        rank.beat(step, "REDUCE(1)")
        if mine and step == 3 and fault == "sleep-late":
            time.sleep(600)
        flag = torch.tensor([float(rank.stopping() and fault != "deaf")])
        dist.all_reduce(flag)
        Path(layout.run.folder or "", f"rank{rank.rank}.began").touch()
        if flag.item():
            break
    rank.beat(step, "save")
    if mine and fault == "linger":  # over its last checkpoint
        threading.Event().wait(600)
    Path(layout.run.folder or "", f"rank{rank.rank}.step").write_text(str(step))
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------- what a launcher says

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "11",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_NODELIST": "gpu[003-004]",
}


def test_seat_of_torchrun() -> None:
    seat = seat_of(TORCHRUN)
    assert seat == Seat(5, 8, 1, "torchrun", "x-1-")


def test_seat_of_srun() -> None:
    seat = seat_of(SRUN)
    assert seat is not None
    assert (seat.rank, seat.world, seat.local_rank, seat.by, seat.job) == (11, 16, 3, "srun", "slurm-77-0")
    assert seat.env["MASTER_ADDR"] == "gpu003"
    assert {k: seat.env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
    }
    assert 15000 <= int(seat.env["MASTER_PORT"]) < 30000
    other = seat_of({**SRUN, "SLURM_STEP_ID": "1"})
    assert other is not None and other.env["MASTER_PORT"] != seat.env["MASTER_PORT"]
    given = seat_of({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert given is not None and (given.env["MASTER_ADDR"], given.env["MASTER_PORT"]) == ("head", "29500")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "left.over", "WORLD_SIZE": "8"},
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},  # a batch script, outside of srun
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # a shell under srun
    ],
)
def test_no_seat(env: dict[str, str]) -> None:
    assert seat_of(env) is None


def test_seat_that_makes_no_sense() -> None:
    with pytest.raises(LaunchError, match="LOCAL_RANK is 'x'; it must be a whole number"):
        seat_of({**TORCHRUN, "LOCAL_RANK": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("a-[12]-ib,a-[13]-ib", "a-12-ib"),
        ("n[1,3]", "n1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_device() -> None:
    # srun shows each task one GPU, a subset of the node's GPUs, all of them under torchrun
    assert device_of("h100-sxm", rank=11, local_rank=3, visible=1) == "cuda:0"
    assert device_of("h100-sxm", rank=11, local_rank=3, visible=4) == "cuda:3"
    assert device_of("h100-sxm", rank=5, local_rank=1, visible=8) == "cuda:1"
    assert device_of("cpu", rank=0, local_rank=0, visible=8) == "cpu"
    assert device_of("h100-sxm", rank=0, local_rank=0, visible=0) == "cpu"
    with pytest.raises(LaunchError, match=r"rank 12 is number 4 on its node .* 4 GPUs are visible"):
        device_of("h100-sxm", rank=12, local_rank=4, visible=4)


def test_deterministic_on_a_gpu_sets_the_workspace_of_cublas() -> None:
    env: dict[str, str] = {}
    launch.make_deterministic(env)
    assert env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    launch.make_deterministic(given := {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert given == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    with pytest.raises(LaunchError, match=r"needs CUBLAS_WORKSPACE_CONFIG :4096:8 or :16:8, not :0:0; unset it"):
        launch.make_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    lock = claim(tmp_path, "GPU-1", 3)
    claim(tmp_path, "GPU-2", 4)
    with pytest.raises(LaunchError, match="ranks 3 and 5 are both on GPU GPU-1"):
        claim(tmp_path, "GPU-1", 5)
    os.close(lock)
    os.close(claim(tmp_path, "GPU-1", 5))


def test_world_differs_from_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = layout_file(tmp_path, 4)
    for key, value in {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    assert launch.start(path, [], True, never) == launch.MISTAKE
    message = capsys.readouterr().err
    assert message == ("torchrun started 8 ranks; the layout has 4 (nodes 1 x gpus_per_node 4); start 4\n")
    monkeypatch.setenv("RANK", "1")  # one rank says it for all
    assert launch.start(path, [], True, never) == launch.MISTAKE
    assert capsys.readouterr().err == ""


def test_ranks_must_be_packed(tmp_path: Path) -> None:
    layout = load(layout_file(tmp_path, 16, nodes=2, gpu="h100-sxm"), [])
    launch.check_seat(layout, Seat(11, 16, 3, "srun", ""))
    with pytest.raises(LaunchError, match=r"rank 11 is number 5 on its node.*should be 3"):
        launch.check_seat(layout, Seat(11, 16, 5, "srun", ""))


def never(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    raise AssertionError("started")


def test_several_nodes_need_a_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = layout_file(tmp_path, 16, nodes=2, gpu="h100-sxm")
    assert launch.start(path, ["run.seed=1"], True, never) == launch.MISTAKE
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "torchrun --nnodes=2 --nproc-per-node=8" in message and f"dtrain.cli run {path} run.seed=1" in message
    assert "srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.stps=5"], "run.stps: unknown key"),
        (["data.batch=3"], "data.batch: 3; must be divisible by dp 2"),
        (["data.source=text", "data.path=/no/such.txt"], "'/no/such.txt'; matches no file"),
        (["cluster.gpu=h100-sxm"], "this machine has 0 GPUs"),
        (["model.heads=3"], "model.heads"),
        (["run.timeouts.step=0"], "run.timeouts.step: 0; must be more than 0"),
        (["run.timeouts.save=-1"], "run.timeouts.save: -1; must be more than 0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    import torch

    if "GPUs" in said and torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert launch.start(layout_file(tmp_path, 2), overrides, True, never) == launch.MISTAKE
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def test_a_folder_where_a_run_is_still_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with checkpoint.claimed(tmp_path / "run"):
        assert launch.start(layout_file(tmp_path, 2), [], True, never) == launch.MISTAKE
    message = capsys.readouterr().err
    assert "run: another run is still writing to it; wait" in message and message.count("\n") == 1


def test_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing starts from random weights instead, and a misspelt folder is not made."""
    file = layout_file(tmp_path, 1)
    for step in (4, 8):
        checkpoint.save(tmp_path / "run", checkpoint.Record(step, {}, ""), {})
    for folder, said in (("run", "has step-4, step-8"), ("rum", "has no checkpoint")):
        assert launch.start(file, ["run.resume=7", f"run.folder={tmp_path / folder}"], True) == launch.MISTAKE
        line = f"{tmp_path / folder / 'step-7'} does not exist; {tmp_path / folder} {said}\n"
        assert capsys.readouterr().err == line
    assert not (tmp_path / "rum").exists()


# ------------------------------------------------------------------------------------------------ one process


def test_alone(tmp_path: Path) -> None:
    ran: list[Rank] = []
    path = layout_file(tmp_path, 1)
    assert launch.start(path, [], True, lambda layout, rank, quiet: ran.append(rank)) == launch.FINISHED
    assert (ran[0].rank, ran[0].world, ran[0].device, ran[0].backend) == (0, 1, "cpu", "gloo")


def test_alone_stops_at_a_signal_and_at_once_at_a_second(tmp_path: Path) -> None:
    path, seen = layout_file(tmp_path, 1), []

    def one(layout: Layout, rank: Rank, quiet: bool) -> None:
        assert not rank.stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank.stopping()
        seen.append("saved")

    def two(layout: Layout, rank: Rank, quiet: bool) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("not reached")

    before = signal.getsignal(signal.SIGTERM)
    assert launch.start(path, [], True, one) == 143
    assert launch.start(path, [], True, two) == 130
    assert seen == ["saved"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_alone_failing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = layout_file(tmp_path, 1)

    def broken(layout: Layout, rank: Rank, quiet: bool) -> None:
        rank.beat(3, "F(1, 0)")
        raise ValueError("a bad\nvalue")

    assert launch.start(path, [], True, broken) == launch.FAILED
    where, line = capsys.readouterr().err.splitlines()
    assert line == "rank 0 failed at step 3 in F(1, 0): ValueError: a bad value"
    text = Path(where.split(": ")[1]).read_text()
    assert text.startswith(line) and "Traceback" in text and "in broken" in text

    def mistaken(layout: Layout, rank: Rank, quiet: bool) -> None:
        raise LayoutError("x.yaml:3: data.path: no such file")

    assert launch.start(path, [], True, mistaken) == launch.FAILED
    assert capsys.readouterr().err == "x.yaml:3: data.path: no such file\n"


# -------------------------------------------------------------------------------------------- who is to blame


def test_beats(tmp_path: Path) -> None:
    memory = watch.heart(tmp_path, 3)
    beat = watch.beater(memory)
    assert watch.beats(tmp_path)[3].phase == "start"
    beat(7, "F(1, 0)")  # the first step compiles
    assert watch.beats(tmp_path)[3].phase == "start"
    beat(8, "RECV act(0, 1) from 0")
    b = watch.beats(tmp_path)[3]
    assert (b.rank, b.pid, b.signal, b.step, b.phase, b.what) == (
        3,
        os.getpid(),
        0,
        8,
        "step",
        "RECV act(0, 1) from 0",
    )
    assert abs(time.monotonic() - b.at) < 5
    watch.note_signal(memory, 15)
    beat(8, "save")
    b = watch.beats(tmp_path)[3]
    assert (b.phase, b.signal) == ("save", 15)
    watch.done(memory)
    assert watch.beats(tmp_path)[3].phase == "done"
    beat(9, "x" * 500)
    assert watch.beats(tmp_path)[3].what == "x" * 104


def test_a_beat_is_cheap(tmp_path: Path) -> None:
    beat = watch.beater(watch.heart(tmp_path, 0))
    best = min(_time(beat) for _ in range(20))
    assert best < 5e-6  # about one microsecond on an idle core


def _time(beat: object) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        beat(1, "F(12, 3)")  # type: ignore[operator]
    return (time.perf_counter() - began) / 1000


LIMITS = {"start": 100.0, "step": 10.0, "save": 50.0}


def at(rank: int, seconds: float, step: int = 3, phase: str = "step", what: str = "F(0, 0)") -> Beat:
    return Beat(rank, 1, 0, step, seconds, phase, what)


def test_each_phase_has_its_own_limit() -> None:
    def late(*found: Beat) -> bool:
        return watch.overdue({b.rank: b for b in found}, LIMITS, now=100) is not None

    assert not late(at(0, 91), at(1, 95))
    assert late(at(0, 89), at(1, 99))
    # others wait for one that saves, or that compiles
    assert not late(at(0, 80), at(1, 60, phase="save"))
    assert not late(at(0, 80), at(1, 1, phase="start"))
    assert late(at(0, 80), at(1, 49, phase="save"))
    assert not late(at(0, 1, phase="done"), at(1, 99))
    assert not late()


def test_the_rank_behind() -> None:
    seen = {b.rank: b for b in (at(0, 5), at(1, 4), at(2, 6), at(3, 1, phase="done"))}
    assert watch.behind(seen, {}) == 1  # silent for the longest
    assert watch.behind({**seen, 2: at(2, 6, step=2)}, {}) == 2  # at an earlier step
    assert watch.behind(seen, {}, gave_up=[1]) == 0
    assert watch.behind(seen, {}, gave_up=[0, 1, 2]) is None
    here = f'Current thread 0x1 (most recent call first):\n  File "{__file__}", line 1 in f\n'
    torch_op = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/_ops.py", line 5 in __call__\n'
    assert watch.behind(seen, {0: torch_op, 1: torch_op, 2: here}) == 2  # not in a collective


def test_first_cause() -> None:
    lost = Report(0, 1.0, "collateral", "RuntimeError: Connection closed by peer")
    abort = watch.death(1, 1.5, -signal.SIGABRT)
    error = Report(2, 2.0, "error", "ValueError: x")
    killed = watch.death(3, 3.0, -signal.SIGKILL)
    assert watch.first_cause([killed, error, abort, lost]) is error
    assert watch.first_cause([killed, abort, lost]) is killed
    assert watch.first_cause([abort, lost]) is abort
    assert watch.first_cause([lost]) is lost
    assert watch.first_cause([]) is None
    late = Report(0, 1.0, "collateral", "RuntimeError: Timed out waiting 10000ms for recv operation")
    assert watch.in_vain([late, lost]) and watch.in_vain([abort])
    assert not watch.in_vain([lost]) and not watch.in_vain([late, error]) and not watch.in_vain([])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40346"),
            "collateral",
        ),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), "collateral"),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "collateral"),
        (ConnectionResetError(104, "Connection reset by peer"), "collateral"),
        (ValueError("Connection closed by peer"), "error"),
        (RuntimeError("shape mismatch"), "error"),
        (MemoryError(), "error"),
        (LayoutError("x.yaml:1: ..."), "user"),
    ],
)
def test_report(error: BaseException, kind: str) -> None:
    assert watch.report(0, error).kind == kind


def test_reports_of_a_death() -> None:
    assert watch.death(2, 0, -9).message == "was killed by signal 9 (SIGKILL; often out of memory)"
    assert watch.death(2, 0, -11).message == "was killed by signal 11 (SIGSEGV)"
    assert watch.death(2, 0, 7).message == "ended without a word, exit code 7"


# ------------------------------------------------------------------------------------------ several processes


def start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    world: int = 2,
    limit: float = 60,
    patience: float = 60,
) -> int:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PATIENCE", str(patience))
    grace = 1 if fault.startswith("linger") else 60
    return launch.start(layout_file(tmp_path, world, limit=limit), [f"run.grace={grace}"], True, loop)


def steps(tmp_path: Path) -> list[str]:
    return [p.read_text() for p in sorted((tmp_path / "run").glob("*.step"))]


def last_lines(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> tuple[str, str]:
    """The last line that was printed, and the error file that the line before it names."""
    lines = capfd.readouterr().err.splitlines()
    path = Path(lines[-2].split(": ")[-1])
    assert path.parent == tmp_path / "run" / "errors"
    return lines[-1], path.read_text()


def test_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert start(tmp_path, monkeypatch, "kill:1") == launch.FAILED
    assert time.monotonic() - began < 60
    line, text = last_lines(capfd, tmp_path)
    assert line == ("rank 1 (dp 1) was killed by signal 9 (SIGKILL; often out of memory) at step 3 in B(1, 0)")
    assert text.startswith(line) and "rank 0: step 3, REDUCE(1)" in text


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(tmp_path, monkeypatch, "term:1") == 143
    assert steps(tmp_path) == ["3", "3"]


LEFT = "left 1 s after SIGTERM (run.grace) without a last checkpoint; there is none"


def test_a_last_checkpoint_that_takes_longer_than_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, monkeypatch, "linger:1") == launch.FAILED
    assert capfd.readouterr().err.splitlines() == [LEFT]


def test_a_rank_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, monkeypatch, "sleep:2", world=3, limit=3) == launch.FAILED
    line, text = last_lines(capfd, tmp_path)
    assert re.fullmatch(
        r"rank 2 \(dp 2\) hangs at step 3 in B\(1, 0\): no progress for \d+ s "
        r"\(run.timeouts.step is 3 s\); ranks 0, 1 wait in REDUCE\(1\)",
        line,
    )
    assert "stack of rank 0" in text and "in loop" in text


@pytest.mark.long
def test_a_rank_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, monkeypatch, "raise:2", world=3) == launch.FAILED
    line, text = last_lines(capfd, tmp_path)
    assert line == "rank 2 (dp 2) failed at step 3 in B(1, 0): ValueError: a bad value"
    assert "in loop" in text


@pytest.mark.long
def test_a_users_mistake_found_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, monkeypatch, "user:1") == launch.FAILED
    assert capfd.readouterr().err == "x.yaml:1: data.path: no such file\n"


@pytest.mark.long
def test_a_rank_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, monkeypatch, "exit:0") == launch.FAILED
    line, _ = last_lines(capfd, tmp_path)
    assert line == "rank 0 (dp 0) ended without a word, exit code 7 at step 3 in B(1, 0)"


@pytest.mark.long
@pytest.mark.parametrize("patience", [60, 4])
def test_the_rank_that_others_wait_for_in_one_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], patience: float
) -> None:
    """All ranks have announced the same collective, one never calls it; noticed by our limit or by gloo's."""
    limit = 3 if patience == 60 else 60
    assert start(tmp_path, monkeypatch, "sleep-late:1", 3, limit, patience) == launch.FAILED
    line, _ = last_lines(capfd, tmp_path)
    assert line.startswith("rank 1 (dp 1) hangs at step 3 in REDUCE(1): no progress")
    assert line.endswith("ranks 0, 2 wait in REDUCE(1)")


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_launch import launch, loop
if __name__ == "__main__":
    sys.exit(launch.start({path!r}, ["run.grace={grace}"], True, loop))
"""


def spawn(tmp_path: Path, fault: str, command: list[str], steps: int = 6, world: int = 2) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    path = layout_file(tmp_path, world, steps=steps)
    grace = 1 if fault.startswith("linger") else 60
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), path=path, grace=grace))
    return subprocess.Popen(
        [*command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "FAULT": fault},
    )


def until_training(tmp_path: Path) -> None:
    end = time.monotonic() + 60
    while not (tmp_path / "run" / "rank0.began").exists():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [(signal.SIGTERM, False, 143), (signal.SIGINT, True, 130)],  # kill, and Ctrl-C in a terminal
)
def test_a_signal_to_the_starting_process(tmp_path: Path, number: signal.Signals, to_all: bool, code: int) -> None:
    process = spawn(tmp_path, "slow", [sys.executable], steps=1000)
    until_training(tmp_path)
    (os.killpg if to_all else os.kill)(process.pid, number)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == code
    assert len(set(steps(tmp_path))) == 1 and len(steps(tmp_path)) == 2


@pytest.mark.long
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    process = spawn(tmp_path, "deaf", [sys.executable], steps=1000)
    until_training(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130 and not steps(tmp_path)


@pytest.mark.long
def test_a_signal_before_the_ranks_are_up(tmp_path: Path) -> None:
    process = spawn(tmp_path, "slow", [sys.executable], steps=1000)
    end = time.monotonic() + 60
    while not subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and len(steps(tmp_path)) == 2


TORCHRUN_COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", ""),
        ("raise:1", "rank 1 (dp 1) failed at step 3 in B(1, 0): ValueError: a bad value"),
        ("kill:0", "rank 0 (dp 0) was killed or ended without a word at step 3 in B(1, 0)"),
    ],
)
def test_inside_torchrun(tmp_path: Path, fault: str, said: str) -> None:
    process = spawn(tmp_path, fault, TORCHRUN_COMMAND)
    out = process.communicate(timeout=90)[0]
    ours = [line for line in out.splitlines() if re.match(r"rank \d", line)]
    assert ours == [said] if said else process.returncode == 0 and len(steps(tmp_path)) == 2


@pytest.mark.long
@pytest.mark.parametrize("command", [[sys.executable], TORCHRUN_COMMAND], ids=["alone", "torchrun"])
def test_the_grace_time_of_one_process_and_inside_torchrun(tmp_path: Path, command: list[str]) -> None:
    process = spawn(tmp_path, "linger:0", command, world=1 if command == [sys.executable] else 2)
    lines = process.communicate(timeout=90)[0].splitlines()
    assert [line for line in lines if line.startswith("left")] == [LEFT] and process.returncode == launch.FAILED


def slow_start_and_save(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    """The first step and the save of rank 1 take longer than a step may."""

    def beat(step: int, what: str) -> None:
        rank.beat(step, what)
        if rank.rank == 1 and (what == "save" or (step == 1 and what.startswith("B"))):
            time.sleep(5)

    loop(layout, replace(rank, beat=beat), quiet=quiet)


@pytest.mark.long
def test_a_slow_first_step_and_a_slow_save_are_no_hang(tmp_path: Path) -> None:
    assert launch.start(layout_file(tmp_path, 2, limit=2), [], True, slow_start_and_save) == launch.FINISHED
    assert steps(tmp_path) == ["6", "6"]


def test_a_beat_is_never_seen_half_written(tmp_path: Path) -> None:
    """The launcher reads while ranks write; a record without a time would look like a rank that hangs."""
    beat = watch.beater(watch.heart(tmp_path, 0))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            beat(3, "B(2, 1)")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [watch.beats(tmp_path)[0] for _ in range(3000)]
    finally:
        stop.set()
        writer.join()
    assert all(b.at > 0 for b in seen)
    assert {b.what for b in seen} <= {"start", "B(2, 1)"}
