"""A model under a layout -> a Program: a few flat graphs of local tensor operations and functional
collectives.

Each segment (embed, block, head) is traced once, forward and backward together, on fake tensors, and the
joint graph is cut into what the action list runs:

    unshard                 shards at rest -> local parameters           (UNSHARD and its WAIT)
    forward                 local parameters, x, batch -> y, saved       (F)
    backward                -> gradient of x, local partial gradients    (B), or its two halves (I and W)
                            the head's gives y too, and has no halves
    reduce_early, reduce    accumulators -> optimizer shards             (REDUCE of a microbatch, of the step; WAIT)
    publish                 updated optimizer shards -> shards at rest   (the end of UPDATE)

Of these, reduce_early and publish exist where `grads` and `optimizer` cut something. unshard and the reductions are
two graphs each: `unshard` ends with its last collectives issued, `unshard_wait` waits for them and unpacks.

Rank coordinates, layer, step and seed are inputs, and groups are named after their dims, so the text of every
graph is the same on all ranks.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import storage
from dtrain.axes import ALONE, AxesError, On, Param, ParamTree, Rules, inherit, padded, parse, split
from dtrain.mesh import Mesh, fake_mesh, flat_index
from dtrain.models import batch_fields
from dtrain.program import cost, passes, remat
from dtrain.program.passes import Cut, Division, Joint, Save
from dtrain.program.record import record
from dtrain.program.remat import Budget
from dtrain.rng import Key
from dtrain.sharding import (
    Backward,
    Held,
    LoweringError,
    Tracing,
    describe,
    follow_backward,
    model_lines,
    on_mesh,
    place,
    placements,
    wrap,
)
from dtrain.storage import Stored, Sums
from dtrain.torch_private import forgetting_meshes, tracing_graph


@dataclass(frozen=True)
class Job:
    """What lowering needs to know, and no more. `batch` is one rank's microbatch in sequences, `remat` what forwards
    keep (one of `remat.POLICIES`, a list of `remat.KINDS`, or a budget); `tied_across` the two pipeline coordinates
    that share tied parameters, if they differ."""

    module: ModuleType
    config: Any
    layers: int
    mesh: Mesh
    compute: Rules
    params: Rules
    optimizer: Rules
    grads: Rules | None
    pad: Mapping[str, int]
    batch: int
    seq: int
    dtype: torch.dtype
    master: torch.dtype = torch.float32
    remat: str | tuple[str, ...] | Budget = "selective"
    tied_across: tuple[int, int] | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The axes of each batch field."""
        return batch_fields(self.module, self.config)

    @property
    def trace_dims(self) -> tuple[str, ...]:
        """The dims that segments are traced on: those that cut computation, with the ones that cut only the
        batch taken as one, `dp.fsdp` (DTensor's work grows exponentially with the number of dims)."""
        table = inherit(self.compute)
        data = self.mesh.ordered(table.get("batch", ()))
        others = self.mesh.ordered(d for d in self.mesh.dims if d != "pp" and d not in data)
        return ((".".join(data),) if data else ()) + others

    @property
    def trace_mesh(self) -> Mesh:
        """The mesh of `trace_dims`."""
        return Mesh(tuple((d, self.mesh.product(d.split("."))) for d in self.trace_dims))

    @property
    def trace_rules(self) -> Rules:
        """The compute rules in terms of `trace_dims`."""
        data = ".".join(self.mesh.ordered(inherit(self.compute).get("batch", ())))
        return {**self.compute, "batch": (data,) if data else ()}


@dataclass(frozen=True)
class Graph:
    """A flat graph with named inputs and outputs. `params:NAME`, `batch:NAME`, `at:DIM`, `count:NAME`,
    `seed`, `step`, `layer`, `x`, `grad` (of the segment's result, or the loss's seed), `saved:I`, `flying:I`."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def text(self) -> str:
        """The graph as text, with shapes: what is compared between ranks and between plan and run."""
        lines = [f"{self.inputs} -> {self.outputs}"]
        names: dict[fx.Node, str] = {}
        for i, node in enumerate(self.module.graph.nodes):
            names[node] = f"%{i}"
            value = node.meta.get("val")
            shape = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
            lines.append(f"%{i} {shape} = {node.op} {node.target if node.op == 'call_function' else ''} {args}")
        return "\n".join(lines)

    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Segment:
    """One segment, lowered. `owned` are the parameters whose storage is this segment's: all but those tied to
    another segment on the same pipeline coordinate."""

    name: str
    stored: Mapping[str, Stored]
    owned: tuple[str, ...]
    sums: Mapping[str, Sums]
    graphs: Mapping[str, Graph]
    act: tuple[tuple[int, ...], torch.dtype] | None  # local shape and dtype of the segment's result
    activations: Mapping[str, str]  # model line -> placement asked there
    kept: tuple[Kept, ...]  # from a forward to its backward, without parameters and the segment's input
    again: float  # FLOPs that backward spends on computing forward's values again

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from a forward to its backward, without parameters and the segment's input."""
        return sum(k.bytes for k in self.kept)


