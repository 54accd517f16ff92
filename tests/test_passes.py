"""Cutting and recomputing leave values as they are: run(pass(g)) == run(g)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import tiny
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain.mesh import Groups, simulate
from dtrain.program import passes, remat
from dtrain.program.lower import Graph, Segment

WRT = ("x", "params:w", "params:b")
INPUTS = ("x", "params:w", "params:b", "grad")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def joint() -> fx.GraphModule:
    """y = relu(x @ exp(w)) * (b + 1) twice over, with its gradients."""

    def fn(x: Tensor, w: Tensor, b: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = torch.relu(leaves[0] @ leaves[1].exp()) * (leaves[2] + 1)
        y = torch.sin(y @ leaves[1].exp()) + torch.arange(4.0)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    return make_fx(fn)(torch.ones(3, 4), torch.ones(4, 4), torch.ones(4), torch.ones(3, 4))


def split(policy: str, whole: fx.GraphModule | None = None) -> dict[str, passes.Cut]:
    named = passes.joint((whole or joint()).graph, INPUTS, WRT)
    return passes.split_joint(named, remat.by_kind(remat.POLICIES[policy]))


def run(cut: passes.Cut, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = cut.module(*[given[k] for k in cut.inputs])
    return dict(zip(cut.outputs, out, strict=True))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("halves", [False, True], ids=["B", "I+W"])
def test_the_parts_compute_what_the_whole_does(policy: str, halves: bool) -> None:
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, generator=g), *(torch.randn(*s, generator=g) for s in ((4, 4), (4,), (3, 4)))]
    given = dict(zip(INPUTS, values, strict=True))
    whole = joint()
    want = dict(zip(("y", *(f"grad:{w}" for w in WRT)), whole(*values), strict=True))
    cuts = split(policy, whole)
    got = run(cuts["forward"], given)
    kept = given | got
    for name in ("backward_input", "backward_weight") if halves else ("backward",):
        out = run(cuts[name], kept)
        kept |= out
        got |= out
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def saved(policy: str) -> list[str]:
    cut = split(policy)["forward"]
    assert [n for n in cut.outputs if n != "y"] == [f"saved:{i}" for i in range(len(cut.outputs) - 1)]
    return [passes.op_name(n) for n in passes.results_of(cut.module.graph)[1:]]


def test_what_is_saved() -> None:
    assert saved("full") == []
    assert saved("selective") == ["mm", "mm"]  # products with a weight; relu, sin and the rest are computed again
    none = saved("none")
    assert {"relu", "mm"} <= set(none)
    assert not {"exp", "arange", "permute", "t", "transpose"} & set(none)  # these need parameters only, or nothing


def test_the_halves_do_no_product_twice() -> None:
    cuts = split("none")
    products = {k: sum(passes.op_name(n) == "mm" for n in c.module.graph.nodes) for k, c in cuts.items()}
    assert products["backward"] == 4  # two for x, two for w
    assert products["backward_input"] == products["backward_weight"] == 2
    assert cuts["backward_input"].outputs[0] == "grad:x"
    assert cuts["backward_weight"].outputs == ("grad:params:w", "grad:params:b")


def test_only_inputs_that_are_read_are_inputs() -> None:
    cuts = split("none")
    assert cuts["forward"].inputs == ("x", "params:w", "params:b")
    assert "grad" in cuts["backward"].inputs
    full = split("full")
    assert set(full["backward"].inputs) == set(INPUTS)


def test_recomputation_stands_before_its_reader() -> None:
    """Late: what backward computes again is not all alive at its beginning."""
    cut = split("full")["backward"]
    order = [n for n in cut.module.graph.nodes if n.op == "call_function"]
    for node in order:
        for a in node.all_input_nodes:
            assert a.op == "placeholder" or order.index(a) < order.index(node)
    readers = {n: min(order.index(u) for u in n.users if u in order) for n in order if any(u in order for u in n.users)}
    exp = [n for n in order if passes.op_name(n) == "exp"]
    assert max(readers[n] - order.index(n) for n in exp) < len(order) - 1


@pytest.mark.parametrize("more", [(), ("shard.compute.res_seq=[]",)], ids=["sequence-parallel", "tensor-parallel"])
def test_gradients_of_weights_are_computed_while_the_gradient_of_x_is_summed(more: tuple[str, ...]) -> None:
    """Of Llama's seven products for weights, all stand between a collective's start and its wait, and the values are
    the same (the equality tests run this graph against one device)."""
    block = tiny.program("llama", "tp2", more).segments["block"]
    graph = block.graphs["backward"].module.graph
    weights = {block.graphs["backward"].outputs.index(f"grad:params:{n}"): n for n in block.stored if n[0] == "w"}
    grads = passes.results_of(graph)
    of_weight = {n: weights[i] for i, g in enumerate(grads) if i in weights for n in passes.ancestors([g])}
    urgent = passes.ancestors([grads[0]])
    flying: set[fx.Node] = set()
    hidden = []
    for node in graph.nodes:
        if passes.is_collective(node):
            flying.add(node)
        if passes.op_name(node) == "wait_tensor":
            flying.discard(node.all_input_nodes[0])
        if passes.op_name(node) == "mm" and node in of_weight and node not in urgent and flying:
            hidden.append(of_weight[node])
    assert sorted(hidden) == sorted(weights.values()) and len(hidden) == 7


def test_names_of_groups() -> None:
    graph = tiny.segment("llama", "block", "tp2").graphs["forward"].module.graph
    nodes = [n for n in graph.nodes if passes.is_collective(n)]
    assert {passes.group_of(n) for n in nodes} == {"tp"}
    assert not any(passes.is_collective(n) for n in graph.nodes if passes.op_name(n) == "wait_tensor")


# ----------------------------------------------------------------------------------------- on a real segment


def call(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(graph.outputs, graph.module(*[given[k] for k in graph.inputs]), strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("name", ["embed", "block"])
def test_every_policy_and_cut_of_a_segment_gives_the_same_bits(family: str, name: str) -> None:
    """On two simulated ranks: forward, and backward in one or two parts, under every recompute policy."""
    parts = {r: tiny.segment(family, name, "tp2", (f"run.remat={r}",)) for r in ("none", "selective", "full")}
    mesh = tiny.make(family, "tp2").job.mesh

    def work(rank: int, groups: Groups) -> list[dict[str, Tensor]]:
        results = []
        for part in parts.values():
            given = example(part, rank)
            forward = call(part.graphs["forward"], given)
            kept = given | forward
            whole = call(part.graphs["backward"], kept)
            first = call(part.graphs["backward_input"], kept)
            second = call(part.graphs["backward_weight"], kept | first)
            results += [{"y": forward["y"], **whole}, {"y": forward["y"], **first, **second}]
        return results

    for first, *others in simulate(mesh, ["tp"], work):
        assert first["y"].isfinite().all() and (name == "embed" or first["grad:x"].abs().max() > 0)
        for other in others:
            for key, value in first.items():
                assert torch.equal(other[key], value), key


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_loss_in_chunks_is_the_loss(family: str) -> None:
    """On two simulated ranks: the head's one graph gives its forward's loss, bit for bit, and the gradients of one
    chunk to rounding; the scores of the vocabulary have the length of a chunk."""
    parts = {n: tiny.segment(family, "head", "tp2", (f"kernels.loss_chunks={n}",)) for n in (1, 2, 4)}
    mesh = tiny.make(family, "tp2").job.mesh
    for n, part in parts.items():
        assert not {"backward_input", "backward_weight"} & set(part.graphs) and part.saved_bytes == 0
        shapes = [tuple(v.shape) for v in map(lambda node: node.meta["val"], values(part.graphs["backward"]))]
        assert max(math.prod(s) for s in shapes if s[-1:] == (128,) and s[0] not in (16, 128)) == 8 // n * 128

    def work(rank: int, groups: Groups) -> list[dict[str, Tensor]]:
        results = []
        for part in parts.values():
            given = example(part, rank)
            forward = call(part.graphs["forward"], given)
            both = call(part.graphs["backward"], given)
            assert torch.equal(forward["y"], both["y"])
            results.append(both)
        return results

    for first, *others in simulate(mesh, ["tp"], work):
        assert first["y"] != 0 and first["grad:x"].abs().max() > 0
        for other in others:
            for key, value in first.items():
                torch.testing.assert_close(other[key], value, rtol=1e-12, atol=1e-12)


def values(graph: Graph) -> list[fx.Node]:
    return [n for n in graph.module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]


def example(part: Segment, rank: int) -> dict[str, Tensor]:
    """Something for every input of a segment's graphs."""
    g = torch.Generator().manual_seed(rank)
    out: dict[str, Tensor] = {}
    for kind in ("forward", "backward"):
        graph = part.graphs[kind]
        for key, hole in zip(graph.inputs, graph.module.graph.find_nodes(op="placeholder"), strict=True):
            if key.startswith("saved") or key in out:
                continue
            shape, dtype = hole.meta["val"].shape, hole.meta["val"].dtype
            if key == "at:tp":
                out[key] = torch.tensor(rank)
            elif dtype == torch.int64:
                out[key] = torch.randint(2, shape, generator=torch.Generator().manual_seed(0))
            else:
                out[key] = torch.rand(shape, generator=g, dtype=dtype) + (key.startswith("count"))
    return out


