"""The interpreter's own time: `python bench/overhead.py [--steps N] [--json]`.

One rank of 80 layers on pp 4 with 64 microbatches under 1F1B runs its real action list, over graphs that do nothing
but have the arity of real ones: 12 parameters and 25 saved values a block. Transfers end at once. What is left is what
the interpreter costs a step, apart from the work: `us_per_action` is the median over steps. On a busy machine look at
`cpu_us_per_action`, the same in processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dtrain import layout, plan
from dtrain.program.interpret import Bound, Calls, Place, Step, bind, initial_weights, publish, run
from dtrain.program.lower import Graph, Program, Segment, lower

LAYERS, PP, MICROBATCHES, PARAMETERS, SAVED = 80, 4, 64, 12, 25
BAR = 20.0  # us an action
TEXT = """
cluster: {{gpus_per_node: {pp}}}
mesh: {{pp: {{size: {pp}}}}}
shard: {{params: {{layers: pp}}, compute: {{layers: pp}}}}
pipeline: {{schedule: 1f1b}}
model: {{family: llama, layers: {layers}, embed: 8, heads: 1, mlp: 8, vocab: 8, vocab_pad: 8}}
data: {{source: synthetic, seq: 2, batch: {microbatches}, microbatch: 1}}
run: {{steps: 1}}
"""


def with_arity(segment: Segment, parameters: int, saved: int) -> Segment:
    """The segment with this many parameters and saved values; its graphs have names and nothing else."""
    model = next(iter(segment.stored.values()))
    stored = {f"p{i}": replace(model, path=f"{segment.name}/p{i}") for i in range(parameters)}
    params, kept = tuple(f"params:{n}" for n in stored), tuple(f"saved:{i}" for i in range(saved))
    grads = tuple(f"grad:{p}" for p in params)
    flat = tuple(stored)
    graphs = {
        name: Graph(g.module, flat, flat) for name, g in segment.graphs.items() if name not in ("forward", "backward")
    }
    graphs["forward"] = Graph(segment.graphs["forward"].module, (*params, "x", "layer"), ("y", *kept))
    inputs = (*params, *kept, "x", "grad", "layer")
    graphs["backward"] = Graph(segment.graphs["backward"].module, inputs, ("grad:x", *grads))
    graphs["backward_input"] = Graph(segment.graphs["backward"].module, inputs, ("grad:x", "half:0"))
    graphs["backward_weight"] = Graph(segment.graphs["backward"].module, (*kept, "half:0"), grads)
    return replace(segment, stored=stored, owned=flat, sums={}, graphs=graphs)


def nothing(results: int) -> Callable[..., list[Tensor]]:
    """A graph of that many results that computes none of them."""
    out = [torch.zeros(1) for _ in range(results)]
    return lambda *args: out


DONE = SimpleNamespace(wait=lambda: True)
ALONE = SimpleNamespace(send=lambda *args: DONE, recv=lambda *args: DONE)  # a group whose transfers end at once


class Groups(dict[str, Any]):
    """Any group that is asked for."""

    def __missing__(self, name: str) -> Any:
        return ALONE


def prepare(layers: int, pp: int, microbatches: int, rank: int) -> tuple[Program, Calls, Place, Bound]:
    made = plan.plan(layout.loads(TEXT.format(layers=layers, pp=pp, microbatches=microbatches)))
    program = lower(made.job)
    segments = program.segments | {"block": with_arity(program.segments["block"], PARAMETERS, SAVED)}
    program = replace(program, segments=segments)
    calls = {(s.name, k): nothing(len(g.outputs)) for s in segments.values() for k, g in s.graphs.items()}
    place = Place(made.job.mesh, rank, Groups(), made.units[rank])
    return program, calls, place, bind(program, calls, place, made.train[rank])


def measure(steps: int, layers: int = LAYERS, pp: int = PP, microbatches: int = MICROBATCHES) -> dict[str, float]:
    """Seconds and bytes of the first pipeline coordinate. A first step, which is not counted, warms up."""
    program, calls, place, bound = prepare(layers, pp, microbatches, 0)
    weights = publish(program, calls, place, initial_weights(program, place, 0))
    batch = {f: torch.zeros(1, 2, dtype=torch.int64) for f in program.job.module.BATCH}
    step = Step(1, 0, lambda mb: batch, {}, torch.ones(()))
    seconds, cpu = [], []
    with torch.no_grad():
        for _ in range(steps + 1):
            began, used = time.perf_counter(), time.process_time()
            run(bound, weights, step)
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
    actions = len(bound.actions)
    each = [s / actions * 1e6 for s in seconds[1:]]
    return {
        "actions": actions,
        "us_per_action": statistics.median(each),
        "cpu_us_per_action": statistics.median(cpu[1:]) / actions * 1e6,
        "us_per_action_least": min(each),
        "us_per_action_most": max(each),
        "ms_per_step": statistics.median(seconds[1:]) * 1e3,
        "list_bytes": list_bytes(bound),
        "list_bytes_per_action": list_bytes(bound) / actions,
    }


def list_bytes(bound: Bound) -> int:
    """Bytes of the action list and of what is bound to it: every object once, and what each op closes over."""
    seen: set[int] = set()

    def size(x: Any) -> int:
        if id(x) in seen or isinstance(x, (Tensor, Program, Segment, Place, type)) or x is None:
            return 0
        seen.add(id(x))
        total = sys.getsizeof(x)
        if isinstance(x, (tuple, list)):
            return total + sum(map(size, x))
        for cell in getattr(x, "__closure__", None) or ():
            total += sys.getsizeof(cell) + size(cell.cell_contents)
        return total

    return size(bound.actions) + size(bound.ops)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    torch.set_num_threads(1)
    found = measure(asked.steps)
    machine = {"machine": f"{platform.machine()}, {platform.system()}", "python": platform.python_version()}
    machine["torch"] = str(torch.__version__)
    if asked.json:
        print(json.dumps(machine | {"bar_us": BAR} | found))
        return
    print(", ".join(f"{k} {v}" for k, v in machine.items()))
    print(f"{LAYERS} layers, pp {PP}, {MICROBATCHES} microbatches, 1f1b, coordinate 0; {asked.steps} steps")
    span = f"{found['us_per_action_least']:.1f} to {found['us_per_action_most']:.1f}"
    print(f"{found['us_per_action']:.1f} us an action ({span}; bar {BAR:g}), in processor time", end=" ")
    print(f"{found['cpu_us_per_action']:.1f}")
    print(f"{found['ms_per_step']:.1f} ms a step of {found['actions']:.0f} actions")
    print(f"action list: {found['list_bytes']:,.0f} bytes, {found['list_bytes_per_action']:.0f} an action")


if __name__ == "__main__":
    main()
