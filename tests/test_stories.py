"""What `dtrain plan` is for: a 70B model on four nodes of eight H100, known before it is paid for."""

from __future__ import annotations

import json

import pytest
import tiny
from typer.testing import CliRunner

from dtrain import layout
from dtrain.cli import app
from dtrain.plan.predict import Prediction, predict


def of(name: str, *more: str) -> Prediction:
    return predict(layout.load(tiny.LAYOUTS / f"llama3-70b-4x8-{name}.yaml", more))


def test_naive_fsdp_dies_before_its_first_backward() -> None:
    """Its first forward fills the memory: what 80 layers keep is more than a GPU has, weights apart."""
    naive, full = of("fsdp32"), of("fsdp32", "run.remat=full")
    actions, memory = naive.plan.train[0], naive.memory[0]
    have = naive.plan.layout.cluster.device.memory
    over = next(i for i, n in enumerate(memory.over_time) if n > have)
    assert naive.fits is False and memory.saved > have
    assert actions[over].kind == "F" and actions[over].mb == 0 and over < memory.moment
    assert all(a.kind not in ("B", "UPDATE") for a in actions[:over])
    assert full.fits and full.memory[0].saved < memory.saved / 20


@pytest.mark.long
def test_sixteen_microbatches_of_eight_are_too_much_for_the_first_stage() -> None:
    got = CliRunner().invoke(app, ["plan", str(tiny.LAYOUTS / "llama3-70b-4x8-h100.yaml"), "data.microbatch=8"])
    assert got.exit_code == 3, got.output
    assert "DOES NOT FIT" in got.output and "pp 0, the heaviest" in got.output
    assert "microbatches of fewer sequences" in got.output and "data.microbatch=4" in got.output


def test_tp_across_nodes_is_refused_and_shows_its_price_where_allowed() -> None:
    mesh = ["mesh={pp: {size: 2}, tp: {size: 16}}", "shard.compute.batch=[]", "shard.optimizer={}"]
    with pytest.raises(layout.LayoutError, match=r"tp 16 leaves its node of 8 GPUs"):
        of("h100", *mesh)
    inside, across = of("h100"), of("h100", *mesh, "allow=[tp-across-nodes]")
    assert across.timeline.exposed > 0.3 > inside.timeline.exposed
    assert across.mfu < inside.mfu


def scaled(tp: int, layers: int, embed: int, heads: int, dp: int = 1) -> Prediction:
    """A model of the 2019 paper's table 1 on its DGX-2H. The vocabulary is that of 8-way model parallelism, the batch 8
    sequences a replica."""
    gpus = tp * dp
    mesh = {dim: {"size": n} for dim, n in (("dp", dp), ("tp", tp)) if n > 1}
    tensor = {axis: "tp" for axis in ("vocab", "heads", "mlp") if tp > 1}
    batch = {"batch": "dp"} if dp > 1 else {}
    more = (
        f"cluster.nodes={max(1, gpus // 16)}",
        f"cluster.gpus_per_node={min(16, gpus)}",
        f"mesh={json.dumps(mesh)}",
        f"shard={json.dumps({'params': tensor, 'compute': tensor | batch})}",
        *(f"model.{key}={n}" for key, n in (("layers", layers), ("embed", embed), ("heads", heads))),
        "model.vocab_pad=51200",
        f"data.batch={8 * dp}",
        "run.compile=on",
    )
    return predict(layout.load(tiny.LAYOUTS / "gpt2-8.3b-32x16-v100.yaml", more))


def test_weak_scaling_of_2019_on_512_gpus() -> None:
    """Shoeybi et al. 2019, figure 5: FLOP/s of a GPU, against one that trains 1.2B parameters at 39 TFLOP/s."""
    alone = scaled(1, 40, 1536, 16)
    eight, with_data = (scaled(8, 72, 3072, 32, dp) for dp in (1, 64))
    assert with_data.plan.layout.world == 512
    assert eight.tflops_per_gpu / alone.tflops_per_gpu == pytest.approx(0.77, abs=0.05)
    assert with_data.tflops_per_gpu / alone.tflops_per_gpu == pytest.approx(0.74, abs=0.05)
