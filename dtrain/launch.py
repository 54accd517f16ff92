"""Ranks and rendezvous: the only reader of the environment.

One process trains in this very process. More on one machine are started through torch elastic. Inside
torchrun or srun this process is one rank of many, and what they say is used. Whoever starts ranks also
watches them: it names the first cause when one fails, the rank that is behind when none moves, and passes a
request to stop on.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain import heap, watch
from dtrain import layout as layouts
from dtrain.grace import grace
from dtrain.layout import Layout
from dtrain.rank import Rank

# Exit codes; a run stopped by a signal, its checkpoint written, ends with 128 + the signal: 130 or 143.
FINISHED, FAILED, MISTAKE = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A failed rank's peers get this long to say what they saw, and are then ended.
GRACE_S = 3.0
# How long ended processes may take to be gone, and how often they are looked at.
GONE_S, POLL_S = 20.0, 0.05

Work = Callable[..., None]  # work(layout, rank, quiet=...)


class LaunchError(Exception):
    """The run cannot start as asked; one line for a person."""


@dataclass(frozen=True)
class Seat:
    """What a launcher says of this process. `job` is a name that the ranks of this run on a machine share,
    `by` who started it; `env` what torch.distributed still needs in the environment."""

    rank: int
    world: int
    local_rank: int
    by: str
    job: str
    env: Mapping[str, str] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------- the environment


def seat_of(env: Mapping[str, str]) -> Seat | None:
    """What torchrun or srun say of this process; None where neither started it."""
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        job = "-".join(env.get(name, "") for name in names)
        return Seat(_int(env, "RANK"), _int(env, "WORLD_SIZE"), _int(env, "LOCAL_RANK"), "torchrun", job)
    # A batch script and an interactive shell also have SLURM_PROCID; only srun's tasks belong to a step of
    # several.
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in env:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if _int(env, tasks) < 2:
        return None
    rank, world, local = _int(env, "SLURM_PROCID"), _int(env, tasks), _int(env, "SLURM_LOCALID")
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    number_of_job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
    number = int(re.sub(r"\D", "", step) or 0)
    given = {
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(nodes),
        # Below the range that systems give to outgoing connections; another step of the job gets another one.
        "MASTER_PORT": env.get("MASTER_PORT") or str(15000 + (number_of_job * 7 + number) % 15000),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
    }
    return Seat(rank, world, local, "srun", f"slurm-{number_of_job}-{step}", given)


def _int(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        raise LaunchError(f"the environment's {name} is {env.get(name)!r}; it must be a whole number") from None


def first_host(nodes: str) -> str:
    """`gpu[003-006,9],cpu1` -> `gpu003`, SLURM's way to write a list of hosts."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError("srun gives no SLURM_NODELIST; set MASTER_ADDR to the host of rank 0")
    return "".join(part or "" for part in match.groups())


def device_of(gpu: str, rank: int, local_rank: int, visible: int) -> str:
    """The device of a rank on a node where this process sees `visible` GPUs.

    SLURM may show each task its own GPU only: then that is device 0, whatever the local rank. Raises
    LaunchError where the rank has none.
    """
    if gpu == "cpu" or visible == 0:
        return "cpu"
    if visible == 1:
        return "cuda:0"
    if local_rank >= visible:
        raise LaunchError(
            f"rank {rank} is number {local_rank} on its node (from 0), where {visible} GPUs are visible; "
            f"start at most {visible} ranks there or show it more GPUs"
        )
    return f"cuda:{local_rank}"


def make_deterministic(env: MutableMapping[str, str]) -> None:
    """cuBLAS repeats its results only with one of two workspaces, which it reads when it starts; torch refuses others.

    Raises LaunchError where the environment asks for another one.
    """
    given = env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if given not in (":4096:8", ":16:8"):
        raise LaunchError(
            f"run.deterministic needs CUBLAS_WORKSPACE_CONFIG :4096:8 or :16:8, not {given}; unset it or use one"
        )


