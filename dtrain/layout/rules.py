"""Checks of the rules: each rule by itself, what the tables say together, and dims spent twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.axes import AXES, Param, ParamTree, Rules
from dtrain.layout.derived import tables
from dtrain.layout.errors import at, fail, listed, show_dims
from dtrain.layout.schema import Layout


def _activation_axes(module: Any) -> set[str]:
    specs = [*module.BATCH.values(), module.ACT, "batch seq res_seq"]
    return {axis for spec in specs for axis in spec.split() if not axis.startswith("+")}


# The dims that may cut an axis while it is computed on; every other axis is whole in compute.
_COMPUTE: Mapping[str, tuple[str, ...]] = {
    "batch": ("dp", "fsdp"),
    "seq": ("cp",),
    "res_seq": ("cp", "tp"),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "layers": ("pp",),
}
_STORAGE = ("dp", "fsdp")  # dims over which weights, gradients and moments can be stored


def _legal(table: str, axis: str) -> tuple[str, ...]:
    compute = _COMPUTE.get(axis, ())
    if table == "compute" or axis == "layers":
        return compute if table != "optimizer" else ()
    return _STORAGE if table == "optimizer" else (*compute, *_STORAGE)


def check_rules(layout: Layout, module: Any, tree: ParamTree) -> None:
    """Each rule by itself, then what the tables must say together."""
    shard, sizes = layout.shard, layout.sizes
    weights = {"layers"} | {axis for params in tree.values() for p in params.values() for axis in p.axes}
    written = {
        "params": shard.params,
        "compute": shard.compute,
        "optimizer": shard.optimizer,
        "grads": shard.grads,
    }
    for table, rules in written.items():
        have = weights | _activation_axes(module) if table == "compute" else weights
        for axis, dims in (rules or {}).items():
            path = f"shard.{table}.{axis}"
            if path not in layout._where:  # a default: grads follow compute
                continue
            if axis not in have:
                what = "tensor" if table == "compute" else "parameter"
                fail(
                    layout,
                    path,
                    f"{show_dims(dims)}; no {what} of this model has the axis {axis}; "
                    f"it has {', '.join(a for a in AXES if a in have)}",
                )
            legal = _legal(table, axis)
            for dim in dims:
                if dim not in layout.mesh:
                    fail(layout, path, f"{dim}; is not in this mesh, which has {listed(layout.mesh)}")
                if dim not in legal:
                    fail(
                        layout,
                        path,
                        f"{dim}; {table} may cut {axis} over {listed(legal)}{_hint(table, axis, dim)}",
                    )

    for axis in sorted(weights, key=AXES.index):
        at_rest = tuple(d for d in shard.params.get(axis, ()) if d in ("tp", "pp"))
        in_use = shard.compute.get(axis, ())
        if at_rest != in_use:
            table = "params" if f"shard.params.{axis}" in layout._where else "compute"
            fail(
                layout,
                f"shard.{table}.{axis}",
                f"params has {show_dims(at_rest)} and compute has {show_dims(in_use)}; "
                "tp and pp must cut an axis alike in both",
            )
        extra = [d for d in (shard.grads or {}).get(axis, ()) if d not in in_use]
        final = (*shard.params.get(axis, ()), *shard.optimizer.get(axis, ()))
        for dim in extra:
            if dim not in final:
                fail(
                    layout,
                    f"shard.grads.{axis}",
                    f"{dim}; the optimizer does not cut {axis} over it; add optimizer: {{{axis}: {dim}}}",
                )
    if "kv_heads" in weights and shard.compute.get("kv_heads", ()) != shard.compute.get("heads", ()):
        table = "compute.kv_heads" if "kv_heads" in shard.compute else "compute.heads"
        fail(
            layout,
            f"shard.{table}",
            f"heads has {show_dims(shard.compute.get('heads', ()))} and kv_heads has "
            f"{show_dims(shard.compute.get('kv_heads', ()))}; both must be cut alike",
        )
    uses = {
        "pp": (["layers"], "layers: pp in params and compute"),
        "dp": (["batch"], "batch: dp in compute"),
        "fsdp": (["batch"], "batch: fsdp in compute"),
        "tp": (["heads", "mlp", "vocab"], "heads, mlp or vocab: tp in params and compute"),
    }
    for dim, (axes, remedy) in uses.items():
        if sizes[dim] > 1 and not any(dim in shard.compute.get(axis, ()) for axis in axes):
            fail(
                layout,
                f"mesh.{dim}",
                f"size {sizes[dim]}, but no rule splits work over {dim}; "
                f"its ranks would all do the same; write {remedy}",
            )


def _hint(table: str, axis: str, dim: str) -> str:
    if dim in _STORAGE and axis != "batch" and table == "compute":
        return f"; to store {axis} over {dim} put it in params or optimizer"
    if axis == "seq" and dim == "tp":
        return "; sequence parallelism is res_seq: tp"
    if table == "optimizer" and dim in ("tp", "pp"):
        return "; optimizer lists additions only and follows params for the rest"
    return ""


def check_collisions(layout: Layout, tree: ParamTree) -> None:
    """A dim may cut a tensor once."""
    shard = layout.shard

    def source(table: str, axis: str, dim: str) -> str:
        """The written rule that puts `dim` on `axis` in a complete table."""
        under = {"optimizer": "params", "grads": "compute"}.get(table, table)
        own = f"shard.{table}.{axis}"
        mine = getattr(shard, table) or {}
        return own if own in layout._where and dim in mine.get(axis, ()) else f"shard.{under}.{axis}"

    for table, rules in tables(layout)._asdict().items():
        for segment, params in tree.items():
            for name, p in params.items():
                _spend_once(layout, table, rules, f"{segment}/{name}", p, source)


def check_grads(layout: Layout, tree: ParamTree) -> None:
    """The accumulator of a parameter is cut as it is stored, or by the first of those cuts, or by none."""
    shard, sizes = layout.shard, layout.sizes
    for segment, params in tree.items():
        for name, p in params.items():
            steps = [
                {(axis, dim) for dim in rules.get(axis, ()) if dim in _STORAGE and sizes[dim] > 1}
                for rules in (shard.params, shard.optimizer)
                for axis in p.axes
            ]
            wanted = {(a, d) for a in p.axes for d in (shard.grads or {}).get(a, ()) if d in _STORAGE and sizes[d] > 1}
            for step in [step for step in steps if step]:
                if step <= wanted:
                    wanted -= step
                elif wanted:
                    axis, dim = sorted(wanted)[0]
                    cuts = listed(f"{a}: {d}" for s in steps for a, d in sorted(s))
                    fail(
                        layout,
                        f"shard.grads.{axis}",
                        f"{dim}; {segment}/{name} is cut by {cuts} at rest; grads may repeat these, in order",
                    )


def _spend_once(
    layout: Layout, table: str, rules: Rules, name: str, p: Param, source: Callable[[str, str, str], str]
) -> None:
    spent: dict[str, str] = {}
    for axis in (*p.axes, *(("layers",) if name.startswith("block/") else ())):
        for dim in rules.get(axis, ()):
            if dim not in spent:
                spent[dim] = axis
                continue
            if spent[dim] == axis:
                fail(
                    layout,
                    source(table, axis, dim),
                    f"{dim}; {name} is already cut over {dim} on {axis} by params "
                    f"({at(layout, f'shard.params.{axis}')}); optimizer lists additions only",
                )
            first, second = source(table, spent[dim], dim), source(table, axis, dim)
            if first.startswith(f"shard.{table}.") and not second.startswith(f"shard.{table}."):
                first, second = second, first
            one, other = first.rpartition(".")[2], second.rpartition(".")[2]
            fail(
                layout,
                second,
                f"{dim}; {name} ({' '.join(p.axes)}) would be cut over {dim} on both {one} "
                f"({first} at {at(layout, first)}) and {other}; a dim cuts a tensor once",
            )
