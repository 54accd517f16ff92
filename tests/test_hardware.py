import pytest

from dtrain.hardware import (
    ALIASES,
    CLASSES,
    GPUS,
    LINKS,
    PRECISIONS,
    gpu,
    nearest,
    parse_flops,
    parse_rate,
    parse_size,
    show_rate,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("450GB/s", 450e9), ("12.5GB/s", 12.5e9), ("1.5e2 MB/s", 150e6), ("1GiB/s", 2**30), ("100B/s", 100)],
)
def test_rates(text, value):
    assert parse_rate(text) == value


@pytest.mark.parametrize(("text", "value"), [("60GiB", 60 * 2**30), ("80GB", 80 * 10**9), ("1.5kB", 1500), ("7 B", 7)])
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["450", "450GB", "450Gb/s", "fast", "-1GB/s", "0GB/s", "1 000GB/s", 450, None, "GB/s"])
def test_bad_rates_say_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"450GB/s|one of B, "):
        parse_rate(text)


def test_flops():
    assert [parse_flops(t) for t in ("989TFLOP/s", "1.5 PFLOP/s", "500GFLOP/s")] == [989e12, 1.5e15, 5e11]
    for text in ("989", "989T", "989e12", "989TFLOPS", "0TFLOP/s", 989, None):
        with pytest.raises(ValueError, match="989TFLOP/s"):
            parse_flops(text)


def test_bits_are_not_bytes():
    with pytest.raises(ValueError, match="unit"):
        parse_rate("400Gb/s")


def test_a_shown_rate_reads_back():
    for rate in (12.5e9, 450e9, 50e9, 6.25e9):
        assert parse_rate(show_rate(rate)) == rate


def test_catalog():
    assert gpu("v100") is GPUS["v100-32"] and set(ALIASES.values()) <= set(GPUS)
    asked = [
        "v100-16",
        "v100-32",
        "v100-450w",
        "a100-40",
        "a100-80",
        "h100-sxm",
        "h100-pcie",
        "h100-96",
        "h800",
        "h200",
        "b200",
        "b300",
        "gb200",
        "gb300",
        "cpu",
    ]
    assert list(GPUS) == asked
    for g in GPUS.values():
        assert set(g.links) <= set(LINKS)
        if g.name == "cpu":
            assert g.peak == {} and g.memory is None and g.capability is None
            continue
        assert set(g.peak) <= set(PRECISIONS) and g.capability == CLASSES[g.kind]
        assert 80 <= g.processors <= 148
        assert g.links["ib"] <= g.links["pcie"] and g.memory is not None and g.memory_rate is not None
        assert g.links.get("nvlink", 1e12) > g.links["pcie"]
        # A datasheet's GB is between the binary and the decimal unit of what CUDA reports.
        assert 15 * 2**30 < g.memory < 288 * 2**30
        assert g.peak["fp64"] <= g.peak["fp32"] < g.peak["fp16"]
        assert ("bf16" in g.peak) == (not g.name.startswith("v100"))


def test_an_unknown_gpu_lists_the_catalog():
    with pytest.raises(ValueError, match=r"h100-sxm.*did you mean h100-sxm"):
        gpu("h100-smx")


def test_nearest():
    assert nearest("learning_rat", ["lr", "learning_rate"]) == "; did you mean learning_rate?"
    assert nearest("learning_rat", ["beta1", "lr"]) == "; did you mean lr?"  # its initials
    assert nearest("sequence", ["seq"]) == "; did you mean seq?"
    assert nearest("xyzzy", ["lr"]) == ""