def claim(folder: Path, gpu: str, rank: int) -> int:
    """Take a GPU (by its unique id) for a rank until this process ends; returns the lock's file descriptor.

    Raises LaunchError naming both ranks when another rank of this run on this machine has it.
    """
    import fcntl  # not on Windows, where there is one process

    lock = os.open(folder / f"gpu-{gpu}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        other = os.read(lock, 20).decode() or "?"
        os.close(lock)
        raise LaunchError(
            f"ranks {other} and {rank} are both on GPU {gpu}; give each rank its own "
            "(CUDA_VISIBLE_DEVICES, or --gpus-per-node with srun), or start fewer ranks on this node"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, str(rank).encode())
    return lock


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_seat(layout: Layout, seat: Seat) -> None:
    """Whether the launcher started what the layout describes; raises LaunchError."""
    per_node = layout.cluster.gpus_per_node
    if seat.world != layout.world:
        raise LaunchError(
            f"{seat.by} started {seat.world} ranks; the layout has {layout.world} "
            f"(nodes {layout.cluster.nodes} x gpus_per_node {per_node}); start {layout.world}"
        )
    if layout.cluster.gpu != "cpu" and seat.rank % per_node != seat.local_rank:
        raise LaunchError(
            f"rank {seat.rank} is number {seat.local_rank} on its node; the layout needs ranks packed node "
            f"by node, {per_node} each, so it should be {seat.rank % per_node} (srun: --distribution=block)"
        )


def commands(layout: Layout, argv: str) -> str:
    """How to start a layout of several nodes."""
    nodes, each = layout.cluster.nodes, layout.cluster.gpus_per_node
    gpus = "" if layout.cluster.gpu == "cpu" else f" --gpus-per-node={each}"
    return (
        f"on each node: torchrun --nnodes={nodes} --nproc-per-node={each} --rdzv-backend=c10d "
        f"--rdzv-endpoint=FIRST_HOST:29500 -m dtrain.cli run {argv}; "
        f"or under SLURM: srun --nodes={nodes} --ntasks-per-node={each}{gpus} --kill-on-bad-exit=1 "
        f"dtrain run {argv}"
    )


# ------------------------------------------------------------------------------------------------------ start


def start(path: str, overrides: list[str], quiet: bool, work: Work | None = None, allow: Collection[str] = ()) -> int:
    """Run a layout, to whose `allow` these are added; returns the exit code. `work` is what each rank does,
    `dtrain.train.train` by default; it is sent to the ranks, so it must be a function of a module.

    Whatever can be known before processes start is checked before they start, and told in one line.
    """
    seat = None
    with ExitStack() as held:
        try:
            seat = seat_of(os.environ)
            layout = layouts.load(path, overrides)
            if more := {*allow} - {*layout.allow}:
                layout = layouts.vary(layout, [f"allow=[{', '.join(sorted({*layout.allow, *more}))}]"])
            _check(layout, seat, " ".join([path, *overrides]))
            line = _finished(layout) if work is None else None
            if not line and (seat is None or seat.rank == 0):
                held.enter_context(_claimed(layout))
        except Exception as error:
            return _refused(error, seat)
        if line:
            if seat is None or seat.rank == 0:
                print(line, flush=True)
            return FINISHED
        return _perform_all(layout, seat, quiet, work or _train)


def sample(source: str, prompts: list[str], most: int, how: Any, tp: int | None, options: Mapping[str, Any]) -> int:
    """Generate text, over `tp` processes of this machine or those of a launcher; returns the exit code. `options` are
    the others of `sample.open_source` and `sample.prepare`."""

    def prepared(found: Any, ranks: int, gpu: str, precision: str) -> tuple[Layout, Work]:
        from dtrain import sample

        layout, ask = sample.prepare(found, prompts, most, how, ranks, gpu, precision)
        return layout, partial(sample.work, ask)

    return _with_model(source, tp, options, prepared)


def evaluate(source: str, text: str, how: Any, tp: int | None, options: Mapping[str, Any]) -> int:
    """Tell how well a model predicts a text, over `tp` processes of this machine or those of a launcher; returns the
    exit code. `options` as for `sample`."""

    def prepared(found: Any, ranks: int, gpu: str, precision: str) -> tuple[Layout, Work]:
        from dtrain import evaluate

        layout, ask = evaluate.prepare(found, text, how, ranks, gpu, precision)
        return layout, partial(evaluate.work, ask)

    return _with_model(source, tp, options, prepared)


def _with_model(
    source: str, tp: int | None, options: Mapping[str, Any], prepared: Callable[..., tuple[Layout, Work]]
) -> int:
    """Open a model and do the work that `prepared` makes of it."""
    seat = None
    try:
        seat = seat_of(os.environ)
        import torch

        from dtrain import sample

        found = sample.open_source(Path(source), options.get("tokenizer"), options.get("file"))
        ranks = tp or (seat.world if seat else 1)
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # Which GPU it is matters to predictions only.
        gpu = "cpu" if visible == 0 or (seat is None and visible < ranks) else "h100-sxm"
        layout, work = prepared(found, ranks, gpu, options.get("precision") or "")
        if seat is not None:
            check_seat(layout, seat)
    except Exception as error:
        return _refused(error, seat)
    return _perform_all(layout, seat, True, work)


def _refused(error: Exception, seat: Seat | None) -> int:
    """A mistake of the user's, told once in one line; what is none is raised again."""
    if not watch.is_ours(error):
        raise error
    if seat is None or seat.rank == 0:
        _say(str(error))
    return MISTAKE


def _perform_all(layout: Layout, seat: Seat | None, quiet: bool, work: Work) -> int:
    """Do the work on every rank, in processes started here unless this is one of a launcher's."""
    if seat is not None:
        return _one_of_many(layout, seat, quiet, work)
    return _alone(layout, quiet, work) if layout.world == 1 else _many(layout, quiet, work)


def _train(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    from dtrain.train import train  # torch is slow to import, and a mistake should be told at once

    train(layout, rank, quiet=quiet)


def _claimed(layout: Layout) -> AbstractContextManager[None]:
    from dtrain.checkpoint import claimed

    return claimed(Path(layout.run.folder or "."))


def _finished(layout: Layout) -> str | None:
    from dtrain.train import nothing_left

    return nothing_left(layout)


def _check(layout: Layout, seat: Seat | None, argv: str) -> None:
    if seat is not None:
        check_seat(layout, seat)
    elif layout.cluster.nodes > 1:
        raise LaunchError(f"the layout has {layout.cluster.nodes} nodes; start it {commands(layout, argv)}")
    if layout.world > 1 and sys.platform == "win32":
        raise LaunchError("several processes need Linux or macOS; use WSL, or a layout of one process")
    missing = layouts.check_place(layout)
    if seat is not None:  # srun may show each task one GPU: `device_of` looks at what this rank sees
        missing = [line for line in missing if "cluster.gpus_per_node" not in line]
    if missing:
        raise LaunchError("\n".join(missing))
    from dtrain import data
    from dtrain.plan import plan
    from dtrain.train import data_config

    data.open_source(data_config(plan(layout)))


def _limits(layout: Layout) -> dict[str, float]:
    """Seconds without a sign of life, by phase."""
    t = layout.run.timeouts
    return {"start": t.start, "step": t.step, "save": t.save}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- one rank


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals go to `handler` while open. Only the main thread can have handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _perform(
    work: Work, layout: Layout, seat: Seat, folder: Path, quiet: bool, leave: Callable[[], None] | None = None
) -> int:
    """Do the work of one rank; its heartbeat, and its report if it fails, go to `folder`. Returns an exit code; where
    `run.grace` has passed since a signal, it ends this process after `leave` has told why."""
    asked: list[int] = []

    def late(number: int) -> None:
        watch.write_report(folder, _too_late(layout, seat.rank, number))
        if leave is not None:
            leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)

    memory = watch.heart(folder, seat.rank)

    def on_signal(number: int, frame: Any) -> None:
        watch.note_signal(memory, number)
        asked.append(number)
        if len(asked) > 1 and seat.by == "alone":  # the others are ended by who started them
            raise KeyboardInterrupt

    if seat.by != "alone":  # its own process for good: where it is can be asked, and is left behind at a crash
        stack = open(folder / f"rank{seat.rank}.stack", "w")  # noqa: SIM115
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    try:
        with _handled(on_signal), grace(layout.run.grace, SIGNALS, late):
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            rank = _rank(layout, seat, folder, lambda: bool(asked), watch.beater(memory))
            work(layout, rank, quiet=quiet)
            watch.done(memory)
    except KeyboardInterrupt:
        return 128 + (asked[-1] if asked else signal.SIGINT)
    except BaseException as error:
        watch.write_report(folder, watch.report(seat.rank, error))
        return FAILED
    return 128 + asked[0] if asked else FINISHED


def _too_late(layout: Layout, rank: int, number: int) -> watch.Report:
    """Why a run leaves without its last checkpoint; every rank says the same."""
    from dtrain import checkpoint

    folder = Path(layout.run.folder or ".")
    last = checkpoint.latest(folder)
    left = "there is none" if last is None else f"the newest is {folder / f'step-{last}'}"
    name = signal.Signals(number).name
    line = f"left {layout.run.grace:g} s after {name} (run.grace) without a last checkpoint; {left}"
    return watch.Report(rank, time.monotonic(), "user", line)


def _rank(
    layout: Layout, seat: Seat, folder: Path, stopping: Callable[[], bool], beat: Callable[[int, str], None]
) -> Rank:
    import torch

    if seat.world > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // min(seat.world, layout.cluster.gpus_per_node)))
    gpu = str(layout.cluster.gpu)
    visible = torch.cuda.device_count() if gpu != "cpu" and torch.cuda.is_available() else 0
    device = device_of(gpu, seat.rank, seat.local_rank, visible)
    if device != "cpu":
        if layout.run.deterministic:
            make_deterministic(os.environ)
        torch.cuda.set_device(device)
        claim(folder, str(torch.cuda.get_device_properties(device).uuid), seat.rank)
    elif "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        heap.keep()
    backend = "gloo" if device == "cpu" else "nccl"
    dist = torch.distributed
    if seat.world > 1 and not (dist.is_available() and dist.is_backend_available(backend)):
        raise LaunchError(f"this build of torch has no {backend}; use one from pytorch.org, or a single process")
    return Rank(seat.rank, seat.world, seat.local_rank, device, backend, stopping, beat)


def _alone(layout: Layout, quiet: bool, work: Work) -> int:
    with tempfile.TemporaryDirectory(prefix="dtrain-") as name:
        folder = Path(name)

        def tell() -> None:
            _tell(layout, folder, watch.reports(folder), {})

        def leave() -> None:
            tell()
            shutil.rmtree(folder, ignore_errors=True)

        code = _perform(work, layout, Seat(0, 1, 0, "alone", ""), folder, quiet, leave)
        if code == FAILED:
            tell()
        return code


# -------------------------------------------------------------------------------------- ranks of this machine


def _spawned(layout: Layout, quiet: bool, folder: Path, work: Work) -> None:
    """What an elastic worker runs."""
    parent, code = os.getppid(), FAILED

    def orphaned(number: int, frame: Any) -> None:
        # Outside of the work a signal only matters once the starting process has died: the kernel sends
        # SIGINT then, and nobody will collect this one.
        if os.getppid() != parent:
            os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, orphaned)
    try:
        seat = seat_of(os.environ)
        assert seat is not None
        code = _perform(work, layout, replace(seat, by="elastic"), folder, quiet)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # A failed rank must not wait for its peers in some destructor, and a stopped one not for a dead parent.
    if code == FAILED or os.getppid() != parent:
        os._exit(code)


