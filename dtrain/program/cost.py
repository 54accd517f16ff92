"""What a node of a graph costs: FLOPs, bytes, and the seconds that follow from a machine's peak rates.

Peak rates make these lower bounds; they serve to compare choices, not to predict a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from dtrain.program import passes

# Half the products of a causal attention are masked away, and fused kernels leave them out.
_CAUSAL = 0.5


@dataclass(frozen=True)
class Rates:
    """Peaks of one device: FLOP/s in the dtype of compute, bytes/s of its memory, and for each group its ranks and
    the bytes/s that one of them sends."""

    flops: float
    memory: float
    wire: Mapping[str, tuple[int, float]]


def size(node: fx.Node) -> int:
    """Bytes of a node's result; 0 where it is not one tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def flops(node: fx.Node) -> float:
    """Floating-point operations of products and attention, forward or backward; 0 for everything else.

    A product (M, K) x (K, N) is 2 M K N. Attention is two products forward, and backward five (the scores are
    computed again), each 2 b h s t d, halved under a causal mask (Dao 2023, arXiv 2307.08691, section 4.1).
    """
    name = passes.op_name(node)
    inputs = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    if name in ("mm", "bmm", "addmm"):
        return float(2 * math.prod(node.meta["val"].shape) * inputs[-2].shape[-1])
    if name in ("attention", "attention_backward"):
        q, k = inputs[:2] if name == "attention" else inputs[1:3]
        causal = node.args[4] if name == "attention" else node.args[7]
        whole = float(2 * q.numel() * k.shape[1] * (2 if name == "attention" else 5))
        return whole * _CAUSAL if causal else whole
    return 0.0


def sent(node: fx.Node, ranks: int) -> float:
    """Bytes that a rank sends for a collective over `ranks` ranks, by a ring: (n-1)/n of the whole tensor, and
    twice that for an all-reduce (Thakur et al. 2005)."""
    whole = size(node)
    name = passes.op_name(node)
    if name == "reduce_scatter_tensor":
        whole *= ranks
    return whole * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)
