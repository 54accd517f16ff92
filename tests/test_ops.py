"""The operations against plain torch, whole and in parts."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.fx.experimental.proxy_tensor import make_fx

from dtrain import ops, rng
from dtrain.axes import Here

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
WHOLE = Here(offset=lambda axis: 0, sum=lambda x, axis: x, max=lambda x, axis: x)


def key(seed: int = 0, step: int = 0, layer: int = 0) -> rng.Key:
    return rng.Key(*(torch.tensor(n) for n in (seed, step, layer)))


def qkv(dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, seq: int = 7, head_dim: int = 8) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, seq, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
    """Attention from its definition, one head at a time."""
    share = q.shape[2] // k.shape[2]
    allowed = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if valid is not None:
        allowed = allowed & (valid > 0)[:, None, :]
    out = []
    for h in range(q.shape[2]):
        s = q[:, :, h] @ k[:, :, h // share].mT / math.sqrt(q.shape[3])
        out.append(torch.where(allowed, s, -math.inf).softmax(-1) @ v[:, :, h // share])
    return torch.stack(out, 2)


def with_grads(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    out = f(*inputs)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, inputs, seed.to(out.dtype))]


MASKS = {
    "causal": (True, None),
    "all": (False, None),
    "keys": (False, torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1]])),
}


@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients_equal_the_definition(
    dtype: torch.dtype, kv_heads: int, mask: str, kernel: str
) -> None:
    causal, valid = MASKS[mask]
    inputs = qkv(dtype, kv_heads=kv_heads)
    got = with_grads(lambda q, k, v: ops.attention(q, k, v, causal=causal, kernel=kernel, valid_BT=valid), *inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = with_grads(lambda q, k, v: plain_attention(q, k, v, causal, valid), *exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= DTYPES[dtype] * b.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_the_formulas_used_where_no_fused_kernel_fits(mask: str) -> None:
    causal, valid = MASKS[mask]
    inputs = qkv(torch.float64)
    out, *want = with_grads(lambda q, k, v: plain_attention(q, k, v, causal, valid), *inputs)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    allowed = ops._allowed(None if valid is None else valid > 0, None)
    got = ops._math_backward(seed, *(t.detach() for t in inputs), out.detach(), allowed, causal)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_a_sample_without_valid_keys_stays_finite_and_leaves_the_others_alone(kernel: str) -> None:
    valid = torch.ones(2, 7, dtype=torch.int64)
    valid[1] = 0
    q, k, v = qkv(torch.float32)
    got = with_grads(lambda *t: ops.attention(*t, causal=False, kernel=kernel, valid_BT=valid), q, k, v)
    want = with_grads(lambda *t: plain_attention(*t, False, None), q, k, v)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_traces_as_one_opaque_node_each_way(mask: str, dtype: torch.dtype) -> None:
    causal, valid = MASKS[mask]

    def joint(q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = ops.attention(*leaves, causal=causal, valid_BT=None if valid is None else keys)
        return out, *torch.autograd.grad(out, leaves, g)

    # Strides that the projections of a model can produce: heads split out of a permuted tensor.
    inputs = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in qkv(dtype)]
    keys = torch.ones(2, 7) if valid is None else valid
    args = (*inputs, torch.ones_like(inputs[0]), keys)
    graph = make_fx(joint, tracing_mode="fake")(*args)
    graph.graph.eliminate_dead_code()
    nodes = [str(n.target) for n in graph.graph.nodes if "dtrain" in str(n.target)]
    assert nodes == ["dtrain.attention.default", "dtrain.attention_backward.default"]
    for a, b in zip(graph(*args), joint(*args), strict=True):
        assert torch.equal(a, b)
    fakes = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    for fake, real in zip(fakes, joint(*args), strict=True):
        assert fake.meta["val"].stride() == real.stride() and fake.meta["val"].dtype == real.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_operation_keeps_torchs_rules(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    valid = torch.ones(2, 7, dtype=torch.bool)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    library.opcheck(ops._attention, (q, k, v, None, True, "auto"), test_utils=tests)
    library.opcheck(ops._attention, (q, k, v, valid, False, "auto"), test_utils=tests)
    start = torch.tensor([[0, 0, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 2, 6]])
    library.opcheck(ops._attention, (q, k, v, None, True, "auto", start), test_utils=tests)
    out, lse = ops._attention(q, k, v, valid, False, "auto")
    detached = [t.detach() for t in (out, q, k, v, out, lse)]
    library.opcheck(ops._backward, (*detached, valid, False, "auto"), test_utils=tests)


def test_what_is_saved_is_the_log_sum_exp() -> None:
    q, k, v = qkv(torch.float64, kv_heads=4)
    _, lse = ops._attention(q, k, v, None, False, "auto")
    scores = torch.einsum("bshk,bthk->bhst", q, k) / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
V100, A100, HOPPER = (7, 0), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("kernel", "gpu", "dtype", "head_dim", "masked", "want"),
    [
        ("auto", None, FP64, 5, True, "cpu"),
        ("flash", None, FP32, 5, True, "cpu"),
        ("efficient", V100, FP32, 64, True, "efficient"),
        ("cudnn", A100, BF16, 128, False, "cudnn"),
        ("flash", A100, FP16, 256, False, "flash"),
        ("auto", V100, FP16, 64, False, "efficient"),
        ("auto", A100, BF16, 64, False, "flash"),
        ("auto", A100, FP64, 64, False, "math"),
        ("auto", A100, FP32, 64, False, "efficient"),
        ("auto", A100, BF16, 64, True, "efficient"),
        ("auto", A100, BF16, 5, True, "math"),
        ("auto", HOPPER, BF16, 128, False, "cudnn"),
        ("auto", HOPPER, BF16, 256, False, "flash"),
        ("auto", HOPPER, BF16, 64, True, "efficient"),
        ("flash", A100, FP32, 64, False, "'flash' cannot do float32, head_dim 64: it needs fp16 or bf16"),
        ("flash", A100, BF16, 64, True, "'flash' cannot do bfloat16, head_dim 64 with a mask"),
        ("flash", V100, FP16, 64, False, "it needs a GPU of compute capability 8.0 or above"),
        ("cudnn", HOPPER, BF16, 256, False, "up to 128; set attention: auto or math"),
        ("efficient", A100, FP64, 64, False, "'efficient' cannot do float64"),
        ("cudnn", None, FP32, 64, False, "'cudnn' does not run on a CPU; set attention: auto or math"),
        ("efficient", None, FP32, 64, False, "'efficient' does not run on a CPU; set attention: auto or math"),
    ],
)
def test_a_kernel_is_chosen_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    gpu: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool,
    want: str,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    device = "cpu" if gpu is None else "cuda"
    if " " not in want:
        assert ops.kernel_for(kernel, device, dtype, head_dim, masked, gpu) == want
    else:
        with pytest.raises(ops.OpError, match=want) as caught:
            ops.kernel_for(kernel, device, dtype, head_dim, masked, gpu)
        assert "\n" not in str(caught.value)


def test_flash_takes_masks_of_documents_of_which_the_number_is_bounded() -> None:
    assert ops.kernel_for("auto", "cuda", BF16, 128, True, A100, documents=16) == "flash"
    assert ops.kernel_for("auto", "cuda", BF16, 128, True, HOPPER, documents=16) == "flash"
    assert ops.kernel_for("auto", "cuda", FP32, 128, True, A100, documents=16) == "efficient"
    with pytest.raises(ops.OpError, match=r"no mask but one of documents with data\.max_documents"):
        ops.kernel_for("flash", "cuda", BF16, 128, True, A100)
    with pytest.raises(ops.OpError, match="'cudnn' cannot do bfloat16, head_dim 128 with a mask"):
        ops.kernel_for("cudnn", "cuda", BF16, 128, True, A100, documents=16)


def _each_document(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """What FlashAttention does with sequences one after another, from its description: outputs, and the log-sum-exp as
    (heads, positions)."""
    out, lse = torch.full_like(q_NHK, math.nan), torch.full(q_NHK.shape[1::-1], math.nan, dtype=q_NHK.dtype)
    for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        out[a:b] = plain_attention(q_NHK[None, a:b], k_NGK[None, a:b], v_NGK[None, a:b], True, None)[0]
        k = k_NGK[a:b].repeat_interleave(q_NHK.shape[1] // k_NGK.shape[1], 1)
        scores = torch.einsum("shk,thk->hst", q_NHK[a:b], k) / math.sqrt(q_NHK.shape[2])
        lse[:, a:b] = scores.masked_fill(~torch.ones(b - a, b - a).bool().tril(), -math.inf).logsumexp(-1)
    return out, lse


@pytest.fixture
def flash_of_this_test() -> Iterator[list[Tensor]]:
    """torch's two flash operations on a CPU, computed here as they are described; collects their cumulative lengths."""
    seen: list[Tensor] = []

    def forward(q: Any, k: Any, v: Any, ends: Any, also: Any, longest: int, last: int, drop: float, causal: bool,
                debug: bool, **more: Any) -> Any:  # fmt: skip
        assert ends.dtype == torch.int32 and ends is also and longest == last and drop == 0 and causal and not more
        assert q.ndim == 3 and int((ends[1:] - ends[:-1]).max()) <= longest and int(ends[-1]) == len(q)
        seen.append(ends)
        return *_each_document(q, k, v, ends), torch.zeros(2).long(), torch.zeros(()).long(), torch.zeros(0)

    def differentiate(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends: Any) -> Any:
        own = [t.detach().requires_grad_() for t in (q, k, v)]
        again, sums = _each_document(*own, ends)
        torch.testing.assert_close((again, sums), (out, lse))
        return torch.autograd.grad(again, own, grad)

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends: Any, *rest: Any) -> Any:
        seen.append(ends)
        # Inside of an operation autograd is off; a thread of its own begins anew.
        return alone.submit(differentiate, grad, q, k, v, out, lse, ends).result()

    stand_in = library.Library("aten", "IMPL")
    stand_in.impl("_flash_attention_forward", forward, "CPU")
    stand_in.impl("_flash_attention_backward", backward, "CPU")
    with ThreadPoolExecutor(1) as alone:
        yield seen
    stand_in._destroy()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flash_over_documents_equals_the_exact_mask(flash_of_this_test: list[Tensor], kv_heads: int) -> None:
    q, k, v = (t.detach() for t in qkv(torch.float64, kv_heads=kv_heads))
    start = torch.tensor([[0, 0, 0, 3, 3, 3, 6], [0, 0, 2, 2, 2, 2, 2]])
    grad = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    want = ops.attention_by("math", q, k, v, None, True, start)
    wanted = ops.attention_backward_by("math", grad, q, k, v, *want, None, True, start)
    for documents in (3, 5):  # as many as there are, and more
        flash_of_this_test.clear()
        got = ops.attention_by("flash", q, k, v, None, True, start, documents)
        grads = ops.attention_backward_by("flash", grad, q, k, v, *got, None, True, start, documents)
        for ours, exact in zip((*got, *grads), (*want, *wanted), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)
            assert ours.stride() == exact.stride()
        bounds = [0, 3, 6, 7, 9, 14]
        assert [e.tolist() for e in flash_of_this_test] == [bounds + [14] * (2 * documents + 1 - 6)] * 2


