"""`dtrain sample`: what is read, what is printed, over one rank and several, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import test_hf
import test_train
import torch
from typer.testing import CliRunner, Result

from dtrain import checkpoint, cli, convert, data, sample
from dtrain.generate import Choice
from dtrain.layout import Layout
from dtrain.rank import Rank
from dtrain.sample import Ask

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PROMPT = "def f(x):"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def dtrain(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["sample", *map(str, words)])


def folder(path: Path, name: str = "llama3.1", **more: Any) -> Any:
    """A random model of 256 bytes with a tokenizer that knows them."""
    import transformers

    config, cls, values = test_hf.MODELS[name]
    values = values | {"vocab_size": 256} | more
    torch.manual_seed(4)
    model = test_hf.quiet(lambda: getattr(transformers, cls)(getattr(transformers, config)(**values)).eval())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    test_hf.quiet(lambda: model.save_pretrained(path))
    (path / "tokenizer.json").write_text(json.dumps(convert._bytes()))
    return model


def theirs(model: Any, prompt: str, n: int) -> list[int]:
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None)
    return list(out[0, ids.shape[1] :].tolist())


def shown(prompt: str, new: list[int]) -> str:
    return (bytes(prompt.encode()) + bytes(new)).decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["llama3.1", "gpt2"])
def test_the_text_of_a_folder_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = folder(tmp_path, name, bos_token_id=None, eos_token_id=None)
    result = dtrain(tmp_path, "-p", PROMPT, "--prompt", "x", "--max-tokens", 20)
    assert result.exit_code == 0, result.output
    first, second = (shown(p, theirs(model, p, 20)) for p in (PROMPT, "x"))
    assert result.stdout == f"{first}\n\n{second}\n"
    # An id that ends texts ends this one, and is not shown. Generation ends with the context, too.
    stop = theirs(model, PROMPT, 5)[4]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [999, stop]}))
    new = theirs(model, PROMPT, {"llama3.1": 64, "gpt2": 48}[name] - len(PROMPT))
    end = new.index(stop)
    assert dtrain(tmp_path, "-p", PROMPT, "--max-tokens", 60).stdout == shown(PROMPT, new[:end]) + "\n"
    (tmp_path / "generation_config.json").write_text("{}")
    assert dtrain(tmp_path, "-p", PROMPT, "--max-tokens", 60).stdout == shown(PROMPT, new) + "\n"


def test_a_trained_model_is_sampled_as_its_export_is(tmp_path: Path) -> None:
    """A run's folder is its latest checkpoint. The run and what is exported of it say the same."""
    test_train.alone(test_train.make(tmp_path / "run", "run.steps=6"))
    convert.export(tmp_path / "run", tmp_path / "out")
    words = ("-p", "im", "--max-tokens", 9, "--temperature", 0.8, "--top-k", 50, "--top-p", 0.95, "--seed", 3)
    texts = [dtrain(path, *words) for path in (tmp_path / "run", tmp_path / "run" / "step-6", tmp_path / "out")]
    assert [t.exit_code for t in texts] == [0, 0, 0], texts[0].output + texts[2].output
    assert len({t.stdout for t in texts}) == 1 and texts[0].stdout.startswith("im")
    assert dtrain(tmp_path / "run", *words[:-1], 4).stdout != texts[0].stdout
    # An imported model has no data of its own, and knows its tokenizer from what lies beside it.
    convert.import_folder(tmp_path / "out", tmp_path / "imported")
    assert dtrain(tmp_path / "imported", *words).stdout == texts[0].stdout


