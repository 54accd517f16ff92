"""The story of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import checkpoint, data, hardware, hf, layout, metrics, optim
from dtrain import plan as plans
from dtrain.checkpoint import Record
from dtrain.checkpoint.tensors import everyone, names
from dtrain.layout import DIFFERENCES, Layout, room_notes
from dtrain.mesh import Groups, Limits, join_world, pipeline_groups
from dtrain.metrics import Log, say
from dtrain.plan import Plan, predict
from dtrain.plan.measured import Measured, beside, columns
from dtrain.program import blame
from dtrain.program.capture import captured
from dtrain.program.compile import Sharing, compile_program, uncompiled
from dtrain.program.interpret import (
    Bound,
    Calls,
    Place,
    Step,
    Weights,
    bind,
    blank,
    initial_weights,
    owned,
    publish,
    run,
)
from dtrain.program.lower import Program, lower
from dtrain.program.remat import Budget
from dtrain.program.update import Report, State, UpdateConfig, agree, all_reduce, counts_loss, on_device
from dtrain.program.update import report as report_of
from dtrain.rank import Rank
from dtrain.strict import Allow
from dtrain.torch_private import enable_symmetric_memory

Batch = Mapping[str, Tensor]


class RunError(Exception):
    """A run cannot start or go on; one line for a person."""


@dataclass(frozen=True)
class Run:
    """What stays the same from step to step on one rank. `calls` are what is called for each graph of the program;
    `steps` is its action list, and `judge` that of the program for held-out text: without dropout.
    `batches` are this rank's rows of the training batches, read ahead by `reader`."""

    plan: Plan
    rank: Rank
    place: Place
    program: Program
    calls: Calls
    steps: Bound
    judge: Bound
    source: data.Source
    reader: data.Reader
    batches: data.Ahead[Batch]
    config: UpdateConfig
    schedule: optim.Schedule

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def folder(self) -> Path:
        return Path(self.layout.run.folder or ".")


