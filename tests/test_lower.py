"""Golden ledgers, one text for all ranks, and every misplacement an error at the model line that did it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dtrain import layout, plan
from dtrain.axes import AxesError, On
from dtrain.mesh import Mesh
from dtrain.program import lower, passes
from dtrain.program.lower import Segment
from dtrain.sharding import LoweringError, site

FAMILIES = ("llama", "gpt2", "bert")
OFF = ("shard.compute.res_seq=[]",)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def segment(family: str, name: str, mesh: str, *more: str) -> Segment:
    return tiny.segment(family, name, mesh, more)


# ------------------------------------------------------------------------------------------------- golden ledgers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_block_with_sequence_parallelism(family: str, remat: str) -> None:
    block = segment(family, "block", "tp2", f"run.remat={remat}")
    gathers, scatters = "all_gather_into_tensor tp", "reduce_scatter_tensor tp"
    assert tiny.counts(block, "forward") == {gathers: 2, scatters: 2}
    # The mirror, and in backward again what was not saved: the two gathers, and under `full` the sum before the
    # second of them, and the last sum where a norm comes after it (BERT's `post`).
    again = {"none": (0, 0), "selective": (2, 0), "full": (2, 1 + (family == "bert"))}[remat]
    assert tiny.counts(block, "backward") == {gathers: 2 + again[0], scatters: 2 + again[1]}
    assert tiny.counts(block, "unshard") == {}
    assert tiny.counts(block, "reduce") == {"all_reduce tp": 1}  # norms and biases, in one buffer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_block_with_tensor_parallelism_alone(family: str, remat: str) -> None:
    block = segment(family, "block", "tp2", f"run.remat={remat}", *OFF)
    assert tiny.counts(block, "forward") == {"all_reduce tp": 2}
    assert tiny.counts(block, "backward") == {"all_reduce tp": 2 + (remat == "full") * (1 + (family == "bert"))}
    assert tiny.counts(block, "unshard", "reduce") == {}


def test_what_each_recompute_policy_saves() -> None:
    """Bytes kept by a Llama block besides its input, at the proportions of the 8B model: regathering saves a lot."""
    more = ("model.embed=512", "model.mlp=1792", "model.heads=8", "data.seq=64")
    saved = {
        r: segment("llama", "block", "tp2", *more, f"run.remat={r}").saved_bytes for r in ("none", "selective", "full")
    }
    assert saved["full"] == 0
    assert 2 < saved["none"] / saved["selective"] < 5, saved


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["embed", "block", "head"])
def test_nothing_saved_depends_on_parameters_only(family: str, remat: str, name: str) -> None:
    graph = segment(family, name, "tp2", f"run.remat={remat}").graphs["forward"]
    holes = dict(zip(graph.module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    results = passes.results_of(graph.module.graph)
    assert [n for n in graph.outputs if n != "y"] == [f"saved:{i}" for i in range(len(results) - 1)]
    for node in results[1:]:
        reads = {holes[a] for a in passes.ancestors([node]) if a in holes}
        assert node.op == "call_function"  # inputs are kept by whoever holds them
        assert any(not r.startswith("params:") for r in reads), (node, reads)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_communicates_a_value_a_token(family: str) -> None:
    """Two all-reduces of [b, s], the maximum and (sum of exponentials, target's score), and none in backward."""
    b, s, e = 1, 8, 16
    head = segment(family, "head", "tp2", "run.remat=none", *OFF)
    assert tiny.ledger(head.graphs["forward"]) == [("all_reduce", "tp", (b, s)), ("all_reduce", "tp", (2, b, s))]
    assert tiny.ledger(head.graphs["backward"]) == [("all_reduce", "tp", (b, s, e))]
    for remat in ("selective", "full"):
        head = segment(family, "head", "tp2", f"run.remat={remat}")
        moved = [shape for kind in ("forward", "backward") for _, _, shape in tiny.ledger(head.graphs[kind])]
        assert max(torch.Size(shape).numel() for shape in moved) <= b * s * e  # the scores would be 61 a token


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedding_communicates_once(family: str) -> None:
    assert tiny.counts(segment(family, "embed", "tp2", *OFF), "forward", "backward") == {"all_reduce tp": 1}
    embed = segment(family, "embed", "tp2")
    assert tiny.counts(embed, "forward") == {"reduce_scatter_tensor tp": 1}
    assert tiny.counts(embed, "backward") == {"all_gather_into_tensor tp": 1}


def test_the_halves_of_a_backward_share_its_collectives() -> None:
    """The gradient sums stand in I, on the pipeline's path; regathered inputs are only read by W."""
    block = segment("llama", "block", "tp2")
    assert tiny.counts(block, "backward_input") == {"all_gather_into_tensor tp": 2, "reduce_scatter_tensor tp": 2}
    assert tiny.counts(block, "backward_weight") == {"all_gather_into_tensor tp": 2}


def test_kv_heads_fewer_than_ranks() -> None:
    """Two KV heads on four ranks: the pairs that share a head sum its gradient; activations move as before."""
    few = segment("llama", "block", "tp4")
    many = segment("llama", "block", "tp4", "model.kv_heads=4")
    for graph in ("forward", "backward"):
        assert tiny.counts(few, graph) == tiny.counts(many, graph)
    assert tiny.counts(many, "reduce") == {"all_reduce tp": 1}
    assert tiny.counts(few, "reduce") == {"all_reduce tp": 1, "all_reduce tp%2": 1}
    assert few.sums["wk"].extra == few.sums["wv"].extra == ("tp%2",)
    assert few.sums["wq"].extra == ()
    assert few.stored["wk"].local == (16, 1, 4)  # one whole head, not a head on every rank
    assert {shape for _, group, shape in tiny.ledger(few.graphs["reduce"]) if group == "tp%2"} == {(2 * 16 * 4,)}


@pytest.mark.parametrize("name", ["embed", "block", "head"])
def test_fsdp_gathers_once_and_scatters_once(name: str) -> None:
    part = segment("llama", name, "fsdp4")
    assert tiny.counts(part, "forward", "backward") == {}
    assert tiny.counts(part, "unshard") == {"all_gather_into_tensor fsdp": 1}
    assert tiny.counts(part, "reduce") == {"reduce_scatter_tensor fsdp": 1}
    assert set(part.graphs).isdisjoint({"publish", "reduce_early"})
    early = segment("llama", name, "fsdp4", "shard.grads={embed: fsdp}")
    assert tiny.counts(early, "reduce_early") == {"reduce_scatter_tensor fsdp": 1}
    assert tiny.counts(early, "reduce") == {}


def test_fsdp_gathers_in_the_compute_dtype_and_reduces_in_the_masters() -> None:
    block = segment("llama", "block", "fsdp2", "run.precision=bf16")
    kinds = {
        graph: [n.meta["val"].dtype for n in block.graphs[graph].module.graph.nodes if passes.is_collective(n)]
        for graph in ("unshard", "reduce")
    }
    assert kinds == {"unshard": [torch.bfloat16], "reduce": [torch.float32]}


def test_hsdp_scatters_inside_and_sums_outside() -> None:
    block = segment("llama", "block", "dp2 fsdp2")
    assert [(op, group) for op, group, _ in tiny.ledger(block.graphs["reduce"])] == [
        ("reduce_scatter_tensor", "fsdp"),
        ("all_reduce", "dp"),
    ]
    assert tiny.counts(block, "unshard") == {"all_gather_into_tensor fsdp": 1}
    whole, part = (shape[0] for _, _, shape in tiny.ledger(block.graphs["reduce"]))
    assert whole == part == sum(torch.Size(s.local).numel() for s in block.stored.values()) // 2  # halves over dp


def test_plain_data_parallelism_sums_once() -> None:
    block = segment("llama", "block", "dp2")
    assert tiny.counts(block, *block.graphs) == {"all_reduce dp": 1}


def test_zero_1_scatters_gradients_and_gathers_weights() -> None:
    block = segment("llama", "block", "dp2", "shard.optimizer.embed=dp")
    assert tiny.counts(block, "forward", "backward", "unshard") == {}
    assert tiny.counts(block, "reduce") == {"reduce_scatter_tensor dp": 1}
    assert tiny.counts(block, "publish") == {"all_gather_into_tensor dp": 1}
    assert "reduce_early" not in block.graphs


def test_zero_2_scatters_every_microbatch() -> None:
    block = segment("llama", "block", "dp2", "shard.optimizer.embed=dp", "shard.grads={embed: dp}")
    assert tiny.counts(block, "reduce_early") == {"reduce_scatter_tensor dp": 1}
    assert tiny.counts(block, "reduce") == {}
    assert tiny.counts(block, "publish") == {"all_gather_into_tensor dp": 1}


def test_tied_ends_of_a_pipeline_sum_their_gradients() -> None:
    made = tiny.program("llama", "pp2 tp2", ("model.tied=true",))
    assert tiny.counts(made.segments["embed"], "reduce") == {"all_reduce pp@0+1": 1}
    assert tiny.counts(made.segments["head"], "reduce") == {"all_reduce pp@0+1": 1, "all_reduce tp": 1}
    assert made.segments["head"].owned == ("norm", "table")
    alone = tiny.program("llama", "tp2", ("model.tied=true",))
    assert alone.segments["head"].owned == ("norm",)
    assert "pp@0+1" not in alone.groups()


def test_every_collective_has_the_line_that_asked_for_it() -> None:
    for family in FAMILIES:
        for part in tiny.program(family, "pp2 dp2 tp2").segments.values():
            for kind in ("forward", "backward", "backward_input", "backward_weight"):
                for node in part.graphs[kind].module.graph.nodes:
                    if passes.is_collective(node):
                        assert re.search(rf"{family}\.py:\d+$", node.meta["site"])


# ---------------------------------------------------------------------------------- one text for all ranks and layers


MESHES = ("tp2", "dp2", "pp2 dp2 tp2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_and_the_last_rank_lower_to_the_same_text(family: str, mesh: str) -> None:
    world = tiny.make(family, mesh).job.mesh.world
    assert tiny.program(family, mesh, (), world - 1).hashes() == tiny.program(family, mesh).hashes()


@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.long) for f in ("gpt2", "bert"))])
@pytest.mark.parametrize("mesh", ["dp2 tp2", *(pytest.param(m, marks=pytest.mark.long) for m in MESHES[2:])])
def test_all_ranks_lower_to_the_same_text(family: str, mesh: str) -> None:
    for rank in range(1, tiny.make(family, mesh).job.mesh.world):
        assert tiny.program(family, mesh, (), rank).hashes() == tiny.program(family, mesh).hashes(), rank


