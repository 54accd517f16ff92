"""The end of a step: one all-reduce for everything the ranks must agree on, then AdamW on local shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain import optim
from dtrain.axes import inherit
from dtrain.program.interpret import Place, Weights, owned, owns_for_norm
from dtrain.program.lower import Program


@dataclass
class State:
    """What a rank carries from step to step, and what a checkpoint holds of it (but `weights.rest`)."""

    weights: Weights
    moments: optim.AdamwState
    scale: dict[str, Tensor] | None  # dynamic loss scaling, fp16 only


@dataclass(frozen=True)
class UpdateConfig:
    adamw: optim.Adamw
    clip: float | None
    scaling: optim.LossScaling | None = None


@dataclass(frozen=True)
class Report:
    """A step as all ranks agree on it: global loss and gradient norm (before clipping), whether the update was
    skipped because one of them is not finite, and whether a rank was asked to stop."""

    loss: float
    norm: float
    skipped: bool
    stop: bool


def counts_loss(program: Program, place: Place) -> bool:
    """Of the ranks that computed the same part of the loss, whether this one reports it."""
    table = inherit(program.job.compute)
    split = {d for axis in ("batch", "seq") for d in table.get(axis, ())} | {"pp"}
    return all(place.at[d] == 0 for d in place.mesh.dims if d not in split)


def agree(place: Place, values: list[float | Tensor]) -> Tensor:
    """Sum a few numbers over the world, in float64."""
    f64: dict[str, Any] = {"dtype": torch.float64, "device": place.device}
    vector = torch.stack([v.to(**f64) if isinstance(v, Tensor) else torch.full((), v, **f64) for v in values])
    return all_reduce(place, vector, "world")


def all_reduce(place: Place, x: Tensor, group: str) -> Tensor:
    if group not in place.groups:
        return x
    c10d = torch.ops._c10d_functional
    out: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
    return out


def make_update(
    program: Program,
    place: Place,
    state: State,
    config: UpdateConfig,
    lr: float,
    stop: Callable[[], bool],
    tell: Callable[[Report], None],
) -> Callable[[dict[str, Tensor], Tensor], Mapping[str, Tensor]]:
    """The function for `Step.update`: clips, updates `state` in place and tells the Report.

    A norm or loss that is not finite leaves weights, moments and step count as they were.
    """
    apply = on_device(program, place, state, config)

    def update(grads: dict[str, Tensor], loss: Tensor) -> Mapping[str, Tensor]:
        tell(report(apply(grads, loss, lr, float(stop()))))
        return state.weights.masters

    return update


def on_device(
    program: Program, place: Place, state: State, config: UpdateConfig
) -> Callable[[dict[str, Tensor], Tensor, float | Tensor, float | Tensor], Tensor]:
    """The same as work for the device alone, which nothing waits for: a function of gradient shards, this rank's part
    of the loss, the learning rate and whether it was asked to stop (0 or 1), that updates `state` and returns what
    `report` reads."""
    stored = owned(program, place.units)
    counted = [owns_for_norm(program, place, path, s) for path, (s, _, _) in stored.items()]
    reports_loss = counts_loss(program, place)

    def apply(grads: dict[str, Tensor], loss: Tensor, lr: float | Tensor, stop: float | Tensor) -> Tensor:
        mine = [grads[p] for p in stored]
        mine_once = [g for g, c in zip(mine, counted, strict=True) if c]
        norms = torch._foreach_norm(mine_once) if mine_once else [torch.zeros((), device=place.device)]
        square = torch.stack(list(norms)).double().square().sum()
        total = agree(place, [square, loss if reports_loss else 0.0, stop])
        one = torch.ones((), dtype=torch.float64, device=place.device)
        scale = state.scale["scale"].double() if state.scale is not None else one
        norm = total[0].sqrt() / scale
        skip = ~torch.isfinite(norm + total[1])
        masters = list(state.weights.masters.values())
        optim.update(
            config.adamw,
            masters,
            mine,
            state.moments,
            [s.param.decay for s, _, _ in stored.values()],
            lr,
            scale * optim.clip_scale(norm, config.clip),
            skip,
        )
        if state.scale is not None and config.scaling is not None:
            state.scale = optim.scale_update(config.scaling, state.scale, skip)
        return torch.stack([total[1], norm, skip.double(), total[2]])

    return apply


def report(told: Tensor) -> Report:
    """What `on_device` returned, for the host; waits for it."""
    loss, norm, skipped, stop = told.tolist()
    return Report(loss, norm, skipped > 0, stop > 0)
