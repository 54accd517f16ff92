"""`dtrain show`: where a layout puts every parameter and activation, in text, without starting anything.

One notation for every placement (`axes.notation`): `embed/fsdp mlp/tp` is cut over fsdp along embed and over
tp along mlp, ` +tp` after it means still to be summed over tp. Dims of size 1 are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain import hardware
from dtrain.axes import ALONE, On, inherit, notation, padded, parse
from dtrain.layout import Layout
from dtrain.layout.shapes import shape_notes
from dtrain.mesh import all_groups
from dtrain.plan import Plan, plan
from dtrain.plan.report import heading, many
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import SEGMENTS, act_shape, lower, store_tree
from dtrain.program.remat import Budget
from dtrain.rng import Key
from dtrain.sharding import site
from dtrain.storage import Stored


@dataclass(frozen=True)
class Activation:
    """A tensor that a model line places: `what` is `constrain`, `island in 0` or `island out`; `shape` is
    that of one microbatch on all replicas together, `local` one rank's."""

    segment: str
    line: str
    what: str
    placement: str
    shape: tuple[int, ...]
    local: tuple[int, ...]


def show(layout: Layout) -> str:
    """The whole page. Raises LayoutError, ModelError or AxesError, one line."""
    p = plan(layout)
    tree = store_tree(p.job)
    parts = [
        "\n".join(heading(p)),
        f'parameters (" is as in the column before)\n{_table(*parameter_table(p, tree))}',
        f"activations of one microbatch\n{_activations(p)}",
        *([_kept(p, p.job.remat)] if isinstance(p.job.remat, Budget) else []),
        f"pipeline: {layout.pipeline.schedule}, {many(p.microbatches, 'microbatch')}\n{_stages(p, tree)}",
        f"ranks\n{_ranks(p, tree)}",
    ]
    notes = shape_notes(layout)
    if notes:
        parts.append("\n".join(["notes", *(f"  {note}" for note in notes)]))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------- parameters


