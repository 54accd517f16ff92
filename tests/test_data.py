import json
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain import rng
from dtrain.data import DataConfig, DataError, Source, batch, open_source, permute, tokens, validation_batches
from dtrain.data.config import periods


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def text(tmp_path: Path, data: bytes, **changes: object) -> DataConfig:
    given = {"source": "text", "seq": 4, "batch": 2, "vocab": 256, "validation": 0.0} | changes
    return DataConfig(paths=(write(tmp_path / "corpus.txt", data),), **given)  # type: ignore[arg-type]


def ids(n: int) -> bytes:
    return bytes(i % 251 for i in range(n))


def firsts(source: Source, samples: range, split: str = "train") -> list[int]:
    """The first token of each sample, drawn in one-row batches of the right step."""
    b = source.cfg.batch
    return [int(batch(source, s // b, [s % b], split)["tokens"][0, 0]) for s in samples]  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permute_is_a_permutation(n: int, seed: int) -> None:
    assert sorted(permute(i, n, rng.fold_int(seed, 1)) for i in range(n)) == list(range(n))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_permute_scales_to_any_size(n: int, seed: int) -> None:
    index = {(n - 1) * i // 49 for i in range(50)}
    out = {permute(i, n, rng.fold_int(seed, 1)) for i in index}
    assert len(out) == len(index) and all(0 <= i < n for i in out)


def test_permute_spreads_evenly() -> None:
    # Each of 12 values lands on each of 12 places about equally often over 3,000 keys: chi-squared with 121
    # degrees of freedom is below 200 except with probability 1e-5.
    states = [rng.fold_int(key, 7) for key in range(3000)]
    out = torch.tensor([[permute(i, 12, state) for i in range(12)] for state in states])
    counts = torch.stack([torch.bincount(out[:, i], minlength=12) for i in range(12)]).double()
    assert float(((counts - 250) ** 2 / 250).sum()) < 200


def test_labels_are_shifted_before_the_cut(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, ids(4 * 10 + 3)))
    assert (source.train, source.dropped) == (10, 2)
    out = batch(source, 0, range(2))
    assert {k: (v.dtype, tuple(v.shape)) for k, v in out.items()} == {
        "tokens": (torch.int64, (2, 4)),
        "labels": (torch.int64, (2, 4)),
        "start": (torch.int64, (2, 4)),
        "sample": (torch.int64, (2,)),
    }
    assert torch.equal(out["labels"], out["tokens"] + 1)  # the last label too, across the seam
    assert bool((out["tokens"][:, 0] % 4 == 0).all())
    labels = sorted(t for s in range(5) for row in batch(source, s, range(2))["labels"].tolist() for t in row)
    assert labels == list(range(1, 41))  # one epoch predicts every token but the first and the dropped ones


def test_seven_of_eight_tokens_are_labels_however_a_sequence_is_cut(tmp_path: Path) -> None:
    """Labels are a field of the batch, so that cutting it cannot lose one: in halves, or in quarters of which a rank
    has the first and the last."""
    cfg = text(tmp_path, bytes(range(1, 9)), seq=8, batch=1, packing="none", eos=False, source="jsonl")
    write(tmp_path / "corpus.txt", json.dumps({"text": "".join(map(chr, range(1, 9)))}).encode())
    out = batch(open_source(cfg), 0, [0])
    assert out["tokens"][0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    labels = out["labels"][0]
    assert [labels[:4].tolist(), labels[4:].tolist()] == [[2, 3, 4, 5], [6, 7, 8, -1]]
    zigzag = labels.view(4, 2)
    assert [zigzag[[0, 3]].flatten().tolist(), zigzag[[1, 2]].flatten().tolist()] == [[2, 3, 8, -1], [4, 5, 6, 7]]


def test_an_epoch_is_a_permutation_and_wraps_inside_a_batch(tmp_path: Path) -> None:
    cfg = text(tmp_path, ids(16 * 4 + 1), batch=5)
    source = open_source(cfg)
    drawn = firsts(source, range(48))
    epochs = [drawn[i : i + 16] for i in (0, 16, 32)]
    assert all(sorted(e) == list(range(0, 64, 4)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert firsts(open_source(cfg), range(48)) == drawn
    assert firsts(open_source(text(tmp_path, ids(16 * 4 + 1), batch=5, seed=1)), range(48)) != drawn


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_batch_is_a_pure_function_of_step_and_rows(data: st.DataObject) -> None:
    source = open_source(
        DataConfig(
            "synthetic",
            seq=data.draw(st.integers(6, 20)),
            batch=8,
            vocab=data.draw(st.integers(10, 2**17)),
            seed=data.draw(st.integers(0, 9)),
            objective=data.draw(st.sampled_from(["causal", "masked"])),
        )
    )
    step, split = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from(["train", "valid"]))
    whole = batch(source, step, range(8), split)
    rows = data.draw(st.lists(st.integers(0, 7), min_size=1))
    batch(source, step + 1, range(8), split)  # what was drawn in between does not matter
    for name, part in batch(source, step, rows, split).items():
        assert torch.equal(part, whole[name][rows]), name
    assert torch.equal(whole["sample"], step * 8 + torch.arange(8))
    assert int(whole["tokens"].min()) >= 0 and int(whole["tokens"].max()) < source.cfg.vocab


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.5, 0.75]))
def test_the_split_is_exact(n: int, fraction: float) -> None:
    cfg = DataConfig("text", seq=4, batch=1, vocab=256, validation=fraction)
    period, held = periods(cfg, n)
    valid = [i for i in range(n) if i % period >= period - held]
    assert abs(len(valid) - n * fraction) <= 1 + 0.375 * n * min(fraction, 1 - fraction)
    assert bool(valid) == (fraction > 0)
    assert sum(1 for i in valid if i - 1 not in valid) <= 17


def test_train_and_validation_share_no_sequence(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, bytes(range(241)), validation=0.2, batch=7))
    train = set(firsts(source, range(source.train)))
    valid = firsts(source, range(source.valid), "valid")
    assert source.valid == 12 and len(valid) == len(set(valid)) == 12
    assert not train & set(valid) and train | set(valid) == set(range(0, 240, 4))


def test_validation_covers_each_sequence_once(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, ids(4 * 60 + 1), validation=0.2, batch=7))
    assert (source.valid, validation_batches(source)) == (12, 2)
    last = batch(source, 1, range(7), "valid")
    assert (last["labels"] >= 0).all(dim=1).tolist() == [True] * 5 + [False] * 2
    assert bool((last["labels"][5:] == -1).all())
    assert validation_batches(open_source(text(tmp_path, ids(41)))) == 0
    with pytest.raises(ValueError, match="valid split is empty"):
        batch(open_source(text(tmp_path, ids(41))), 0, [0], "valid")


