"""Text, a token at a time: a model's own segments over a cache of keys and values, and the choice of the next token.

Segments know nothing of the cache. It comes in where they touch the machine: inside an island `here.offset("seq")` is
the position at which the piece begins, and `here.cached` joins its keys and values to those of the pieces before it.

Shapes: V vocabulary; a sequence is a batch of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dtrain import rng
from dtrain.axes import Here, On
from dtrain.rng import Key


class GenerateError(ValueError):
    """A model cannot generate text; one line for a person."""


@dataclass(frozen=True)
class Decoder:
    """A model as one rank computes it. `units` are the parameters of embed, of every block and of the head, by name;
    `on` is the machine, and `lift` puts a tensor there that all ranks have alike. `whole` makes a plain tensor of what
    the ranks hold together. `vocab` says how many tokens may be drawn, from 0 on."""

    module: ModuleType
    cfg: Any
    units: Sequence[Mapping[str, Any]]
    on: On
    vocab: int
    lift: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    whole: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    device: str = "cpu"


@dataclass
class Cache:
    """What attention has seen: the number of positions so far and, by layer and by call of attention in that layer,
    this rank's keys and values of them all, each `batch seq kv_heads head_dim`."""

    length: int = 0
    pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)


def continued(on: On, cache: Cache, layer: int) -> On:
    """The machine, for a piece of a sequence that goes on where the cache ends, in one of its layers."""
    start, calls = cache.length, itertools.count()

    def cached(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        at = layer, next(calls)
        if start:
            before = cache.pairs[at]
            k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        cache.pairs[at] = k, v
        return k, v

    def island(fn: Callable[..., Tensor], in_axes: tuple[str, ...], out_axes: str) -> Callable[..., Tensor]:
        def resumed(here: Here, *args: Tensor) -> Tensor:
            def offset(axis: str) -> Tensor | int:
                return start if axis in ("seq", "res_seq") else here.offset(axis)

            return fn(replace(here, offset=offset, cached=cached), *args)

        return on.island(resumed, in_axes, out_axes)

    return replace(on, island=island)


def check(module: ModuleType, cfg: Any, name: str) -> Any:
    """The config to generate with: without dropout and without masks of documents. Raises GenerateError for a model
    called `name` that predicts no next token."""
    others = [f for f in module.BATCH if f not in ("tokens", "labels", "sample")]
    if others:
        raise GenerateError(
            f"{name} generates no text: it reads {', '.join(others)} besides tokens and learns masked "
            "tokens from both sides, so it has no next token to tell; use a llama, a gpt2 or a causal model of your own"
        )
    if not hasattr(module, "logits"):
        raise GenerateError(f"{name} generates no text: its file has no logits(cfg, p, x, on) -> batch seq vocab")
    given = {"dropout": 0.0, "attention_dropout": 0.0, "document_mask": False}
    return replace(cfg, **{k: v for k, v in given.items() if hasattr(cfg, k)})


def scores(model: Decoder, tokens: Sequence[int], cache: Cache) -> Tensor:
    """The scores (V,), fp32 or float64, of what follows `tokens`, which follow what is in the cache and are added to
    it: any number for an empty cache, then one at a time. Raises GenerateError for a model that does not use it."""
    module, cfg, layers = model.module, model.cfg, len(model.units) - 2
    given = torch.tensor([tokens], device=model.device)
    batch = {"tokens": given, "labels": given, "sample": torch.zeros(1, dtype=torch.int64, device=model.device)}
    batch = {name: model.lift(batch[name]) for name in module.BATCH}
    key = Key(*(torch.zeros((), dtype=torch.int64, device=model.device) for _ in range(3)))
    x = module.embed(cfg, model.units[0], batch, key, continued(model.on, cache, -1))
    for layer in range(layers):
        x = module.block(cfg, model.units[1 + layer], x, batch, key, continued(model.on, cache, layer))
        if not any(at == layer for at, _ in cache.pairs):
            raise GenerateError(
                f"{module.__file__}: block attends without a cache; write k, v = here.cached(k, v) in its island, once "
                "positions are in k and before ops.attention"
            )
    cache.length += len(tokens)
    out = model.whole(module.logits(cfg, model.units[-1], x[:, -1:], model.on))[0, -1, : model.vocab]
    return out if out.dtype == torch.float64 else out.float()


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn. At `temperature` 0 it is the likeliest. Above, scores are divided by it, only the
    `top_k` best stay (and what equals the last of them), of these the fewest that have `top_p` of the probability
    (Holtzman et al. 2020), and one is drawn. A draw is a function of `seed`, of the prompt's number and of the
    position."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def keep(scores_V: Tensor, how: Choice) -> Tensor:
    """Scores divided by the temperature, -inf where a token may not be drawn."""
    out = scores_V / how.temperature
    if how.top_k is not None and how.top_k < len(out):
        out = out.masked_fill(out < out.topk(how.top_k).values[-1], -math.inf)
    if how.top_p is not None:
        best, order = out.sort(descending=True, stable=True)
        before = best.softmax(-1).cumsum(-1) - best.softmax(-1)  # the probability of all that are better
        out = out.index_fill(0, order[before >= how.top_p], -math.inf)
    return out


def choose(scores_V: Tensor, how: Choice, prompt: int, position: int) -> int:
    """The token at a position, by its scores. Gumbel's trick: the largest of score plus noise is a draw from softmax
    (Gumbel 1954), and the noise of a token is a hash, the same on every rank and device."""
    if how.temperature == 0:
        return int(scores_V.argmax())
    state = torch.tensor(rng.fold_int(rng.fold_int(how.seed, prompt), position), device=scores_V.device)
    noise = rng.uniform(rng.fold(state, torch.arange(len(scores_V), device=scores_V.device)))
    return int((keep(scores_V, how).double() - (-noise.log()).log()).argmax())


def generate(
    model: Decoder,
    prompt: Sequence[int],
    how: Choice,
    most: int,
    stops: Collection[int] = (),
    number: int = 0,
) -> Iterator[int]:
    """At most `most` tokens that follow a prompt (its `number` among several), the first of `stops` being the last."""
    cache, piece = Cache(), list(prompt)
    for position in range(len(prompt), len(prompt) + most):
        piece = [choose(scores(model, piece, cache), how, number, position)]
        yield piece[0]
        if piece[0] in stops:
            return
