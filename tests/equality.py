"""Cases for "every layout equals one device": a case is drawn, turned into a layout, run, and compared."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dtrain import layout, optim, plan, reference, verify
from dtrain.program.interpret import Calls
from dtrain.program.lower import Program, lower
from dtrain.program.update import UpdateConfig

# Which dims a case has, and their sizes; the order is drawn.
PRODUCTS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("tp", 4),),
    (("pp", 2), ("tp", 2)),
    (("dp", 2), ("tp", 2)),
    (("fsdp", 2), ("tp", 2)),
    (("dp", 2), ("fsdp", 2)),
    (("pp", 2), ("dp", 2)),
    (("pp", 2), ("fsdp", 3)),
    (("pp", 3), ("tp", 2)),
    (("dp", 3), ("tp", 2)),
    (("fsdp", 2), ("tp", 4)),
    (("pp", 2), ("dp", 2), ("tp", 2)),
    (("pp", 2), ("fsdp", 2), ("tp", 2)),
    (("dp", 2), ("fsdp", 2), ("tp", 2)),
    (("pp", 2), ("dp", 2), ("fsdp", 2)),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
FAMILIES = ("llama", "gpt2", "bert")
Triple = tuple[tuple[tuple[str, int], ...], str, str]


def triples() -> list[Triple]:
    """Every legal (dim product, schedule, family): interleaving needs a pipeline."""
    return [
        (dims, schedule, family)
        for dims, schedule, family in itertools.product(PRODUCTS, SCHEDULES, FAMILIES)
        if schedule != "interleaved" or "pp" in dict(dims)
    ]


Choose = Callable[[str, Sequence[Any]], Any]


def chooser(triple: Triple, draw: Callable[[int], int]) -> Choose:
    """`choose(name, options)`: `draw(n)` gives a number below n; 0 means another option for each triple and name,
    so that hypothesis's simplest example is a different one everywhere."""

    def choose(name: str, options: Sequence[Any]) -> Any:
        first = zlib.crc32(f"{triple}{name}".encode()) % len(options)
        return options[(first + draw(len(options))) % len(options)]

    return choose


@dataclass(frozen=True)
class Case:
    layout: str
    labels: str  # which labels are ignored
    seed: int
    clip: float | None


