"""Runs an action list on one rank. The only thing that executes a step, in one process or a thousand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
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


def initial_weights(
    program: Program, place: Place, seed: int, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Masters at step 0, shard by shard; all that the rank has, or `only` those of some paths."""
    return {
        path: storage.fill(replace(s, path=path), place.mesh, place.at, seed, program.job.master, place.device)
        for path, (s, _, _) in owned(program, place.units).items()
        if only is None or path in only
    }


def blank(program: Program, place: Place) -> dict[str, Tensor]:
    """Masters that are yet to be read: zeros, as padding is."""
    return {
        path: torch.zeros(s.shape(len(s.steps)), dtype=program.job.master, device=place.device)
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
    counts (0-dim), `seed` the run's; `scale` multiplies the loss (fp16), as a 0-dim tensor. Numbers that change while
    the work on the device stays as recorded are 0-dim tensors too."""

    number: int | Tensor
    seed: int | Tensor
    batch: Callable[[int], Mapping[str, Tensor]]
    counts: Mapping[str, Tensor]
    scale: Tensor
    update: Callable[[dict[str, Tensor], Tensor], Mapping[str, Tensor] | None] = field(default=lambda grads, loss: None)
    watch: Callable[[int, Action], None] | None = None


@dataclass
class _Slots:
    """Values in flight on one rank during one step. Their order within a tuple is fixed when the list is bound."""

    step: Step
    weights: Weights
    fixed: tuple[Tensor, ...]
    loss: Tensor
    flying: dict[tuple[str, int, int], Any] = field(default_factory=dict)  # started, not waited for
    params: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    batches: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    act: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    grad: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    accumulated: dict[Any, Tensor] = field(default_factory=dict)
    reduced: dict[str, Tensor] = field(default_factory=dict)


Op = Callable[[_Slots, int], None]  # what an action does to the values in flight, for a microbatch


@dataclass(frozen=True)
class Bound:
    """An action list as one rank runs it: `ops[i]` does `actions[i]`. Actions that differ in their microbatch alone
    share an op, so a long list is not much larger than a short one. `at` are the rank's coordinates, `counts` the
    names of the counts that the head wants."""

    program: Program
    place: Place
    actions: tuple[Action, ...]
    ops: tuple[Op, ...]
    at: tuple[Tensor, ...]
    counts: tuple[str, ...]


def run(bound: Bound, weights: Weights, step: Step) -> Tensor:
    """Execute a list; returns this rank's part of the loss, summed over its microbatches (0-dim; 0 away from the
    head). At UPDATE, `step.update(gradient shards, loss part)` runs and what it returns replaces the masters.
    """
    device = bound.place.device
    wide = torch.float64 if bound.program.job.dtype == torch.float64 else torch.float32
    numbers = (_number(step.seed, device), _number(step.number, device))
    counts = (step.counts[k].to(device, wide) for k in bound.counts)
    fixed = (*bound.at, *numbers, *counts, step.scale.to(device, wide))
    slots = _Slots(step, weights, fixed, torch.zeros((), dtype=wide, device=device))
    for position, (action, op) in enumerate(zip(bound.actions, bound.ops, strict=True)):
        if step.watch is not None:
            step.watch(position, action)
        op(slots, action.mb)
    return slots.loss


# ------------------------------------------------------------------------------------------------------- binding


def bind(program: Program, calls: Calls, place: Place, actions: Sequence[Action]) -> Bound:
    """Resolve once what every action of a list calls, reads and writes on this rank."""
    at = tuple(_number(flat_index(place.mesh, d.split("."), place.at), place.device) for d in program.job.trace_dims)
    segments = {unit_segment(u, program.job.layers)[0] for u in place.units}
    graphs = [g for name in sorted(segments) for g in program.segments[name].graphs.values()]
    counts = tuple(dict.fromkeys(k[6:] for g in graphs for k in g.inputs if k.startswith("count:")))
    units = {u: _unit(program, calls, place, u, counts) for u in place.units}
    training = any(a.kind == "UPDATE" for a in actions)
    ops: dict[Action, Op] = {}

    def op(a: Action) -> Op:
        alike = replace(a, mb=min(a.mb, 0))
        if alike not in ops:
            ops[alike] = _op(a, program, calls, place, units, training)
        return ops[alike]

    return Bound(program, place, tuple(actions), tuple(op(a) for a in actions), at, counts)


@dataclass(frozen=True)
class _Unit:
    """A unit as this rank calls it. `frame` names the values that all of its graphs can read: those of the step,
    the layer and the gathered parameters; `fields` are those of the batch. `paths` are where its parameters are
    stored, `owned` those that it reduces itself; `early` if that happens every microbatch, `dtype` that of the sums.
    """

    number: int
    segment: Segment
    calls: Mapping[str, Call]
    frame: tuple[str, ...]
    fields: tuple[str, ...]
    layer: Tensor
    paths: tuple[str, ...]
    owned: tuple[str, ...]
    early: bool
    dtype: torch.dtype

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.segment.name == "head"

    @property
    def kept(self) -> tuple[str, ...]:
        """What a forward keeps for its backward."""
        x = "x" in self.segment.graphs["backward"].inputs
        return (*self.segment.graphs["forward"].outputs[1:], *(["x"] if x else []))

    @property
    def carried(self) -> tuple[str, ...]:
        """What I keeps for W."""
        common = (*self.frame, *self.fields)
        return tuple(k for k in self.segment.graphs["backward_weight"].inputs if k not in common)

    def bind(self, graph: str, more: Sequence[str] = ()) -> Callable[[_Slots, int, Sequence[Tensor]], Args]:
        """How to list a graph's arguments: `args(slots, mb, the values of more)`."""
        inputs, unit, layer = self.segment.graphs[graph].inputs, self.number, self.layer
        fields = self.fields if any(k in self.fields for k in inputs) else ()  # reading data only where it is used
        pick = _picker(inputs, (*self.frame, *fields, *more))
        if fields:
            names = [f.removeprefix("batch:") for f in fields]
            return lambda s, mb, rest: pick((*s.fixed, layer, *s.params[unit], *_batch(s, mb, names), *rest))
        return lambda s, mb, rest: pick((*s.fixed, layer, *s.params[unit], *rest))