@dataclass
class _Watched:
    """What the starting process knows of its ranks while they run."""

    folder: Path
    limits: Mapping[str, float]
    children: dict[int, multiprocessing.process.BaseProcess] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)  # received by this process
    told: set[int] = field(default_factory=set)  # ranks that the signal was passed to
    ended: dict[int, watch.Report] = field(default_factory=dict)  # died without a report
    hang: watch.Report | None = None
    stacks: dict[int, str] = field(default_factory=dict)
    failed_at: float | None = None
    killed_at: float | None = None


def _many(layout: Layout, quiet: bool, work: Work) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    world = layout.world
    with tempfile.TemporaryDirectory(prefix="dtrain-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The tracker of a killed rank complains after everything else; the first cause is to be the last line.
        quieter = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quieter)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="spawn",
            # Slower than POLL_S: elastic collects the dead, and how they died must be seen before.
            monitor_interval=4 * POLL_S,
            # The first rank speaks for all; what the others' libraries say goes into the error report.
            logs_specs=DefaultLogsSpecs(
                log_dir=str(folder / "logs"), redirects=dict.fromkeys(range(1, world), Std.ERR)
            ),
        )
        outcome: list[BaseException] = []

        def agent() -> None:
            # Ranks inherit the mask, so that a signal waits until they can handle it. In this thread elastic
            # does not take over the signals of the process.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                elastic_launch(config, _spawned)(layout, quiet, folder, work)
            except BaseException as error:
                outcome.append(error)

        w = _Watched(folder, _limits(layout))
        before = set(multiprocessing.active_children())
        thread = threading.Thread(target=agent, name="elastic", daemon=True)
        with _handled(lambda number, frame: w.signals.append(number)):
            thread.start()
            while thread.is_alive():
                thread.join(POLL_S)
                _look(w)
                if _should_end(w) and thread.is_alive():
                    for child in set(multiprocessing.active_children()) - before:
                        child.kill()
                if w.killed_at is not None and time.monotonic() - w.killed_at > GONE_S:
                    break
        return _conclude(layout, w, outcome)


