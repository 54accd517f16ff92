"""A recorded graph is the one that make_fx traces, and computes what the function does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain.program.lower import Graph
from dtrain.program.record import record

SHAPES = [((4, 6), torch.float32), ((3, 5), torch.float64)]


def pack(given: Sequence[Tensor]) -> list[Tensor]:
    """What storage does: casts, padding, one buffer, a collective, and pieces of its result."""
    a, b = given
    flat = torch.cat([a.to(torch.float64).reshape(-1), F.pad(b, (0, 1)).movedim(1, 0).reshape(-1)])
    c10d = torch.ops._c10d_functional
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(flat, 2, "tp")).view(2, -1)
    first, second = whole.split([a.numel(), 18], 1)
    return [first.reshape(2, *a.shape).narrow(1, 0, 3).contiguous(), second, a]


def fold(given: Sequence[Tensor]) -> list[Tensor]:
    a, b = given
    unused = a + 1  # noqa: F841
    return [torch.stack(a.unbind(0)[:3]).sum(0), b.add(b, alpha=2).t()]


@pytest.mark.parametrize("fn", [pack, fold])
def test_a_recorded_graph_is_the_traced_one(fn: object) -> None:
    given = [torch.empty(s, dtype=d) for s, d in SHAPES]
    traced = make_fx(lambda *t: fn(t), tracing_mode="fake")(*given)  # type: ignore[operator]
    traced.graph.eliminate_dead_code()
    assert Graph(record(fn, SHAPES), (), ()).text() == Graph(traced, (), ()).text()  # type: ignore[arg-type]


def test_it_computes_the_same() -> None:
    given = [torch.randn(s, dtype=d) for s, d in SHAPES]
    for x, y in zip(record(fold, SHAPES)(*given), fold(given), strict=True):
        assert torch.equal(x, y)
