"""Texts out of files: every format gives the same documents, and bad ones are errors or counted."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.data import DataConfig, DataError, batch, documents, open_source
from dtrain.data.documents import Faults, files, kind_of, records

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
fsspec = pytest.importorskip("fsspec")

TEXTS = ["héllo wörld", "a second document", "and a third\nof two lines", "the last"]


def lines(key: str = "text") -> bytes:
    return "".join(json.dumps({key: t, "id": i}) + "\n" for i, t in enumerate(TEXTS)).encode()


def write(folder: Path, name: str) -> str:
    path = folder / name
    table = pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines()))
    elif name.endswith(".zst"):  # two frames, as parallel compressors write them
        half = lines().index(b"\n") + 1
        frames = [zstandard.ZstdCompressor().compress(part) for part in (lines()[:half], lines()[half:])]
        path.write_bytes(b"".join(frames))
    elif name.endswith(".parquet"):
        parquet.write_table(table, path, row_group_size=2)
    elif name.endswith(".arrow"):
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif name == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path), num_shards=2)
    elif name == "memory":
        path = "memory://corpus/a.jsonl"  # type: ignore[assignment]
        with fsspec.open(path, "wb") as file:
            file.write(lines())
    else:
        path.write_bytes(lines())
    return str(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "saved", "memory"])
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    kind = kind_of(path)
    found = [v for file in files([path], kind) for _, v in records(kind, file, "text", Faults())]
    assert found == TEXTS
    cfg = DataConfig(kind, 4, 1, 256, paths=(path,), validation=0.0)
    source = open_source(cfg)
    assert source.tokens == len("\0".join(TEXTS).encode())


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_text_is_one_document_packed_or_not(tmp_path: Path, name: str) -> None:
    raw = "\n".join(TEXTS).encode()
    pack = {"z": zstandard.ZstdCompressor().compress, "g": gzip.compress}.get(name[6:7], bytes)
    (tmp_path / name).write_bytes(pack(raw))
    source = open_source(DataConfig("text", 4, 1, 256, paths=(str(tmp_path / "a*"),), validation=0.0))
    assert source.parts[0].stream is not None
    assert bytes(source.parts[0].stream.shards[0].tokens) == raw


def test_globs_are_sorted_and_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    found = files([str(tmp_path / "*.txt"), str(tmp_path / "a.txt"), str(tmp_path / "c.md")], "text")
    assert [Path(f).name for f in found] == ["a.txt", "b.txt", "c.md"]


def test_a_folder_is_all_its_files_of_the_kind_even_where_links_go_round(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("b.jsonl", "a.jsonl.gz", "dataset_info.json", "README.md"):
        write(tmp_path / "data", name)
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    found = files([str(tmp_path)], "jsonl")
    assert [Path(f).name for f in found] == ["a.jsonl.gz", "b.jsonl"]
    assert len(files([str(tmp_path / "**/*.md")], "text")) == 1
    with pytest.raises(DataError, match="holds no parquet file"):
        files([str(tmp_path)], "parquet")
    with pytest.raises(DataError, match=r"is a folder; add a glob such as /\*\*/\*"):
        files([str(tmp_path)], "text")


def test_splits_of_a_saved_dataset_are_listed(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"has the splits train, test; give one: .*/train|holds the splits train, test"):
        files([str(tmp_path)], "arrow")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (tmp_path / "dataset_dict.json").unlink()
    with pytest.raises(DataError, match=r"data-0\.arrow: does not exist, but .*state\.json names it"):
        files([str(tmp_path)], "arrow")


DAMAGED = {
    "a.jsonl.gz": "cannot be read: Compressed file ended",
    "a.jsonl.zst": "cannot be read: the compressed file ends early",
    "a.parquet": "is no parquet file, or damaged",
    "a.arrow": "is no arrow file, or damaged",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_cut_short_is_an_error_even_where_bad_documents_are_skipped(tmp_path: Path, name: str) -> None:
    path = Path(write(tmp_path, name))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=DAMAGED[name]) as e:
        list(records(kind_of(str(path)), str(path), "text", Faults(skip=True)))
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet")
    with pytest.raises(DataError, match=r"has no column 'body'; it has text, id: choose one with data\.field"):
        list(records("parquet", path, "body", Faults()))


BAD = b'{"text": "fine"}\n{oops\n{"text": "\xff"}\n{"body": "x"}\n{"text": ""}\n{"text": 3}\n{"text": "too"}\n'


def bad(tmp_path: Path, **changes: Any) -> DataConfig:
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    return DataConfig("jsonl", 2, 1, 256, paths=(str(tmp_path / "bad.jsonl"),), validation=0.0, **changes)


def test_bad_documents_are_errors_that_say_how_to_skip_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not JSON .*mend it, or leave such .* data\.bad: skip"):
        open_source(bad(tmp_path))


def test_skipped_documents_are_counted_by_reason(tmp_path: Path) -> None:
    source = open_source(bad(tmp_path, bad="skip"))
    assert source.parts[0].stream is not None
    assert bytes(source.parts[0].stream.shards[0].tokens) == b"fine\0too"
    assert list(source.notes) == [
        "data: documents left out (empty): 1",
        "data: documents left out (no 'text'): 2",
        "data: documents left out (not JSON): 1",
        "data: documents left out (not UTF-8): 1",
    ]


def test_a_package_that_is_absent_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs the package 'pyarrow'; install it: pip install 'dtrain\[data\]'"):
        list(records("parquet", path, "text", Faults()))


def test_documents_held_out_by_their_hash_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    texts = [f"document number {i} of many" for i in range(200)]
    copies = texts + texts[:50]
    for name, order in (("a", copies), ("b", copies[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in order))

    def sides(name: str) -> list[set[str]]:
        paths = (str(tmp_path / f"{name}.jsonl"),)
        source = open_source(DataConfig("jsonl", 4, 1, 256, paths=paths, validation=0.2, split="documents"))
        streams = [p.stream for p in (*source.parts, *source.apart)]
        assert source.valid == source.apart[0].valid > 0 and source.parts[0].valid == 0
        return [
            {t for s in stream.shards for t in bytes(s.tokens).decode().split("\0")} for stream in streams if stream
        ]

    train, held = sides("a")
    assert not train & held and train | held == set(texts) and 20 < len(held) < 60
    assert sides("b") == [train, held]


def test_a_held_out_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(bytes(range(65, 90)))
    (tmp_path / "valid.txt").write_bytes(b"0123456789")
    paths = {"paths": (str(tmp_path / "train.txt"),), "valid_paths": (str(tmp_path / "valid.txt"),)}
    source = open_source(DataConfig("text", 3, 2, 256, validation=0.0, **paths))
    assert (source.train, source.valid) == (8, 3)
    seen = {bytes(row) for s in range(2) for row in batch(source, s, range(2), "valid")["tokens"].tolist()}
    assert seen == {b"012", b"345", b"678"}
    assert documents.KINDS == ("text", "jsonl", "parquet", "arrow")
