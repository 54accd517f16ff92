"""Small plans, programs and counts of collectives that several test modules share."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dtrain import checkpoint, layout, plan
from dtrain.checkpoint import saving, tensors
from dtrain.mesh import fake_mesh
from dtrain.program import lower as lower_module
from dtrain.program import passes
from dtrain.program.lower import Graph, Job, Program, Segment, lower

DROPOUT = "dropout: 0.1, attention_dropout: 0.0"
MODELS: Mapping[str, str] = {
    "llama": "family: llama, layers: 2, embed: 16, heads: 4, kv_heads: 2, mlp: 24, vocab: 61",
    "gpt2": "family: gpt2, layers: 2, embed: 16, heads: 4, vocab: 61, positions: 12, " + DROPOUT,
    "bert": "family: bert, layers: 2, embed: 16, heads: 4, vocab: 61, positions: 12, " + DROPOUT,
    "my_model": "file: my_model.py, layers: 2, embed: 16, heads: 4, kv_heads: 2, mlp: 24, vocab: 61",
}
LAYOUTS = Path(__file__).parent.parent / "layouts"


@cache
def make(family: str, mesh: str = "", more: tuple[str, ...] = ()) -> plan.Plan:
    """A plan of a small model on `mesh` ("dp2 tp2": outermost first), every axis on the dims it usually has
    (`res_seq` too), with overrides as on the command line."""
    sizes = {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in mesh.split()}
    heads = ["vocab", "heads", "mlp"] + ["kv_heads"] * (family in ("llama", "my_model"))
    cut = {a: "tp" for a in heads if "tp" in sizes} | ({"layers": "pp"} if "pp" in sizes else {})
    data = [d for d in sizes if d in ("dp", "fsdp")]
    compute: dict[str, Any] = cut | ({"res_seq": "tp"} if "tp" in sizes else {}) | ({"batch": data} if data else {})
    params = cut | ({"embed": "fsdp"} if "fsdp" in sizes else {})
    world = 1
    for n in sizes.values():
        world *= n
    text = f"""
cluster: {{nodes: 1, gpus_per_node: {world}, gpu: cpu}}
mesh: {{{", ".join(f"{d}: {{size: {n}}}" for d, n in sizes.items())}}}
shard: {{params: {_table(params)}, compute: {_table(compute)}}}
model: {{{MODELS[family]}}}
data: {{source: synthetic, seq: 8, batch: 8, microbatch: 1}}
run: {{steps: 2, precision: fp64}}
"""
    return plan.plan(layout.loads(text, str(LAYOUTS / "tiny.yaml"), more))


def _table(rules: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{a}: [{', '.join([d] if isinstance(d, str) else d)}]" for a, d in rules.items()) + "}"


@cache
def program(family: str, mesh: str = "", more: tuple[str, ...] = (), rank: int = 0) -> Program:
    """The same, lowered."""
    return lower(make(family, mesh, more).job, rank)


@cache
def segment(family: str, name: str, mesh: str, more: tuple[str, ...] = ()) -> Segment:
    """One segment of it, which is quicker."""
    return lower_segment(make(family, mesh, more).job, name)


def lower_segment(job: Job, name: str) -> Segment:
    inner = job.trace_mesh
    with fake_mesh(inner, job.trace_dims) as mesh:
        stored = lower_module.store_tree(job)[name]
        traced = lower_module._trace_segment(job, name, stored, mesh)
    save = None if name == "head" else lower_module._saves(job, {name: traced.joint})[name]
    return lower_module._cut_segment(job, name, stored, traced, save)


def ledger(graph: Graph) -> list[tuple[str, str, tuple[int, ...]]]:
    """A graph's collectives, in order: what, over which group, and the shape of the result."""
    return [
        (passes.op_name(n), passes.group_of(n), tuple(n.meta["val"].shape))
        for n in graph.module.graph.nodes
        if passes.is_collective(n)
    ]


def counts(segment: Segment, *graphs: str) -> dict[str, int]:
    """How often each collective occurs: `{"all_reduce tp": 2}`."""
    return dict(
        Counter(f"{op} {group}" for g in graphs if g in segment.graphs for op, group, _ in ledger(segment.graphs[g]))
    )


def save_ranks(path: Path, record: checkpoint.Record, held: list[dict[str, checkpoint.Piece]]) -> None:
    """A checkpoint of what ranks hold, each writing its part, from one process."""
    temporary = path.with_suffix(".tmp")
    temporary.mkdir(parents=True)
    plans, metadata = tensors.global_plan([tensors.local_plan(mine) for mine in held])
    parts = []
    for part, mine in zip(plans, held, strict=True):
        parts.append(tensors.write_part(temporary, part, lambda name, mine=mine: mine[name].tensor))  # type: ignore[misc]
    saving.publish(path, temporary, metadata, parts, record)


@cache
def bench(name: str) -> Any:
    """A program of `bench/` as a module."""
    spec = importlib.util.spec_from_file_location(name, LAYOUTS.parent / "bench" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
