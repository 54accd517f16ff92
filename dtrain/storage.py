"""How parameters lie at rest.

Computation sees a parameter's *local* tensor: the global one cut by the `compute` rules. At rest that local
tensor is cut further by `params` and `optimizer`, one *step* at a time, along the axis that the rule names,
in even shards whose padding no operation ever sees (it is cut off by every gather and zero in every
gradient). Parameters of one unit that are cut alike travel in one flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain import rng
from dtrain.axes import AxesError, Param, Rules, Split, split
from dtrain.mesh import Mesh, flat_index, for_reductions


@dataclass(frozen=True)
class Step:
    """One even cut of a tensor: position `at` over the group `group` of `ranks` ranks."""

    at: int
    group: str
    ranks: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The padded shard's shape."""
        cut = -(-shape[self.at] // self.ranks)
        return (*shape[: self.at], cut, *shape[self.at + 1 :])


@dataclass(frozen=True)
class Stored:
    """One parameter on a mesh.

    `param` is global and padded (`real` is its unpadded shape); `local` the shape that computation sees;
    `steps` the further cuts at rest, of which the first `rest` come from `params` and the first `grads` hold
    for the gradient accumulator. `share` is how many neighbours along the KV dim hold the same heads (1:
    none).
    """

    path: str
    param: Param
    real: tuple[int, ...]
    cut: Split
    local: tuple[int, ...]
    share: int
    steps: tuple[Step, ...]
    rest: int
    grads: int

    def shape(self, steps: int) -> tuple[int, ...]:
        """The shape after the first `steps` cuts."""
        shape = self.local
        for step in self.steps[:steps]:
            shape = step.shape(shape)
        return shape

    def dims_used(self) -> set[str]:
        """Mesh dims over which the stored shards differ."""
        return {d for dims in self.cut for d in dims} | {d for s in self.steps for d in s.group.split(".")}


def store(
    path: str,
    real: Param,
    param: Param,
    mesh: Mesh,
    compute: Rules,
    params: Rules,
    optimizer: Rules,
    grads: Rules | None,
) -> Stored:
    """Place one parameter; raises AxesError where the rules collide."""
    cut: Split = tuple(mesh.ordered(dims) for dims in split(param.axes, compute, path))
    local, share = list(param.shape), 1
    for i, (axis, dims) in enumerate(zip(param.axes, cut, strict=True)):
        ranks = mesh.product(dims)
        if axis == "kv_heads" and local[i] < ranks and ranks % local[i] == 0:
            share, local[i] = ranks // local[i], 1
        elif local[i] % ranks:
            raise AxesError(f"{path}: {axis} {local[i]} is not divisible by {'.'.join(dims)} ({ranks})")
        else:
            local[i] //= ranks
    used = {d for dims in cut for d in dims}

    def further(rules: Rules, what: str) -> list[Step]:
        steps = []
        for i, dims in enumerate(split(param.axes, rules, path)):
            new = mesh.ordered(d for d in dims if d not in cut[i])
            for d in new:
                if d in used:
                    raise AxesError(
                        f"{path}: {what} puts {param.axes[i]!r} on dim {d!r}, spent by this parameter already"
                    )
                used.add(d)
            if new:
                steps.append(Step(i, ".".join(new), mesh.product(new)))
        return steps

    rest = further(params, "params")
    steps = rest + further(optimizer, "optimizer")
    kept = 0
    if grads is not None:
        wanted = {
            (i, d)
            for i, dims in enumerate(split(param.axes, grads, path))
            for d in mesh.ordered(d for d in dims if d not in cut[i])
        }
        while kept < len(steps) and {(steps[kept].at, d) for d in steps[kept].group.split(".")} <= wanted:
            wanted -= {(steps[kept].at, d) for d in steps[kept].group.split(".")}
            kept += 1
        if wanted:
            i, d = sorted(wanted)[0]
            raise AxesError(
                f"{path}: grads puts {param.axes[i]!r} on dim {d!r}, but params and optimizer cut it by "
                f"{[s.group for s in steps] or 'nothing'}; grads may repeat those cuts, from the first on"
            )
    return Stored(path, param, real.shape, cut, tuple(local), share, tuple(steps), len(rest), kept)


# -------------------------------------------------------------------------- what a rank holds, and its values


@dataclass(frozen=True)
class Span:
    """One position of a shard: it holds global indices start..stop-1, then padding up to `length`."""

    start: int
    stop: int
    length: int


def spans(s: Stored, mesh: Mesh, at: Mapping[str, int], steps: int) -> tuple[Span, ...]:
    """Which global indices a rank's shard holds after `steps` cuts (padding of any kind left out)."""
    out = []
    for i, n in enumerate(s.local):
        where = flat_index(mesh, s.cut[i], at)
        if s.param.axes[i] == "kv_heads":
            where //= s.share
        start, end, length = where * n, where * n + n, n
        for step in s.steps[:steps]:
            if step.at == i:
                length = -(-length // step.ranks)
                start += flat_index(mesh, step.group.split("."), at) * length
                end = min(end, start + length)
        out.append(Span(start, max(start, min(end, s.real[i])), length))
    return tuple(out)


def fill(s: Stored, mesh: Mesh, at: Mapping[str, int], seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A rank's shard (all cuts) at step 0: a function of (seed, path, global index) alone; padding is 0."""
    where = spans(s, mesh, at, len(s.steps))
    index = torch.zeros((), dtype=torch.int64, device=device)
    for i, span in enumerate(where):
        stride = math.prod(s.real[i + 1 :])
        line = torch.arange(span.start, span.stop, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + line
    if s.param.init.kind == "normal":
        path = s.param.tied_to or s.path
        state = rng.fold(torch.tensor(seed, dtype=torch.int64, device=device), rng.site_number(path))
        values = (rng.normal(rng.fold(state, index)) * s.param.init.std).to(dtype)
    else:
        values = torch.full(index.shape, float(s.param.init.kind == "ones"), dtype=dtype, device=device)
    pad = [p for span in reversed(where) for p in (0, span.length - (span.stop - span.start))]
    return F.pad(values, pad)


# ------------------------------------------------------------------------------ collectives over flat buffers

_c10d = torch.ops._c10d_functional


def _buckets(storeds: Sequence[Stored], keys: Iterable[str]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        out.setdefault(key, []).append(i)
    return out


def gather_rest(storeds: Sequence[Stored], shards: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`params` shards -> the local tensors that computation sees (the UNSHARD action)."""
    return _unshard(storeds, shards, [s.rest for s in storeds], [0] * len(storeds), dtype)


def publish(storeds: Sequence[Stored], masters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Optimizer shards -> `params` shards in the compute dtype (the end of the UPDATE action)."""
    return _unshard(storeds, masters, [len(s.steps) for s in storeds], [s.rest for s in storeds], dtype)


def _unshard(
    storeds: Sequence[Stored], shards: Sequence[Tensor], depth: list[int], want: list[int], dtype: torch.dtype
) -> list[Tensor]:
    out = [x.to(dtype) for x in shards]
    while any(d > w for d, w in zip(depth, want, strict=True)):
        todo = [i for i in range(len(storeds)) if depth[i] > want[i]]
        keys = [storeds[i].steps[depth[i] - 1].group for i in todo]
        for group, members in _buckets([storeds[i] for i in todo], keys).items():
            index = [todo[m] for m in members]
            ranks = storeds[index[0]].steps[depth[index[0]] - 1].ranks
            flat = torch.cat([out[i].reshape(-1) for i in index])
            whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(flat, ranks, group)).view(ranks, -1)
            start = 0
            for i in index:
                at, shape = storeds[i].steps[depth[i] - 1].at, tuple(out[i].shape)
                n = out[i].numel()
                piece = whole[:, start : start + n].reshape(ranks, *shape).movedim(0, at)
                piece = piece.reshape(*shape[:at], ranks * shape[at], *shape[at + 1 :])
                out[i] = piece.narrow(at, 0, storeds[i].shape(depth[i] - 1)[at]).contiguous()
                start += n
        depth = [d - 1 if d > w else d for d, w in zip(depth, want, strict=True)]
    return out


@dataclass(frozen=True)
class Sums:
    """Over which groups a parameter's local gradients must be summed: the mesh dims on which they are partial
    sums (`dims`), and further group names (`tp%2` for shared KV heads, `pp@0+3` for ties)."""

    dims: tuple[str, ...]
    extra: tuple[str, ...] = ()


def reduce_early(storeds: Sequence[Stored], grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Local gradients -> the `grads` shards (the REDUCE action of one microbatch)."""
    return _reduce_scatter(storeds, grads, [0] * len(storeds), [s.grads for s in storeds], dtype)


def reduce_final(
    storeds: Sequence[Stored], sums: Sequence[Sums], grads: Sequence[Tensor], mesh: Mesh, dtype: torch.dtype
) -> list[Tensor]:
    """Accumulated gradients (after the `grads` cuts) -> optimizer shards, summed over everything."""
    out = _reduce_scatter(storeds, grads, [s.grads for s in storeds], [len(s.steps) for s in storeds], dtype)
    pending = [
        [
            g
            for g in (
                ".".join(mesh.ordered(d for d in one.dims if all(d not in st.group.split(".") for st in s.steps))),
                *one.extra,
            )
            if g
        ]
        for s, one in zip(storeds, sums, strict=True)
    ]
    while any(pending):
        todo = [i for i, groups in enumerate(pending) if groups]
        for group, members in _buckets([storeds[i] for i in todo], [pending[i][0] for i in todo]).items():
            index = [todo[m] for m in members]
            flat = torch.cat([out[i].reshape(-1) for i in index])
            flat = _c10d.wait_tensor(_c10d.all_reduce(flat, "sum", for_reductions(group)))
            for i, piece in zip(index, flat.split([out[i].numel() for i in index]), strict=True):
                out[i] = piece.view(out[i].shape)
        pending = [groups[1:] for groups in pending]
    return out


def _reduce_scatter(
    storeds: Sequence[Stored], grads: Sequence[Tensor], depth: list[int], want: list[int], dtype: torch.dtype
) -> list[Tensor]:
    out = [g.to(dtype) for g in grads]
    while any(d < w for d, w in zip(depth, want, strict=True)):
        todo = [i for i in range(len(storeds)) if depth[i] < want[i]]
        keys = [storeds[i].steps[depth[i]].group for i in todo]
        for group, members in _buckets([storeds[i] for i in todo], keys).items():
            index = [todo[m] for m in members]
            ranks = storeds[index[0]].steps[depth[index[0]]].ranks
            rows, shapes = [], []
            for i in index:
                at, g = storeds[i].steps[depth[i]].at, out[i]
                shape = storeds[i].shape(depth[i] + 1)
                missing = ranks * shape[at] - g.shape[at]
                if missing:  # padding by nothing is a copy
                    g = F.pad(g, [p for j in reversed(range(g.ndim)) for p in (0, missing * (j == at))])
                rows.append(g.reshape(*shape[:at], ranks, *shape[at:]).movedim(at, 0).reshape(ranks, -1))
                shapes.append(shape)
            flat = torch.cat(rows, 1).reshape(-1)
            mine = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "sum", ranks, for_reductions(group)))
            for i, piece, shape in zip(index, mine.split([r.shape[1] for r in rows]), shapes, strict=True):
                out[i] = piece.view(shape)
        depth = [d + 1 if d < w else d for d, w in zip(depth, want, strict=True)]
    return out
