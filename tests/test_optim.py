import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.optim import (
    Adamw,
    LossScaling,
    Schedule,
    clip_scale,
    init,
    lr_at,
    scale_init,
    scale_update,
    update,
)

ONE, NO = torch.tensor(1.0), torch.tensor(False)


def textbook(cfg: Adamw, p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, decay: bool) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2; m and v in place."""
    m.mul_(cfg.beta1).add_((1 - cfg.beta1) * g)
    v.mul_(cfg.beta2).add_((1 - cfg.beta2) * g * g)
    step = (m / (1 - cfg.beta1**t)) / (torch.sqrt(v / (1 - cfg.beta2**t)) + cfg.eps)
    return p - lr * step - (lr * cfg.weight_decay * p if decay else 0)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 999), st.sampled_from([torch.float64, torch.float32]), st.floats(0.01, 100.0))
def test_equals_the_textbook(seed: int, dtype: torch.dtype, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    shapes, decays = [(3, 5), (7,), (33,), ()], [True, False, True, False]
    masters = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    want = [m.double() for m in masters]
    ms, vs = ([torch.zeros_like(w) for w in want] for _ in range(2))
    cfg, state = Adamw(beta1=0.8, beta2=0.97, eps=1e-6, weight_decay=0.3), init(masters)
    for t in range(1, 6):
        lr = 0.01 * t
        grads = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
        want = [
            textbook(cfg, p, gr.double() / scale, m, v, t, lr, d)
            for p, gr, m, v, d in zip(want, grads, ms, vs, decays, strict=True)
        ]
        update(cfg, masters, grads, state, decays, lr, torch.tensor(scale, dtype=torch.float64), NO)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    for got, expected, m in zip(masters, want, state.exp_avg, strict=True):
        assert got.dtype == m.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert float(state.step) == 5


def test_lr_may_be_a_tensor() -> None:
    a, b = [torch.ones(3)], [torch.ones(3)]
    update(Adamw(), a, [torch.ones(3)], init(a), [True], 0.25, ONE, NO)
    update(Adamw(), b, [torch.ones(3)], init(b), [True], torch.tensor(0.25), ONE, NO)
    assert torch.equal(a[0], b[0]) and float(a[0][0]) < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_a_skipped_step_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    masters = [torch.ones(4, dtype=dtype), torch.ones(2, dtype=dtype)]
    state = init(masters)
    update(Adamw(), masters, [torch.ones_like(m) for m in masters], state, [True, False], 0.1, ONE, NO)
    everything = [*masters, *state.exp_avg, *state.exp_avg_sq, state.step]
    before = [t.clone() for t in everything]
    grads = [torch.full_like(m, bad) for m in masters]
    update(Adamw(), masters, grads, state, [True, False], 0.1, torch.tensor(bad), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(before, everything, strict=True))
    assert float(state.step) == 1


def test_no_masters_is_no_work() -> None:
    update(Adamw(), [], [], init([]), [], 0.1, ONE, NO)


def test_decay_leaves_norms_and_biases_alone() -> None:
    masters = [torch.ones(2, 2), torch.ones(2), torch.ones(2, 2)]
    grads = [torch.zeros_like(m) for m in masters]
    update(Adamw(weight_decay=0.1), masters, grads, init(masters), [True, False, True], 0.1, ONE, NO)
    for m, want in zip(masters, (0.99, 1.0, 0.99), strict=True):
        torch.testing.assert_close(m, torch.full_like(m, want))


def test_small_updates_reach_an_fp32_master_but_not_a_bf16_weight() -> None:
    # The step of Adam under a constant gradient is the learning rate itself.
    master, state = [torch.ones(1)], init([torch.ones(1)])
    pure = [torch.ones(1, dtype=torch.bfloat16)]
    pure_state = init(pure)
    for _ in range(8):
        weight = master[0].to(torch.bfloat16)  # what forward and backward use
        grad = torch.ones_like(weight)
        update(Adamw(weight_decay=0.0), master, [grad.float()], state, [True], 1e-3, ONE, NO)
        update(Adamw(weight_decay=0.0), pure, [grad], pure_state, [True], 1e-3, ONE, NO)
    assert state.exp_avg[0].dtype == state.exp_avg_sq[0].dtype == torch.float32
    assert float(master[0]) == pytest.approx(0.992, abs=1e-6)
    assert float(pure[0]) == 1.0


def test_warm_up_and_shapes() -> None:
    assert [lr_at(Schedule("constant", 1.0, warmup=4), s) for s in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = Schedule("linear", 1.0, warmup=2, length=6, min_lr=0.2)
    assert [lr_at(linear, s) for s in range(1, 9)] == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = Schedule("cosine", 2.0, warmup=0, length=4)
    want = [1 + math.cos(math.pi * s / 4) for s in range(1, 5)]
    assert [lr_at(cosine, s) for s in range(1, 5)] == pytest.approx(want)
    wsd = Schedule("wsd", 1.0, warmup=2, length=8, decay=4)
    assert [lr_at(wsd, s) for s in range(1, 10)] == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


schedules = st.builds(
    Schedule,
    name=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    lr=st.floats(1e-5, 1.0),
    warmup=st.integers(0, 20),
    length=st.integers(0, 60),
    decay=st.integers(0, 30),
)


@given(schedules)
def test_a_schedule_rises_then_falls_and_stays_in_range(cfg: Schedule) -> None:
    rates = [lr_at(cfg, s) for s in range(1, 80)]
    peak = max(range(79), key=lambda i: rates[i])
    assert all(0 <= r <= cfg.lr for r in rates)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_rates_do_not_depend_on_where_a_run_starts_or_stops() -> None:
    cfg = Schedule("cosine", 3e-4, warmup=4, length=12)
    straight = [lr_at(cfg, s) for s in range(1, 13)]
    assert [lr_at(cfg, s) for s in range(1, 5)] + [lr_at(cfg, s) for s in range(5, 13)] == straight
    assert straight[:5] != [lr_at(Schedule("cosine", 3e-4, warmup=4, length=5), s) for s in range(1, 6)]


def test_clip_scale() -> None:
    norm = torch.tensor([3.0, 4.0]).norm()  # two stages
    grads = torch.tensor([3.0, 4.0]) / clip_scale(norm, 1.0)
    torch.testing.assert_close(grads, torch.tensor([0.6, 0.8]))
    assert float(clip_scale(norm, 10.0)) == float(clip_scale(norm, None)) == 1.0
    assert math.isnan(float(clip_scale(torch.tensor(math.nan), 1.0)))


def test_loss_scale_grows_and_backs_off() -> None:
    cfg = LossScaling(start=4.0, every=3, least=1.0, most=16.0)
    state = scale_init(cfg)
    scales = []
    for overflow in (0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0):
        state = scale_update(cfg, state, torch.tensor(bool(overflow)))
        scales.append(float(state["scale"]))
    assert scales == [4, 4, 8, 8, 4, 4, 4, 2, 1, 1, 1, 1, 1, 2]
    for _ in range(30):
        state = scale_update(cfg, state, NO)
    assert float(state["scale"]) == 16


def test_loss_scale_is_pure_and_resumes() -> None:
    cfg = LossScaling(start=4.0, every=3)
    before = scale_init(cfg)
    after = scale_update(cfg, before, NO)
    assert int(before["good_steps"]) == 0 and int(after["good_steps"]) == 1
    resumed = {k: v.clone() for k, v in after.items()}
    for _ in range(3):
        after, resumed = scale_update(cfg, after, NO), scale_update(cfg, resumed, NO)
    assert after == resumed and after["scale"].dtype == torch.float32
