"""dtrain as one side of a benchmark: the pieces of `dtrain/train.py`, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import task as tasks
import torch
from task import Shape, Task

from dtrain import data, heap, layout, metrics, optim, plan, reference, train
from dtrain.layout import Layout
from dtrain.plan import Plan
from dtrain.program.interpret import Step
from dtrain.program.update import Report, State
from dtrain.rank import Rank

TP = "heads: tp, kv_heads: tp, mlp: tp, vocab: tp"
FOLDER = Path("unused")  # this rank writes nothing
# mesh and shard of each layout that is measured
LAYOUTS = {
    "one": ("{}", "{}"),
    "tp": ("{tp: {size: 2}}", f"{{params: {{{TP}}}, compute: {{{TP}}}}}"),
    "fsdp": ("{fsdp: {size: 2}}", "{params: {embed: fsdp}, compute: {batch: fsdp}, grads: {embed: fsdp}}"),
}


def layout_of(name: str, shape: Shape, compiled: bool) -> Layout:
    """What is measured, as `dtrain run` would read it."""
    mesh, shard = LAYOUTS[name]
    ranks = 1 if name == "one" else 2
    replicas = 2 if name == "fsdp" else 1
    s = shape
    return layout.loads(f"""
cluster: {{gpus_per_node: {ranks}}}
mesh: {mesh}
shard: {shard}
model: {{family: llama, layers: {s.layers}, embed: {s.embed}, heads: {s.heads}, kv_heads: {s.kv_heads}, mlp: {s.mlp},
  vocab: {s.vocab}, vocab_pad: {s.vocab}, rope_theta: {tasks.THETA:.1f}, norm_eps: {tasks.NORM_EPS}}}
optim: {{lr: {tasks.LR}, schedule: constant, weight_decay: {tasks.WEIGHT_DECAY}, clip: {tasks.CLIP},
  beta1: {tasks.BETA1}, beta2: {tasks.BETA2}, eps: {tasks.EPS:.10f}}}
data: {{source: stdlib, seq: {s.seq}, batch: {s.batch}, microbatch: {s.batch // replicas}}}
run: {{steps: 1000000, seed: {tasks.SEED}, remat: {{budget: 8GiB}}, compile: {"on" if compiled else "off"},
  folder: {FOLDER}}}
""")


def make_task(shape: Shape, steps: int) -> Task:
    """dtrain's first weights and its first `steps` batches, for the peers."""
    made = plan.plan(layout_of("one", shape, False))
    weights = reference.init(made.job.module, made.job.config, tasks.SEED)
    source = data.open_source(train.data_config(made))
    batches = [data.batch(source, i, range(shape.batch)) for i in range(steps)]
    tokens, labels = (np.stack([b[k].numpy() for b in batches]) for k in ("tokens", "labels"))
    return Task(shape, {k: w.numpy() for k, w in weights.items()}, tokens, labels)


def start(name: str, shape: Shape, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss."""
    heap.keep()  # as dtrain/launch.py does
    made = plan.plan(layout_of(name, shape, compiled))
    r, state = begin(made, Rank(rank, ranks, rank, "cpu", "gloo"))
    return stepping(r, state, train.taking(r, state, r.rank.stopping))


def begin(made: Plan, rank: Rank) -> tuple[train.Run, State]:
    """A run up to its first step. It writes nothing."""
    source = data.open_source(train.data_config(made))
    with metrics.open_log(metrics.LogConfig(FOLDER, 1, 1, False, True)) as log:
        r = train.prepare(made, rank, source, log)
    with torch.no_grad():
        return r, train.initialise(r)


def stepping(r: train.Run, state: State, take: Callable[[Step, float], Report]) -> Callable[[int], float]:
    """Step number -> its loss."""

    @torch.no_grad()
    def step(number: int) -> float:
        given, _ = train.training_step(r, number, state)
        return take(given, optim.lr_at(r.schedule, number)).loss

    return step