def train(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    """Train under a layout, as one rank of it. Raises RunError, LayoutError, DataError, LoweringError, CompileError
    or CheckpointError, each one line for a person."""
    torch.use_deterministic_algorithms(layout.run.deterministic)
    folder = Path(layout.run.folder or ".")
    if line := nothing_left(layout):
        if rank.rank == 0:
            print(line, flush=True)
        return
    rank.beat((checkpoint.latest(folder) or 0) + 1, "start")
    plan = plans.plan(layout)
    source = data.open_source(data_config(plan))
    entered = enter(plan, rank)
    group = entered[2].groups.get("start")
    record, said = checkpoint.choose(folder, layout.run.resume, rank.rank, rank.world, group)
    done = record.step if record else 0
    changes = check_same(layout, source, record) if record else {}
    if record is None:
        said = [f"warning: {line}" for line in room_notes(layout)]
    log_config = metrics.LogConfig(folder, layout.run.steps, done + 1, rank.rank == 0, quiet)
    with metrics.open_log(log_config) as log:
        for line in said:
            metrics.warn(log, line)
        if record:
            say(log, f"going on after step {done}, from {folder / f'step-{done}'}")
        for key, change in changes.items():
            say(log, f"changed: {key}: {change}")
        for line in (*data.counts(source), *source.notes):
            say(log, line)
        r = prepare(plan, rank, source, log, entered, record)
        with torch.no_grad(), checkpoint.open_saver(save_config(r)) as saver:
            tell = lambda line: say(log, line)  # noqa: E731
            state = restore(r, done, tell) if done else initialise(r, tell)
            loop(r, state, saver, log, done, record)
    if dist.is_initialized():
        dist.destroy_process_group()


def nothing_left(layout: Layout) -> str | None:
    """What to say where the folder holds a finished run, else None. Where a quick look finds the last checkpoint
    damaged, its steps are to be done again. Raises CheckpointError where `run.resume` is not there."""
    folder = Path(layout.run.folder or ".")
    done = next(iter(checkpoint.candidates(folder, layout.run.resume)), 0)
    if done < layout.run.steps or checkpoint.problems(folder / f"step-{done}", content=False):
        return None
    return (
        f"this run is finished ({done} of {layout.run.steps} steps, {layout.run.folder}): "
        f"raise it with run.steps={2 * done}, or choose another run.folder"
    )


# ------------------------------------------------------------------------------------------------- before step 1


def data_config(plan: Plan) -> data.DataConfig:
    """What to read for a plan; a model with fields beyond tokens and labels is a masked one."""
    d, run = plan.layout.data, plan.layout.run
    masked = not {*plan.job.module.BATCH} <= {"tokens", "labels", "sample"}
    held = d.validation
    return data.DataConfig(
        source=d.source,
        seq=d.seq,
        batch=d.batch,
        vocab=plan.job.config.vocab,
        seed=run.seed,
        paths=d.path,
        objective="masked" if masked else "causal",
        validation=0.0 if held.path else held.fraction,
        field=d.field or "",
        dtype=d.dtype,
        mix=tuple(data.From(m.source, m.path, m.field or "", m.dtype, m.stream, m.weight, m.epochs) for m in d.mix),
        tokenizer=d.tokenizer,
        bos=d.bos,
        eos=d.eos,
        chat=d.chat,
        packing=d.packing,
        document_mask=d.document_mask,
        max_documents=d.max_documents or 0,
        bad=d.bad,
        stream=d.stream,
        shuffle=d.shuffle,
        masking=data.Masking(d.masking.unit, d.masking.ngram),
        split=held.split,
        valid_paths=held.path,
        stride=held.stride or 0,
        steps=run.steps,
    )


def update_config(layout: Layout) -> UpdateConfig:
    o, scale = layout.optim, layout.run.loss_scale
    scaling = optim.LossScaling(**scale.model_dump()) if scale else None
    return UpdateConfig(optim.Adamw(o.beta1, o.beta2, o.eps, o.weight_decay), o.clip, scaling)


def schedule(layout: Layout) -> optim.Schedule:
    o = layout.optim
    return optim.Schedule(o.schedule, o.lr, o.warmup, o.length or layout.run.steps, o.decay, o.min_lr)


def check_same(now: Layout, source: data.Source, record: Record) -> dict[str, str]:
    """What a run that goes on changes, by key. Raises RunError where that would be another run."""
    forbidden, changed = checkpoint.compare(layout.completed(record.layout), as_dict(now))
    if now.data.packing == "best-fit" and "data.max_documents" in changed:  # otherwise it changes no sequence
        forbidden["data.max_documents"] = changed.pop("data.max_documents")
    where = f"{now.run.folder}/step-{record.step}"
    if forbidden:
        lines = [f"{key} {change} ({layout.at(now, key)})" for key, change in forbidden.items()]
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise RunError(
            f"{where} is of another layout: {', '.join(lines[:4])}{more}; "
            "go on with the layout that it was made with, or choose another run.folder"
        )
    if record.data != source.hash:
        raise RunError(
            f"{where} was trained on other data: data.source {now.data.source!r} has changed since; "
            "bring the old data back, or choose another run.folder"
        )
    if "optim.length" in changed and "optim.length" not in now._where:
        changed["optim.length"] += " (follows run.steps, so the rates of all steps change; write it to keep them)"
    return changed


def as_dict(layout: Layout) -> dict[str, Any]:
    """A layout as plain JSON values with the keys that it is written with, for the checkpoint."""
    values: dict[str, Any] = json.loads(layout.model_dump_json())
    return values | {"model": {k: v for k, v in values["model"].items() if k != "fields"} | values["model"]["fields"]}


Entered = tuple[Program, Program, Place]


def enter(plan: Plan, rank: Rank) -> Entered:
    """Lower the program of training and that for held-out text (without dropout), and join the world."""
    program = judge = lower(plan.job)
    if plan.layout.run.eval_every and (config := without_dropout(plan.job.config)) != plan.job.config:
        judge = lower(dataclasses.replace(plan.job, config=config))
    return program, judge, join(plan, rank, program)


def prepare(
    plan: Plan,
    rank: Rank,
    source: data.Source,
    log: Log,
    entered: Entered | None = None,
    record: Record | None = None,
) -> Run:
    """Enter, unless that is done, and compile. `record` is of the checkpoint that the run goes on from."""
    lay = plan.layout
    program, judge, place = entered or enter(plan, rank)
    describe(log, plan, rank, program)

    compute = plan.train[place.at.get("pp", 0)]
    turns = min(rank.world, lay.cluster.gpus_per_node)
    sharing = Sharing(rank.local_rank % turns, turns, lambda: meet(place.groups))
    fuse = lay.kernels.async_tp
    if fuse:
        enable_symmetric_memory("tp")
    lists = itertools.chain(*plan.train)
    compiled = compile_program(program, lay.run.compile, rank.device, compute, lists, sharing, fuse)
    calls = judges = compiled.calls
    seconds = compiled.seconds
    if judge is not program:
        mine = plan.evaluate[place.at.get("pp", 0)]
        lists = itertools.chain(*plan.evaluate)
        other = compile_program(judge, lay.run.compile, rank.device, mine, lists, sharing, fuse)
        judges, seconds = other.calls, seconds + other.seconds
    if compiled.notice:
        say(log, compiled.notice)
    if fuse:
        done, of = compiled.fused
        say(log, f"async tensor parallel: {done} of {of} gathers and reduce-scatters over tp are fused with products")
    work = f"{compiled.graphs} graphs compiled in {seconds:.1f} s" if compiled.graphs else "uncompiled"
    say(log, f"lowered in {program.seconds:.1f} s, {work}")
    steps = bind(program, calls, place, compute)
    judged = bind(judge, judges, place, plan.evaluate[place.at.get("pp", 0)])
    done, cursors = (record.step, record.cursors) if record else (0, [])
    reader = data.Reader(source, plans.rows(plan, place.at), done, cursors)
    batches = data.Ahead(lambda i: pinned(plan, place, reader.read(i)), lay.run.steps - 1)
    config = update_config(lay)
    return Run(plan, rank, place, program, calls, steps, judged, source, reader, batches, config, schedule(lay))


def without_dropout(config: Any) -> Any:
    """A model's config for held-out text."""
    rates = {f.name: 0.0 for f in dataclasses.fields(config) if "dropout" in f.name}
    return dataclasses.replace(config, **rates)


def join(plan: Plan, rank: Rank, program: Program) -> Place:
    """This rank's place among the others, once all are there."""
    mesh, limits = plan.job.mesh, plan.layout.run.timeouts
    wanted = {*program.groups(), *pipeline_groups(mesh), "world", ".".join(plan.data_dims)}
    groups = join_world(
        mesh,
        sorted(wanted - {""}),
        rank.rank,
        rank.backend,
        rank.device,
        Limits(limits.start, limits.step, limits.save),
    )
    return Place(mesh, rank.rank, groups, plan.units[mesh.coordinates(rank.rank).get("pp", 0)], rank.device)


def meet(groups: Groups) -> None:
    if "start" in groups:
        dist.barrier(group=groups["start"])


def describe(log: Log, plan: Plan, rank: Rank, program: Program) -> None:
    """Say what is about to be trained, and on what."""
    tree, mesh = plan.job.module.params(plan.job.config), plan.job.mesh
    sizes = [
        (math.prod(p.shape) * (plan.job.layers if segment == "block" else 1), p.decay)
        for segment, params in tree.items()
        for p in params.values()
        if not p.tied_to
    ]
    decayed, rest = (sum(n for n, decay in sizes if decay == want) for want in (True, False))
    say(log, f"{decayed + rest:,} parameters: {decayed:,} with weight decay, {rest:,} without (norms, biases)")
    dims = " x ".join(f"{d} {mesh.size(d)}" for d in mesh.ordered(mesh.dims)) or "one process"
    ranks = f", {rank.world} ranks over {rank.backend}" if rank.world > 1 else ""
    d = plan.layout.data
    say(
        log,
        f"mesh: {dims}{ranks} on {rank.device.partition(':')[0]}; a step: {d.batch} sequences of {d.seq} tokens in "
        f"{plan.microbatches} microbatches" + (f" on each of {plan.replicas} replicas" if plan.replicas > 1 else ""),
    )
    if isinstance(plan.job.remat, Budget):
        block = program.segments["block"]
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(k.kind for k in block.kept).items()) or "nothing"
        say(
            log,
            f"remat: within {hardware.show_size(plan.job.remat.bytes)} a layer keeps {kinds}: "
            f"{hardware.show_size(block.saved_bytes)}; its backward computes {block.again:.3g} FLOPs again",
        )


