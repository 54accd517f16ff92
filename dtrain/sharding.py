"""What `gather`, `constrain` and `island` mean on a mesh, while a segment is being traced.

DTensor exists only here: a segment runs once on fake local tensors wrapped as DTensors, and every collective
it asks for is recorded in the graph with the model line that asked (`node.meta["site"]`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from dtrain.axes import AxesError, Here, On, Rules, Split, inherit, notation, parse, split
from dtrain.torch_private import tracing_graph


class LoweringError(Exception):
    """A model cannot be lowered under a layout; one line that names the model's file and line."""


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Tracing:
    """Everything `on` needs while one segment is traced.

    `mesh` has the dims of size above 1 that cut computation (never pp); `coordinates` holds this rank's place
    on each as a 0-dim int64 tensor, an input of the graph; `model` is the model's file, for messages.
    """

    mesh: DeviceMesh
    rules: Rules
    coordinates: Mapping[str, Tensor]
    model: str

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names or ())


def site(model: str) -> str:
    """`file.py:12` of the innermost model line being run."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != model:
        frame = frame.f_back
    return model if frame is None else f"{model}:{frame.f_lineno}"


def placements(dims: tuple[str, ...], cut: Split, summed: tuple[str, ...] = ()) -> Placements:
    """A split as DTensor placements, one a mesh dim."""
    out: list[Placement] = []
    for dim in dims:
        at = [i for i, used in enumerate(cut) if dim in used]
        out.append(Shard(at[0]) if at else Partial() if dim in summed else Replicate())
    return tuple(out)


def place(tracing: Tracing, spec: str) -> Placements:
    """Axes as written in a model -> placements under the compute rules."""
    axes, summed = parse(spec)
    table = inherit(tracing.rules)
    return placements(tracing.dims, split(axes, table, spec), tuple(d for a in summed for d in table.get(a, ())))


def show(tracing: Tracing, spec: str) -> str:
    """`batch res_seq embed` -> `batch/dp res_seq/tp embed`."""
    axes, summed = parse(spec)
    table = inherit(tracing.rules)
    cut = tuple(_each(dims) for dims in split(axes, table, spec))
    return notation(axes, cut, _each(d for a in summed for d in table.get(a, ())))


def _each(dims: Iterable[str]) -> tuple[str, ...]:
    """Mesh dims one by one where several are traced as one (`dp.fsdp`)."""
    return tuple(d for dim in dims for d in dim.split("."))


def describe(dims: tuple[str, ...], x: Placements, ndim: int) -> str:
    """Placements of an arbitrary tensor, by position: `0/dp 1/tp 2` and `+tp`."""
    cut = [[d for d, p in zip(dims, x, strict=True) if isinstance(p, Shard) and p.dim == i] for i in range(ndim)]
    words = [str(i) + "".join(f"/{d}" for d in _each(used)) for i, used in enumerate(cut)]
    return " ".join(words + [f"+{d}" for d in _each(d for d, p in zip(dims, x, strict=True) if p.is_partial())])


def wrap(local: Tensor, mesh: DeviceMesh, where: Placements) -> DTensor:
    """A local tensor as an evenly split DTensor."""
    return DTensor.from_local(local, mesh, where, run_check=False)


@contextmanager
def asked(where: str) -> Iterator[None]:
    """Collectives recorded inside were asked for by the model line `where`."""
    begin = _last_node()
    yield
    _mark_since(begin, "site", where)


def _last_node() -> Node | None:
    """Of the graph being recorded, if one is; its root where it is empty."""
    graph = tracing_graph()
    return None if graph is None else graph._root.prev


def _mark_since(begin: Node | None, key: str, where: str) -> None:
    """Set `node.meta[key]` on the nodes recorded after `begin`."""
    while begin is not None and begin.next.op != "root":
        begin = begin.next
        begin.meta[key] = where


class model_lines(TorchFunctionMode):  # noqa: N801  (reads as a word in `with`)
    """While open, every node recorded gets the model line it comes from as `node.meta["line"]`, and so does,
    in its `metadata`, every autograd node that is made."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where, begin = site(self.model), _last_node()
        given = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,))]
        cause = next((_began(x) for x in given if _is_partial(x)), None)
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            _mark_since(begin, "line", where)
            _mark_since(begin, "cause", cause or where)
        results = out if isinstance(out, (tuple, list)) else (out,)
        _mark_autograd([x for x in results if isinstance(x, Tensor)], where)
        return out


def _is_partial(x: Any) -> bool:
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)


