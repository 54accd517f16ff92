"""Rows of published runs become layouts, and scores are what a hand counts."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import tiny

from dtrain.plan.loads import loads_of
from dtrain.plan.timeline import timed
from dtrain.program.lower import lower

BENCH = Path(__file__).parent.parent / "bench"
sys.path[:0] = [str(BENCH)]

import published  # noqa: E402
import reading  # noqa: E402
import rows  # noqa: E402
from published import Found  # noqa: E402

with (BENCH / "data" / "published.csv").open(newline="", encoding="utf-8") as file:
    ALL = {r["id"]: r for r in csv.DictReader(file)}


def test_a_row_is_the_layout_that_it_says() -> None:
    layout = rows.layout_of(ALL["bloompre-181B-h14336-L72-a64-tp8-pp4-dp12-mb2-g2016-fp16"])
    assert layout.sizes == {"pp": 4, "dp": 12, "fsdp": 1, "cp": 1, "tp": 8}
    assert layout.model.fields["embed"] == 14336 and layout.shard.optimizer == {"embed": ("dp",)}
    assert layout.run.remat == "full" and layout.kernels.attention == "math" and layout.run.precision == "fp16"
    assert layout.cluster.links["ib"].per_node == 4  # 4x100Gb Omni-Path for eight GPUs


def test_every_gpu_of_the_file_is_in_the_catalog() -> None:
    assert {r["gpu"] for r in ALL.values()} <= set(rows.GPUS)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("opt-175b", "from memory"),
        ("kor22-f7-1T-none", "not measured"),
        ("nar21-t1-1.7B", "micro_batch not stated"),
        ("dgxc2504-l3-8b-bf16-8", "context parallel"),
        ("stas-H200-8k", "optimizer on the CPU"),
    ],
)
def test_what_cannot_be_modelled_says_why(row: str, why: str) -> None:
    with pytest.raises(rows.SkipError, match=why):
        rows.layout_of(ALL[row])


def few(path: Path, *names: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ALL["opt-175b"]))
        writer.writeheader()
        writer.writerows(ALL[name] for name in names)
    return path


def test_a_few_rows_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process and two say the same, and what a stopped run has lowered is not lowered again."""
    one = few(tmp_path / "one.csv", "meg20-v100-tp1")
    two = few(tmp_path / "two.csv", "meg20-v100-tp1", "tt24apr-Llama-3-8B-selectiveop-bs1", "opt-175b")
    made = {}
    for name, path, workers in (("stopped", one, "1"), ("on", two, "1"), ("processes", one, "2")):
        kept = tmp_path / ("processes" if workers == "2" else "one")
        assert published.main([str(path), "--workers", workers, "--cache", str(kept), "--json"]) == 0
        said = capsys.readouterr()
        made[name] = json.loads(said.out)
        assert f" of {2 if path == two else 1} rows, " in said.err.splitlines()[-1]
    assert made["stopped"] == made["processes"]
    assert made["on"]["sources"]["meg20"] == made["stopped"]["sources"]["meg20"]
    assert set(made["on"]["sources"]) == {"meg20", "tt24apr", "opt"}
    assert 0 < made["on"]["median_abs_err"] < 0.5 and made["on"]["modelled_share"] == 1.0
    assert made["on"]["sources"]["tt24apr"]["fits_accuracy"] in (0.0, 1.0)
    assert made["on"]["sources"]["opt"]["median_abs_err"] is None
    assert len(list((tmp_path / "one").iterdir())) == 2


def test_a_kept_program_is_not_lowered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ALL["meg20-v100-tp1"]
    first = reading.read_all([row], tmp_path, 1)
    monkeypatch.setattr(reading, "trace", lambda job: pytest.fail("lowered again"))
    assert reading.read_all([row], tmp_path, 1) == first
    monkeypatch.setattr(reading, "code", lambda: "other code")
    with pytest.raises(pytest.fail.Exception, match="lowered again"):
        reading.read_all([row], tmp_path, 1)


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_a_long_step_is_as_long_as_its_microbatches_say(mesh: str) -> None:
    """Timed by two shorter steps, to rounding what the whole list of actions takes."""
    made = tiny.make("gpt2", mesh, ("data.batch=48", "data.microbatch=1", "shard.optimizer={}"))
    loads = loads_of(lower(made.job), True)
    row = {**ALL["meg20-v100-tp1"], "id": "x"}
    counts = (3 * made.layout.sizes["pp"], 4 * made.layout.sizes["pp"])
    plans = tuple(reading.plan(reading.cut(made.layout, n)) for n in counts)
    cut = published.Timed(row, made.layout, reading.Read(loads, 0), plans, counts)
    assert made.microbatches > 4 * made.layout.sizes["pp"]
    assert cut.step() == pytest.approx(timed(made, loads).step, rel=1e-9)


def test_a_sample_has_every_source_and_is_always_the_same() -> None:
    table = [r for r in ALL.values() if rows.source_of(r) in ("mosaic", "nano", "alpa", "opt")]
    sample = published.sample_of(table, 12)
    sources = [rows.source_of(r) for r in sample]
    assert set(sources) == {"mosaic", "nano", "alpa"} and sources.count("mosaic") > 5 and len(sample) <= 14
    assert sample == published.sample_of(table, 12)


def test_scores_are_medians_of_groups_then_sources() -> None:
    def row(id: str, group: str, target: str, tp: str) -> dict[str, str]:
        return {**ALL["meg20-v100-tp1"], "id": id, "group": group, "step_s_target": target, "tp": tp}

    table = [row("a-1", "g", "1", "1"), row("a-2", "g", "2", "2"), row("a-3", "h", "3", "4"), row("b-1", "k", "4", "1")]
    table.append(row("a-4", "h", "4", "8"))
    said = {"a-1": 1.1, "a-2": 2.6, "a-3": 3.0, "a-4": 1.0, "b-1": 3.0}
    found = {name: Found(name, step=step) for name, step in said.items()}
    score = published.scores(table, found)
    # Errors: a has groups g (0.1 and 0.3: 0.2) and h (0 and 0.75: 0.375), so 0.2875; b has 0.25.
    assert score["median_abs_err"] == pytest.approx((0.2875 + 0.25) / 2)
    # The fastest of a's sweep is said to be the one that takes four times the fastest.
    assert score["top1_regret"] == pytest.approx(3.0)
    assert score["spearman_median"] == pytest.approx(-0.2)


def test_verdicts_are_balanced() -> None:
    base = ALL["meg20-v100-tp1"]
    table = [{**base, "id": f"x-{i}", "fits": "OOM" if i == 3 else "ok"} for i in range(4)]
    found = {f"x-{i}": Found(f"x-{i}", fits=i != 0) for i in range(4)}
    assert published.balanced(published.verdicts(table, found)) == pytest.approx((2 / 3 + 0) / 2)
