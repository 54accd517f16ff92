"""Runs an action list on one rank. The only thing that executes a step, in one process or a thousand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dtrain import storage
from dtrain.mesh import Groups, Mesh, flat_index
from dtrain.program.lower import Program, Segment
from dtrain.program.schedule import Action
from dtrain.storage import Stored

Call = Callable[..., Sequence[Tensor]]
Calls = Mapping[tuple[str, str], Call]  # (segment, graph) -> something to call


def unit_segment(unit: int, layers: int) -> tuple[str, int]:
    """Unit number -> (segment, layer); layer is -1 outside blocks."""
    return ("embed", -1) if unit == 0 else ("head", -1) if unit == layers + 1 else ("block", unit - 1)


def unit_path(unit: int, layers: int, name: str) -> str:
    segment, layer = unit_segment(unit, layers)
    return f"{segment}/{name}" if layer < 0 else f"block.{layer}/{name}"


@dataclass(frozen=True)
class Place:
    """One rank: where it is, what it talks through, and what of the model it has."""

    mesh: Mesh
    rank: int
    groups: Groups
    units: tuple[int, ...]
    device: str = "cpu"

    @property
    def at(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)


@dataclass
class Weights:
    """A rank's parameters by path: fp32 `masters` (optimizer shards) and `rest` (what UNSHARD gathers from; the
    masters themselves where the optimizer cuts no further)."""

    masters: dict[str, Tensor]
    rest: dict[str, Tensor]


def owned(program: Program, units: Sequence[int]) -> dict[str, tuple[Stored, int, str]]:
    """The parameters stored on a rank with these units: path -> (Stored, unit, name)."""
    layers = program.job.layers
    out = {}
    for unit in units:
        segment = program.segments[unit_segment(unit, layers)[0]]
        for name in segment.owned:
            out[unit_path(unit, layers, name)] = (segment.stored[name], unit, name)
    return out


def storage_path(program: Program, unit: int, name: str) -> str:
    """Where a unit's parameter is stored: its own path, or the one it is tied to on the same coordinate."""
    segment = program.segments[unit_segment(unit, program.job.layers)[0]]
    if name not in segment.owned:
        return str(segment.stored[name].param.tied_to)
    return unit_path(unit, program.job.layers, name)


def initial_weights(program: Program, place: Place, seed: int) -> dict[str, Tensor]:
    """Masters at step 0, shard by shard."""
    return {
        path: storage.fill(replace(s, path=path), place.mesh, place.at, seed, program.job.master, place.device)
        for path, (s, _, _) in owned(program, place.units).items()
    }


def publish(program: Program, calls: Calls, place: Place, masters: Mapping[str, Tensor]) -> Weights:
    """Masters -> what UNSHARD starts from (gathers over the optimizer's own cuts)."""
    layers, rest = program.job.layers, {}
    for unit in place.units:
        name = unit_segment(unit, layers)[0]
        segment = program.segments[name]
        paths = [unit_path(unit, layers, n) for n in segment.owned]
        cut = [len(segment.stored[n].steps) > segment.stored[n].rest for n in segment.owned]
        if any(cut):
            out = calls[name, "publish"](*[masters[p] for p in paths])
            rest.update({p: o if c else masters[p] for p, o, c in zip(paths, out, cut, strict=True)})
        else:
            rest.update({p: masters[p] for p in paths})
    return Weights(dict(masters), rest)


def owns_for_norm(program: Program, place: Place, path: str, s: Stored) -> bool:
    """Whether this rank counts its shard in sums over all parameters: of several identical copies, one does."""
    at, used = place.at, s.dims_used()
    for dim in place.mesh.ordered(place.mesh.dims):
        if dim == "pp":
            continue
        if dim not in used and at[dim] != 0:
            return False
        if s.share > 1 and dim in s.cut[s.param.axes.index("kv_heads")] and at[dim] % s.share:
            return False
    return s.param.tied_to is None


@dataclass(frozen=True)
class Step:
    """What one step is given. `batch(mb)` has this rank's fields of a microbatch; `counts` the global valid
    counts (0-dim), `seed` the run's; `scale` multiplies the loss (fp16), as a 0-dim tensor."""

    number: int
    seed: int
    batch: Callable[[int], Mapping[str, Tensor]]
    counts: Mapping[str, Tensor]
    scale: Tensor
    update: Callable[[dict[str, Tensor], Tensor], Mapping[str, Tensor] | None] = field(default=lambda grads, loss: None)
    watch: Callable[[int, Action], None] | None = None


@dataclass
class _Slots:
    """Values in flight on one rank during one step."""

    params: dict[int, list[Tensor]] = field(default_factory=dict)
    act: dict[tuple[int, int], Any] = field(default_factory=dict)
    grad: dict[tuple[int, int], Any] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    accumulated: dict[Any, Tensor] = field(default_factory=dict)
    reduced: dict[str, Tensor] = field(default_factory=dict)
    sending: list[tuple[Any, Tensor]] = field(default_factory=list)


