"""Time of a training step on CPUs, dtrain against what one would use instead: `python bench/step.py`.

Both programs of a pair live at the same time, each in processes of its own, and take turns (A B A B ...), so that
only one works at a time and both see the same machine; and both start anew several times. Same weights, batches, AdamW
and clipping, all in fp32; the losses must agree. A ratio is dtrain's median step time over the peer's, with a 95 %
bootstrap interval over starts and pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import task as tasks
import trainer
from task import SHAPES

HERE = Path(__file__).resolve().parent
PAUSE_S = 0.02  # between turns: until idle OpenMP threads of the last side sleep
SAME, FIRST_STEPS = 1e-3, 10  # how far losses may differ (nats), and in which steps: training amplifies rounding


@dataclass(frozen=True)
class Side:
    """A program: a peer's file, or `dtrain:LAYOUT`, in `ranks` processes. A JAX side is one process with `devices`
    host devices, whose threads are XLA's: as many as cores."""

    name: str
    ranks: int = 1
    devices: int = 1


@dataclass(frozen=True)
class Pair:
    """`a` over `b` is the ratio, to be at most `bar` (None: below 1)."""

    a: Side
    b: Side
    bar: float | None


PAIRS = {
    "plain_compile": Pair(Side("dtrain:one"), Side("plain_compile"), 1.03),
    "explicit_tp": Pair(Side("dtrain:tp", 2), Side("explicit_tp", 2), 1.0),
    "jax_1": Pair(Side("dtrain:one"), Side("jax_model"), None),
    "jax_2": Pair(Side("dtrain:tp", 2), Side("jax_model", devices=2), None),
    "fsdp2": Pair(Side("dtrain:fsdp", 2), Side("fsdp2", 2), 1.0),
}
# Not a peer of dtrain: shows that the hand-written peer is not slower than torch's own.
CHECKS = {"explicit_tp / parallelize_module": Pair(Side("explicit_tp", 2), Side("parallelize_module", 2), 1.0)}
Turn = list[tuple[float, float, float]]  # seconds, CPU seconds (of all processes) and loss of each step


class BenchError(Exception):
    """A side cannot be measured; one line for a person."""


