"""What `dtrain plan` itself costs: `python bench/plan.py [--only NAME...] [--json]`.

CPU seconds, seconds on the clock and the highest resident set of the whole command, start of Python included, each in a
process of its own: a 70B model on 32 GPUs and a 405B model on 16,384, with what they may take; and one model on more
and more ranks, and with more and more layers, where cost should stay as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAYOUTS = Path(__file__).resolve().parent.parent / "layouts"
# name -> a shipped layout and overrides
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "70B, 32 GPUs": ("llama3-70b-4x8-h100", ()),
    "405B, 16,384 GPUs": ("llama3-405b-2048x8-h100", ()),
    **{
        f"{32 * dp:,} ranks": (
            "llama3-70b-8x8-h100",
            (f"cluster.nodes={4 * dp}", f"mesh.dp.size={dp}", f"data.batch={128 * dp}"),
        )
        for dp in (2, 32, 512)
    },
    **{f"{n} layers": ("llama3-70b-4x8-h100", (f"model.layers={n}",)) for n in (20, 80, 320)},
}
# Seconds and bytes that a case may take on two cores.
LIMITS: Mapping[str, tuple[float, float]] = {"70B, 32 GPUs": (30.0, 2e9), "405B, 16,384 GPUs": (60.0, 2e9)}


def cost(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What the command took for a layout: `cpu_s`, `wall_s`, `peak_bytes`; and what it said. Raises RuntimeError with
    its words where it failed."""
    command = [sys.executable, "-m", "dtrain.cli", "plan", str(LAYOUTS / f"{name}.yaml"), *overrides, "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode not in (0, 3):
            raise RuntimeError(f"{' '.join(command)}: {err.read().strip()}")
        said = json.load(out)
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": wall,
        "peak_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "ranks": said["world_size"],
        "layers": sum(stage["layers"] for stage in said["memory_by_stage"]),
        "fits": said["fits"],
        "step_seconds": said["step_seconds"],
    }


def line(name: str, row: Mapping[str, Any]) -> str:
    seconds, size = LIMITS.get(name, (0.0, 0.0))
    limit = f"  may take {seconds:.0f} s, {size / 1e9:.0f} GB" if seconds else ""
    return (
        f"{name:18}{row['ranks']:>8,}{row['layers']:>8}{row['cpu_s']:>9.1f}{row['wall_s']:>9.1f}"
        f"{row['peak_bytes'] / 1e9:>9.2f}{limit}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What dtrain plan itself costs.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print one object")
    asked = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = {}
    if not asked.json:
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
        print(f"{'':18}{'ranks':>8}{'layers':>8}{'CPU s':>9}{'clock s':>9}{'GB':>9}")
    for name in asked.only:
        rows[name] = cost(*CASES[name])
        if not asked.json:
            print(line(name, rows[name]), flush=True)
    if asked.json:
        print(json.dumps({"python": platform.python_version(), "cores": os.cpu_count(), "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
