"""Everything that can be derived from a Layout without a device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtrain import hardware
from dtrain import layout as layouts
from dtrain.axes import inherit
from dtrain.layout import Layout, RematBudget
from dtrain.mesh import Mesh, flat_index
from dtrain.program.cost import UNKNOWN, Rates
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import Job, act_shape, store_tree
from dtrain.program.remat import Budget
from dtrain.program.schedule import Action, actions, compute_order, coordinate_of, forward_only, unit_ranges
from dtrain.storage import Stored

PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Plan:
    """`job` is what gets lowered; `train` and `evaluate` are the action lists and `units` the model's units by
    pipeline coordinate; `replicas` how many ways the batch is cut, `microbatches` into how many pieces each
    replica's part is."""

    layout: Layout
    job: Job
    train: tuple[tuple[Action, ...], ...]
    evaluate: tuple[tuple[Action, ...], ...]
    units: tuple[tuple[int, ...], ...]
    replicas: int
    microbatches: int

    @property
    def data_dims(self) -> tuple[str, ...]:
        """Mesh dims that cut the batch."""
        return self.job.mesh.ordered(inherit(self.job.compute).get("batch", ()))


def plan(layout: Layout) -> Plan:
    """Derive the job and the action lists. Raises LayoutError, ModelError or AxesError."""
    module, config = layouts.family(layout)
    if hasattr(config, "loss_chunks"):  # a model of the user's own may have none
        config = replace(config, loss_chunks=layouts.loss_chunks(layout))
    mesh = Mesh(tuple((dim, d.size) for dim, d in layout.mesh.items()))
    pp = mesh.size("pp")
    chunks = layout.pipeline.chunks or 1
    microbatches = layouts.microbatches(layout)
    stages = unit_ranges(layouts.stage_layers(layout))
    owner = coordinate_of(layout.pipeline.schedule, pp, chunks)
    units = tuple(tuple(u for s, o in zip(stages, owner, strict=True) if o == c for u in s) for c in range(pp))

    tree = module.params(config)
    tied = any(p.tied_to for table in tree.values() for p in table.values())
    ends = (owner[0], owner[-1])
    dtype = PRECISION[layout.run.precision]
    job = Job(
        module=module,
        config=config,
        layers=config.layers,
        mesh=mesh,
        compute=_without_layers(layout.shard.compute),
        params=_without_layers(layout.shard.params),
        optimizer=layout.shard.optimizer,
        grads=_without_layers(layout.shard.grads or {}),
        pad=layouts.pad(layout),
        batch=layout.data.microbatch,
        seq=layout.data.seq,
        dtype=dtype,
        master=torch.float64 if dtype == torch.float64 else torch.float32,
        tied_across=ends if tied and ends[0] != ends[1] else None,
    )
    order = compute_order(layout.pipeline.schedule, pp, chunks, microbatches)
    gathered = _units_where(job, lambda s: s.rest > 0)
    lists = actions(
        order,
        stages,
        owner,
        keep=layout.unshard.keep,
        gathered=gathered,
        reduce_each=_units_where(job, lambda s: s.grads > 0),
        tied=[(0, config.layers + 1)] if tied else [],
        prefetched=layout.unshard.prefetch,
        deferred=1,
    )
    ahead = layout.unshard.prefetch
    evaluate = forward_only(stages, owner, 1, keep=layout.unshard.keep, gathered=gathered, prefetched=ahead)
    asked = layout.run.remat
    if not isinstance(asked, RematBudget):
        job = replace(job, remat=asked)
    else:
        job = replace(job, remat=budget(layout, job, asked.budget, lists))
    return Plan(
        layout,
        job,
        tuple(tuple(a) for a in lists),
        tuple(tuple(a) for a in evaluate),
        units,
        layouts.data_parallel(layout),
        microbatches,
    )


def budget(layout: Layout, job: Job, size: int, lists: Sequence[Sequence[Action]]) -> Budget:
    """`run.remat: {budget: ...}` for lowering. Raises LayoutError where the segments' inputs alone exceed it."""
    moments = [m for actions in lists for m in held(actions, job.layers)]
    act = math.prod(act_shape(job)) * job.dtype.itemsize
    least = act * max((m["block"] for m in moments), default=0)
    if size < least:
        layouts.fail(
            layout,
            "run.remat",
            f"budget {hardware.show_size(size)}; the inputs of layers in flight, which are always kept, take "
            f"{hardware.show_size(least)} on the fullest rank; allow at least that, or use a smaller data.microbatch",
        )
    calls = [Counter(unit_segment(a.unit, job.layers)[0] for a in actions if a.kind == "F") for actions in lists]
    gpu = layout.cluster.device
    wire = {
        group: (
            job.mesh.product(group.split(".")),
            min(layouts.link_rate(layout, link) for d in group.split(".") for link in layout.mesh[d].link or ()),
        )
        for group in job.trace_dims
    }
    rates = Rates(gpu.peak.get(layout.run.precision, UNKNOWN[0]), gpu.memory_rate or UNKNOWN[1], wire)
    return Budget(size, moments, {s: max(c[s] for c in calls) for s in ("embed", "block")}, rates)


def held(actions: Sequence[Action], layers: int) -> list[Counter[str]]:
    """How many passes of embed and block are between forward and backward on a rank, at every moment that no other
    exceeds in both. The head keeps nothing."""
    now: Counter[str] = Counter(embed=0, block=0)
    peaks: list[Counter[str]] = []
    for a in actions:
        name = unit_segment(a.unit, layers)[0] if a.unit >= 0 else ""
        if a.kind == "F":
            now[name] += 1
            if not any(now <= p for p in peaks):
                peaks = [p for p in peaks if not p <= now] + [now.copy()]
        elif a.kind in ("B", "W") and name in now:
            now[name] -= 1
    return peaks


def rows(plan: Plan, at: Mapping[str, int], mb: int | None = None) -> range:
    """Which rows of the global batch a rank at these coordinates reads for a microbatch, or for all of them."""
    each = plan.microbatches * plan.job.batch
    first = flat_index(plan.job.mesh, plan.data_dims, at) * each
    return (
        range(first, first + each)
        if mb is None
        else range(first + mb * plan.job.batch, first + (mb + 1) * plan.job.batch)
    )


def _without_layers(rules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """No tensor has the axis `layers`: it places segments on stages."""
    return {axis: dims for axis, dims in rules.items() if axis != "layers"}


def _units_where(job: Job, true: Callable[[Stored], bool]) -> set[int]:
    """Units with a parameter of which `true` holds."""
    tree = store_tree(job)
    members = {"embed": [0], "block": list(range(1, job.layers + 1)), "head": [job.layers + 1]}
    return {u for name, units in members.items() if any(map(true, tree[name].values())) for u in units}
