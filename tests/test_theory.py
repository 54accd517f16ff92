"""The tables of layouts/README.md: by hand, and equal to the ledger of the lowered program in every dim and phase."""

from __future__ import annotations

import itertools
import json
import math
import random

import equality
import pytest
import tiny
import torch

from dtrain import layout, plan
from dtrain.plan import ledger, theory
from dtrain.program.lower import Program, lower

SHIPPED = sorted(p.stem for p in tiny.LAYOUTS.glob("*.yaml"))
QUICK = ("quickstart", "llama3-70b-8x8-h100", "llama3-8b-1x8-h100")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def check(made: plan.Plan, program: Program | None = None) -> None:
    program = program or lower(made.job)
    for pp in range(made.job.mesh.size("pp")):
        said = theory.by_dim_and_phase(theory.theory(made.layout, pp))
        assert ledger.by_dim_and_phase(ledger.ledger(made, program, pp)) == pytest.approx(said)
        assert said or made.job.mesh.world == 1


# ------------------------------------------------------------------------------------------------- by hand

E, V, SEQ, M, L = 16, 256, 8, 4, 2  # of tiny's Llama on two ranks; its vocabulary of 61 is padded
BLOCK = 2 * E + E * 4 * 4 * 2 + E * 2 * 4 * 2 + 3 * E * 24  # norms, wq and wo, wk and wv, the MLP


def terms(mesh: str, *more: str) -> dict[tuple[str, str], float]:
    return theory.by_dim_and_phase(theory.theory(tiny.make("llama", mesh, more).layout))


def test_fsdp_by_hand() -> None:
    """n 2, doubles: half of every parameter of 8 bytes, gathered before each forward and backward; the head's once, and
    the embedding's not again for the next microbatch's forward."""
    v = 128  # no tp: padded to 128
    H = 8 * (v * E + E)
    P = 8 * (L * BLOCK + v * E) + H
    again = (M - 1) * 8 * v * E / 2
    assert terms("fsdp2")["fsdp", "unshard"] == (2 * (P - H) + H) * M / 2 - again
    assert terms("fsdp2", "unshard.keep=forward")["fsdp", "unshard"] == M * P / 2 - again
    assert terms("fsdp2", "unshard.keep=step")["fsdp", "unshard"] == P / 2
    assert terms("fsdp2")["fsdp", "reduce"] == P / 2
    assert terms("fsdp2", "shard.grads={embed: fsdp}")["fsdp", "reduce"] == M * P / 2
    assert terms("fsdp2", "pipeline.schedule=zero-bubble")["fsdp", "unshard"] == (3 * (P - H) + H) * M / 2 - again
    assert terms("fsdp2", "pipeline.schedule=gpipe", "unshard.keep=forward")["fsdp", "unshard"] == (P - H + M * H) / 2


def test_zero_by_hand() -> None:
    P = 8 * (L * BLOCK + 2 * 128 * E + E)
    assert terms("dp2") == {
        ("dp", "reduce"): 2 * P / 2,
        ("dp", "forward"): 8,
        ("dp", "update"): 24,
    }
    zero = "shard.optimizer={embed: dp}"
    assert (terms("dp2", zero)["dp", "publish"], terms("dp2", zero)["dp", "reduce"]) == (P / 2, P / 2)
    assert terms("dp2", zero, "shard.grads={embed: dp}")["dp", "reduce"] == M * P / 2


@pytest.mark.parametrize(
    ("remat", "seq", "layer"),
    [("none", True, 8), ("selective", True, 10), ("full", True, 11), ("none", False, 8), ("full", False, 10)],
)
def test_a_layer_by_hand(remat: str, seq: bool, layer: int) -> None:
    """In units of (n-1)/n A, a layer and microbatch."""
    more = [f"run.remat={remat}", *([] if seq else ["shard.compute.res_seq=[]"])]
    found = theory.theory(tiny.make("llama", "tp2", tuple(more)).layout)
    A, microbatches = SEQ * E * 8, 8
    total = sum(t.bytes for t in found if t.row.startswith("layer"))
    assert total == layer * L * microbatches * A / 2
    ends = sum(t.bytes for t in found if t.row in ("embedding", "head"))
    assert ends == 4 * microbatches * A / 2
    # 3 doubles a token, in all-reduces: 2 (n-1)/n.
    assert sum(t.bytes for t in found if t.row == "loss") == microbatches * 3 * SEQ * 8


def test_the_pipeline_by_hand() -> None:
    """Three coordinates, 9 microbatches: the middle one sends both ways."""
    more = ("model.layers=3", "data.batch=9")
    lay = tiny.make("llama", "pp3", more).layout
    assert [theory.by_dim_and_phase(theory.theory(lay, pp))["pp", "pipeline"] for pp in range(3)] == [
        9 * SEQ * E * 8 * ends for ends in (1, 2, 1)
    ]


