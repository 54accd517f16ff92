"""The README's first command, as shipped: four processes, and then what a second try says.

One test, because the tests of a module may be spread over processes and the run should happen once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
COLUMNS = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "mfu", "peak_memory_bytes", "data_wait"}


def dtrain(folder: Path, seconds: float) -> str:
    """What `dtrain run layouts/quickstart.yaml` prints, with another folder and a fresh user's environment."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "dtrain.cli", "run", "layouts/quickstart.yaml", f"run.folder={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_metrics(folder: Path) -> None:
    """Held-out loss falls from that of a guess to below 2.5; every row is complete."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = {r["step"]: r["valid_loss"] for r in rows if "valid_loss" in r}
    assert list(held_out) == [0, 40, 80, 120, 160]
    assert 5 < held_out[0] < 6 and held_out[160] < 2.5
    said = rows.pop()
    assert said["step"] == 160 and said["predicted_step_s"] is None  # nor how long a step takes there
    assert 0 < said["predicted_peak_memory_bytes"] < rows[-2]["peak_memory_bytes"] and said["measured_step_s"] > 0
    steps = [r for r in rows if "valid_loss" not in r]
    assert [r["step"] for r in steps] == [1, *range(5, 161, 5)]
    for row in steps:
        assert row.keys() == COLUMNS
        assert row["mfu"] is None  # the peak of a CPU is not known
        assert all(v > 0 for k, v in row.items() if k != "mfu"), row


def check_files(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"metrics.jsonl", "tensorboard", "step-80", "step-160"}
    record = json.loads((folder / "step-160" / "run.json").read_text())
    assert record["step"] == 160 and record["layout"]["mesh"]["pp"]["size"] == 2
    assert len(list((folder / "step-160").glob("*.distcp"))) == 4
    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [e.step for e in reader.Scalars("valid/valid_loss")] == [0, 40, 80, 120, 160]
    assert [e.step for e in reader.Scalars("train/loss")][-1] == 160


def check_output(said: str, folder: Path) -> None:
    """Progress with rate and time left, from one rank only, and a closing summary."""
    assert "mesh: pp 2 x tp 2, 4 ranks over gloo on cpu" in said
    steps = [line for line in said.splitlines() if re.match(r"step \d+/160  loss ", line)]
    assert len(steps) == 33
    assert all(re.search(r"[\d,]+ tokens/s  [\d.]+ GiB  left \d+:\d\d$", line) for line in steps)
    end = said[said.index("finished: 160 steps") :]
    assert re.search(r"loss [\d.]+, held-out loss [\d.]+", end)
    waiting = re.search(r"[\d,]+ tokens/s, ([\d.]+)% of the time waiting for data, peak memory", end)
    assert waiting and float(waiting[1]) <= 1  # of the rank that waits most
    assert "no predicted time: what a cpu reaches in fp32 is not known" in end
    assert re.search(r"predicted memory [\d.]+MiB of tensors on the heaviest rank", end)
    assert str(folder / "step-160") in end and "tensorboard --logdir" in end and "run.steps=320" in end


def test_the_quickstart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = dtrain(folder, 500)
    check_metrics(folder)
    check_files(folder)
    check_output(said, folder)

    before = (folder / "metrics.jsonl").read_bytes()
    again = dtrain(folder, 60)
    assert "this run is finished (160 of 160 steps" in again
    assert "run.steps=320" in again and "another run.folder" in again
    assert (folder / "metrics.jsonl").read_bytes() == before