def _look(w: _Watched) -> None:
    """One look at the ranks: who died, who failed, who is late; and pass a signal on."""
    now, seen = time.monotonic(), watch.beats(w.folder)
    w.children |= {p.pid: p for p in multiprocessing.active_children() if p.pid is not None}
    if w.killed_at is None:
        for rank, b in seen.items():
            # The process object keeps the code, whoever collected the child: this thread or elastic's.
            ended = not watch.alive(b.pid)
            code = w.children[b.pid].exitcode if ended and b.pid in w.children else None
            gone = ended and code is None and b.phase != "done"
            if (code or gone) and rank not in w.ended and not (w.folder / f"rank{rank}.json").exists():
                w.ended[rank] = watch.death(rank, now - POLL_S, code)
    found = [*watch.reports(w.folder), *w.ended.values()]
    if w.failed_at is None and found:
        w.failed_at = now
    late = w.failed_at is None and watch.overdue(seen, w.limits, now) is not None
    # Where ranks gave up waiting by themselves, and nobody has said anything better for a while, it is a hang
    # too.
    gave_up = w.failed_at is not None and now - w.failed_at > GRACE_S / 3 and watch.in_vain(found)
    if w.hang is None and w.killed_at is None and (late or gave_up):
        reported = {r.rank for r in found}
        w.stacks = watch.stacks(w.folder, {r: b for r, b in seen.items() if r not in reported})
        w.hang = watch.hang(seen, w.stacks, w.limits, now, reported)
        w.failed_at = now - GRACE_S
    if w.signals:
        for rank, b in seen.items():
            if rank not in w.told and b.phase != "done" and watch.alive(b.pid):
                os.kill(b.pid, signal.SIGTERM)
                w.told.add(rank)