def initialise(r: Run, tell: Callable[[str], None] = lambda line: None) -> State:
    """The state before step 1: the weights of the seed, or those that the layout or an imported step 0 brings. What
    was done about allowed differences is told."""
    path = start_of(r.layout)
    if path is None:
        return _state(r, initial_weights(r.program, r.place, r.layout.run.seed))
    if r.rank.rank == 0:
        came_with = path if (path / "config.json").is_file() else path.parent / hf.KEPT
        if came_with.is_dir() and came_with != r.folder / hf.KEPT:
            hf.keep(came_with, r.folder)
    if (path / "run.json").exists():
        checkpoint.verify(path, r.rank.rank, r.rank.world, r.place.groups.get("start"))
    tell(f"weights of {path}")
    weights, said = checkpoint.starting_weights(path, r.program, r.place, allowed(r.layout), r.layout.run.seed)
    for line in said:
        tell(line)
    return _state(r, weights)


def allowed(layout: Layout) -> Allow:
    """Which differences between the model and what is read may be."""
    return Allow(*(name in layout.allow for name in DIFFERENCES))


def start_of(layout: Layout) -> Path | None:
    """What brings the weights of step 0. Raises RunError where the folder has an imported model of other sizes."""
    folder = Path(layout.run.folder or ".")
    if layout.model.load is not None:
        return Path(layout.model.load)
    if 0 not in checkpoint.steps(folder):
        return None
    path = checkpoint.find(folder, 0)
    raise RunError(
        f"{folder} holds an imported model; to start from it write model: {{load: {path}}}, or choose another"
    )


