"""The equality tests can fail: faults planted in the system, each caught by the layouts of the default suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equality
import pytest
import torch
from torch import Tensor

from dtrain import ops, storage, verify
from dtrain.axes import Here
from dtrain.program import interpret, lower, schedule, update
from dtrain.storage import Sums

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def dropped_reduction(patch: Patch) -> None:
    """Norm gradients are not summed over tp under sequence parallelism."""
    right = lower._sums

    def sums(*args: Any) -> Sums:
        s = right(*args)
        return dataclasses.replace(s, dims=tuple(d for d in s.dims if d != "tp"))

    patch.setattr(lower, "_sums", sums)


def norm_counted_twice(patch: Patch) -> None:
    """Replicated parameters count once a copy in the gradient norm."""
    patch.setattr(update, "owns_for_norm", lambda *args: True)


def bf16_reduce(patch: Patch) -> None:
    """Gradients are reduced in bf16."""
    right = storage.reduce_final

    def reduce(storeds: Any, sums: Any, grads: Any, mesh: Any, dtype: torch.dtype) -> list[Tensor]:
        return [g.to(dtype) for g in right(storeds, sums, grads, mesh, torch.bfloat16)]

    patch.setattr(storage, "reduce_final", reduce)


def wrong_kv_slice(patch: Patch) -> None:
    """Ranks that share KV heads hold them round robin instead of in blocks."""
    right = storage.spans

    def spans(s: Any, mesh: Any, at: Mapping[str, int], steps: int) -> Any:
        if s.share > 1:
            (dim,) = s.cut[s.param.axes.index("kv_heads")]
            held = mesh.size(dim) // s.share
            at = {**at, dim: at[dim] % held * s.share + at[dim] // held}
        return right(s, mesh, at, steps)

    patch.setattr(storage, "spans", spans)


def mean_per_rank(patch: Patch) -> None:
    """Each microbatch's loss is divided by its own valid count and averaged."""
    right = interpret.run

    def run(bound: Any, weights: Any, step: Any) -> Tensor:
        module, cfg = bound.program.job.module, bound.program.job.config
        mine = module.counts(cfg, step.batch(0))
        parts = max(a.mb for a in bound.actions) + 1
        for d in ("dp", "fsdp"):
            parts *= bound.place.mesh.size(d)
        step = dataclasses.replace(step, counts={k: (v * parts).clamp(min=1) for k, v in mine.items()})
        return right(bound, weights, step)

    patch.setattr(verify, "run", run)


def vocabulary_offset(patch: Patch) -> None:
    """Every rank looks its labels up in the first part of the vocabulary."""
    right = ops.cross_entropy

    def loss(here: Here, *args: Any) -> Tensor:
        return right(dataclasses.replace(here, offset=lambda axis: 0), *args)

    patch.setattr(ops, "cross_entropy", loss)


def padding_in_softmax(patch: Patch) -> None:
    """Padded classes take part in the softmax."""
    right = ops.cross_entropy
    patch.setattr(ops, "cross_entropy", lambda here, z, y, vocab: right(here, z, y, 1 << 20))


def dropout_by_microbatch(patch: Patch) -> None:
    """Dropout is keyed by the row in the microbatch instead of the global sample."""
    right = ops.dropout

    def dropout(here: Here, x: Tensor, axes: str, sample_B: Tensor, *args: Any, **more: Any) -> Tensor:
        return right(here, x, axes, torch.arange(sample_B.shape[0]), *args, **more)

    def keyword(
        here: Here, x: Tensor, axes: str = "", sample_B: Tensor | None = None, *args: Any, **more: Any
    ) -> Tensor:
        assert sample_B is not None
        return dropout(here, x, axes, sample_B, *args, **more)

    patch.setattr(ops, "dropout", keyword)


def untied_gradients(patch: Patch) -> None:
    """The two stages that hold a tied table do not add their gradients."""
    right = lower._sums

    def sums(*args: Any) -> Sums:
        s = right(*args)
        return dataclasses.replace(s, extra=tuple(g for g in s.extra if "@" not in g))

    patch.setattr(lower, "_sums", sums)


