"""AdamW over torch's fused kernel, learning-rate schedules, clipping and loss scaling.

Steps count from 1. Everything that a decision hangs on (norm, overflow, scale) is a 0-dim tensor, so that no
step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class Adamw:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019)."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class AdamwState:
    """First and second moments, in the masters' dtype and shapes, and the number of updates (0-dim fp32)."""

    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    step: Tensor


def init(masters: Sequence[Tensor]) -> AdamwState:
    """The state before the first update. `masters` are the fp32 (or fp64) weights that updates go to."""
    zeros = [torch.zeros_like(m, requires_grad=False) for m in masters]
    step = torch.zeros((), dtype=torch.float32, device=masters[0].device if masters else "cpu")
    return AdamwState(zeros, [z.clone() for z in zeros], step)


@torch.no_grad()
def update(
    cfg: Adamw,
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: AdamwState,
    decays: Sequence[bool],
    lr: Tensor | float,
    grad_scale: Tensor,
    skip: Tensor,
) -> None:
    """One step, in place in `masters` and `state`; `grads` are used up (divided in place).

    `decays` says for each master whether weight decay applies (not to norms and biases). Gradients are
    divided by `grad_scale` (0-dim), which carries the loss scale and clipping. Where `skip` (0-dim, bool or
    0/1) is true nothing changes, the step count neither.
    """
    if not masters:
        return
    found = skip.to(torch.float32)
    scale: Tensor | None = grad_scale.to(torch.float32)
    if masters[0].dtype == torch.float64:  # the kernel takes its scale in fp32 only, too coarse here
        torch._foreach_div_(list(grads), grad_scale.to(torch.float64))
        scale = None
    state.step.add_(1 - found)
    for group in (True, False):
        at = [i for i, d in enumerate(decays) if d == group]
        if not at:
            continue
        torch._fused_adamw_(
            [masters[i] for i in at],
            [grads[i] for i in at],
            [state.exp_avg[i] for i in at],
            [state.exp_avg_sq[i] for i in at],
            [],
            [state.step] * len(at),  # the kernel only reads it
            lr=lr,
            beta1=cfg.beta1,
            beta2=cfg.beta2,
            weight_decay=cfg.weight_decay if group else 0.0,
            eps=cfg.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found,
        )


@dataclass(frozen=True)
class Schedule:
    """A learning rate for every step: `warmup` steps up to `lr`, then the named shape down to `min_lr` at
    step `length`, and `min_lr` after it. `length` is the schedule's own: a run that stops early keeps its
    rates. `decay` is the number of steps of wsd's final, linear fall. `constant` needs neither."""

    name: Literal["constant", "linear", "cosine", "wsd"]
    lr: float
    warmup: int = 0
    length: int = 0
    decay: int = 0
    min_lr: float = 0.0


def lr_at(cfg: Schedule, step: int) -> float:
    """The learning rate of a step (the first is 1): a pure function, so resuming needs only the step."""
    if step < cfg.warmup:
        return cfg.lr * step / cfg.warmup
    if cfg.name == "constant":
        return cfg.lr
    begin = cfg.warmup if cfg.name != "wsd" else max(cfg.warmup, cfg.length - cfg.decay)
    if step <= begin:
        return cfg.lr
    if step >= cfg.length:
        return cfg.min_lr
    t = (step - begin) / (cfg.length - begin)
    share = 0.5 * (1 + math.cos(math.pi * t)) if cfg.name == "cosine" else 1 - t
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * share


def clip_scale(norm: Tensor, max_norm: float | None) -> Tensor:
    """What gradients of this global norm must be divided by to have at most `max_norm` (0-dim, at least 1; 1
    without a limit). NaN stays NaN: such a step has to be skipped or stopped, not clipped."""
    return torch.ones_like(norm) if not max_norm else torch.clamp(norm / max_norm, min=1.0)


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018): x `growth` after `every` good steps in a row,
    x `backoff` after an overflow, kept within `least` and `most`."""

    start: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    every: int = 2000
    least: float = 1.0
    most: float = 16777216.0


def scale_init(cfg: LossScaling, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The state, which belongs in the checkpoint: `scale` (0-dim fp32) and `good_steps` (0-dim int64)."""
    return {
        "scale": torch.tensor(cfg.start, dtype=torch.float32, device=device),
        "good_steps": torch.zeros((), dtype=torch.int64, device=device),
    }


def scale_update(cfg: LossScaling, state: dict[str, Tensor], overflow: Tensor) -> dict[str, Tensor]:
    """The state after a step; `overflow` (0-dim bool) must be the same on all ranks."""
    overflow = overflow.to(torch.bool)
    good = state["good_steps"] + 1
    grow = ~overflow & (good >= cfg.every)
    scale = torch.where(overflow, state["scale"] * cfg.backoff, state["scale"])
    scale = torch.where(grow, scale * cfg.growth, scale).clamp(cfg.least, cfg.most)
    return {"scale": scale, "good_steps": torch.where(overflow | grow, torch.zeros_like(good), good)}