def test_flash_over_documents_has_shapes_that_do_not_depend_on_the_data() -> None:
    """It is traced on fake tensors, where a shape that did would be an error, as a CUDA graph records it."""
    q, k, v = (t.detach() for t in qkv(BF16))

    def both(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        out, lse = ops.attention_by("flash", q, k, v, None, True, start, 4)
        return out, lse, *ops.attention_backward_by("flash", out, q, k, v, out, lse, None, True, start, 4)

    traced = make_fx(both, tracing_mode="fake")(q, k, v, torch.zeros(2, 7).long())
    (ends,) = {n.args[3] for n in traced.graph.nodes if n.target == torch.ops.aten._flash_attention_forward.default}
    assert ends.meta["val"].shape == (2 * 4 + 1,) and ends.meta["val"].dtype == torch.int32
    lse = torch.zeros(2, 4, 7)
    for node, like in zip(traced.graph.output_node().args[0], (q, lse, q, k, v), strict=True):
        fake = node.meta["val"]
        assert (fake.shape, fake.stride(), fake.dtype) == (like.shape, like.contiguous().stride(), like.dtype)


def test_auto_leaves_cudnn_alone_where_it_is_old_or_must_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91400)
    assert ops.kernel_for("auto", "cuda", BF16, 128, False, HOPPER) == "flash"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert ops.kernel_for("auto", "cuda", BF16, 128, False, HOPPER) == "flash"
    with pytest.raises(ops.OpError, match=r"'cudnn' cannot do .*: it needs run\.deterministic: false"):
        ops.kernel_for("cudnn", "cuda", BF16, 128, False, HOPPER)