def a_microbatch_twice(patch: Patch) -> None:
    """The last microbatch sees the first one's samples."""
    right = interpret.run

    def run(bound: Any, weights: Any, step: Any) -> Tensor:
        lost = max(a.mb for a in bound.actions)
        batch = step.batch
        step = dataclasses.replace(step, batch=lambda mb: batch(0 if mb == lost else mb))
        return right(bound, weights, step)

    patch.setattr(verify, "run", run)


def divided_by_replicas(patch: Patch) -> None:
    """Gradients are averaged over the replicas although the loss has the global count already."""
    right = storage.reduce_final

    def reduce(storeds: Any, sums: Any, grads: Any, mesh: Any, dtype: torch.dtype) -> list[Tensor]:
        return [g / mesh.size("dp") for g in right(storeds, sums, grads, mesh, dtype)]

    patch.setattr(storage, "reduce_final", reduce)


def forgotten_replicas(patch: Patch) -> None:
    """With dp outside fsdp, gradients are summed over fsdp only."""
    right = lower._sums

    def sums(*args: Any) -> Sums:
        s = right(*args)
        return dataclasses.replace(s, dims=tuple(d for d in s.dims if d != "dp"))

    patch.setattr(lower, "_sums", sums)


def decayed_norms(patch: Patch) -> None:
    """Weight decay reaches norms and biases."""
    right = update.optim.update

    def step(cfg: Any, masters: Any, grads: Any, state: Any, decays: Any, *args: Any) -> None:
        right(cfg, masters, grads, state, [True] * len(decays), *args)

    patch.setattr(update.optim, "update", step)


def shards_of_floor(patch: Patch) -> None:
    """A shard starts where an unpadded one would."""
    right = storage.spans

    def spans(s: Any, mesh: Any, at: Mapping[str, int], steps: int) -> Any:
        out = list(right(s, mesh, at, steps))
        for step in s.steps[:steps]:
            span = out[step.at]
            if s.local[step.at] % step.ranks:
                start = max(0, span.start - 1)
                out[step.at] = dataclasses.replace(span, start=start, stop=max(start, span.stop - 1))
        return tuple(out)

    patch.setattr(storage, "spans", spans)


def has(*dims: str, family: str | None = None) -> Callable[[equality.Triple], bool]:
    return lambda t: set(dims) <= {d for d, _ in t[0]} and family in (None, t[2])


MUTANTS: list[tuple[Mutant, Callable[[equality.Triple], bool]]] = [
    (dropped_reduction, has("tp")),
    (norm_counted_twice, has("tp", "dp")),
    (bf16_reduce, has("tp")),
    (wrong_kv_slice, has("tp", family="llama")),
    (mean_per_rank, has("dp")),
    (vocabulary_offset, has("tp")),
    (padding_in_softmax, has("tp")),
    (dropout_by_microbatch, has("dp", family="gpt2")),
    (untied_gradients, has("pp", family="llama")),
    (a_microbatch_twice, has("fsdp")),
    (divided_by_replicas, has("dp")),
    (forgotten_replicas, has("dp", "fsdp")),
    (decayed_norms, has("tp", "dp")),
    (shards_of_floor, has("pp", "fsdp")),
]


def noticed(triple: equality.Triple) -> bool:
    """Whether the default suite's case of this triple fails."""
    case = equality.draw_case(triple, equality.chooser(triple, lambda n: 0))
    try:
        equality.check(case)
    except (AssertionError, RuntimeError, KeyError):  # wrong, or ranks that lost each other
        return True
    return False


@pytest.mark.parametrize(("mutant", "where"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant, where: Callable[[equality.Triple], bool], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert any(noticed(t) for t in equality.triples() if where(t))


def test_a_swapped_transfer_is_caught(monkeypatch: Patch) -> None:
    """Two microbatches cross between stages in the wrong order."""
    right = schedule._with_transfers

    def swapped(*args: Any, **more: Any) -> Any:
        lists = right(*args, **more)
        for actions in lists:
            at = [i for i, a in enumerate(actions) if a.kind == "RECV" and a.what == "act"]
            if len(at) > 1:
                i, j = at[:2]
                a, b = actions[i], actions[j]
                actions[i], actions[j] = dataclasses.replace(a, mb=b.mb), dataclasses.replace(b, mb=a.mb)
        return lists

    monkeypatch.setattr(schedule, "_with_transfers", swapped)
    gpipe = [t for t in equality.triples() if has("pp")(t) and t[1] == "gpipe"]
    assert any(noticed(t) for t in gpipe)