def _mark_autograd(made: Sequence[Tensor], where: str) -> None:
    for fn in _autograd_nodes(made, lambda fn: "line" in fn.metadata):
        fn.metadata["line"] = where
    for x in made:
        if x.grad_fn is not None and _is_partial(x):
            metadata: Any = x.grad_fn.metadata
            metadata["partial"] = True


def _began(x: Tensor) -> str | None:
    """The model line where the partial sum `x` began."""
    fn: Any = x.grad_fn
    last = None
    while fn is not None:  # towards the inputs, as long as they are partial sums
        last, fn = (
            fn,
            next((f for f, _ in fn.next_functions if f is not None and "partial" in f.metadata), None),
        )
    return None if last is None else last.metadata.get("line")


@dataclass
class Backward:
    """Follows a backward while it runs. `running` are the autograd nodes at work, innermost last; `readers`
    of a node's value are the nodes that give it a gradient, each by one of its results; `partial` are the
    results that are partial sums."""

    running: list[Any]
    readers: dict[Any, list[tuple[Any, int]]]
    partial: set[tuple[Any, int]]

    def origin(self, fn: Any) -> str | None:
        """The model line where the partial sum that reaches the node `fn` began, else the line of `fn`
        itself."""
        seen: set[Any] = set()
        while fn is not None:
            seen.add(fn)
            last, fn = (
                fn,
                next((r for r, i in self.readers.get(fn, []) if (r, i) in self.partial and r not in seen), None),
            )
        return last.metadata.get("line")  # type: ignore[no-any-return]

    def failed(self) -> str | None:
        """The line to blame for what went wrong just now, None before backward began."""
        return self.origin(self.running[-1]) if self.running else None

    def origin_of(self, leaf: Tensor) -> str | None:
        """The line where the partial sum in a leaf's gradient began."""
        return next((self.origin(fn) for fn in self.readers if getattr(fn, "variable", None) is leaf), None)


def follow_backward(y: Tensor) -> Backward:
    """Nodes that the backward of `y` records will get the model line of what they differentiate as `line`,
    and the line where a partial sum that reached it began as `cause`."""
    backward = Backward([], {}, set())

    def hook(fn: Any) -> None:
        begins: list[Node | None] = []

        def before(grads: Any) -> None:
            begins.append(_last_node())
            backward.running.append(fn)

        def after(results: Any, grads: Any) -> None:
            begin, where, cause = (
                begins.pop(),
                fn.metadata.get("line"),
                backward.origin(backward.running.pop()),
            )
            if where:
                _mark_since(begin, "line", where)
                _mark_since(begin, "cause", cause or where)
            for i, g in enumerate(results):
                if _is_partial(g):
                    backward.partial.add((fn, i))

        fn.register_prehook(before)
        fn.register_hook(after)

    for fn in list(_autograd_nodes([y], lambda fn: False)):
        for i, (source, _) in enumerate(fn.next_functions):
            backward.readers.setdefault(source, []).append((fn, i))
        hook(fn)
    return backward


def _autograd_nodes(tensors: Sequence[Tensor], known: Callable[[Any], bool]) -> Iterator[Any]:
    """The autograd nodes behind tensors, each once, down to those that are known."""
    stack: list[Any] = [x.grad_fn for x in tensors]
    seen: set[Any] = set()
    while stack:
        fn = stack.pop()
        if fn is not None and fn not in seen and not known(fn):
            seen.add(fn)
            stack.extend(f for f, _ in fn.next_functions)
            yield fn