def draw_case(triple: Triple, choose: Choose, precision: str = "fp64", width: int = 16, seq: int = 8) -> Case:
    """One layout of a triple, every other choice drawn."""
    dims, schedule, family = triple
    sizes = dict(dims)
    order = choose("order", list(itertools.permutations(dims)))
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    chunks = 2 if schedule == "interleaved" else 1
    microbatches = choose("microbatches", (1, 2, 3, 4))
    if schedule == "interleaved":
        microbatches = pp * choose("rounds", (1, 2))
    microbatch = choose("microbatch", (1, 2))
    replicas = sizes.get("dp", 1) * sizes.get("fsdp", 1)

    kv_heads = choose("kv_heads", (1, 2, 4))
    if family != "llama" or (kv_heads % tp and tp % kv_heads):
        kv_heads = 4
    uneven = pp > 1 and choose("uneven", (False, True))
    per_stage = [1] * (pp * chunks)
    if uneven:
        per_stage[choose("which", range(len(per_stage)))] += 1
    layers = sum(per_stage) if pp > 1 else choose("layers", (1, 2))
    dropout = choose("dropout", (0.0, 0.2)) if family != "llama" else 0.0
    vocab = choose("vocab", (61, 64))
    model: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "embed": width,
        "heads": 4,
        "vocab": vocab,
        "mlp": width + 8,
    }
    if family == "llama":
        model |= {"kv_heads": kv_heads, "tied": choose("tied", (False, True))}
    else:
        model |= {"positions": seq + 4, "dropout": dropout, "attention_dropout": dropout}
    if family == "gpt2":
        model |= {"tied": choose("tied", (False, True))}
    if family == "bert":
        model |= {"norm": choose("norm", ("pre", "post"))}

    heads = {"vocab": "tp", "heads": "tp", "mlp": "tp"} | ({"kv_heads": "tp"} if family == "llama" else {})
    common = (heads if tp > 1 else {}) | ({"layers": "pp"} if pp > 1 else {})
    compute: dict[str, Any] = dict(common)
    data = [d for d, _ in order if d in ("dp", "fsdp")]
    if data:
        compute["batch"] = data
    if tp > 1 and choose("res_seq", (True, False)):
        compute["res_seq"] = "tp"
    params = dict(common) | ({"embed": "fsdp"} if "fsdp" in sizes else {})
    zero = choose("zero", (0, 1, 2)) if "dp" in sizes else 0
    shards = choose("grads", (True, False)) if "fsdp" in sizes else False
    optimizer = {"embed": "dp"} if zero else {}
    early = (["fsdp"] if shards else []) + (["dp"] if zero == 2 and (shards or "fsdp" not in sizes) else [])
    pipeline: dict[str, Any] = {"schedule": schedule}
    if chunks > 1:
        pipeline["chunks"] = chunks
    if uneven:
        pipeline["layers_per_stage"] = per_stage
    lines = {
        "cluster": {"nodes": 1, "gpus_per_node": _product(sizes.values()), "gpu": "cpu"},
        "mesh": {d: {"size": n} for d, n in order},
        "shard": {"params": params, "compute": compute, "optimizer": optimizer}
        | ({"grads": {"embed": early}} if early else {}),
        "unshard": {"keep": choose("keep", ("step", "forward", "use"))},
        "pipeline": pipeline,
        "model": model,
        "data": {
            "source": "synthetic",
            "seq": seq,
            "batch": replicas * microbatch * microbatches,
            "microbatch": microbatch,
        },
        "run": {"steps": 2, "precision": precision, "remat": choose("remat", ("none", "selective", "full"))},
        "kernels": {"attention": "math" if dropout else choose("kernel", ("math", "auto"))},
    }
    return Case(
        "\n".join(f"{k}: {_yaml(v)}" for k, v in lines.items()),
        choose("labels", ("all", "some", "some", "one sequence", "last half")),
        choose("seed", range(5)),
        choose("clip", (None, 0.5)),
    )