def test_flash_attention_3_is_taken_on_hopper_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    find = ops.importlib.util.find_spec
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda n: n == "flash_attn_interface" or find(n))
    ops.flash_attention_3.cache_clear()
    assert ops.kernel_for("auto", "cuda", BF16, 128, False, A100) == "flash" and not activated
    assert [ops.kernel_for("auto", "cuda", BF16, 128, False, HOPPER) for _ in range(2)] == ["flash", "flash"]
    assert activated == ["FA3"]  # once a process: torch keeps it
    ops.flash_attention_3.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "flsh"}, "'flsh' does not exist; allowed: auto"),
        ({"kernel": "flash", "drop": lambda p: p}, "dropout needs kernel 'math'"),
        ({"valid_BT": torch.ones(2, 7)}, "either causal=True or a mask"),
    ],
)
def test_attention_refuses_what_does_not_go_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ops.OpError, match=message):
        ops.attention(*qkv(torch.float32), **{"causal": True, **change})
    with pytest.raises(ops.OpError, match="4 query heads cannot share 3"):
        ops.attention(*qkv(torch.float32, kv_heads=3), causal=True)


# --- norms ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_torch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=g).to(dtype) for s in ((3, 5, 16), (16,), (16,)))
    exact = [t.double() for t in (x, w, b)]
    tol = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    got = ops.layer_norm(x, w, b, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), F.layer_norm(exact[0], (16,), exact[1], exact[2], 1e-5), **tol)
    got = ops.rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), F.rms_norm(exact[0], (16,), exact[1], 1e-5), **tol)


