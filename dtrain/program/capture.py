"""A rank's whole step as one CUDA graph: recorded once, after steps that warm up, and replayed from then on, so that no
kernel waits for Python to launch it.

A graph repeats the same kernels on the same memory. So what a step is given (its number, the batch, the counts, the
learning rate, whether to stop) is copied to where the recorded step reads it, what it leaves (weights, moments) is kept
where the next one looks, and what the host wants to know is read when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dtrain.program.interpret import Bound, Step, run
from dtrain.program.update import Report, State, UpdateConfig, on_device, report

WARM_STEPS = 3  # kernels are chosen and communicators made; neither can be recorded

# Records work while it is done for the first time, and returns what does it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Record on the current GPU. Other threads may go on meanwhile: one pins memory for the next batch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()  # only recorded, not done
    graph.replay()
    return graph.replay


@dataclass(frozen=True)
class _Given:
    """The memory that a recorded step reads what changes from: by microbatch the batch, the rest 0-dim."""

    number: Tensor
    seed: Tensor
    lr: Tensor
    stop: Tensor
    scale: Tensor
    counts: Mapping[str, Tensor]
    batches: Sequence[Mapping[str, Tensor]]


def captured(
    bound: Bound, state: State, config: UpdateConfig, record: Record = cuda_graph, warm: int = WARM_STEPS
) -> Callable[[Step, float, bool], Report]:
    """A function that takes a step, given its learning rate and whether this rank was asked to stop, and updates
    `state`: the first `warm` times as it comes, then recorded by `record`, then replayed.

    Steps must be alike: the same shapes, and a constant loss scale. Not for pipelines: a recorded rank cannot meet
    the others' transfers in between.
    """
    if state.scale is not None:
        raise ValueError("a step whose loss scale changes cannot be recorded")
    apply = on_device(bound.program, bound.place, state, config)
    told = torch.zeros(4, dtype=torch.float64, device=bound.place.device)
    rest = dict(state.weights.rest)
    microbatches = 1 + max(a.mb for a in bound.actions)
    given: _Given | None = None
    again: Callable[[], None] | None = None
    taken = 0

    def take(step: Step, lr: float, stop: bool) -> Report:
        nonlocal given, again, taken
        batches = [step.batch(mb) for mb in range(microbatches)]
        if given is None:
            given = _place_for(step, batches, bound.place.device)
        _fill(given, step, batches, lr, stop)
        if again is not None:
            again()
        elif taken < warm:
            work(given, step)
        else:
            here = given
            again = record(lambda: work(here, step))
        taken += 1
        return report(told)

    def work(given: _Given, step: Step) -> None:
        def update(grads: dict[str, Tensor], loss: Tensor) -> Mapping[str, Tensor]:
            told.copy_(apply(grads, loss, given.lr, given.stop))
            return state.weights.masters

        alike = replace(
            step,
            number=given.number,
            seed=given.seed,
            scale=given.scale,
            counts=given.counts,
            batch=lambda mb: given.batches[mb],
            update=update,
        )
        run(bound, state.weights, alike)
        # The next step begins where this one began.
        for path, old in rest.items():
            if state.weights.rest[path] is not old:
                old.copy_(state.weights.rest[path])
        state.weights.rest = dict(rest)

    return take


def _place_for(step: Step, batches: Sequence[Mapping[str, Tensor]], device: str) -> _Given:
    number = torch.zeros((), dtype=torch.int64, device=device)
    # torch's fused AdamW reads a rate on the GPU as fp32.
    return _Given(
        number,
        number.clone(),
        torch.zeros((), device=device),
        torch.zeros((), dtype=torch.float64, device=device),
        torch.empty_like(step.scale, device=device),
        {k: torch.empty_like(v, device=device) for k, v in step.counts.items()},
        [{k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in b.items()} for b in batches],
    )


def _fill(given: _Given, step: Step, batches: Sequence[Mapping[str, Tensor]], lr: float, stop: bool) -> None:
    for place, value in ((given.number, step.number), (given.seed, step.seed), (given.lr, lr), (given.stop, stop)):
        place.fill_(value)
    given.scale.copy_(step.scale)
    for places, values in ((given.counts, step.counts), *zip(given.batches, batches, strict=True)):
        for k, place in places.items():
            place.copy_(values[k])
