"""Whether a step fits: what the ranks of each pipeline coordinate hold (`dtrain.plan.footprint`) at the peak and over
the step, with what torch does not count, against the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.layout import Layout
from dtrain.plan import Plan
from dtrain.plan.footprint import held
from dtrain.plan.liveness import Flows, flows
from dtrain.program.lower import Program

# CUDA's context, its kernels and NCCL's buffers, which torch's counters do not see: what nvidia-smi showed beside them
# in logs of training runs, 1.1 GB on V100 and 1.27 to 1.57 GB on A100, the highest taken.
CONTEXT = {7: 1_100_000_000, 8: 1_570_000_000}
# Of all other bytes, what the caching allocator loses to rounding and to blocks that fit nothing.
FRAGMENTS = 0.03


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at a pipeline coordinate. The first nine are what the peak is made of:

    `parameters` shards at rest; `gradients` sums between microbatches and what is reduced; `optimizer` moments, and
    masters where the shards at rest are not the masters themselves; `saved` kept from forward to backward, with the
    segment's input, over all microbatches in flight; `gathered` copies of parameters in use; `carried` the batch,
    activations and gradients between segments, buffers of the pipeline; `transient` what the running action allocates;
    `buffers` packed parameters and gradients in flight; `reserve` a stated allowance for what torch does not count.

    `moment` is the index in the action list of the peak, `over_time` the bytes while each action runs.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    gathered: int
    carried: int
    transient: int
    buffers: int
    reserve: int
    peak: int
    moment: int
    over_time: tuple[int, ...]


def capacity(layout: Layout) -> int | None:
    """Bytes of a GPU of the layout that a process can use; None where that is the machine's own affair."""
    return layout.cluster.device.memory


def context(layout: Layout) -> int:
    """Bytes that CUDA and NCCL take for themselves; 0 on a CPU."""
    capability = layout.cluster.device.capability
    return CONTEXT[min(capability[0], max(CONTEXT))] if capability else 0


def total(held: int, layout: Layout) -> int:
    """Bytes that a rank needs of its GPU, which holds so many: with the reserve for what torch does not count."""
    outside = context(layout)
    return held + int((FRAGMENTS if outside else 0.0) * held) + outside


def memory(plan: Plan, program: Program, pp: int) -> Memory:
    """What a rank at a pipeline coordinate holds."""
    return _walk(plan, program, pp, flows(plan, program))


def memories(plan: Plan, program: Program) -> tuple[Memory, ...]:
    """The same of every coordinate, each graph read once."""
    found = flows(plan, program)
    return tuple(_walk(plan, program, pp, found) for pp in range(len(plan.train)))


def _walk(plan: Plan, program: Program, pp: int, found: Flows) -> Memory:
    """Run a coordinate's list on bytes."""
    most, moment, over_time, then = -1, 0, [], {}
    for position, step in enumerate(held(plan, program, pp, found)):
        over_time.append(total(step.most, plan.layout))
        if step.most > most:
            most, moment, then = step.most, position, dict(step.then)
    peak = total(most, plan.layout)
    return Memory(**then, reserve=peak - most, peak=peak, moment=moment, over_time=tuple(over_time))