Args = tuple[Tensor, ...]


def _unit(program: Program, calls: Calls, place: Place, unit: int, counts: tuple[str, ...]) -> _Unit:
    job, (name, _) = program.job, unit_segment(unit, program.job.layers)
    segment = program.segments[name]
    step = (*(f"at:{d}" for d in job.trace_dims), "seed", "step", *(f"count:{k}" for k in counts))
    grad = "grad" if name == "head" else "scale"  # the loss's seed is its scale
    return _Unit(
        unit,
        segment,
        {graph: calls[name, graph] for graph in segment.graphs},
        (*step, grad, "layer", *(f"params:{n}" for n in segment.stored)),
        tuple(f"batch:{f}" for f in job.fields),
        _number(unit, place.device),
        tuple(storage_path(program, unit, n) for n in segment.stored),
        tuple(unit_path(unit, job.layers, n) for n in segment.owned),
        any(s.grads for s in segment.stored.values()),
        job.master,
    )


def _picker(keys: Sequence[str], among: Sequence[str]) -> Callable[[Args], Args]:
    """A function that takes the values called `keys` out of a tuple of values called `among`."""
    at = [among.index(k) for k in keys]
    if len(at) < 2:  # itemgetter makes no tuple then
        return lambda values: tuple(values[i] for i in at)
    return itemgetter(*at)


def _batch(s: _Slots, mb: int, names: Sequence[str]) -> Args:
    if mb not in s.batches:
        batch = s.step.batch(mb)
        s.batches[mb] = tuple(batch[n] for n in names)
    return s.batches[mb]


