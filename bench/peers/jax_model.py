"""Peer: the same training step in JAX, on one host device or tensor parallel over two by NamedSharding.

Settings: one jitted function for the whole step (loss, gradient, clipping, AdamW) whose state is donated; matrices
sharded as in `layouts/` (heads, kv_heads, mlp and vocab over tp), XLA places the collectives; one-hot products for
the table and the labels where the vocabulary is split. XLA's CPU client takes all cores for each side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import task as tasks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from task import Shape, Task

Tree = Mapping[str, Any]

# How each matrix is cut over tp, by its name; norms are whole.
SPEC = {
    "table": P("tp", None),
    "wq": P(None, "tp", None),
    "wk": P(None, "tp", None),
    "wv": P(None, "tp", None),
    "wo": P("tp", None, None),
    "w_gate": P(None, "tp"),
    "w_up": P(None, "tp"),
    "w_down": P("tp", None),
}


def rms_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + tasks.NORM_EPS) * w


def rope_tables(shape: Shape) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    half = shape.head_dim // 2
    frequencies = tasks.THETA ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(shape.seq, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles, dtype=np.float64).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate((a * c - b * s, b * c + a * s), axis=-1)


def loss_of(w: Tree, tokens: jax.Array, labels: jax.Array, shape: Shape, split: bool) -> jax.Array:
    """The mean negative log-likelihood of the labels."""
    cos, sin = rope_tables(shape)
    table = w["embed/table"]
    x = jax.nn.one_hot(tokens, shape.vocab) @ table if split else table[tokens]
    for i in range(shape.layers):
        p = {k.split("/")[1]: v for k, v in w.items() if k.startswith(f"block.{i}/")}
        h = rms_norm(x, p["norm_attn"])
        q, k, v = (jnp.einsum("bse,ehk->bshk", h, p[n]) for n in ("wq", "wk", "wv"))
        a = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + jnp.einsum("bshk,hke->bse", a, p["wo"])
        h = rms_norm(x, p["norm_mlp"])
        x = x + (jax.nn.silu(h @ p["w_gate"]) * (h @ p["w_up"])) @ p["w_down"]
    logp = jax.nn.log_softmax(rms_norm(x, w["head/norm"]) @ w["head/table"].T)
    if split:
        return -(logp * jax.nn.one_hot(labels, shape.vocab)).sum(-1).mean()
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


def adamw(w: Tree, grads: Tree, m: Tree, v: Tree, number: jax.Array) -> tuple[Tree, Tree, Tree]:
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))
    shrink = 1.0 / jnp.maximum(norm / tasks.CLIP, 1.0)
    b1, b2 = tasks.BETA1, tasks.BETA2
    grads = {k: g * shrink for k, g in grads.items()}
    m = {k: b1 * m[k] + (1 - b1) * g for k, g in grads.items()}
    v = {k: b2 * v[k] + (1 - b2) * jnp.square(g) for k, g in grads.items()}
    new = {}
    for k, x in w.items():
        change = m[k] / (1 - b1**number) / (jnp.sqrt(v[k] / (1 - b2**number)) + tasks.EPS)
        decay = tasks.WEIGHT_DECAY if tasks.decays(k) else 0.0
        new[k] = x - tasks.LR * (change + decay * x)
    return new, m, v


def start(task: Task, rank: int, ranks: int, compiled: bool) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss. `ranks` are devices of this
    one process."""
    devices = jax.devices()[:ranks]
    if len(devices) < ranks:
        raise RuntimeError("set XLA_FLAGS=--xla_force_host_platform_device_count before JAX starts")
    mesh = Mesh(np.array(devices), ("tp",))

    def where(path: str) -> NamedSharding:
        return NamedSharding(mesh, SPEC.get(path.split("/")[1], P()))

    w = {k: jax.device_put(x, where(k)) for k, x in task.weights.items()}
    m, v = ({k: jax.device_put(np.zeros_like(x), where(k)) for k, x in task.weights.items()} for _ in range(2))
    whole = NamedSharding(mesh, P())
    placed = {k: where(k) for k in w}

    @partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=(placed, placed, placed, whole))
    def update(w: Tree, m: Tree, v: Tree, tokens: jax.Array, labels: jax.Array, number: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(w, tokens, labels, task.shape, ranks > 1)
        return *adamw(w, grads, m, v, number), loss

    state = [w, m, v]

    def step(number: int) -> float:
        tokens, labels = (jax.device_put(x.astype(np.int32), whole) for x in task.batch(number))
        *state[:], loss = update(*state, tokens, labels, jnp.float32(number))
        jax.block_until_ready(state)
        return float(loss)

    return step