class Running:
    """The processes of a side."""

    def __init__(self, side: Side, threads: int, task: Path, compiled: bool, python: str, stack: ExitStack) -> None:
        self.side = side
        self.processes: list[subprocess.Popen[str]] = []
        self.errors: list[IO[str]] = []
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        for rank in range(side.ranks):
            env = os.environ | {k: str(threads) for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(side.ranks)}
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={side.devices}"
            env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  (the stack closes it)
            command = [
                python,
                str(HERE / "worker.py"),
                side.name,
                rank,
                side.devices if side.devices > 1 else side.ranks,
            ]
            process = subprocess.Popen(
                [*map(str, command), str(compiled), str(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
            stack.callback(end, process)
            self.processes.append(process)
            self.errors.append(errors)

    def ready(self) -> dict[str, str]:
        """Wait until all have compiled what they can; the versions of what they use."""
        answers = [self._answer(r) for r in range(self.side.ranks)]
        return dict(answers[0])

    def turn(self, first: int, count: int) -> Turn:
        """Make these steps. A step lasts from when its first rank begins to when its last one ends."""
        for p in self.processes:
            assert p.stdin is not None
            p.stdin.write(f"{first} {count}\n")
            p.stdin.flush()
        answers = [self._answer(r) for r in range(self.side.ranks)]
        out: Turn = []
        for ranks in zip(*answers, strict=True):
            begins, ends, used, losses = zip(*ranks, strict=True)
            out.append((max(ends) - min(begins), sum(used), losses[0]))
        return out

    def _answer(self, rank: int) -> Any:
        out = self.processes[rank].stdout
        assert out is not None
        line = out.readline()
        if not line:
            self.errors[rank].seek(0)
            last = self.errors[rank].read().strip().splitlines()[-15:]
            raise BenchError(f"{self.side.name}, rank {rank}, ended:\n" + "\n".join(last))
        return json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    """A side has ended well once its input is closed; whoever is stuck is killed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@contextmanager
def awake() -> Iterator[bool]:
    """Keep every core busy with a program that gives way to any other, where the system can (Linux); says whether.

    A core that has nothing to do is put to sleep, in a virtual machine by its host, and takes up to a millisecond to
    wake: programs whose processes wait for each other then measure that."""
    spinning: list[subprocess.Popen[bytes]] = []
    idle = getattr(os, "SCHED_IDLE", None)
    try:
        if idle is not None:
            for _ in range(cores()):
                spinning.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                os.sched_setscheduler(spinning[-1].pid, idle, os.sched_param(0))
        yield bool(spinning)
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(side: Side, per_side: int) -> int:
    """Intra-op threads of each process of a side that has `per_side` of them."""
    return max(1, per_side // side.ranks)


def compare(
    pair: Pair,
    shape: str,
    starts: int,
    pairs: int,
    burst: int,
    threads: int,
    warmup: int,
    compiled: bool,
    jax_python: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure one pair: `starts` times both sides start anew, make `warmup` steps, and take turns of `burst`
    steps, `pairs` of them in all. A turn counts with the median of its steps. Raises BenchError."""
    times: list[list[list[float]]] = [[], []]
    cpu: list[list[float]] = [[], []]
    apart: list[list[float]] = []
    for start in range(starts):
        turns = pairs // starts + (start < pairs % starts)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            tasks.write(trainer.make_task(SHAPES[shape], warmup + turns * burst), folder / "task.npz")
            sides = []
            for side in (pair.a, pair.b):  # one after the other, so that neither waits for the other's compiler
                python = jax_python if side.name == "jax_model" else sys.executable
                sides.append(Running(side, threads_of(side, threads), folder / "task.npz", compiled, python, stack))
                sides[-1].ready()
            done = [side.turn(1, warmup) for side in sides]
            for side_times in (*times, *cpu):
                side_times.append([])
            for i in range(turns):
                for side, so_far, seconds, used in zip(sides, done, times, cpu, strict=True):
                    time.sleep(PAUSE_S)
                    turn = side.turn(warmup + 1 + i * burst, burst)
                    so_far += turn
                    seconds[-1].append(statistics.median(s for s, _, _ in turn))
                    used[-1].append(statistics.median(c for _, c, _ in turn))
        losses = [[loss for _, _, loss in side] for side in done]
        apart.append(check_same(pair.a.name, pair.b.name, *losses))
        medians = " ms, ".join(f"{statistics.median(seconds[-1]) * 1e3:.1f}" for seconds in times)
        say(f"start {start + 1}/{starts}, {turns} pairs: {medians} ms")
    tokens = SHAPES[shape].seq * SHAPES[shape].batch
    return {
        "ratio": ratio(*times),
        "cpu_ratio": ratio(*cpu),
        "sides": {
            side.name: {
                "processes": side.ranks,
                "threads": threads_of(side, threads),
                "median_s": statistics.median(flat(t)),
                "median_cpu_s": statistics.median(flat(c)),
                "quartiles_s": [float(q) for q in np.quantile(flat(t), [0.25, 0.75])],
                "medians_of_starts_s": [statistics.median(start) for start in t],
                "tokens_per_s": tokens / statistics.median(flat(t)),
            }
            for side, t, c in zip((pair.a, pair.b), times, cpu, strict=True)
        },
        "losses_apart": {
            "first_steps": max(max(start[:FIRST_STEPS]) for start in apart),
            "all_steps": max(map(max, apart)),
            "first_loss": losses[0][0],
            "last_loss": losses[0][-1],
        },
        "bar": pair.bar,
    }


def check_same(a: str, b: str, losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """How far two loss curves are apart, step by step. Raises BenchError if too far in the first steps."""
    apart = [abs(x - y) for x, y in zip(losses, others, strict=True)]
    if not all(d <= SAME for d in apart[:FIRST_STEPS]):
        raise BenchError(f"{a} and {b} do not compute the same: losses {losses[:FIRST_STEPS]}, {others[:FIRST_STEPS]}")
    return apart


def ratio(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], draws: int = 2_000) -> dict[str, float]:
    """The ratio of medians, and its 95 % interval, of a program `a` and its peer `b`, each start's turns apart. The
    bootstrap draws starts and then pairs within each (Davison & Hinkley 1997, section 3.8): where a process happens to
    lie in memory moves all its steps by several per cent."""
    chance = np.random.default_rng(0)
    whole = [np.array(a[i]) for i in range(len(a))], [np.array(b[i]) for i in range(len(b))]
    drawn = []
    for _ in range(draws):
        starts = chance.integers(len(a), size=len(a))
        at = [(i, chance.integers(len(a[i]), size=len(a[i]))) for i in starts]
        x, y = (np.median(np.concatenate([side[i][pairs] for i, pairs in at])) for side in whole)
        drawn.append(x / y)
    low, high = np.quantile(drawn, [0.025, 0.975])
    x, y = (float(np.median(np.concatenate(side))) for side in whole)
    pairs = sum(map(len, a))
    return {"median": x / y, "low": float(low), "high": float(high), "pairs": pairs, "starts": len(a)}


def flat(starts: Sequence[Sequence[float]]) -> list[float]:
    return [value for start in starts for value in start]


def met(r: Mapping[str, float], bar: float | None) -> bool:
    """Whether the interval begins at or below the bar and the median is at most 3 % above it."""
    return (r["low"] < 1.0 if bar is None else r["low"] <= bar) and r["median"] <= 1.03 * (bar or 1.0)


def machine() -> dict[str, Any]:
    name = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": cores(),
        "system": platform.platform(),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "load_before": os.getloadavg()[0],
    }


def versions(jax_python: str) -> dict[str, str | None]:
    """Of Python, torch, NumPy and JAX (None where it is not installed)."""
    import torch

    asked = subprocess.run([jax_python, "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True)
    jax = asked.stdout.strip() if asked.returncode == 0 else None
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "jax": jax}


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PAIRS, *CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--shape", choices=["small", "large"], default="small")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each side, over all starts (20)")
    parser.add_argument("--starts", type=int, default=5, help="how often both sides start anew (5)")
    parser.add_argument("--burst", type=int, help="steps of a turn (10 for small, 1 for large)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each side, shared by its processes (cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, progress on the other")
    parser.add_argument("--jax-python", default=sys.executable, help="a Python that has JAX (this one)")
    asked = parser.parse_args(args)
    with awake() as kept:
        return measure(asked, kept)


def measure(asked: argparse.Namespace, kept_awake: bool) -> int:
    """Every pair that was asked for, printed; returns the exit code."""
    burst = asked.burst or {"small": 10, "large": 1}[asked.shape]
    out = sys.stderr if asked.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    found = versions(asked.jax_python)
    here = {**machine(), "kept_awake": kept_awake}
    about = {"machine": here, "versions": found, "shape": asked.shape, "sizes": vars(SHAPES[asked.shape])}
    for name, value in about.items():
        say(f"{name}: {value if isinstance(value, str) else ', '.join(f'{k} {v}' for k, v in value.items())}")
    results: dict[str, Any] = {}
    for name in asked.only:
        pair = {**PAIRS, **CHECKS}[name]
        if pair.b.name == "jax_model" and not found["jax"]:
            say(f"{name}: skipped: jax is not installed")
            continue
        try:
            results[name] = compare(
                pair,
                asked.shape,
                asked.starts,
                asked.pairs,
                burst,
                asked.threads,
                5,
                True,
                asked.jax_python,
                lambda text, n=name: say(f"{n}: {text}"),
            )
        except BenchError as e:
            say(f"{name}: failed: {e}")
            return 1
        say(line_of(name, results[name]))
    say("")
    for name, result in results.items():
        say(line_of(name, result))
    if asked.json:
        ratios = {name: results[name]["ratio"] if name in results else None for name in PAIRS}
        print(
            json.dumps(
                {**about, "burst": burst, "threads": asked.threads, "ratios": ratios, "pairs": results}, indent=1
            )
        )
    return 0


def line_of(name: str, result: Mapping[str, Any]) -> str:
    r, (a, b) = result["ratio"], result["sides"].items()
    bar = "below 1" if result["bar"] is None else f"at most {result['bar']:g}"
    sides = ", ".join(
        f"{s} {t['median_s'] * 1e3:.1f} ms ({t['processes']} x {t['threads']} threads)" for s, t in (a, b)
    )
    return (
        f"{name}: {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}] of {r['pairs']} pairs in {r['starts']} starts, "
        f"{bar}: {'met' if met(r, result['bar']) else 'not met'}; {sides}; "
        f"CPU seconds {result['cpu_ratio']['median']:.3f}; losses apart {result['losses_apart']['first_steps']:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