def run(
    program: Program, calls: Calls, place: Place, weights: Weights, actions: Sequence[Action], step: Step
) -> Tensor:
    """Execute a list; returns this rank's part of the loss, summed over its microbatches (0-dim; 0 away from the
    head). At UPDATE, `step.update(gradient shards, loss part)` runs and what it returns replaces the masters.
    """
    job, layers, device = program.job, program.job.layers, place.device
    slots = _Slots()
    wide = torch.float64 if job.dtype == torch.float64 else torch.float32
    loss = torch.zeros((), dtype=wide, device=device)
    fixed: dict[str, Tensor] = {
        f"at:{d}": _number(flat_index(place.mesh, d.split("."), place.at), device) for d in job.trace_dims
    }
    fixed |= {f"count:{k}": v.to(device, wide) for k, v in step.counts.items()}
    fixed |= {"seed": _number(step.seed, device), "step": _number(step.number, device)}
    batches: dict[int, Mapping[str, Tensor]] = {}

    def segment_of(unit: int) -> Segment:
        return program.segments[unit_segment(unit, layers)[0]]

    def batch(mb: int) -> Mapping[str, Tensor]:
        if mb not in batches:
            batches[mb] = step.batch(mb)
        return batches[mb]

    def call(unit: int, mb: int, graph: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name, _ = unit_segment(unit, layers)
        g = program.segments[name].graphs[graph]
        args = []
        for key in g.inputs:
            if key in given:
                args.append(given[key])
            elif key.startswith("params:"):
                args.append(slots.params[unit][list(segment_of(unit).stored).index(key[7:])])
            elif key.startswith("batch:"):
                args.append(batch(mb)[key[6:]])
            elif key == "layer":
                args.append(_number(unit, device))
            else:
                args.append(fixed[key])
        return dict(zip(g.outputs, calls[name, graph](*args), strict=True))

    def take(values: dict[tuple[int, int], Any], at: tuple[int, int]) -> Tensor:
        value = values.pop(at)
        if isinstance(value, tuple):  # a receive that was posted earlier
            work, value = value
            work.wait()
        return value  # type: ignore[no-any-return]

    def forward(unit: int, mb: int, keep: bool) -> Tensor:
        given = {} if unit == 0 else {"x": take(slots.act, (unit - 1, mb))}
        out = call(unit, mb, "forward", given)
        y = out.pop("y")
        if keep:
            slots.saved[unit, mb] = out | given
        return y

    def accumulate(unit: int, out: Mapping[str, Tensor]) -> None:
        early = any(s.grads for s in segment_of(unit).stored.values())
        for key, g in out.items():
            name = key.removeprefix("grad:params:")
            at: Any = (unit, name) if early else storage_path(program, unit, name)
            if at in slots.accumulated:
                slots.accumulated[at].add_(g)
            else:
                slots.accumulated[at] = g.to(job.master, copy=True)

    def backward(unit: int, mb: int, graph: str) -> None:
        given = dict(slots.saved.pop((unit, mb)))
        if unit == layers + 1:
            given["grad"] = step.scale.to(device, wide)
        elif graph != "backward_weight":
            given["grad"] = take(slots.grad, (unit, mb))
        out = call(unit, mb, graph, given)
        if "grad:x" in out:
            slots.grad[unit - 1, mb] = out.pop("grad:x")
        if graph == "backward_input":
            later = segment_of(unit).graphs["backward_weight"].inputs
            slots.saved[unit, mb] = {k: v for k, v in (given | out).items() if k in later}
        else:
            accumulate(unit, out)

    training = any(a.kind == "UPDATE" for a in actions)
    for position, a in enumerate(actions):
        if step.watch is not None:
            step.watch(position, a)
        unit, mb = a.unit, a.mb
        if a.kind == "UNSHARD":
            name = unit_segment(unit, layers)[0]
            rest = [weights.rest[storage_path(program, unit, n)] for n in segment_of(unit).stored]
            slots.params[unit] = list(calls[name, "unshard"](*rest))
        elif a.kind == "FREE":
            del slots.params[unit]
        elif a.kind == "F":
            y = forward(unit, mb, training)
            if unit == layers + 1:
                loss = loss + y
            else:
                slots.act[unit, mb] = y
        elif a.kind in ("B", "I", "W"):
            backward(unit, mb, {"B": "backward", "I": "backward_input", "W": "backward_weight"}[a.kind])
        elif a.kind == "SEND":
            values = slots.act if a.what == "act" else slots.grad
            x = take(values, (unit, mb)).contiguous()
            slots.sending.append((place.groups["pp"].send([x], a.peer, 0), x))
        elif a.kind == "RECV":
            shape, dtype = program.segments["embed"].act  # type: ignore[misc]
            x = torch.empty(shape, dtype=dtype, device=device)
            values = slots.act if a.what == "act" else slots.grad
            values[unit, mb] = (place.groups["pp"].recv([x], a.peer, 0), x)
        elif a.kind == "REDUCE":
            name = unit_segment(unit, layers)[0]
            segment = segment_of(unit)
            if mb >= 0:
                parts = calls[name, "reduce_early"](*[slots.accumulated.pop((unit, n)) for n in segment.stored])
                for n, part in zip(segment.stored, parts, strict=True):
                    at = storage_path(program, unit, n)
                    if at in slots.accumulated:
                        slots.accumulated[at].add_(part)
                    else:
                        slots.accumulated[at] = part
            else:
                paths = [unit_path(unit, layers, n) for n in segment.owned]
                out = calls[name, "reduce"](*[slots.accumulated.pop(p) for p in paths])
                slots.reduced.update(zip(paths, out, strict=True))
        elif a.kind == "UPDATE":
            masters = step.update(slots.reduced, loss)
            if masters is not None:
                new = publish(program, calls, place, masters)
                weights.masters, weights.rest = new.masters, new.rest
    for work, _ in slots.sending:
        work.wait()
    return loss


def _number(i: int, device: str) -> Tensor:
    return torch.tensor(i, dtype=torch.int64, device=device)
