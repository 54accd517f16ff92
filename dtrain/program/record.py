"""A function of plain tensors -> its flat graph, by watching it run on tensors without memory.

Several times faster than `make_fx` for what needs nothing of it: copies and collectives, without derivatives, tensor
subclasses or numbers that depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every operation into `graph`. `seen` keeps the tensors, so that no two have the same id."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.seen: dict[int, tuple[Tensor, fx.Node]] = {}

    def note(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x
        self.seen[id(x)] = (x, node)

    def node(self, x: Any) -> Any:
        return self.seen[id(x)][1] if isinstance(x, Tensor) else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        node = self.graph.call_function(func, tree_map(self.node, tuple(args)), tree_map(self.node, kwargs or {}))
        if isinstance(out, Tensor):
            self.note(out, node)
        else:
            for i, x in enumerate(out):
                self.note(x, self.graph.call_function(getitem, (node, i)))
        return out


def record(
    fn: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> fx.GraphModule:
    """The graph of `fn`, which maps tensors of these shapes and dtypes to tensors. What has no effect on the results
    is left out."""
    recorder = _Recorder()
    given = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
    for i, x in enumerate(given):
        recorder.note(x, recorder.graph.placeholder(f"arg{i}"))
    with torch.no_grad(), recorder:
        results = fn(given)
    recorder.graph.output([recorder.node(x) for x in results])
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), recorder.graph)
