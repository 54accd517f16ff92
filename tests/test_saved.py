"""A layer saves less than Megatron's selective recompute, and computes no more products again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch

from dtrain.program.lower import lower

LLAMA = "family: llama, embed: 64, heads: 8, kv_heads: 2, mlp: 224, vocab: 256"
GPT2 = "family: gpt2, embed: 64, heads: 8, vocab: 256, positions: 32"


@pytest.fixture(scope="module")
def saved() -> Any:
    torch.set_num_threads(1)
    return tiny.bench("saved")


@pytest.mark.parametrize(("model", "tp"), [(LLAMA, 4), (GPT2, 2)])
@pytest.mark.parametrize("res_seq", [False, True])
def test_no_more_than_megatron(saved: Any, model: str, tp: int, res_seq: bool) -> None:
    row = saved.measure("small", model, 32, tp, res_seq)
    assert 0.3 < row.ratio <= 1
    assert row.again_ratio <= 1
    # What the paper's terms explain is what is kept, and of a layer computed again as a whole its input stays.
    assert row.off == pytest.approx(1) and row.full_ratio == pytest.approx(1)
    core = 4 * 32**2 * 64 / tp
    # Attention's core is computed again where the model drops attention weights (plain operations), and
    # never where it is a kernel.
    assert row.again == (core if model == GPT2 else 0)


def test_megatron_by_the_paper(saved: Any) -> None:
    """s b h (10 + 24/t), and s b h 34/t with sequence parallelism (equations 2 to 4 without the attention core)."""
    cfg = saved.make(GPT2, 32, 1, False, "none").job.config
    for t in (1, 2, 4, 8):
        assert saved.megatron(cfg, 32, t, False) == pytest.approx(32 * 64 * (10 + 24 / t))
        assert saved.megatron(cfg, 32, t, True) == pytest.approx(32 * 64 * 34 / t)


def test_megatron_of_a_llama(saved: Any) -> None:
    """RMSNorm inputs, SwiGLU's three, 2 KV heads of 8; no masks. With 4 ranks two of them share a KV head."""
    cfg = saved.make(LLAMA, 32, 1, False, "none").job.config
    E, A, KV, M = 64, 64, 16, 224
    assert saved.megatron(cfg, 32, 1, False) == 32 * (8 * E + 4 * A + 4 * KV + 6 * M)
    assert saved.megatron(cfg, 32, 4, True) == 32 * (8 * E / 4 + 4 * A / 4 + 4 * KV / 2 + 6 * M / 4)


def test_each_difference_is_one_of_the_stated_terms(saved: Any) -> None:
    """GPT-2 without attention dropout keeps 20 s b h of the paper's 34, and a log-sum-exp; with it, which plain
    operations need, 18."""
    kernel = saved.make(GPT2 + ", attention_dropout: 0.0", 32, 1, False, "none").job.config
    plain = saved.make(GPT2 + ", attention_dropout: 0.1", 32, 1, False, "none").job.config
    for cfg, kept in ((kernel, 20 * 64 + 4 * 8), (plain, 18 * 64)):
        assert saved.megatron(cfg, 32, 1, False) + saved.difference(cfg, 32, 1, False) == 32 * kept


def test_products_are_counted(saved: Any) -> None:
    """Forward has 2 FLOPs a weight and token and 4 a pair of tokens and head's width; `full` computes them again but
    for the last product, whose result nobody reads."""
    weights, core = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 224, 4 * 32**2 * 64
    full = lower(saved.make(LLAMA, 32, 1, False, "full").job).segments["block"].graphs
    assert saved.flops(full["forward"]) == 2 * 32 * weights + core
    assert saved.again(full["forward"], full["backward"]) == 2 * 32 * (weights - 64 * 224) + core


def test_the_program_prints_both_sides(
    saved: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved, "MODELS", {"small": (LLAMA, 32)})
    monkeypatch.setattr(saved, "TP", (2,))
    saved.main([])
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[3:]]
    assert lines == [["small", "2", "no"], ["small", "2", "yes"]]
    monkeypatch.setattr(saved, "TP", (1,))
    saved.main(["--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 1 and all(r["saved"] / r["megatron_saved"] == r["ratio"] <= 1 for r in rows)


def test_the_models_are_those_of_the_presets(saved: Any) -> None:
    for model, seq in saved.MODELS.values():
        cfg = saved.make(model, seq, 8, True, "selective").job.config
        assert cfg.layers == 1 and cfg.embed >= 2560
