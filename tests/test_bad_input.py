"""What people feed `dtrain data pack` by mistake: one line, exit code 2, and nothing left that looks finished."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dtrain import cli

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
fsspec = pytest.importorskip("fsspec")

GOOD = b'{"text": "one document"}\n'
Make = Callable[[Path], Any]


def file(name: str, content: bytes) -> Make:
    return lambda folder: (folder / name).write_bytes(content)


def table(name: str, **columns: Any) -> Make:
    return lambda folder: parquet.write_table(pyarrow.table(columns), folder / name)


def saved(**files: object) -> Make:
    def make(folder: Path) -> None:
        (folder / "saved").mkdir()
        for name, content in files.items():
            (folder / "saved" / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))

    return make


def nothing(folder: Path) -> None:
    pass


# What is there, what is packed (in its folder), and what is said.
PACK: dict[str, tuple[Make, list[str], str]] = {
    "a glob that matches nothing": (nothing, ["*.jsonl"], r"'\S*\*\.jsonl' matches no file"),
    "a folder": (lambda f: (f / "sub").mkdir(), ["sub"], r"sub' is a folder; add a glob such as /\*\*/\*"),
    "an unknown protocol": (nothing, ["nowhere://bucket/a.jsonl"], "cannot be reached: Protocol not known: nowhere"),
    "a URL where nothing is": (nothing, ["memory://nothing/*.jsonl"], r"'memory://nothing/\*\.jsonl' matches no file"),
    "another compression": (file("a.jsonl.bz2", b"BZh9"), ["a.jsonl.bz2"], r"a\.jsonl\.bz2: is packed in a way"),
    "gz that ends early": (file("a.jsonl.gz", gzip.compress(GOOD * 99)[:-9]), ["a.jsonl.gz"], "Compressed file ended"),
    "gz that is none": (file("a.jsonl.gz", GOOD), ["a.jsonl.gz"], "cannot be read: Not a gzipped file"),
    "gz with a flipped bit": (
        file("a.jsonl.gz", gzip.compress(GOOD)[:-5] + b"\x00" + gzip.compress(GOOD)[-4:]),
        ["a.jsonl.gz"],
        "cannot be read: CRC check failed",
    ),
    "zst with a bad frame": (
        file("a.jsonl.zst", zstandard.ZstdCompressor().compress(GOOD) + b"junk"),
        ["a.jsonl.zst"],
        "cannot be read: damaged zstd data",
    ),
    "parquet without the column": (table("a.parquet", body=["x"]), ["a.parquet"], "has no column 'text'; it has body"),
    "parquet with a null": (table("a.parquet", text=["x", None]), ["a.parquet"], "row 2: column 'text' is null, not a"),
    "parquet of numbers": (table("a.parquet", text=[1.5]), ["a.parquet"], "row 1: column 'text' holds float, not a t"),
    "parquet that is none": (file("a.parquet", GOOD), ["a.parquet"], r"a\.parquet: is no parquet file, or damaged"),
    "a line that is a list": (file("a.jsonl", GOOD + b"[1, 2]\n"), ["a.jsonl"], r"a\.jsonl:2: no string under the key"),
    "a line that is a number": (file("a.jsonl", b"17\n"), ["a.jsonl"], r'a\.jsonl:1: no string under the key "text"'),
    "a line of NUL bytes": (file("a.jsonl", GOOD + bytes(99) + b"\n"), ["a.jsonl"], r"a\.jsonl:2: not JSON"),
    "a line nested without end": (file("a.jsonl", b"[" * 200_000), ["a.jsonl"], r"a\.jsonl:1: not JSON"),
    "a line without the key": (
        file("a.jsonl", b'{"content": "x", "id": 3}\n'),
        ["a.jsonl"],
        r"a\.jsonl:1: has no key 'text'; its keys are 'content', 'id' \(data\.field chooses one\); mend",
    ),
    "UTF-16": (file("a.jsonl", GOOD.decode().encode("utf-16")[:-1]), ["a.jsonl"], r"a\.jsonl:1: not "),
    "WikiText that is not UTF-8": (file("a.txt", b"a \xff b"), ["a.txt", "--wikitext"], r"a\.txt: not UTF-8"),
    "WikiText of chats": (file("a.txt", b"a"), ["a.txt", "chat=true", "--wikitext"], "--wikitext: is for texts"),
    "chats that are texts": (file("a.jsonl", b'{"messages": "hi"}'), ["a.jsonl", "chat=true"], "holds str, not a list"),
    "no tokenizer": (file("a.txt", b"a"), ["a.txt", "tokenizer=none.json"], r"tokenizer: 'none\.json' does not exist"),
    "a tokenizer that is none": (
        lambda f: (file("a.txt", b"a")(f), file("tokenizer.json", b'{"model": 3}')(f)),
        ["a.txt", "tokenizer=FOLDER/tokenizer.json"],
        r"tokenizer\.json' is no tokenizer\.json: ",
    ),
    "a tokenizer that is empty": (
        lambda f: (file("a.txt", b"a")(f), file("t.model", b"")(f)),
        ["a.txt", "tokenizer=FOLDER/t.model"],
        r"t\.model' is no tokenizer\.json, SentencePiece or tiktoken file",
    ),
    "a saved dataset of which a shard is missing": (
        saved(state={"_data_files": [{"filename": "data-0.arrow"}]}),
        ["saved"],
        r"data-0\.arrow: does not exist, but \S*state\.json names it",
    ),
    "a saved dataset that is none": (saved(state="{oops"), ["saved"], r"state\.json: is not what save_to_disk writes"),
    "splits that are none": (saved(dataset_dict=[]), ["saved"], r"dataset_dict\.json: is not what save_to_disk write"),
    "a setting that is none": (file("a.txt", b"a"), ["a.txt", "tokens=3"], "tokens: is nothing that packing asks for"),
    "a glob that the shell expanded": (
        lambda f: (file("a.txt", b"a")(f), file("b.txt", b"b")(f)),
        ["a.txt", "FOLDER/b.txt", "FOLDER/c.txt"],
        "quote",
    ),
    "a share that is none": (file("a.txt", b"a"), ["a.txt", "--hold-out", "1.5"], "--hold-out: 1.5 must be a fraction"),
    "an output that cannot be": (
        lambda f: (file("a.txt", b"a")(f), file("plain", b"")(f)),
        ["a.txt", "OUT=FOLDER/plain/out"],
        "plain",
    ),
}  # fmt: skip


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["data", *args])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PACK)
def test_what_cannot_be_packed_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    make, args, words = PACK[name]
    make(tmp_path)
    source, *rest = [a.replace("FOLDER", str(tmp_path)) for a in args]
    out = next((a[4:] for a in rest if a.startswith("OUT=")), str(tmp_path / "out"))
    source = source if "://" in source else str(tmp_path / source)
    if name == "a glob that the shell expanded":
        out, *rest = rest
    ran = run("pack", source, out, "--workers", "1", *[a for a in rest if not a.startswith("OUT=")])
    assert ran.exit_code == 2, (ran.output, ran.exception)
    said = ran.output.strip().splitlines()
    assert len(said) == 1, said
    assert re.search(words, said[0]), said[0]
    assert not Path(f"{out}.json").exists() and not Path(f"{out}.bin").exists()
