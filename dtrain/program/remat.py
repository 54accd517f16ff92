"""What a forward keeps for its backward: by kind of value, or as much as fits a byte budget.

What is not kept, backward computes again from what is. Losses do not depend on the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from dtrain.layout import schema
from dtrain.program import cost, passes
from dtrain.program.passes import Joint, Save

# Products with a weight; outputs of attention; products of two activations (attention scores of the math kernel);
# sums over ranks; activations gathered over ranks; everything else.
KINDS = schema.KEEP

# `selective` recomputes what costs little: pointwise work, gathers of the sequence and attention's inner products,
# as Megatron's selective recompute does (Korthikanti et al. 2022, section 5), and norms and activations too.
POLICIES: Mapping[str, tuple[str, ...]] = {
    "none": KINDS,
    "selective": ("matmul", "attention", "reduced"),
    "full": (),
}


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may keep from its forwards to their backwards.

    `held` has, for every moment that could be the fullest one on some rank, how many passes of each segment are
    between forward and backward; `runs` how often a step calls each. `rates` serve to weigh choices.
    """

    bytes: int
    held: Sequence[Mapping[str, int]]
    runs: Mapping[str, int]
    rates: cost.Rates


class BudgetError(ValueError):
    """The budget is below what must be kept; one line."""


def kind(node: fx.Node, fixed: Container[fx.Node]) -> str | None:
    """Which of KINDS a forward value is; None for a view, a part or a wider copy of another value, which is kept in
    its place."""
    name = passes.op_name(node)
    if "wide" in node.meta and name not in cost.PRODUCTS:
        return None
    if name == "getitem":
        source = node.all_input_nodes[0]
        name = passes.op_name(source)
        return "attention" if name == "attention" else None if name in cost.VIEWS else "pointwise"
    if name in cost.VIEWS or passes.is_collective(node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    if name in cost.PRODUCTS:
        return "matmul" if any(a in fixed for a in node.all_input_nodes) else "scores"
    if name == "wait_tensor":
        gathered = passes.op_name(node.all_input_nodes[0]) == "all_gather_into_tensor"
        return "gathered" if gathered else "reduced"
    return "pointwise"


def by_kind(kinds: Collection[str]) -> Save:
    """Keep values of these kinds."""
    return lambda node, fixed: kind(node, fixed) in kinds


def choose(joints: Mapping[str, Joint], budget: Budget) -> dict[str, Save]:
    """What each segment keeps so that every rank stays within the budget, at the least predicted time.

    From keeping nothing but the segments' inputs, add again and again what saves most seconds a byte. Raises
    BudgetError where the inputs alone exceed the budget.
    """
    options = {s: _options(j) for s, j in joints.items()}
    chosen: dict[str, frozenset[fx.Node]] = {s: frozenset() for s in joints}
    kept = {s: kept_bytes(j, chosen[s]) for s, j in joints.items()}
    spent = {s: seconds(j, chosen[s], budget.rates) for s, j in joints.items()}

    def peak(kept: Mapping[str, int]) -> int:
        return max((sum(kept[s] * n for s, n in moment.items()) for moment in budget.held), default=0)

    if peak(kept) > budget.bytes:
        raise BudgetError(f"budget {budget.bytes} bytes; the segments' inputs alone take {peak(kept)} on one rank")
    while True:
        best: tuple[float, str, frozenset[fx.Node]] | None = None
        now = peak(kept)
        for s, groups in options.items():
            for group in groups:
                trial = chosen[s] | group
                if trial == chosen[s]:
                    continue
                more = peak(kept | {s: kept_bytes(joints[s], trial)})
                gain = (spent[s] - seconds(joints[s], trial, budget.rates)) * budget.runs[s]
                if more > budget.bytes or gain <= 0:
                    continue
                worth = gain / max(more - now, 1)
                if best is None or worth > best[0]:
                    best = (worth, s, trial)
        if best is None:
            return {s: _only(nodes) for s, nodes in chosen.items()}
        _, s, chosen[s] = best
        kept[s] = kept_bytes(joints[s], chosen[s])
        spent[s] = seconds(joints[s], chosen[s], budget.rates)


def _only(nodes: Collection[fx.Node]) -> Save:
    return lambda node, fixed: node in nodes


def _options(joint: Joint) -> list[frozenset[fx.Node]]:
    """What may be kept: each value by itself, the results of one attention together (one without the other saves
    nothing)."""
    groups: dict[fx.Node, set[fx.Node]] = {}
    for node in passes.divide(joint, by_kind(())).again:
        if (k := kind(node, joint.fixed)) is not None and node not in joint.fixed:
            groups.setdefault(node.all_input_nodes[0] if k == "attention" else node, set()).add(node)
    return [frozenset(g) for g in groups.values()]


def kept_bytes(joint: Joint, nodes: Collection[fx.Node]) -> int:
    """Bytes from a forward to its backward: what is kept, and the segment's input where backward reads it."""
    parts = passes.divide(joint, _only(nodes))
    return sum(cost.size(n) for n in parts.saved) + sum(cost.size(h) for h in parts.read if joint.name_of[h] == "x")


def seconds(joint: Joint, nodes: Collection[fx.Node], rates: cost.Rates) -> float:
    """What a choice costs a pass: computing again what is not kept, and writing and reading what is."""
    parts = passes.divide(joint, _only(nodes))
    # Reading what is kept; and writing it, unless forward writes it anyway for an operation that is not fused.
    moved = sum(cost.size(n) * (1 if cost.solid(n) or any(map(cost.solid, n.users)) else 2) for n in parts.saved)
    out = 0.0
    for node in parts.again:
        if passes.is_collective(node):
            ranks, rate = rates.wire[passes.group_of(node)]
            out += cost.sent(node, ranks) / rate
        elif kind(node, joint.fixed) == "pointwise" and node not in joint.fixed:
            # Chains of pointwise work are fused: only their ends are written, for an operation that is not.
            if any(cost.solid(reader) for reader in node.users):
                moved += 2 * cost.size(node)
        else:
            out += cost.flops(node) / rates.flops
    return out + moved / rates.memory
