"""Bytes that a rank sends in a step: of the lowered program, of the theory, and their ratio.

`python bench/wire.py [LAYOUT...] [--json]`. Without layouts: every shipped one and a set of variations. The program's
bytes are those of `dtrain.plan.ledger`, the theory's those of `dtrain.plan.theory` (the tables of
`layouts/README.md`). Everything is arithmetic on graphs: no device is needed and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dtrain import layout, plan
from dtrain.plan import ledger, theory
from dtrain.program.lower import lower

LAYOUTS = Path(__file__).parent.parent / "layouts"
_8B, _70B = "llama3-8b-1x8-h100", "llama3-70b-8x8-h100"
_GPT2, _BERT, _QUICK = "gpt2-8.3b-32x16-v100", "bert-3.9b-v100", "quickstart"
_TP8 = "mesh={tp: {size: 8}}", "shard.params={vocab: tp, heads: tp, kv_heads: tp, mlp: tp}"
_TP8_COMPUTE = "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"
_HSDP = "mesh={dp: {size: 2}, fsdp: {size: 4}}", "shard.compute={batch: [dp, fsdp]}"

# name -> a shipped layout and what is overridden
VARIATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "8b, data parallel": (_8B, ("shard={compute: {batch: fsdp}}",)),
    "8b, ZeRO-1": (_8B, ("shard={compute: {batch: fsdp}, optimizer: {embed: fsdp}}",)),
    "8b, ZeRO-2": (_8B, ("shard={compute: {batch: fsdp}, optimizer: {embed: fsdp}, grads: {embed: fsdp}}",)),
    "8b, FSDP keep forward": (_8B, ("unshard.keep=forward",)),
    "8b, FSDP keep step, whole gradients": (_8B, ("unshard.keep=step", "shard.grads={}")),
    "8b, HSDP": (_8B, _HSDP),
    "8b, HSDP and ZeRO-1 over dp": (_8B, (*_HSDP, "shard.optimizer={embed: dp}")),
    "8b, tp 8, remat none": (_8B, (*_TP8, f"shard.compute={{{_TP8_COMPUTE}}}", "shard.grads={}", "run.remat=none")),
    "8b, tp 8, res_seq, remat full": (
        _8B,
        (*_TP8, f"shard.compute={{{_TP8_COMPUTE}, res_seq: tp}}", "shard.grads={}", "run.remat=full"),
    ),
    "70b, no res_seq": (_70B, ("shard.compute.res_seq=[]",)),
    "70b, remat none": (_70B, ("run.remat=none",)),
    "70b, interleaved": (_70B, ("pipeline.schedule=interleaved",)),
    "70b, zero-bubble, FSDP keep forward": (
        _70B,
        (
            "mesh={pp: {size: 4, link: ib}, fsdp: {size: 2, link: ib}, tp: {size: 8, link: nvlink}}",
            "pipeline.schedule=zero-bubble",
            "unshard.keep=forward",
            "shard.params.embed=fsdp",
            "shard.compute.batch=fsdp",
            "shard.optimizer={}",
        ),
    ),
    "gpt2, res_seq, selective": (_GPT2, ("shard.compute.res_seq=tp", "run.remat=selective")),
    "gpt2, tied across 2 stages": (
        _GPT2,
        (
            "mesh={pp: {size: 2, link: ib}, dp: {size: 32, link: [nvlink, ib]}, tp: {size: 8, link: nvlink}}",
            "shard.params.layers=pp",
            "shard.compute.layers=pp",
            "data.microbatch=1",
        ),
    ),
    "bert, norm post, res_seq, full": (_BERT, ("model.norm=post", "shard.compute.res_seq=tp")),
    "quickstart, KV heads shared by 2": (_QUICK, ("model.kv_heads=1",)),
}


def cases(paths: Sequence[Path]) -> Iterator[tuple[str, layout.Layout]]:
    for path in paths or sorted(LAYOUTS.glob("*.yaml")):
        yield path.stem, layout.load(path)
    for name, (base, overrides) in () if paths else VARIATIONS.items():
        yield name, layout.load(LAYOUTS / f"{base}.yaml", overrides)


def compare(lay: layout.Layout) -> list[dict[str, Any]]:
    """A row a pipeline coordinate, dim and phase; `ratio` is the program's bytes over the theory's."""
    made = plan.plan(lay)
    program = lower(made.job)
    rows = []
    for pp in range(made.job.mesh.size("pp")):
        real = ledger.by_dim_and_phase(ledger.ledger(made, program, pp))
        ideal = theory.by_dim_and_phase(theory.theory(lay, pp))
        for dim, phase in sorted({*real, *ideal}, key=lambda k: (k[0], ledger.PHASES.index(k[1]))):
            a, b = real.get((dim, phase), 0.0), ideal.get((dim, phase), 0.0)
            rows.append(
                {"pp": pp, "dim": dim, "phase": phase, "program": a, "theory": b, "ratio": a / b if b else None}
            )
    return rows


def totals(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Bytes of the program and of the theory over all rows, and the worst row's distance from 1 as a ratio."""
    real, ideal = sum(r["program"] for r in rows), sum(r["theory"] for r in rows)
    ratios = [r["ratio"] if r["ratio"] is not None else float("inf") for r in rows]
    return real, ideal, max(ratios, key=lambda r: abs(r - 1), default=1.0)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bytes on the wire, of the program and of the theory.")
    parser.add_argument("layout", nargs="*", type=Path, help="layout files (default: the shipped ones and variations)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    found = {name: compare(lay) for name, lay in cases(asked.layout)}
    if asked.json:
        worst = {name: totals(rows)[2] for name, rows in found.items()}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"versions": versions, "ratios": worst, "rows": found}, indent=1))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}; bytes that one rank sends in a step")
    for name, rows in found.items():
        print(f"\n{name}: worst ratio {totals(rows)[2]:.2f}")
        for r in rows:
            ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
            print(f"  pp {r['pp']}  {r['dim']:<5}{r['phase']:<9}{r['program']:>22,.0f}{r['theory']:>22,.0f}  {ratio}")


if __name__ == "__main__":
    main()