def _should_end(w: _Watched) -> bool:
    """Whether the ranks still there are to be killed: a grace time after a failure, at once on a second
    signal."""
    now = time.monotonic()
    if (w.failed_at is not None and now - w.failed_at >= GRACE_S) or len(w.signals) > 1:
        w.killed_at = w.killed_at or now
        return True
    return False


def _conclude(layout: Layout, w: _Watched, outcome: list[BaseException]) -> int:
    """Tell how it ended; returns the exit code."""
    if len(w.signals) > 1 and w.failed_at is None:
        return 128 + w.signals[-1]
    seen = watch.beats(w.folder)
    if not outcome and w.failed_at is None:
        received = w.signals or [b.signal for b in seen.values() if b.signal]
        return 128 + received[0] if received else FINISHED
    said = _elastic_failures(outcome)
    # Asked again: while another thread was collecting the child, its code was not known yet.
    codes = {rank: w.children[b.pid].exitcode for rank, b in seen.items() if b.pid in w.children}
    ended = [watch.death(rank, r.at, codes.get(rank)) for rank, r in w.ended.items()]
    found = [*watch.reports(w.folder), *ended, *([w.hang] if w.hang else [])]
    found = found or list(said.values())
    logs = {int(p.parent.name): p.read_text(errors="replace") for p in w.folder.rglob("stderr.log")}
    extra = {f"stack of rank {r}": text for r, text in {**_crash_stacks(w.folder), **w.stacks}.items()}
    extra |= {f"stderr of rank {r}": text[-20_000:] for r, text in sorted(logs.items())}
    _tell(layout, w.folder, found, extra)
    return FAILED


