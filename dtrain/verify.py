"""Run a layout's very program on simulated ranks, to be compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dtrain import optim, storage
from dtrain.mesh import Groups, flat_index, simulate
from dtrain.plan import Plan
from dtrain.program.interpret import Calls, Place, Step, initial_weights, owned, publish, run
from dtrain.program.lower import Program, lower
from dtrain.program.update import Report, State, UpdateConfig, make_update
from dtrain.storage import Stored

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Steps of a simulated run: what the ranks agreed on, and every gradient (before clipping) and parameter as
    full, unpadded tensors by path. `copies` says whether all copies of a shard were bitwise equal."""

    reports: list[Report]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]
    copies: bool


def uncompiled(program: Program) -> Calls:
    """The graphs themselves as what the interpreter calls."""
    return {(s.name, k): g.module for s in program.segments.values() for k, g in s.graphs.items()}


def rows(plan: Plan, at: Mapping[str, int], mb: int) -> range:
    """Which rows of the global batch a rank at these coordinates reads for a microbatch."""
    replica = flat_index(plan.job.mesh, plan.data_dims, at)
    first = (replica * plan.microbatches + mb) * plan.job.batch
    return range(first, first + plan.job.batch)


def train(
    plan: Plan,
    batches: list[Batch],
    counts: list[Mapping[str, Tensor]],
    config: UpdateConfig,
    lr: Callable[[int], float],
    seed: int = 0,
    program: Program | None = None,
    calls: Calls | None = None,
) -> Trained:
    """Train on simulated ranks, one step a batch. `batches` are global; `counts` their valid counts."""
    program = program or lower(plan.job)
    calls = calls or uncompiled(program)
    mesh = plan.job.mesh
    names = {*program.groups(), *(["world"] if mesh.world > 1 else []), *(["pp"] if mesh.size("pp") > 1 else [])}

    def work(rank: int, groups: Groups) -> tuple[Place, list[Report], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        place = Place(mesh, rank, groups, plan.units[mesh.coordinates(rank).get("pp", 0)])
        weights = publish(program, calls, place, initial_weights(program, place, seed))
        scale = optim.scale_init(config.scaling) if config.scaling else None
        state = State(weights, optim.init(list(weights.masters.values())), scale)
        reports: list[Report] = []
        grads: list[dict[str, Tensor]] = []
        params: list[dict[str, Tensor]] = []
        for number, batch in enumerate(batches, 1):

            def local(mb: int, batch: Batch = batch) -> Batch:
                return {k: v[list(rows(plan, place.at, mb))] for k, v in batch.items()}

            update = make_update(program, place, state, config, lr(number), lambda: False, reports.append)

            def observed(g: dict[str, Tensor], loss: Tensor, update: object = update) -> Mapping[str, Tensor]:
                grads.append({k: v.clone() for k, v in g.items()})
                return update(g, loss)  # type: ignore[operator,no-any-return]

            scaled = state.scale["scale"] if state.scale else torch.ones(())
            step = Step(number, seed, local, counts[number - 1], scaled, observed)
            run(program, calls, place, state.weights, plan.train[place.at.get("pp", 0)], step)
            params.append({k: v.clone() for k, v in state.weights.masters.items()})
        return place, reports, grads, params

    ranks = simulate(mesh, sorted(names), work)
    for _, reports, _, _ in ranks[1:]:
        if reports != ranks[0][1]:
            raise RuntimeError(f"ranks disagree on a step: {reports} and {ranks[0][1]}")
    same = [True]

    def whole(pick: Callable[[int], list[dict[str, Tensor]]], step: int) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        filled: dict[str, Tensor] = {}
        for i, (place, *_) in enumerate(ranks):
            for path, (s, _, _) in owned(program, place.units).items():
                put(s, place, pick(i)[step][path], path, out, filled, same)
        missing = [p for p, f in filled.items() if not bool(f.all())]
        if missing:
            raise RuntimeError(f"no rank holds all of {missing[0]}")
        return out

    return Trained(
        ranks[0][1],
        [whole(lambda i: ranks[i][2], n) for n in range(len(batches))],
        [whole(lambda i: ranks[i][3], n) for n in range(len(batches))],
        same[0],
    )


def put(
    s: Stored,
    place: Place,
    shard: Tensor,
    path: str,
    out: dict[str, Tensor],
    filled: dict[str, Tensor],
    same: list[bool],
) -> None:
    """Write one shard where it belongs in the full tensor; notes in `same` if another copy had other bits."""
    path = s.param.tied_to or path
    if path not in out:
        out[path] = torch.zeros(s.real, dtype=shard.dtype)
        filled[path] = torch.zeros(s.real, dtype=torch.bool)
    spans = storage.spans(s, place.mesh, place.at, len(s.steps))
    there = tuple(slice(p.start, p.stop) for p in spans)
    here = tuple(slice(0, p.stop - p.start) for p in spans)
    seen = filled[path][there]
    if not torch.equal(out[path][there][seen], shard[here][seen]):
        same[0] = False
    out[path][there] = shard[here]
    filled[path][there] = True


__all__ = ["Trained", "put", "replace", "rows", "train", "uncompiled"]