def _op(a: Action, program: Program, calls: Calls, place: Place, units: Mapping[int, _Unit], training: bool) -> Op:
    match a.kind:
        case "UPDATE":
            return _update(program, calls, place)
        case "SEND":
            return _send(a, place)
        case "RECV":
            return _receive(a, program, place)
        case "UNSHARD":
            return _unshard(units[a.unit])
        case "FREE":
            return lambda s, mb: s.params.__delitem__(a.unit)
        case "F":
            return _forward(units[a.unit], training)
        case "B":
            return _backward(units[a.unit], "backward")
        case "I":
            return _backward_input(units[a.unit])
        case "W":
            return _backward(units[a.unit], "backward_weight")
        case "REDUCE":
            return _reduce_early(units[a.unit]) if a.mb >= 0 else _reduce(units[a.unit])
        case "WAIT" if a.what == "params":
            return _unshard_wait(units[a.unit])
        case "WAIT" if a.what == "grads":
            return _reduce_early_wait(units[a.unit]) if a.mb >= 0 else _reduce_wait(units[a.unit])
        case "WAIT":
            return _transferred(a)
    raise ValueError(f"{a} is no action of a list")


def _unshard(u: _Unit) -> Op:
    call = u.calls["unshard"]

    def op(s: _Slots, mb: int) -> None:
        s.flying["params", u.number, -1] = call(*[s.weights.rest[p] for p in u.paths])

    return op


def _unshard_wait(u: _Unit) -> Op:
    call = u.calls["unshard_wait"]

    def op(s: _Slots, mb: int) -> None:
        s.params[u.number] = call(*s.flying.pop(("params", u.number, -1)))

    return op


def _forward(u: _Unit, training: bool) -> Op:
    here, call, args = u.number, u.calls["forward"], u.bind("forward", () if u.first else ("x",))
    first, last, keeps_x = u.first, u.last, "x" in u.kept

    def op(s: _Slots, mb: int) -> None:
        x = () if first else (s.act.pop((here - 1, mb)),)
        y, *saved = call(*args(s, mb, x))
        if training:
            s.saved[here, mb] = (*saved, *x) if keeps_x else tuple(saved)
        if last:
            s.loss = s.loss + y
        else:
            s.act[here, mb] = y

    return op


def _backward(u: _Unit, graph: str) -> Op:
    here, call, half = u.number, u.calls[graph], graph == "backward_weight"
    last, takes_grad = u.last, not half and not u.last
    kept = ("x",) if last else u.carried if half else u.kept
    args = u.bind(graph, (*kept, *(["grad"] if takes_grad else [])))
    outputs = u.segment.graphs[graph].outputs
    gives_x, params = "grad:x" in outputs, sum(not k.startswith("grad:params:") for k in outputs)
    names = [k.removeprefix("grad:params:") for k in outputs[params:]]
    paths = dict(zip(u.segment.stored, u.paths, strict=True))
    keys: list[Any] = [(here, n) if u.early else paths[n] for n in names]

    def op(s: _Slots, mb: int) -> None:
        grad = (s.grad.pop((here, mb)),) if takes_grad else ()
        given = args(s, mb, (s.act.pop((here - 1, mb)),) if last else (*s.saved.pop((here, mb)), *grad))
        fresh = not u.early and not all(k in s.accumulated for k in keys)
        busy = _addresses(given) if fresh else Counter()
        out = call(*given)
        del given, grad
        if fresh:
            busy.update(_addresses(out))
        if last:
            s.loss = s.loss + out[0]
        if gives_x:
            s.grad[here - 1, mb] = out[params - 1]
        if u.early:  # only read, by the REDUCE that comes
            s.accumulated.update((k, g.to(u.dtype)) for k, g in zip(keys, out[params:], strict=True))
        else:
            _accumulate(s.accumulated, keys, out[params:], busy, u.dtype)

    return op


def _backward_input(u: _Unit) -> Op:
    here, call, graph = u.number, u.calls["backward_input"], u.segment.graphs["backward_input"]
    given = (*u.kept, "grad")
    args, carry = u.bind("backward_input", given), _picker(u.carried, (*given, *graph.outputs))
    gives_x = not u.first

    def op(s: _Slots, mb: int) -> None:
        kept = (*s.saved.pop((here, mb)), s.grad.pop((here, mb)))
        out = call(*args(s, mb, kept))
        if gives_x:
            s.grad[here - 1, mb] = out[0]
        s.saved[here, mb] = carry((*kept, *out))

    return op


def _addresses(tensors: Sequence[Tensor]) -> Counter[int]:
    """How many of the tensors live in each piece of memory."""
    return Counter(x.untyped_storage().data_ptr() for x in tensors)


