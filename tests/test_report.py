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
from dtrain.plan.compare import compare, differing
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


def test_two_layouts_are_compared_line_by_line() -> None:
    other = (*SMALL, "run.remat=full")
    a, b = predicted(*SMALL), predicted(*other)
    assert differing([a.plan.layout, b.plan.layout]) == {"run.remat": ["selective", "full"]}
    console = Console(width=120)
    with console.capture() as got:
        console.print(compare(["a.yaml", "b.yaml"], [a, b]))
    lines = {re.split(r"  +", line)[0]: line.split() for line in got.get().splitlines()}
    change = b.memory[b.heaviest].saved / a.memory[a.heaviest].saved - 1
    assert lines["memory: saved"][-1] == f"{change:+.1%}" and change < 0
    assert lines["HFU"][1:3] == [f"{p.hfu:.1%}" for p in (a, b)]
    files = (QUICK, str(LAYOUTS / "one-process.yaml"))
    both = json.loads(dtrain("plan", *files, "--json").stdout)
    assert [x["layout"] for x in both["layouts"]] == [*files]
    said = dtrain("plan", *files)
    assert said.exit_code == 0 and "mesh.tp.size" in said.stdout


def test_a_layout_with_packed_gathers_and_reductions_is_predicted() -> None:
    more = ("mesh={fsdp: {size: 4}}", "shard={params: {embed: fsdp}, compute: {batch: fsdp}, grads: {embed: fsdp}}")
    p = predicted(SMALL[0], *more, "run.precision=bf16", "data.microbatch=1")
    assert p.fits and p.mfu and "all-gather" in text(p)


def test_a_trace_has_every_span_and_the_memory(tmp_path: Path) -> None:
    path, p = tmp_path / "trace.json", predicted()
    assert dtrain("plan", QUICK, *SMALL, "--trace", str(path)).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    for pp, spans in enumerate(p.timeline.spans):
        mine = [e for e in events if e["pid"] == pp]
        drawn = [e for e in mine if e["ph"] == "X"]
        assert len(drawn) == len(spans)
        assert max(e["ts"] + e["dur"] for e in drawn) <= p.step_seconds * 1e6 * (1 + 1e-9)
        names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert {names[e["tid"]] for e in drawn} == {s.stream for s in spans}
        held = [e for e in mine if e["ph"] == "C"]
        assert max(e["args"]["bytes"] for e in held) == p.memory[pp].peak
        assert [e["ts"] for e in held] == sorted(e["ts"] for e in held)
    streams = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "pp/act", "pp/grad"} <= streams
    kernels = sum(e["dur"] - e["args"]["waits_us"] for e in events if e["ph"] == "X" and e["cat"] == "compute")
    assert kernels == pytest.approx(1e6 * sum(p.timeline.busy))
    assert dtrain("plan", QUICK, QUICK, "--trace", str(path)).exit_code == 2
    assert dtrain("plan", QUICK, "--trace", str(tmp_path / "no" / "where.json")).exit_code == 2
