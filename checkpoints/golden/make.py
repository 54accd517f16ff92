"""Make the golden checkpoints that are not there yet: `python checkpoints/golden/make.py`.

Each `FAMILY.yaml` is run to step 2, whose checkpoint is kept as `FAMILY/step-2`, and on to step 4.
`FAMILY/expected.json` has the SHA-256 of every tensor of the checkpoint and the losses of steps 3 and 4. What exists
is never made again: later versions must read what earlier ones wrote. A new format gets new files beside them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dtrain import checkpoint

HERE = Path(__file__).parent


def digests(path: Path) -> dict[str, str]:
    """The SHA-256 of each tensor of a checkpoint: of its values, little-endian, in order."""
    shapes, read = checkpoint.open_tensors(path)
    return {name: hashlib.sha256(read(name).numpy().tobytes()).hexdigest() for name in sorted(shapes)}


def losses(folder: Path) -> dict[str, float]:
    """The losses of steps 3 and 4."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {str(row["step"]): row["loss"] for row in rows if "loss" in row and row["step"] > 2}


def make(layout: Path) -> None:
    out = HERE / layout.stem
    with tempfile.TemporaryDirectory() as name:
        for more in ((), ("run.steps=4",)):
            words = [sys.executable, "-m", "dtrain.cli", "run", str(layout.absolute()), "--quiet", *more]
            subprocess.run(words, check=True, cwd=name)
        folder = Path(name) / "golden"
        shutil.copytree(folder / "step-2", out / "step-2")
        expected = {"losses": losses(folder), "tensors": digests(out / "step-2")}
        (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    for layout in sorted(HERE.glob("*.yaml")):
        if not (HERE / layout.stem).exists():
            make(layout)
            print(HERE / layout.stem)
