"""What a prediction says: one plain object for `--json` and every other report, and the page for a terminal.

Bytes are of one rank, seconds and FLOPs of one step. Where the GPU's peak is unknown (a CPU's) there is no time, and
what follows from it is None; where its memory is unknown there is no verdict.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtrain.hardware import show_size
from dtrain.layout import Layout
from dtrain.layout.derived import lengths
from dtrain.plan import Plan
from dtrain.plan import ledger as ledgers
from dtrain.plan.advice import Advice
from dtrain.plan.ledger import Entry
from dtrain.plan.memory import Memory, capacity
from dtrain.plan.predict import Prediction

# What a peak is made of, in the order of `Memory`.
PARTS = tuple(f.name for f in fields(Memory) if f.name not in ("peak", "moment", "over_time"))
FORMULAS = (
    "MFU = model FLOPs / (step time x GPUs x dense peak); HFU: the same with the FLOPs that the GPUs compute.\n"
    "Model FLOPs: 3 x forward's products, half of a causal attention, no recomputation, no padding"
)


def assumed(layout: Layout) -> list[str]:
    """What a prediction takes for granted of options that change how a program runs."""
    out = []
    if layout.kernels.async_tp:
        out.append(
            f"kernels.async_tp: a gather or reduce-scatter fused with its products takes as long as they do, or as its "
            f"transfers and a part of {layout.sizes['tp']} of them (Wang et al. 2023); memory is that without it"
        )
    if layout.run.cuda_graph:
        out.append(
            "run.cuda_graph: the batch is held twice, and during the update so are weights at rest that the optimizer "
            "cuts further; kernels never wait for Python, which is assumed without it too"
        )
    return out


def heading(plan: Plan) -> list[str]:
    """What is trained on what, a line each."""
    layout = plan.layout
    sizes = " x ".join(f"{d} {n}" for d, n in plan.job.mesh.sizes) or "one process"
    lines = [
        f"{model_name(plan)}: {parameters(plan):,} parameters, {layout.run.precision}",
        f"mesh: {sizes}, {many(layout.world, 'rank')} on {many(layout.cluster.nodes, 'node')} of "
        f"{layout.cluster.gpus_per_node} {layout.cluster.gpu}",
        f"batch: {layout.data.batch} sequences of {layout.data.seq} = "
        f"{many(plan.replicas, 'replica')} x {many(plan.microbatches, 'microbatch')} of {layout.data.microbatch}",
    ]
    if layout.data.document_mask:
        lines.append("documents: attention is counted (FLOPs, time) as if each sequence were one; only data tell more")
    real = lengths(plan.job.module.params(plan.job.config))
    return lines + [f"padding: {a} {real[a]} -> {n}" for a, n in plan.job.pad.items() if real.get(a, n) != n]


def model_name(plan: Plan) -> str:
    model = plan.layout.model
    return model.preset or model.family or model.file or ""


def parameters(plan: Plan) -> int:
    """Of the model, without padding, a tied table once."""
    return sum(
        math.prod(x.shape) * (plan.job.layers if segment == "block" else 1)
        for segment, params in plan.job.module.params(plan.job.config).items()
        for x in params.values()
        if x.tied_to is None
    )


def many(n: int, what: str) -> str:
    """`1 rank`, `2 ranks`, `3 microbatches`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}es" if what.endswith("ch") else f"{n} {what}s"


# ------------------------------------------------------------------------------------------------ one plain object