def test_a_layer_is_an_input() -> None:
    """Depth, the number of microbatches and the pipeline leave every block's text as it is."""
    block = {k: h for k, h in tiny.program("gpt2", "tp2").hashes().items() if k.startswith("block")}
    deep = tiny.program("gpt2", "pp2 tp2", ("model.layers=6", "data.batch=32")).hashes()
    assert {k: deep[k] for k in block} == block
    assert "layer" in tiny.program("gpt2", "tp2").segments["block"].graphs["forward"].inputs  # dropout reads it
    wider = tiny.program("gpt2", "tp2", ("model.mlp=32",)).hashes()
    assert wider["block.forward"] != block["block.forward"]


def test_lowering_as_another_rank_leaves_nothing_behind() -> None:
    """DTensor caches meshes, whose groups differ by rank."""
    job = tiny.make("llama", "dp2 tp4").job
    first = lower.lower(job).hashes()
    assert lower.lower(job, 5).hashes() == first
    assert lower.lower(job, 0).hashes() == first


@pytest.mark.parametrize("path", sorted(tiny.LAYOUTS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_layouts_lower_alike_on_the_first_and_the_last_rank(path: Path) -> None:
    job = plan.plan(layout.load(path)).job
    first = lower.lower(job)
    assert first.seconds < 30
    if job.mesh.world > 1:
        assert lower.lower(job, job.mesh.world - 1).hashes() == first.hashes()
    for name in ("embed", "block", "head"):
        assert first.segments[name].graphs["forward"].outputs[0] == "y"


# ------------------------------------------------------------------------- what a model leaves out is an error there


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `gather` or `constrain` while a segment is traced."""

    kind: str
    line: str
    axes: str


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Call]]]:
    """`calls(kind, line)`: from now on calls of this kind at this line return their argument; all are listed."""
    right = lower.on_mesh

    def skip(kind: str = "", line: str = "") -> list[Call]:
        seen: list[Call] = []

        def on_mesh(tracing: Any, placed: dict[str, str]) -> On:
            on = right(tracing, placed)

            def without(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
                def call(x: Any, *axes: str) -> Any:
                    seen.append(Call(name, site(tracing.model), *(axes or ("",))))
                    return x if (name, seen[-1].line) == (kind, line) else fn(x, *axes)

                return call

            return dataclasses.replace(
                on, gather=without("gather", on.gather), constrain=without("constrain", on.constrain)
            )

        monkeypatch.setattr(lower, "on_mesh", on_mesh)
        return seen

    yield skip


def lines_of(where: str) -> set[int]:
    """The lines of the statement at `file.py:12`, of those that read what it assigns, and of those that assign
    what it reads: where a call's result is used, and where its argument comes from."""
    path, number = where.rsplit(":", 1)
    functions = [n for n in ast.parse(Path(path).read_text()).body if isinstance(n, ast.FunctionDef)]
    inside = next(f for f in functions if f.lineno <= int(number) <= (f.end_lineno or 0))
    small = [n for n in ast.walk(inside) if isinstance(n, ast.stmt) and not hasattr(n, "body")]

    def names(node: ast.AST, kind: type) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}

    here = next(n for n in small if n.lineno <= int(number) <= (n.end_lineno or 0))
    assigned, read = names(here, ast.Store), names(here, ast.Load)
    near = [here]
    near += [n for n in small if assigned & names(n, ast.Load) or read & names(n, ast.Store)]
    return {line for n in near for line in range(n.lineno, (n.end_lineno or 0) + 1)}


# (family, segment, axes, whether res_seq is on) -> why this constraint changes nothing there.
REDUNDANT = {
    ("bert", "head", "batch embed", False): "every rank has the first token, so there is nothing to sum over res_seq",
}


@pytest.mark.parametrize("family", tiny.MODELS)
@pytest.mark.parametrize("res_seq", [True, False], ids=["res_seq", "plain"])
def test_each_call_site_is_needed(family: str, res_seq: bool, calls: Callable[..., list[Call]]) -> None:
    """Without any one gather or constrain, lowering fails and names the line, or the line next to it in the flow of
    values."""
    job = tiny.make(family, "dp2 tp2" if res_seq else "tp2", () if res_seq else OFF).job
    redundant = {}
    for name in ("embed", "block", "head"):
        seen = calls()
        tiny.lower_segment(job, name)
        sites = list(dict.fromkeys(seen))
        assert {c.kind for c in sites} == {"gather", "constrain"}
        for call in sites:
            calls(call.kind, call.line)
            try:
                tiny.lower_segment(job, name)
            except LoweringError as error:
                match = re.match(r"(.+\.py):(\d+): \S", str(error))
                assert match, error
                assert match[1] == call.line.rsplit(":", 1)[0]
                assert int(match[2]) in lines_of(call.line), f"without {call}: {error}"
                assert "\n" not in str(error)
                assert call.kind in str(error)
            else:
                redundant[family, name, call.axes, res_seq] = call
    assert redundant.keys() == {k for k in REDUNDANT if k[0] == family and k[3] == res_seq}


UNASKED = "needs a (all_reduce|all_gather_into_tensor) that nothing asked for"
WRONG = {
    "x = x + torch.ones(16, dtype=x.dtype)": "a tensor made here meets one on the mesh",
    "x = x * p['norm_attn']": "parameter block/norm_attn is used without on.gather",
    "x = x + ops.to_heads(x, p['wq']).sum()": "a parameter is used without on.gather",
    "x = torch.add(x, p['norm_attn'])": "parameter block/norm_attn is used without on.gather",
    "x = on.island(lambda here, x: x, ('batch seq embed',), ACT)(x)": (
        r"arrives as \[0/dp 1/tp 2\], not \[batch/dp seq embed\]"
    ),
    "x = on.island(lambda here, x, w: x, (ACT, 'embed'), ACT)(x, p['norm_attn'])": "used without on.gather",
    "x = on.island(lambda here, x: x * (here.offset('heads') + 1), (ACT,), ACT)(x)": (
        "no input of this island has that axis"
    ),
    "x = on.constrain(x - x.mean(1, keepdim=True), ACT)": UNASKED,
    "x = x - x.mean(1, keepdim=True)": UNASKED,
    "x = x.view(3, -1)": "the operation cannot run on shards",
    "x = on.gather(x)": "on.gather takes a parameter",
    "x = on.constrain(x, 'batch time embed')": "unknown axis 'time'",
    "x = x + on.constrain(torch.ones(1, 8, 16), ACT)": "takes the result of an operation on the mesh",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_misplacement_is_an_error_at_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "import torch\n"
        "from dtrain import ops\n"
        "from dtrain.models import llama\n"
        "from dtrain.models.llama import *\n"
        "from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, logits, params\n"
        "def block(cfg, p, x, batch, key, on):\n"
        "    y = llama.block(cfg, p, x, batch, key, on)\n"
        f"    {line}\n"
        "    return x + y\n"
    )
    job = tiny.make("llama", "dp2 tp2", ("model.family=", f"model.file={file}")).job
    with pytest.raises(LoweringError, match=WRONG[line]) as raised:
        lower.lower(job)
    assert str(raised.value).startswith(f"{file}:8: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("on.constrain(x, 'batch seq embed')", r"returns \[0/dp 1 2\], not \[0/dp 1/tp 2\]"),
        ("x._local_tensor", "returns a plain tensor"),
    ],
)
def test_a_segment_must_return_what_the_next_one_takes(returned: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, params\n"
        "def block(cfg, p, x, batch, key, on):\n"
        "    x = x * 2\n"
        f"    return {returned}\n"
    )
    job = tiny.make("llama", "dp2 tp2", ("model.family=", f"model.file={file}")).job
    with pytest.raises(LoweringError, match=message) as raised:
        lower.lower(job)
    assert str(raised.value).startswith(f"{file}:4: segment block")


