"""Placements: what axes mean on a mesh, how they are printed, and what the handles of parameters allow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtrain.axes import AxesError, Here
from dtrain.mesh import Mesh, fake_mesh
from dtrain.sharding import Held, LoweringError, Tracing, describe, on_mesh, place, placements, show, site, wrap

RULES = {"batch": ("dp",), "res_seq": ("tp",), "vocab": ("tp",), "heads": ("tp",)}


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    with fake_mesh(Mesh((("dp", 2), ("tp", 2))), ("dp", "tp"), 3) as mesh:
        assert isinstance(mesh, DeviceMesh)
        yield Tracing(mesh, RULES, {"dp": torch.tensor(1), "tp": torch.tensor(1)}, __file__)


def test_axes_become_placements(tracing: Tracing) -> None:
    assert place(tracing, "batch res_seq embed") == (Shard(0), Shard(1))
    assert place(tracing, "batch seq embed") == (Shard(0), Replicate())
    assert place(tracing, "batch seq embed +vocab") == (Shard(0), Partial())
    assert place(tracing, "+batch +seq") == (Partial(), Replicate())
    assert place(tracing, "embed") == (Replicate(), Replicate())
    with pytest.raises(AxesError, match="both on dim 'tp'"):
        place(tracing, "res_seq heads")


def test_several_dims_on_one_position() -> None:
    assert placements(("dp", "fsdp", "tp"), (("dp", "fsdp"), ())) == (Shard(0), Shard(0), Replicate())


def test_how_placements_are_printed(tracing: Tracing) -> None:
    assert show(tracing, "batch res_seq embed") == "batch/dp res_seq/tp embed"
    assert show(tracing, "batch seq embed +vocab") == "batch/dp seq embed +tp"
    assert describe(("dp", "tp"), (Shard(0), Shard(0)), 2) == "0/dp/tp 1"
    assert describe(("dp", "tp"), (Replicate(), Partial()), 1) == "0 +tp"


def test_site_is_the_innermost_line_of_the_model() -> None:
    here = site(__file__)
    assert here.startswith(f"{__file__}:")
    assert int(here.rsplit(":", 1)[1]) == test_site_is_the_innermost_line_of_the_model.__code__.co_firstlineno + 1
    assert site("nowhere.py") == "nowhere.py"


def test_a_parameter_is_only_read_through_gather(tracing: Tracing) -> None:
    held = Held("block/wq", torch.ones(2), __file__)
    on = on_mesh(tracing, {})
    assert on.gather(held) is held.tensor  # type: ignore[arg-type]
    uses = [lambda: held.shape, lambda: held + 1, lambda: torch.relu(held), lambda: torch.cat([held])]  # type: ignore[operator,call-overload,arg-type,list-item]
    for use in uses[:1] + uses[2:]:
        with pytest.raises(LoweringError, match=r"test_sharding.py:\d+: parameter block/wq is used without on.gather"):
            use()
    with pytest.raises(TypeError):
        uses[1]()
    with pytest.raises(LoweringError, match=r"on\.gather takes a parameter, not a computed tensor"):
        on.gather(torch.ones(2))


def test_constraints_are_listed_by_line(tracing: Tracing) -> None:
    placed: dict[str, str] = {}
    x = wrap(torch.ones(2, 3, 4), tracing.mesh, place(tracing, "batch seq embed"))
    y = on_mesh(tracing, placed).constrain(x, "batch seq embed")
    assert isinstance(y, DTensor) and y.shape == (4, 3, 4)
    ((line, asked),) = placed.items()
    assert line.startswith(f"{__file__}:") and asked == "batch/dp seq embed"


def test_an_island_sees_its_part_and_where_it_is(tracing: Tracing) -> None:
    x = wrap(torch.ones(2, 3, 4), tracing.mesh, place(tracing, "batch res_seq embed"))
    seen: dict[str, int] = {}

    def fn(here: Here, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor and x.shape == (2, 3, 4)
        seen.update({axis: int(here.offset(axis)) for axis in ("batch", "res_seq", "embed")})
        with pytest.raises(LoweringError, match=r"here.offset\('mlp'\), but no input of this island has that axis"):
            here.offset("mlp")
        return x * 2

    out = on_mesh(tracing, {}).island(fn, ("batch res_seq embed",), "batch res_seq embed")(x)
    assert isinstance(out, DTensor) and out.placements == x.placements
    assert seen == {"batch": 2, "res_seq": 3, "embed": 0}  # rank 3 is second on dp and on tp


def test_gradients_of_what_an_island_shares_are_partial_sums(tracing: Tracing) -> None:
    """A replicated input of an island whose work is split gets a part of its gradient from each rank."""
    x = wrap(torch.ones(2, 3), tracing.mesh, place(tracing, "batch embed")).requires_grad_()
    w = wrap(torch.ones(3), tracing.mesh, place(tracing, "embed")).requires_grad_()
    out = on_mesh(tracing, {}).island(lambda here, x, w: x * w, ("batch embed", "embed"), "batch embed")(x, w)
    gx, gw = torch.autograd.grad(out, [x, w], wrap(torch.ones(2, 3), tracing.mesh, place(tracing, "batch embed")))
    assert isinstance(gx, DTensor) and gx.placements == (Shard(0), Replicate())
    assert isinstance(gw, DTensor) and gw.placements == (Partial(), Replicate())


def test_the_gradient_of_a_constraint_is_placed_as_its_input(tracing: Tracing) -> None:
    x = wrap(torch.ones(2, 3, 4), tracing.mesh, place(tracing, "batch res_seq embed")).requires_grad_()
    y = on_mesh(tracing, {}).constrain(x, "batch seq embed")
    assert isinstance(y, DTensor) and y.placements == (Shard(0), Replicate())
    seed = wrap(torch.ones(2, 6, 4), tracing.mesh, (Shard(0), Partial()))
    (g,) = torch.autograd.grad(y, [x], seed)
    assert isinstance(g, DTensor) and g.placements == x.placements