def test_chunks_of_a_loss_run_one_after_the_other() -> None:
    """The head's backward in pieces gives the same bits, and no scores cross from one to the next."""
    g = tiny.segment("llama", "head", "", ("kernels.loss_chunks=4", "model.vocab=997")).graphs["backward"]
    parts = passes.pieces(passes.Cut(g.module, g.inputs, g.outputs))
    assert len(parts) == 4
    holes = g.module.graph.find_nodes(op="placeholder")
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(x.shape, generator=generator, dtype=x.dtype)
        if x.is_floating_point()
        else torch.randint(61, x.shape, generator=generator)
        for x in (h.meta["val"] for h in holes)
    ]
    there = dict(zip(g.inputs, given, strict=True))
    for part in parts:
        shapes = [tuple(n.meta["val"].shape) for n in part.module.graph.find_nodes(op="placeholder")]
        assert all(shape == (1024, 16) for shape in shapes if 1024 in shape)  # the table and its gradient
        there.update(zip(part.outputs, part.module(*[there[k] for k in part.inputs]), strict=True))
    for name, x in zip(g.outputs, g.module(*given), strict=True):
        assert torch.equal(there[name], x), name


def test_a_graph_without_chunks_is_one_piece() -> None:
    for name in ("block", "head"):
        g = tiny.segment("llama", name, "").graphs["backward"]
        (whole,) = passes.pieces(passes.Cut(g.module, g.inputs, g.outputs))
        assert whole.module is g.module