def _elastic_failures(outcome: list[BaseException]) -> dict[int, watch.Report]:
    """What elastic says, by rank: how the first rank that it saw fail ended, or that it failed itself."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    found: dict[int, watch.Report] = {}
    now = time.monotonic()
    for error in outcome:
        if isinstance(error, ChildFailedError):
            found |= {rank: watch.death(rank, now, f.exitcode) for rank, f in error.failures.items()}
        else:
            found[0] = watch.report(0, error)
    return found


def _crash_stacks(folder: Path) -> dict[int, str]:
    return {int(p.stem[4:]): p.read_text(errors="replace") for p in sorted(folder.glob("rank*.stack"))}


def _tell(layout: Layout, folder: Path, found: list[watch.Report], extra: Mapping[str, str]) -> None:
    """Print the first cause as the last line, before it where the rest is written."""
    cause = watch.first_cause(found)
    if cause is None:
        return
    seen = watch.beats(folder)
    at = layouts.coords(layout, cause.rank)
    place = ", ".join(f"{dim} {i}" for dim, i in at.items() if layout.sizes[dim] > 1)
    line = watch.verdict(cause, seen.get(cause.rank), place)
    if cause.kind != "user":
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = Path(layout.run.folder or ".") / "errors" / f"{stamp}-rank{cause.rank}.txt"
        try:
            watch.write_errors(path, line, cause, found, seen, extra)
            _say(f"traceback, stacks and messages of all ranks: {path}")
        except OSError as error:
            _say(f"{cause.trace}({path} cannot be written: {error.strerror})")
    _say(line)


# ------------------------------------------------------------------------------------ inside torchrun or srun


def _one_of_many(layout: Layout, seat: Seat, quiet: bool, work: Work) -> int:
    os.environ.update(seat.env)
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"dtrain-{user}-{re.sub(r'[^A-Za-z0-9.-]', '_', seat.job)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / f"rank{seat.rank}.json").unlink(missing_ok=True)
    if seat.local_rank == 0:
        threading.Thread(target=_guard, args=(layout, seat, folder), name="guard", daemon=True).start()

    def tell() -> None:
        _tell(layout, folder, _to_tell(folder, seat.rank, _limits(layout)), {})
        _end_others(folder, seat.rank)

    with _handled(lambda number, frame: None):  # torchrun asks to end as soon as one rank has
        code = _perform(work, layout, seat, folder, quiet, tell)
        if code == FAILED:
            tell()
            sys.stdout.flush()
            os._exit(code)  # not through destructors that wait for peers
    if seat.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _to_tell(folder: Path, rank: int, limits: Mapping[str, float]) -> list[watch.Report]:
    """What a rank that failed has to tell: nothing if it only lost a peer of this machine that tells itself,
    or if a lower rank has the same complaint; the end of a peer that died without a word."""
    reports = watch.reports(folder)
    mine = next(r for r in reports if r.rank == rank)
    if mine.kind == "user":
        return [] if any(r.rank < rank and r.message == mine.message for r in reports) else [mine]
    if mine.kind != "collateral":
        return [mine]
    time.sleep(GRACE_S / 3)  # the peers' own reports
    reports, seen, now = watch.reports(folder), watch.beats(folder), time.monotonic()
    first_to_fail = rank == min(r.rank for r in reports)
    cause = next(iter(_dead(seen, reports)), None)
    if cause is None and first_to_fail and watch.in_vain(reports):
        gave_up = {r.rank for r in reports}
        stacks = watch.stacks(folder, {r: b for r, b in seen.items() if r not in gave_up})
        cause = watch.hang(seen, stacks, limits, now, gave_up)
    if cause is not None:
        return [cause] if first_to_fail else []
    return [mine] if watch.first_cause(reports) == mine else []


def _end_others(folder: Path, rank: int) -> None:
    """Kill what is left of this machine's ranks that have neither failed nor ended a grace time later."""
    end = time.monotonic() + GRACE_S
    while True:
        known = {rank, *(r.rank for r in watch.reports(folder))}
        left = [b.pid for b in watch.beats(folder).values() if b.rank not in known and watch.alive(b.pid)]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if not any(b.rank != rank and watch.alive(b.pid) for b in watch.beats(folder).values()):
        shutil.rmtree(folder, ignore_errors=True)  # the last one cleans up


