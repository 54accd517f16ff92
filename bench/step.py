"""Time of a training step on CPUs, dtrain against what one would use instead: `python bench/step.py`.

Both programs of a pair live at the same time, each in processes of its own, and take turns (A B A B ...), so that
only one works at a time and both see the same machine. Same weights, batches, AdamW and clipping, all in fp32; the
losses must agree. A ratio is dtrain's median step time over the peer's, with a 95 % bootstrap interval over the pairs.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(side: Side, per_side: int) -> int:
    """Intra-op threads of each process of a side that has `per_side` of them."""
    return max(1, per_side // side.ranks)


def compare(
    pair: Pair,
    shape: str,
    pairs: int,
    burst: int,
    threads: int,
    warmup: int,
    compiled: bool,
    jax_python: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure one pair: `warmup` steps of each side, then `pairs` times `burst` steps of each in turn. A turn counts
    with the median of its steps. Raises BenchError."""
    steps = warmup + pairs * burst
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tasks.write(trainer.make_task(SHAPES[shape], steps), folder / "task.npz")
        sides = []
        for side in (pair.a, pair.b):  # one after the other, so that neither waits for the other's compiler
            python = jax_python if side.name == "jax_model" else sys.executable
            sides.append(Running(side, threads_of(side, threads), folder / "task.npz", compiled, python, stack))
            sides[-1].ready()
            say(f"{side.name}: ready")
        done = [side.turn(1, warmup) for side in sides]
        times: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for i in range(pairs):
            for side, so_far, seconds, used in zip(sides, done, times, cpu, strict=True):
                time.sleep(PAUSE_S)
                turn = side.turn(warmup + 1 + i * burst, burst)
                so_far += turn
                seconds.append(statistics.median(s for s, _, _ in turn))
                used.append(statistics.median(c for _, c, _ in turn))
            say(f"pair {i + 1}/{pairs}: {times[0][-1] * 1e3:.1f} ms, {times[1][-1] * 1e3:.1f} ms")
    losses = [[loss for _, _, loss in side] for side in done]
    apart = check_same(pair.a.name, pair.b.name, *losses)
    tokens = SHAPES[shape].seq * SHAPES[shape].batch
    return {
        "ratio": ratio(*times),
        "cpu_ratio": ratio(*cpu),
        "sides": {
            side.name: {
                "processes": side.ranks,
                "threads": threads_of(side, threads),
                "median_s": statistics.median(t),
                "median_cpu_s": statistics.median(c),
                "quartiles_s": [float(q) for q in np.quantile(t, [0.25, 0.75])],
                "tokens_per_s": tokens / statistics.median(t),
            }
            for side, t, c in zip((pair.a, pair.b), times, cpu, strict=True)
        },
        "losses_apart": {
            "first_steps": max(apart[:FIRST_STEPS]),
            "all_steps": max(apart),
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


def ratio(a: Sequence[float], b: Sequence[float], draws: int = 10_000) -> dict[str, float]:
    """The ratio of medians, and its 95 % bootstrap interval over pairs (Efron 1979)."""
    x, y = np.array(a), np.array(b)
    at = np.random.default_rng(0).integers(len(x), size=(draws, len(x)))
    drawn = np.median(x[at], 1) / np.median(y[at], 1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"median": float(np.median(x) / np.median(y)), "low": float(low), "high": float(high), "pairs": len(x)}


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
    parser.add_argument("--pairs", type=int, default=20, help="turns of each side (20)")
    parser.add_argument("--burst", type=int, help="steps of a turn (10 for small, 1 for large)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each side, shared by its processes (cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, progress on the other")
    parser.add_argument("--jax-python", default=sys.executable, help="a Python that has JAX (this one)")
    asked = parser.parse_args(args)
    burst = asked.burst or {"small": 10, "large": 1}[asked.shape]
    out = sys.stderr if asked.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    found = versions(asked.jax_python)
    about = {"machine": machine(), "versions": found, "shape": asked.shape, "sizes": vars(SHAPES[asked.shape])}
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
        f"{name}: {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}] of {r['pairs']} pairs, {bar}: "
        f"{'met' if met(r, result['bar']) else 'not met'}; {sides}; "
        f"CPU seconds {result['cpu_ratio']['median']:.3f}; losses apart {result['losses_apart']['first_steps']:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
