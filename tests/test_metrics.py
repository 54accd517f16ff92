import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dtrain.metrics import (
    LogConfig,
    Row,
    advance,
    duration,
    flops_per_token,
    mfu,
    open_log,
    peak_memory,
    record,
    record_validation,
    say,
    tokens_per_s,
)


def row(step: int, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step / 8,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens_per_s": 12345.6,
        "step_s": 0.5,
        "mfu": 0.52,
        "peak_memory_bytes": 2**31,
        "data_wait": 0.25,
    }
    return Row(**(values | changes))


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=20)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_llama3_8b_flops() -> None:
    params, table = 8_030_261_248, 128_256 * 4096
    weights = flops_per_token(params - table, 0, 32, 128, 8192)
    assert weights / 1e9 == pytest.approx(45.03, abs=0.005)
    full = flops_per_token(params - table, 32, 32, 128, 8192, causal=False)
    half = flops_per_token(params - table, 32, 32, 128, 8192)
    assert (full - weights) / 1e9 == pytest.approx(12.88, abs=0.01)
    assert (half - weights) / 1e9 == pytest.approx(6.44, abs=0.005)
    assert f"{mfu(8 * 10_000, full, 8, 989e12):.1%}" == "58.6%"
    assert f"{mfu(8 * 10_000, half, 8, 989e12):.1%}" == "52.0%"
    assert mfu(10_000, half, 1, None) is None


def test_a_token_counts_once() -> None:
    # dp 2 x tp 2, microbatch 1, four accumulated: 8 sequences of 1024 in 2 s over 4 devices.
    rate = tokens_per_s(batch=2 * 1 * 4, seq=1024, step_s=2.0)
    assert rate == 4096 and rate / 4 == 1024


def test_peak_memory_is_this_process() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(before // 4 + 50_000_000, dtype=torch.float32)  # as much again, and some
    after = peak_memory(torch.device("cpu"))
    assert 10_000_000 < before < after and after - before < 2 * block.nbytes


def test_everything_is_written_everywhere(tmp_path: Path) -> None:
    console = plain()
    with open_log(LogConfig(tmp_path, steps=20), console) as log:
        record_validation(log, 0, 5.5)
        record(log, row(1, extra={"loss_scale": 1024.0}))
        assert len(rows(tmp_path)) == 2  # flushed, not buffered until the end
        record(log, row(2, mfu=None))
    first, second, third = rows(tmp_path)
    assert first == {"step": 0, "valid_loss": 5.5}
    assert second == {
        "step": 1,
        "loss": 4.875,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens_per_s": 12345.6,
        "step_s": 0.5,
        "mfu": 0.52,
        "peak_memory_bytes": 2**31,
        "data_wait": 0.25,
        "loss_scale": 1024.0,
    }
    assert third["mfu"] is None
    written = events(tmp_path)
    assert written["train/loss"] == [(1, 4.875), (2, 4.75)] and written["valid/valid_loss"] == [(0, 5.5)]
    names = set(second) - {"step"}
    assert {f"train/{n}" for n in names} | {"valid/valid_loss"} == set(written)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_plain_output_is_one_line_a_row(tmp_path: Path) -> None:
    console = plain()
    with open_log(LogConfig(tmp_path, steps=20), console) as log:
        advance(log, 3)
        record(log, row(4))
        record_validation(log, 4, 2.25)
        say(log, "[saved] checkpoint")
    assert printed(console).splitlines() == [
        "step 4/20  loss 4.5000  norm 1.5  lr 0.0003  12,346 tokens/s  MFU 52.0%  2.00 GiB  left 0:08",
        "step 4/20  held-out loss 2.2500",
        "[saved] checkpoint",
    ]


def test_live_display(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None)
    with open_log(LogConfig(tmp_path, steps=20, first=3), console) as log:
        assert log.bar is not None and log.bar.tasks[0].completed == 2
        record(log, row(4))
        advance(log, 5)
        assert log.bar.tasks[0].completed == 5
        record_validation(log, 5, 2.25)
        log.bar.refresh()
    text = printed(console)
    assert "5/20" in text and "12,346 tokens/s" in text and "left 0:08" in text
    assert "held-out loss 2.2500" in text


def test_quiet_writes_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(LogConfig(tmp_path, steps=20, quiet=True)) as log:
        record(log, row(1))
        say(log, "hello")
    assert capsys.readouterr() == ("", "")
    assert len(rows(tmp_path)) == 1


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(LogConfig(tmp_path / "run", steps=20, writes=False)) as log:
        advance(log, 1)
        record(log, row(1))
        record_validation(log, 1, 2.0)
        say(log, "hello")
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()


def test_resuming_repeats_no_step(tmp_path: Path) -> None:
    with open_log(LogConfig(tmp_path, steps=20), plain()) as log:
        record_validation(log, 0, 5.5)
        for step in range(1, 6):
            record(log, row(step))
        record_validation(log, 5, 4.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a write
    with open_log(LogConfig(tmp_path, steps=20, first=4), plain()) as log:
        for step in range(4, 7):
            record(log, row(step, loss=1.0))
    assert [r["step"] for r in rows(tmp_path)] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert rows(tmp_path)[4] == {"step": 3, "resumed": True, "dropped": 4}
    assert [r["loss"] for r in rows(tmp_path) if r["step"] > 3] == [1.0, 1.0, 1.0]
    want = [(1, 4.875), (2, 4.75), (3, 4.625), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert events(tmp_path)["train/loss"] == want
    assert "valid/valid_loss" in events(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_starting_over_starts_an_empty_record(tmp_path: Path) -> None:
    for loss in (5.5, 5.4):
        with open_log(LogConfig(tmp_path, steps=20), plain()) as log:
            record_validation(log, 0, loss)
    assert rows(tmp_path) == [{"step": 0, "valid_loss": 5.4}]
    assert events(tmp_path)["valid/valid_loss"] == [(0, pytest.approx(5.4))]


def test_json_stays_valid_when_the_loss_is_not(tmp_path: Path) -> None:
    with open_log(LogConfig(tmp_path, steps=20), plain()) as log:
        record(log, row(1, loss=float("nan"), grad_norm=float("inf")))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["grad_norm"] is None


def test_duration() -> None:
    assert [duration(s) for s in (-1, 7, 59.6, 754, 11045)] == ["0:00", "0:07", "1:00", "12:34", "3:04:05"]
