"""Bytes that a layer saves for backward, and FLOPs that backward computes again: dtrain's `remat: selective` beside
Megatron-LM's selective recompute.

`python bench/saved.py [--json]`. One microbatch of one sequence, bf16 or fp16, per rank. dtrain's figures are read off
the lowered block: what forward hands to backward, with the block's input, and the products in backward beyond the
gradients of forward's. Nothing is timed and no device is needed.

Megatron's are the formulas of Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5: a GPT layer without its
attention core saves s b h (10 + 24/t) bytes with tensor parallelism over t, s b h 34/t with sequence parallelism too,
and backward computes the core again, 4 b s^2 h FLOPs over t. Term by term, E embed, H x K heads x head_dim, G KV heads,
M mlp, 2 bytes an element, a mask 1:

| saved | paper (H K = G K = E, M = 4 E) | here | divided by |
|---|---|---|---|
| inputs of the two norms | 4 E | 4 E, for RMSNorm too (statistics are left out) | t with sequence parallelism |
| input of q, k, v | 2 E | 2 E | t with sequence parallelism |
| q | 2 E | 2 H K | t |
| k and v | 4 E | 4 G K: grouped-query attention keeps fewer (at least one head a rank) | t |
| attention output, the projection's input | 2 E | 2 H K | t |
| input of the MLP | 2 E | 2 E | t with sequence parallelism |
| activation's input | 8 E | 2 M; 4 M for SwiGLU, which has two | t |
| activation's output | 8 E | 2 M | t |
| masks of the two residual dropouts | 2 E | 2 E, nothing for a model without dropout | t with sequence parallelism |

The core itself, 5 b s^2 H bytes over t, is what selective recompute does not save.

dtrain keeps less, since backward computes more again than attention's core. Not kept: the inputs of q, k, v and of
the MLP (the norms' outputs), the activation's output, the masks of dropouts; and the attention output where plain
operations compute attention, for its dropout. Kept beside the paper's terms: a kernel's log-sum-exp, 4 bytes a head and
token. The column `explained` is the paper's formula with these terms taken out and put in, and `off` dtrain's bytes
over it. Under full recomputation both keep a layer's input, 2 s b h, over t with sequence parallelism: `full` is
dtrain's over that.

FLOPs are those of products: beside
them the paper's policy computes the softmax and its dropout again, dtrain's the norms, activations, rotations and
masks, which is work of memory and not of multiplications. A flash-attention kernel computes q k^T once more inside its
backward, 2 b s^2 H K / t FLOPs; that is so in dtrain and in a Megatron that uses one, and is in neither column.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from dtrain import layout, plan
from dtrain.program import passes
from dtrain.program.lower import Graph, lower

# name -> the `model:` section and the sequence length: GPT-2 and BERT have no more positions
MODELS = {
    "Llama-3 8B": ("preset: llama3-8b", 4096),
    "Llama-3 70B": ("preset: llama3-70b", 4096),
    "GPT-2 8.3B": ("preset: gpt2-8.3b", 1024),
    "BERT 3.9B": ("preset: bert-3.9b", 512),
}
TP = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    """One layer on one rank: bytes saved and FLOPs of products computed again, by dtrain and by Megatron."""

    model: str
    tp: int
    res_seq: bool
    saved: int
    megatron_saved: float
    explained: float
    again: int
    megatron_again: float
    full: int
    megatron_full: float

    @property
    def ratio(self) -> float:
        return self.saved / self.megatron_saved

    @property
    def off(self) -> float:
        """Bytes saved over what the paper's terms explain of them."""
        return self.saved / self.explained

    @property
    def full_ratio(self) -> float:
        return self.full / self.megatron_full

    @property
    def again_ratio(self) -> float:
        return self.again / self.megatron_again


def make(model: str, seq: int, tp: int, res_seq: bool, remat: str) -> plan.Plan:
    """A plan of one layer of `model`, the text of a `model:` section."""
    axes = "heads: tp, kv_heads: tp, mlp: tp, vocab: tp" if "llama" in model else "heads: tp, mlp: tp, vocab: tp"
    cut, more = (axes, ", res_seq: tp" if res_seq else "") if tp > 1 else ("", "")
    return plan.plan(
        layout.loads(f"""
cluster: {{gpus_per_node: {tp}, gpu: h100-sxm}}
mesh: {{tp: {{size: {tp}}}}}
shard: {{params: {{{cut}}}, compute: {{{cut}{more}}}}}
model: {{{model}, layers: 1}}
data: {{source: synthetic, seq: {seq}, batch: 1}}
run: {{steps: 1, precision: bf16, remat: {remat}}}
""")
    )


