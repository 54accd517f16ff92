"""What `dtrain plan` prints: the object of --json is the prediction and is documented, the page says the same."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import LAYOUTS, QUICK, dtrain

from dtrain import layout
from dtrain.plan.ledger import by_link
from dtrain.plan.predict import Prediction, predict
from dtrain.plan.report import page, report, show_bytes

SMALL = (
    "cluster={nodes: 1, gpus_per_node: 4, gpu: h100-sxm}",
    "mesh={pp: {size: 2}, tp: {size: 2}}",
    "run.precision=bf16",
)
TIGHT = "cluster={nodes: 1, gpus_per_node: 4, gpu: {name: tiny, kind: hopper, processors: 4, memory: 20MiB, \
memory_rate: 100GB/s, peak: {bf16: 1TFLOP/s, fp32: 1TFLOP/s, fp64: 1TFLOP/s}, links: {nvlink: 10GB/s}}}"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def predicted(*more: str) -> Prediction:
    return predict(layout.load(QUICK, more or SMALL))


def text(p: Prediction, width: int = 120) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as got:
        console.print(page(p))
    return got.get()


def test_json_is_the_prediction() -> None:
    result = dtrain("plan", QUICK, *SMALL, "--json")
    got, p = json.loads(result.stdout), predicted()
    assert result.exit_code == 0 and got["fits"] is True and got["world_size"] == 4
    for key in ("step_seconds", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "hfu", "bubble"):
        assert got[key] == pytest.approx(getattr(p, key))
    assert got["memory"]["peak"] == p.memory[p.heaviest].peak
    parts = {k: n for k, n in got["memory"].items() if k != "peak"}
    assert len(parts) == 9 and sum(parts.values()) == got["memory"]["peak"]
    assert [m["layers"] for m in got["memory_by_stage"]] == [2, 2]
    assert got["bytes_by_link"] == pytest.approx(by_link(p.ledger[p.busiest]))
    for pp, entries in enumerate(p.ledger):
        mine = [e for e in got["ledger"] if pp in e["pp"]]
        assert sum(e["sent_bytes"] for e in mine) == pytest.approx(sum(e.wire for e in entries))
        assert sum(e["count"] for e in mine) == sum(e.count for e in entries)


def test_every_key_is_documented() -> None:
    readme = (LAYOUTS / "README.md").read_text()
    section = readme[readme.index("## What dtrain plan --json prints") : readme.index("## Data\n")]
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", section))))
    made = report(predicted())
    keys = {*made, *made["memory"], *made["memory_by_stage"][0], *made["ledger"][0]}
    assert keys <= words, keys - words


def test_what_is_not_known_is_null_and_not_on_the_page() -> None:
    result = dtrain("plan", QUICK, "--json")
    got = json.loads(result.stdout)
    assert result.exit_code == 0
    assert got["fits"] is got["step_seconds"] is got["mfu"] is got["bubble"] is got["capacity_bytes"] is None
    assert got["memory"]["peak"] > 0 and got["ledger"]
    said = text(predict(layout.load(QUICK)))
    assert "is not known" in said and "step time  " not in said and "FITS" not in said


def test_the_page_says_the_figures() -> None:
    p, said = predicted(), text(predicted())
    assert "FITS" in said and f"{p.mfu:.1%}" in said and f"{p.bubble:.1%}" in said
    assert f"nvlink {show_bytes(by_link(p.ledger[p.busiest])['nvlink'])}" in said
    assert "llama.py:" in said and "reduce-scatter" in said and "fragmentation" in said


def test_exit_codes(tmp_path: Path) -> None:
    bad = dtrain("plan", QUICK, *SMALL[1:], TIGHT)
    assert bad.exit_code == 3 and "DOES NOT FIT" in bad.stdout and "runs out of memory first at" in bad.stdout
    assert dtrain("plan", QUICK, "model.heads=6").exit_code == 1
    assert dtrain("plan", "run.steps=1").exit_code == 2


def test_what_this_machine_lacks_is_a_note() -> None:
    got: dict[str, Any] = json.loads(dtrain("plan", QUICK, *SMALL, "--json").stdout)
    assert torch.cuda.device_count() >= 4 or any("this machine has" in note for note in got["notes"])
