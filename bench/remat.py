"""What recomputation and chunks of the loss do to losses, kept bytes and peak memory: `python bench/remat.py [--json]`.

Losses: a small Llama, compiled, one process, a few steps under every policy, in fp32, in bf16, and in bf16 with
Inductor's `emulate_precision_casts`, without which a value that is computed again may be rounded elsewhere than the
first time. Peak: the most memory of a process that makes two uncompiled steps with the loss in one piece and in eight.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from dtrain import data, layout, metrics, optim, plan, train
from dtrain.metrics import LogConfig, open_log
from dtrain.program.interpret import run
from dtrain.program.update import Report, make_update
from dtrain.rank import Rank

POLICIES = ("none", "selective", "full", "[attention]", "{budget: 3MiB}")
SMALL = """
model: {family: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, vocab: 256}
data: {source: synthetic, seq: 64, batch: 4, microbatch: 2}
run: {steps: 100, compile: on}
"""
WIDE = """
model: {family: llama, layers: 1, embed: 64, heads: 2, mlp: 128, vocab: 32768}
data: {source: synthetic, seq: 2048, batch: 1}
run: {steps: 100, compile: off}
"""


def losses(text: str, steps: int, overrides: list[str]) -> tuple[list[float], int]:
    """Losses of the first steps under a layout in this process, and the bytes that a block keeps."""
    made = plan.plan(layout.loads(text, "bench.yaml", overrides))
    source = data.open_source(train.data_config(made))
    with tempfile.TemporaryDirectory() as folder, open_log(LogConfig(Path(folder), 1, 1, False, True)) as log:
        r = train.prepare(made, Rank(0, 1, 0, "cpu", "none"), source, log)
    out = []
    with torch.no_grad():
        state = train.initialise(r)
        for number in range(1, steps + 1):
            given, _ = train.training_step(r, number, state)
            reports: list[Report] = []
            update = make_update(
                r.program, r.place, state, r.config, optim.lr_at(r.schedule, number), r.rank.stopping, reports.append
            )
            run(r.steps, state.weights, dataclasses.replace(given, update=update))
            out.append(reports[0].loss)
    return out, r.program.segments["block"].saved_bytes


def compare(steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """By precision and policy: bytes that a block keeps, and the largest difference of a loss from policy none."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, precision, emulate in (("fp32", "fp32", False), ("bf16", "bf16", False), ("bf16 emulated", "bf16", True)):
        with torch._inductor.config.patch(emulate_precision_casts=emulate):
            found = {p: losses(SMALL, steps, [f"run.precision={precision}", f"run.remat={p}"]) for p in POLICIES}
        first = found["none"][0]
        out[name] = {
            p: {"kept_bytes": kept, "drift": max(abs(a - b) for a, b in zip(first, got, strict=True))}
            for p, (got, kept) in found.items()
        }
    return out


def peak(chunks: int) -> int:
    """Peak bytes of a process that makes two steps with the loss in so many pieces."""
    this = [sys.executable, __file__, "--chunks", str(chunks)]
    done = subprocess.run(this, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main(
    steps: Annotated[int, typer.Option(help="steps of each run")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    chunks: Annotated[int, typer.Option(help="only the peak bytes with so many", hidden=True)] = 0,
) -> None:
    """Print drift and kept bytes by policy, and peak memory by chunks of the loss."""
    if chunks:
        losses(WIDE, 2, [f"kernels.loss_chunks={chunks}"])
        print(metrics.peak_memory(torch.device("cpu")))
        return
    result = {"losses": compare(steps), "peak_bytes": {n: peak(n) for n in (1, 8)}}
    if as_json:
        print(json.dumps(result))
        return
    for precision, policies in result["losses"].items():
        for policy, r in policies.items():
            print(f"{precision:14} {policy:16} keeps {r['kept_bytes']:>9,.0f} B a block, loss drifts {r['drift']:.1e}")
    for pieces, n in result["peak_bytes"].items():
        print(f"loss in {pieces} piece(s): peak {n / 2**20:,.0f} MiB")


if __name__ == "__main__":
    typer.run(main)
