"""What may be chosen freely for a model, a cluster and a global batch: mesh, rules, schedule, microbatch and
recomputation. None of it changes the mathematics of a run.

A choice is written as overrides of a layout, the notation of the command line, so that the layout's own checks say
whether it is legal and a person can type it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain import layout as layouts
from dtrain.layout import Layout, RematBudget
from dtrain.layout.derived import lengths

TENSOR = ("vocab", "heads", "kv_heads", "mlp")  # axes that tp cuts, where a model has them


@dataclass(frozen=True)
class Choice:
    """Sizes of the mesh's dims, in their order, outermost first; rules; and the rest of what may be chosen.

    Weights are stored over fsdp (ZeRO-3). `sequence`: res_seq over tp. `optimizer`: its state over dp as well (ZeRO-1).
    `grads`: the dims that cut the accumulator of gradients (ZeRO-2). `remat` as YAML has it.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sequence: bool = True
    optimizer: bool = False
    grads: tuple[str, ...] = ()
    keep: str = "use"
    schedule: str = "1f1b"
    chunks: int = 1
    microbatch: int = 1
    remat: str = "selective"

    @property
    def mesh(self) -> dict[str, int]:
        """The dims above 1."""
        sizes = {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "tp": self.tp}
        return {dim: n for dim, n in sizes.items() if n > 1}

    @property
    def replicas(self) -> int:
        return self.dp * self.fsdp

    @property
    def stages(self) -> int:
        return self.pp * self.chunks


def choice_of(layout: Layout) -> Choice:
    """The nearest choice to what a layout says: rules that no choice has are left out."""
    shard, sizes, remat = layout.shard, layout.sizes, layout.run.remat
    summed = {dim for axis, dims in (shard.grads or {}).items() if axis != "batch" for dim in dims}
    return Choice(
        pp=sizes["pp"],
        dp=sizes["dp"],
        fsdp=sizes["fsdp"],
        tp=sizes["tp"],
        sequence="tp" in shard.compute.get("res_seq", ()),
        optimizer=any("dp" in dims for dims in (*shard.params.values(), *shard.optimizer.values())),
        grads=tuple(dim for dim in ("fsdp", "dp") if dim in summed),
        keep=layout.unshard.keep,
        schedule=layout.pipeline.schedule,
        chunks=layout.pipeline.chunks or 1,
        microbatch=layout.data.microbatch,
        remat=_remat(remat),
    )


def _remat(remat: str | tuple[str, ...] | RematBudget) -> str:
    if isinstance(remat, RematBudget):
        return f"{{budget: {remat.budget}B}}"
    return remat if isinstance(remat, str) else f"[{', '.join(remat)}]"


def overrides(choice: Choice, layout: Layout) -> tuple[str, ...]:
    """The choice in place of what the layout says of these things. Links follow from the places of the dims."""
    mesh = ", ".join(f"{dim}: {{size: {n}}}" for dim, n in choice.mesh.items())
    tables = {name: _flow(rules) for name, rules in shard(choice, layout).items()}
    _, config = layouts.family(layout)
    pipeline = {"schedule": choice.schedule}
    if choice.schedule == "interleaved":
        pipeline["chunks"] = str(choice.chunks)
    if config.layers % choice.stages:
        pipeline["layers_per_stage"] = str(list(uneven(config.layers, choice.stages)))
    return (
        f"mesh={{{mesh}}}",
        f"shard={_flow(tables)}",
        f"unshard.keep={choice.keep}",
        f"pipeline={_flow(pipeline)}",
        f"data.microbatch={choice.microbatch}",
        f"run.remat={choice.remat}",
    )


def changes(choice: Choice, layout: Layout) -> tuple[str, ...]:
    """Those of the overrides that say something else than the layout."""
    now = overrides(choice_of(layout), layout)
    return tuple(o for o in overrides(choice, layout) if o not in now)


def shard(choice: Choice, layout: Layout) -> dict[str, dict[str, str]]:
    """The tables of rules, each axis with its dims as YAML has them."""
    module, config = layouts.family(layout)
    have, mesh = lengths(module.params(config)), choice.mesh
    cut = {"layers": "pp"} if "pp" in mesh else {}
    cut |= {axis: "tp" for axis in TENSOR if axis in have and "tp" in mesh}
    data = [d for d in ("dp", "fsdp") if d in mesh]
    out = {
        "params": cut | ({"embed": "fsdp"} if "fsdp" in mesh else {}),
        "compute": cut
        | ({"batch": _dims(data)} if data else {})
        | ({"res_seq": "tp"} if choice.sequence and "tp" in mesh else {}),
        "optimizer": {"embed": "dp"} if choice.optimizer and "dp" in mesh else {},
        "grads": {"embed": _dims([d for d in choice.grads if d in mesh])} if {*choice.grads} & {*mesh} else {},
    }
    return {name: rules for name, rules in out.items() if rules}


def uneven(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of stages that do not divide them: the first and the last, which have embedding and head besides, get
    the fewer."""
    each, more = divmod(layers, stages)
    first = (stages - more + 1) // 2
    return tuple(each + (first <= s < first + more) for s in range(stages))


def _dims(dims: Sequence[str]) -> str:
    return dims[0] if len(dims) == 1 else f"[{', '.join(dims)}]"


def _flow(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"
