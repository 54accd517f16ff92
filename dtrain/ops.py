"""The mathematics of transformers: tensors in, tensors out.

Nothing here knows a mesh. What has to run on local shards takes `here`, an island's record of its place.

Shapes: B batch, S query positions, T key positions, E embed, H query heads, G key/value heads, K head_dim,
V vocabulary; a vocabulary or heads may be the local part.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, library

from dtrain import rng
from dtrain.axes import Here

KERNELS = ("auto", "flash", "efficient", "cudnn", "math")


class OpError(ValueError):
    """An operation cannot be done as asked; the message is one line for a person."""


def _wide(x: Tensor) -> Tensor:
    """Statistics, tables and losses are computed in fp32, or in float64 where the model runs in float64."""
    return x if x.dtype == torch.float64 else x.float()


# --- pointwise ---


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, `embed` (Zhang & Sennrich 2019)."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, `embed` (Ba et al. 2016)."""
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * _wide(weight) + _wide(bias)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020). Gate and up have a weight each, so any split keeps the pairs."""
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), exact (BERT)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu (GPT-2)."""
    return F.gelu(x, approximate="tanh")


def to_heads(x_BSE: Tensor, w_EHK: Tensor) -> Tensor:
    """Project `batch seq embed` to `batch seq heads head_dim` with a weight `embed heads head_dim`."""
    y = x_BSE @ rearrange(w_EHK, "e h k -> e (h k)")
    return rearrange(y, "b s (h k) -> b s h k", k=w_EHK.shape[2])


def from_heads(x_BSHK: Tensor, w_HKE: Tensor) -> Tensor:
    """Project `batch seq heads head_dim` back to `batch seq embed` with a weight `heads head_dim embed`."""
    return rearrange(x_BSHK, "b s h k -> b s (h k)") @ rearrange(w_HKE, "h k e -> (h k) e")


# --- lookups ---


def embedding(here: Here, table_VE: Tensor, ids_BS: Tensor) -> Tensor:
    """Rows of a table whose `vocab` axis may be split; others' ids give 0 (`batch seq embed +vocab`)."""
    local = ids_BS - here.offset("vocab")
    mine = (local >= 0) & (local < table_VE.shape[0])
    rows = F.embedding(local.clamp(0, table_VE.shape[0] - 1), table_VE)
    return rows.masked_fill(~mine[..., None], 0.0)


def positions(here: Here, x: Tensor, axis: str, position: int) -> Tensor:
    """Global indices (int64) of the elements of x along `position`, whose axis is `axis`."""
    return torch.arange(x.shape[position], device=x.device) + here.offset(axis)


def dropout(here: Here, x: Tensor, axes: str, sample_B: Tensor, key: rng.Key, site: str, rate: float) -> Tensor:
    """Zero elements of x with probability `rate` and scale the rest by 1/(1-rate).

    `axes` names x's axes, `batch` first. The mask is a function of the key, the site and the element's global
    place (sample, then the index along every other axis), so it is the same under every layout.
    """
    index = rng.fold(sample_B, 0)
    for i, axis in enumerate(axes.split()[1:], 1):
        # Positions enter by xor with a hash. Were they hashed themselves, a C++ compiler that knows their
        # range would take the wrapping products for overflows that cannot happen: another mask.
        index = rng.fold(index[..., None] ^ positions(here, x, axis, i), i)
    keep = rng.keep_mask(key, site, index, rate)
    return (x / (1.0 - rate)).masked_fill(~keep, 0.0)


# --- rotary ---


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rescaling of rotary frequencies for contexts longer than `original` positions.

    Wavelengths below original/high are kept, above original/low divided by `factor`, blended in between.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: Any = None) -> Tensor:
    """The head_dim/2 angular frequencies theta^(-2i/head_dim), float64 (Su et al. 2021; Llama 3 report).

    Raises OpError for an odd head_dim or an unknown kind of scaling.
    """
    if head_dim % 2:
        raise OpError(f"rotary embedding turns pairs: head_dim {head_dim} is odd; use an even one")
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    f = torch.exp(exponent * -math.log(theta))
    if scaling is None:
        return f
    if scaling.kind != "llama3":
        raise OpError(f"unknown rotary scaling {scaling.kind!r}; allowed: 'llama3'")
    turns = scaling.original * f / (2 * math.pi)  # how often a frequency turns within the original context
    smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return f * (smooth + (1 - smooth) / scaling.factor)


