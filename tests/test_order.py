"""Which samples a step sees depends on the seed and the step alone; every epoch has each sample once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain import data, layout, plan
from dtrain.data import Ahead, DataConfig, DataError, From, batch, open_source, order, passes
from dtrain.train import data_config


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three corpora, of which every sequence of 4 bytes is another."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, first, n in (("a", 0, 37), ("b", 1000, 11), ("c", 2000, 90)):
        text = "".join(f"{first + i:04d}" for i in range(n)) + "."
        (folder / f"{name}.txt").write_text(text)
    return folder


def source_of(folder: Path, weights: dict[str, float | None], **changes: Any) -> data.Source:
    mix = tuple(From("text", (str(folder / f"{name}.txt"),), weight=w) for name, w in weights.items())
    given = {"seq": 4, "batch": 8, "vocab": 256, "validation": 0.0, "mix": mix} | changes
    return open_source(DataConfig("text", **given))


def texts(source: data.Source, samples: range, split: Any = "train") -> list[str]:
    b = source.cfg.batch
    return [bytes(batch(source, s // b, [s % b], split)["tokens"][0].tolist()).decode() for s in samples]


def test_a_mixture_has_its_proportions_in_every_block_and_each_source_its_own_epochs(corpora: Path) -> None:
    source = source_of(corpora, {"a": 2.0, "b": 1.0, "c": 1.0})
    assert source.quotas == (order.MIX // 2, order.MIX // 4, order.MIX // 4)
    found: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for sample in range(2 * order.MIX):
        k, index, epoch = order.locate(source, sample, "train")
        found[k].append((epoch, index))
    for k, n in enumerate((37, 11, 90)):
        seen = found[k]
        assert len(seen) == 2 * source.quotas[k]
        epochs = [[i for e, i in seen if e == epoch] for epoch in range(len(seen) // n)]
        assert all(sorted(e) == list(range(n)) for e in epochs)
        assert epochs[0] != epochs[1]
    assert passes(source, 2 * order.MIX) == pytest.approx([order.MIX / 37, order.MIX / 2 / 11, order.MIX / 2 / 90])
    first = [order.locate(source, s, "train")[0] for s in range(64)]
    assert len(set(first)) == 3 and first != sorted(first)  # shuffled, not in turn


def test_a_mixture_is_the_same_again_and_another_with_another_seed(corpora: Path) -> None:
    weights = {"a": 2.0, "b": 1.0}
    drawn = texts(source_of(corpora, weights), range(60))
    assert texts(source_of(corpora, weights), range(60)) == drawn
    assert texts(source_of(corpora, weights, seed=1), range(60)) != drawn
    assert {t[0] for t in drawn} == {"0", "1"}


def test_without_weights_sources_count_by_their_size(corpora: Path) -> None:
    source = source_of(corpora, dict.fromkeys("abc"))
    assert [round(138 * q / order.MIX) for q in source.quotas] == [37, 11, 90] and sum(source.quotas) == order.MIX
    held = source_of(corpora, dict.fromkeys("abc"), validation=0.2)
    train, valid = set(texts(held, range(2000))), texts(held, range(held.valid), "valid")
    assert len(valid) == len(set(valid)) == held.valid == sum(p.valid for p in held.parts) and min(
        p.valid for p in held.parts
    )
    assert not train & set(valid) and len(train) == held.train


@pytest.mark.parametrize(
    ("weights", "changes", "words"),
    [
        ({"a": 1.0, "b": None}, {}, "give every source a weight, or none"),
        ({"a": 1.0, "b": 1e-9}, {}, "less than one in 4,096 samples"),
        ({"a": 1.0, "b": 1.0}, {"seq": 60}, "has no sequence of data.seq 60"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(corpora: Path, weights: Any, changes: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as e:
        source_of(corpora, weights, **changes)
    assert "\n" not in str(e.value)


def test_a_source_is_not_read_more_often_than_allowed(corpora: Path) -> None:
    source = source_of(corpora, {"a": 1.0, "b": 1.0})
    mix = tuple(replace(f, epochs=2.0) for f in source.cfg.mix)
    assert open_source(replace(source.cfg, mix=mix, steps=4)).train == 48
    with pytest.raises(DataError, match=r"b\.txt\) would be read 2\.91 times in 8 steps, but its epochs is 2"):
        open_source(replace(source.cfg, mix=mix, steps=8))


# ------------------------------------------------------------------------------------------------ layouts


def layouts() -> Iterator[str]:
    """Every way to cut a batch of 8 that these dims, pipelines and microbatches give."""
    for dp, fsdp, tp, pp in (
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (1, 4, 1, 1),
        (2, 2, 2, 1),
        (8, 1, 1, 1),
        (2, 1, 2, 2),
        (1, 1, 1, 2),
    ):
        for microbatch in (1, 2, 4, 8):
            if 8 % (dp * fsdp * microbatch) == 0:
                rules = ["layers: pp"] * (pp > 1) + ["heads: tp", "kv_heads: tp", "mlp: tp"] * (tp > 1)
                both = ", ".join(rules)
                cut = ", ".join(d for d, n in (("dp", dp), ("fsdp", fsdp)) if n > 1)
                compute = ", ".join(rules + ([f"batch: [{cut}]"] if cut else []))
                dims = (("pp", pp), ("dp", dp), ("fsdp", fsdp), ("tp", tp))
                yield f"""
