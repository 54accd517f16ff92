"""Tokenizers of three libraries behind one record, and conversations of which only the answers are learnt."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.data import DataConfig, DataError, batch, chat, encode, open_source, tokenizer
from dtrain.data.documents import Faults

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")
regex = pytest.importorskip("regex")  # tiktoken needs it

TEXT = "The quick brown fox jumps over the lazy dog, again and again. 12 34!\n"
CORPUS = [TEXT, "A fox is a fox; the dog sleeps.\n", "Numbers like 1234 and words like again.\n"] * 30
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def hugging_face(folder: Path) -> str:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=MARKS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def word_piece(folder: Path) -> str:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def sentence_piece(folder: Path) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=300, byte_fallback=True, model_type="bpe",
        hard_vocab_limit=False, remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return str(folder / "tokenizer.model")


def tik_token(folder: Path) -> str:
    ranks = [bytes([i]) for i in range(256)] + [b" t", b"he", b" the", b"ag", b"ai", b" f", b"ox", b" fox"]
    text = b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks))
    (folder / "tokenizer.model").write_bytes(text)  # Llama 3 calls it so too
    return str(folder / "tokenizer.model")


MAKE: dict[str, Callable[[Path], str]] = {
    "hugging face": hugging_face,
    "sentencepiece": sentence_piece,
    "tiktoken": tik_token,
    "bytes": lambda folder: "bytes",
}


@pytest.mark.parametrize("kind", MAKE)
def test_text_comes_back_and_the_size_bounds_every_id(tmp_path: Path, kind: str) -> None:
    made = tokenizer.load(MAKE[kind](tmp_path))
    (ids,) = made.encode([TEXT])
    assert made.decode(ids).strip() == TEXT.strip()
    assert min(ids) >= 0 and max(ids) < made.size and len(ids) <= len(TEXT.encode()) + 1
    assert made.encode([TEXT, "x", TEXT])[2] == ids and made.hash == tokenizer.load(MAKE[kind](tmp_path)).hash
    assert len(made.continues()) == len(made.ends()) == made.size


def test_tiktoken_equals_tiktoken(tmp_path: Path) -> None:
    made = tokenizer.load(tik_token(tmp_path))
    assert made.size == 265 and made.special == {"<|endoftext|>": 264} and made.eos == 264
    assert made.encode([" the fox"])[0] == [258, 263]


@pytest.mark.parametrize(
    ("name", "ranks"), [("r50k_base", 50256), ("p50k_base", 50281), ("cl100k_base", 100256), ("o200k_base", 199998)]
)
def test_openais_files_are_read_as_tiktoken_reads_them(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *names, **more: {})  # it would fetch them
    theirs = public.ENCODING_CONSTRUCTORS[name]()
    pattern, special = tokenizer._unwritten(ranks)
    assert special == theirs["special_tokens"]
    text = "I'LL say it's 12345 °C,\r\n\n  and\tHELLO wOrld's  ÅÉ Ωmega  中文 don't/x \n "
    words = [regex.findall(p, text) for p in (pattern, theirs["pat_str"])]
    assert words[0] == words[1] and len(words[0]) > 20


def test_llama_3s_special_tokens_have_their_ids() -> None:
    names = tokenizer._llama3()
    at = {n: 128_000 + i for i, n in enumerate(names)}
    assert len(names) == len(at) == 256
    assert at["<|begin_of_text|>"] == 128_000 and at["<|end_of_text|>"] == 128_001
    assert at["<|start_header_id|>"] == 128_006 and at["<|end_header_id|>"] == 128_007
    assert at["<|eot_id|>"] == 128_009 and at["<|reserved_special_token_4|>"] == 128_008
    assert at["<|reserved_special_token_5|>"] == 128_010 and at["<|reserved_special_token_250|>"] == 128_255


def test_a_special_token_written_in_a_document_is_only_text(tmp_path: Path) -> None:
    for kind in ("hugging face", "tiktoken"):
        (tmp_path / kind).mkdir()
        made = tokenizer.load(MAKE[kind](tmp_path / kind))
        (ids,) = made.encode(["a<|endoftext|>b"])
        assert made.eos not in ids and made.eos in made.encode_special("a<|endoftext|>b")


def test_beginning_and_end_are_the_tokenizers_own_or_named(tmp_path: Path) -> None:
    made = tokenizer.load(hugging_face(tmp_path))
    assert tokenizer.token(made, True, "eos") == 0 and tokenizer.token(made, False, "eos") is None
    assert tokenizer.token(made, "<|im_end|>", "eos") == 2
    with pytest.raises(DataError, match=r"data\.bos: .* names none"):
        tokenizer.token(made, True, "bos")
    with pytest.raises(DataError, match=r"data\.eos: '</s>' is no special token of .*it has <\|endoftext\|>, <\|im_st"):
        tokenizer.token(made, "</s>", "eos")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|im_start|>"}, "eos_token": null}')
    again = tokenizer.load(str(tmp_path))
    assert again.bos == 1 and again.eos == 0


def config(folder: Path, texts: list[object], key: str = "text", **changes: object) -> DataConfig:
    (folder / "a.jsonl").write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    given = {"seq": 8, "batch": 1, "vocab": 320, "paths": (str(folder / "a.jsonl"),), "validation": 0.0} | changes
    return DataConfig("jsonl", **given)  # type: ignore[arg-type]


def test_documents_begin_and_end_as_asked(tmp_path: Path) -> None:
    name = hugging_face(tmp_path)
    cfg = config(tmp_path, ["fox dog", "again"], tokenizer=name, bos="<|im_start|>", seq=2)
    source = open_source(cfg)
    made = tokenizer.load(name)
    a, b = made.encode(["fox dog", "again"])
    assert source.parts[0].stream is not None
    assert source.parts[0].stream.shards[0].tokens.tolist() == [1, *a, 0, 1, *b, 0]


def test_a_vocabulary_larger_than_the_models_is_refused_before_the_start(tmp_path: Path) -> None:
    name = hugging_face(tmp_path)
    size = tokenizer.load(name).size
    with pytest.raises(DataError, match=rf"model\.vocab: 256 is smaller than the {size} ids of data\.tokenizer"):
        open_source(config(tmp_path, [TEXT], tokenizer=name, vocab=256))
    with pytest.raises(DataError, match="does not exist"):
        tokenizer.load(str(tmp_path / "nothing"))
    (tmp_path / "junk.model").write_bytes(b"\x00\x01junk")
    with pytest.raises(DataError, match=r"is no tokenizer\.json, SentencePiece or tiktoken"):
        tokenizer.load(str(tmp_path / "junk.model"))


@pytest.mark.parametrize("stream", [False, True], ids=["at the start", "as a stream"])
def test_a_tokenizer_larger_than_the_model_is_refused_with_the_highest_id_in_the_data(
    tmp_path: Path, stream: bool
) -> None:
    """260 entries of which 4 were added, a model of 256, and data that hold the last id."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<s>", "</s>", "<pad>", "<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    name = str(tmp_path / "tokenizer.json")
    assert tokenizer.load(name).size == 260
    cfg = config(tmp_path, [TEXT, "x"], tokenizer=name, vocab=256, eos="<end>", stream=stream)
    with pytest.raises(DataError, match=r"model\.vocab: 256 is smaller than the 260 ids of .*\(added tokens counted\); "
                       r"the highest id in the data is 259; set at least 260"):  # fmt: skip
        open_source(cfg)
    assert open_source(replace(cfg, vocab=260)).streams == stream
    with pytest.raises(DataError, match=r"the highest id in the data is 220; set at least 260"):
        open_source(replace(cfg, eos=False))


