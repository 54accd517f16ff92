"""How time and memory grow: `python bench/scaling.py`.

Steps of a small Llama in one process on a CPU, with one thread, as layers, sequence and microbatches grow, the others
held. Each point is a process of its own. Time is the median step, by the clock and in CPU seconds (which other work on
the machine touches less), memory the highest resident set during the steps
(Linux: the mark is reset after compiling). For each, the least-squares line over the points and the worst deviation
from it, relative to the measured value. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

BASE = {"layers": 4, "seq": 128, "microbatches": 4}
POINTS = {"layers": (2, 4, 8, 16), "seq": (64, 128, 256, 512), "microbatches": (1, 2, 4, 8)}
STEPS = 7


def point(layers: int, seq: int, microbatches: int, compile: str = "on", width: int = 256) -> dict[str, float]:
    """Median seconds a step, by the clock and of CPU, and peak bytes, in this process."""
    from gpu import dtrain_start

    from dtrain import layout, plan

    torch.set_num_threads(1)
    made = plan.plan(
        layout.loads(f"""
model: {{family: llama, layers: {layers}, embed: {width}, heads: 4, kv_heads: 2, mlp: {3 * width}, vocab: 1024}}
data: {{source: synthetic, seq: {seq}, batch: {2 * microbatches}, microbatch: 2}}
run: {{steps: 1000, compile: {compile}, folder: unused}}
""")
    )
    step, _, _ = dtrain_start(made, "cpu")
    reset_peak()
    for number in (1, 2):
        step(number)
    times, used = [], []
    for number in range(3, 3 + STEPS):
        began, before = time.perf_counter(), time.process_time()
        step(number)
        times.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
    return {"step_s": statistics.median(times), "cpu_s": statistics.median(used), "peak_bytes": peak()}


def reset_peak() -> None:
    """Let the highest resident set start again from the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The highest resident set since then, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Intercept and slope of the least-squares line, and the worst |y - line| / y."""
    slope, intercept = np.polyfit(x, y, 1)
    worst = max(abs(b - (intercept + slope * a)) / b for a, b in zip(x, y, strict=True))
    return float(intercept), float(slope), float(worst)


def measure() -> dict[str, Any]:
    """All points, by what grows."""
    out: dict[str, Any] = {}
    for what, values in POINTS.items():
        rows = []
        for value in values:
            sizes = BASE | {what: value}
            command = [sys.executable, __file__, "--child", *(str(sizes[k]) for k in BASE)]
            rows.append({what: value} | json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        out[what] = {"points": rows}
        for key in ("step_s", "cpu_s", "peak_bytes"):
            a, b, worst = fit(values, [r[key] for r in rows])
            out[what][key] = {"at_0": a, "each": b, "worst_deviation": worst}
    return out


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(args)
    if asked.child:
        print(json.dumps(point(*asked.child)))
        return
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found = measure()
    if asked.json:
        print(json.dumps({"machine": machine, "base": BASE, **found}))
        return
    print("  ".join(f"{k} {v}" for k, v in machine.items()))
    for what, r in found.items():
        print(what)
        for p in r["points"]:
            print(
                f"  {p[what]:>4}  {1e3 * p['step_s']:8.1f} ms  {1e3 * p['cpu_s']:8.1f} ms of CPU  "
                f"{p['peak_bytes'] / 2**20:6.0f} MiB"
            )
        for key, unit, size in (("step_s", "ms", 1e-3), ("cpu_s", "ms of CPU", 1e-3), ("peak_bytes", "MiB", 2**20)):
            line = r[key]
            print(
                f"  {line['at_0'] / size:.1f} + {line['each'] / size:.3f} {unit} each, "
                f"off by at most {line['worst_deviation']:.1%}"
            )


if __name__ == "__main__":
    main()