cluster: {{gpus_per_node: {dp * fsdp * tp * pp}}}
mesh: {{{", ".join(f"{d}: {{size: {n}}}" for d, n in dims if n > 1)}}}
shard: {{params: {{{both}}}, compute: {{{compute}}}}}
model: {{family: llama, layers: 2, embed: 16, heads: 2, mlp: 16, vocab: 256}}
run: {{steps: 40}}
data: {{seq: 4, batch: 8, microbatch: {microbatch}, validation: {{fraction: 0}}, """


KINDS = {
    "one source": "source: text, path: PATH/c.txt}",
    "mixture": "mix: [{source: text, path: PATH/a.txt, weight: 3}, {source: text, path: PATH/c.txt, weight: 1}]}",
    "packed": "source: jsonl, path: PATH/d.jsonl, packing: best-fit, document_mask: true}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sees_the_same_samples_under_every_layout(corpora: Path, kind: str) -> None:
    """The rows of the ranks together are the global batch, each once; ranks that differ in tp and pp read the same."""
    lines = [json.dumps({"text": "abcdefgh"[: 1 + i % 7] * (1 + i % 2)}) for i in range(60)]
    (corpora / "d.jsonl").write_text("\n".join(lines))
    expected: dict[int, Any] = {}
    tried = 0
    for text in layouts():
        made = plan.plan(layout.loads(text + KINDS[kind].replace("PATH", str(corpora))))
        source = open_source(data_config(made))
        for step in (0, 7, 31):
            seen: Counter[int] = Counter()
            found = {}
            for rank in range(made.job.mesh.world):
                at = made.job.mesh.coordinates(rank)
                for mb in range(made.microbatches):
                    out = batch(source, step, plan.rows(made, at, mb))
                    for i, sample in enumerate(out["sample"].tolist()):
                        row = tuple(tuple(out[k][i].tolist()) for k in ("tokens", "labels", "start"))
                        assert found.setdefault(sample, row) == row
                        seen[sample] += 1
            copies = made.job.mesh.world // made.replicas
            assert seen == Counter(dict.fromkeys(range(8 * step, 8 * step + 8), copies))
            assert expected.setdefault(step, found) == found
        tried += 1
    assert tried == 19


@pytest.mark.parametrize("ahead", [False, True], ids=["read at once", "read ahead"])
def test_ranks_read_the_planned_batch(corpora: Path, ahead: bool) -> None:
    """dp 2 x tp 2 x pp 2, ten steps: the ids of a replica's four ranks are equal, those of the two replicas apart, and
    together they are the batch that one process would read."""
    text = next(t for t in layouts() if "pp: {size: 2}" in t and "dp: {size: 2}" in t)
    made = plan.plan(layout.loads(text + KINDS["one source"].replace("PATH", str(corpora))))
    source = open_source(data_config(made))
    seen: dict[int, list[list[int]]] = {}
    for rank in range(8):
        at = made.job.mesh.coordinates(rank)
        reader = data.Reader(source, plan.rows(made, at))
        coming = Ahead(reader.read, 9)
        ids = [(coming.get(i) if ahead else reader.read(i))["sample"].tolist() for i in range(10)]
        coming.close()
        assert seen.setdefault(at["dp"], ids) == ids
    assert sorted(seen) == [0, 1]
    for step, (one, other) in enumerate(zip(seen[0], seen[1], strict=True)):
        assert not {*one} & {*other} and sorted(one + other) == list(range(8 * step, 8 * step + 8))


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(["concat", "best-fit", "none"]), st.booleans(), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_of_an_epoch_is_seen_once(
    tmp_path_factory: pytest.TempPathFactory, packing: Any, mask: bool, size: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("epoch")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{i:03d}" * (1 + i % 5)}) for i in range(40)))
    cfg = DataConfig("jsonl", 8, size, 256, seed, (str(folder / "a.jsonl"),), packing=packing, document_mask=mask)
    source = open_source(replace(cfg, validation=0.25))
    epochs = []
    for epoch in range(2):
        found = [order.locate(source, s, "train") for s in range(epoch * source.train, (epoch + 1) * source.train)]
        assert {e for _, _, e in found} == {epoch}
        epochs.append([order.place(source.parts[0], i, "train") for _, i, _ in found])
    valid = [order.place(source.parts[0], order.locate(source, s, "valid")[1], "valid") for s in range(source.valid)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len(set(epochs[0])) == source.train
    assert sorted([*epochs[0], *valid]) == list(range(source.train + source.valid))


# ------------------------------------------------------------------------------------------------ reading ahead


def test_the_next_batch_is_read_on_a_thread_of_its_own() -> None:
    calls: list[tuple[int, bool]] = []

    def reading(i: int) -> int:
        calls.append((i, threading.current_thread() is threading.main_thread()))
        return i * i

    ahead = Ahead(reading, 4)
    assert [ahead.get(i) for i in (2, 3, 4)] == [4, 9, 16]
    ahead.close()
    assert calls == [(2, True), (3, False), (4, False)]  # nothing past the last


def test_another_step_than_the_one_read_ahead_and_errors() -> None:
    def reading(i: int) -> int:
        if i == 5:
            raise DataError("five")
        return i

    ahead = Ahead(reading, 9)
    assert ahead.get(0) == 0 and ahead.get(7) == 7 and ahead.get(4) == 4
    with pytest.raises(DataError, match="five"):
        ahead.get(5)
    assert ahead.waited > 0
    ahead.close()


def test_batches_read_ahead_are_the_batches(corpora: Path) -> None:
    source = source_of(corpora, {"a": 1.0, "c": 1.0})
    ahead = Ahead(lambda i: batch(source, i, range(8)), 20)
    for step in range(20):
        assert torch.equal(ahead.get(step)["tokens"], batch(source, step, range(8))["tokens"])
    ahead.close()