def test_gathers_by_microbatches_in_flight() -> None:
    """keep: forward gathers once where a microbatch is always in flight; only 1f1b's last coordinate has none, and of
    its two units the layer's next forward follows at once."""
    lay = tiny.make("llama", "pp2 fsdp2", ("unshard.keep=forward",)).layout
    own, tables = 8 * BLOCK / 2, (8 * 128 * E / 2, 8 * (128 * E + E) / 2)
    found = [theory.by_dim_and_phase(theory.theory(lay, pp))["fsdp", "unshard"] for pp in range(2)]
    assert found == [own + tables[0], own + M * tables[1]]


# -------------------------------------------------------------------------------------------- against the program


def drawn(count: int, seed: int) -> list[equality.Case]:
    """Layouts of the equality tests: every dim product, schedule and family may come."""
    r = random.Random(seed)
    triples = equality.triples()
    return [
        equality.draw_case(t, equality.chooser(t, lambda n: r.randrange(n)))
        for t in (r.choice(triples) for _ in range(count))
    ]


@pytest.mark.parametrize("number", range(5))
def test_program_and_theory_agree(number: int) -> None:
    check(plan.plan(layout.loads(drawn(5, 1)[number].layout)))


@pytest.mark.long
def test_program_and_theory_agree_on_many() -> None:
    for case in drawn(200, 2):
        check(plan.plan(layout.loads(case.layout)))


PARTIAL = list(
    itertools.product(
        ("llama", "gpt2", "bert"), ("vocab", "mlp", "heads"), (True, False), ("none", "selective", "full")
    )
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if i % 17 == 0 else pytest.mark.long) for i, c in enumerate(PARTIAL)],
    ids=lambda c: "-".join(map(str, c)),
)
def test_rules_that_leave_a_part_whole(case: tuple[str, str, bool, str]) -> None:
    """tp need not cut everything: without heads, mlp or vocab its sums are missing."""
    family, left, seq, remat = case
    axes = [left, *(["kv_heads"] if left == "heads" and family == "llama" else [])]
    more = [f"shard.{table}.{axis}=[]" for table in ("params", "compute") for axis in axes]
    more += [f"run.remat={remat}", *([] if seq else ["shard.compute.res_seq=[]"])]
    check(tiny.make(family, "dp2 tp2", tuple(more)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in SHIPPED])
def test_shipped_layouts_move_what_the_theory_says(name: str) -> None:
    check(plan.plan(layout.load(tiny.LAYOUTS / f"{name}.yaml")))


@pytest.mark.long
@pytest.mark.parametrize("name", tiny.bench("wire").VARIATIONS)
def test_variations_move_what_the_theory_says(name: str) -> None:
    base, overrides = tiny.bench("wire").VARIATIONS[name]
    check(plan.plan(layout.load(tiny.LAYOUTS / f"{base}.yaml", overrides)))


def test_variations_are_different_layouts() -> None:
    found = [
        (base, *(tuple(theory.by_dim_and_phase(theory.theory(lay, pp)).items()) for pp in range(lay.sizes["pp"])))
        for base, more in [*((n, ()) for n in SHIPPED), *tiny.bench("wire").VARIATIONS.values()]
        for lay in [layout.load(tiny.LAYOUTS / f"{base}.yaml", more)]
    ]
    assert len(set(found)) == len(found)


# ------------------------------------------------------------------------------------------------- what is printed


def test_the_table_is_in_the_readme() -> None:
    page = (tiny.LAYOUTS / "README.md").read_text().split("## Bytes that a rank sends in a step")[1]
    cells = {cell.strip() for line in page.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")}
    rows: set[str] = set()
    for family, mesh, *more in (
        ("llama", "pp2 dp2 tp4", "model.tied=true", "shard.optimizer={embed: dp}", "run.remat=full"),
        ("bert", "fsdp2 tp2", "run.remat=full"),
    ):
        rows |= {t.row for t in theory.theory(tiny.make(family, mesh, tuple(more)).layout)}
    assert len(rows) == 14
    for row in rows:
        assert any(cell.startswith(row) for cell in cells), row


def test_no_formula_no_answer() -> None:
    with pytest.raises(ValueError, match="no formula says what a layer"):
        theory.theory(tiny.make("my_model", "tp2").layout)
    lay = tiny.make("llama", "tp2").layout
    other = lay.model_copy(update={"run": lay.run.model_copy(update={"remat": "other"})})
    with pytest.raises(ValueError, match="has no formula"):
        theory.theory(other)


def test_the_program_prints_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    bench = tiny.bench("wire")
    path = str(tiny.LAYOUTS / "quickstart.yaml")
    bench.main([path])
    assert "quickstart: worst ratio 1.00" in capsys.readouterr().out
    bench.main([path, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ratios"]["quickstart"] == pytest.approx(1)
    assert {r["dim"] for r in found["rows"]["quickstart"]} == {"pp", "tp"}
    assert math.isinf(bench.totals([{"program": 8.0, "theory": 0.0, "ratio": None}])[2])
