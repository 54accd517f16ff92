"""A layout that does not fit is told what to change; each change is legal and does fit."""

from __future__ import annotations

import math

import pytest

from dtrain import layout
from dtrain.plan.advice import Advice, advise
from dtrain.plan.choice import Choice, choice_of, overrides, uneven
from dtrain.plan.predict import Prediction, predict

SMALL = """
cluster:
  nodes: 1
  gpus_per_node: 2
  gpu: {{name: small, kind: hopper, processors: 132, memory: {memory}, memory_rate: 3350GB/s,
        peak: {{bf16: 989TFLOP/s, fp32: 67TFLOP/s}}, links: {{nvlink: 450GB/s, ib: 50GB/s}}}}
mesh: {{dp: {{size: 2}}}}
shard: {{compute: {{batch: dp}}}}
model: {{family: llama, layers: 4, embed: 1024, heads: 16, kv_heads: 8, mlp: 4096, vocab: 8192}}
data: {{source: synthetic, seq: 2048, batch: 32, microbatch: 8}}
run: {{steps: 1, precision: bf16, remat: none}}
"""


@pytest.fixture(scope="module")
def wanted() -> Prediction:
    return predict(layout.loads(SMALL.format(memory="4GiB")))


@pytest.fixture(scope="module")
def advice(wanted: Prediction) -> tuple[Advice, ...]:
    return advise(wanted)


def test_each_advice_fits_and_says_its_cost(wanted: Prediction, advice: tuple[Advice, ...]) -> None:
    assert wanted.fits is False and 2 <= len(advice) <= 3
    for a in advice:
        again = predict(layout.vary(wanted.plan.layout, a.overrides))
        assert again.fits and again.step_seconds == a.predicted.step_seconds
        assert a.cost == pytest.approx(again.step_seconds / wanted.step_seconds - 1)
    assert sorted(a.cost for a in advice) == [a.cost for a in advice]
    assert len({a.what for a in advice}) == len(advice)


def test_what_fits_needs_no_advice() -> None:
    assert advise(predict(layout.loads(SMALL.format(memory="80GiB")))) == ()


def test_nothing_is_said_where_nothing_helps() -> None:
    assert (
        advise(predict(layout.loads(SMALL.format(memory="10MiB"), overrides=["data.batch=4", "data.microbatch=1"])))
        == ()
    )


def test_a_varied_layout_is_the_one_with_these_overrides() -> None:
    text, more = SMALL.format(memory="4GiB"), ["run.steps=3", "shard.optimizer={embed: dp}"]
    one, other = layout.loads(text, "x.yaml", more), layout.vary(layout.loads(text, "x.yaml", more[:1]), more[1:])
    assert one == other and one.shard.grads == other.shard.grads and one._where == other._where
    with pytest.raises(layout.LayoutError, match=r"override data.microbatch=3: .*must divide"):
        layout.vary(one, ["data.microbatch=3"])


@pytest.mark.parametrize(
    "choice",
    [
        Choice(dp=4),
        Choice(dp=2, tp=2, optimizer=True, grads=("dp",)),
        Choice(dp=2, fsdp=2, optimizer=True, grads=("fsdp", "dp"), keep="step", sequence=False),
        Choice(pp=2, fsdp=2, schedule="zbv", chunks=2, microbatch=4, remat="full", sequence=False),
        Choice(pp=2, tp=2, schedule="interleaved", chunks=2, remat="[matmul, attention]"),
    ],
)
def test_a_choice_is_read_back_from_its_layout(choice: Choice) -> None:
    ranks = math.prod(choice.mesh.values())
    sizes = [f"cluster.gpus_per_node={ranks}", f"mesh.dp.size={ranks}"]
    start = layout.loads(SMALL.format(memory="4GiB"), overrides=sizes)
    got = choice_of(layout.vary(start, overrides(choice, start)))
    assert got == choice if choice.tp > 1 or not choice.sequence else got.mesh == choice.mesh


def test_uneven_stages_have_fewer_layers_at_the_ends() -> None:
    assert uneven(126, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert uneven(7, 4) == (1, 2, 2, 2) and sum(uneven(13, 5)) == 13