def test_documents_are_joined_by_a_zero(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, data in [("b.txt", b"defg"), ("a.txt", b"abc"), ("empty.txt", b""), ("d/c.txt", b"hij")]:
        write(tmp_path / name, data)
    source = open_source(DataConfig("text", 5, 1, 256, paths=(str(tmp_path / "**/*.txt"),), validation=0.0))
    assert source.tokens == 12 and len(source.parts[0].stream.shards) == 3
    seen = {bytes(batch(source, s, [0])["tokens"][0].tolist()) for s in range(2)}
    assert seen == {b"abc\0d", b"efg\0h"}


def test_read_equals_the_joined_stream(tmp_path: Path) -> None:
    pieces = [bytes([65 + i]) * (i % 5) for i in range(12)]
    for i, piece in enumerate(pieces):
        write(tmp_path / f"{i:02}.txt", piece)
    stream = b"\0".join(p for p in pieces if p)
    source = open_source(DataConfig("text", 6, 1, 256, paths=(str(tmp_path / "*.txt"),), validation=0.0))
    for i in range(len(stream) - 6):
        assert bytes(tokens.read(source.parts[0].stream, i, 7, 256).tolist()) == stream[i : i + 7]


def test_jsonl(tmp_path: Path) -> None:
    rows = [{"text": "héllo", "id": 1}, {"text": ""}, {"text": "w"}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(r) for r in rows).encode())
    source = open_source(DataConfig("jsonl", 4, 1, 256, paths=(path,), validation=0.0))
    assert bytes(source.parts[0].stream.shards[0].tokens) == "héllo\0w".encode()


