"""Async tensor parallelism: a gather of the sequence and the products that read it become one operation, and so do a
product and the reduce-scatter of its result, so that a part travels while another is multiplied (Wang et al. 2023,
"Overlap Communication with Dependent Computation via Decomposition").

The operations are torch's own, over symmetric memory: `symm_mem.fused_all_gather_matmul` and
`symm_mem.fused_matmul_reduce_scatter`. Inductor has a pass that puts them in (`micro_pipeline_tp`); it does not know
the forms in which dtrain's graphs gather a microbatch of one sequence, and cannot say what it found.

What is left as it is has other work beside it already (`passes.overlap`): in a block's backward the gathers that only
gradients of parameters read, and the reduce-scatters of a sum of several products.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

import torch
import torch.distributed._symmetric_memory
from torch import fx

from dtrain.program.passes import Cut, ancestors, build, group_of, is_collective, op_name, results_of

DIM, SEQUENCE = "tp", 1  # the group whose collectives are fused, and the position of `seq` in an activation


@dataclass(frozen=True)
class Fused:
    """A graph after the pass, and how many of its gathers and reduce-scatters over tp went into a product."""

    cut: Cut
    fused: int
    of: int


def fuse(cut: Cut) -> Fused:
    """The same graph with every gather or reduce-scatter over tp that meets its product fused with it.

    Gathers and scatters are those of position 1 of an activation (batch, seq, embed). Values are the same up to
    the rounding of products that are done in parts.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(cut.module.graph, {}))
    moves = [n for n in graph.nodes if is_collective(n) and group_of(n) == DIM and op_name(n) in _FUSE]
    fused = sum(_FUSE[op_name(n)](n) for n in moves)
    holes = dict(zip(graph.find_nodes(op="placeholder"), cut.inputs, strict=True))
    return Fused(build(graph, holes, results_of(graph), cut.outputs), fused, len(moves))


def _gather(node: fx.Node) -> bool:
    """Fuse a gather with the products whose left side it is."""
    whole = _gathered(node)
    if whole is None:
        return False
    products = [
        m
        for view in whole.users
        if op_name(view) == "view" and _shape(view) == (*_flat(whole), _shape(whole)[-1])
        for m in view.users
        if op_name(m) == "mm" and m.args[0] is view and node not in ancestors(m.all_input_nodes[1:])
    ]
    if not products:
        return False
    graph = node.graph
    with graph.inserting_before(products[0]):
        others = [m.args[1] for m in products]
        both = graph.call_function(
            torch.ops.symm_mem.fused_all_gather_matmul.default, (node.args[0], others, SEQUENCE, DIM)
        )
        values = graph.call_function(getitem, (both, 1))
        values.meta["val"] = [m.meta["val"] for m in products]
        both.meta["val"] = (whole.meta["val"], values.meta["val"])
        for i, product in enumerate(products):
            # What the operation gives lies with the sequence outermost.
            made = graph.call_function(getitem, (values, i))
            made.meta["val"] = product.meta["val"]
            flat = graph.call_function(torch.ops.aten.reshape.default, (made, list(_shape(product))))
            flat.meta = dict(product.meta)
            product.replace_all_uses_with(flat)
            graph.erase_node(product)
        for view in [v for v in whole.users if not v.users]:
            graph.erase_node(view)
        if not whole.users:
            both.kwargs = {"return_A": False}
            return True
        again = graph.call_function(getitem, (both, 0))
        again.meta = dict(whole.meta)
        whole.replace_all_uses_with(again)
    for view in [v for v in again.users if op_name(v) == "view"]:
        view.target = torch.ops.aten.reshape.default
    return True


def _gathered(node: fx.Node) -> fx.Node | None:
    """The gathered activation (batch, seq, embed): a gather puts the parts one after the other, so what follows puts
    them side by side, unless there is but one sequence."""
    part = node.args[0]
    if not isinstance(part, fx.Node) or len(_shape(part)) != 3:
        return None
    batch, seq, width = _shape(part)
    wait = _only_user(node, "wait_tensor")
    if wait is None:
        return None
    want = (batch, seq * (_shape(wait)[0] // batch), width)
    side_by_side = _only_user(wait, "view") if batch == 1 else _rejoined(wait)
    return side_by_side if side_by_side is not None and _shape(side_by_side) == want else None


def _rejoined(whole: fx.Node) -> fx.Node | None:
    """The concatenation along the sequence of all the parts that a tensor is split into along its first position."""
    split = _only_user(whole, "split")
    if split is None or len(split.args) > 2:
        return None
    parts = sorted(split.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
    joined = {user for part in parts for user in part.users}
    cat = joined.pop() if len(joined) == 1 else None
    return cat if cat is not None and op_name(cat) == "cat" and cat.args == (parts, SEQUENCE) else None


def _scatter(node: fx.Node) -> bool:
    """Fuse a reduce-scatter with the product that it sums."""
    stacked, wait = node.args[0], _only_user(node, "wait_tensor")
    if not isinstance(stacked, fx.Node) or wait is None or op_name(stacked) != "cat" or len(stacked.args) > 1:
        return False
    parts = stacked.all_input_nodes
    split = parts[0].all_input_nodes[0]
    if op_name(split) != "split" or split.args[2:] != (SEQUENCE,) or [*split.users] != parts != []:
        return False
    whole = split.all_input_nodes[0]
    product = whole.all_input_nodes[0] if op_name(whole) in ("view", "_unsafe_view") else whole
    if op_name(product) != "mm" or len(whole.users) != 1 or len(product.users) != 1 or len(_shape(whole)) != 3:
        return False
    graph, (left, right) = node.graph, product.args
    with graph.inserting_before(wait):
        shape = [*_shape(whole)[:2], _shape(left)[-1]]  # type: ignore[arg-type]
        batched = graph.call_function(torch.ops.aten.reshape.default, (left, shape))
        batched.meta["val"] = left.meta["val"].reshape(shape)  # type: ignore[union-attr]
        summed = graph.call_function(
            torch.ops.symm_mem.fused_matmul_reduce_scatter.default, (batched, right, node.args[1], SEQUENCE, DIM)
        )
        summed.meta = dict(wait.meta)
    wait.replace_all_uses_with(summed)
    return True


_FUSE = {"all_gather_into_tensor": _gather, "reduce_scatter_tensor": _scatter}


def _only_user(node: fx.Node, name: str) -> fx.Node | None:
    user = next(iter(node.users), None)
    return user if user is not None and len(node.users) == 1 and op_name(user) == name else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _flat(node: fx.Node) -> tuple[int]:
    """Rows of an activation as the matrix that products take."""
    batch, seq, _ = _shape(node)
    return (batch * seq,)
