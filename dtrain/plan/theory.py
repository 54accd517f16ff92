"""Bytes that a rank sends in a step, from the layout alone: the tables of `layouts/README.md` as code.

Nothing here looks at a graph or an action list: sizes, rules and counts go into the formulas of a ring. It is what
`dtrain.plan.ledger`, which reads the program, is held to. The models are the families of `dtrain.models`: a block has
two sublayers, each between a `constrain` to the whole sequence and one back to its shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dtrain import layout as layouts
from dtrain.axes import Param, inherit, padded, parse
from dtrain.layout import Layout
from dtrain.layout.derived import tables
from dtrain.program.schedule import compute_order

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
# Parameters that no dim of tp cuts and that are used on shards of the sequence, so each rank has a part of their
# gradient. The others that are whole over tp (BERT's pooler) see the whole sequence.
ON_SHARDS = (
    *("norm", "norm_bias", "norm_attn", "norm_attn_bias", "norm_mlp", "norm_mlp_bias", "bo", "b_down"),
    *("positions", "types", "w_mlm", "b_mlm", "norm_mlm", "norm_mlm_bias"),
)


@dataclass(frozen=True)
class Term:
    """One row of the README's tables at one dim: what, in which phase of the step, and bytes that a rank sends."""

    row: str
    phase: str
    dim: str
    bytes: float


def theory(layout: Layout, pp: int = 0) -> list[Term]:
    """The terms of a rank at a pipeline coordinate. Raises ValueError for a model or a `remat` without a formula."""
    if layout.model.file is not None:
        raise ValueError(f"no formula says what a layer of model.file {layout.model.file!r} moves; use a family")
    if layout.run.remat not in ("none", "selective", "full"):
        raise ValueError(f"run.remat {layout.run.remat!r} has no formula; use none, selective or full")
    part = _part(layout, pp)
    return [t for t in [*_weights(part), *_activations(part), *_pipeline(part), *_agreements(part)] if t.bytes]


