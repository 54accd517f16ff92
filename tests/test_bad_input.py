"""What people feed dtrain by mistake: one line, exit code 2, and nothing left that looks finished."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dtrain import cli
from dtrain.data.tokens import write_index

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


# ------------------------------------------------------------------------------------------------ in a layout


def tokens(name: str, n: int, dtype: str = "<u2", value: int = 7) -> Make:
    return lambda folder: np.full(n, value, dtype).tofile(folder / name)


def both(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes]


def megatron(folder: Path) -> None:
    np.full(90, 7, np.uint16).tofile(folder / "m.bin")
    write_index(folder / "m.idx", np.dtype(np.uint16), np.full(9, 10, np.int32))


def then(make: Make, change: Callable[[Path], Any]) -> Make:
    return lambda folder: (make(folder), change(folder))


TEXT = file("a.txt", b"a text of some length")
LINES = file("a.jsonl", GOOD * 9)

# What is there, what the layout's `data` says beside seq and batch, and what is said.
SHOW: dict[str, tuple[Make, str, str]] = {
    "a path that matches nothing": (nothing, "source: text, path: '*.md'", r"'\S*\*\.md' matches no file"),
    "a folder of texts": (TEXT, "source: text, path: FOLDER", "is a folder; add a glob"),
    "an empty file": (file("a.txt", b""), "source: text, path: a.txt", "the 0 tokens of text"),
    "documents that are all empty": (
        file("a.jsonl", b'{"text": ""}\n' * 9),
        "source: jsonl, path: a.jsonl",
        "the 0 tokens of jsonl",
    ),
    "fewer sequences than a batch": (TEXT, "source: text, path: a.txt", "data.batch: 2 sequences a step, but the 21"),
    "half a token": (file("t.bin", bytes(77)), "source: tokens, path: t.bin", "77 bytes are no whole number of uint16"),
    "tokens of another width": (
        tokens("t.bin", 99, "<u4", 70_000),
        "source: tokens, path: t.bin",
        r"t\.bin: token 0 has id 4,464, but model\.vocab is 300; .* data\.dtype wrong\?",
    ),
    "negative tokens": (
        tokens("t.bin", 99, "<i4", -1),
        "source: tokens, path: t.bin, dtype: int32",
        r"t\.bin: token 0 has id -1, but",
    ),
    "a table of tokens": (
        lambda f: np.save(f / "t.npy", np.zeros((9, 9), np.uint16)),
        "source: tokens, path: t.npy",
        r"t\.npy: is 2-dimensional uint16",
    ),
    "an array that is cut short": (
        lambda f: (np.save(f / "t.npy", np.zeros(99, np.uint16)), os.truncate(f / "t.npy", 200)),
        "source: tokens, path: t.npy",
        r"t\.npy: cannot be read as an array",
    ),
    "an array of objects": (
        lambda f: np.save(f / "t.npy", np.array(["a"], object)),
        "source: tokens, path: t.npy",
        r"t\.npy: cannot be read as an array: .*Python objects",
    ),
    "tokens whose documents nothing tells": (
        tokens("t.bin", 99),
        "source: tokens, path: t.bin, packing: best-fit",
        r"t\.bin does not say where documents begin; set data\.eos",
    ),
    "an index without tokens": (
        then(megatron, lambda f: (f / "m.bin").unlink()),
        "source: megatron, path: m",
        r"m\.bin: does not exist; Megatron data are a \.bin and an \.idx",
    ),
    "tokens without an index": (
        then(megatron, lambda f: (f / "m.idx").unlink()),
        "source: megatron, path: m",
        r"m\.idx: does not exist; Megatron data are a \.bin and an \.idx",
    ),
    "an index of something else": (
        then(megatron, file("m.idx", b"PK" * 99)),
        "source: megatron, path: m",
        r"m\.idx: at offset 0: is no Megatron index",
    ),
    "tokens that are cut short": (
        then(megatron, lambda f: os.truncate(f / "m.bin", 100)),
        "source: megatron, path: m",
        r"m\.bin: has 100 bytes, but m\.idx describes 180 .* it is cut short",
    ),
    "a manifest that is none": (
        then(megatron, file("m.json", b"{oops")),
        "source: megatron, path: m",
        r"m\.json: cannot be read as a manifest",
    ),
    "an unknown protocol": (nothing, "source: jsonl, path: 'nowhere://a.jsonl'", "Protocol not known: nowhere"),
    "a tokenizer that is none": (
        both(TEXT, file("t.json", b"{}")),
        "source: text, path: a.txt, tokenizer: FOLDER/t.json",
        r"t\.json' is no tokenizer\.json: ",
    ),
    "a beginning that bytes have not": (TEXT, "source: text, path: a.txt, bos: true", r"data\.bos: 'bytes' names none"),
    "an end that bytes have not": (
        TEXT,
        "source: text, path: a.txt, eos: '</s>'",
        r"data\.eos: '</s>' is no special token of 'bytes'; it has none",
    ),
    "the end of tokens, of a text": (TEXT, "source: text, path: a.txt, eos: 3", r"data\.eos: 3; a number is for"),
    "a source twice": (
        TEXT,
        "mix: [{source: text, path: a.txt, weight: 1}, {source: text, path: a.txt, weight: 2}]",
        r"data\.mix: text \(\S*a\.txt\) is listed twice; list it once",
    ),
    "a weight of 0": (TEXT, "mix: [{source: text, path: a.txt, weight: 0}]", r"mix\.0\.weight: 0; must be"),
    "a weight below 0": (TEXT, "mix: [{source: text, path: a.txt, weight: -1}]", r"mix\.0\.weight: -1"),
    "a weight of nan": (TEXT, "mix: [{source: text, path: a.txt, weight: .nan}]", r"mix\.0\.weight: nan"),
    "a weight of inf": (TEXT, "mix: [{source: text, path: a.txt, weight: .inf}]", r"mix\.0\.weight: inf"),
    "a field of a text": (TEXT, "source: text, path: a.txt, field: body", r"data\.field: 'body'; is for jsonl"),
    "a dtype of lines": (LINES, "source: jsonl, path: a.jsonl, dtype: uint8", r"data\.dtype: 'uint8'; is for"),
    "a chat of tokens": (megatron, "source: megatron, path: m, chat: true", r"x\.yaml:3: data\.chat: true; is for"),
    "a beginning of tokens": (megatron, "source: megatron, path: m, bos: true", r"x\.yaml:3: data\.bos: true; is for"),
    "tokens held out by document": (
        megatron,
        "source: megatron, path: m, validation: {split: documents}",
        r"data\.validation\.split: 'documents'; is for text, .*not for source megatron",
    ),
    "held out twice": (
        TEXT,
        "source: text, path: a.txt, validation: {path: a.txt, split: documents}",
        r"data\.validation\.split: .*nothing else is held out",
    ),
    "masking of a causal model": (
        TEXT,
        "source: text, path: a.txt, masking: {unit: word}",
        r"x\.yaml:3: data\.masking: .*is for masked models \(bert\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOW)
def test_what_a_layout_cannot_read_is_told_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, keys, words = SHOW[name]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "model: {family: llama, layers: 1, embed: 8, heads: 1, mlp: 8, vocab: 300}\nrun: {steps: 3}\n"
        f"data: {{seq: 16, batch: 2, {keys.replace('FOLDER', str(tmp_path))}}}\n"
    )
    ran = run("show", "x.yaml")
    assert ran.exit_code == 2, (ran.output, ran.exception)
    said = ran.output.strip().splitlines()
    assert len(said) == 1 and re.search(words, said[0]), said


# ------------------------------------------------------------------------------------------------ while it runs

TWO_RANKS = """
cluster: {gpus_per_node: 2}
mesh: {dp: {size: 2}}
shard: {compute: {batch: dp}}
model: {family: llama, layers: 1, embed: 16, heads: 2, mlp: 16, vocab: 256}
data: {DATA, seq: 16, batch: 4}
run: {steps: 100000, compile: off, folder: run, save_every: 1000000}
"""
RUNNING = {
    "a shard of a stream": (
        "source: jsonl, path: 's*.jsonl', stream: true, shuffle: 8, validation: {fraction: 0}",
        lambda folder: [path.unlink() for path in folder.glob("s*.jsonl")],
        r"s\d\.jsonl: cannot be read: No such file or directory",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNNING)
def test_files_that_vanish_in_the_middle_of_a_run_end_all_of_its_ranks(tmp_path: Path, name: str) -> None:
    """The thread that reads ahead meets it on every rank, in the middle of an epoch; nobody waits for nobody."""
    keys, damage, words = RUNNING[name]
    for i in range(8):
        lines = [json.dumps({"text": f"document {i} {n}"}) for n in range(500)]
        (tmp_path / f"s{i}.jsonl").write_text("\n".join(lines))
    (tmp_path / "x.yaml").write_text(TWO_RANKS.replace("DATA", keys))
    command = [sys.executable, "-m", "dtrain.cli", "run", "x.yaml"]
    here = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | here, stderr=subprocess.PIPE, text=True) as ran:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while ran.poll() is None and not (metrics.exists() and '"step": 5,' in metrics.read_text()):
            time.sleep(0.1)
        damage(tmp_path)
        _, said = ran.communicate(timeout=300)
    assert ran.returncode == 1
    assert re.search(words, said.strip().splitlines()[-1]), said
    assert "Traceback" not in said