class Held:
    """A parameter before `gather`: anything else done with it is an error that names the model line."""

    __slots__ = ("model", "path", "tensor")

    def __init__(self, path: str, tensor: Tensor, model: str) -> None:
        self.path, self.tensor, self.model = path, tensor, model

    def misused(self) -> LoweringError:
        return LoweringError(f"{site(self.model)}: parameter {self.path} is used without on.gather; gather it first")

    def __getattr__(self, name: str) -> Any:
        raise self.misused()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stack = [*args, *(kwargs or {}).values()]
        while stack:
            item = stack.pop()
            if isinstance(item, Held):
                raise item.misused()
            if isinstance(item, (list, tuple)):
                stack.extend(item)
        return NotImplemented


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, where: Placements, line: str) -> Tensor:
        ctx.line = line
        ctx.source = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        with asked(line):
            return x.redistribute(placements=where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with asked(ctx.line):
            return grad.redistribute(placements=ctx.source), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_where: Placements) -> Tensor:
        ctx.mesh, ctx.where = x.device_mesh, grad_where
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return wrap(grads[0], ctx.mesh, ctx.where), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, where: Placements, line: str) -> Tensor:
        ctx.line = line
        ctx.where = tuple(Replicate() if p.is_partial() else p for p in where)
        return wrap(local.view_as(local), mesh, where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad.placements != ctx.where:
            dims = grad.device_mesh.mesh_dim_names
            have, want = describe(dims, grad.placements, grad.ndim), describe(dims, ctx.where, grad.ndim)
            raise AxesError(
                f"the gradient of the result of the island at {ctx.line} arrives as [{have}], not [{want}]; "
                "an on.constrain is missing where that result is used"
            )
        return grad._local_tensor, None, None, None


def _local_of(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def on_mesh(tracing: Tracing, placed: dict[str, str]) -> On:
    """The `on` of a mesh: what the model asks becomes placements and functional collectives.

    `placed` collects, by model line, what each constraint asked for.
    """
    dims, mesh, table = tracing.dims, tracing.mesh, inherit(tracing.rules)

    def gather(p: Any) -> Tensor:
        if not isinstance(p, Held):
            raise LoweringError(f"{site(tracing.model)}: on.gather takes a parameter, not a computed tensor")
        return p.tensor

    def constrain(x: Tensor, spec: str) -> Tensor:
        line = site(tracing.model)
        if not isinstance(x, DTensor):
            raise LoweringError(f"{line}: on.constrain({spec!r}) takes the result of an operation on the mesh")
        placed[line] = show(tracing, spec)
        out: Tensor = _Constrain.apply(x, place(tracing, spec), line)  # type: ignore[no-untyped-call]
        _mark_autograd([out], line)
        return out

    def island(fn: Callable[..., Tensor], in_axes: tuple[str, ...], out_axes: str) -> Callable[..., Tensor]:
        line = site(tracing.model)
        wanted = [place(tracing, spec) for spec in in_axes]
        result = place(tracing, out_axes)

        def call(*args: Tensor) -> Tensor:
            for i, (x, want, spec) in enumerate(zip(args, wanted, in_axes, strict=True)):
                if isinstance(x, Held):
                    raise x.misused()
                have = x.placements if isinstance(x, DTensor) else None
                if have != want:
                    got = "a plain tensor" if have is None else f"[{describe(dims, have, x.ndim)}]"
                    where = _began(x) if _is_partial(x) else None
                    raise LoweringError(
                        f"{where or line}: input {i} of the island at {line} arrives as {got}, "
                        f"not [{show(tracing, spec)}]; put on.constrain(..., {spec!r}) before it"
                    )
            used = [any(not w[d].is_replicate() for w in [*wanted, result]) for d in range(len(dims))]
            local = []
            for x, want in zip(args, wanted, strict=True):
                # Where the island's work is split over a dim, a replicated input gets a part of its gradient
                # from each rank.
                back = tuple(Partial() if p.is_replicate() and u else p for p, u in zip(want, used, strict=True))
                local.append(_ToLocal.apply(x, back) if x.requires_grad else _local_of(x))  # type: ignore[no-untyped-call]

            def length(axis: str) -> int:
                for x, spec in zip(local, in_axes, strict=True):
                    axes, _ = parse(spec)
                    if axis in axes:
                        return int(x.shape[axes.index(axis)])
                raise LoweringError(f"{line}: here.offset({axis!r}), but no input of this island has that axis")

            def offset(axis: str) -> Tensor | int:
                at: Tensor | int = 0
                for d in table.get(axis, ()):
                    if d in dims:
                        at = at * mesh.size(dims.index(d)) + tracing.coordinates[d]
                return at * length(axis)

            def reduce(x: Tensor, axis: str, how: str) -> Tensor:
                c10d = torch.ops._c10d_functional
                with asked(line):
                    for d in table.get(axis, ()):
                        if d in dims:
                            x = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), how, mesh.get_group(d).group_name))
                return x

            here = Here(
                offset=offset,
                sum=lambda x, axis: reduce(x, axis, "sum"),
                max=lambda x, axis: reduce(x, axis, "max"),
            )
            out: Tensor = _FromLocal.apply(fn(here, *local), mesh, result, line)  # type: ignore[no-untyped-call]
            _mark_autograd([out], line)
            return out

        return call

    return On(gather=gather, constrain=constrain, island=island)


__all__ = [
    "AxesError",
    "Held",
    "LoweringError",
    "Tracing",
    "on_mesh",
    "place",
    "placements",
    "show",
    "site",
    "wrap",
]
