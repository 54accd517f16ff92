"""Notes on shapes: what fits says nothing, what does not says what it costs, and nothing is an error."""

from __future__ import annotations

import pytest
import tiny

from dtrain import layout
from dtrain.layout.shapes import padding, product_cost, shape_notes
from dtrain.show import show

BASE = """
cluster: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm}
mesh: {tp: {size: 8}}
shard:
  params:  {vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute: {vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
model: {family: llama, layers: 1, embed: 4096, heads: 32, kv_heads: 8, mlp: 14336, vocab: 128256}
data: {source: synthetic, seq: 4096, batch: 1}
run: {steps: 1, precision: bf16}
"""


def notes(*more: str) -> list[str]:
    return shape_notes(layout.loads(BASE, overrides=more))


def test_what_fits_says_nothing() -> None:
    assert notes() == []  # 4 heads of 128 are 512 wide
    assert "notes" not in show(layout.loads(BASE))


def test_a_vocabulary_that_does_not_fill_tiles() -> None:
    """50,257 padded to 50,264 = 8 x 6283: tiles of 128 need 6,400 columns, 1.9 % more; auto would be 51,200."""
    (note,) = notes("model.vocab=50257", "model.vocab_pad=50264")
    assert note.startswith("vocab 50264 / tp 8 = 6283 is no multiple of 128: 1.9% padding (and rows that")
    assert note.endswith("in the logits' product; model.vocab_pad: 51200 fits")
    assert notes("model.vocab=50257") == []


@pytest.mark.parametrize(
    ("more", "start"),
    [
        (("model.mlp=13696",), "mlp 13696 / tp 8 = 1712 is no multiple of 64: 0.9% padding in its products"),
        (("model.embed=4128", "model.head_dim=128"), "embed 4128 = 4128 is no multiple of 64: 0.8%"),
    ],
)
def test_dimensions_of_products(more: tuple[str, ...], start: str) -> None:
    (note,) = notes(*more)
    assert note.startswith(start) and "16 bytes" not in note


def test_heads() -> None:
    """4 heads of 96 are 384 wide: 3 x 32 tiles for 4,096 tokens, where one wave has 132: 132/96 is 37.5 % more. And 96
    is filled up to 128 in attention: a third more."""
    small, narrow = notes("model.head_dim=96")
    assert small.startswith("head_dim 96 is no multiple of 64: 33.3% padding in attention's products")
    assert narrow.startswith("heads 32 / tp 8 x head_dim 96 = 384 is narrow (below 512): with 4096 tokens")
    assert "the query product takes up to 37.5% longer on 132 multiprocessors" in narrow
    odd = notes("model.heads=8", "model.head_dim=100")
    assert odd[0].startswith("heads 8 / tp 8 x head_dim 100 = 100 is no multiple of 64: 28.0%")
    assert len(odd) == 3


def test_the_models() -> None:
    assert padding(128, 128) == 0 and padding(96, 64) == pytest.approx(1 / 3)
    assert product_cost(128 * 132, 128, 132) == 0
    assert product_cost(128 * 133, 128, 132) == pytest.approx(264 / 133 - 1)
    assert product_cost(100, 100, 1) == pytest.approx(128**2 / 100**2 - 1)


def test_processes_on_cpus_have_no_tiles() -> None:
    text = BASE.replace("gpu: h100-sxm", "gpu: cpu").replace("precision: bf16", "precision: fp32")
    assert shape_notes(layout.loads(text, overrides=("model.head_dim=100",))) == []


def test_show_prints_them() -> None:
    """The 2019 GPT-2 has 4 heads of 96 a GPU, which its paper measured as the slowest of three choices."""
    page = show(layout.load(tiny.LAYOUTS / "gpt2-8.3b-32x16-v100.yaml"))
    found = page.split("\n\nnotes\n")[1].splitlines()
    assert [line.split()[0] for line in found] == ["head_dim", "heads"]
    assert all(line.startswith("  ") for line in found)
