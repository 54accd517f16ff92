"""`dtrain data pack` and `dtrain data show`: the same output from any number of workers, and after any interruption."""

from __future__ import annotations

import base64
import fcntl
import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dtrain import cli
from dtrain.data import DataConfig, DataError, batch, manifest, open_source, perplexity
from dtrain.data import pack as packing
from dtrain.data.pack import Options, options, pack
from dtrain.data.show import histogram, show
from dtrain.data.tokens import edges, open_megatron

BYTES = (".bin", ".idx")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_DOCUMENTS", 8)
    monkeypatch.setattr(packing, "_EVERY", 2)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for name in "ab":
        lines = [json.dumps({"text": f"{name}{i} " * (i % 9)}) for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "*.jsonl")


def made_by(folder: Path, name: str, paths: str, workers: int = 1, **changes: Any) -> dict[str, bytes]:
    pack(str(folder / name), Options((paths,), **changes), workers, lambda line: None)
    files = [p for p in folder.iterdir() if p.name.startswith(f"{name}.") or p.name.startswith(f"{name}-")]
    assert not [p for p in files if "part" in p.name]
    return {p.name[len(name) :]: p.read_bytes() for p in files}


def test_what_is_packed_is_what_is_read(tmp_path: Path, corpus: str) -> None:
    made = made_by(tmp_path, "out", corpus)
    about = json.loads(made[".json"])
    assert (about["documents"], about["left_out"], about["dtype"]) == (176, {"empty": 24}, "uint16")
    assert about["tokens"] == len(made[".bin"]) // 2 and about["eos"] == 0
    assert about["highest"] == max(open_megatron(str(tmp_path / "out")).tokens)
    texts = [t["text"] for n in "ab" for t in map(json.loads, (tmp_path / f"{n}.jsonl").read_text().splitlines())]
    kept = [t for t in texts if t]
    assert np.frombuffer(made[".bin"], np.uint16).tolist() == [b for t in kept for b in [*t.encode(), 0]]
    shard = open_megatron(str(tmp_path / "out"))
    assert np.diff(edges(shard, 0, shard.tokens.size)).tolist() == [len(t) + 1 for t in kept[:-1]]
    assert about["words"] == sum(len(t.split()) for t in kept)


def test_the_number_of_workers_changes_nothing(tmp_path: Path, corpus: str) -> None:
    one = made_by(tmp_path, "one", corpus, hold_out=0.2)
    two = made_by(tmp_path, "two", corpus, workers=2, hold_out=0.2)
    assert one == two and set(one) == {".bin", ".idx", ".json", "-valid.bin", "-valid.idx", "-valid.json"}
    counts = [json.loads(one[f"{side}.json"])["documents"] for side in ("", "-valid")]
    assert sum(counts) == 176 and 15 < counts[1] < 60


