"""A run ends with what was predicted of it beside what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_report import predicted
from test_train import alone, make

from dtrain import train
from dtrain.plan import predict
from dtrain.plan.measured import Measured, beside, columns, tensors
from dtrain.plan.report import report


def test_on_a_gpu_every_figure_stands_beside_its_prediction() -> None:
    p = predicted()
    said = report(p)
    held = said["memory"]["peak"] - said["memory"]["reserve"]  # what torch's counter sees
    m = Measured(said["step_seconds"] * 1.25, round(held * 0.9), resident=False)
    lines = beside(p, m)
    assert [re.split(r"  +", line)[0] for line in lines] == ["step time", "tokens/s", "peak memory"]
    assert [line.split()[-1] for line in lines] == ["+25.0%", "-20.0%", "-10.0%"]
    row = columns(p, m)
    assert row["predicted_step_s"] == said["step_seconds"] and row["measured_step_s"] == m.step_seconds
    assert row["predicted_tokens_per_s"] == pytest.approx(4 * said["tokens_per_second_per_gpu"])
    assert row["predicted_peak_memory_bytes"] == tensors(p) == held
    assert "too few steps" in beside(p, Measured(None, held, resident=False))[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_on_a_cpu_compares_nothing_that_is_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, "run.steps=2")
    alone(made, quiet=False)
    end = capsys.readouterr().out.partition("finished: 2 steps")[2]
    p = predict.predict(made)
    assert "no predicted time: what a cpu reaches in fp32 is not known" in end and "the whole process" in end
    assert end.index("no predicted time") < end.index("to go on:")
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 2 and row["predicted_step_s"] is None and row["measured_step_s"] > 0
    assert row["predicted_peak_memory_bytes"] == p.memory[0].peak > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_cannot_be_predicted_fails_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise KeyError("a new kind of layer")

    monkeypatch.setattr(train.predict, "read", fails)
    alone(make(tmp_path, "run.steps=1"), quiet=False)
    assert "  no prediction: KeyError: 'a new kind of layer'\n" in capsys.readouterr().out
    assert (tmp_path / "step-1").is_dir()