@dataclass(frozen=True)
class Kept:
    """A value that forward keeps for backward: its kind (one of `remat.KINDS`), the model line that made it, the
    local shape, bytes."""

    kind: str
    line: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Program:
    job: Job
    segments: Mapping[str, Segment]
    seconds: float  # what lowering took

    def groups(self) -> tuple[str, ...]:
        """Names of the groups that the graphs use, sorted."""
        names = {
            passes.group_of(n)
            for s in self.segments.values()
            for g in s.graphs.values()
            for n in g.module.graph.nodes
            if passes.is_collective(n)
        }
        return tuple(sorted(names))

    def hashes(self) -> dict[str, str]:
        return {f"{s.name}.{k}": g.hash() for s in self.segments.values() for k, g in s.graphs.items()}


SEGMENTS = ("embed", "block", "head")


def store_tree(job: Job) -> dict[str, dict[str, Stored]]:
    """Where every parameter lies, by segment and name (`block` stands for each of its layers)."""
    tree: ParamTree = job.module.params(job.config)
    out: dict[str, dict[str, Stored]] = {}
    for segment in SEGMENTS:
        out[segment] = {
            name: storage.store(
                f"{segment}/{name}",
                p,
                padded(p, job.pad),
                job.mesh,
                job.compute,
                job.params,
                job.optimizer,
                job.grads,
            )
            for name, p in tree[segment].items()
        }
    return out


def lower(job: Job, rank: int = 0) -> Program:
    """Lower every segment, as `rank` of the mesh would (all ranks get the same text).

    Must be called before the process joins a process group. Raises LoweringError naming the model line,
    AxesError for parameters that cannot be placed.
    """
    started = time.perf_counter()
    program = cut(job, trace(job, rank))
    return replace(program, seconds=time.perf_counter() - started)


def trace(job: Job, rank: int = 0) -> Mapping[str, Traced]:
    """Trace every segment, forward and backward together: the dear part of lowering.
    `dtrain.program.shared` says which jobs can be cut of the same traces."""
    stored = store_tree(job)
    coordinates = job.mesh.coordinates(rank)
    inner = job.trace_mesh
    place_inside = {d: flat_index(job.mesh, d.split("."), coordinates) for d in job.trace_dims}
    with (
        forgetting_meshes() if rank else nullcontext(),
        fake_mesh(inner, job.trace_dims, inner.rank(place_inside)) as mesh,
    ):
        return {name: _trace_segment(job, name, stored[name], mesh) for name in SEGMENTS}


def cut(job: Job, traced: Mapping[str, Traced]) -> Program:
    """A program of traced segments, with the graphs that store parameters, which need no trace. Raises as `lower`."""
    started = time.perf_counter()
    stored = store_tree(job)
    saves = _saves(job, {name: t.joint for name, t in traced.items() if name != "head"})
    segments = {name: _cut_segment(job, name, stored[name], traced[name], saves.get(name)) for name in SEGMENTS}
    if "start" in job.fields and "batch:start" not in segments["block"].graphs["forward"].inputs:
        raise LoweringError(
            f"{_model_file(job.module, 'block')}: data.document_mask is on, but block does not use batch['start'], "
            "where documents begin; hand it to ops.attention as start_BS, or set data.document_mask: false"
        )
    for segment in segments.values():
        for n, s in segment.stored.items():
            if s.param.tied_to and job.tied_across is None:
                owner, other = s.param.tied_to.split("/")
                if segments[owner].sums[other] != segment.sums[n]:
                    raise LoweringError(f"{s.path} and {s.param.tied_to} are tied, but their gradients need other sums")
    return Program(job, segments, time.perf_counter() - started)


