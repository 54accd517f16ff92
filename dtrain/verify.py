"""Run a layout's very program on simulated ranks and compare it with one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dtrain import layout as layouts
from dtrain import models, optim, reference, storage
from dtrain.layout import Layout
from dtrain.mesh import Groups, pipeline_groups, simulate, stand_ins
from dtrain.plan import Plan, rows
from dtrain.plan import plan as make_plan
from dtrain.program.compile import compile_program, missing_compiler, uncompiled
from dtrain.program.interpret import Calls, Place, Step, bind, initial_weights, owned, publish, run
from dtrain.program.lower import Program, lower
from dtrain.program.update import Report, State, UpdateConfig, make_update
from dtrain.storage import Stored

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Steps of a simulated run: what the ranks agreed on, and every gradient (before clipping) and parameter as
    full, unpadded tensors by path; `initial` are the parameters before step 1. `copies` says whether all copies of
    a shard were bitwise equal."""

    reports: list[Report]
    initial: dict[str, Tensor]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]
    copies: bool


def train(
    plan: Plan,
    batches: Sequence[Batch],
    counts: Sequence[Mapping[str, Tensor]],
    config: UpdateConfig,
    lr: Callable[[int], float],
    seed: int = 0,
    program: Program | None = None,
    calls: Calls | None = None,
    done: int = 0,
    enter: Callable[[Program, Place, State], None] | None = None,
    after: Callable[[int, Program, Place, State], None] | None = None,
) -> Trained:
    """Train on simulated ranks, one step a batch. `batches` are global; `counts` their valid counts.

    `enter` may fill each rank's state before the first step, as a checkpoint of step `done` does; `after` is shown it
    after each step.
    """
    program = program or lower(plan.job)
    calls = calls or uncompiled(program)
    mesh = plan.job.mesh
    names = {
        *program.groups(),
        *(["world"] if mesh.world > 1 else []),
        *pipeline_groups(mesh),
    }

    def work(rank: int, groups: Groups) -> tuple[Place, list[Report], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        place = Place(mesh, rank, groups, plan.units[mesh.coordinates(rank).get("pp", 0)])
        bound = bind(program, calls, place, plan.train[place.at.get("pp", 0)])
        weights = publish(program, calls, place, initial_weights(program, place, seed))
        scale = optim.scale_init(config.scaling) if config.scaling else None
        state = State(weights, optim.init(list(weights.masters.values())), scale)
        if enter is not None:
            enter(program, place, state)
            state.weights = weights = publish(program, calls, place, weights.masters)
        reports: list[Report] = []
        grads: list[dict[str, Tensor]] = []
        params: list[dict[str, Tensor]] = [{k: v.clone() for k, v in weights.masters.items()}]
        for number, batch in enumerate(batches, done + 1):

            def local(mb: int, batch: Batch = batch) -> Batch:
                return {k: v[list(rows(plan, place.at, mb))] for k, v in batch.items()}

            update = make_update(program, place, state, config, lr(number), lambda: False, reports.append)

            def observed(g: dict[str, Tensor], loss: Tensor, update: object = update) -> Mapping[str, Tensor]:
                grads.append({k: v.clone() for k, v in g.items()})
                return update(g, loss)  # type: ignore[operator,no-any-return]

            scaled = state.scale["scale"] if state.scale else torch.ones(())
            step = Step(number, seed, local, counts[number - done - 1], scaled, observed)
            run(bound, state.weights, step)
            params.append({k: v.clone() for k, v in state.weights.masters.items()})
            if after is not None:
                after(number, program, place, state)
        return place, reports, grads, params

    ranks = simulate(mesh, sorted(names), work)
    for _, reports, _, _ in ranks[1:]:
        if repr(reports) != repr(ranks[0][1]):  # to the bit, and a norm that is nan everywhere is agreed upon
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
        whole(lambda i: ranks[i][3], 0),
        [whole(lambda i: ranks[i][2], n) for n in range(len(batches))],
        [whole(lambda i: ranks[i][3], n + 1) for n in range(len(batches))],
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


# ------------------------------------------------------------------------------------------ the verb `verify`

TOLERANCE = 1e-9  # relative to the largest value of a tensor (or 1, if that is smaller), in float64


def shrink(layout: Layout) -> Layout:
    """The same layout with small sizes: every dim, rule, schedule, ratio of heads and uneven stage stays, in
    float64; dims become 2 (pp at most 4; tp 4 where KV heads are shared), sequences and widths a few elements."""
    _, cfg = layouts.family(layout)
    old = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    kv, tp = old.get("kv_heads", old["heads"]), layout.sizes["tp"]
    small = {d: min(n, 4 if d == "pp" or (d == "tp" and kv < tp) else 2) for d, n in layout.sizes.items()}
    pp, tp = small["pp"], small["tp"]
    chunks = layout.pipeline.chunks or 1
    per_stage = layouts.stage_layers(layout)[: pp * chunks]
    uneven = layout.pipeline.layers_per_stage is not None
    stages = [1 + (n > min(per_stage)) for n in per_stage] if uneven else [2 if pp == 1 else 1] * (pp * chunks)

    group = old["heads"] // kv
    kv = kv if kv == 1 else 2 if kv < layout.sizes["tp"] else 2 * tp
    heads = kv * min(group, max(2, tp // kv))
    seq = 4 * max(2, tp)
    unit = 64 * tp
    padded = layouts.pad(layout).get("vocab", 0) > old["vocab"]
    new = {
        "layers": sum(stages),
        "heads": heads,
        "kv_heads": kv,
        "head_dim": 8,
        "embed": heads * 8,
        "mlp": 12 * tp,
        "vocab": unit - 3 if padded else unit,
        "positions": seq,
    }
    values = {
        k: v
        for k, v in (old | {k: v for k, v in new.items() if k in old}).items()
        if k not in ("attention", "document_mask", "max_documents")
    }
    fields = {
        k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) and not isinstance(v, type) else v
        for k, v in values.items()
    }
    data_parallel = 1
    for d in layout.shard.compute.get("batch", ()):
        data_parallel *= small[d]
    microbatches = min(layouts.microbatches(layout), 2 * pp if pp > 1 else 2)
    model = layout.model
    return layout.model_copy(
        update={
            "cluster": layout.cluster.model_copy(
                update={"nodes": 1, "gpus_per_node": math.prod(small.values()), "gpu": "cpu"}
            ),
            "mesh": {d: m.model_copy(update={"size": small[d]}) for d, m in layout.mesh.items()},
            "pipeline": layout.pipeline.model_copy(update={"layers_per_stage": tuple(stages)}),
            "model": model.model_copy(
                update={
                    "family": model.family or (models.presets()[model.preset] if model.preset else None),
                    "preset": None,
                    "fields": {k: v for k, v in fields.items() if v is not None},
                    "vocab_pad": "auto",
                }
            ),
            "data": layout.data.model_copy(
                update={
                    "seq": seq,
                    "batch": data_parallel * microbatches,
                    "microbatch": 1,
                    "source": "synthetic",
                }
            ),
            "run": layout.run.model_copy(update={"precision": "fp64", "loss_scale": None, "steps": 2}),
        }
    )


@dataclass(frozen=True)
class Line:
    """One compared value: the largest difference, and what is allowed."""

    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


def compare(plan: Plan, program: Program, calls: Calls, seed: int, lr: float = 0.01) -> list[Line]:
    """Two steps on simulated ranks against one device: losses, norms, gradients from the head down, parameters."""
    module, cfg = plan.job.module, plan.job.config
    batches = [random_batch(plan, seed, step) for step in (1, 2)]
    counts = [module.counts(cfg, b) for b in batches]
    many = train(plan, batches, counts, UpdateConfig(optim.Adamw(), 1.0), lambda step: lr, seed, program, calls)
    params, moments = reference.init(module, cfg, seed, torch.float64), None
    decayed = {k: p.decay for k, p in reference.parameters(module, cfg).items()}
    lines: list[Line] = []

    def add(what: str, ours: Tensor, theirs: Tensor) -> None:
        error = (ours - theirs).abs().max().nan_to_num(nan=math.inf)
        lines.append(Line(what, float(error), TOLERANCE * max(1.0, float(theirs.abs().max()))))

    for number, batch in enumerate(batches, 1):
        loss, grads = reference.loss_and_grads(module, cfg, params, batch, seed, number)
        report = many.reports[number - 1]
        norm = reference.grad_norm(grads)
        add(f"step {number} loss", torch.tensor(report.loss, dtype=torch.float64), loss.double())
        add(f"step {number} gradient norm", torch.tensor(report.norm, dtype=torch.float64), norm)
        for path in reversed(list(grads)):
            add(f"step {number} gradient of {path}", many.grads[number - 1][path], grads[path])
        params, moments = reference.adamw(params, grads, moments, decayed, number, lr, 0.1, clip=1.0)
        for path in params:
            add(f"step {number} updated {path}", many.params[number - 1][path], params[path])
    return lines


def random_batch(plan: Plan, seed: int, step: int) -> dict[str, Tensor]:
    """A global batch of random fields, a third of the labels ignored."""
    g = torch.Generator().manual_seed(1000 * seed + step)
    b, s, vocab = plan.layout.data.batch, plan.job.seq, plan.job.config.vocab
    labels = torch.randint(vocab, (b, s), generator=g)
    known = {
        "tokens": torch.randint(vocab, (b, s), generator=g),
        "labels": labels.masked_fill(torch.rand(b, s, generator=g) < 0.3, -1),
        "sample": torch.arange(b) + step * b,
        "valid": torch.ones(b, s, dtype=torch.int64),
        "start": (torch.arange(s) * (torch.rand(b, s, generator=g) < 0.3)).cummax(1).values,
    }
    for field, spec in plan.job.fields.items():
        shape = [{"batch": b, "seq": s}[axis] for axis in spec.split()]
        known.setdefault(field, torch.randint(2, shape, generator=g))
    return {field: known[field] for field in plan.job.fields}


def main(layout: Layout, echo: Callable[[str], None] = print) -> bool:
    """Shrink a layout, run it on simulated ranks, compiled and not, and print every error with its tolerance.
    True if all are within it."""
    plan = make_plan(shrink(layout))
    mesh = plan.job.mesh
    sizes = " x ".join(f"{d} {n}" for d, n in mesh.sizes) or "one process"
    echo(
        f"{sizes}: {mesh.world} simulated ranks in float64, {plan.job.layers} layers, {plan.microbatches} microbatches"
    )
    echo(f"tolerance {TOLERANCE:g} x max(1, largest value)")
    program = lower(plan.job)
    good = True
    lacking = missing_compiler("cpu")
    for mode in ("off",) if lacking else ("off", "on"):
        with stand_ins(mesh, program.groups()):
            calls = compile_program(program, mode, "cpu", chain.from_iterable(plan.train)).calls
        lines = compare(plan, program, calls, layout.run.seed)
        echo("compiled" if mode == "on" else "uncompiled")
        for line in lines:
            echo(f"  {'ok ' if line.ok else 'BAD'} {line.error:9.2e} of {line.allowed:9.2e}  {line.what}")
        first = next((line for line in lines if not line.ok), None)
        if first is not None:
            good = False
            echo(f"first to diverge: {first.what}, off by {first.error:.2e} (allowed {first.allowed:.2e})")
    if lacking:
        echo(f"compiled: not tried, because {lacking}")
    echo("equal to one device" if good else "NOT equal to one device")
    return good
