"""Notes on shapes that a GPU's matrix units do not fill, each with what the padding is predicted to cost.

The model: a product's result is cut into tiles of 128 x 128, its inner dimension into slices of 64, and each wave of
tiles keeps all multiprocessors busy for as long as one tile takes. Cost is padded over real work (tile and wave
quantisation: NVIDIA, "Matrix Multiplication Background User's Guide"; Anthony et al. 2024, arXiv 2401.14489). A
library that picks a smaller tile pays less, so it is a bound and never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dtrain.layout.derived import family, lengths, pad
from dtrain.layout.schema import Layout

TILE, SLICE, WIDE = 128, 64, 512


def padding(n: int, multiple: int) -> float:
    """How much larger n is when it is filled up to a multiple, as a fraction of n."""
    return -(-n // multiple) * multiple / n - 1


def product_cost(rows: int, columns: int, processors: int) -> float:
    """Padded over real work of a product with a `rows` x `columns` result, less 1: its tiles and its last wave."""
    tiles = -(-rows // TILE) * -(-columns // TILE)
    waves = -(-tiles // processors)
    return waves * processors * TILE**2 / (rows * columns) - 1


def shape_notes(layout: Layout) -> list[str]:
    """One line a shape; nothing for CPUs or where all fit."""
    return [] if layout.cluster.device.kind == "cpu" else list(_notes(layout))


def _notes(layout: Layout) -> Iterator[str]:
    module, cfg = family(layout)
    real = lengths(module.params(cfg)) | pad(layout)

    def ways(axis: str) -> int:
        return math.prod(layout.sizes[d] for d in layout.shard.compute.get(axis, ()))

    def written(axis: str) -> str:
        n = ways(axis)
        dims = ".".join(d for d in layout.shard.compute.get(axis, ()) if layout.sizes[d] > 1)
        return f"{axis} {real[axis]}" + (f" / {dims} {n}" if n > 1 else "")

    vocab = real.get("vocab", TILE) // ways("vocab")
    if vocab % TILE:
        fits = -(-real["vocab"] // (TILE * ways("vocab"))) * TILE * ways("vocab")
        yield f"{written('vocab')} = {vocab} {_extra(vocab, TILE)} in the logits' product; model.vocab_pad: {fits} fits"
    head_dim, heads = real.get("head_dim", SLICE), real.get("heads", 0) // ways("heads")
    found = [(written(axis), real[axis] // ways(axis)) for axis in ("embed", "mlp") if axis in real]
    if heads:
        found.append((f"{written('heads')} x head_dim {head_dim}", heads * head_dim))
    for name, n in found:
        if n % SLICE:
            yield f"{name} = {n} {_extra(n, SLICE)} in its products"
    if head_dim % SLICE:
        yield f"head_dim {head_dim} {_extra(head_dim, SLICE)} in attention's products"
    if heads and ways("heads") > 1 and heads * head_dim < WIDE:
        tokens, processors = layout.data.microbatch * layout.data.seq, layout.cluster.device.processors
        cost = product_cost(tokens, heads * head_dim, processors)
        yield (
            f"{written('heads')} x head_dim {head_dim} = {heads * head_dim} is narrow (below {WIDE}): with {tokens} "
            f"tokens the query product takes up to {cost:.1%} longer on {processors} multiprocessors; fewer, wider "
            "heads or a smaller tp fill them (Shoeybi et al. 2019, table 7)"
        )


def _extra(n: int, multiple: int) -> str:
    unaligned = "" if n % 8 == 0 else " (and rows that do not start at 16 bytes, which kernels read at once)"
    return f"is no multiple of {multiple}: {padding(n, multiple):.1%} padding{unaligned}"