def _dead(seen: Mapping[int, watch.Beat], reports: list[watch.Report]) -> list[watch.Report]:
    """Ranks that have ended without finishing and without a report."""
    known = {r.rank for r in reports}
    return [
        watch.death(b.rank, b.at, None)
        for b in seen.values()
        if b.rank not in known and b.phase != "done" and not watch.alive(b.pid)
    ]


def _guard(layout: Layout, seat: Seat, folder: Path) -> None:
    """On a node's first rank, in a thread: end the node's ranks when one of them failed, died or hangs."""
    limits = _limits(layout)
    started, failed_at = time.monotonic(), None
    pids: dict[int, int] = {}
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        # What an earlier run of the same name may have left is not of processes that live.
        seen = {r: b for r, b in watch.beats(folder).items() if pids.get(r) == b.pid or watch.alive(b.pid)}
        pids |= {r: b.pid for r, b in seen.items()}
        found = [r for r in watch.reports(folder) if r.at > started]
        dead = _dead(seen, found)
        if failed_at is None and (found or dead):
            failed_at = now
        elif failed_at is None and watch.overdue(seen, limits, now) is not None:
            stacks = watch.stacks(folder, seen)
            hang = watch.hang(seen, stacks, limits, now)
            _tell(layout, folder, [hang] if hang else [], {f"stack of rank {r}": s for r, s in stacks.items()})
            failed_at = now - GRACE_S
        if failed_at is not None and now - failed_at >= GRACE_S:
            if dead and not found:
                _tell(layout, folder, dead[:1], {})
            for b in sorted(seen.values(), key=lambda b: b.rank == seat.rank):
                if watch.alive(b.pid):
                    os.kill(b.pid, signal.SIGKILL)
