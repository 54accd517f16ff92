"""What forwards keep: by kind, and within a budget at the least predicted time."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping

import pytest
import tiny
import torch
from torch import Tensor, fx

from dtrain import checkpoint, layout, plan, show, train
from dtrain.mesh import fake_mesh
from dtrain.program import cost, lower, passes, remat
from dtrain.program.passes import Joint

RATES = cost.Rates(1e9, 1e8, {"tp": (2, 1e7)})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def joints(family: str = "llama", mesh: str = "tp2", more: tuple[str, ...] = ()) -> Mapping[str, Joint]:
    job = tiny.make(family, mesh, more).job
    with fake_mesh(job.trace_mesh, job.trace_dims) as found:
        tree = lower.store_tree(job)
        return {s: lower._trace_segment(job, s, tree[s], found).joint for s in ("embed", "block")}


def names(nodes: list[fx.Node]) -> list[str]:
    return [passes.op_name(n) for n in nodes]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_selective_keeps_products_and_attention_and_computes_no_flop_again(family: str) -> None:
    block = joints(family)["block"]
    parts = passes.divide(block, remat.by_kind(remat.POLICIES["selective"]))
    assert {remat.kind(n, block.fixed) for n in parts.saved} == {"matmul", "attention", "reduced"}
    assert names(parts.saved).count("getitem") == 2  # the output of attention and its log-sum-exp
    assert sum(cost.flops(n) for n in parts.again) == 0
    backward = tiny.segment(family, "block", "tp2").graphs["backward"].module.graph
    assert "attention_backward" in names(list(backward.nodes)[:-1])
    assert "attention" not in names([n for n in backward.nodes if n.op == "call_function"])


def test_flops_of_a_block_are_those_of_its_matrices_and_attention() -> None:
    """6 P tokens for forward and backward of the weights (Kaplan et al. 2020), and attention's 2 + 5 products."""
    block = joints("llama", "")["block"]
    cfg = tiny.make("llama").job.config
    p = tiny.make("llama").job.module.params(cfg)["block"]
    weights = sum(torch.Size(w.shape).numel() for n, w in p.items() if not n.startswith("norm"))
    seq = 8
    attention = 7 * 2 * seq * seq * cfg.heads * cfg.head_dim / 2
    assert sum(cost.flops(n) for n in block.graph.nodes) == 6 * weights * seq + attention


def test_a_list_of_kinds() -> None:
    block = joints()["block"]
    for kinds in ((), ("attention",), ("gathered", "pointwise"), remat.KINDS):
        kept = passes.divide(block, remat.by_kind(kinds)).saved
        assert {remat.kind(n, block.fixed) for n in kept} <= set(kinds)
    assert [k.kind for k in tiny.segment("llama", "block", "tp2", ("run.remat=[attention]",)).kept] == ["attention"] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_inside_of_a_norm_in_fp32_is_never_kept(family: str) -> None:
    """What a wider copy says, the narrow value says; statistics of rows are small, and kept."""
    more = ("run.remat=none", "run.precision=bf16", "kernels.attention=math")
    found = {k.shape: k for k in tiny.segment(family, "block", "", more).kept if k.bytes > 4 * math.prod(k.shape) - 1}
    assert found and all(shape[-1] == 1 for shape in found)


def budget(size: int, block: int = 3) -> remat.Budget:
    return remat.Budget(size, [{"embed": 1, "block": block}], {"embed": 1, "block": 6}, RATES)


def kept(found: Mapping[str, Joint], saves: Mapping[str, passes.Save], held: Mapping[str, int]) -> int:
    return sum(remat.kept_bytes(found[s], passes.divide(found[s], saves[s]).saved) * n for s, n in held.items())