def parameter_table(p: Plan, tree: Mapping[str, Mapping[str, Stored]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Headers, and a row for each parameter: where it lies in compute, at rest and in the optimizer."""
    rows = []
    for segment in SEGMENTS:
        name = f"block.0..{p.job.layers - 1}" if segment == "block" and p.job.layers > 1 else segment
        name = "block.0" if name == "block" else name
        for key, s in tree[segment].items():
            rest = at_rest(s, s.rest)
            kept = at_rest(s, len(s.steps))
            notes = [kv_sharing(s)] if s.share > 1 else []
            if s.param.tied_to:
                copies = p.job.tied_across
                where = f", a copy on pp {copies[0]} and {copies[1]}" if copies else ", stored there"
                notes.append(f"tied to {s.param.tied_to}{where}")
            rows.append(
                [
                    f"{name}/{key}",
                    _shape(s.param.shape),
                    notation(s.param.axes, s.cut),
                    _shape(s.local),
                    '"' if rest == notation(s.param.axes, s.cut) else rest,
                    _shape(s.shape(s.rest)),
                    '"' if kept == rest else kept,
                    _shape(s.shape(len(s.steps))),
                    "; ".join(notes),
                ]
            )
    return ["name", "global", "in compute", "local", "at rest", "local", "master, moments", "local", "notes"], rows


def at_rest(s: Stored, steps: int) -> str:
    """The placement after the first `steps` cuts of storage."""
    cut = [list(dims) for dims in s.cut]
    for step in s.steps[:steps]:
        cut[step.at] += step.group.split(".")
    return notation(s.param.axes, tuple(tuple(dims) for dims in cut))


def kv_sharing(s: Stored) -> str:
    """How key/value heads lie when there are fewer than ranks: the dim is two, the outer cut, the inner
    shared."""
    dims = s.cut[s.param.axes.index("kv_heads")]
    heads = s.param.shape[s.param.axes.index("kv_heads")]
    inner = f"{dims[-1]}%{s.share}"
    return f"cut over {heads} blocks of {'.'.join(dims)}, copied over the {s.share} ranks of a block ({inner})"


# ------------------------------------------------------------------------------------------------ activations


def _activations(p: Plan) -> str:
    rows = [[a.segment, a.line, a.what, a.placement, _shape(a.shape), _shape(a.local)] for a in activations(p)]
    return _table(["segment", "line", "what", "placement", "global", "local"], rows)


def activations(p: Plan) -> list[Activation]:
    """Every placement that the model asks for, from running its segments once on tensors without memory."""
    job, module, cfg = p.job, p.job.module, p.job.config
    seen: list[Activation] = []
    segment = ""

    def note(what: str, x: Tensor, spec: str) -> None:
        axes, summed = parse(spec)
        table = inherit(job.compute)
        cut = tuple(job.mesh.ordered(table.get(a, ())) for a in axes)
        over = job.mesh.ordered(d for a in summed for d in table.get(a, ()))
        local = tuple(max(1, n // job.mesh.product(dims)) for n, dims in zip(x.shape, cut, strict=True))
        line = site(module.__file__ or "")
        seen.append(Activation(segment, Path(line).name, what, notation(axes, cut, over), tuple(x.shape), local))

    def constrain(x: Tensor, spec: str) -> Tensor:
        note("constrain", x, spec)
        return x

    def island(fn: Callable[..., Tensor], in_axes: tuple[str, ...], out_axes: str) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            for i, (x, spec) in enumerate(zip(args, in_axes, strict=True)):
                note(f"island in {i}", x, spec)
            out = ALONE.island(fn, in_axes, out_axes)(*args)
            note("island out", out, out_axes)
            return out

        return call

    on = On(constrain=constrain, island=island)
    tree = module.params(cfg)
    batch_sizes = {"batch": job.batch * p.replicas, "seq": job.seq}
    with FakeTensorMode(), torch.no_grad():
        number = torch.zeros((), dtype=torch.int64)
        key = Key(number, number, number)
        batch = {
            field: torch.zeros([batch_sizes[a] for a in parse(spec)[0]], dtype=torch.int64)
            for field, spec in job.fields.items()
        }
        counts = {k: torch.ones((), dtype=torch.float32) for k in module.counts(cfg, batch)}
        x: Any = None
        for segment in SEGMENTS:
            weights = {
                name: torch.empty(padded(param, job.pad).shape, dtype=job.dtype)
                for name, param in tree[segment].items()
            }
            if segment == "embed":
                x = module.embed(cfg, weights, batch, key, on)
            elif segment == "block":
                x = module.block(cfg, weights, x, batch, key, on)
            else:
                module.head_and_loss(cfg, weights, x, batch, counts, key, on)
    return seen


def _kept(p: Plan, budget: Budget) -> str:
    """What a budget lets forward keep for backward, of one pass of each segment."""
    segments = {name: s for name, s in lower(p.job).segments.items() if name != "head"}
    rows = [
        [name, Path(k.line).name, k.kind, _shape(k.shape), hardware.show_size(k.bytes)]
        for name, s in segments.items()
        for k in s.kept
    ]
    x = math.prod(act_shape(p.job)) * p.job.dtype.itemsize
    each = {name: s.saved_bytes + x * ("x" in s.graphs["backward"].inputs) for name, s in segments.items()}
    peak = max(sum(each[name] * n for name, n in moment.items()) for moment in budget.held)
    return (
        f"kept for backward, besides each layer's input: at most {hardware.show_size(peak)} on a rank, "
        f"budget {hardware.show_size(budget.bytes)}\n" + _table(["segment", "line", "kind", "local", "size"], rows)
    )


# ------------------------------------------------------------------------------------------- stages and ranks


def _stages(p: Plan, tree: Mapping[str, Mapping[str, Stored]]) -> str:
    layers, rows = p.job.layers, []
    for coordinate, units in enumerate(p.units):
        names = [unit_segment(u, layers) for u in units]
        held = sum(
            math.prod(s.local)
            for segment, _ in names
            for s in tree[segment].values()
            if s.param.tied_to is None or p.job.tied_across
        )
        ends = [segment for segment, _ in names if segment != "block"]
        ranks = [r for r in range(p.job.mesh.world) if p.job.mesh.coordinates(r).get("pp", 0) == coordinate]
        numbers = [layer for segment, layer in names if segment == "block"]
        rows.append([str(coordinate), str(len(numbers)), spans(numbers), " ".join(ends), f"{held:,}", spans(ranks)])
    return _table(["pp", "layers", "which", "and", "parameters a rank computes with", "ranks"], rows)


def _ranks(p: Plan, tree: Mapping[str, Mapping[str, Stored]]) -> str:
    mesh, layout = p.job.mesh, p.layout
    names = [d for d in mesh.dims if mesh.size(d) > 1]
    for s in (s for params in tree.values() for s in params.values() if s.share > 1):
        names.append(f"{s.cut[s.param.axes.index('kv_heads')][-1]}%{s.share}")
    if p.job.tied_across:
        names.append("pp@" + "+".join(map(str, p.job.tied_across)))
    if not names:
        return "one process, no groups"
    rows = []
    for name in dict.fromkeys(names):
        dim = layout.mesh.get(name)
        found = all_groups(mesh, name)
        rows.append([name, " ".join(dim.link or ()) if dim else "", str(len(found)), groups(found)])
    return _table(["group", "link", "count", "ranks"], rows)


def groups(found: Sequence[Sequence[int]], most: int = 32) -> str:
    """`(0 1) (2 3)`; long lists are cut after about `most` ranks."""
    shown: list[str] = []
    ranks = 0
    for members in found:
        if shown and ranks + len(members) > most:
            return " ".join(shown) + f" and {len(found) - len(shown)} more"
        text = " ".join(map(str, members)) if len(members) <= most else f"{members[0]} {members[1]} .. {members[-1]}"
        shown.append(f"({text})")
        ranks += len(members)
    return " ".join(shown)


def spans(numbers: Iterable[int]) -> str:
    """`0..19 40..59`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)


# ------------------------------------------------------------------------------------------------------- text


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; columns with nothing in them are left out."""
    keep = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    lines = [[headers[i] for i in keep], *([row[i] for i in keep] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keep))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
