"""Axes, parameters and the rules that place them.

An *axis* is the logical name of a tensor dimension (`embed`, `heads`); a *dim* is a dimension of the device
mesh (`tp`, `fsdp`). *Rules* map axes to dims; a *split* says, for one tensor, which dims cut which position.
Axes of a tensor are written as one string, `"batch res_seq embed"`; ` +vocab` after them means "still to be
summed over the dims of vocab".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

AXES = (
    "batch",
    "seq",
    "res_seq",
    "embed",
    "embed_out",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "layers",
    "positions",
    "types",
    "classes",
)
DIMS = ("pp", "dp", "fsdp", "cp", "tp")

Rules = Mapping[str, tuple[str, ...]]
Split = tuple[tuple[str, ...], ...]


class AxesError(ValueError):
    """A tensor cannot be placed as asked; the message is one line for a person."""


@dataclass(frozen=True)
class Init:
    """How a parameter is filled at step 0: `normal` (mean 0, standard deviation `std`), `zeros` or `ones`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class Param:
    """An abstract parameter: no memory, only what is needed to place, fill, update and save it.

    `shape` is the real global shape (an unpadded vocabulary), one name in `axes` a position. `decay` says
    whether weight decay applies. `tied_to` names the parameter (`"embed/table"`) whose storage this one is.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decay: bool = True
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise AxesError(f"a parameter of shape {self.shape} needs {len(self.shape)} axes, got {self.axes}")
        for axis in self.axes:
            if axis not in AXES:
                raise AxesError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")


# A model's parameters, one table a segment; the block's table holds for each of its layers.
ParamTree = Mapping[str, Mapping[str, Param]]


def paths(tree: ParamTree, layers: int) -> dict[str, Param]:
    """Every parameter of a model by path: `embed/table`, `block.0/wq`, ..., `head/norm`."""
    out: dict[str, Param] = {}
    for segment, params in tree.items():
        prefixes = [f"block.{i}" for i in range(layers)] if segment == "block" else [segment]
        for prefix in prefixes:
            out.update({f"{prefix}/{name}": p for name, p in params.items()})
    return out


@dataclass(frozen=True)
class Here:
    """What an island knows of its place: `offset(axis)` is the global index of the first local element (a
    0-dim int64 tensor, or 0), `sum(x, axis)` and `max(x, axis)` combine x over the ranks that split the axis.
    The reductions are not differentiable: use them inside an autograd.Function. `cached(k, v)` are the keys and values
    of all positions up to these: as given, unless text is generated piece by piece."""

    offset: Callable[[str], Tensor | int]
    sum: Callable[[Tensor, str], Tensor]
    max: Callable[[Tensor, str], Tensor]
    cached: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = field(default=lambda k, v: (k, v))


def _alone_island(fn: Callable[..., Tensor], in_axes: tuple[str, ...], out_axes: str) -> Callable[..., Tensor]:
    here = Here(offset=lambda axis: 0, sum=lambda x, axis: x, max=lambda x, axis: x)

    def call(*args: Tensor) -> Tensor:
        return fn(here, *args)

    return call


@dataclass(frozen=True)
class On:
    """How a model touches the machine; the defaults are one device.

    - `gather(p)`: the only way to read a parameter.
    - `constrain(x, axes)`: the only way to place an activation.
    - `island(fn, in_axes, out_axes)`: `fn(here, *local tensors)` runs on local shards.
    """

    gather: Callable[[Tensor], Tensor] = field(default=lambda p: p)
    constrain: Callable[[Tensor, str], Tensor] = field(default=lambda x, axes: x)
    island: Callable[[Callable[..., Tensor], tuple[str, ...], str], Callable[..., Tensor]] = field(
        default=_alone_island
    )


ALONE = On()


def parse(spec: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`"batch res_seq embed +vocab"` -> (("batch", "res_seq", "embed"), ("vocab",))."""
    words = spec.split()
    axes = tuple(w for w in words if not w.startswith("+"))
    summed = tuple(w[1:] for w in words if w.startswith("+"))
    for axis in axes + summed:
        if axis not in AXES:
            raise AxesError(f"unknown axis {axis!r} in {spec!r}; the axes are {', '.join(AXES)}")
    return axes, summed


def inherit(rules: Rules) -> dict[str, tuple[str, ...]]:
    """Complete a table: `res_seq` starts with the dims of `seq`."""
    table = dict(rules)
    table["res_seq"] = tuple(dict.fromkeys(table.get("seq", ()) + table.get("res_seq", ())))
    return table


def split(axes: Iterable[str], rules: Rules, name: str = "tensor") -> Split:
    """Which dims cut which position of a tensor with these axes.

    Raises AxesError when one dim would be spent twice, naming the tensor, both axes and the dim.
    """
    table = inherit(rules)
    spent: dict[str, str] = {}
    out: list[tuple[str, ...]] = []
    for axis in axes:
        dims = table.get(axis, ())
        for dim in dims:
            if dim in spent:
                raise AxesError(
                    f"{name}: axes {spent[dim]!r} and {axis!r} are both on dim {dim!r}; a dim is spent once"
                )
            spent[dim] = axis
        out.append(dims)
    return tuple(out)


def notation(axes: Iterable[str], cut: Split, summed: Iterable[str] = ()) -> str:
    """The one printed form of a placement: `embed/fsdp mlp/tp`, `batch/dp seq embed +tp`."""
    words = [axis + "".join(f"/{d}" for d in dims) for axis, dims in zip(axes, cut, strict=True)]
    return " ".join(words + [f"+{d}" for d in summed])


def padded(p: Param, pad: Mapping[str, int]) -> Param:
    """The parameter with its padded axes (`{"vocab": 51200}`) at their padded size."""
    return replace(p, shape=tuple(pad.get(a, n) for a, n in zip(p.axes, p.shape, strict=True)))