def restore(r: Run, step: int, tell: Callable[[str], None] = lambda line: None) -> State:
    """The state after a saved step. What was done about allowed differences is told."""
    masters = blank(r.program, r.place)
    scale = optim.scale_init(r.config.scaling, r.place.device) if r.config.scaling else None
    state = State(Weights(masters, {}), optim.init(list(masters.values())), scale)
    path, wanted = checkpoint.find(r.folder, step), names(r.program, scale is not None)
    pieces = checkpoint.pieces(r.program, r.place, state)
    found = checkpoint.restore(path, pieces, wanted, r.place.groups.get("start"), r.rank.world, allowed(r.layout))
    for line in found.said():
        tell(line)
    mine = owned(r.program, r.place.units)
    lost = [name for name, (s, _, _) in mine.items() if f"master/{s.param.tied_to or name}" in found.missing]
    masters |= initial_weights(r.program, r.place, r.layout.run.seed, lost)
    state.weights = publish(r.program, r.calls, r.place, masters)
    return state


def _state(r: Run, masters: dict[str, Tensor]) -> State:
    scale = optim.scale_init(r.config.scaling, r.place.device) if r.config.scaling else None
    weights = publish(r.program, r.calls, r.place, masters)
    return State(weights, optim.init(list(masters.values())), scale)


# --------------------------------------------------------------------------------------------------------- the loop


def loop(r: Run, state: State, saver: checkpoint.Saver, log: Log, done: int, record: Record | None) -> None:
    """Steps done + 1 to run.steps, or until a signal asks to stop."""
    lay = r.layout
    skipped = record.skipped if record else 0
    valid = record.valid_loss if record else None
    held_out = HeldOut(r)
    clock = Clock(r)
    trace = Trace(r)
    take = taking(r, state, lambda: r.rank.stopping() or saver.failed)
    report = None
    if lay.run.eval_every and not done:
        with clock.paused():
            valid = held_out.loss(state, 1)
            metrics.record_validation(log, 0, valid)
    for number in range(done + 1, lay.run.steps + 1):
        with trace.step(number):
            step, empty = training_step(r, number, state)
            lr = optim.lr_at(r.schedule, number)
            report = take(step, lr)
        if empty:
            say(log, f"step {number}: no label in the whole batch is valid; the step has no gradient")
        if report.skipped:
            skipped += 1
            stop_if_bad(r, state, step, report)
        clock.count()
        if number % lay.run.log_every == 0 or number == lay.run.steps or number == done + 1:
            extra = {"loss_scale": float(step.scale), "skipped": float(skipped)} if state.scale else {}
            clock.write(log, number, report, lr, extra)
        else:
            metrics.advance(log, number)
        last = report.stop or number == lay.run.steps
        if lay.run.eval_every and (number % lay.run.eval_every == 0 or number == lay.run.steps):
            with clock.paused():
                valid = held_out.loss(state, number)
                metrics.record_validation(log, number, valid)
        if last or (lay.run.save_every and number % lay.run.save_every == 0):
            with clock.paused():
                now = Record(number, as_dict(lay), r.source.hash, skipped, valid, cursors=r.reader.cursors(number - 1))
                save(r, saver, state, now, bool(last))
        for of, line in saver.news():
            say(log, f"step {of}/{lay.run.steps}  {line}")
        if report.stop:
            break
    trace.close()
    r.batches.close()
    assert report is not None
    memory = peak_memory(r)
    said = summary(r, number, report, valid, skipped, clock, memory)
    if log.cfg.writes:
        said[-1:-1] = [f"  {line}" for line in predicted(r, log, number, clock, memory)]
    say(log, "\n".join(said))