def test_norms_of_half_precision_are_computed_in_fp32() -> None:
    x = torch.full((1, 1, 64), 300.0, dtype=torch.float16)  # 300^2 overflows fp16
    one, zero = torch.ones(64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, one, 1e-5), torch.ones_like(x))
    assert ops.layer_norm(x, one, zero, 1e-5).isfinite().all()


def test_projections_to_and_from_heads() -> None:
    g = torch.Generator().manual_seed(0)
    x, w, o = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, 3, 4), (4, 5, 6), (5, 6, 4)))
    y = ops.to_heads(x, w)
    torch.testing.assert_close(y, torch.einsum("bse,ehk->bshk", x, w))
    torch.testing.assert_close(ops.from_heads(y, o), torch.einsum("bshk,hke->bse", y, o))


# --- rotary ---


def test_llama31_frequencies() -> None:
    plain = ops.rope_frequencies(128, 5e5, None)
    scaled = ops.rope_frequencies(128, 5e5, ops.RopeScaling(factor=8.0))
    ratio = plain / scaled
    assert (ratio == 1).sum() == 29 and ((ratio - 8).abs() < 1e-12).sum() == 29
    for i, want in {28: 3.211446e-3, 30: 1.371894e-3, 34: 1.785078e-4, 63: 3.068926e-7}.items():
        assert scaled[i].item() == pytest.approx(want, rel=1e-6)
    ratio = ops.rope_frequencies(64, 5e5, None) / ops.rope_frequencies(64, 5e5, ops.RopeScaling(factor=32.0))
    assert (ratio == 1).sum() == 15 and ((ratio - 32).abs() < 1e-12).sum() == 14


def test_rotary_refusals() -> None:
    with pytest.raises(ops.OpError, match="unknown rotary scaling 'yarn'; allowed: 'llama3'"):
        ops.rope_frequencies(8, 1e4, ops.RopeScaling(kind="yarn"))  # type: ignore[arg-type]
    with pytest.raises(ops.OpError, match="head_dim 7 is odd"):
        ops.rope_frequencies(7, 1e4, None)


def test_rotary_tables_are_fp32_for_every_smaller_dtype() -> None:
    at = torch.tensor([0, 31, 131071])
    exact = torch.tensor([[p * 5e5 ** (-2 * i / 8) for i in range(4)] for p in at.tolist()], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cos, sin = ops.rope_tables(at, 8, 5e5, None, dtype)
        assert cos.dtype == sin.dtype == torch.float32
        torch.testing.assert_close(cos, exact.cos().float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, exact.sin().float(), rtol=0, atol=1e-6)
    assert ops.rope_tables(at, 8, 5e5, None, torch.float64)[0].dtype == torch.float64


def test_rotated_products_depend_on_distance_only() -> None:
    q, k, _ = qkv(torch.float64, heads=1, kv_heads=1)

    def score(i: int, j: int) -> Tensor:
        turned = [
            ops.rotate(x[:, :1], *ops.rope_tables(torch.tensor([n]), 8, 1e4, None, x.dtype))
            for x, n in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), rtol=1e-9, atol=1e-9)
    assert not torch.isclose(score(3, 1), score(1, 3))