# ------------------------------------------------------------------------------------------------ one segment


def _local(shape: Sequence[int], axes: Sequence[str], job: Job, what: str) -> tuple[int, ...]:
    cut = split(axes, inherit(job.compute), what)
    out = []
    for axis, n, dims in zip(axes, shape, cut, strict=True):
        ranks = job.mesh.product(dims)
        if n % ranks:
            raise LoweringError(f"{what}: {axis} {n} is not divisible by {'.'.join(dims)} ({ranks})")
        out.append(n // ranks)
    return tuple(out)


def _sizes(job: Job) -> dict[str, int]:
    """Lengths of the axes of activations, of one microbatch of all replicas together."""
    data = job.mesh.product(job.mesh.ordered(inherit(job.compute).get("batch", ())))
    return {"batch": job.batch * data, "seq": job.seq, "res_seq": job.seq, "embed": job.config.embed}


def act_shape(job: Job) -> tuple[int, ...]:
    """The local shape of the activation between segments."""
    axes, _ = parse(job.module.ACT)
    sizes = _sizes(job)
    return _local([sizes[a] for a in axes], axes, job, "the activation between segments")


def _count_names(job: Job, fake: FakeTensorMode) -> tuple[str, ...]:
    with fake:
        batch = {k: torch.zeros([2] * len(parse(v)[0]), dtype=torch.int64) for k, v in job.fields.items()}
        return tuple(job.module.counts(job.config, batch))


@dataclass(frozen=True)
class Traced:
    """A traced segment: its joint graph, on which dims each gradient arrives as partial sums, what was placed
    where. Cutting does not change it."""

    joint: Joint
    partial: Mapping[str, tuple[str, ...]]
    asked: Mapping[str, str]


def _saves(job: Job, joints: Mapping[str, Joint]) -> Mapping[str, Save]:
    """What each segment keeps for its backward."""
    if isinstance(job.remat, Budget):
        try:
            return remat.choose(joints, job.remat)
        except remat.BudgetError as error:
            raise LoweringError(f"run.remat: {error}") from None
    kinds = remat.POLICIES[job.remat] if isinstance(job.remat, str) else job.remat
    return dict.fromkeys(joints, remat.by_kind(kinds))


def _trace_segment(job: Job, name: str, stored: Mapping[str, Stored], mesh: DeviceMesh | None) -> Traced:
    module, fake = job.module, FakeTensorMode(allow_non_fake_inputs=True)
    names = tuple(stored)
    act, sizes = act_shape(job), _sizes(job)

    inputs: dict[str, Tensor] = {}
    with fake:
        for n in names:
            inputs[f"params:{n}"] = torch.empty(stored[n].local, dtype=job.dtype)
        if name != "embed":
            inputs["x"] = torch.empty(act, dtype=job.dtype)
        for field, spec in job.fields.items():
            axes, _ = parse(spec)
            inputs[f"batch:{field}"] = torch.empty(
                _local([sizes[a] for a in axes], axes, job, f"batch field {field}"), dtype=torch.int64
            )
        for k in ("seed", "step", "layer"):
            inputs[k] = torch.empty((), dtype=torch.int64)
        for d in job.trace_dims:
            inputs[f"at:{d}"] = torch.empty((), dtype=torch.int64)
        if name == "head":
            loss_dtype = torch.float64 if job.dtype == torch.float64 else torch.float32
            for k in _count_names(job, fake):
                inputs[f"count:{k}"] = torch.empty((), dtype=loss_dtype)
            inputs["grad"] = torch.empty((), dtype=loss_dtype)
        else:
            inputs["grad"] = torch.empty(act, dtype=job.dtype)

    found: dict[str, Any] = {}

    def joint(*values: Tensor) -> list[Tensor]:
        given = dict(zip(inputs, values, strict=True))
        try:
            y, grads = _trace(job, name, stored, mesh, given, found)
        except (LoweringError, AxesError, RuntimeError) as error:
            fault = _fault(error, _model_file(module, name), found.get("backward"))
            if fault is error:
                raise
            raise fault from error
        return [y, *grads]

    traced = make_fx(joint, tracing_mode="fake")(*inputs.values())
    traced.graph.eliminate_dead_code()
    surplus = _surplus(traced.graph)
    if surplus is not None:
        raise LoweringError(_surplus_message(surplus, _model_file(module, name)))
    if mesh is not None:
        rename = {str(mesh.get_group(d).group_name): d for d in job.trace_dims}
        passes.rename_groups(traced.graph, rename)

    keys = tuple(inputs)
    wrt = (() if name == "embed" else ("x",)) + tuple(f"params:{n}" for n in names)
    return Traced(passes.joint(traced.graph, keys, wrt), found["partial"], found["asked"])


def _cut_segment(job: Job, name: str, stored: Mapping[str, Stored], traced: Traced, save: Save | None) -> Segment:
    names = tuple(stored)
    # The head's loss and gradient are one graph: its scores of the whole vocabulary wait nowhere.
    graphs = passes.split_joint(traced.joint, save) if save else passes.join(traced.joint)
    needs = passes.divide(traced.joint, save) if save else Division([], [], [])
    sums = {n: _sums(job, name, n, stored[n], traced.partial[n]) for n in names}
    # A tied parameter is stored once, by the segment it is tied to, unless that lives on another coordinate.
    owned = tuple(n for n, s in stored.items() if s.param.tied_to is None or job.tied_across is not None)

    def flat(
        fn: Callable[..., list[Tensor]], members: tuple[str, ...], cuts: Callable[[Stored], int], dtype: Any
    ) -> Cut:
        shapes = [(stored[n].shape(cuts(stored[n])), dtype(stored[n])) for n in members]
        return Cut(record(lambda t: fn([stored[n] for n in members], t), shapes), members, members)

    master = lambda s: job.master  # noqa: E731
    unshard = flat(
        lambda s, t: storage.gather_rest(s, t, job.dtype),
        names,
        lambda s: s.rest,
        lambda s: rest_dtype(job, s),
    )
    graphs |= _start_and_wait("unshard", unshard)
    if any(len(s.steps) > s.rest for s in stored.values()):
        graphs["publish"] = flat(lambda s, t: storage.publish(s, t, job.dtype), owned, lambda s: len(s.steps), master)
    if any(s.grads for s in stored.values()):
        early = flat(lambda s, t: storage.reduce_early(s, t, job.master), names, lambda s: 0, master)
        graphs |= _start_and_wait("reduce_early", early)
    final = flat(
        lambda s, t: storage.reduce_final(s, [sums[n] for n in owned], t, job.mesh, job.master),
        owned,
        lambda s: s.grads,
        master,
    )
    graphs |= _start_and_wait("reduce", final)
    return Segment(
        name,
        stored,
        owned,
        sums,
        {k: Graph(g.module, g.inputs, g.outputs) for k, g in graphs.items()},
        None if name == "head" else (act_shape(job), job.dtype),
        traced.asked,
        tuple(
            Kept(
                remat.kind(n, traced.joint.fixed) or "view",
                n.meta.get("line", ""),
                tuple(n.meta["val"].shape),
                cost.size(n),
            )
            for n in needs.saved
        ),
        sum(cost.flops(n) for n in needs.again),
    )


def _start_and_wait(name: str, cut: Cut) -> dict[str, Cut]:
    """A graph of collectives in two: `name` issues them all, waiting only for those that another one needs;
    `name_wait` waits for the rest. What crosses (`flying:I`) is not to be read in between."""
    graph = cut.module.graph
    needed: set[fx.Node] = set()  # a collective depends on it
    for node in reversed(graph.nodes):
        if passes.is_collective(node) or any(user in needed for user in node.users):
            needed.add(node)
    after: set[fx.Node] = set()
    for node in graph.nodes:
        last = passes.op_name(node) == "wait_tensor" and node not in needed
        if last or node.op == "output" or any(a in after for a in node.all_input_nodes):
            after.add(node)
    crossing = dict.fromkeys(a for node in graph.nodes if node in after for a in node.all_input_nodes if a not in after)
    names = {node: f"flying:{i}" for i, node in enumerate(crossing)}
    given = dict(zip(graph.find_nodes(op="placeholder"), cut.inputs, strict=True))
    return {
        name: passes.build(graph, given, list(crossing), tuple(names.values())),
        f"{name}_wait": passes.build(graph, names, passes.results_of(graph), cut.outputs),
    }


def rest_dtype(job: Job, s: Stored) -> torch.dtype:
    """Shards at rest are the masters themselves unless the optimizer cuts further."""
    return job.dtype if len(s.steps) > s.rest else job.master


def _trace(
    job: Job,
    name: str,
    stored: Mapping[str, Stored],
    mesh: DeviceMesh | None,
    given: Mapping[str, Tensor],
    found: dict[str, Any],
) -> tuple[Tensor, list[Tensor]]:
    """Run one segment and its backward on (fake) local tensors; fills `found` with how gradients arrive."""
    module, model = job.module, _model_file(job.module, name)
    coordinates = {d: given[f"at:{d}"] for d in job.trace_dims}
    key = Key(given["seed"], given["step"], given["layer"])
    counts = {k.removeprefix("count:"): v for k, v in given.items() if k.startswith("count:")}
    found["asked"] = {}
    on: On = ALONE
    dims: tuple[str, ...] = ()
    tracing = None
    if mesh is not None:
        tracing = Tracing(mesh, job.trace_rules, coordinates, model)
        on, dims = on_mesh(tracing, found["asked"]), tracing.dims

    def lift(local: Tensor, where: Any) -> Tensor:
        return local if mesh is None else wrap(local, mesh, where)

    leaves: dict[str, Tensor] = {}
    for n, s in stored.items():
        leaves[n] = lift(given[f"params:{n}"], placements(dims, s.cut)).detach().requires_grad_(True)
    handles: Any = {n: Held(f"{name}/{n}", leaf, model) for n, leaf in leaves.items()}
    batch = {f: lift(given[f"batch:{f}"], place(tracing, spec) if tracing else None) for f, spec in job.fields.items()}
    where = place(tracing, module.ACT) if tracing else None
    x = lift(given["x"], where).detach().requires_grad_(True) if name != "embed" else None
    gather = on.gather if mesh is not None else lambda p: p.tensor if isinstance(p, Held) else p
    on = On(gather=gather, constrain=on.constrain, island=on.island)

    with model_lines(model):
        if name == "embed":
            y = module.embed(job.config, handles, batch, key, on)
        elif name == "block":
            y = module.block(job.config, handles, x, batch, key, on)
        else:
            y = module.head_and_loss(job.config, handles, x, batch, counts, key, on)
    if mesh is not None:
        _check_result(job, name, y, where, dims)
    grad = lift(given["grad"], where if name != "head" else placements(dims, ()))
    wrt = ([] if x is None else [x]) + list(leaves.values())
    backward = found["backward"] = follow_backward(y)
    grads = list(torch.autograd.grad(y, wrt, grad, allow_unused=True))
    for i, g in enumerate(grads):
        if g is None:
            owner = "x" if x is not None and i == 0 else list(leaves)[i - (x is not None)]
            raise LoweringError(f"{model}: segment {name} does not use {owner}, so it has no gradient; remove it")
    found["partial"] = {}
    if x is not None and where is not None and isinstance(grads[0], DTensor) and grads[0].placements != where:
        have, want = describe(dims, grads[0].placements, x.ndim), describe(dims, where, x.ndim)
        raise LoweringError(
            f"{backward.origin_of(x) or model}: the gradient of segment {name}'s input arrives as [{have}], "
            f"not [{want}]; an on.constrain is missing before this line"
        )
    for n, g in zip(leaves, grads[x is not None :], strict=True):
        found["partial"][n] = _partial_dims(g, leaves[n], dims, f"{backward.origin_of(leaves[n]) or model}: {name}/{n}")
    return _unwrap(y), [_unwrap(g) for g in grads]


def _unwrap(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def _check_result(job: Job, name: str, y: Tensor, where: Any, dims: tuple[str, ...]) -> None:
    if name == "head":
        table = inherit(job.trace_rules)
        partial = {d for axis in ("batch", "seq") for d in table.get(axis, ())}
        want = placements(dims, (), tuple(partial))
    else:
        want = where
    have = y.placements if isinstance(y, DTensor) else None
    if have != want:
        got = "a plain tensor" if have is None else f"[{describe(dims, have, y.ndim)}]"
        wanted = describe(dims, want, y.ndim)
        raise LoweringError(
            f"{_return_line(job.module, name)}: segment {name} returns {got}, not [{wanted}]; "
            "an on.constrain is missing before its return"
        )


def _partial_dims(g: Tensor, p: Tensor, dims: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The mesh dims on which a parameter's gradient is a partial sum."""
    if not isinstance(g, DTensor) or not isinstance(p, DTensor):
        return ()
    out = []
    for d, have, want in zip(dims, g.placements, p.placements, strict=True):
        if have.is_partial():
            if not want.is_replicate():
                raise LoweringError(f"{what}: its gradient is a partial sum over {d}, which cuts the parameter itself")
            out.append(d)
        elif have != want:
            raise LoweringError(
                f"{what}: its gradient arrives as [{describe(dims, g.placements, g.ndim)}], the parameter is "
                f"[{describe(dims, p.placements, p.ndim)}]; an on.constrain is missing where it is used"
            )
    return tuple(out)


def _sums(job: Job, segment: str, name: str, s: Stored, partial: tuple[str, ...]) -> Sums:
    extra: list[str] = []
    if s.share > 1:
        dim = s.cut[s.param.axes.index("kv_heads")][-1]
        extra.append(f"{dim}%{s.share}")
    tree: Mapping[str, Mapping[str, Param]] = job.module.params(job.config)
    tied = {p.tied_to for ps in tree.values() for p in ps.values() if p.tied_to}
    if job.tied_across is not None and (s.param.tied_to or f"{segment}/{name}" in tied):
        extra.append("pp@" + "+".join(str(c) for c in job.tied_across))
    return Sums(tuple(d for dim in partial for d in dim.split(".")), tuple(extra))


# ------------------------------------------------------------------------------------------------ whose fault


def _function(module: ModuleType, segment: str) -> Any:
    """A segment's function, without its decorators."""
    return inspect.unwrap(getattr(module, "head_and_loss" if segment == "head" else segment))


def _model_file(module: ModuleType, segment: str) -> str:
    """The file that a segment is written in; a model may take a segment from another one."""
    code = getattr(_function(module, segment), "__code__", None)
    return str(code.co_filename if code else module.__file__)


def _return_line(module: ModuleType, segment: str) -> str:
    """The line of the (last) `return` of a segment."""
    code = getattr(_function(module, segment), "__code__", None)
    ends = [i for i in dis.get_instructions(code) if i.opname.startswith("RETURN_")] if code else []
    lines = [i.positions.lineno for i in ends if i.positions and i.positions.lineno]
    return f"{_model_file(module, segment)}:{max(lines, default='?')}"


def _surplus(graph: fx.Graph | None) -> fx.Node | None:
    """The first collective that neither a constraint nor an island asked for."""
    nodes = graph.nodes if graph is not None else ()
    return next((n for n in nodes if passes.is_collective(n) and "site" not in n.meta), None)


def _surplus_message(node: fx.Node, otherwise: str) -> str:
    # Between two steps of backward (where gradients are added up) nothing knows the line; what comes in does.
    near, seen = [node], {node}
    for n in near:
        new = [a for a in n.all_input_nodes if a not in seen]
        seen.update(new)
        near.extend(new)
    where = next((n.meta.get("cause") or n.meta.get("line") for n in near if "line" in n.meta), otherwise)
    return f"{where}: needs a {passes.op_name(node)} that nothing asked for; an on.constrain is missing"


_REASONS = (
    (
        "mixed torch.Tensor and DTensor",
        "a tensor made here meets one on the mesh; make it inside an on.island",
    ),
    (f"{Held.__module__}.{Held.__qualname__}", "a parameter is used without on.gather; gather it first"),
    (
        "Sharding propagation failed",
        "the operation cannot run on shards as its inputs lie; an on.constrain is missing",
    ),
)


def _fault(error: Exception, model: str, backward: Backward | None) -> LoweringError:
    """What to tell the user: the first thing that went wrong, at the model line that did it."""
    where, tb = model, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == model:
            where = f"{model}:{tb.tb_lineno}"
        tb = tb.tb_next
    where = (backward and backward.failed()) or where
    surplus = _surplus(tracing_graph())  # came before the error, and most likely led to it
    if surplus is not None:
        return LoweringError(_surplus_message(surplus, where))
    if isinstance(error, LoweringError):
        return error
    text = " ".join(str(error).split())
    if not isinstance(error, AxesError):
        text = next((reason for sign, reason in _REASONS if sign in text), f"{type(error).__name__}: {text}")
    return LoweringError(f"{where}: {text}")