def _accumulate(
    sums: dict[Any, Tensor], keys: Sequence[Any], parts: Sequence[Tensor], busy: Counter[int], dtype: torch.dtype
) -> None:
    """Add a microbatch's part to each sum. The first part becomes the sum itself where it has the right dtype and
    memory of its own: a graph may return one tensor twice, a view of an input or a piece of something larger.
    `busy` counts the inputs and outputs of that graph by address; it is not looked at where all sums exist."""
    if all(k in sums for k in keys):
        torch._foreach_add_([sums[k] for k in keys], list(parts))
        return
    for k, part in zip(keys, parts, strict=True):
        if k in sums:
            sums[k].add_(part)
        else:
            memory = part.untyped_storage()
            alone = busy[memory.data_ptr()] == 1 and memory.nbytes() == part.numel() * part.element_size()
            sums[k] = part.to(dtype, copy=not alone)


def _reduce_early(u: _Unit) -> Op:
    call, keys = u.calls["reduce_early"], [(u.number, n) for n in u.segment.stored]

    def op(s: _Slots, mb: int) -> None:
        s.flying["grads", u.number, mb] = call(*[s.accumulated.pop(k) for k in keys])

    return op


def _reduce_early_wait(u: _Unit) -> Op:
    call = u.calls["reduce_early_wait"]
    whole = [not s.grads for s in u.segment.stored.values()]  # what is not cut comes back as it was given

    def op(s: _Slots, mb: int) -> None:
        parts = call(*s.flying.pop(("grads", u.number, mb)))
        if all(p in s.accumulated for p in u.paths):
            torch._foreach_add_([s.accumulated[p] for p in u.paths], list(parts))
            return
        for path, part, same in zip(u.paths, parts, whole, strict=True):
            if path in s.accumulated:
                s.accumulated[path].add_(part)
            else:
                s.accumulated[path] = part.clone() if same else part

    return op


def _reduce(u: _Unit) -> Op:
    call = u.calls["reduce"]

    def op(s: _Slots, mb: int) -> None:
        s.flying["grads", u.number, -1] = call(*[s.accumulated.pop(p) for p in u.owned])

    return op


def _reduce_wait(u: _Unit) -> Op:
    call = u.calls["reduce_wait"]

    def op(s: _Slots, mb: int) -> None:
        out = call(*s.flying.pop(("grads", u.number, -1)))
        s.reduced.update(zip(u.owned, out, strict=True))

    return op


def _send(a: Action, place: Place) -> Op:
    group, unit, peer, act = place.groups[f"pp/{a.what}"], a.unit, a.peer, a.what == "act"

    def op(s: _Slots, mb: int) -> None:
        x = (s.act if act else s.grad).pop((unit, mb)).contiguous()
        s.flying["sent", unit, mb] = (group.send([x], peer, 0), x)

    return op


def _receive(a: Action, program: Program, place: Place) -> Op:
    group, unit, peer, what = place.groups[f"pp/{a.what}"], a.unit, a.peer, a.what
    shape, dtype = program.segments["embed"].act  # type: ignore[misc]

    def op(s: _Slots, mb: int) -> None:
        x = torch.empty(shape, dtype=dtype, device=place.device)
        s.flying[what, unit, mb] = (group.recv([x], peer, 0), x)

    return op


def _transferred(a: Action) -> Op:
    unit, what = a.unit, a.what

    def op(s: _Slots, mb: int) -> None:
        work, x = s.flying.pop((what, unit, mb))
        work.wait()
        if what != "sent":
            (s.act if what == "act" else s.grad)[unit, mb] = x

    return op


def _update(program: Program, calls: Calls, place: Place) -> Op:
    def op(s: _Slots, mb: int) -> None:
        masters = s.step.update(s.reduced, s.loss)
        if masters is not None:
            # Used up or stale, and what comes needs their room.
            for old in (s.params, s.reduced, s.weights.rest):
                old.clear()
            new = publish(program, calls, place, masters)
            s.weights.masters, s.weights.rest = new.masters, new.rest

    return op


def _number(i: int | Tensor, device: str) -> Tensor:
    return i if isinstance(i, Tensor) else torch.tensor(i, dtype=torch.int64, device=device)