def test_a_refusal_looks_at_no_more_than_the_beginning_of_a_large_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 3_000_000 + b"z")
    with pytest.raises(DataError, match=r"the highest id in the first 1\.0 MB of the data is 97; set at least 256"):
        open_source(DataConfig("text", 8, 1, 100, paths=(str(tmp_path / "a.txt"),)))


def test_text_that_is_not_utf8_is_an_error_or_counted(tmp_path: Path) -> None:
    name = hugging_face(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"fox \xff\xfe dog")
    (tmp_path / "good.txt").write_bytes(TEXT.encode() * 3)
    cfg = DataConfig("text", 8, 1, 320, paths=(str(tmp_path / "*.txt"),), validation=0.0, tokenizer=name)
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8"):
        open_source(cfg)
    assert open_source(replace(cfg, bad="skip")).notes == ("data: documents left out (not UTF-8): 1",)


# ------------------------------------------------------------------------------------------------ conversations

CHAT = [
    {"role": "user", "content": "fox?"},
    {"role": "assistant", "content": "the dog"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "and again."},
]


@pytest.mark.parametrize("kind", ["hugging face", "tiktoken", "bytes"])
def test_only_answers_and_what_ends_them_are_learnt(tmp_path: Path, kind: str) -> None:
    made = tokenizer.load(MAKE[kind](tmp_path))
    ids, learn = chat.conversation(made, CHAT)
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert made.decode(ids.tolist()) == whole
    runs: list[list[int]] = []
    for i, on in enumerate(learn):
        if on and (i == 0 or not learn[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(int(ids[i]))
    assert [made.decode(r) for r in runs] == ["the dog<|im_end|>\n", "and again.<|im_end|>\n"]


def test_the_tokenizers_own_template_is_used(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    made = tokenizer.load(str(tmp_path))
    ids, learn = chat.conversation(made, CHAT[:2])
    assert made.decode(ids.tolist()) == "[user]fox?<|endoftext|>[assistant]the dog<|endoftext|>"
    assert made.decode(ids[learn].tolist()) == "the dog<|endoftext|>"


# What real templates do: marks within a line and over lines, a turn that is left out, a loop that ends early, JSON.
MARKED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
    "lines": "{%- for m in messages %}\n    {%- if m['role'] == 'assistant' %}\n        {%- generation -%}\n"
    "        {{ m['content'] }}{{ eos_token }}\n        {%- endgeneration %}\n    {%- else %}\n"
    "        {{- '[' + m['role'] + ']' + m['content'] }}\n    {%- endif %}\n{%- endfor %}",
    "last only": "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if not loop.last %}{{ m.content | tojson }}{% continue %}{% endif %}> "
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}
CHATS = [
    CHAT,
    [{"role": "system", "content": "again & again <b>"}, *CHAT[:2]],
    [{"role": "user", "content": "fox\n\n"}, {"role": "assistant", "content": " ünï 中文 12"}],
    [{"role": "assistant", "content": "the lazy dog"}, *CHAT],
]


def fast(folder: Path, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("talk", CHATS, ids=["turns", "system", "unicode", "answer first"])
def test_what_a_template_marks_is_what_transformers_marks(tmp_path: Path, name: str, talk: list[Any]) -> None:
    hugging_face(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(MARKED[name])
    theirs = fast(tmp_path, MARKED[name]).apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, learn = chat.conversation(tokenizer.load(str(tmp_path)), talk)
    assert ids.tolist() == theirs["input_ids"]
    assert learn.astype(int).tolist() == theirs["assistant_masks"] and 0 < learn.sum() < len(learn)


@pytest.mark.parametrize("talk", CHATS, ids=["turns", "system", "unicode", "answer first"])
def test_a_template_without_marks_is_as_one_that_marks_the_answers(tmp_path: Path, talk: list[Any]) -> None:
    hugging_face(tmp_path)
    marked = (
        MARKED["chatml"]
        .replace("{% endgeneration %}{% else %}", "\n{% endgeneration %}{% else %}")
        .replace("<|im_end|>{% endif %}\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
    )
    theirs = fast(tmp_path, marked).apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, learn = chat.conversation(tokenizer.load(str(tmp_path)), talk)  # ChatML
    assert ids.tolist() == theirs["input_ids"] and learn.astype(int).tolist() == theirs["assistant_masks"]


def test_a_template_that_writes_a_turn_otherwise_when_more_follow_has_to_mark_answers(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    made = tokenizer.load(str(tmp_path))
    with pytest.raises(DataError, match=r"in another way when more follow, .* mark it .* \{% generation %\}") as e:
        chat.conversation(made, CHAT)
    assert "\n" not in str(e.value)
    with pytest.raises(DataError, match=r"U\+FDD0"):
        chat.conversation(made, [{"role": "user", "content": "a\ufdd0b"}, *CHAT])


def test_labels_of_a_batch_are_the_answers(tmp_path: Path) -> None:
    name = hugging_face(tmp_path)
    cfg = config(tmp_path, [CHAT], "messages", tokenizer=name, chat=True, packing="none", seq=64)
    out = batch(open_source(cfg), 0, [0])
    made = tokenizer.load(name)
    labels = out["labels"][0]
    assert made.decode(labels[labels >= 0].tolist()) == "the dog<|im_end|>\nand again.<|im_end|>\n"
    (at,) = torch.nonzero(labels >= 0, as_tuple=True)
    assert torch.equal(labels[at[:-1]], out["tokens"][0, at[:-1] + 1])  # the last one is a label only


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ([{"role": "user"}], r'a message must be like \{"role"'),
        ([{"role": "user", "content": "x"}], "has no answer of the assistant"),
    ],
)
def test_conversations_that_teach_nothing_are_errors_or_counted(tmp_path: Path, one: object, words: str) -> None:
    cfg = config(tmp_path, [one, CHAT], "messages", chat=True, packing="none", seq=256)
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {words}"):
        open_source(cfg)
    source = open_source(replace(cfg, bad="skip"))
    assert source.train == 1 and source.notes == ("data: documents left out (not a conversation): 1",)


def test_empty_documents_are_counted() -> None:
    faults = Faults()
    found = encode.encode([("a", ""), ("b", b""), ("c", "x")], tokenizer.load("bytes"), None, 0, False, faults)
    assert [d.ids.tolist() for d in found] == [[120, 0]] and faults.counts["empty"] == 2