def test_an_unused_parameter_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from dtrain.models.llama import ACT, BATCH, Config, counts, embed, head_and_loss, params\n"
        "def block(cfg, p, x, batch, key, on):\n"
        "    return x * on.gather(p['norm_mlp'])\n"
    )
    job = tiny.make("llama", "tp2", ("model.family=", f"model.file={file}")).job
    with pytest.raises(LoweringError, match="segment block does not use norm_attn"):
        lower.lower(job)


def test_the_cause_of_a_translated_error_is_kept(calls: Callable[..., list[Call]]) -> None:
    job = tiny.make("llama", "dp2 tp2").job
    seen = calls()
    tiny.lower_segment(job, "block")
    first = next(c for c in seen if c.kind == "constrain")
    calls("constrain", first.line)
    with pytest.raises(LoweringError) as raised:
        tiny.lower_segment(job, "block")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_parameters_that_cannot_be_placed() -> None:
    job = tiny.make("llama", "tp2").job
    with pytest.raises(AxesError, match="embed/table: axes 'vocab' and 'embed' are both on dim 'tp'"):
        lower.lower(dataclasses.replace(job, compute={**job.compute, "embed": ("tp",)}))
    with pytest.raises(AxesError, match=r"mlp 24 is not divisible by tp \(5\)"):
        lower.lower(dataclasses.replace(job, mesh=Mesh((("tp", 5),)), compute={"mlp": ("tp",)}))


def test_ledgers_are_not_vacuous() -> None:
    """The counting itself: a graph's collectives are found, and the fake one is not the default."""
    both = Counter(op for op, _, _ in tiny.ledger(segment("llama", "block", "tp2").graphs["forward"]))
    assert sum(both.values()) == 4
    assert tiny.ledger(segment("llama", "block", "").graphs["forward"]) == []