# --- loss ---


def in_parts(parts: int, f: Callable[[Here, int], Any], size: int) -> list[Any]:
    """Run `f(here, part)` on each of `parts` vocabulary shards of `size`, in threads that meet to reduce."""
    gate, board, results = threading.Barrier(parts), [None] * parts, [None] * parts

    def work(part: int) -> None:
        def meet(x: Tensor, combine: Callable[[list[Any]], Tensor]) -> Tensor:
            board[part] = x  # type: ignore[call-overload]
            gate.wait(10)
            out = combine(list(board))
            gate.wait(10)
            return out

        here = Here(
            offset=lambda axis: torch.tensor(part * size) if axis == "vocab" else 0,
            sum=lambda x, axis: meet(x, lambda xs: torch.stack(xs).sum(0)),
            max=lambda x, axis: meet(x, lambda xs: torch.stack(xs).amax(0)),
        )
        results[part] = f(here, part)

    threads = [threading.Thread(target=work, args=(p,)) for p in range(parts)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_cross_entropy_and_its_gradient_equal_torch_however_the_vocabulary_is_cut(parts: int) -> None:
    g = torch.Generator().manual_seed(0)
    vocab, padded = 9, 12
    logits = torch.randn(2, 3, padded, generator=g, dtype=torch.float64) * 4
    labels = torch.tensor([[0, 8, -1], [3, -100, 5]])
    weight = torch.randn(2, 3, generator=g, dtype=torch.float64)

    whole = logits[..., :vocab].clone().requires_grad_()
    want = F.cross_entropy(whole.mT, labels.clamp(min=-1), ignore_index=-1, reduction="none")
    (want_grad,) = torch.autograd.grad(want, whole, weight)

    def part(here: Here, i: int) -> tuple[Tensor, Tensor]:
        mine = logits.chunk(parts, -1)[i].clone().requires_grad_()
        loss = ops.cross_entropy(here, mine, labels, vocab)
        return loss.detach(), torch.autograd.grad(loss, mine, weight)[0]

    results = in_parts(parts, part, padded // parts)
    for loss, _ in results:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(grad[..., :vocab], want_grad, rtol=1e-12, atol=1e-12)
    assert not grad[..., vocab:].any()


def test_padded_classes_take_no_part() -> None:
    for label in range(5):
        loss = ops.cross_entropy(WHOLE, torch.zeros(1, 1, 8), torch.tensor([[label]]), 5)
        assert loss.item() == pytest.approx(math.log(5), rel=1e-6)


def test_fully_ignored_labels_are_finite_and_give_no_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = ops.cross_entropy(WHOLE, logits, torch.full((2, 3), -1), 5)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not loss.any() and not grad.any()


def test_half_precision_loss_is_fp32_and_large_logits_do_not_overflow() -> None:
    logits = (torch.randn(1, 2, 5) * 1000).to(torch.bfloat16).requires_grad_()
    loss = ops.cross_entropy(WHOLE, logits, torch.tensor([[1, 2]]), 5)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert grad.dtype == torch.bfloat16 and grad.isfinite().all()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_embedding_of_a_cut_table_sums_to_the_whole(parts: int) -> None:
    table, ids = torch.randn(6, 4, dtype=torch.float64), torch.tensor([[0, 5, 2], [3, 3, 1]])

    def part(here: Here, i: int) -> tuple[Tensor, Tensor]:
        mine = table.chunk(parts)[i].clone().requires_grad_()
        out = ops.embedding(here, mine, ids)
        return out.detach(), torch.autograd.grad(out.square().sum(), mine)[0]

    results = in_parts(parts, part, 6 // parts)
    assert torch.equal(torch.stack([out for out, _ in results]).sum(0), table[ids])
    whole = table.clone().requires_grad_()
    (want,) = torch.autograd.grad(whole[ids].square().sum(), whole)
    torch.testing.assert_close(torch.cat([g for _, g in results]), want)


# --- dropout ---

AXES = "batch res_seq embed"


def drop(x: Tensor, sample: Tensor, k: rng.Key, site: str = "a", rate: float = 0.3, at: int = 0) -> Tensor:
    here = Here(offset=lambda axis: at if axis == "res_seq" else 0, sum=WHOLE.sum, max=WHOLE.max)
    return ops.dropout(here, x, AXES, sample, k, site, rate)


def test_dropout_keeps_the_right_share_independently_and_scales_it() -> None:
    out = drop(torch.ones(8, 64, 256), torch.arange(8), key())
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.7))
    n = out.numel()
    assert abs(kept.double().mean().item() - 0.7) < 5 * math.sqrt(0.7 * 0.3 / n)
    for a, b in ((kept[..., 1:], kept[..., :-1]), (kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        both = (a & b).double().mean().item()
        assert abs(both - 0.49) < 5 * math.sqrt(0.49 * 0.51 / n) * 1.5  # neighbours are drawn independently
    groups = kept.view(-1, 4).sum(-1).bincount(minlength=5) / (n / 4)
    want = torch.tensor([math.comb(4, k) * 0.7**k * 0.3 ** (4 - k) for k in range(5)])
    torch.testing.assert_close(groups, want, rtol=0, atol=0.01)


def test_dropout_masks_repeat_and_differ_where_they_should() -> None:
    x, sample = torch.ones(4, 8, 64), torch.arange(4)
    base = drop(x, sample, key())
    assert torch.equal(base, drop(x, sample, key()))
    for other in (key(seed=1), key(step=1), key(layer=1)):
        assert not torch.equal(base, drop(x, sample, other))
    assert not torch.equal(base, drop(x, sample, key(), site="b"))
    assert len({tuple(row.tolist()) for row in (base != 0).view(32, 64)}) == 32  # samples and positions differ


def test_a_dropout_mask_does_not_depend_on_how_the_tensor_is_cut() -> None:
    x, sample = torch.randn(4, 8, 16), torch.tensor([7, 3, 100, 0])
    whole = drop(x, sample, key())
    rows = torch.cat([drop(x[i : i + 2], sample[i : i + 2], key()) for i in (0, 2)])
    columns = torch.cat([drop(x[:, i : i + 4], sample, key(), at=i) for i in (0, 4)], 1)
    assert torch.equal(whole, rows) and torch.equal(whole, columns)


# torch's own modules warn when Inductor imports them.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("shape", [(2, 8, 32), (3, 5, 7), (2, 4, 8, 8)], ids=str)
def test_a_compiled_dropout_mask_is_the_same(shape: tuple[int, ...]) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("compiling needs a C++ compiler")
    axes = AXES if len(shape) == 3 else "batch heads seq seq"

    def f(x: Tensor, sample: Tensor, *words: Tensor) -> tuple[Tensor]:
        return (ops.dropout(WHOLE, x, axes, sample, rng.Key(*words), "a", 0.3),)

    args = [torch.ones(shape), torch.arange(shape[0]), torch.tensor(1), torch.tensor(2), torch.tensor(3)]
    graph = make_fx(f, tracing_mode="fake")(*args)
    compiled = torch._inductor.standalone_compile(graph, args, dynamic_shapes="from_example_inputs")
    assert torch.equal(graph(*args)[0], compiled(*args)[0])


def test_the_mask_of_backward_is_the_mask_of_forward() -> None:
    x = torch.ones(2, 8, 32, requires_grad=True)
    out = drop(x, torch.arange(2), key())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)


def test_attention_dropout_differs_between_heads_and_follows_the_head_when_heads_are_cut() -> None:
    q, k, v = (t.detach() for t in qkv(torch.float64, kv_heads=4))

    def attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        here = Here(offset=lambda axis: first if axis == "heads" else 0, sum=WHOLE.sum, max=WHOLE.max)

        def drop(p: Tensor) -> Tensor:
            return ops.dropout(here, p, "batch heads seq seq", torch.arange(2), key(), "attention", 0.5)

        return ops.attention(q, k, v, causal=True, kernel="math", drop=drop)

    whole = attend(q, k, v, 0)
    parts = torch.cat([attend(q[:, :, i : i + 2], k[:, :, i : i + 2], v[:, :, i : i + 2], i) for i in (0, 2)], 2)
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)
    same = [t[:, :, :1].expand(-1, -1, 4, -1) for t in (q, k, v)]
    out = attend(*same, 0)
    assert not torch.allclose(out[:, :, 0], out[:, :, 1])