@pytest.mark.parametrize("stop", [3, 4, 9, 20])
def test_an_interrupted_packing_goes_on(
    tmp_path: Path, corpus: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made_by(tmp_path, "whole", corpus, hold_out=0.1, bad="skip")
    original, done = packing._tokenised, [0]

    def dying(*args: Any) -> Iterator[Any]:
        for n, each in enumerate(original(*args)):
            done[0] += 1
            if n == stop:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(packing, "_tokenised", dying)
    with pytest.raises(KeyboardInterrupt):
        made_by(tmp_path, "parts", corpus, hold_out=0.1, bad="skip")
    assert not (tmp_path / "parts.json").exists()
    first, done[0] = done[0], 0

    def counting(*args: Any) -> Iterator[Any]:
        for each in original(*args):
            done[0] += 1
            yield each

    monkeypatch.setattr(packing, "_tokenised", counting)
    said: list[str] = []
    pack(str(tmp_path / "parts"), Options((corpus,), hold_out=0.1, bad="skip"), 1, said.append)
    assert {k: (tmp_path / f"parts{k}").read_bytes() for k in whole} == whole
    assert said[0].startswith("goes on after document") and first + done[0] <= 28 + 3  # 28 batches, few of them twice


@pytest.mark.parametrize("stop", [0, 1])
def test_a_packing_that_is_stopped_while_it_finishes_goes_on(
    tmp_path: Path, corpus: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the manifest of OUT, or between it and that of OUT-valid."""
    whole = made_by(tmp_path, "whole", corpus, hold_out=0.1)
    write, calls = manifest.write, [0]

    def dying(prefix: str, made: manifest.Manifest) -> None:
        if calls[0] == stop:
            raise KeyboardInterrupt
        calls[0] += 1
        write(prefix, made)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(manifest, "write", dying)
        made_by(tmp_path, "stopped", corpus, hold_out=0.1)
    assert (tmp_path / "stopped.bin").exists() and (tmp_path / "stopped.json").exists() == bool(stop)
    assert made_by(tmp_path, "stopped", corpus, hold_out=0.1) == whole


def test_what_is_there_is_never_written_over(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.bin").write_bytes(b"of another program")
    with pytest.raises(DataError, match=r"out\.bin: is there already; remove it, or choose another OUT"):
        made_by(tmp_path, "out", corpus)
    assert (tmp_path / "out.bin").read_bytes() == b"of another program"
    with open(tmp_path / "busy.bin.part", "w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"busy\.bin\.part: another process is packing into it"):
            made_by(tmp_path, "busy", corpus)


def test_parts_that_are_shorter_than_the_journal_says_are_refused(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(packing._Sink, "finish", interrupted)
        made_by(tmp_path, "out", corpus)
    (tmp_path / "out.bin.part").unlink()
    with pytest.raises(DataError, match=r"out\.bin\.part: has 0 bytes, but the journal beside it says [\d,]+; remove"):
        made_by(tmp_path, "out", corpus)
    (tmp_path / "out.part.json").write_text("{oops")
    with pytest.raises(DataError, match=r"out\.part\.json: is no journal of a packing"):
        made_by(tmp_path, "out", corpus)


def interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_a_worker_that_dies_and_a_disk_that_is_full_are_one_line(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, words in (
        (
            BrokenProcessPool("a process in the pool died"),
            "a worker was killed, often for want of memory; the same",
        ),
        (OSError(28, "No space left on device", "out.bin.part"), r"out\.bin\.part: No space left on device; the same"),
    ):

        def failing(*args: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(packing, "_tokenised", failing)
        with pytest.raises(DataError, match=words) as e:
            made_by(tmp_path, "out", corpus)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("bad", ["error", "skip"])
def test_wikitext_that_is_not_utf8_is_an_error_or_counted(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"well @-@ known \xff")
    (tmp_path / "b.txt").write_bytes(b"well @-@ known")
    if bad == "error":
        with pytest.raises(DataError, match=r"a\.txt: not UTF-8"):
            made_by(tmp_path, "out", str(tmp_path / "*.txt"), wikitext=True)
        return
    made = made_by(tmp_path, "out", str(tmp_path / "*.txt"), wikitext=True, bad=bad)
    about = json.loads(made[".json"])
    assert (about["left_out"], about["documents"], about["words"]) == ({"not UTF-8": 1}, 1, 3)


def test_held_out_words_of_wikitext_are_those_of_held_out_documents(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(" ".join(["a @-@ b"] * (i + 1)))
    made = made_by(tmp_path, "out", str(tmp_path / "*.txt"), wikitext=True, hold_out=0.3)
    one, other = (json.loads(made[f"{side}.json"]) for side in ("", "-valid"))
    assert one["words"] + other["words"] == 3 * 820 and other["words"] > 0
    assert 2 * one["words"] > one["bytes"] // 4 > 0  # "a-b " for every three words


def test_a_journal_of_another_command_is_not_gone_on_with(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "out.part.json").write_text(json.dumps({"of": {}}))
    with pytest.raises(DataError, match=r"out\.part\.json: is of another command, or its input has changed"):
        made_by(tmp_path, "out", corpus)


def test_sixteen_bits_up_to_65536_ids_and_never_a_wrap(tmp_path: Path) -> None:
    assert [manifest.dtype_for(n) for n in (256, 65_536, 65_537, 128_256)] == ["u2", "u2", "i4", "i4"]
    work = packing._Work(Options(("x",)), None, 70_000, "<u2")
    used = packing.tokenizer.load("bytes")
    with pytest.raises(DataError, match="x: id 70000 does not fit uint16"):
        packing._tokenise(used, work, [("x", "text")])


def test_an_id_of_70000_is_packed_and_read_back(tmp_path: Path) -> None:
    """A tokenizer of 70,001 ranks (Llama 3's file is like it), of which the last is a word."""
    pytest.importorskip("tiktoken")
    ranks = [bytes([i]) for i in range(256)] + [b"\xff%07d" % i for i in range(256, 70_000)] + [b" fox"]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks))
    (tmp_path / "t.tiktoken").write_bytes(b"".join(lines))
    (tmp_path / "a.txt").write_text("A fox")
    made = made_by(tmp_path, "out", str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "t.tiktoken"), eos=False)
    about = json.loads(made[".json"])
    assert (about["vocab"], about["dtype"], about["highest"]) == (70_002, "int32", 70_000)
    assert open_megatron(str(tmp_path / "out")).tokens.tolist() == [65, 70_000]  # not 4464


