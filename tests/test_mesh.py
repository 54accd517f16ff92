"""Ranks, groups and the simulated world."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.mesh import Groups, Mesh, all_groups, fake_mesh, flat_index, group_ranks, group_size, simulate, stand_ins
from dtrain.program.interpret import Place
from dtrain.program.update import all_reduce

EIGHT = Mesh((("pp", 2), ("dp", 2), ("tp", 2)))  # two nodes of four: tp inside NVLink, pp across
c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_last_dim_varies_fastest() -> None:
    assert all_groups(EIGHT, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all_groups(EIGHT, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert all_groups(EIGHT, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("world", [tuple(range(8))]),
        ("dp.tp", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("tp.dp", [(0, 2, 1, 3), (4, 6, 5, 7)]),  # in the order of the name
        ("pp@0+1", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("tp%1", [(i,) for i in range(8)]),
        ("dp.tp/reduce", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("pp@0+1/reduce", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("pp/act", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("tp%2", [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_group_names(name: str, groups: list[tuple[int, ...]]) -> None:
    assert all_groups(EIGHT, name) == groups
    assert group_size(EIGHT, name) == len(groups[0])


def test_blocks_of_neighbours_and_ends_of_a_pipeline() -> None:
    tp8 = Mesh((("dp", 2), ("tp", 4)))
    assert all_groups(tp8, "tp%2") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    pp4 = Mesh((("pp", 4), ("tp", 2)))
    assert all_groups(pp4, "pp@0+3") == [(0, 6), (1, 7)]
    assert group_ranks(pp4, "pp@0+3", 2) == ()  # in the middle


MESHES = st.lists(
    st.tuples(st.sampled_from(("pp", "dp", "fsdp", "cp", "tp")), st.integers(1, 4)),
    max_size=4,
    unique_by=lambda d: d[0],
).map(lambda sizes: Mesh(tuple(sizes)))


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(mesh=MESHES)
def test_coordinates_and_groups_fit_together(mesh: Mesh) -> None:
    for rank in range(mesh.world):
        assert mesh.rank(mesh.coordinates(rank)) == rank
    names = [*mesh.dims, *([".".join(mesh.dims)] if mesh.dims else []), "world"]
    for name in names:
        groups = all_groups(mesh, name)
        assert sorted(r for g in groups for r in g) == list(range(mesh.world))  # a partition
        for g in groups:
            for i, r in enumerate(g):
                assert group_ranks(mesh, name, r) == g
                if name in mesh.dims:
                    assert mesh.coordinates(r)[name] == i
                elif name != "world":
                    assert flat_index(mesh, name.split("."), mesh.coordinates(r)) == i


def test_dims_of_size_one_do_not_count() -> None:
    mesh = Mesh((("tp", 2), ("dp", 1)))
    assert mesh.ordered(("dp", "tp", "pp")) == ("tp",)
    assert mesh.size("pp") == 1 and mesh.product(("pp", "tp")) == 2


def test_a_fake_mesh_of_any_size() -> None:
    mesh = Mesh((("dp", 1024), ("tp", 8)))
    for rank in (0, mesh.world - 1):
        with fake_mesh(mesh, ("dp", "tp"), rank) as made:
            assert made is not None and made.shape == (1024, 8)
            assert list(made.get_coordinate() or ()) == [mesh.coordinates(rank)[d] for d in mesh.dims]
    with fake_mesh(mesh, ()) as nothing:
        assert nothing is None


# ---------------------------------------------------------------------------------------------- simulated world


def test_collectives() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))

    def work(rank: int, groups: Groups) -> list[list[float]]:
        x = torch.tensor([float(rank), 1.0, 2.0])
        out = [
            c10d.all_reduce(x, "sum", "tp"),
            c10d.all_reduce(x, "max", "dp"),
            c10d.all_gather_into_tensor(x[:1], 3, "tp"),
            c10d.reduce_scatter_tensor(x, "sum", 3, "tp"),
        ]
        assert x.tolist() == [float(rank), 1.0, 2.0]  # inputs are left as they are
        return [c10d.wait_tensor(y).tolist() for y in out]

    for rank, (total, most, gathered, scattered) in enumerate(simulate(mesh, ["dp", "tp"], work)):
        first = rank // 3 * 3
        ranks = [first, first + 1, first + 2]
        assert total == [float(sum(ranks)), 3.0, 6.0]
        assert most == [float(rank % 3 + 3), 1.0, 2.0]
        assert gathered == [float(r) for r in ranks]
        assert scattered == [[float(sum(ranks)), 3.0, 6.0][rank % 3]]


def test_sums_are_in_rank_order_on_every_rank() -> None:
    """Rounding is the same everywhere, whoever comes last."""
    mesh = Mesh((("dp", 4),))

    def work(rank: int, groups: Groups) -> float:
        time.sleep(0.01 * ((rank * 3) % 4))
        value = torch.tensor([1e8, 1.0, -1e8, 1.0][rank], dtype=torch.float32)
        return float(c10d.wait_tensor(c10d.all_reduce(value, "sum", "dp")))

    assert simulate(mesh, ["dp"], work) == [1.0] * 4


def test_messages_arrive_in_order() -> None:
    def work(rank: int, groups: Groups) -> list[float]:
        group, other = groups["pp"], 1 - rank
        for i in range(3):
            group.send([torch.tensor([10.0 * rank + i])], other, 0)
        got: list[Tensor] = [torch.empty(1) for _ in range(3)]
        posted = [group.recv([x], other, 0) for x in got]
        for work in reversed(posted):  # matched as they were posted, whichever is waited for first
            work.wait()
        return [float(x) for x in got]

    assert simulate(Mesh((("pp", 2),)), ["pp"], work) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("where", ["collective", "receive", "before"])
def test_the_first_failure_stops_every_rank(where: str) -> None:
    def work(rank: int, groups: Groups) -> None:
        if rank == 2:
            time.sleep(0.05)
            raise KeyError("the cause")
        if where == "receive":
            groups["pp"].recv([torch.empty(1)], 2, 0).wait()
        elif where == "collective":
            c10d.wait_tensor(c10d.all_reduce(torch.ones(1), "sum", "world"))

    began = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        simulate(Mesh((("pp", 4),)), ["pp", "world"], work)
    assert time.monotonic() - began < 10
    assert threading.active_count() < 4 + 2


def test_a_rank_that_does_not_come_is_no_hang() -> None:
    def work(rank: int, groups: Groups) -> None:
        if rank:
            c10d.wait_tensor(c10d.all_reduce(torch.ones(1), "sum", "tp"))

    with pytest.raises(RuntimeError, match="member 0 of a group ended while others wait for it"):
        simulate(Mesh((("tp", 3),)), ["tp"], work)


def test_a_message_that_is_never_sent_is_no_hang() -> None:
    def work(rank: int, groups: Groups) -> None:
        if rank == 1:
            groups["pp"].recv([torch.empty(1)], 0, 0).wait()

    with pytest.raises(RuntimeError, match="member 0 of a group ended"):
        simulate(Mesh((("pp", 2),)), ["pp"], work)


def test_shapes_that_differ_are_an_error() -> None:
    def reduce(rank: int, groups: Groups) -> None:
        c10d.wait_tensor(c10d.all_reduce(torch.ones(2 + rank), "sum", "tp"))

    with pytest.raises(RuntimeError, match="size of tensor"):
        simulate(Mesh((("tp", 2),)), ["tp"], reduce)

    def send(rank: int, groups: Groups) -> None:
        if rank == 0:
            groups["pp"].send([torch.ones(3)], 1, 0)
        else:
            groups["pp"].recv([torch.empty(2)], 0, 0).wait()

    with pytest.raises(RuntimeError, match=r"received \(3,\) torch.float32, expected \(2,\)"):
        simulate(Mesh((("pp", 2),)), ["pp"], send)


def test_group_names_belong_to_their_rank_and_are_given_back() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))

    def work(rank: int, groups: Groups) -> int:
        return int(c10d.wait_tensor(c10d.all_reduce(torch.tensor(rank), "sum", "tp")))

    assert simulate(mesh, ["tp"], work) == [1, 1, 5, 5]
    assert simulate(mesh, ["tp"], work) == [1, 1, 5, 5]
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        c10d.all_reduce(torch.ones(1), "sum", "tp")


def test_stand_ins_have_the_right_size() -> None:
    with stand_ins(EIGHT, ["tp", "dp.tp"]):
        from torch.distributed.distributed_c10d import _resolve_process_group

        assert _resolve_process_group("dp.tp").size() == 4  # type: ignore[arg-type]


def test_one_process_has_no_groups() -> None:
    place = Place(Mesh(()), 0, {}, (0, 1))
    assert place.at == {}
    x = torch.ones(2)
    assert all_reduce(place, x, "world") is x


def test_a_result_is_not_there_before_its_wait() -> None:
    """Three collectives in flight at once over one group, waited for in another order."""

    def work(rank: int, groups: Groups) -> None:
        x = torch.tensor([1.0 + rank, 2.0])
        total = c10d.all_reduce(x, "sum", "tp")
        gathered = c10d.all_gather_into_tensor(x, 2, "tp")
        scattered = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        for y in (total, gathered, scattered):
            assert bool(y.isnan().all())
        assert c10d.wait_tensor(scattered).tolist() == [[3.0], [4.0]][rank]
        assert bool(gathered.isnan().all())
        assert c10d.wait_tensor(gathered).tolist() == [1.0, 2.0, 2.0, 2.0]
        assert c10d.wait_tensor(total).tolist() == [3.0, 4.0]
        assert x.tolist() == [1.0 + rank, 2.0]

    simulate(Mesh((("tp", 2),)), ["tp"], work)


def test_ranks_that_wait_for_each_other_in_different_groups_are_named() -> None:
    """Two collectives in two orders hang on real devices; here an error says who waited for whom."""
    mesh = Mesh((("dp", 2),))

    def work(rank: int, groups: Groups) -> None:
        for name in ("dp", "world") if rank == 0 else ("world", "dp"):
            c10d.wait_tensor(c10d.all_reduce(torch.ones(1), "sum", name))

    with pytest.raises(RuntimeError, match=r"group (dp|world): waited 0.2 s for rank (0|1), which did not come"):
        simulate(mesh, ["dp", "world"], work, patience=0.2)
