"""What to change in a layout that does not fit: changes that make it fit, each with what it does to the step.

Every change is a layout of its own, checked and predicted as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtrain import layout as layouts
from dtrain.axes import AxesError
from dtrain.hardware import show_size
from dtrain.layout import Layout, LayoutError
from dtrain.layout.errors import divisors
from dtrain.models import ModelError
from dtrain.plan.choice import changes, choice_of
from dtrain.plan.predict import Prediction, predict
from dtrain.plan.seconds import Constants
from dtrain.sharding import LoweringError

ILLEGAL = (LayoutError, AxesError, ModelError, LoweringError)  # what a layout raises that cannot be


@dataclass(frozen=True)
class Advice:
    """A change: `what` in words, `overrides` as on the command line, and the layout's prediction with it. `cost` is its
    step time over that of the layout as it is, less 1: 0.1 is 10 % slower, if the layout did fit."""

    what: str
    overrides: tuple[str, ...]
    predicted: Prediction
    cost: float


def advise(wanted: Prediction, constants: Constants | None = None, most: int = 3) -> tuple[Advice, ...]:
    """Up to `most` changes of different kinds after which a layout fits, the fastest first; none where it fits, or
    where the GPU's memory is not known. Of each kind the mildest that suffices counts. Where too few kinds suffice
    alone, they are tried together with recomputation of every block."""
    if wanted.fits is not False:
        return ()
    layout = wanted.plan.layout
    kinds = list(_kinds(layout, wanted))
    found = [a for what, options in kinds if (a := _first(wanted, what, options, constants))]
    if len(found) < most and layout.run.remat != "full" and not any("run.remat=full" in a.overrides for a in found):
        done = {a.what for a in found}
        for what, options in kinds:
            if what not in done and not any(o[0].startswith("run.remat") for o in options):
                both = [(*o, "run.remat=full") for o in options]
                found += [a] if (a := _first(wanted, f"{what}, every block recomputed", both, constants)) else []
    return tuple(sorted(found, key=lambda a: a.predicted.step_seconds)[:most])


def _first(wanted: Prediction, what: str, options: list[tuple[str, ...]], constants: Constants | None) -> Advice | None:
    """The first of some changes, mildest first, that is legal and fits."""
    for option in options:
        try:
            got = predict(layouts.vary(wanted.plan.layout, option), constants)
        except ILLEGAL:
            continue
        if got.fits:
            return Advice(what, option, got, got.step_seconds / wanted.step_seconds - 1)
    return None


def _kinds(layout: Layout, wanted: Prediction) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Kinds of changes, each in steps, the mildest first. Left out is what cannot free enough of the bytes that are
    held at the peak."""
    choice, sizes = choice_of(layout), layout.sizes
    data = [d for d in ("fsdp", "dp") if sizes[d] > 1]
    peak = wanted.memory[wanted.heaviest]
    missing = -(wanted.margin or 0)
    shrink = peak.peak / (peak.peak - missing)  # how many times less it has to be

    def one(*keys: str) -> list[tuple[str, ...]]:
        return [(key,) for key in keys]

    now = layout.data.microbatch
    smaller = [n for n in divisors(now) if n < now and peak.peak - peak.peak * n / now >= missing]
    if smaller:
        yield "microbatches of fewer sequences", one(*(f"data.microbatch={n}" for n in reversed(smaller)))
    passing = peak.saved + peak.carried + peak.transient
    if layout.run.remat != "full" and passing >= missing:
        # Of what is kept from forward to backward, all but what is missing, and a little less, since the peak moves.
        if peak.saved > missing:
            budget = show_size(0.97 * (peak.saved - missing))
            yield "what fits kept for backward", one(f"run.remat={{budget: {budget}}}")
        yield "more recomputed", one(*(["run.remat=selective"] * (layout.run.remat == "none")), "run.remat=full")
    if sizes["tp"] > 1 and not choice.sequence and passing >= missing:
        yield "sequence parallelism", one("shard.compute.res_seq=tp")
    if sizes["dp"] > 1 and not choice.optimizer and peak.optimizer + peak.parameters >= missing:
        yield "optimizer state over dp (ZeRO-1)", one("shard.optimizer.embed=dp")
    whole = [d for d in data if d not in choice.grads]
    if whole and (sizes["dp"] == 1 or choice.optimizer) and peak.gradients >= missing:
        yield "gradients summed up in shards (ZeRO-2)", one(f"shard.grads.embed=[{', '.join(data)}]")
    if layout.unshard.keep != "use" and sizes["fsdp"] > 1 and peak.gathered >= missing:
        yield "gathered weights freed after each use", one("unshard.keep=use")
    if choice.schedule in ("gpipe", "interleaved", "zero-bubble") and sizes["pp"] > 1 and passing >= missing:
        yield "another schedule", one("pipeline={schedule: 1f1b}", "pipeline={schedule: zbv}")
    at = wanted.plan.train[wanted.heaviest][peak.moment]
    if at.unit == wanted.plan.job.layers + 1 and peak.transient >= missing:  # the peak is in the head
        pieces = layouts.loss_chunks(layout)
        yield "head and loss in more pieces", one(*(f"kernels.loss_chunks={pieces * n}" for n in (4, 16)))
    for dim, what in (("tp", "more tensor parallelism"), ("pp", "more pipeline stages")):
        new = choice if sizes["tp"] > 1 else replace(choice, sequence=True)
        steps = [
            changes(replace(new, **{dim: sizes[dim] * n, source: sizes[source] // n}), layout)  # type: ignore[arg-type]
            for n in (2, 4, 8)
            for source in ("dp", "fsdp", "pp", "tp")
            if n >= shrink and source != dim and sizes[source] % n == 0
        ]
        if steps:
            yield what, steps
    if sizes["dp"] > 1:
        over = replace(choice, dp=1, fsdp=sizes["fsdp"] * sizes["dp"], grads=("fsdp",))
        yield "weights, gradients and optimizer state over dp (ZeRO-3)", [changes(over, layout)]