def measure(name: str, model: str, seq: int, tp: int, res_seq: bool) -> Row:
    """One row, from one lowered layer."""
    made = make(model, seq, tp, res_seq, "selective")
    block = lower(made.job).segments["block"]
    full = lower(make(model, seq, tp, res_seq, "full").job).segments["block"]
    assert block.act is not None
    x = math.prod(block.act[0]) * block.act[1].itemsize
    more = again(block.graphs["forward"], block.graphs["backward"])
    cfg = made.job.config
    core = 4 * seq**2 * cfg.heads * cfg.head_dim / tp
    paper = megatron(cfg, seq, tp, res_seq)
    return Row(
        name,
        tp,
        res_seq,
        block.saved_bytes + x,
        paper,
        paper + difference(cfg, seq, tp, res_seq),
        more,
        core,
        full.saved_bytes + x,
        2 * seq * cfg.embed / (tp if res_seq else 1),
    )


def megatron(cfg: Any, seq: int, tp: int, sequence_parallel: bool) -> float:
    """Bytes that Megatron's selective recompute saves for a layer of this model, one sequence, per rank (see the
    table above)."""
    whole = tp if sequence_parallel else 1  # what tensor parallelism alone leaves whole on every rank
    attended = cfg.heads * cfg.head_dim
    kv = max(getattr(cfg, "kv_heads", cfg.heads) / tp, 1) * cfg.head_dim
    inputs = 2 if hasattr(cfg, "kv_heads") else 1  # of the activation: SwiGLU or GELU
    masks = 2 * cfg.embed if getattr(cfg, "dropout", 0) else 0
    each = (
        4 * cfg.embed / whole  # inputs of the norms
        + 2 * cfg.embed / whole  # input of q, k, v
        + 2 * attended / tp  # q
        + 4 * kv  # k, v
        + 2 * attended / tp  # attention output
        + 2 * cfg.embed / whole  # input of the MLP
        + 2 * inputs * cfg.mlp / tp  # activation's input
        + 2 * cfg.mlp / tp  # activation's output
        + masks / whole
    )
    return float(seq * each)


def difference(cfg: Any, seq: int, tp: int, sequence_parallel: bool) -> float:
    """Bytes that dtrain keeps beside `megatron`'s, negative where it keeps less (see above)."""
    whole = tp if sequence_parallel else 1
    masks = 2 * cfg.embed if getattr(cfg, "dropout", 0) else 0
    plain = getattr(cfg, "attention_dropout", 0) > 0  # attention by plain operations
    each = (
        -4 * cfg.embed / whole  # inputs of q, k, v and of the MLP
        - masks / whole
        - 2 * cfg.mlp / tp  # activation's output
        + (-2 * cfg.heads * cfg.head_dim if plain else 4 * cfg.heads) / tp  # attention output, or log-sum-exp
    )
    return float(seq * each)


def again(forward: Graph, backward: Graph) -> int:
    """FLOPs of products that backward computes again: all that it has beyond two for each of forward's, the gradients
    of its two factors."""
    return flops(backward) - 2 * flops(forward)


def flops(graph: Graph) -> int:
    """FLOPs of the products in a graph, of attention kernels those without their own recompute."""
    return sum(_product(node) for node in graph.module.graph.nodes if node.op == "call_function")


def _product(node: fx.Node) -> int:
    name = passes.op_name(node)
    if name in ("mm", "bmm", "addmm"):
        left: Any = node.args[1 if name == "addmm" else 0]
        return int(2 * node.meta["val"].numel() * left.meta["val"].shape[-1])
    if name in ("attention", "attention_backward"):  # q k^T and p v; the gradients of their four factors
        first = 0 if name == "attention" else 1
        q, k = (a.meta["val"] for a in node.args[first : first + 2])  # type: ignore[union-attr]
        return int((4 if name == "attention" else 8) * q.numel() * k.shape[1])
    return 0


def rows() -> Iterator[Row]:
    for name, (model, seq) in MODELS.items():
        for tp in TP:
            for res_seq in (False, True) if tp > 1 else (False,):
                yield measure(name, model, seq, tp, res_seq)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bytes saved for backward and FLOPs computed again, by layer.")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    found = list(rows())
    if asked.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        ratios = ("ratio", "off", "again_ratio", "full_ratio")
        listed = [asdict(r) | {name: getattr(r, name) for name in ratios} for r in found]
        print(json.dumps({"versions": versions, "rows": listed}, indent=1))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}; a layer, one sequence, per rank")
    print(f"{'':13}{'':14}{'saved for backward, MiB':>50}   {'computed again, GFLOP':>30}{'full':>8}")
    print(f"{'model':13}{'tp':>3} {'res_seq':10}{'dtrain':>12}{'Megatron':>11}{'ratio':>8}", end="")
    print(f"{'explained':>11}{'off':>8}", end="")
    print(f"   {'dtrain':>11}{'Megatron':>11}{'ratio':>8}{'ratio':>8}")
    for r in found:
        print(
            f"{r.model:13}{r.tp:>3} {'yes' if r.res_seq else 'no':10}{r.saved / 2**20:12.1f}"
            f"{r.megatron_saved / 2**20:11.1f}{r.ratio:8.2f}{r.explained / 2**20:11.1f}{r.off:8.3f}"
            f"   {r.again / 1e9:11.1f}{r.megatron_again / 1e9:11.1f}{r.again_ratio:8.2f}{r.full_ratio:8.3f}"
        )


if __name__ == "__main__":
    main()