def packed(tmp_path: Path, corpus: str, **changes: Any) -> DataConfig:
    made_by(tmp_path, "out", corpus)
    return DataConfig("megatron", 16, 2, 256, paths=(str(tmp_path / "out"),), validation=0.0, **changes)


@pytest.mark.parametrize("where", [".bin", ".idx"])
def test_a_file_that_changed_since_it_was_packed_is_refused(tmp_path: Path, corpus: str, where: str) -> None:
    cfg = packed(tmp_path, corpus)
    path = tmp_path / f"out{where}"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # in the .idx: where the last document ends
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"out\{where}: is not what .*out\.json describes: it changed"):
        open_source(cfg)
    path.write_bytes(raw[:-2])
    with pytest.raises(DataError, match=rf"out\{where}: "):
        open_source(cfg)
    path.unlink()
    with pytest.raises(DataError, match=rf"out\{where}: does not exist"):
        open_source(cfg)


def test_a_vocabulary_or_tokenizer_other_than_the_manifests_is_refused(tmp_path: Path, corpus: str) -> None:
    cfg = packed(tmp_path, corpus)
    with pytest.raises(
        DataError, match=r"model\.vocab: 90 is smaller than what .*: its highest id is 98, its tokenizer"
    ):
        open_source(replace(cfg, vocab=90))
    about = manifest.read(str(tmp_path / "out"))
    assert about is not None
    manifest.write(str(tmp_path / "out"), replace(about, format=99))
    with pytest.raises(DataError, match="has format 99; this dtrain reads up to 1: update it"):
        open_source(cfg)


def test_answers_stay_the_only_targets_when_packed(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}))
    made_by(tmp_path, "out", str(tmp_path / "c.jsonl"), chat=True)
    cfg = DataConfig("megatron", 100, 1, 256, paths=(str(tmp_path / "out"),), validation=0.0, packing="none")
    labels = batch(open_source(cfg), 0, [0])["labels"][0]
    assert bytes(labels[labels >= 0].tolist()) == b"ho<|im_end|>\n"


def test_show_tells_what_there_is_and_what_a_model_sees(tmp_path: Path, corpus: str) -> None:
    cfg = packed(tmp_path, corpus, packing="best-fit", document_mask=True, steps=10)
    text = "\n".join(show(cfg, samples=1, whole=True))
    assert "176 documents; " in text and "every byte is as packed (sha256)" in text
    assert "of their places filled" in text and "read 0." in text and "times in 10 steps" in text
    assert "document from 0 " in text and "given " in text and "predicted " in text
    lines = histogram(np.array([1, 2, 3, 3, 900]))
    assert lines[0] == "  5 documents of 1 to 900 tokens, median 3"
    assert [int(line.split("tokens")[1].split()[0].replace(",", "")) for line in lines[1:]] == [1, 3, *[0] * 7, 1]


def test_show_of_a_stream_reads_samples_and_counts_what_it_left_out(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i}"}) for i in range(200)]
    lines[3], lines[4] = "{oops", json.dumps({"text": ""})
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    paths = (str(tmp_path / "s.jsonl"),)
    cfg = DataConfig(
        "jsonl",
        16,
        2,
        256,
        paths=paths,
        validation=0.0,
        stream=True,
        shuffle=0,
        bad="skip",
        document_mask=True,
    )
    said = list(show(cfg, samples=3))
    size = (tmp_path / "s.jsonl").stat().st_size
    assert said[1:3] == [
        f"train: jsonl ({paths[0]}): 1 file, {size / 1e6:,.1f} MB",
        f"jsonl ({paths[0]}): read as the run goes on",
    ]
    assert [line for line in said if line.startswith("sample")] == [
        "sample 0 (step 1, row 0):", "sample 1 (step 1, row 1):", "sample 2 (step 2, row 0):",
    ]  # fmt: skip
    at = said.index("sample 0 (step 1, row 0):")
    assert [" ".join(line.split()) for line in said[at + 1 : at + 5]] == [
        "0 to 0 document from 0 given 'd'",
        "1 to 10 document from 0 predicted 'ocument 0\\x00'",
        "11 to 11 document from 11 given 'd'",
        "12 to 15 document from 11 predicted 'ocum', then predicted 'e'",
    ]
    assert said[-2:] == [
        "documents left out of what was read (empty): 1",
        "documents left out of what was read (not JSON): 1",
    ]


