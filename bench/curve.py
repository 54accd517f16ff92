"""Draw a run's training and held-out loss: `python bench/curve.py RUN_FOLDER [OUT.png]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(folder: Path, out: Path) -> None:
    """Read `metrics.jsonl` and write a picture; losses in nats a token."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    held_out = [(r["step"], r["valid_loss"]) for r in rows if r.get("valid_loss") is not None]
    figure, axes = plt.subplots(figsize=(7, 3.5), dpi=100)
    axes.plot(*zip(*train, strict=True), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="held out")
    axes.set(xlabel="step", ylabel="nats a token", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    draw(run, Path(sys.argv[2]) if len(sys.argv) > 2 else run / "loss.png")
