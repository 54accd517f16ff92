"""Draw the losses of runs: `python bench/curve.py RUN_FOLDER... [-o OUT.png]`.

Reads each folder's `metrics.jsonl`. Without `-o` the picture goes to `loss.png` in the first folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = list[tuple[int, float]]  # (step, loss in nats a token)


def read(folder: Path) -> tuple[Curve, Curve]:
    """Training and held-out loss; a row without one (a resume, a loss that is not finite) is left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    held_out = [(r["step"], r["valid_loss"]) for r in rows if r.get("valid_loss") is not None]
    return train, held_out


def draw(folders: Sequence[Path], out: Path) -> None:
    """The first run solid, further ones dashed on top of it, so that equal curves are seen to be equal."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=100)
    for i, folder in enumerate(folders):
        train, held_out = read(folder)
        line, mark = ("C0-", "C1o") if i == 0 else (f"C{i + 1}--", "kx")
        axes.plot(*zip(*train, strict=True), line, label=f"{folder.name}, training")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), mark, label=f"{folder.name}, held out")
        if held_out and i == 0:
            where = {"textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{held_out[0][1]:.2f}", held_out[0], (22, -3), **where)
            axes.annotate(f"{held_out[-1][1]:.2f}", held_out[-1], (0, -16), **where)
    axes.set(xlabel="step", ylabel="nats a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the losses of runs.")
    parser.add_argument("folder", nargs="+", type=Path, help="a run's folder, with metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, help="the picture (default: loss.png in the first folder)")
    asked = parser.parse_args(args)
    out: Path = asked.out or asked.folder[0] / "loss.png"
    draw(asked.folder, out)
    print(out)


if __name__ == "__main__":
    main()