def test_more_budget_never_takes_more_time_and_is_never_exceeded() -> None:
    found = joints()
    held = budget(0).held[0]
    everything = kept(found, {s: remat.by_kind(remat.KINDS) for s in found}, held)
    least = kept(found, {s: remat.by_kind(()) for s in found}, held)
    times = []
    for size in range(least, everything + 1, (everything - least) // 12):
        limit = budget(size)
        saves = remat.choose(found, limit)
        assert kept(found, saves, held) <= size
        spent = {s: remat.seconds(found[s], passes.divide(found[s], saves[s]).saved, RATES) for s in found}
        times.append(sum(spent[s] * n for s, n in limit.runs.items()))
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 2
    with pytest.raises(remat.BudgetError, match=f"inputs alone take {least}"):
        remat.choose(found, budget(least - 1))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_choice_is_close_to_the_best_of_all(share: float) -> None:
    """Against every subset of the values worth keeping in one block."""
    block = joints("llama", "tp2")["block"]
    solid = [g for g in remat._options(block) if {remat.kind(n, block.fixed) for n in g} != {"pointwise"}]
    full = remat.kept_bytes(block, frozenset().union(*solid))
    empty = remat.kept_bytes(block, frozenset())
    size = int(empty + share * (full - empty))
    best = min(
        remat.seconds(block, nodes, RATES)
        for r in range(len(solid) + 1)
        for groups in itertools.combinations(solid, r)
        if remat.kept_bytes(block, nodes := frozenset().union(*groups)) <= size
    )
    saves = remat.choose({"block": block}, remat.Budget(size, [{"block": 1}], {"block": 1}, RATES))
    got = remat.seconds(block, passes.divide(block, saves["block"]).saved, RATES)
    nothing = remat.seconds(block, frozenset(), RATES)
    assert nothing - got >= 0.9 * (nothing - best)  # greedy: at least nine tenths of what can be saved


def test_how_many_passes_are_in_flight() -> None:
    made = tiny.make("llama", "pp2", ("data.batch=4",))
    first, second = (plan.held(a, 2) for a in made.train)
    assert first == [{"embed": 2, "block": 2}]  # 1F1B: pp - r microbatches
    assert second == [{"embed": 0, "block": 1}]


@pytest.mark.parametrize("text", ["full", "[matmul, attention]", "{budget: 1MiB}"])
def test_a_policy_survives_the_checkpoint(text: str) -> None:
    """What a run writes beside its weights is compared with what it is started with again."""
    lay = tiny.make("llama", "tp2", (f"run.remat={text}",)).layout
    written = json.loads(json.dumps(train.as_dict(lay)))
    assert checkpoint.compare(written, train.as_dict(lay)) == ({}, {})
    assert checkpoint.compare(written, train.as_dict(tiny.make("llama", "tp2", ("run.remat=none",)).layout))[0] == {}


def test_show_lists_what_a_budget_keeps() -> None:
    page = show.show(tiny.make("llama", "tp2", ("run.remat={budget: 9KiB}",)).layout)
    assert re.search(r"kept for backward, .*: at most [\d.]+KiB on a rank, budget 9KiB\n", page)
    assert re.search(r"block +llama\.py:\d+ +reduced +1 x 4 x 16 ", page)


BAD = {
    "half": "must be none, selective, full, a list of what to keep",
    "[matmul, norms]": "must be none, selective, full, a list of what to keep",
    "{budgets: 1GiB}": "must be none, selective, full",
    "{budget: 60}": "must be a size with its unit, as in 60GiB",
    "{budget: 10B}": "budget 10B; the inputs of layers in flight, which are always kept, take 1KiB",
    "3": "must be none, selective, full",
}


@pytest.mark.parametrize("text", BAD)
def test_a_policy_that_does_not_exist(text: str) -> None:
    with pytest.raises(layout.LayoutError) as error:
        tiny.make("llama", "tp2", (f"run.remat={text}",))
    line = str(error.value)
    assert "run.remat" in line and BAD[text] in line and "\n" not in line


@pytest.mark.parametrize("size", ["2KiB", "5KiB", "1MiB"])
def test_a_budget_holds_for_all_layers_in_flight(size: str) -> None:
    job = tiny.make("llama", "tp2", (f"run.remat={{budget: {size}}}",)).job
    assert isinstance(job.remat, remat.Budget)
    assert job.remat.held == [{"embed": 1, "block": 2}]
    x = 1 * 4 * 16 * 8  # batch, res_seq/tp, embed, bytes
    each = {n: s.saved_bytes + x * (n != "embed") for n, s in lower.lower(job).segments.items()}
    assert 2 * x <= each["embed"] + 2 * each["block"] <= job.remat.bytes


def test_every_choice_computes_the_same_bits() -> None:
    """A block on one rank: keeping any list of kinds gives the same gradients as keeping all."""
    found = tiny.make("llama").job
    traced = lower._trace_segment(found, "block", lower.store_tree(found)["block"], None).joint
    g = torch.Generator().manual_seed(0)
    given: dict[str, Tensor] = {}
    for hole, key in traced.name_of.items():
        v = hole.meta["val"]
        given[key] = (
            torch.randn(v.shape, generator=g, dtype=v.dtype)
            if v.is_floating_point()
            else torch.ones_like(v, device="cpu").new_ones(v.shape)
        )
    results = []
    for kinds in (remat.KINDS, ("matmul",), ("attention", "pointwise"), ()):
        cuts = passes.split_joint(traced, remat.by_kind(kinds))
        now = dict(given)
        for part in ("forward", "backward"):
            cut = cuts[part]
            now |= dict(zip(cut.outputs, cut.module(*[now[k] for k in cut.inputs]), strict=True))
        results.append({k: v for k, v in now.items() if k.startswith("grad:")})
    assert len(results[0]) > 2
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(other[key], value), key
