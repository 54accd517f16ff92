"""Predictions move by exactly what is counted by hand when the program changes, and lower what a run lowers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dtrain import launch, layout, train
from dtrain.plan.ledger import by_phase
from dtrain.plan.predict import Prediction, predict
from dtrain.plan.seconds import CONSTANTS, Constants, collective, machine
from dtrain.program.lower import Program

BLOCK = """
from dtrain import ops
from dtrain.axes import Init, Param
from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, logits
from dtrain.models.llama import params as llama_params

def params(cfg):
    tree = llama_params(cfg)
    more = {MORE}
    return {{**tree, "block": {{**{{k: p for k, p in tree["block"].items() if k != "norm_mlp"}}, **more}}}}

def block(cfg, p, x, batch, key, on):
    w = {{name: on.gather(t) for name, t in p.items()}}
    heads, kv = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    def attend(here, q, k, v):
        return ops.attention(q, k, v, causal=True, kernel=cfg.attention)
    h = on.constrain(ops.rms_norm(x, w["norm_attn"], cfg.norm_eps), "batch seq embed")
    q, k, v = (ops.to_heads(h, w[name]) for name in ("wq", "wk", "wv"))
    a = ops.from_heads(on.island(attend, (heads, kv, kv), heads)(q, k, v), w["wo"])
    x = x + on.constrain(a, ACT)
    m = ops.swiglu(h @ w["w_gate"], h @ w["w_up"]) @ w["w_down"]
    return {RESULT}
