"""What `dtrain show` prints: against the lowered program, and by hand for small layouts."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dtrain.layout import load, loads
from dtrain.plan import plan
from dtrain.program.lower import lower
from dtrain.show import activations, groups, show, spans

LAYOUTS = Path(__file__).parent.parent / "layouts"
SHIPPED = sorted(LAYOUTS.glob("*.yaml"))

MIXED = """
cluster: {nodes: 2, gpus_per_node: 8, gpu: h100-sxm}
mesh: {pp: {size: 2}, dp: {size: 1}, fsdp: {size: 2}, tp: {size: 4}}
shard:
  params:    {layers: pp, embed: fsdp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute:   {layers: pp, batch: [dp, fsdp], res_seq: tp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
pipeline: {layers_per_stage: [3, 2]}
model: {family: llama, layers: 5, embed: 64, heads: 8, kv_heads: 2, mlp: 96, vocab: 1000, tied: true}
data: {source: synthetic, seq: 32, batch: 16, microbatch: 2}
run: {steps: 1, precision: bf16}
"""


def line(page: str, start: str) -> list[str]:
    """The columns of the line that begins with a word."""
    found = next(line for line in page.splitlines() if line.strip().startswith(start + " "))
    return re.split(r"  +", found.strip())


def group(page: str, name: str) -> list[str]:
    """The columns of a group in the last table."""
    return line(page.split("\nranks\n")[1], name)[1:]


@pytest.fixture(scope="module")
def mixed() -> str:
    return show(loads(MIXED))


def test_parameters(mixed: str) -> None:
    assert "llama: 208,064 parameters, bf16" in mixed
    assert "padding: vocab 1000 -> 1024" in mixed
    assert line(mixed, "block.0..4/w_up") == [
        "block.0..4/w_up",
        "64 x 96",
        "embed mlp/tp",
        "64 x 24",
        "embed/fsdp mlp/tp",
        "32 x 24",
        '"',
        "32 x 24",
    ]
    assert line(mixed, "embed/table")[:4] == ["embed/table", "1024 x 64", "vocab/tp embed", "256 x 64"]
    assert line(mixed, "head/table")[-1] == "tied to embed/table, a copy on pp 0 and 1"


def test_shared_kv_heads(mixed: str) -> None:
    wk = line(mixed, "block.0..4/wk")
    assert wk[1:4] == ["64 x 2 x 8", "embed kv_heads/tp head_dim", "64 x 1 x 8"]
    assert wk[-1] == "cut over 2 blocks of tp, copied over the 2 ranks of a block (tp%2)"
    assert "copied" not in " ".join(line(mixed, "block.0..4/wq"))
    assert group(mixed, "tp%2")[-1].startswith("(0 1) (2 3) (4 5)")


def test_stages_and_ranks(mixed: str) -> None:
    assert "pipeline: 1f1b, 4 microbatches" in mixed
    table = mixed.split("pipeline: ")[1].split("\n\n")[0].splitlines()
    first, last = (re.split(r"  +", row.strip()) for row in table[2:])
    assert (first[:4], first[-1]) == (["0", "3", "0..2", "embed"], "0..7")
    assert (last[:4], last[-1]) == (["1", "2", "3..4", "head"], "8..15")
    assert group(mixed, "tp") == [
        "nvlink",
        "4",
        "(0 1 2 3) (4 5 6 7) (8 9 10 11) (12 13 14 15)",
    ]
    assert group(mixed, "fsdp")[-1] == "(0 4) (1 5) (2 6) (3 7) (8 12) (9 13) (10 14) (11 15)"
    assert group(mixed, "pp")[-1].startswith("(0 8) (1 9)")
    assert group(mixed, "pp@0+1")[-1] == group(mixed, "pp")[-1]
    assert "dp 1" in mixed and not re.search(r"^  dp ", mixed, re.MULTILINE)  # size 1: no group


def test_the_groups_of_two_nodes() -> None:
    """pp 2 x dp 2 x tp 2 on two nodes of four: tp inside NVLink."""
    page = show(
        loads("""
cluster: {nodes: 2, gpus_per_node: 4, gpu: h100-sxm}
mesh: {pp: {size: 2, link: ib}, dp: {size: 2}, tp: {size: 2, link: nvlink}}
shard:
  params:  {layers: pp, heads: tp, kv_heads: tp, mlp: tp, vocab: tp}
  compute: {layers: pp, heads: tp, kv_heads: tp, mlp: tp, vocab: tp, batch: dp}
model: {family: llama, layers: 2, embed: 8, heads: 2, mlp: 8, vocab: 11}
data: {source: synthetic, seq: 8, batch: 4}
run: {steps: 1}
""")
    )
    assert group(page, "tp") == ["nvlink", "4", "(0 1) (2 3) (4 5) (6 7)"]
    assert group(page, "dp") == ["nvlink", "4", "(0 2) (1 3) (4 6) (5 7)"]
    assert group(page, "pp") == ["ib", "4", "(0 4) (1 5) (2 6) (3 7)"]


def test_activations(mixed: str) -> None:
    found = {(a.segment, a.what, a.placement): (a.shape, a.local) for a in activations(plan(loads(MIXED)))}
    assert found["block", "constrain", "batch/fsdp res_seq/tp embed"] == ((4, 32, 64), (2, 8, 64))
    assert found["block", "island out", "batch/fsdp seq heads/tp head_dim"] == ((4, 32, 8, 8), (2, 32, 2, 8))
    assert found["block", "island in 1", "batch/fsdp seq kv_heads/tp head_dim"] == ((4, 32, 2, 8), (2, 32, 1, 8))
    assert found["embed", "island out", "batch/fsdp seq embed +tp"] == ((4, 32, 64), (2, 32, 64))
    assert found["head", "island out", "+fsdp"] == ((), ())
    assert "batch/fsdp res_seq/tp embed" in mixed


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_layouts_show_quickly(path: Path) -> None:
    layout = load(path)
    began = time.monotonic()
    page = show(layout)
    assert time.monotonic() - began < 15
    assert f"{layout.world} rank" in page
    assert all(len(row) < 400 for row in page.splitlines())


@pytest.mark.parametrize("name", ["quickstart", "llama3-70b-8x8-h100"])
def test_what_is_shown_is_what_is_lowered(name: str) -> None:
    """The placements that the lowering recorded line by line, dims of size 1 left out."""
    p = plan(load(LAYOUTS / f"{name}.yaml"))
    program = lower(p.job)
    shown: dict[str, dict[str, str]] = {segment: {} for segment in program.segments}
    for a in activations(p):
        if a.what == "constrain":
            shown[a.segment][a.line] = a.placement
    alone = "|".join(d for d in p.job.mesh.dims if p.job.mesh.size(d) == 1) or "none"
    for segment in program.segments.values():
        recorded = {Path(k).name: re.sub(rf"/({alone})\b", "", v) for k, v in segment.activations.items()}
        assert recorded and recorded == shown[segment.name]
        if segment.act is not None:
            local = [a.local for a in activations(p) if a.segment == segment.name and a.what == "constrain"]
            assert local[-1] == segment.act[0]


def test_spans_and_groups() -> None:
    assert spans([]) == ""
    assert spans([0, 1, 2, 5, 7, 8]) == "0..2 5 7..8"
    assert groups([(0, 1), (2, 3)]) == "(0 1) (2 3)"
    assert groups([(0, 1), (2, 3), (4, 5)], most=4) == "(0 1) (2 3) and 1 more"
    assert groups([tuple(range(0, 500, 8))]) == "(0 8 .. 496)"