def rope_tables(
    position_S: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, (seq, head_dim/2), or (batch, seq, head_dim/2) for positions of each
    sequence: fp32 whatever the model's dtype, or float64."""
    angle = position_S.to(torch.float64)[..., None] * rope_frequencies(head_dim, theta, scaling, position_S.device)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(table), angle.sin().to(table)


def rotate(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) by its position's angle: the layout of Hugging Face's Llama."""
    a, b = _wide(x_BSHK).chunk(2, dim=-1)
    c, s = cos[..., None, :], sin[..., None, :]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x_BSHK.dtype)


# --- attention ---


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    *,
    causal: bool,
    kernel: str = "auto",
    valid_BT: Tensor | None = None,
    start_BS: Tensor | None = None,
    documents: int = 0,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v -> `batch seq heads head_dim` (Vaswani et al. 2017).

    H is a multiple of G and consecutive query heads share a key/value head. `valid_BT` (non-zero = may be
    attended) is for bidirectional attention; a sample without any valid key attends to all, so stays finite.
    `start_BS` is for causal attention among packed documents: where in the sequence each position's document
    begins; positions see those of their own document only. Math and the kernel of a CPU and the efficient one of a
    GPU make a mask of scores of it, exact. Flash skips what is masked, where `documents` says how many a sequence has
    at most (0: nobody knows), and cuDNN refuses it. A single query is the last of the positions.
    `drop` maps the probabilities (batch, heads, seq, seq) and needs `kernel="math"`, plain operations that
    hold all scores; any other kernel is one opaque operation that saves q, k, v, the result and a
    log-sum-exp a row. `auto` takes the fastest that fits where the operation runs.

    Raises OpError for shapes, masks, dtypes or kernels that do not go together.
    """
    if kernel not in KERNELS:
        raise OpError(f"attention kernel {kernel!r} does not exist; allowed: {', '.join(KERNELS)}")
    if q_BSHK.shape[2] % k_BTGK.shape[2]:
        raise OpError(f"{q_BSHK.shape[2]} query heads cannot share {k_BTGK.shape[2]} key/value heads evenly")
    if causal and valid_BT is not None:
        raise OpError("attention takes either causal=True or a mask of valid keys, not both")
    if start_BS is not None and not causal:
        raise OpError("attention among packed documents is causal; give causal=True with their starts")
    if causal and q_BSHK.shape[1] != k_BTGK.shape[1]:
        if q_BSHK.shape[1] != 1 or start_BS is not None:
            raise OpError(
                f"causal attention needs as many queries as keys, got {q_BSHK.shape[1]} and {k_BTGK.shape[1]}"
            )
        causal = False  # it sees them all
    valid = None
    if valid_BT is not None:
        valid = valid_BT > 0
        valid = valid | ~valid.any(-1, keepdim=True)
    if kernel == "math":
        p_BHST, _ = _probabilities(q_BSHK, k_BTGK, _allowed(valid, start_BS), causal)
        p_BHST = p_BHST if drop is None else drop(p_BHST)
        return _weigh(p_BHST.to(v_BTGK.dtype), v_BTGK)
    if drop is not None:
        raise OpError(f"attention dropout needs kernel 'math', not {kernel!r}; set attention: math or no dropout")
    most = documents if start_BS is not None else 0
    out: Tensor = _attention(q_BSHK, k_BTGK, v_BTGK, valid, causal, kernel, start_BS, most)[0]
    return out


def kernel_for(
    kernel: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool,
    capability: tuple[int, int] | None = None,
    documents: int = 0,
) -> str:
    """Which implementation runs: `cpu`, `flash`, `efficient`, `cudnn` or `math`; OpError if none fits.

    `masked`: with a mask of valid keys or of documents, of which a sequence has up to `documents` (0: nobody knows, or
    another mask). `capability` is the GPU's compute capability, (9, 0) for Hopper; by default that of the current
    device.
    """
    if device == "cpu":
        if kernel in ("auto", "flash"):
            return "cpu"
        raise OpError(f"attention kernel {kernel!r} does not run on a CPU; set attention: auto or math")
    capability = capability or torch.cuda.get_device_capability()
    lacks = {k: _lacks(k, dtype, head_dim, masked, capability, documents) for k in ("flash", "cudnn", "efficient")}
    if kernel != "auto":
        if lacks[kernel]:
            name = str(dtype).removeprefix("torch.")
            mask = " with a mask" if masked else ""
            raise OpError(
                f"attention kernel {kernel!r} cannot do {name}, head_dim {head_dim}{mask}: it needs {lacks[kernel]}; "
                "set attention: auto or math"
            )
        return kernel
    order: tuple[str, ...] = ("flash", "efficient")
    if _prefers_cudnn(capability) and not flash_attention_3(capability):
        order = ("cudnn", *order)
    return next((k for k in order if not lacks[k]), "math")


def _lacks(
    kernel: str, dtype: torch.dtype, head_dim: int, masked: bool, capability: tuple[int, int], documents: int
) -> str:
    """What a GPU kernel needs and is not given, or nothing."""
    half = dtype in (torch.float16, torch.bfloat16)
    if kernel == "efficient":
        if (half and head_dim % 8 == 0) or (dtype == torch.float32 and head_dim % 4 == 0):
            return ""
        return "fp16, bf16 or fp32 and a head_dim that is a multiple of 8 (4 in fp32)"
    if capability < (8, 0):
        return "a GPU of compute capability 8.0 or above"
    most = 256 if kernel == "flash" else 128
    if not half or (masked and not (kernel == "flash" and documents)) or head_dim % 8 or head_dim > most:
        mask = "no mask but one of documents with data.max_documents" if kernel == "flash" else "no mask"
        return f"fp16 or bf16, {mask} and a head_dim that is a multiple of 8 up to {most}"
    # The backward of cuDNN's kernel adds in no fixed order.
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "run.deterministic: false"
    return ""


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    """Where cuDNN's kernel is faster than FlashAttention-2 and mends its trouble with odd lengths: torch's own rule."""
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return capability in ((9, 0), (10, 0), (10, 3)) and version > 91500


@functools.cache
def flash_attention_3(capability: tuple[int, int]) -> bool:
    """Whether `flash` is FlashAttention-3 here, and from now on it is.

    On Hopper, with the package that has the module `flash_attn_interface` (FlashAttention's `hopper` folder, of which
    PyPI has no wheel), torch puts its kernels under the same two operations as FlashAttention-2's, forward and
    backward, with the same saved set. Without the package `flash` is FlashAttention-2, which torch brings along.
    """
    if capability != (9, 0) or importlib.util.find_spec("flash_attn_interface") is None:
        return False
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return True


def _allowed(valid: Tensor | None, start: Tensor | None) -> Tensor | None:
    """Which keys a query may attend to besides causality: (batch, 1 or seq, seq), or None for all."""
    if start is not None:
        return start[:, :, None] == start[:, None, :]
    return None if valid is None else valid[:, None, :]


def _probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax over keys (batch, heads, seq, seq) and its log-sum-exp (batch, heads, seq)."""
    q_BGRSK = rearrange(q * q.shape[-1] ** -0.5, "b s (g r) k -> b g r s k", g=k.shape[2])
    k_BGKT = rearrange(k, "b t g k -> b g 1 k t")
    scores = _wide(q_BGRSK @ k_BGKT)
    if causal:
        i = torch.arange(q.shape[1], device=q.device)
        scores = scores.masked_fill(i[:, None] < i, -math.inf)
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, None, None], -math.inf)
    flat = rearrange(scores, "b g r s t -> b (g r) s t")
    return flat.softmax(-1), flat.logsumexp(-1)


def _weigh(p_BHST: Tensor, v_BTGK: Tensor) -> Tensor:
    p = rearrange(p_BHST, "b (g r) s t -> b g r s t", g=v_BTGK.shape[2])
    return rearrange(p @ rearrange(v_BTGK, "b t g k -> b g 1 t k"), "b g r s k -> b s (g r) k")


def _math_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, allowed: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    p, _ = _probabilities(q, k, allowed, causal)
    p = rearrange(p, "b (g r) s t -> b g r s t", g=k.shape[2])
    split = "b s (g r) k -> b g r s k"
    q_, g_, o_ = (_wide(rearrange(t, split, g=k.shape[2])) for t in (q, g, out))
    k_, v_ = (_wide(rearrange(t, "b t g k -> b g 1 t k")) for t in (k, v))
    scale = q.shape[-1] ** -0.5
    ds = p * (g_ @ v_.mT - (g_ * o_).sum(-1, keepdim=True)) * scale
    dq = rearrange(ds @ k_, "b g r s k -> b s (g r) k")
    dk = rearrange((ds.mT @ q_).sum(2), "b g t k -> b t g k")
    dv = rearrange((p.mT @ g_).sum(2), "b g t k -> b t g k")
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _more_heads(x_BTGK: Tensor, heads: int) -> Tensor:
    """Each key/value head once per query head that uses it."""
    return repeat(x_BTGK, "b t g k -> b t (g r) k", r=heads // x_BTGK.shape[2])


def _fewer_heads(x_BTHK: Tensor, heads: int) -> Tensor:
    """The sum over the query heads that share a key/value head."""
    return rearrange(x_BTHK, "b t (g r) k -> b t g r k", g=heads).sum(3)


def _bias(allowed: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as the additive bias (batch, heads, seq, seq) that fused kernels take, one for all heads."""
    if allowed is None:
        return None
    b, rows, keys = allowed.shape
    # The memory-efficient kernel reads the bias in vectors of 8, so rows start at multiples of 8 elements.
    bias = torch.zeros(b, rows, -(-keys // 8) * 8, dtype=q.dtype, device=q.device)[:, :, :keys]
    bias.masked_fill_(~allowed, -math.inf)
    return bias[:, None].expand(-1, q.shape[2], q.shape[1], -1)


def _ends(start_BS: Tensor, documents: int) -> Tensor:
    """Where each document begins among the positions of all rows one after another, and then their number: int32, of
    rows x `documents` + 1, as FlashAttention takes sequences of different lengths; where there are fewer, those that
    are left have no length. Its size does not depend on the data, so a recorded step can be repeated for others, and
    `documents` bounds it, as FlashAttention-2 makes blocks, and in backward scratch for 128 positions, for each.
    """
    at_S = torch.arange(start_BS.shape[1], device=start_BS.device)
    number = (start_BS == at_S).flatten().cumsum(0) - 1
    wanted = torch.arange(start_BS.shape[0] * documents + 1, device=start_BS.device)
    return torch.searchsorted(number, wanted, out_int32=True)


def _flash_apart(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Causal FlashAttention of documents that lie one after another, all rows as one, up to a row each."""
    b, s = q.shape[:2]
    out, lse_HN = torch.ops.aten._flash_attention_forward(
        *(t.flatten(0, 1) for t in (q, k, v)), ends, ends, s, s, 0.0, True, False
    )[:2]
    return out.unflatten(0, (b, s)), lse_HN.unflatten(1, (b, s)).transpose(0, 1).contiguous()


def _flash_apart_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    b, s = q.shape[:2]
    lse_HN = lse_BHS.transpose(0, 1).flatten(1).contiguous()
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the random state of a dropout that is off
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(t.flatten(0, 1) for t in (grad, q, k, v, out)), lse_HN, ends, ends, s, s, 0.0, True, unused[0], unused[1]
    )
    return dq.unflatten(0, (b, s)), dk.unflatten(0, (b, s)), dv.unflatten(0, (b, s))


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? valid, bool causal, str kernel, Tensor? start=None, int documents=0)"
    " -> (Tensor, Tensor)"
)
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? valid, bool causal,"
    " str kernel, Tensor? start=None, int documents=0) -> (Tensor, Tensor, Tensor)"
)


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    causal: bool,
    kernel: str,
    start: Tensor | None = None,
    documents: int = 0,
) -> tuple[Tensor, Tensor]:
    masked = valid is not None or start is not None
    used = kernel_for(kernel, q.device.type, q.dtype, q.shape[3], masked, documents=documents)
    if used == "flash":
        flash_attention_3(torch.cuda.get_device_capability())
    return attention_by(used, q, k, v, valid, causal, start, documents)


def attention_by(
    used: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    causal: bool,
    start: Tensor | None = None,
    documents: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention by one kernel, with its log-sum-exp."""
    if used == "flash" and start is not None:
        return _flash_apart(q, k, v, _ends(start, documents))
    aten, heads, allowed = torch.ops.aten, q.shape[2], _allowed(valid, start)
    if used == "math":
        p, lse = _probabilities(q, k, allowed, causal)
        return _weigh(p.to(v.dtype), v).contiguous(), lse.contiguous()
    if used == "efficient":  # the others share key/value heads themselves
        k, v = _more_heads(k, heads), _more_heads(v, heads)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    bias = _bias(allowed, q.transpose(1, 2))
    if used == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    elif used == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    elif used == "efficient":
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[:2]
    else:
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        lse = lse.squeeze(-1)
    # The efficient kernel pads the log-sum-exp's rows; what is saved has one shape for every kernel.
    return out.transpose(1, 2).contiguous(), lse[:, :, : q.shape[2]].contiguous()


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    valid: Tensor | None,
    causal: bool,
    kernel: str,
    start: Tensor | None = None,
    documents: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    masked = valid is not None or start is not None
    used = kernel_for(kernel, q.device.type, q.dtype, q.shape[3], masked, documents=documents)
    return attention_backward_by(used, grad, q, k, v, out, lse, valid, causal, start, documents)


def attention_backward_by(
    used: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    valid: Tensor | None,
    causal: bool,
    start: Tensor | None = None,
    documents: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by one kernel."""
    if used == "flash" and start is not None:
        return _flash_apart_backward(grad, q, k, v, out, lse, _ends(start, documents))
    aten, kv_heads, allowed = torch.ops.aten, k.shape[2], _allowed(valid, start)
    if used == "math":
        dq, dk, dv = _math_backward(grad, q, k, v, out, allowed, causal)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    if used == "efficient":
        k, v = _more_heads(k, q.shape[2]), _more_heads(v, q.shape[2])
    bias = _bias(allowed, q)
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the random state of a dropout that is off
    if used == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
    elif used == "flash":
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused[0], unused[1]
        )
    elif used == "efficient":
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, unused[0], unused[1], 0.0, [True, True, True, False], causal
        )[:3]
    else:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], unused[0], unused[1], None, None, None, q.shape[2],
            k.shape[2], 0.0, causal
        )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    if dk.shape[2] != kv_heads:
        dk, dv = _fewer_heads(dk, kv_heads), _fewer_heads(dv, kv_heads)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# One opaque node in every graph, with the same saved set whatever kernel runs: a plan made on a laptop and a
# run on a cluster lower alike.
_attention: Any = library.custom_op("dtrain::attention", _attention_forward, mutates_args=(), schema=_SCHEMA)
_backward: Any = library.custom_op(
    "dtrain::attention_backward", _attention_backward, mutates_args=(), schema=_SCHEMA_BACKWARD
)
# What is in the opaque nodes, for a compiler that knows its device.
OPAQUE: dict[Any, Callable[..., Any]] = {
    torch.ops.dtrain.attention.default: _attention_forward,
    torch.ops.dtrain.attention_backward.default: _attention_backward,
}


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, unlike empty_like of a transposed tensor


@_attention.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, valid, ctx.causal, ctx.kernel, start, ctx.documents = inputs
    ctx.save_for_backward(q, k, v, *output, valid, start)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _lse: None) -> tuple[Tensor | None, ...]:
    *saved, start = ctx.saved_tensors
    dq, dk, dv = _backward(grad, *saved, ctx.causal, ctx.kernel, start, ctx.documents)
    return dq, dk, dv, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


# --- loss ---


def in_chunks(loss: Callable[..., Tensor], chunks: int, *xs: Tensor) -> Tensor:
    """The sum of `loss(*pieces)` over `chunks` equal pieces along `seq`, position 1 of every x: what `loss` makes on
    its way (scores of a whole vocabulary) exists for one piece at a time, if its backward follows at once.

    Raises OpError where the sequence does not divide.
    """
    if xs[0].shape[1] % chunks:
        raise OpError(f"a sequence of {xs[0].shape[1]} tokens cannot be cut into {chunks} equal chunks")
    if chunks == 1:
        return loss(*xs)
    parts = zip(*(torch.split(x, x.shape[1] // chunks, 1) for x in xs), strict=True)
    # Backward begins with the last piece. So does the sum, lest a compiler compute all pieces for it first.
    return functools.reduce(torch.add, [loss(*part) for part in parts][::-1])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, here: Here, vocab: int) -> Tensor:
        ids = positions(here, logits, "vocab", 2)
        wide = _wide(logits).masked_fill(ids >= vocab, -math.inf)
        top = here.max(wide.amax(-1), "vocab")
        shifted = wide - top[..., None]
        e = shifted.exp()
        here_label = ids == labels[..., None]  # never true for an ignored (negative) label
        target = shifted.masked_fill(~here_label, 0.0).sum(-1)
        total, target = here.sum(torch.stack((e.sum(-1), target)), "vocab").unbind(0)
        valid = labels >= 0
        ctx.save_for_backward((e / total[..., None]).to(logits.dtype), labels)
        ctx.here, ctx.vocab = here, vocab
        return (total.log() - target).masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, labels = ctx.saved_tensors
        ids = positions(ctx.here, probabilities, "vocab", 2)
        scale = grads[0].masked_fill(labels < 0, 0.0)[..., None]
        slope = _wide(probabilities) - (ids == labels[..., None]).to(scale.dtype)
        return (slope * scale).to(probabilities.dtype), None, None, None


def cross_entropy(here: Here, logits_BSV: Tensor, labels_BS: Tensor, vocab: int) -> Tensor:
    """Negative log-likelihood in nats of each label, (batch, seq), fp32 or float64; 0 where a label is
    negative.

    The `vocab` axis may be split: two reductions of b*s values forward (a maximum, then the sum of
    exponentials packed with the label's logit) and none backward (Shoeybi et al. 2019, section 3). Classes
    from `vocab` on are padding and take no part. Saves the probabilities in the dtype of the logits.
    """
    loss: Tensor = _CrossEntropy.apply(logits_BSV, labels_BS, here, vocab)  # type: ignore[no-untyped-call]
    return loss
