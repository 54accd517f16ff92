"""Real gloo processes, started by the launcher that `dtrain run` uses: five steps equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dtrain import data, launch, layout, optim, plan, reference, train

HEADS = "vocab: tp, heads: tp, mlp: tp"
MODELS = {
    "llama": "{family: llama, layers: 4, embed: 32, heads: 4, kv_heads: 2, mlp: 48, vocab: 131, tied: true}",
    "gpt2": "{family: gpt2, layers: 4, embed: 32, heads: 4, vocab: 131, positions: 16, dropout: 0.1}",
    "bert": "{family: bert, layers: 4, embed: 32, heads: 4, vocab: 131, positions: 16, dropout: 0.1, norm: pre}",
}
# mesh, params, compute, optimizer and grads, pipeline, family, compiled
LAYOUTS = {
    "1f1b x tp": (
        "pp: {size: 2}, tp: {size: 2}",
        f"{HEADS}, kv_heads: tp, layers: pp",
        f"{HEADS}, kv_heads: tp, layers: pp, res_seq: tp",
        "",
        "1f1b",
        "llama",
        True,
    ),
    "gpipe x zero-2": (
        "pp: {size: 2}, dp: {size: 2}",
        "layers: pp",
        "layers: pp, batch: dp",
        "optimizer: {embed: dp}, grads: {embed: dp}",
        "gpipe",
        "gpt2",
        False,
    ),
    "interleaved": (
        "pp: {size: 2}",
        "layers: pp",
        "layers: pp",
        "",
        "interleaved, chunks: 2",
        "llama",
        True,
    ),
    "zero-bubble": ("pp: {size: 2}", "layers: pp", "layers: pp", "", "zero-bubble", "bert", False),
    "fsdp": ("fsdp: {size: 2}", "embed: fsdp", "batch: fsdp", "", "1f1b", "bert", False),
}
LONG = {
    "tp": (
        "tp: {size: 2}",
        f"{HEADS}, kv_heads: tp",
        f"{HEADS}, kv_heads: tp, res_seq: tp",
        "",
        "1f1b",
        "llama",
        True,
    ),
    "dp x fsdp": (
        "dp: {size: 2}, fsdp: {size: 2}",
        "embed: fsdp",
        "batch: [dp, fsdp]",
        "optimizer: {embed: dp}, grads: {embed: fsdp}",
        "1f1b",
        "llama",
        False,
    ),
}


def write(name: str, folder: Path) -> Path:
    mesh, params, compute, more, schedule, family, compiled = (LAYOUTS | LONG)[name]
    path = folder / "layout.yaml"
    path.write_text(
        f"cluster: {{gpus_per_node: {4 if ' x ' in name else 2}}}\n"
        f"mesh: {{{mesh}}}\n"
        f"shard: {{params: {{{params}}}, compute: {{{compute}}}{', ' + more if more else ''}}}\n"
        f"pipeline: {{schedule: {schedule}}}\n"
        f"model: {MODELS[family]}\n"
        "optim: {lr: 0.003, schedule: constant}\n"
        "data: {source: synthetic, seq: 16, batch: 8, microbatch: 2}\n"
        f"run: {{steps: 5, seed: 3, compile: {'on' if compiled else 'off'}, folder: {folder / 'run'}}}\n"
    )
    return path


def one_process(path: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the same five steps by the reference, in fp32."""
    made = plan.plan(layout.load(path))
    module, cfg, lay = made.job.module, made.job.config, made.layout
    source = data.open_source(train.data_config(made))
    params, moments = reference.init(module, cfg, lay.run.seed), None
    decayed = {k: p.decay for k, p in reference.parameters(module, cfg).items()}
    losses, norms = [], []
    for number in range(1, 6):
        batch = data.batch(source, number - 1, range(lay.data.batch))
        loss, grads = reference.loss_and_grads(module, cfg, params, batch, lay.run.seed, number)
        losses.append(float(loss))
        norms.append(float(reference.grad_norm(grads)))
        lr = optim.lr_at(train.schedule(lay), number)
        params, moments = reference.adamw(params, grads, moments, decayed, number, lr, 0.1, clip=1.0)
    return losses, norms


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)])
def test_five_steps_equal_one_process(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    assert launch.start(str(path), [], quiet=True) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "grad_norm" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    losses, norms = one_process(path)
    torch.testing.assert_close([r["loss"] for r in steps], losses, rtol=0, atol=2e-5)
    torch.testing.assert_close([r["grad_norm"] for r in steps], norms, rtol=1e-4, atol=0)


def test_every_dim_schedule_and_family_is_here() -> None:
    dims = {dim.split(":")[0] for mesh, *_ in LAYOUTS.values() for dim in mesh.split(", ")}
    assert dims == {"pp", "dp", "fsdp", "tp"}
    assert {v[4].split(",")[0] for v in LAYOUTS.values()} == {"gpipe", "1f1b", "interleaved", "zero-bubble"}
    assert {v[5] for v in LAYOUTS.values()} == {"llama", "gpt2", "bert"}
    assert sum(v[6] for v in LAYOUTS.values()) >= 2
