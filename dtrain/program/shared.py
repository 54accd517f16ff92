"""Traces that several jobs share.

Tracing sees the model, the local batch and the dims that cut computation: not the pipeline, not storage, not what is
kept for backward, and of the batch's dims only whether there are any. So a search over layouts traces each way to cut
computation once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dtrain.axes import Rules, inherit
from dtrain.mesh import Mesh
from dtrain.program import passes
from dtrain.program.lower import Job, Program, Traced, cut

DATA = "dp"  # what the dims that cut the batch are traced as


def alike(job: Job) -> Job:
    """The plainest job that is traced as this one: equal for all that may share traces."""
    data = job.mesh.ordered(inherit(job.compute).get("batch", ()))
    inner = [(d, job.mesh.size(d)) for d in job.trace_dims if d not in (".".join(data), DATA)]
    mesh = Mesh((((DATA, 2),) if data else ()) + tuple(inner))
    compute = {**job.compute, "batch": (DATA,) if data else ()}
    params = _only(job.params, [d for d, _ in inner])
    return replace(
        job, mesh=mesh, compute=compute, params=params, optimizer={}, grads=None, remat="full", tied_across=None
    )


def cut_of(job: Job, traced: Mapping[str, Traced]) -> Program:
    """The program of a job, of the traces of `alike(job)`."""
    data = ".".join(job.mesh.ordered(inherit(job.compute).get("batch", ())))
    return cut(job, traced if data in ("", DATA) else {name: _renamed(t, data) for name, t in traced.items()})


def _only(rules: Rules, dims: list[str]) -> Rules:
    kept = {axis: tuple(d for d in over if d in dims) for axis, over in rules.items()}
    return {axis: over for axis, over in kept.items() if over}


def _renamed(t: Traced, data: str) -> Traced:
    """With the dims that cut the batch called as the job calls them."""
    graph = t.joint.graph
    if any(passes.is_collective(n) and passes.group_of(n) == DATA for n in graph.nodes):
        raise ValueError(f"a segment communicates over {DATA}; trace the job itself")
    names = {node: f"at:{data}" if name == f"at:{DATA}" else name for node, name in t.joint.name_of.items()}
    partial = {n: tuple(data if d == DATA else d for d in dims) for n, dims in t.partial.items()}
    asked = {line: re.sub(rf"/{DATA}\b", "/" + data.replace(".", "/"), placed) for line, placed in t.asked.items()}
    return replace(t, joint=replace(t.joint, name_of=names), partial=partial, asked=asked)