"""
MODELS = {
    "plain": ("{}", "x + on.constrain(m, ACT)"),
    "product": (
        '{"w_more": Param((cfg.embed, cfg.embed), ("embed", "embed_out"), Init("normal", 0.02))}',
        'x + on.constrain(m @ w["w_more"], ACT)',
    ),
    "collective": ("{}", "x + on.constrain(m, ACT) + on.constrain(m * 2, ACT)"),
}
T, E, L, M = 4096, 4096, 2, 4  # tokens of a microbatch, embed, layers, microbatches
LAYOUT = """
cluster: {nodes: 1, gpus_per_node: 2, gpu: h100-sxm}
mesh: {tp: {size: 2}}
shard:
  params:  {vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute: {vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
model: {file: model.py, layers: 2, embed: 4096, heads: 32, kv_heads: 8, mlp: 8192, vocab: 1024}
data: {source: synthetic, seq: 4096, batch: 4}
run: {steps: 1, precision: bf16, remat: none}
"""
H100 = Constants(matmul=0.7, memory=0.9, gap=2e-6, link=0.8, net=0.75, overlap=0.0)
MEMORY = 3350e9 * 0.9  # bytes/s


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A prediction by the name of its model and overrides, each made once."""

    @cache
    def make(model: str, *more: str) -> Prediction:
        folder = tmp_path_factory.mktemp(model)
        extra, result = MODELS[model]
        (folder / "model.py").write_text(BLOCK.format(MORE=extra, RESULT=result))
        return predict(layout.loads(LAYOUT, str(folder / "x.yaml"), more), H100)

    return make


ALONE = ("cluster.gpus_per_node=1", "mesh.tp.size=1")


def test_a_product_more_costs_what_it_is(predicted: Any) -> None:
    """x -> x w with a square weight of 4096: forward, its gradient and the weight's, each 2 x 4096^3 FLOPs, and a
    parameter to keep, to sum up and to update."""
    before, after = predicted("plain", *ALONE), predicted("product", *ALONE)
    flops = 2 * T * E * E
    assert after.model_flops - before.model_flops == pytest.approx(3 * flops * L * M)
    assert after.hardware_flops - before.hardware_flops == pytest.approx(3 * flops * L * M)

    # 512 tiles of 256 x 128 are four waves on 132 multiprocessors; 100 MB of memory traffic take less.
    product = 4 * (2 * 256 * 128 * E) / (989.4e12 * 0.7 / 132) + 2e-6
    # Gradients arrive in bf16 and are summed in fp32: the first is converted, three are added.
    sums = E * E * (2 + 4 + 3 * (2 + 4 + 4)) / MEMORY
    # The norm reads the gradient; AdamW reads and writes four fp32 values.
    update = E * E * 4 * (1 + 8) / MEMORY
    cast = E * E * (4 + 2) / MEMORY + 2e-6  # once a step, a kernel: the master is what lies at rest
    assert after.step_seconds - before.step_seconds == pytest.approx(L * (3 * M * product + sums + update + cast))

    parts = [(m.parameters, m.gradients, m.optimizer) for m in (after.memory[0], before.memory[0])]
    more = [a - b for a, b in zip(*parts, strict=True)]
    assert more[0] + more[2] == L * E * E * 12 and more[1] == L * E * E * 4


def test_a_collective_more_costs_what_it_is(predicted: Any) -> None:
    """m * 2 summed over tp besides m: an all-reduce of 4096 x 4096 bf16 in each forward, a kernel that makes m * 2, one
    that adds up its gradient, and a tensor more to read in the residual sum."""
    before, after = predicted("plain"), predicted("collective")
    size = T * E * 2

    def sums(p: Prediction) -> list[tuple[int, int]]:
        return [(e.count, e.bytes) for e in p.ledger[0] if (e.op, e.phase, e.group) == ("all_reduce", "forward", "tp")]

    assert sum(n for n, b in sums(before) if b == size) == (2 * L + 1) * M  # attention, MLP and the embedding
    more = sum(n * b for n, b in sums(after)) - sum(n * b for n, b in sums(before))
    assert more == L * M * size
    assert by_phase(after.ledger[0])["forward"] - by_phase(before.ledger[0])["forward"] == L * M * size  # 2 (n-1)/n
    assert by_phase(after.ledger[0])["backward"] == by_phase(before.ledger[0])["backward"]
    assert after.model_flops == before.model_flops and after.hardware_flops == before.hardware_flops

    on = machine(after.plan.layout, H100)
    levels = next(e.levels for e in after.ledger[0] if e.group == "tp")
    wire = collective(on, "all_reduce", size, levels)
    kernels = 2 * (2 * size / MEMORY + 2e-6) + size / MEMORY
    assert after.step_seconds - before.step_seconds == pytest.approx(L * M * (wire + kernels))
    assert (after.timeline.exposed * after.step_seconds) - (
        before.timeline.exposed * before.step_seconds
    ) == pytest.approx(L * M * wire)


PIPE = (
    "cluster.gpus_per_node=4", "mesh={pp: {size: 4}}", "shard={params: {layers: pp}, compute: {layers: pp}}",
    "model.layers=8", "data.batch=8",
)  # fmt: skip


def test_a_schedule_moves_bubbles_and_transfers_and_no_work(predicted: Any) -> None:
    """8 microbatches over 4 coordinates of 2 layers: 7 boundaries with two chunks, 3 with one."""
    plain, gpipe, chunks, zero = (
        predicted("plain", *PIPE, f"pipeline.schedule={s}") for s in ("1f1b", "gpipe", "interleaved", "zero-bubble")
    )
    act = T * E * 2
    for p, boundaries in ((plain, 3), (gpipe, 3), (chunks, 7), (zero, 3)):
        sent = sum(e.wire for entries in p.ledger for e in entries if e.phase == "pipeline")
        assert sent == 2 * boundaries * 8 * act
        assert p.model_flops == plain.model_flops
        assert p.hardware_flops == pytest.approx(plain.hardware_flops)
    assert gpipe.timeline.busy == pytest.approx(plain.timeline.busy)
    assert chunks.timeline.busy[1:3] == pytest.approx(plain.timeline.busy[1:3])
    # (p - 1) / (m + p - 1) of equal stages; embedding and head make these a little unequal.
    assert plain.bubble == pytest.approx(3 / 11, abs=0.03) and gpipe.bubble == pytest.approx(plain.bubble, abs=0.02)
    assert chunks.bubble == pytest.approx(3 / 19, abs=0.03)
    assert zero.bubble < plain.bubble


def test_a_schedule_moves_the_peak_by_what_is_in_flight(predicted: Any) -> None:
    """With all computed again a layer keeps its input. 1f1b's peak is the backward of a coordinate's upper layer while
    both layers of 4, 3, 2, 1 microbatches are kept; gpipe's that of the second microbatch, when the sums of gradients
    are there and seven are kept."""
    plain, gpipe = (predicted("plain", *PIPE, "run.remat=full", f"pipeline.schedule={s}") for s in ("1f1b", "gpipe"))
    act = T * E * 2
    assert [m.saved for m in plain.memory] == [2 * n * act for n in (4, 3, 2, 1)]
    assert [m.saved for m in gpipe.memory] == [2 * 7 * act] * 4
    one, other = plain.memory[0], gpipe.memory[0]
    assert (other.peak - other.reserve) - (one.peak - one.reserve) == 2 * 7 * act - 2 * 4 * act
    assert (gpipe.plan.train[0][other.moment].kind, gpipe.plan.train[0][other.moment].mb) == ("B", 1)


def test_recomputation_counts_in_hfu_only(predicted: Any) -> None:
    """remat: full runs wq, wk and wv, attention (causal: half of 4 T^2 E), gate and up again. The results of wo and
    w_down nobody needs in backward: this block's MLP reads the first norm."""
    none, full = predicted("plain", *ALONE), predicted("plain", *ALONE, "run.remat=full")
    assert full.model_flops == none.model_flops
    forward = 2 * T * (E * E + 2 * E * 1024 + T * E + 2 * E * 8192)
    assert full.hardware_flops - none.hardware_flops == pytest.approx(forward * L * M)
    assert full.step_seconds > none.step_seconds and full.mfu < none.mfu


def test_the_flops_of_llama_70b_are_those_of_its_products() -> None:
    """Three passes over projections, MLP and half of the scores of every layer, and over the head; no recomputation."""
    got = predict(layout.load(tiny.LAYOUTS / "llama3-70b-4x8-h100.yaml"))
    h, kv, ffn, vocab, s = 8192, 8 * 128, 28672, 128256, 4096
    token = 3 * 80 * (2 * h * (h + 2 * kv) + 2 * h * h + 2 * h * ffn * 3 + 4 * s * h * 0.5) + 6 * h * vocab
    assert got.model_flops == pytest.approx(token * 128 * s, rel=1e-9)
    assert got.hardware_flops > got.model_flops
    # Its verdict, loosely: it fits, a step takes seconds, and it wastes less than two thirds of the machine.
    assert got.fits and 0.3 < got.mfu < got.hfu < 0.6
    assert got.tokens_per_second_per_gpu == pytest.approx(128 * s / got.step_seconds / 32)
    assert got.tflops_per_gpu * 1e12 / 989.4e12 == pytest.approx(got.mfu)
    assert got.heaviest == 0 and got.margin == layout.load(
        tiny.LAYOUTS / "llama3-70b-4x8-h100.yaml"
    ).cluster.device.memory - max(m.peak for m in got.memory)


def test_shared_kv_heads_and_padding_are_no_model_flops(predicted: Any) -> None:
    """8 KV heads on tp 16 are computed twice, and a vocabulary of 1000 is padded to 4096."""
    more = ("cluster.gpus_per_node=16", "mesh.tp.size=16", "model.vocab=1000", "model.vocab_pad=4096")
    one, many = predicted("plain", *ALONE, "model.vocab=1000", "model.vocab_pad=1000"), predicted("plain", *more)
    assert many.model_flops == pytest.approx(one.model_flops)
    assert many.hardware_flops - one.hardware_flops == pytest.approx(
        M * 6 * T * E * (L * 2 * 1024 + 4096 - 1000), rel=0.01
    )


def test_constants_may_be_others(predicted: Any) -> None:
    small = predicted("plain", *ALONE).plan.layout
    fast, slow = (predict(small, replace(CONSTANTS["hopper"], matmul=x)) for x in (0.8, 0.4))
    assert slow.step_seconds > 1.3 * fast.step_seconds


def test_own_hardware_is_predicted(predicted: Any) -> None:
    """The H100 written out is the H100."""
    own = (
        "cluster.gpu={name: mine, kind: hopper, processors: 132, memory: 79.1GiB, memory_rate: 3350GB/s,"
        " peak: {bf16: 989.4TFLOP/s, fp32: 66.9TFLOP/s, fp64: 66.9TFLOP/s}, links: {nvlink: 450GB/s, ib: 50GB/s}}"
    )
    mine, known = predicted("plain", own), predicted("plain")
    assert mine.step_seconds == known.step_seconds and mine.mfu == known.mfu and mine.fits is known.fits
    half = predicted("plain", own.replace("989.4", "494.7"))
    assert half.step_seconds > 1.3 * mine.step_seconds


def test_a_run_lowers_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Program] = []
    lower = train.lower

    def spy(job: Any) -> Program:
        seen.append(lower(job))
        return seen[-1]

    monkeypatch.setattr(train, "lower", spy)
    path, more = tiny.LAYOUTS / "one-process.yaml", ["run.steps=1", "run.compile=off", f"run.folder={tmp_path}"]
    assert launch.start(str(path), more, quiet=True) == 0
    assert seen and predict(layout.load(path, more)).program.hashes() == seen[0].hashes()