def _one_rank(rank: int, port: int, ask: Ask, layout: Layout, out: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sample.work(ask, layout, Rank(rank, layout.world, rank, "cpu", "gloo"), quiet=True)
    out.put((rank, said.getvalue()))


@pytest.mark.parametrize(("name", "how"), [("llama3.1", Choice(0.9, 40, 0.9, 1)), ("gpt2", Choice())])
def test_tensor_parallel_ranks_say_what_one_says(name: str, how: Choice, tmp_path: Path) -> None:
    """Real processes. Llama's single KV head is on both, and the vocabulary of 250 is padded."""
    folder(tmp_path, name, vocab_size=250, bos_token_id=None, eos_token_id=None)
    source = sample.open_source(tmp_path)
    one, two = (sample.prepare(source, ["abc", PROMPT], 12, how, tp) for tp in (1, 2))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sample.work(one[1], one[0], Rank(0, 1, 0, "cpu", "gloo"), quiet=True)
    assert len(said.getvalue()) > 24
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dtrain.train", "torch.distributed.checkpoint", "dtrain.models.llama"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = context.Queue()
    ranks = [context.Process(target=_one_rank, args=(r, port, two[1], two[0], out)) for r in range(2)]
    for p in ranks:
        p.start()
    try:
        got = dict(out.get(timeout=120) for _ in ranks)
    finally:
        for p in ranks:
            p.join(5)
            p.kill()
    assert got == {0: said.getvalue(), 1: ""}


def test_a_character_of_several_tokens_appears_whole() -> None:
    tokenizer = data.load_tokenizer("bytes")
    text = "né €5 \N{GRINNING FACE}!"
    new = list(text.encode())
    assert list(filter(None, sample.pieces(tokenizer, list(b"x"), new))) == list(text)
    assert list(filter(None, sample.pieces(tokenizer, [], new[:2]))) == ["n", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(sample.pieces(tokenizer, [], [0xFF, 0x41])) == "\N{REPLACEMENT CHARACTER}A"


def test_a_text_begins_as_the_model_learned_it(tmp_path: Path) -> None:
    """With the token that tokenizer.json puts before a text, once; which an empty prompt needs."""
    folder(tmp_path)
    made = convert._bytes() | {
        "added_tokens": [{"id": 255, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "post_processor": {
            "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [255], "tokens": ["<s>"]}},
        },
    }  # fmt: skip
    del made["model"]["vocab"]["\u00ff"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    source = sample.open_source(tmp_path)
    _, ask = sample.prepare(source, ["a", "<s>a", ""], 1, Choice(), 1)
    assert [ids for _, ids in ask.prompts] == [(255, 97), (255, 97), (255,)]


def test_mistakes_are_one_line_and_nothing_starts(tmp_path: Path) -> None:
    folder(tmp_path / "llama", vocab_size=120)
    test_hf.saved("bert", tmp_path / "bert")
    (tmp_path / "bert" / "tokenizer.json").write_text(json.dumps(convert._bytes()))
    test_train.alone(test_train.make(tmp_path / "run", "run.steps=1"))
    record = tmp_path / "run" / "step-1" / "run.json"
    values = json.loads(record.read_text())
    values["layout"]["data"]["tokenizer"] = "gone.json"
    record.write_text(json.dumps(values | {"format": 1}))
    (tmp_path / "run" / "step-1" / "manifest.json").unlink()
    (tmp_path / "bare").mkdir()
    for name, file, content in (("list", "generation_config.json", "[]"), ("torn", "tokenizer_config.json", "{")):
        shutil.copytree(tmp_path / "llama", tmp_path / name)
        (tmp_path / name / file).write_text(content)
    for said, *words in (
        ("is no checkpoint, no run's folder with one, and no Hugging Face folder", tmp_path / "none", "-p", "a"),
        ("has no model.safetensors", tmp_path / "bare", "-p", "a"),
        ("bert generates no text: it reads types, valid, order besides tokens", tmp_path / "bert", "-p", "a"),
        ("its tokenizer, gone.json, is not there; say which with --tokenizer", tmp_path / "run", "-p", "a"),
        ("an empty prompt needs a token that begins texts", tmp_path / "llama", "-p", ""),
        ("generation_config.json is no mapping of keys", tmp_path / "list", "-p", "a"),
        ("tokenizer_config.json' cannot be read", tmp_path / "torn", "-p", "a"),
        ("70 tokens leave no room in the model's 64 positions; give at most 63", tmp_path / "llama", "-p", "a" * 70),
        ("--prompt 'a\\udcff' is not UTF-8", tmp_path / "llama", "-p", "a\udcff"),
        ("'\N{REPLACEMENT CHARACTER}' is token 195 of", tmp_path / "llama", "-p", "a\N{LATIN SMALL LETTER THORN}"),
        ("the model's heads (4) must be divisible by tp 3; legal: 1, 2, 4", tmp_path / "llama", "-p", "a", "--tp", 3),
    ):
        (tmp_path / "bare" / "config.json").write_text((tmp_path / "llama" / "config.json").read_text())
        (tmp_path / "bare" / "tokenizer.json").write_text("{}")
        result = dtrain(*words)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not result.stdout, result.output
        assert said in result.stderr, result.stderr
    for said, *words in (
        ("5 needs a --temperature above 0", "--top-k", 5),
        ("0.5 needs a --temperature above 0", "--top-p", 0.5),
        ("give a probability above 0", "--temperature", 1, "--top-p", 0),
        ("give a probability above 0", "--temperature", 1, "--top-p", 1.1),
        ("give a number from 0", "--temperature", "nan"),
        ("give a number from 0", "--temperature", "inf"),
        ("give a number from 0", "--temperature", -1),
        ("allowed: fp32, bf16, fp16, fp64", "--precision", "fp8"),
    ):
        result = dtrain(tmp_path / "llama", "-p", "a", *words)
        assert result.exit_code == 2 and said in " ".join(result.stderr.split()), result.stderr


def test_a_model_of_a_file_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    own = Path(__file__).parent.parent / "layouts" / "my_model.py"
    model = f"file: {own}, layers: 1, embed: 8, heads: 2, mlp: 16, vocab: 256"
    test_train.alone(test_train.make(tmp_path, "run.steps=1", model=model))
    assert checkpoint.latest(tmp_path) == 1
    result = dtrain(tmp_path, "-p", "a")
    assert "say where it is with --model-file" in result.stderr and result.exit_code == 2
    result = dtrain(tmp_path, "-p", "a", "--model-file", own, "--max-tokens", 3)
    assert result.exit_code == 0 and result.stdout.startswith("a"), result.output
