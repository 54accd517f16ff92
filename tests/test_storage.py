"""Parameters at rest: cut, padded, gathered and reduced over simulated groups, and equal to the whole tensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain import reference, storage
from dtrain.axes import AxesError, Init, Param, Rules
from dtrain.mesh import Groups, Mesh, for_reductions, simulate
from dtrain.storage import Stored, Sums

COMMON = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
NORMAL = Init("normal", 0.02)
AXES = ("embed", "mlp", "vocab")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    stored: tuple[Stored, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A few parameters on a small mesh, any axis of each cut by tp, at rest by fsdp and for the optimizer by dp."""
    dims = draw(st.permutations(("dp", "fsdp", "tp")))
    mesh = Mesh(tuple((d, draw(st.integers(1, 3 if d != "tp" else 2))) for d in dims))
    place = {d: draw(st.sampled_from((*AXES, None))) for d in ("fsdp", "dp", "tp")}
    compute: Rules = {a: ("tp",) for a in AXES if place["tp"] == a}
    params = {a: (*compute.get(a, ()), *(["fsdp"] if place["fsdp"] == a else [])) for a in AXES}
    optimizer = {a: ("dp",) for a in AXES if place["dp"] == a}
    grads = draw(st.sampled_from((None, params, {a: (*params[a], *optimizer.get(a, ())) for a in AXES})))
    stored = []
    for i in range(draw(st.integers(1, 3))):
        axes = tuple(draw(st.permutations(AXES))[: draw(st.integers(1, 3))])
        shape = tuple(draw(st.integers(1, 5)) * (mesh.size("tp") if compute.get(a) else 1) for a in axes)
        param = Param(shape, axes, NORMAL)
        stored.append(storage.store(f"block/w{i}", param, param, mesh, compute, params, optimizer, grads))
    return Case(mesh, tuple(stored))


def names(mesh: Mesh) -> list[str]:
    """Every product of dims, as groups, for gathers and for reductions."""
    dims = mesh.ordered(mesh.dims)
    products = [".".join(c) for n in range(1, len(dims) + 1) for c in itertools.combinations(dims, n)]
    return [*products, *map(for_reductions, products)]


def shard(s: Stored, mesh: Mesh, rank: int, whole: Tensor, steps: int, padding: float) -> Tensor:
    """A rank's part of a whole tensor, by `spans`."""
    spans = storage.spans(s, mesh, mesh.coordinates(rank), steps)
    out = torch.full([p.length for p in spans], padding, dtype=whole.dtype)
    out[tuple(slice(0, p.stop - p.start) for p in spans)] = whole[tuple(slice(p.start, p.stop) for p in spans)]
    return out