def test_stdlib_is_found_and_deterministic() -> None:
    cfg = DataConfig("stdlib", seq=256, batch=32, vocab=256)
    a, b = open_source(cfg), open_source(cfg)
    assert a.hash == b.hash and 4_000_000 < a.tokens <= 17_000_000
    assert 0.04 < a.valid / (a.train + a.valid) < 0.06
    tokens = batch(a, 3, range(32))["tokens"]
    assert torch.equal(tokens, batch(b, 3, range(32))["tokens"])
    assert float(((tokens >= 32) | (tokens == 10)).double().mean()) > 0.99  # text


def test_hash_names_the_content(tmp_path: Path) -> None:
    a, b = open_source(text(tmp_path, ids(50))), open_source(text(tmp_path, ids(49) + b"!"))
    assert a.hash != b.hash and a.hash == open_source(text(tmp_path, ids(50))).hash


def test_a_long_file_is_mapped(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, ids(1000)))
    assert isinstance(source.parts[0].stream.shards[0].tokens.base.obj, mmap.mmap)


@pytest.fixture(scope="module")
def masked() -> Source:
    return open_source(DataConfig("stdlib", seq=64, batch=256, vocab=260, objective="masked"))


def test_masked_fields(masked: Source) -> None:
    out = batch(masked, 5, range(256))
    assert list(out) == ["tokens", "labels", "types", "valid", "order", "sample"]
    assert all(v.dtype == torch.int64 for v in out.values())
    tokens, labels, types = out["tokens"], out["labels"], out["types"]
    original = torch.where(labels >= 0, labels, tokens)
    assert bool((original[:, 0] == 257).all()) and bool((original[:, -1] == 258).all())
    assert bool(((original == 258).sum(1) == 2).all()) and bool(((original >= 256).sum(1) == 3).all())
    middle = (original == 258).long().argmax(1)
    assert torch.equal(types, (torch.arange(64) > middle[:, None]).long())
    first = torch.where(out["order"] == 1, 62 - middle, middle - 1)  # of 61 bytes
    assert int((first - 31).abs().max()) <= 61 / 4 and out["valid"].min() == 1
    last = original.gather(1, torch.where(out["order"] == 1, 62, first)[:, None])[:, 0]
    ended = torch.isin(last, torch.tensor(list(b".!?\n")))
    assert bool((first[~ended] == 31).all()) and int(ended.sum()) > 128
    assert 90 < int(out["order"].sum()) < 166  # 5 standard deviations about 128


def test_masked_order_tells_whether_the_halves_were_swapped(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, ids(12 * 20), seq=15, vocab=260, objective="masked", batch=20))
    out = batch(source, 0, range(20))
    original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
    ordered = original[:, 1] < original[:, 13]
    assert torch.equal(out["order"], (~ordered).long()) and 0 < int(out["order"].sum()) < 20
    body = original[original < 256].view(20, 12).sort(1).values
    assert torch.equal(body[:, 1:], body[:, :-1] + 1)  # twelve consecutive bytes, none lost


def test_masking_rates(masked: Source) -> None:
    batches = [batch(masked, s, range(256)) for s in range(8)]
    tokens, labels = (torch.cat([b[name] for b in batches]) for name in ("tokens", "labels"))
    chosen = labels >= 0
    n = int(chosen.sum())  # about 18,700
    assert abs(n / (labels.shape[0] * 61) - 0.15) < 0.005
    shown, wanted = tokens[chosen], labels[chosen]
    assert abs(int((shown == 259).sum()) / n - 0.8) < 0.015
    assert abs(int((shown == wanted).sum()) / n - 0.1) < 0.012
    assert int(shown[shown != 259].max()) < 256 and int(wanted.max()) < 256