def taking(r: Run, state: State, stopping: Callable[[], bool]) -> Callable[[Step, float], Report]:
    """What takes a step at a learning rate and updates the state: action by action, or replayed as one CUDA graph."""
    if r.layout.run.cuda_graph:
        replay = captured(r.steps, state, r.config)
        return lambda step, lr: replay(step, lr, stopping())

    apply = on_device(r.program, r.place, state, r.config)

    def take(step: Step, lr: float) -> Report:
        reports: list[Report] = []

        def update(grads: dict[str, Tensor], loss: Tensor) -> Mapping[str, Tensor]:
            reports.append(report_of(apply(grads, loss, lr, float(stopping()))))
            return state.weights.masters

        run(r.steps, state.weights, dataclasses.replace(step, update=update))
        return reports[0]

    return take


def training_step(r: Run, number: int, state: State) -> tuple[Step, bool]:
    """What step `number` is given, and whether no label in its whole batch is valid."""
    rows = plans.rows(r.plan, r.place.at)
    cell: list[Batch] = []

    def mine() -> Batch:
        if not cell:
            cell.append(to_device(r, r.batches.get(number - 1)))
        return cell[0]

    size = r.plan.job.batch
    assert len(rows) == size * r.plan.microbatches
    counts = global_counts(r, mine) if has_head(r) else {}
    empty = has_head(r) and all(float(n) == 0 for n in counts.values())
    device = r.place.device
    scale = state.scale["scale"] if state.scale else torch.ones((), device=device)
    step = Step(
        number,
        r.layout.run.seed,
        lambda mb: {k: v[mb * size : (mb + 1) * size] for k, v in mine().items()},
        {k: v.clamp(min=1) for k, v in counts.items()},
        scale,
        watch=lambda position, action: r.rank.beat(number, str(action)),
    )
    return step, empty


def has_head(r: Run) -> bool:
    return r.program.job.layers + 1 in r.place.units


def pinned(plan: Plan, place: Place, batch: Batch) -> Batch:
    """What the model reads of a batch, in memory that its device can copy from."""
    pin = place.device.startswith("cuda")
    return {k: batch[k].pin_memory() if pin else batch[k] for k in plan.job.fields}


def to_device(r: Run, batch: Batch) -> Batch:
    return {k: v.to(r.place.device, non_blocking=True) for k, v in batch.items()}


def global_counts(r: Run, mine: Callable[[], Batch]) -> dict[str, Tensor]:
    """The valid items of each loss term in a global batch, of which `mine` are this rank's rows."""
    counts = r.plan.job.module.counts(r.plan.job.config, mine())
    total = all_reduce(r.place, torch.stack([v.double() for v in counts.values()]), ".".join(r.plan.data_dims))
    return dict(zip(counts, total.unbind(), strict=True))


class HeldOut:
    """The held-out batches, the same at every evaluation and read at the first. Every rank has the same number of
    them: those past the end of the text have no valid label."""

    def __init__(self, r: Run) -> None:
        self.r = r
        self.batches: list[Batch] = []
        self.counts: dict[str, Tensor] = {}

    def loss(self, state: State, number: int) -> float:
        """The mean over all valid labels, in nats."""
        r, size = self.r, self.r.plan.job.batch
        if not self.batches:
            n = min(data.validation_batches(r.source), r.layout.data.validation.batches)
            rows = plans.rows(r.plan, r.place.at)
            read = [data.batch(r.source, i, rows, "valid") for i in range(n)]
            self.batches = [to_device(r, pinned(r.plan, r.place, batch)) for batch in read]
            if has_head(r):
                each = [global_counts(r, lambda b=b: b) for b in self.batches]  # type: ignore[misc]
                self.counts = {k: torch.stack([c[k] for c in each]).sum().clamp(min=1) for k in each[0]}
        total = torch.zeros((), dtype=torch.float64, device=r.place.device)
        one = torch.ones((), device=r.place.device)
        for whole in self.batches:
            for mb in range(r.plan.microbatches):
                piece = {k: v[mb * size : (mb + 1) * size] for k, v in whole.items()}
                watch = lambda position, action: r.rank.beat(number, f"evaluate {action}")  # noqa: E731
                step = Step(number, r.layout.run.seed, lambda mb, p=piece: p, self.counts, one, watch=watch)  # type: ignore[misc]
                total += run(r.judge, state.weights, step)
        return float(agree(r.place, [total if counts_loss(r.program, r.place) else 0.0])[0])


