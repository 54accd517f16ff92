"""One device: what every layout must equal.

A model's functions called directly, `torch.autograd.grad`, and AdamW as its paper writes it: no lowering, no
pass, no interpreter, no island of ours (the identity `on` runs an island's function on whole tensors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dtrain import rng
from dtrain.axes import ALONE, Param, paths


def key(seed: int, step: int, unit: int) -> rng.Key:
    """The key of one call: `unit` is 0 for embed, 1..layers for the blocks, layers + 1 for the head."""
    return rng.Key(*(torch.tensor(n, dtype=torch.int64) for n in (seed, step, unit)))


def parameters(module: ModuleType, cfg: Any) -> dict[str, Param]:
    """Every parameter that has storage, by path: a tied one lives at the path it is tied to."""
    return {path: p for path, p in paths(module.params(cfg), cfg.layers).items() if p.tied_to is None}


def value(path: str, p: Param, seed: int, dtype: torch.dtype) -> Tensor:
    """A parameter at step 0: a function of the seed, its path and each element's place in its real shape."""
    if p.init.kind == "zeros":
        return torch.zeros(p.shape, dtype=dtype)
    if p.init.kind == "ones":
        return torch.ones(p.shape, dtype=dtype)
    state = rng.fold(torch.tensor(seed, dtype=torch.int64), rng.site_number(path))
    index = torch.arange(math.prod(p.shape)).view(p.shape)
    return (p.init.std * rng.normal(rng.fold(state, index))).to(dtype)


def init(module: ModuleType, cfg: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every stored parameter at step 0, by path."""
    return {path: value(path, p, seed, dtype) for path, p in parameters(module, cfg).items()}


def segments(module: ModuleType, cfg: Any, params: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The parameters of each unit (embed, every block, head), by name, ties followed."""
    tree = module.params(cfg)
    units = ["embed", *(f"block.{i}" for i in range(cfg.layers)), "head"]
    return [
        {name: params[p.tied_to or f"{unit}/{name}"] for name, p in tree[unit.split(".")[0]].items()} for unit in units
    ]


def last_activation(
    module: ModuleType,
    cfg: Any,
    params: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seed: int = 0,
    step: int = 0,
) -> Tensor:
    """What the head receives."""
    first, *blocks, _ = segments(module, cfg, params)
    x: Tensor = module.embed(cfg, first, batch, key(seed, step, 0), ALONE)
    for i, p in enumerate(blocks, 1):
        x = module.block(cfg, p, x, batch, key(seed, step, i), ALONE)
    return x


def logits(module: ModuleType, cfg: Any, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    x = last_activation(module, cfg, params, batch)
    out: Tensor = module.logits(cfg, segments(module, cfg, params)[-1], x, ALONE)
    return out


def loss(
    module: ModuleType,
    cfg: Any,
    params: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seed: int = 0,
    step: int = 0,
    counts: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The loss of a batch; `counts` are the global counts where the batch is only a part of it."""
    counts = module.counts(cfg, batch) if counts is None else counts
    counts = {term: n.clamp(min=1).to(torch.float64) for term, n in counts.items()}
    x = last_activation(module, cfg, params, batch, seed, step)
    head = segments(module, cfg, params)[-1]
    out: Tensor = module.head_and_loss(cfg, head, x, batch, counts, key(seed, step, cfg.layers + 1), ALONE)
    return out


def loss_and_grads(
    module: ModuleType,
    cfg: Any,
    params: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seed: int = 0,
    step: int = 0,
    counts: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and the gradient of every stored parameter (of a tied one: the sum of its uses)."""
    leaves = {path: t.detach().requires_grad_() for path, t in params.items()}
    out = loss(module, cfg, leaves, batch, seed, step, counts)
    grads = torch.autograd.grad(out, list(leaves.values()))
    return out.detach(), dict(zip(leaves, grads, strict=True))


def grad_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients as one vector."""
    return torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()


def adamw(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    moments: Mapping[str, tuple[Tensor, Tensor]] | None,
    decayed: Mapping[str, bool],
    step: int,
    lr: float,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    clip: float | None = None,
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """One update (Loshchilov & Hutter 2019, alg. 2): new parameters and moments. `step` counts from 1."""
    shrink = 1.0 if clip is None else min(1.0, clip / float(grad_norm(grads)))
    new, state = {}, {}
    for path, w in params.items():
        g = grads[path].to(w.dtype) * shrink
        m, v = moments[path] if moments else (torch.zeros_like(w), torch.zeros_like(w))
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat = m / (1 - beta1**step)
        v_hat = v / (1 - beta2**step)
        decay = weight_decay if decayed[path] else 0.0
        new[path] = w - lr * (m_hat / (v_hat.sqrt() + eps) + decay * w)
        state[path] = m, v
    return new, state
