"""`dtrain eval`: the protocol of WikiText-103, held to a straight reimplementation over transformers' models."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import test_sample
import test_train
import torch
from typer.testing import CliRunner, Result

from dtrain import cli
from dtrain.data import perplexity

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TEXT = ' = Sails = \n \n The " old " ship , built in 1 @,@ 900 ( or 3 @.@ 5 years on ) , was well @-@ known . \n'


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def dtrain(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, words)])


def said(*words: object) -> dict[str, Any]:
    result = dtrain(*words, "--json")
    assert result.exit_code == 0, result.output
    out: dict[str, Any] = json.loads(result.stdout)
    return out


def negative_log_likelihood(model: Any, ids: list[int], seq: int, stride: int) -> float:
    """Token by token, as the paper writes the sum: each from at most the `seq` tokens before it, those that the first
    window that reaches it has."""
    total = 0.0
    with torch.no_grad():
        for t in range(1, len(ids)):
            window = 0 if t <= seq else math.ceil((t - seq) / stride)
            given = torch.tensor([ids[window * stride : t]])
            total -= float(model(given).logits[0, -1].double().log_softmax(-1)[ids[t]])
    return total


@pytest.mark.parametrize(("name", "seq", "stride"), [("gpt2", 16, 5), ("gpt2", 24, 24), ("llama3.1", 16, 1)])
def test_perplexity_equals_a_sum_token_by_token(tmp_path: Path, name: str, seq: int, stride: int) -> None:
    model = test_sample.folder(tmp_path, name, bos_token_id=None, eos_token_id=None)
    (tmp_path / "t.txt").write_text(TEXT)
    got = said(tmp_path, tmp_path / "t.txt", "--seq", seq, "--stride", stride, "--batch", 3, "--precision", "fp64")
    ids = list(TEXT.encode())
    total = negative_log_likelihood(model.double(), ids, seq, stride)
    assert got["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-6)
    assert got["perplexity_a_token"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)
    assert (got["tokens"], got["words"]) == (len(ids) - 1, len(TEXT.split()))
    assert got["perplexity_a_word"] == pytest.approx(math.exp(total / len(TEXT.split())), rel=1e-4)


def test_wikitexts_perplexity_is_that_of_its_own_tokens(tmp_path: Path) -> None:
    """The text is made English before the model reads it; the sum is divided by the tokens that there were, ends of
    lines among them."""
    model = test_sample.folder(tmp_path, "gpt2", bos_token_id=None, eos_token_id=None)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    got = said(tmp_path, tmp_path / "t.txt.gz", "--wikitext", "--seq", 16, "--stride", 4, "--precision", "fp64")
    english = '= Sails =\n\nThe "old" ship, built in 1,900 (or 3.5 years on), was well-known.\n'
    assert perplexity.natural(TEXT).strip() == english.strip()
    ids = list(perplexity.natural(TEXT).encode())
    total = negative_log_likelihood(model.double(), ids, 16, 4)
    assert got["words"] == 3 + 2 + 25  # of its lines, and the ends of the first two
    assert got["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-6)
    assert got["perplexity_a_word"] == pytest.approx(math.exp(total / 30), rel=1e-4)
    line = dtrain(tmp_path, tmp_path / "t.txt.gz", "--wikitext", "--seq", 16, "--stride", 4).stdout
    assert line.startswith("held-out perplexity ") and f"({len(ids) - 1:,} tokens, 30 words)" in line


def test_a_run_and_the_command_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("def f(x):\n    return x + 1\n" * 9)
    made = test_train.make(
        tmp_path / "run", "run.steps=3", "run.eval_every=3",
        f"data.validation={{path: {tmp_path / 'v.txt'}, stride: 6, batches: 99}}",
    )  # fmt: skip
    test_train.alone(made)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [r["valid_loss"] for r in rows if r.get("step") == 3 and "valid_loss" in r]
    got = said(tmp_path / "run", tmp_path / "v.txt", "--stride", 6)
    assert got["seq"] == 16 and got["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_text_begins_as_the_models_texts_do(tmp_path: Path) -> None:
    from dtrain import evaluate, sample

    test_sample.folder(tmp_path, "llama3.1")
    (tmp_path / "t.txt").write_text("ab")
    source = sample.open_source(tmp_path)
    _, ask = evaluate.prepare(source, str(tmp_path / "t.txt"), evaluate.How(), 1)
    assert ask.ids.tolist() == [*source.lead, 97, 98] and ask.seq == source.context


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.txt"], "none.txt: cannot be read: No such file"),
        (["t.txt", "--stride", "33", "--seq", "32"], "--stride 33: windows of 32 tokens predict at most 32"),
        (["t.txt", "--seq", "4096"], "--seq 4096: the model has 48 positions; give at most 48"),
        (["bad.txt"], "bad.txt: not UTF-8"),
        (["one.txt"], "one.txt: has 1 tokens, so none to predict"),
        (["t.txt", "--precision", "int8"], "'int8'; allowed: fp32"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    test_sample.folder(tmp_path, "gpt2", bos_token_id=None, eos_token_id=None)
    for name, content in (("t.txt", b"some text"), ("bad.txt", b"\xff\xfe"), ("one.txt", b"x")):
        (tmp_path / name).write_bytes(content)
    result = dtrain(tmp_path, tmp_path / words[0], *words[1:])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split()), result.output