def stop_if_bad(r: Run, state: State, step: Step, report: Report) -> None:
    """A step whose loss or gradient is not finite: fp16 lowers its scale; else the run stops, and says why."""
    if state.scale is not None and float(step.scale) > (r.config.scaling or optim.LossScaling()).least:
        return
    what = f"loss {report.loss:g}, gradient norm {report.norm:g}"
    raise RunError(f"step {step.number}: {what}; {blamed(r, state.weights, step)}. {kept(r)}")


def blamed(r: Run, weights: Weights, step: Step) -> str:
    """Run a step again, uncompiled, and name the first bad tensor of any rank."""
    lists = r.plan.train[r.place.at.get("pp", 0)]
    mine = blame.find(r.program, uncompiled(r.program, r.place.device), r.place, weights, lists, step)
    found = [b for b in everyone(mine, r.place.groups.get("start"), r.rank.world) if b is not None]
    if not found:
        return (
            "run again uncompiled it is finite, so the compiled code is at fault: use run.compile=off and report this"
        )
    return f"the first bad tensor: {min(found).text}"


def kept(r: Run) -> str:
    last = checkpoint.latest(r.folder)
    return "There is no checkpoint yet" if last is None else f"The last good state is {r.folder / f'step-{last}'}"


def save_config(r: Run) -> checkpoint.SaveConfig:
    run, group = r.layout.run, r.place.groups.get("save")
    busy = None if run.background_save == "off" else run.background_save
    keep = (run.keep.last, run.keep.every or 0) if run.keep else None
    return checkpoint.SaveConfig(r.folder, r.rank.rank, r.rank.world, group, busy, keep, run.timeouts.save)


def save(r: Run, saver: checkpoint.Saver, state: State, record: Record, last: bool) -> None:
    """Write a checkpoint, unless a weight is not finite (as after a far too high learning rate)."""
    r.rank.beat(record.step, "save")
    bad = [k for k, v in state.weights.masters.items() if not bool(torch.isfinite(v).all())]
    found = [b for b in everyone(bad, r.place.groups.get("save"), r.rank.world) if b]
    if found:
        raise RunError(
            f"step {record.step}: parameter {found[0][0]} is not finite after the update, not saved. {kept(r)}"
        )
    saver.save(record, checkpoint.pieces(r.program, r.place, state), last)


# ------------------------------------------------------------------------------------------------ what a run tells


class Clock:
    """Time spent in steps since the last row of the log, without evaluations and checkpoints."""

    def __init__(self, r: Run) -> None:
        self.r = r
        self.waited = (0.0, 0.0)  # seconds of waiting for data up to the last row, and of these since the first row
        self.steps = 0
        self.began = time.perf_counter()
        self.rate = 0.0  # tokens/s of the whole run
        self.spent = (0, 0.0)  # steps and seconds, the first step left out

    def count(self) -> None:
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        at = time.perf_counter()
        yield
        self.began += time.perf_counter() - at

    def write(self, log: Log, number: int, report: Report, lr: float, extra: Mapping[str, float]) -> None:
        now = time.perf_counter()
        step_s, d, lay = (now - self.began) / self.steps, self.r.layout.data, self.r.layout
        rate = metrics.tokens_per_s(d.batch, d.seq, step_s)
        peak = lay.cluster.device.peak.get(lay.run.precision)
        used = metrics.mfu(rate, flops_per_token(self.r.plan), self.r.rank.world, peak)
        memory = metrics.peak_memory(torch.device(self.r.place.device))
        waited = self.r.batches.waited
        share = (waited - self.waited[0]) / (now - self.began)
        row = metrics.Row(number, report.loss, report.norm, lr, rate, step_s, used, memory, share, extra)
        metrics.record(log, row)
        self.waited = (waited, self.waited[1] + (waited - self.waited[0] if self.rate else 0.0))
        if self.rate:
            self.spent = (self.spent[0] + self.steps, self.spent[1] + now - self.began)
        self.rate = metrics.tokens_per_s(d.batch, d.seq, self.spent[1] / self.spent[0]) if self.spent[0] else rate
        self.steps, self.began = 0, now


