"""The end of a step: one global norm, each parameter counted once, and decay where it belongs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from torch import Tensor

from dtrain import optim
from dtrain.mesh import Groups, simulate
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, initial_weights, owned, owns_for_norm, publish
from dtrain.program.update import Report, State, UpdateConfig, counts_loss, make_update

Grads = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def update(
    mesh: str,
    fill: Callable[[Place, Grads], None],
    more: tuple[str, ...] = (),
    clip: float | None = None,
    lr: float = 0.1,
    start: float | None = None,
    loss: Callable[[Place], float] = lambda place: 0.0,
    stop: Callable[[Place], bool] = lambda place: False,
    scaling: optim.LossScaling | None = None,
) -> list[tuple[Report, Grads, Grads, State]]:
    """One update of a tiny model on simulated ranks: `fill` writes into gradients that are zero. Of each rank the
    report, masters, what became of the gradients, and the state."""
    made, program = tiny.make("llama", mesh, more), tiny.program("llama", mesh, more)
    names = [*program.groups(), *(["world"] if made.job.mesh.world > 1 else [])]

    def work(rank: int, groups: Groups) -> tuple[Report, Grads, Grads, State]:
        place = Place(made.job.mesh, rank, groups, made.units[made.job.mesh.coordinates(rank).get("pp", 0)])
        masters = initial_weights(program, place, 0)
        if start is not None:
            masters = {k: torch.full_like(v, start) for k, v in masters.items()}
        weights = publish(program, uncompiled(program), place, masters)
        scale = optim.scale_init(scaling) if scaling else None
        state = State(weights, optim.init(list(weights.masters.values())), scale)
        grads = {k: torch.zeros_like(v) for k, v in masters.items()}
        fill(place, grads)
        reports: list[Report] = []
        config = UpdateConfig(optim.Adamw(), clip, scaling)
        step = make_update(program, place, state, config, lr, lambda: stop(place), reports.append)
        new = step(grads, torch.tensor(loss(place), dtype=torch.float64))
        return reports[0], dict(new), grads, state

    return simulate(made.job.mesh, names, work)


def test_a_replicated_gradient_counts_once_and_a_split_one_whole() -> None:
    """A weight with gradient [3, 4] split over two ranks and a norm's 12 on both: 13, not 17.69 or 12.37."""

    def fill(place: Place, grads: Grads) -> None:
        grads["block.0/wq"][0, 0, 0] = 3.0 + place.at["tp"]
        grads["block.0/norm_attn"][0] = 12.0

    for report, *_ in update("tp2", fill):
        assert report.norm == 13.0


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("fsdp2 tp2", ()),
        ("dp2 tp2", ()),
        ("dp2 tp2", ("shard.optimizer.embed=dp",)),
        ("tp4", ()),
        ("pp2 tp2", ("model.tied=true",)),
        ("dp2 fsdp2", ("shard.optimizer.embed=dp",)),
    ],
)
def test_one_norm_over_every_mesh(mesh: str, more: tuple[str, ...]) -> None:
    """All gradients 1: the norm is the root of the number of parameters, a float, the same on all ranks."""

    def fill(place: Place, grads: Grads) -> None:
        made, program = tiny.make("llama", mesh, more), tiny.program("llama", mesh, more)
        from dtrain import storage

        for path, (s, _, _) in owned(program, made.units[place.at.get("pp", 0)]).items():
            spans = storage.spans(s, place.mesh, place.at, len(s.steps))
            grads[path][tuple(slice(0, p.stop - p.start) for p in spans)] = 1.0

    block = 2 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24
    params = 2 * block + 16 + 61 * 16 * (1 if "model.tied=true" in more else 2)
    reports = [r for r, *_ in update(mesh, fill, more)]
    assert all(r == reports[0] for r in reports)
    assert type(reports[0].norm) is float
    assert reports[0].norm == pytest.approx(params**0.5, rel=1e-12)


def test_clipping_over_pipeline_stages() -> None:
    """Stages with norms 3 and 4 and a limit of 1: 5 on every rank, and every gradient a fifth."""

    def fill(place: Place, grads: Grads) -> None:
        grads[f"block.{place.at['pp']}/wq"][0, 0, 0] = 3.0 + place.at["pp"]

    for rank, (report, _, grads, _) in enumerate(update("pp2", fill, clip=1.0)):
        assert report.norm == 5.0
        assert float(grads[f"block.{rank}/wq"][0, 0, 0]) == pytest.approx((3.0 + rank) / 5)