def test_masks_differ_between_steps_and_epochs_and_repeat(tmp_path: Path) -> None:
    cfg = text(tmp_path, ids(12 * 8), seq=15, vocab=260, objective="masked", batch=8)
    source = open_source(cfg)

    def masks(step: int, s: Source = source) -> dict[int, list[int]]:
        """Mask of each text (named by its lowest byte) in the epoch that is this step."""
        out = batch(s, step, range(8))
        original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
        return dict(zip(original.min(1).values.tolist(), (out["labels"] >= 0).tolist(), strict=True))

    one, two = masks(0), masks(1)
    assert one.keys() == two.keys() and one != two
    assert masks(0, open_source(cfg)) == one


def test_a_true_label_of_zero_counts(tmp_path: Path) -> None:
    source = open_source(text(tmp_path, bytes(400), seq=15, vocab=260, objective="masked", batch=20))
    out = batch(source, 0, range(20))
    assert int((out["labels"] == 0).sum()) > 10 and set(out["labels"].unique().tolist()) == {-1, 0}


def test_synthetic_uses_the_vocabulary() -> None:
    source = open_source(DataConfig("synthetic", seq=128, batch=64, vocab=100_000))
    tokens = batch(source, 0, range(64))["tokens"]
    assert int(tokens.max()) > 90_000 and int(tokens.min()) < 10_000 and len(tokens.unique()) > 7_000
    out = batch(open_source(DataConfig("synthetic", 32, 4, vocab=10, objective="masked")), 0, range(4))
    assert int(out["tokens"].max()) == 9 and int(out["labels"].max()) <= 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "xml"}, ["data.source", "'xml'", "stdlib, synthetic, text, jsonl"]),
        ({"paths": ()}, ["data.path", "'text'", "glob"]),
        ({"paths": ("missing-*.txt",)}, ["data.path", "'missing-*.txt'", "matches no file"]),
        ({"paths": ("/tmp",)}, ["data.path", "'/tmp'", "folder", "glob"]),
        ({"batch": 11}, ["data.batch: 11", "only 10", "41 tokens", "data.seq 4"]),
        ({"seq": 41}, ["only 0 training", "data.seq 41"]),  # seq tokens, which needs seq + 1
        ({"vocab": 128}, ["model.vocab: 128", "256 ids", "highest id in the data is 40"]),
        ({"vocab": 256, "seq": 8, "objective": "masked"}, ["model.vocab: 256", "260 ids", "[MASK]"]),
        ({"objective": "masked", "vocab": 260}, ["data.seq: 4", "masked", "at least 5"]),
        ({"validation": 1.0}, ["data.validation: 1.0"]),
        ({"source": "synthetic", "vocab": 4, "seq": 8, "objective": "masked"}, ["model.vocab: 4"]),
    ],
)
def test_errors_are_one_line(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DataError) as e:
        paths = changes.pop("paths", None)
        cfg = text(tmp_path, bytes(range(41)), **changes)
        open_source(cfg if paths is None else DataConfig(**{**vars(cfg), "paths": paths}))
    assert "\n" not in str(e.value)
    for word in words:
        assert word in str(e.value)


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 tokens"):
        open_source(text(tmp_path, b""))


@pytest.mark.parametrize("line", ['{"text": 3}', '{"txt": "a"}', "[1]", "{oops"])
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.jsonl", ('{"text": "fine"}\n' + line).encode())
    with pytest.raises(DataError, match=r"a\.jsonl:2: ") as e:
        open_source(DataConfig("jsonl", 2, 1, 256, paths=(path,)))
    assert "\n" not in str(e.value)