def flops_per_token(plan: Plan) -> float:
    cfg, tree = plan.job.config, plan.job.module.params(plan.job.config)
    size = {s: sum(math.prod(p.shape) for p in params.values()) for s, params in tree.items()}
    heads, head_dim = getattr(cfg, "heads", 0), getattr(cfg, "head_dim", 0)
    causal = data_config(plan).objective == "causal"
    params = size["block"] * plan.job.layers + size["head"]
    return metrics.flops_per_token(params, plan.job.layers, heads, head_dim, plan.job.seq, causal)


def waiting(r: Run, clock: Clock) -> float | None:
    """Share of the time of steps that the rank that waited most for data did, the first row's steps left out."""
    share = clock.waited[1] / clock.spent[1] if clock.spent[0] else None
    shares = [s for s in everyone(share, r.place.groups.get("save"), r.rank.world) if s is not None]
    return max(shares, default=None)


def peak_memory(r: Run) -> int:
    """Bytes, of the rank that needed most."""
    largest: int = max(
        everyone(metrics.peak_memory(torch.device(r.place.device)), r.place.groups.get("save"), r.rank.world)
    )
    return largest


def predicted(r: Run, log: Log, step: int, clock: Clock, memory: int) -> list[str]:
    """What `dtrain plan` says of this program, beside what was measured; in metrics.jsonl too. A run has done its work
    by now, so whatever fails here is told and does not fail it."""
    on_cpu = torch.device(r.place.device).type == "cpu"
    measured = Measured(clock.spent[1] / clock.spent[0] if clock.spent[0] else None, memory, on_cpu)
    try:
        p = predict.read(r.plan, r.program)
        metrics.record_predicted(log, step, columns(p, measured))
        return beside(p, measured)
    except Exception as error:
        return [f"no prediction: {type(error).__name__}: {error}".splitlines()[0]]


def summary(
    r: Run, saved: int, report: Report, valid: float | None, skipped: int, clock: Clock, memory: int
) -> list[str]:
    """What a run says at its end, line by line; the last says how to go on."""
    steps = r.layout.run.steps
    lines = [f"stopped as asked after step {saved} of {steps}" if saved < steps else f"finished: {steps} steps"]
    lines.append(f"  loss {report.loss:.4f}" + (f", held-out loss {valid:.4f}" if valid is not None else ""))
    if valid is not None and (line := data.report(r.source, valid, r.layout.data.validation.batches)):
        lines.append(f"  {line}")
    waited = waiting(r, clock)
    idle = "" if waited is None else f", {waited:.2%} of the time waiting for data"
    lines.append(f"  {clock.rate:,.0f} tokens/s{idle}, peak memory {memory / 2**30:.2f} GiB a rank")
    lines += [f"  {note}" for note in r.reader.notes()]
    if skipped:
        lines.append(f"  {skipped} updates skipped after an overflow")
    lines.append(f"  checkpoint {r.folder / f'step-{saved}'}, metrics {r.folder / 'metrics.jsonl'}")
    lines.append(f"  curves: tensorboard --logdir {r.folder}")
    more = "the same command" if saved < steps else f"the same command and run.steps={2 * steps}"
    lines.append(f"  to go on: {more}")
    return lines


class Trace:
    """A torch profiler trace of exactly the steps and ranks that `run.profile` asks for."""

    def __init__(self, r: Run) -> None:
        ask = r.layout.run.profile
        self.asked = range(ask.steps[0], ask.steps[1] + 1) if ask and r.rank.rank in ask.ranks else range(0)
        self.path = r.folder / "profile"
        self.rank = r.rank.rank
        self.seen: list[int] = []
        self.profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number not in self.asked:
            yield
            return
        if self.profiler is None:
            self.profiler = torch.profiler.profile(acc_events=True)  # 2.11 warns without
            self.profiler.start()
        self.seen.append(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        if number == self.asked[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded, named by the steps that it holds."""
        if self.profiler is not None:
            self.profiler.stop()
            self.path.mkdir(parents=True, exist_ok=True)
            name = f"steps-{self.seen[0]}-{self.seen[-1]}-rank-{self.rank}.json"
            self.profiler.export_chrome_trace(str(self.path / name))
            self.profiler = None


__all__ = ["Run", "RunError", "train"]