def test_a_norm_below_the_limit_is_left_alone() -> None:
    def fill(place: Place, grads: Grads) -> None:
        grads["block.0/wq"][0, 0, 0] = 0.5

    ((report, _, grads, _),) = update("", fill, clip=1.0)
    assert (report.norm, float(grads["block.0/wq"][0, 0, 0])) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("mesh", "more"), [("", ()), ("tp2", ()), ("fsdp2", ()), ("dp2", ("shard.optimizer.embed=dp",))]
)
def test_decay_leaves_norms_alone_on_every_layout(mesh: str, more: tuple[str, ...]) -> None:
    """Zero gradients, rate 0.1, decay 0.1: matrices x 0.99, whatever shape their shards have."""
    for _, masters, _, _ in update(mesh, lambda place, grads: None, more, start=1.0):
        for path, w in masters.items():
            wanted = 1.0 if "norm" in path else 0.99
            assert torch.allclose(w, torch.full_like(w, wanted), rtol=0, atol=1e-12), path
            assert w.numel() > 0


def test_replicated_norm_gradients_are_summed_over_sequence_shards() -> None:
    """Parts 1 and 3 from two sequence shards: 4 on both ranks, through the lowered REDUCE."""
    block = tiny.segment("llama", "block", "tp2")
    graph, wait = block.graphs["reduce"], block.graphs["reduce_wait"]
    assert block.sums["norm_attn"].dims == block.sums["norm_mlp"].dims == ("tp",)
    assert block.sums["wq"].dims == ()

    def work(rank: int, groups: Groups) -> dict[str, Tensor]:
        grads = [torch.full(block.stored[n].local, 1.0 + 2 * rank, dtype=torch.float64) for n in graph.inputs]
        return dict(zip(wait.outputs, wait.module(*graph.module(*grads)), strict=True))

    for rank, out in enumerate(simulate(tiny.make("llama", "tp2").job.mesh, ["tp/reduce"], work)):
        assert out["norm_attn"].unique().tolist() == out["norm_mlp"].unique().tolist() == [4.0]
        assert out["wq"].unique().tolist() == [1.0 + 2 * rank]  # a shard's own gradient is whole


def test_without_sequence_parallelism_a_norm_gradient_is_whole_already() -> None:
    assert tiny.segment("llama", "block", "tp2", ("shard.compute.res_seq=[]",)).sums["norm_attn"].dims == ()


def test_the_loss_is_summed_over_those_that_have_a_part() -> None:
    """dp ranks hold parts; tp ranks copies, of which one counts; stages without the head report 0."""
    reports = update("pp2 dp2 tp2", lambda place, grads: None, loss=lambda p: (1.0 + 2 * p.at["dp"]) * p.at["pp"])
    assert {r.loss for r, *_ in reports} == {4.0}
    made, program = tiny.make("llama", "pp2 dp2 tp2"), tiny.program("llama", "pp2 dp2 tp2")
    assert sum(counts_loss(program, Place(made.job.mesh, r, {}, ())) for r in range(8)) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_bad_value_on_one_rank_skips_the_update_on_all(bad: float, where: str) -> None:
    def fill(place: Place, grads: Grads) -> None:
        grads["block.1/w_up"][:] = 1.0
        if where == "gradient" and place.at["tp"] == 1:  # reduced: its copies over dp are alike
            grads["block.1/w_up"][0, 0] = bad

    loss = (lambda p: bad if p.rank == 2 else 1.0) if where == "loss" else (lambda p: 1.0)
    for report, masters, _, state in update("dp2 tp2", fill, start=2.0, loss=loss):
        assert report.skipped
        assert all((w == 2.0).all() for w in masters.values())
        assert float(state.moments.step) == 0 and not any(m.any() for m in state.moments.exp_avg)


def test_a_stop_on_one_rank_stops_all() -> None:
    for report, *_ in update("dp2 tp2", lambda place, grads: None, stop=lambda p: p.rank == 1):
        assert report.stop and not report.skipped
    for report, *_ in update("dp2 tp2", lambda place, grads: None):
        assert not report.stop


def test_the_norm_is_of_unscaled_gradients() -> None:
    scaling = optim.LossScaling(start=1024.0)

    def fill(place: Place, grads: Grads) -> None:
        grads["block.0/wq"][0, 0, 0] = 3.0 * 1024
        grads["block.0/norm_attn"][0] = 4.0 * 1024

    for report, *_ in update("dp2", fill, scaling=scaling):
        assert report.norm == 5.0
    for report, _, _, state in update("dp2", lambda p, g: g["head/norm"].fill_(float("inf")), scaling=scaling):
        assert report.skipped and state.scale is not None and float(state.scale["scale"]) == 512.0


def test_counting_every_copy_would_be_seen() -> None:
    made, program = tiny.make("llama", "tp2"), tiny.program("llama", "tp2")
    norm = program.segments["block"].stored["norm_attn"]
    picks = [owns_for_norm(program, Place(made.job.mesh, r, {}, ()), "block.0/norm_attn", norm) for r in range(2)]
    assert picks == [True, False]
