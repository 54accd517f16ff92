"""What a step of a layout costs, before anything is started: memory, seconds, traffic and FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import fx

from dtrain.layout import Layout
from dtrain.plan import Plan, plan
from dtrain.plan.ledger import Entry, graphs_run, ledger
from dtrain.plan.memory import Memory, capacity, memories
from dtrain.plan.seconds import Constants
from dtrain.plan.timeline import Timeline, timeline
from dtrain.program import cost, passes
from dtrain.program.interpret import unit_segment
from dtrain.program.lower import Program, Segment, lower


@dataclass(frozen=True)
class Prediction:
    """A plan, the program that would run, and what is read off it. `memory` and `ledger` are by pipeline coordinate.

    `model_flops` of a step, all ranks: three times the products of the forward graphs (backward has two for each),
    with a causal half left out and without what parallelism adds: padding of the vocabulary, and KV heads that several
    ranks compute. Nothing is counted for recomputation. `hardware_flops`: the products that the graphs of the step
    really have, recomputation, padding and the scores that fused attention computes again in backward included.
    """

    plan: Plan
    program: Program
    memory: tuple[Memory, ...]
    timeline: Timeline
    ledger: tuple[tuple[Entry, ...], ...]
    model_flops: float
    hardware_flops: float

    @property
    def step_seconds(self) -> float:
        return self.timeline.step

    @property
    def tokens_per_second_per_gpu(self) -> float:
        data = self.plan.layout.data
        return data.batch * data.seq / (self.step_seconds * self.plan.layout.world)

    @property
    def tflops_per_gpu(self) -> float:
        """Model FLOPs, in 1e12 a second."""
        return self.model_flops / (self.step_seconds * self.plan.layout.world) / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0..1: model_flops / (seconds x GPUs x peak in run.precision), dense; None where the
        peak is unknown."""
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: hardware_flops in place of model_flops (Korthikanti et al. 2022, section 6.3)."""
        return self._share(self.hardware_flops)

    def _share(self, flops: float) -> float | None:
        layout = self.plan.layout
        peak = layout.cluster.device.peak.get(layout.run.precision)
        return None if peak is None else flops / (self.step_seconds * layout.world * peak)

    @property
    def timed(self) -> bool:
        """Whether seconds mean something: the peak in run.precision is known. Else only their ratios do."""
        return self.plan.layout.run.precision in self.plan.layout.cluster.device.peak

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @property
    def heaviest(self) -> int:
        """The pipeline coordinate whose ranks need most memory."""
        return max(range(len(self.memory)), key=lambda pp: self.memory[pp].peak)

    @property
    def busiest(self) -> int:
        """The pipeline coordinate whose ranks send most."""
        return max(range(len(self.ledger)), key=lambda pp: sum(e.wire for e in self.ledger[pp]))

    @property
    def margin(self) -> int | None:
        """Bytes that the heaviest rank has left, negative where it lacks them; None where the capacity is unknown."""
        have = capacity(self.plan.layout)
        return None if have is None else have - self.memory[self.heaviest].peak

    @property
    def fits(self) -> bool | None:
        return None if self.margin is None else self.margin >= 0


def predict(layout: Layout, constants: Constants | None = None) -> Prediction:
    """Lower a layout and read its step off the program, with the constants of its GPU's class or others. Raises what
    `plan` and `lower` raise, one line."""
    made = plan(layout)
    return read(made, lower(made.job), constants)


def read(made: Plan, program: Program, constants: Constants | None = None) -> Prediction:
    """The same of a plan whose program is there: lowering sees neither the schedule nor the number of microbatches."""
    return Prediction(
        made,
        program,
        memories(made, program),
        timeline(made, program, constants),
        tuple(tuple(ledger(made, program, pp)) for pp in range(len(made.train))),
        model_flops(made, program),
        hardware_flops(made, program),
    )


def model_flops(plan: Plan, program: Program) -> float:
    """FLOPs of the model in a step of all ranks, as `Prediction` defines them."""
    layers = program.job.layers
    units = Counter(unit_segment(u, layers)[0] for mine in plan.units for u in mine)
    once = sum(n * _forward(program.segments[name]) for name, n in units.items())
    return 3 * once * plan.microbatches * (plan.job.mesh.world // len(plan.train))


def _forward(segment: Segment) -> float:
    """FLOPs of a rank's forward, of each product only the part that is the model's own."""
    graph = segment.graphs["forward"]
    holes = dict(zip(graph.module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    own: dict[fx.Node, float] = {}
    for hole, name in holes.items():
        if name.startswith("params:"):
            s = segment.stored[name.removeprefix("params:")]
            own[hole] = math.prod(s.real) / math.prod(s.param.shape) / s.share
    total = 0.0
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        if passes.op_name(node) in cost.VIEWS and node.all_input_nodes[0] in own:
            own[node] = own[node.all_input_nodes[0]]
        total += cost.flops(node) * math.prod(own.get(a, 1.0) for a in node.all_input_nodes)
    return total


def hardware_flops(plan: Plan, program: Program) -> float:
    """FLOPs of the products that all ranks compute in a step."""
    layers = program.job.layers
    runs = Counter(
        (unit_segment(unit, layers)[0], graph)
        for pp, actions in enumerate(plan.train)
        for action in actions
        for unit, graph in graphs_run(program, plan.units[pp], action)
    )
    each = sum(
        n * sum(cost.flops(node) for node in program.segments[name].graphs[graph].module.graph.nodes)
        for (name, graph), n in runs.items()
    )
    return each * (plan.job.mesh.world // len(plan.train))