def wholes(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Distinct whole numbers in every element, small enough for sums to be exact."""
    return [
        (torch.arange(math.prod(s.real), dtype=dtype) + 1000 * i + 1).view(s.real) for i, s in enumerate(case.stored)
    ]


@settings(max_examples=40, **COMMON)
@given(case=cases())
def test_gathering_what_was_cut_gives_it_back(case: Case) -> None:
    """Optimizer shards -> shards at rest -> local tensors, with poison for padding."""
    mesh, full = case.mesh, wholes(case)
    nan = float("nan")

    def work(rank: int, groups: Groups) -> tuple[list[Tensor], list[Tensor]]:
        masters = [shard(s, mesh, rank, w, len(s.steps), nan) for s, w in zip(case.stored, full, strict=True)]
        rest = storage.publish(case.stored, masters, torch.float64)
        return rest, storage.gather_rest(case.stored, rest, torch.float64)

    for rank, (rest, local) in enumerate(simulate(mesh, names(mesh), work)):
        for s, w, r, x in zip(case.stored, full, rest, local, strict=True):
            assert r.shape == s.shape(s.rest)
            assert x.shape == s.local
            assert torch.equal(x, shard(s, mesh, rank, w, 0, nan))
            held = shard(s, mesh, rank, w, s.rest, nan)
            assert torch.equal(r[~held.isnan()], held[~held.isnan()])


@settings(max_examples=40, **COMMON)
@given(case=cases(), microbatches=st.integers(1, 2))
def test_reducing_sums_over_ranks_and_microbatches(case: Case, microbatches: int) -> None:
    """Local gradients -> accumulator shards, every microbatch -> optimizer shards, whatever is cut when."""
    mesh, full = case.mesh, wholes(case)
    data = mesh.ordered(("dp", "fsdp"))
    sums = [Sums(data)] * len(case.stored)

    def gradient(rank: int, mb: int, s: Stored, w: Tensor) -> Tensor:
        at = mesh.coordinates(rank)
        weight = 1 + mb + 10 * sum(at[d] * 3**i for i, d in enumerate(data))
        return shard(s, mesh, rank, w, 0, 0.0) * weight

    def work(rank: int, groups: Groups) -> list[Tensor]:
        total: list[Tensor] | None = None
        for mb in range(microbatches):
            grads = [gradient(rank, mb, s, w) for s, w in zip(case.stored, full, strict=True)]
            parts = storage.reduce_early(case.stored, grads, torch.float64)
            assert [p.shape for p in parts] == [s.shape(s.grads) for s in case.stored]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        assert total is not None
        return storage.reduce_final(case.stored, sums, total, mesh, torch.float64)

    results = simulate(mesh, names(mesh), work)
    places = itertools.product(*(range(mesh.size(d)) for d in data))
    factor = sum(1 + mb + 10 * sum(i * 3**k for k, i in enumerate(at)) for at in places for mb in range(microbatches))
    for rank, got in enumerate(results):
        for s, w, g in zip(case.stored, full, got, strict=True):
            assert torch.equal(g, shard(s, mesh, rank, w * factor, len(s.steps), 0.0))  # padding stays zero


@settings(max_examples=60, **COMMON)
@given(case=cases())
def test_spans_partition_the_tensor(case: Case) -> None:
    """At every depth, each element is held by as many ranks as there are copies."""
    for s in case.stored:
        for steps in range(len(s.steps) + 1):
            held = torch.zeros(s.real, dtype=torch.int64)
            for rank in range(case.mesh.world):
                spans = storage.spans(s, case.mesh, case.mesh.coordinates(rank), steps)
                assert tuple(p.length for p in spans) == s.shape(steps)
                assert all(p.stop - p.start <= p.length for p in spans)
                held[tuple(slice(p.start, p.stop) for p in spans)] += 1
            used = replace(s, steps=s.steps[:steps]).dims_used()
            assert (held == case.mesh.world // case.mesh.product(used)).all()


@settings(max_examples=40, **COMMON)
@given(case=cases(), seed=st.integers(0, 3))
def test_a_shard_is_filled_as_the_whole_tensor_is(case: Case, seed: int) -> None:
    for s in case.stored:
        whole = reference.value(s.path, s.param, seed, torch.float64)
        for rank in range(case.mesh.world):
            ours = storage.fill(s, case.mesh, case.mesh.coordinates(rank), seed, torch.float64)
            assert torch.equal(ours, shard(s, case.mesh, rank, whole, len(s.steps), 0.0))


@pytest.mark.parametrize("init", [NORMAL, Init("ones"), Init("zeros")])
def test_vocabulary_padding_is_zero(init: Init) -> None:
    """Seven real classes, padded to twelve over four ranks: the padding is at the end, and it is no class."""
    mesh, real = Mesh((("tp", 4),)), Param((7, 2), ("vocab", "embed"), init)
    s = storage.store("head/table", real, replace(real, shape=(12, 2)), mesh, {"vocab": ("tp",)}, {}, {}, None)
    parts = [storage.fill(s, mesh, {"tp": i}, 0, torch.float64) for i in range(4)]
    assert [tuple(p.shape) for p in parts] == [(3, 2)] * 4
    rows = [storage.spans(s, mesh, {"tp": i}, 0)[0] for i in range(4)]
    assert [(r.start, r.stop) for r in rows] == [(0, 3), (3, 6), (6, 7), (9, 9)]
    whole = torch.cat(parts)
    assert torch.equal(whole[:7], reference.value("head/table", real, 0, torch.float64))
    assert not whole[7:].any()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kv_heads_divide_or_are_divided(ranks: int) -> None:
    mesh, p = Mesh((("tp", ranks),)), Param((3, 4, 2), ("embed", "kv_heads", "head_dim"), NORMAL)
    s = storage.store("block/wk", p, p, mesh, {"kv_heads": ("tp",)}, {}, {}, None)
    assert (s.local[1], s.share) == (max(1, 4 // ranks), max(1, ranks // 4))
    whole = reference.value("block/wk", p, 0, torch.float64)
    for i in range(ranks):
        first = i * 4 // ranks
        assert torch.equal(
            storage.fill(s, mesh, {"tp": i}, 0, torch.float64), whole[:, first : first + max(1, 4 // ranks)]
        )


def test_a_tied_parameter_has_the_values_of_its_owner() -> None:
    mesh, p = Mesh((("dp", 1),)), Param((5, 2), ("vocab", "embed"), NORMAL, tied_to="embed/table")
    s = storage.store("head/table", p, p, mesh, {}, {}, {}, None)
    assert torch.equal(storage.fill(s, mesh, {}, 3, torch.float64), reference.value("embed/table", p, 3, torch.float64))


def test_shared_kv_heads_and_ties_are_summed_over_their_groups() -> None:
    """The unit case of replicated parameters: parts 1 and 3 on two ranks are 4 on both, not 1, 3 or 2."""
    mesh, p = Mesh((("tp", 4),)), Param((2,), ("embed",), Init("ones"))
    s = storage.store("block/norm", p, p, mesh, {}, {}, {}, None)

    def work(rank: int, groups: Groups) -> list[Tensor]:
        grad = [torch.tensor([float(rank), 1.0])]
        return [
            storage.reduce_final([s], [Sums((), ("tp%2",))], grad, mesh, torch.float64)[0],
            storage.reduce_final([s], [Sums(("tp",), ())], grad, mesh, torch.float64)[0],
            storage.reduce_final([s], [Sums(())], grad, mesh, torch.float64)[0],
        ]

    for rank, (pairs, everyone, nobody) in enumerate(simulate(mesh, ["tp/reduce", "tp%2/reduce"], work)):
        assert pairs.tolist() == [[1.0, 2.0], [5.0, 2.0]][rank // 2]
        assert everyone.tolist() == [6.0, 4.0]
        assert nobody.tolist() == [float(rank), 1.0]


def test_one_collective_for_all_that_is_cut_alike() -> None:
    mesh = Mesh((("fsdp", 2), ("tp", 2)))
    ps = [Param((3, 4), ("embed", "mlp"), NORMAL), Param((5,), ("embed",), NORMAL), Param((4,), ("mlp",), NORMAL)]
    stored = [
        storage.store(f"b/{i}", p, p, mesh, {"mlp": ("tp",)}, {"embed": ("fsdp",)}, {}, None) for i, p in enumerate(ps)
    ]
    calls: list[int] = []

    def work(rank: int, groups: Groups) -> list[Tensor]:
        shards = [storage.fill(s, mesh, mesh.coordinates(rank), 0, torch.float32) for s in stored]
        out = storage.gather_rest(stored, shards, torch.bfloat16)
        calls.append(groups["fsdp"].turn)
        return out

    for local in simulate(mesh, ["fsdp", "tp"], work):
        assert [tuple(x.shape) for x in local] == [(3, 2), (5,), (2,)]
        assert {x.dtype for x in local} == {torch.bfloat16}
    assert calls == [1] * 4


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (({"mlp": ("tp",)}, {}, {}, None), r"block/w: mlp 6 is not divisible by tp \(4\)"),
        (({"embed": ("tp",)}, {"mlp": ("tp",)}, {}, None), "block/w: params puts 'mlp' on dim 'tp'"),
        (({}, {"mlp": ("fsdp",)}, {"embed": ("fsdp",)}, None), "block/w: optimizer puts 'embed' on dim 'fsdp'"),
        (({"embed": ("tp",), "mlp": ("tp",)}, {}, {}, None), "axes 'embed' and 'mlp' are both on dim 'tp'"),
        (
            ({}, {}, {}, {"mlp": ("fsdp",)}),
            "block/w: grads puts 'mlp' on dim 'fsdp', but params and optimizer cut it by",
        ),
    ],
)
def test_rules_that_do_not_fit(rules: tuple[Rules, Rules, Rules, Rules | None], message: str) -> None:
    p = Param((8, 6), ("embed", "mlp"), NORMAL)
    with pytest.raises(AxesError, match=message):
        storage.store("block/w", p, p, Mesh((("fsdp", 2), ("tp", 4))), *rules)
