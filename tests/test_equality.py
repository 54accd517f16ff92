"""The property that everything else serves: under any layout, schedule and recompute policy, the loss, every
gradient and every parameter equal one device."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import equality
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TRIPLES = equality.triples()
IDS = ["-".join(f"{d}{n}" for d, n in dims) + f"-{schedule}-{family}" for dims, schedule, family in TRIPLES]
LONG_EXAMPLES = 14

common = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("triple", TRIPLES, ids=IDS)
@settings(max_examples=1, **common)
@given(data=st.data())
def test_a_layout_equals_one_device(triple: equality.Triple, data: st.DataObject) -> None:
    choose = equality.chooser(triple, lambda n: data.draw(st.integers(0, n - 1)))
    equality.check(equality.draw_case(triple, choose))


@pytest.mark.long
@pytest.mark.parametrize("triple", TRIPLES, ids=IDS)
@settings(max_examples=LONG_EXAMPLES, **common)
@given(data=st.data())
def test_many_layouts_equal_one_device(triple: equality.Triple, data: st.DataObject) -> None:
    choose = equality.chooser(triple, lambda n: data.draw(st.integers(0, n - 1)))
    equality.check(equality.draw_case(triple, choose))


def test_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    """What the examples above cover, printed and held to its bounds."""
    products = Counter(tuple(d for d, _ in dims) for dims, _, _ in TRIPLES)
    schedules = Counter(schedule for _, schedule, _ in TRIPLES)
    families = Counter(family for _, _, family in TRIPLES)
    dims = Counter(d for sizes, _, _ in TRIPLES for d, _ in sizes)
    with capsys.disabled():
        print(f"\n{len(TRIPLES)} layouts a run ({LONG_EXAMPLES * len(TRIPLES)} in the long one)")
        for dim_product, schedule in product(products, schedules):
            n = Counter(f for s, sc, f in TRIPLES if tuple(d for d, _ in s) == dim_product and sc == schedule)
            if n:
                print(
                    f"  {' x '.join(dim_product):16} {schedule:12} "
                    + " ".join(f"{f} {n[f]}" for f in equality.FAMILIES)
                )
    assert len(TRIPLES) >= 145
    for counter in (schedules, families, dims):
        assert min(counter.values()) >= 10, counter
    legal = [t for t in product(equality.PRODUCTS, equality.SCHEDULES, equality.FAMILIES) if t in set(TRIPLES)]
    for a, b in combinations(range(3), 2):
        assert {(t[a], t[b]) for t in TRIPLES} == {(t[a], t[b]) for t in legal}
    broad = [s for s, _, _ in TRIPLES if len(s) >= 2 and equality._product(n for _, n in s) >= 4]
    assert len(broad) >= 0.9 * len(TRIPLES)


BF16 = [3, 43, 83, 123]  # every schedule but interleaved, every family and dim
LONG_BF16 = [25, 47, 69, 91, 113, 135]


@pytest.mark.parametrize(
    "triple",
    [pytest.param(TRIPLES[i], id=IDS[i]) for i in BF16]
    + [pytest.param(TRIPLES[i], id=IDS[i], marks=pytest.mark.long) for i in LONG_BF16],
)
def test_bf16_is_as_good_as_one_device(triple: equality.Triple) -> None:
    """In bf16 each gradient's error against the fp64 truth is at most 1.5 times one bf16 device's own."""
    case = equality.draw_case(triple, equality.chooser(triple, lambda n: 0), "bf16", width=64, seq=32)
    equality.check_bf16(case)