def _product(sizes: Any) -> int:
    n = 1
    for size in sizes:
        n *= size
    return n


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_yaml(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_batches(case: Case, made: plan.Plan, steps: int = 2) -> list[dict[str, Tensor]]:
    """Random global batches with some labels ignored."""
    g = torch.Generator().manual_seed(case.seed)
    b, s, cfg = made.layout.data.batch, made.job.seq, made.job.config
    out = []
    for step in range(steps):
        labels = torch.randint(cfg.vocab, (b, s), generator=g)
        ignored = torch.zeros(b, s, dtype=torch.bool)
        if case.labels == "some":
            ignored = torch.rand(b, s, generator=g) < 0.5
        elif case.labels == "one sequence":
            ignored[1:] = True
        elif case.labels == "last half":
            ignored[:, s // 2 :] = True
        batch = {
            "tokens": torch.randint(cfg.vocab, (b, s), generator=g),
            "labels": labels.masked_fill(ignored, -1),
            "sample": torch.arange(b) + step * b,
        }
        if "order" in made.job.module.BATCH:
            valid = torch.ones(b, s, dtype=torch.int64)
            valid[0, s - 2 :] = 0
            order = torch.randint(2, (b,), generator=g)
            if case.labels == "one sequence":
                order[1:] = -1
            batch |= {"types": torch.randint(2, (b, s), generator=g), "valid": valid, "order": order}
        out.append({k: batch[k] for k in made.job.module.BATCH})
    return out


LR = 0.01
ADAMW = optim.Adamw(weight_decay=0.1)


@dataclass(frozen=True)
class OneDevice:
    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]


def one_device(case: Case, made: plan.Plan, batches: list[dict[str, Tensor]], dtype: torch.dtype) -> OneDevice:
    """The same steps by the reference."""
    module, cfg = made.job.module, made.job.config
    params, moments = reference.init(module, cfg, case.seed, dtype), None
    decayed = {k: p.decay for k, p in reference.parameters(module, cfg).items()}
    out = OneDevice([], [], [], [])
    for number, batch in enumerate(batches, 1):
        loss, grads = reference.loss_and_grads(module, cfg, params, batch, case.seed, number)
        params, moments = reference.adamw(
            params, grads, moments, decayed, number, LR, ADAMW.weight_decay, clip=case.clip
        )
        out.losses.append(float(loss))
        out.norms.append(float(reference.grad_norm(grads)))
        out.grads.append(grads)
        out.params.append(params)
    return out


def on_ranks(
    case: Case,
    made: plan.Plan,
    batches: list[dict[str, Tensor]],
    program: Program | None = None,
    calls: Calls | None = None,
) -> verify.Trained:
    """The same steps on simulated ranks."""
    counts = [made.job.module.counts(made.job.config, b) for b in batches]
    config = UpdateConfig(ADAMW, case.clip)
    return verify.train(made, batches, counts, config, lambda step: LR, case.seed, program, calls)


def worst_error(one: OneDevice, many: verify.Trained) -> tuple[float, str]:
    """The largest difference of any loss, norm, gradient or parameter, and what it is."""
    errors: list[tuple[float, str]] = []
    for i, report in enumerate(many.reports):
        errors += [
            (abs(report.loss - one.losses[i]), f"loss of step {i + 1}"),
            (abs(report.norm - one.norms[i]), f"norm of step {i + 1}"),
        ]
        for what, ours, theirs in (
            ("gradient", many.grads[i], one.grads[i]),
            ("parameter", many.params[i], one.params[i]),
        ):
            assert ours.keys() == theirs.keys()
            errors += [(float((ours[k] - theirs[k]).abs().max()), f"{what} {k} of step {i + 1}") for k in theirs]
    return max(errors, key=lambda e: e[0] if e[0] == e[0] else float("inf"))


def check(case: Case) -> None:
    """A case equals one device to 1e-9, and all copies of a shard are bitwise equal."""
    made = plan.plan(layout.loads(case.layout))
    batches = make_batches(case, made)
    one = one_device(case, made, batches, torch.float64)
    many = on_ranks(case, made, batches)
    error, what = worst_error(one, many)
    assert error < 1e-9, f"{what} is off by {error:.1e}\n{case}"
    assert many.copies, f"copies of a shard differ\n{case}"


def check_bf16(case: Case, seeds: int = 10) -> None:
    """Gradients of the first step in bf16, on ranks and on one device, against the fp64 truth: root mean square
    errors over a few weights and batches, since one draw of rounding errors says little."""
    made = plan.plan(layout.loads(case.layout))
    module, cfg = made.job.module, made.job.config
    program = lower(made.job)
    ours, theirs = Counter[str](), Counter[str]()
    for seed in range(seeds):
        case = replace(case, seed=seed)
        (batch,) = make_batches(case, made, steps=1)
        start = reference.init(module, cfg, seed, torch.float32)
        rounded = {k: v.to(torch.bfloat16) for k, v in start.items()}
        exact = {k: v.double() for k, v in rounded.items()}  # the truth starts from the weights bf16 computes with
        _, truth = reference.loss_and_grads(module, cfg, exact, batch, seed, 1)
        _, alone = reference.loss_and_grads(module, cfg, rounded, batch, seed, 1)
        many = on_ranks(case, made, [batch], program).grads[0]
        for path, g in truth.items():
            if path.endswith("/bk"):  # zero in exact arithmetic: softmax does not see a constant added to a row
                assert float(g.norm()) < 1e-12
                continue
            theirs[path] += float((alone[path].double() - g).square().sum())
            ours[path] += float((many[path].double() - g).square().sum())
    for path in theirs:
        ratio = (ours[path] / theirs[path]) ** 0.5
        assert ratio <= 1.5, f"{path}: {ratio:.2f} times one device's error\n{case}"
