"""Texts that are read as a run goes on: each document once an epoch, and the same samples from any cursor on."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain import layout, plan
from dtrain.data import DataConfig, DataError, From, Reader, batch, open_source, pack, streaming, texts
from dtrain.data.batches import sequence
from dtrain.layout import LayoutError
from dtrain.train import data_config

DOCUMENTS = [f"{i:02d}" * (1 + 3 * i % 7) for i in range(40)]


def write(folder: Path, documents: list[str] = DOCUMENTS, files: int = 3, name: str = "f") -> str:
    """Documents over files of JSON lines, the last of them compressed."""
    for n in range(files):
        content = "".join(json.dumps({"text": t}) + "\n" for t in documents[n::files]).encode()
        last = n == files - 1
        (folder / f"{name}{n}.jsonl{'.gz' if last else ''}").write_bytes(gzip.compress(content) if last else content)
    return str(folder / f"{name}*.jsonl*")


def config(path: str, **changes: Any) -> DataConfig:
    given = {"seq": 8, "batch": 3, "vocab": 256, "validation": 0.0, "stream": True, "shuffle": 5} | changes
    return DataConfig("jsonl", paths=(path,), **given)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("stream"))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_a_run_goes_on_from_its_cursor_whatever_the_rows(corpus: str, monkeypatch: Any, drawn: st.DataObject) -> None:
    monkeypatch.setattr(streaming, "CHUNK", drawn.draw(st.integers(1, 9), label="chunk"))
    packing = drawn.draw(st.sampled_from(["concat", "best-fit", "none"]), label="packing")
    cfg = config(
        corpus,
        packing=packing,
        document_mask=drawn.draw(st.booleans(), label="mask"),
        seq=drawn.draw(st.integers(2, 11), label="seq"),
        batch=4,
        seed=drawn.draw(st.integers(0, 3), label="seed"),
        shuffle=drawn.draw(st.integers(0, 9), label="shuffle"),
    )
    source = open_source(cfg)
    whole = Reader(source, range(4))
    steps = [whole.read(i) for i in range(30)]
    stop = drawn.draw(st.integers(1, 25), label="stop")
    first = Reader(source, [0])
    for i in range(stop + 1):
        first.read(i)  # one step is read ahead of the one that is saved
    saved = json.loads(json.dumps(first.cursors(stop - 1)))
    assert len(json.dumps(saved)) < 200
    ranks = [Reader(open_source(cfg), rows, stop, saved) for rows in ([0, 1], [2], [3])]
    for i in range(stop, 30):
        parts = [r.read(i) for r in ranks]
        assert same({k: torch.cat([p[k] for p in parts]) for k in parts[0]}, steps[i])


@pytest.mark.parametrize("shuffle", [5, 200])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "none"])
def test_every_epoch_has_each_document_once(corpus: str, packing: Any, shuffle: int) -> None:
    """Of each pair of neighbouring bytes as many are learnt as whole epochs have: a document that windows lose, or have
    twice, would show after a dozen epochs."""
    source = open_source(config(corpus, packing=packing, document_mask=True, shuffle=shuffle))
    epoch = Counter(pair for t in DOCUMENTS for pair in zip(t.encode(), [*t.encode()[1:], 0], strict=True))
    found: Counter[tuple[int, int]] = Counter()
    windows = streaming._windows(source, 0, streaming.Cursor())
    begin, part, _ = next(windows)
    while begin.epoch < 12:
        for number in range(part.train):
            got = sequence(source, part, number)
            assert got.labels is not None
            kept = got.labels >= 0
            found.update(zip(got.ids[: len(kept)][kept].tolist(), got.labels[kept].tolist(), strict=True))
        begin, part, _ = next(windows)
    assert all(begin.epoch * n <= found[pair] <= (begin.epoch + 1) * n for pair, n in epoch.items())
    assert found.keys() == epoch.keys()


def test_in_order_it_is_the_packed_corpus(tmp_path: Path) -> None:
    path = write(tmp_path, DOCUMENTS + DOCUMENTS[::-1], files=1)
    pack.pack(str(tmp_path / "out"), pack.Options((path,), source="jsonl"), 1, lambda line: None)
    packed = np.fromfile(tmp_path / "out.bin", np.uint16)
    reader = Reader(open_source(config(path, shuffle=0, batch=1)), [0])
    sequences = (len(packed) - 1) // 8
    assert sequences > 64  # more than one window
    for i in range(sequences):
        out = reader.read(i)
        assert out["tokens"][0].tolist() == packed[8 * i : 8 * i + 8].tolist()
        assert out["labels"][0].tolist() == packed[8 * i + 1 : 8 * i + 9].tolist()
    after = reader.read(sequences)["tokens"][0].tolist()  # the next epoch follows without a seam
    assert after == [*packed[8 * sequences :].tolist(), *packed.tolist()][:8]


def test_windows_and_files_are_in_another_order_every_epoch_and_seed(corpus: str) -> None:
    def drawn(**changes: Any) -> list[tuple[int, ...]]:
        reader = Reader(open_source(config(corpus, batch=1, packing="none", seq=16, shuffle=40, **changes)), [0])
        return [tuple(reader.read(i)["tokens"][0].tolist()) for i in range(120)]

    one = drawn()
    assert drawn() == one and drawn(seed=1) != one
    assert one[:40] != one[40:80] and one[:40] != sorted(one[:40])


def layouts(path: str) -> list[plan.Plan]:
    made = []
    for mesh, rules, microbatch in (
        ("", "", 1), ("", "", 4), ("dp: {size: 2}", "batch: dp", 2), ("dp: {size: 4}", "batch: dp", 2),
        ("pp: {size: 2}, fsdp: {size: 2}", "layers: pp, batch: fsdp", 1),
        ("tp: {size: 2}", "heads: tp, kv_heads: tp, mlp: tp", 8),
    ):  # fmt: skip
        ranks = 4 if "4" in mesh or "pp" in mesh else 2 if mesh else 1
        at_rest = ", ".join(r for r in rules.split(", ") if r and "batch" not in r)
        made.append(
            plan.plan(
                layout.loads(
                    f"cluster: {{gpus_per_node: {ranks}}}\nmesh: {{{mesh}}}\n"
                    f"shard: {{params: {{{at_rest}}}, compute: {{{rules}}}}}\n"
                    "model: {family: llama, layers: 2, embed: 16, heads: 2, mlp: 16, vocab: 256}\nrun: {steps: 40}\n"
                    f"data: {{source: jsonl, path: '{path}', stream: true, shuffle: 6, seq: 4, batch: 8, "
                    f"microbatch: {microbatch}, validation: {{fraction: 0}}}}\n"
                )
            )
        )
    return made


def test_a_step_sees_the_same_samples_under_every_layout(corpus: str) -> None:
    expected: list[dict[int, Any]] = [{} for _ in range(6)]
    for made in layouts(corpus):
        source = open_source(data_config(made))
        for rank in range(made.job.mesh.world):
            reader = Reader(source, plan.rows(made, made.job.mesh.coordinates(rank)))
            for step in range(6):
                out = reader.read(step)
                for i, sample in enumerate(out["sample"].tolist()):
                    row = tuple(tuple(out[k][i].tolist()) for k in ("tokens", "labels", "start"))
                    assert expected[step].setdefault(sample, row) == row
    assert [sorted(e) for e in expected] == [list(range(8 * s, 8 * s + 8)) for s in range(6)]


def test_a_mixture_of_a_stream_and_of_what_can_be_indexed(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "b.txt").write_bytes(bytes(range(128, 208)))
    mix = (From("jsonl", (path,), stream=True, weight=3.0), From("text", (str(tmp_path / "b.txt"),), weight=1.0))
    source = open_source(replace(config(path), mix=mix, batch=8, stream=False))
    reader = Reader(source, range(8))
    steps = [reader.read(i) for i in range(40)]
    kinds = torch.cat([s["tokens"][:, 0] >= 128 for s in steps])
    assert 40 < int(kinds.sum()) < 120  # a quarter of 320, to 5 standard deviations
    indexed = [tuple(r.tolist()) for s in steps for r in s["tokens"] if r[0] >= 128]
    assert len(set(indexed)) == 9
    again = Reader(source, range(8), 20, cursors(source, 20))
    assert all(same(again.read(i), steps[i]) for i in range(20, 40))


def cursors(source: Any, steps: int) -> Any:
    reader = Reader(source, [0])
    for i in range(steps):
        reader.read(i)
    return reader.cursors(steps - 1)


def test_what_is_left_out_is_counted_once_across_a_resume(tmp_path: Path) -> None:
    lines = [json.dumps({"text": t}) if i % 5 else '{"no": 1}' for i, t in enumerate(DOCUMENTS)]
    lines[7] = json.dumps({"text": ""})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cfg = config(str(tmp_path / "a.jsonl"), bad="skip", shuffle=3)
    whole = Reader(open_source(cfg), [0])
    for i in range(60):
        whole.read(i)
    resumed = Reader(open_source(cfg), [0], 30, cursors(open_source(cfg), 30))
    for i in range(30, 60):
        resumed.read(i)
    assert resumed.cursors(59) == whole.cursors(59)
    assert resumed.notes() == whole.notes() and any("no 'text'" in n for n in whole.notes())
    assert any("(empty)" in n for n in whole.notes())


def test_a_shard_that_changes_or_vanishes_while_a_run_goes_on_is_named(tmp_path: Path) -> None:
    for damage, words in (
        (lambda p: p.unlink(), "No such file"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\n"), "bytes; it had"),
    ):
        path = write(tmp_path, files=8)
        source = open_source(config(path, shuffle=2))
        reader = Reader(source, [0])
        reader.read(0)
        for file in tmp_path.glob("f*"):
            damage(file)
        with pytest.raises(DataError, match=words) as e:
            for step in range(1, 500):
                reader.read(step)
        assert "\n" not in str(e.value)
        for file in tmp_path.glob("f*"):
            file.unlink()


def test_what_is_wrong_from_the_start_is_told_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, match="has no key 'body'; its keys are 'text'"):
        open_source(config(path, field="body"))
    with pytest.raises(DataError, match=r"model\.vocab: 100 is smaller than the 256 ids"):
        open_source(config(path, vocab=100))
    with pytest.raises(DataError, match="nothing can be held out of what is read as the run goes on"):
        open_source(config(path, validation=0.1))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 70)
    with pytest.raises(DataError, match=r"none of the documents of jsonl .* can be used"):
        Reader(open_source(config(str(tmp_path / "empty.jsonl"))), [0]).read(0)
    (tmp_path / "short.jsonl").write_text('{"text": "x"}\n' * 70)
    with pytest.raises(DataError, match="too short to learn from"):
        Reader(open_source(config(str(tmp_path / "short.jsonl"), packing="none", eos=False)), [0]).read(0)
    with pytest.raises(DataError, match="read them one after another"):
        batch(open_source(config(path)), 3, [0])
    assert open_source(config(path)).hash != open_source(config(path, field="text", stream=False)).hash


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("source: jsonl, path: a.jsonl, stream: true", r"data\.validation\.fraction: 0\.05; nothing can be held out"),
        ("source: tokens, path: a.bin, stream: true", r"data\.stream: true; is for texts"),
        ("source: stdlib, shuffle: 5", r"data\.shuffle: 5; is for stream: true"),
        (
            "mix: [{source: text, path: a, stream: true}], validation: {fraction: 0}",
            r"data\.mix\.0\.weight: null; how long a stream is, nobody knows",
        ),
    ],
)
def test_layouts_that_cannot_stream_are_one_line(keys: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        layout.loads(
            "model: {family: llama, layers: 1, embed: 16, heads: 2, mlp: 16, vocab: 256}\nrun: {steps: 4}\n"
            f"data: {{{keys}, seq: 4, batch: 8}}\n"
        )


def test_more_text_than_fits_in_memory_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "IN_MEMORY", 100)
    with pytest.raises(DataError, match=r"more than 0 MiB of text; tokenise it once, .*or read it .* stream: true"):
        open_source(config(write(tmp_path), stream=False))