def by_dim(terms: Iterable[Term]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by mesh dim."""
    out: dict[str, float] = {}
    for t in terms:
        out[t.dim] = out.get(t.dim, 0.0) + t.bytes
    return out


def by_dim_and_phase(terms: Iterable[Term]) -> dict[tuple[str, str], float]:
    """The same by dim and phase."""
    out: dict[tuple[str, str], float] = {}
    for t in terms:
        out[t.dim, t.phase] = out.get((t.dim, t.phase), 0.0) + t.bytes
    return out


# ------------------------------------------------------------------------------------------- what a rank has


@dataclass(frozen=True)
class _Part:
    """A pipeline coordinate's part: its stages, its number of layers, whether it has the ends of the model."""

    layout: Layout
    module: Any
    config: Any
    pp: int
    owner: tuple[int, ...]  # the coordinate of each stage
    layers: dict[int, int]  # of each stage here
    microbatches: int

    @property
    def embed(self) -> bool:
        return self.owner[0] == self.pp

    @property
    def head(self) -> bool:
        return self.owner[-1] == self.pp

    @property
    def tied_across(self) -> bool:
        return self.owner[0] != self.owner[-1]

    def dims(self, table: str, axis: str) -> tuple[str, ...]:
        """The dims above 1 that a table gives an axis, in mesh order."""
        wanted = inherit(getattr(tables(self.layout), table)).get(axis, ())
        return tuple(d for d, m in self.layout.mesh.items() if d in wanted and m.size > 1)

    def size(self, dims: Iterable[str]) -> int:
        return math.prod(self.layout.sizes[d] for d in dims)

    def ring(self, row: str, phase: str, dims: Iterable[str], bytes: float) -> list[Term]:
        """A gather or reduce-scatter of a tensor of `bytes` over dims, outermost first: inner dims move the whole,
        outer ones what is left of it."""
        out = []
        for d in reversed(tuple(dims)):
            n = self.layout.sizes[d]
            out.append(Term(row, phase, d, (n - 1) / n * bytes))
            bytes /= n
        return out

    def all_reduce(self, row: str, phase: str, dims: Iterable[str], bytes: float) -> list[Term]:
        return self.ring(row, phase, dims, 2 * bytes)


def _part(layout: Layout, pp: int) -> _Part:
    module, config = layouts.family(layout)
    owner = tuple(layouts.pp_of(layout, s) for s in range(layouts.stages(layout)))
    layers = {s: n for s, n in enumerate(layouts.stage_layers(layout)) if owner[s] == pp}
    return _Part(layout, module, config, pp, owner, layers, layouts.microbatches(layout))


# ---------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class _Cuts:
    """A parameter on a rank: its shape in compute, and the cuts of storage, each (position, dims): the first `rest`
    of them from `params`, the first `grads` those of the accumulator. `share` ranks hold the same KV heads."""

    shape: tuple[int, ...]
    steps: tuple[tuple[int, tuple[str, ...]], ...]
    rest: int
    grads: int
    share: int


def _cuts(part: _Part, p: Param) -> _Cuts:
    shape, share = list(p.shape), 1
    for i, axis in enumerate(p.axes):
        n = part.size(part.dims("compute", axis))
        share = max(share, n // shape[i]) if axis == "kv_heads" else share
        shape[i] = max(1, shape[i] // n)

    def steps(table: str, known: str) -> list[tuple[int, tuple[str, ...]]]:
        each = [
            (i, tuple(d for d in part.dims(table, a) if d not in part.dims(known, a))) for i, a in enumerate(p.axes)
        ]
        return [(i, dims) for i, dims in each if dims]

    rest = steps("params", "compute")
    cut = [*rest, *((i, dims) for i, dims in steps("optimizer", "params"))]
    grads = 0
    while grads < len(cut) and set(cut[grads][1]) <= set(part.dims("grads", p.axes[cut[grads][0]])):
        grads += 1
    return _Cuts(tuple(shape), tuple(cut), len(rest), grads, share)


def _weights(part: _Part) -> list[Term]:
    lay, M = part.layout, part.microbatches
    narrow, wide = BYTES[lay.run.precision], 8 if lay.run.precision == "fp64" else 4
    seq_cut = "tp" in part.dims("compute", "res_seq")
    tree = part.module.params(part.config)
    tied = {p.tied_to for params in tree.values() for p in params.values() if p.tied_to}
    out: list[Term] = []
    for stage, layers in part.layers.items():
        times = {"embed": int(stage == 0), "block": layers, "head": int(stage == len(part.owner) - 1)}
        for segment, params in tree.items():
            gathers = _gathers(part, stage, segment)
            cuts = {name: _cuts(part, padded(p, layouts.pad(lay))) for name, p in params.items()}
            for name, p in params.items():
                terms: list[Term] = []
                c = cuts[name]
                # Bytes of the whole tensor that each cut's gather gives and its reduce-scatter takes, an element at 1.
                whole, shape = [], c.shape
                for i, dims in c.steps:
                    n = part.size(dims)
                    shape = tuple(-(-x // n) if j == i else x for j, x in enumerate(shape))
                    whole.append(n * math.prod(shape))
                shard = math.prod(shape)
                owned = p.tied_to is None or part.tied_across
                for k, (_, dims) in enumerate(c.steps):
                    if k < c.rest:
                        out += part.ring("gathers of weights", "unshard", dims, gathers * whole[k] * narrow)
                    elif owned:
                        terms += part.ring("gathers of weights", "publish", dims, whole[k] * narrow)
                    if k < c.grads:
                        terms += part.ring("reductions of gradients", "reduce", dims, M * whole[k] * wide)
                    elif owned:
                        terms += part.ring("reductions of gradients", "reduce", dims, whole[k] * wide)
                if owned:
                    spent = {d for _, dims in c.steps for d in dims}
                    left = {d for d in part.dims("compute", "batch") if d not in spent}
                    left |= {"tp"} if seq_cut and name in ON_SHARDS else set()
                    ordered = tuple(d for d in lay.mesh if d in left)
                    terms += part.all_reduce("reductions of gradients", "reduce", ordered, shard * wide)
                    if c.share > 1:
                        share = 2 * (c.share - 1) / c.share * shard * wide
                        terms.append(Term("shared KV heads", "reduce", "tp", share))
                    if part.tied_across and (p.tied_to or f"{segment}/{name}" in tied):
                        terms.append(Term("tied table", "reduce", "pp", shard * wide))
                out += [Term(t.row, t.phase, t.dim, times[segment] * t.bytes) for t in terms]
    return out


def _gathers(part: _Part, stage: int, segment: str) -> int:
    """How many times a step gathers weights of a segment on a stage, all its layers together: each once; as often as a
    forward finds no microbatch in flight there; or before each forward, backward and half of a backward, but not where
    the same layer is used twice in a row, as when a stage ends a backward and begins a forward. The head's uses are one
    a microbatch."""
    lay, layers = part.layout, part.layers[stage]
    embed, head = int(stage == 0), int(stage == len(part.owner) - 1)
    count = {"embed": embed, "block": layers, "head": head}[segment]
    if lay.unshard.keep == "step":
        return count
    if segment == "head":
        return count * part.microbatches

    def path(kind: str) -> list[str]:
        """The layers that a compute goes through; only its ends matter."""
        down = ["embed"] * embed + [f"block {i}" for i in range(layers)]
        return down if kind == "F" else (down + ["head"] * (head and kind != "W"))[::-1]

    order = compute_order(lay.pipeline.schedule, lay.sizes["pp"], lay.pipeline.chunks or 1, part.microbatches)[part.pp]
    found = flying = 0
    before: tuple[int, str] = (-1, "")  # the stage and layer used last
    for kind, s, _ in order:
        if s == stage:
            through = path(kind)
            fresh = lay.unshard.keep == "use" or (kind == "F" and flying == 0)
            again = before == (s, through[0]) and through[0].startswith(segment)
            found += fresh * (count - again)
            flying += {"F": 1, "I": 0}.get(kind, -1)
        before = (s, path(kind)[-1]) if s == stage else (-1, "")
    return found


# ------------------------------------------------------------------------------------------------ activations


def _activations(part: _Part) -> list[Term]:
    """The rows of tp. In units of (n-1)/n A: a gather or a reduce-scatter is 1, an all-reduce 2."""
    lay, M, cfg = part.layout, part.microbatches, part.config
    remat, post = lay.run.remat, getattr(cfg, "norm", "") == "post"
    seq_cut = "tp" in part.dims("compute", "res_seq")
    cut = {a: "tp" in part.dims("compute", a) for a in ("heads", "mlp", "vocab")}
    tokens = lay.data.microbatch * lay.data.seq
    A = tokens * cfg.embed * BYTES[lay.run.precision]
    wide = 8 if lay.run.precision == "fp64" else 4
    out: list[Term] = []

    def tp(row: str, phase: str, units: int, bytes: float) -> None:
        out.extend(part.ring(row, phase, ("tp",) if part.size(["tp"]) > 1 else (), M * units * bytes))

    total = 1 if seq_cut else 2  # a sum over ranks: of which each keeps its shard, or all
    layers = sum(part.layers.values())
    for axis, is_last in (("heads", False), ("mlp", True)):
        # With res_seq: gather, work, sum; backward mirrors it. Without: work, sum; backward sums at the other end.
        once = seq_cut + cut[axis] * total
        tp("layer", "forward", layers * once, A)
        tp("layer", "backward", layers * once, A)
        if remat != "none":
            tp("layer: gathers of forward again", "backward", layers * seq_cut, A)
        if remat == "full" and (post or not is_last):  # the last sum is nobody's input, but a norm's
            tp("layer: sums of forward again", "backward", layers * cut[axis] * total, A)
    if part.embed:
        tp("embedding", "forward", cut["vocab"] * total, A)
        tp("embedding", "backward", int(seq_cut), A)
        if remat == "full" and post:
            tp("embedding", "backward", cut["vocab"] * total, A)
    if part.head:  # forward and backward in one
        tp("head", "backward", seq_cut + cut["vocab"] * total, A)
        # A maximum, a sum of exponentials and the label's logit of each token.
        tp("loss", "backward", 2 * cut["vocab"], 3 * tokens * wide)
        if "order" in part.module.BATCH:  # BERT's first token, from the rank that has it
            tp("first token", "backward", 2 * seq_cut, A / lay.data.seq)
    return out


def _pipeline(part: _Part) -> list[Term]:
    lay = part.layout
    shards = part.size(part.dims("compute", "res_seq"))
    A = lay.data.microbatch * lay.data.seq * part.config.embed * BYTES[lay.run.precision] / shards
    ends = [other for stage in part.layers for other in (stage - 1, stage + 1) if 0 <= other < len(part.owner)]
    crossed = sum(part.owner[other] != part.pp for other in ends)
    return [Term("pipeline", "pipeline", "pp", part.microbatches * crossed * A)]


def _agreements(part: _Part) -> list[Term]:
    fields = part.module.BATCH.items()
    one = {name: torch.zeros([1] * len(parse(axes)[0]), dtype=torch.int64) for name, axes in fields}
    terms = len(part.module.counts(part.config, one)) if part.head else 0
    world = tuple(d for d, m in part.layout.mesh.items() if m.size > 1)
    return [
        *part.all_reduce("labels counted", "forward", part.dims("compute", "batch"), 8 * terms),
        *part.all_reduce("norm, loss, stop", "update", world, 3 * 8),
    ]