def test_the_commands(tmp_path: Path, corpus: str) -> None:
    out = str(tmp_path / "out")
    ran = CliRunner().invoke(cli.app, ["data", "pack", corpus, out, "eos=false", "source=jsonl", "--workers", "1"])
    assert ran.exit_code == 0, ran.output
    assert "176 documents" in ran.output and "MB/s" in ran.output and "24 left out (empty)" in ran.output
    again = CliRunner().invoke(cli.app, ["data", "pack", corpus, out])
    assert again.exit_code == 2 and "is there already" in again.output
    wrong = CliRunner().invoke(cli.app, ["data", "pack", corpus, out, "tokeniser=x"])
    assert wrong.exit_code == 2 and "tokeniser: is nothing that packing asks for" in wrong.output
    layout = tmp_path / "x.yaml"
    layout.write_text(
        "model: {family: llama, layers: 1, embed: 8, heads: 1, mlp: 8, vocab: 256}\n"
        f"data: {{source: megatron, path: {out}, seq: 16, batch: 2}}\nrun: {{steps: 3}}\n"
    )
    shown = CliRunner().invoke(cli.app, ["data", "show", str(layout), "--samples", "1"])
    assert shown.exit_code == 0 and "sample 0 (step 1, row 0):" in shown.output


@pytest.mark.parametrize(
    ("values", "words"), [({"eos": 3}, "eos: 3 is not allowed"), ({"bad": "x"}, "bad: 'x' must be")]
)
def test_settings_of_a_wrong_kind_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        options(["x"], values, 0.0, False)


# ------------------------------------------------------------------------------------------------ perplexity


def test_windows_predict_every_token_once_with_what_came_before(tmp_path: Path) -> None:
    text = bytes(range(33, 33 + 60))
    (tmp_path / "a.txt").write_bytes(text * 3)
    (tmp_path / "v.txt").write_bytes(text)
    paths = {"paths": (str(tmp_path / "a.txt"),), "valid_paths": (str(tmp_path / "v.txt"),)}
    source = open_source(DataConfig("text", 16, 4, 256, validation=0.0, stride=5, **paths))  # type: ignore[arg-type]
    seen: dict[int, int] = {}
    for step in range(-(-source.valid // 4)):
        out = batch(source, step, range(4), "valid")
        for tokens, labels in zip(out["tokens"], out["labels"], strict=True):
            for i in range(16):
                if labels[i] >= 0:
                    assert int(labels[i]) not in seen
                    seen[int(labels[i])] = i + 1
                    assert bytes(tokens[: i + 1].tolist()) == text[int(labels[i]) - 33 - (i + 1) : int(labels[i]) - 33]
    assert sorted(seen) == list(text[1:])
    assert min(n for label, n in seen.items() if label > 33 + 16) > 16 - 5  # at least seq - stride of context
    assert source.valid == 1 + -(-(60 - 1 - 16) // 5)


def test_perplexity_a_word_does_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 300)
    (tmp_path / "v.txt").write_bytes(b"one two three four five")
    paths = {"paths": (str(tmp_path / "a.txt"),), "valid_paths": (str(tmp_path / "v.txt"),)}
    cfg = DataConfig("text", 8, 4, 256, validation=0.0, stride=4, **paths)  # type: ignore[arg-type]
    source = open_source(cfg)
    said = perplexity.report(source, 0.5, 99)
    # 22 tokens of 0.5 nats over 5 words: exp(11 / 5)
    assert said == "held-out perplexity 1.65 a token, 9.03 a word (22 tokens, 5 words)"
    assert "of 1 of 2 batches" in str(perplexity.report(source, 0.5, 1))
    assert perplexity.report(open_source(replace(cfg, stride=0)), 0.5, 99) is None
    assert perplexity.perplexity(800) == float("inf")


def test_wikitexts_tokens_become_english_and_words_are_those_before(tmp_path: Path) -> None:
    text = ' = Title = \n The " old " ship , built in 1 @,@ 900 ( or 3 @.@ 5 years on ) , '
    text += "wasn 't the crew 's well @-@ known .\n"
    want = " = Title =\nThe \"old\" ship, built in 1,900 (or 3.5 years on), wasn't the crew's well-known.\n"
    assert perplexity.natural(text) == want
    (tmp_path / "w.txt").write_text(text)
    made_by(tmp_path, "out", str(tmp_path / "w.txt"), wikitext=True)
    about = manifest.read(str(tmp_path / "out"))
    assert about is not None and about.words == len(text.split()) + 1 and about.tokens == len(want) + 1
