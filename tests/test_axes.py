"""Axes, rules and the one notation."""

from __future__ import annotations

import pytest

from dtrain.axes import ALONE, AxesError, Init, Param, inherit, notation, padded, parse, paths, split

NORMAL = Init("normal", 0.02)
RULES = {"batch": ("dp", "fsdp"), "heads": ("tp",), "res_seq": ("tp",), "seq": ("cp",)}


def test_parse() -> None:
    assert parse("batch res_seq embed") == (("batch", "res_seq", "embed"), ())
    assert parse("batch embed +vocab") == (("batch", "embed"), ("vocab",))
    assert parse("+batch +seq") == ((), ("batch", "seq"))
    assert parse("") == ((), ())
    with pytest.raises(AxesError, match="unknown axis 'time' in 'batch time'; the axes are batch, seq"):
        parse("batch time")
    with pytest.raises(AxesError, match="unknown axis 'time'"):
        parse("batch +time")


def test_res_seq_starts_with_the_dims_of_seq() -> None:
    assert inherit(RULES)["res_seq"] == ("cp", "tp")
    assert inherit({"seq": ("cp",)})["res_seq"] == ("cp",)
    assert inherit({"seq": ("cp",), "res_seq": ("cp", "tp")})["res_seq"] == ("cp", "tp")
    assert inherit({})["res_seq"] == ()
    assert inherit(inherit(RULES)) == inherit(RULES)


def test_split() -> None:
    assert split(("batch", "res_seq", "embed"), RULES) == (("dp", "fsdp"), ("cp", "tp"), ())
    assert split(("embed", "heads", "head_dim"), RULES) == ((), ("tp",), ())
    assert split((), RULES) == ()


@pytest.mark.parametrize(
    ("axes", "rules", "both"),
    [
        (("embed", "heads"), {"embed": ("tp",), "heads": ("tp",)}, ("embed", "heads", "tp")),
        (("heads", "embed"), {"embed": ("fsdp", "tp"), "heads": ("tp",)}, ("heads", "embed", "tp")),
        (("embed", "embed"), {"embed": ("fsdp",)}, ("embed", "embed", "fsdp")),
        (("batch", "res_seq"), {"batch": ("cp",), "seq": ("cp",)}, ("batch", "res_seq", "cp")),
        (("mlp",), {"mlp": ("tp", "tp")}, ("mlp", "mlp", "tp")),
    ],
)
def test_a_dim_is_spent_once(
    axes: tuple[str, ...], rules: dict[str, tuple[str, ...]], both: tuple[str, str, str]
) -> None:
    first, second, dim = both
    with pytest.raises(AxesError) as raised:
        split(axes, rules, "block.3/wq")
    message = f"block.3/wq: axes {first!r} and {second!r} are both on dim {dim!r}; a dim is spent once"
    assert str(raised.value) == message


def test_notation() -> None:
    assert notation(("embed", "mlp"), (("fsdp",), ("tp",))) == "embed/fsdp mlp/tp"
    assert notation(("batch", "seq", "embed"), (("dp", "fsdp"), (), ()), ("tp",)) == "batch/dp/fsdp seq embed +tp"
    assert notation((), (), ("dp",)) == "+dp"


def test_a_param_checks_itself() -> None:
    with pytest.raises(AxesError, match=r"shape \(2, 3\) needs 2 axes"):
        Param((2, 3), ("embed",), NORMAL)
    with pytest.raises(AxesError, match="unknown axis 'width'"):
        Param((2,), ("width",), NORMAL)


def test_padding_changes_the_named_axis_only() -> None:
    table = Param((61, 16), ("vocab", "embed"), NORMAL, tied_to="embed/table")
    assert padded(table, {"vocab": 256}).shape == (256, 16)
    assert padded(table, {"vocab": 256}).tied_to == "embed/table"
    assert padded(table, {}) == table


def test_paths() -> None:
    scale = Param((4,), ("embed",), Init("ones"))
    tree = {"embed": {"table": scale}, "block": {"wq": scale, "wo": scale}, "head": {"norm": scale}}
    assert list(paths(tree, 2)) == [
        "embed/table", "block.0/wq", "block.0/wo", "block.1/wq", "block.1/wo", "head/norm",
    ]  # fmt: skip


def test_alone_nothing_is_placed() -> None:
    marker = object()
    assert ALONE.gather(marker) is marker  # type: ignore[arg-type]
    assert ALONE.constrain(marker, "no axes at all") is marker  # type: ignore[arg-type]
    out = ALONE.island(lambda here, x: (here.offset("vocab"), here.sum(x, "vocab"), here.max(x, "vocab")), ("",), "")
    assert out(marker) == (0, marker, marker)  # type: ignore[arg-type]