def report(p: Prediction, name: str = "", notes: Sequence[str] = (), advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """The object of `--json`; `layouts/README.md` documents its keys. `name` is the layout's, `notes` and `advice` are
    carried."""
    plan, layout, busiest = p.plan, p.plan.layout, p.ledger[p.busiest]
    times = {
        "step_seconds": p.step_seconds,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "tflops_per_gpu": p.tflops_per_gpu,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "bubble": p.bubble,
        "exposed": p.timeline.exposed,
    }
    return {
        "layout": name,
        "model": model_name(plan),
        "parameters": parameters(plan),
        "precision": layout.run.precision,
        "gpu": str(layout.cluster.gpu),
        "mesh": dict(plan.job.mesh.sizes),
        "world_size": layout.world,
        "microbatches": plan.microbatches,
        "tokens": layout.data.batch * layout.data.seq,
        "fits": p.fits,
        "capacity_bytes": capacity(layout),
        "margin_bytes": p.margin,
        "heaviest": p.heaviest,
        **(times if p.timed else dict.fromkeys(times)),
        "model_flops": p.model_flops,
        "hardware_flops": p.hardware_flops,
        "memory": _memory(p.memory[p.heaviest]),
        "memory_by_stage": [{"pp": pp, "layers": _layers(plan, pp), **_memory(m)} for pp, m in enumerate(p.memory)],
        "busiest": p.busiest,
        "bytes_by_link": ledgers.by_link(busiest),
        "bytes_by_dim": ledgers.by_dim(busiest),
        "ledger": [_entry(e, pps) for e, pps in merged(p.ledger)],
        "assumed": assumed(layout),
        "advice": [_change(a) for a in advice],
        "notes": list(notes),
    }


def _change(a: Advice) -> dict[str, Any]:
    timed = a.predicted.timed
    return {
        "what": a.what,
        "overrides": list(a.overrides),
        "step_seconds": a.predicted.step_seconds if timed else None,
        "cost": a.cost if timed else None,
        "margin_bytes": a.predicted.margin,
    }


def _memory(m: Memory) -> dict[str, int]:
    return {part: getattr(m, part) for part in (*PARTS, "peak")}


def _layers(plan: Plan, pp: int) -> int:
    return sum(1 for unit in plan.units[pp] if 0 < unit <= plan.job.layers)


def merged(by_pp: Sequence[Sequence[Entry]]) -> list[tuple[Entry, list[int]]]:
    """The entries of all pipeline coordinates, each with the coordinates where it is the same."""
    found: dict[Entry, list[int]] = {}
    for pp, entries in enumerate(by_pp):
        for e in entries:
            found.setdefault(e, []).append(pp)
    return sorted(found.items(), key=lambda item: ledgers.PHASES.index(item[0].phase))


def _entry(e: Entry, pps: list[int]) -> dict[str, Any]:
    return {
        "op": e.op,
        "phase": e.phase,
        "segment": e.segment,
        "pp": pps,
        "group": e.group,
        "ranks": e.ranks,
        "dim": ".".join(e.dims),
        "link": ".".join(e.links),
        "count": e.count,
        "bytes": e.bytes,
        "sent_bytes": e.wire,
        "line": e.line,
    }


# ------------------------------------------------------------------------------------------------ for a terminal


def page(p: Prediction, notes: Sequence[str] = (), advice: Sequence[Advice] = ()) -> RenderableType:
    """The summary: verdict and what would help, figures, memory, communication."""
    parts: list[RenderableType] = [
        Text("\n".join(heading(p.plan))),
        verdict(p),
        *([Text("\n".join(["it fits with", *("  {}\n    {}".format(*change(a)) for a in advice)]))] if advice else []),
        _figures(p),
        *(Text(line, "dim") for line in assumed(p.plan.layout)),
        _memory_table(p),
        _ledger_table(p),
    ]
    if notes:
        parts.append(Text("\n".join(["notes", *(f"  {note}" for note in notes)]), style="yellow"))
    return Group(*_spaced(parts))


def _spaced(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for i, part in enumerate(parts):
        yield from ([Text()] if i else [])
        yield part


def verdict(p: Prediction) -> Text:
    """Fits or not, on the ranks that need most."""
    m, have = p.memory[p.heaviest], capacity(p.plan.layout)
    where = f"on the ranks of pp {p.heaviest}" if len(p.memory) > 1 else "on each rank"
    if len(p.memory) > 1:
        where += ", the heaviest"
    if have is None or p.margin is None:
        return Text(f"{show_size(m.peak)} {where}; how much memory this machine has is not known here", "bold")
    left = f"{show_size(p.margin)} to spare" if p.margin >= 0 else f"{show_size(-p.margin)} too much"
    text = Text("FITS" if p.margin >= 0 else "DOES NOT FIT", "bold green" if p.margin >= 0 else "bold red")
    text.append(f"   {show_size(m.peak)} of {show_size(have)} {where}: {left}", "bold")
    if p.margin < 0:
        text.append(f"\n   runs out of memory first {out_of_memory(p)}", "red")
    return text


def change(a: Advice) -> tuple[str, str]:
    """What to change and what a step then takes, and how to type it."""
    time = f"{show_seconds(a.predicted.step_seconds)} a step ({a.cost:+.0%}), " if a.predicted.timed else ""
    said = f"{a.what}: {time}{show_size(a.predicted.margin or 0)} to spare"
    return said, " ".join(shlex.quote(o) for o in a.overrides)


def out_of_memory(p: Prediction) -> str:
    """The first moment, in the order of their lists, at which the heaviest ranks exceed their memory."""
    m, have = p.memory[p.heaviest], capacity(p.plan.layout) or 0
    actions = p.plan.train[p.heaviest]
    at = next((i for i, held in enumerate(m.over_time) if held > have), m.moment)
    return f"at {actions[at]}, action {at + 1:,} of {len(actions):,} of a step"


def _figures(p: Prediction) -> RenderableType:
    if not p.timed:
        return Text(
            f"no time: what a {p.plan.layout.cluster.gpu} reaches in {p.plan.layout.run.precision} is not known\n"
            f"model FLOPs {p.model_flops:.4g} a step, computed {p.hardware_flops:.4g}"
        )
    table = _grid("left", "right", "left")
    peak = p.plan.layout.cluster.device.peak[p.plan.layout.run.precision]
    more = {
        "TFLOP/s/GPU": f"of {peak / 1e12:.4g} in {p.plan.layout.run.precision}",
        "bubble": "of the step a rank waits for what another has not sent yet",
        "exposed": "of the step it waits for communication under way",
    }
    for name, value in figures(p).items():
        table.add_row(name, Text(value, "bold"), Text(more.get(name, ""), "dim"))
    return Group(table, Text(FORMULAS, "dim"))


def figures(p: Prediction) -> dict[str, str]:
    """Times and what follows from them, as they are printed everywhere; they need a GPU whose peak is known."""
    return {
        "step time": show_seconds(p.step_seconds),
        "tokens/s/GPU": f"{p.tokens_per_second_per_gpu:,.0f}",
        "TFLOP/s/GPU": f"{p.tflops_per_gpu:.0f}",
        "MFU": f"{p.mfu:.1%}",
        "HFU": f"{p.hfu:.1%}",
        "bubble": f"{p.bubble:.1%}",
        "exposed": f"{p.timeline.exposed:.1%}",
    }


def expected(p: Prediction) -> str:
    """A prediction in half a line, for the head of a layout's file."""
    need, have = show_size(p.memory[p.heaviest].peak), capacity(p.plan.layout)
    memory = f"{need} a rank" if have is None else f"{need} of {show_size(have)}"
    if p.fits is False:
        return f"does not fit, {memory}"
    if not p.timed:
        return memory
    said = figures(p)
    return f"{said['step time']} a step, {said['tokens/s/GPU']} tokens/s/GPU, {said['MFU']} MFU, {memory}"


def show_seconds(s: float) -> str:
    """`17.8 s`, `54.0 ms`."""
    return f"{s:.1f} s" if s >= 10 else f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.3g} ms"


# A terminal has room for eight columns; the two that are small together are "other".
_COLUMNS = {
    "params": ("parameters",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "saved": ("saved",),
    "gathered": ("gathered",),
    "working": ("transient",),
    "other": ("carried", "buffers"),
    "reserve": ("reserve",),
}


def _memory_table(p: Prediction) -> RenderableType:
    have = capacity(p.plan.layout)
    top = max(m.peak for m in p.memory)
    divisor, unit = (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")
    table = _grid("right", *["right"] * (len(_COLUMNS) + 2), "left")
    table.add_row(*(Text(h, "dim") for h in ("pp", "layers", *_COLUMNS, "peak", "")))
    for pp, m in enumerate(p.memory):
        values = [sum(getattr(m, part) for part in parts) / divisor for parts in _COLUMNS.values()]
        over = have is not None and m.peak > have
        style = "bold red" if over else "bold" if pp == p.heaviest else ""
        table.add_row(
            str(pp),
            str(_layers(p.plan, pp)),
            *(f"{v:.1f}" for v in values),
            Text(f"{m.peak / divisor:.1f}", style),
            Text("" if have is None else f"{m.peak / have:.0%}", style),
        )
    return Group(
        Text(f"memory of a rank at its peak, {unit}", "bold"),
        table,
        Text(
            "saved: for backward, of all microbatches in flight; gathered: copies of weights in use; working: of the\n"
            "action that runs; other: batch, activations between stages, packed communication; reserve: CUDA, NCCL,\n"
            "fragmentation",
            "dim",
        ),
    )


def _ledger_table(p: Prediction) -> RenderableType:
    pp = p.busiest
    if not p.ledger[pp]:
        return Text("no communication", "bold")
    table = _grid("left", "left", "left", "left", "right", "right", "right", "left")
    table.add_row(*(Text(h, "dim") for h in ("phase", "op", "dim", "link", "count", "bytes", "sent", "model line")))
    for e in _shown(p.ledger[pp]):
        table.add_row(
            e.phase,
            e.op.removesuffix("_tensor").removesuffix("_into").replace("_", "-"),
            ".".join(e.dims),
            ".".join(e.links),
            f"{e.count:,}",
            show_bytes(e.bytes),
            show_bytes(e.wire),
            e.line or e.segment,
        )
    totals = [
        f"{what}: " + ", ".join(f"{key} {show_bytes(n)}" for key, n in sorted(sums.items(), key=lambda kv: -kv[1]))
        for what, sums in (("by link", ledgers.by_link(p.ledger[pp])), ("by dim", ledgers.by_dim(p.ledger[pp])))
        if sums
    ]
    where = f"a rank of pp {pp}, which sends most" if len(p.ledger) > 1 else "each rank"
    return Group(
        Text(f"communication of {where}, in a step (bytes: of one call's whole tensor; sent: in all)", "bold"),
        table,
        Text("\n".join(totals), "bold"),
    )


def _shown(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that a reader cannot tell apart, as one; receives are left out, since they are another's sends."""
    counts: dict[Entry, int] = {}
    for e in entries:
        if e.op != "recv":
            key = replace(e, count=0, graph="", segment="" if e.line else e.segment)
            counts[key] = counts.get(key, 0) + e.count
    return [replace(e, count=n) for e, n in counts.items()]


def show_bytes(n: float) -> str:
    """Bytes on a wire, in decimal units as rates are: `67.1 MB`."""
    unit = next((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if n >= s or s == 1)
    return f"{n / unit[1]:.3g} {unit[0]}" if unit[1] > 1 else f"{n:.0f} B"


def _grid(*justify: Any) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for j in justify:
        table.add_column(justify=j, no_wrap=True)
    return table
