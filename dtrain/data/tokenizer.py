"""Text to token ids and back: bytes, Hugging Face's tokenizer.json, SentencePiece models, tiktoken files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError, need

Flags = npt.NDArray[np.bool_]

BERT = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")
# How a tiktoken file cuts text into words before it merges bytes, and what its special tokens are, is not in the file.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K = _LLAMA.replace(r"|\s*[\r\n]+", r"|\s+$|\s*[\r\n]+")  # blanks at the end of a text stay together
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = 128_000  # ranks in Llama 3's file, which 256 special tokens follow
# By the ids that a file's ranks reach: OpenAI's r50k, p50k, cl100k and o200k.
_OPENAI: dict[int, tuple[str, dict[str, int]]] = {
    50_256: (_GPT2, {"<|endoftext|>": 50_256}),
    50_281: (_GPT2, {"<|endoftext|>": 50_256}),
    100_256: (
        _CL100K,
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    199_998: (_O200K, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
}


def _unwritten(n: int) -> tuple[str, dict[str, int]]:
    """The pattern and the special tokens of a tiktoken file whose ranks are below n: one that is not known has Llama
    3's pattern, and <|endoftext|> after its ranks."""
    names = _llama3() if n == _LLAMA3 else ["<|endoftext|>"]
    return _OPENAI.get(n) or (_LLAMA, {name: n + i for i, name in enumerate(names)})


@dataclass(frozen=True)
class Tokenizer:
    """`encode` takes documents, in which nothing is special; `encode_special` a text in which the names of special
    tokens are these tokens, as chat templates write them. Ids are below `size`, added tokens counted. `special` are
    the special tokens by name. `continues()` says of every id whether it goes on with the word before it, `ends()`
    whether a sentence may end with it. `hash` names the content of its file; `template` is a chat template (Jinja),
    where the tokenizer brings one; `lead` is what its makers put before every text, which `encode` does not."""

    name: str
    size: int
    encode: Callable[[Sequence[str]], list[list[int]]]
    encode_special: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    continues: Callable[[], Flags]
    ends: Callable[[], Flags]
    bos: int | None
    eos: int | None
    hash: str
    special: Mapping[str, int] = field(default_factory=dict)
    template: str | None = None
    lead: tuple[int, ...] = ()


def load(name: str) -> Tokenizer:
    """`bytes`, or a file (or the folder that it is in): tokenizer.json, a SentencePiece .model, a tiktoken file, which
    Llama 3 calls tokenizer.model too. Raises DataError."""
    if name == "bytes":
        return _bytes()
    path = Path(name)
    if path.is_dir():
        known = [*sorted(path.glob("tokenizer.json")), *sorted(path.glob("*.model")), *sorted(path.glob("*.tiktoken"))]
        if not known:
            raise DataError(f"data.tokenizer: {name!r} holds no tokenizer.json, *.model or *.tiktoken")
        path = known[0]
    if not path.is_file():
        raise DataError(f"data.tokenizer: {name!r} does not exist (looked from {os.getcwd()}); give bytes or a file")
    content = path.read_bytes()
    if content.lstrip()[:1] == b"{":
        return _hugging_face(path, content)
    return _tiktoken(path, content) if _is_tiktoken(content) else _sentencepiece(path, content)


def check_vocab(tokenizer: Tokenizer, vocab: int, objective: str, highest: Callable[[], str]) -> None:
    """Whether the model's table has an id for every token, and for the marks of a masked model; `highest` says what
    the data have. Raises DataError: ids outside the table would be silent zeros or a device assert far from the
    cause."""
    masked, of_bytes = objective == "masked", tokenizer.name == "bytes"
    needed = tokenizer.size + (len(BERT) if masked and of_bytes else 0)
    if needed > vocab:
        of = f"data.tokenizer {tokenizer.name!r} (added tokens counted)"
        if of_bytes:
            of = "the byte tokeniser (256 bytes" + (f" and {', '.join(BERT)})" if masked else ")")
        raise DataError(
            f"model.vocab: {vocab} is smaller than the {needed} ids of {of}; {highest()}; set at least {needed}"
        )
    if masked and not of_bytes and (missing := [w for w in BERT if w not in tokenizer.special]):
        raise DataError(f"data.tokenizer: {tokenizer.name!r} has no {', '.join(missing)}, which a masked model needs")


def token(tokenizer: Tokenizer, asked: bool | str, what: str) -> int | None:
    """The id that `data.bos` or `data.eos` asks for: the tokenizer's own, one by name, or none."""
    if asked is False:
        return None
    if isinstance(asked, str):
        if asked not in tokenizer.special:
            some = ", ".join(list(tokenizer.special)[:8]) or "none"
            raise DataError(f"data.{what}: {asked!r} is no special token of {tokenizer.name!r}; it has {some}")
        return tokenizer.special[asked]
    found = tokenizer.bos if what == "bos" else tokenizer.eos
    if found is None:
        raise DataError(f"data.{what}: {tokenizer.name!r} names none; give a special token's name, or false")
    return found


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _bytes() -> Tokenizer:
    """A token is a byte; 0 separates documents."""

    def continues() -> Flags:
        word = np.zeros(256, bool)
        word[[i for i in range(256) if i >= 128 or bytes([i]).isalnum() or i == ord("_")]] = True
        return word

    return Tokenizer(
        "bytes",
        256,
        lambda texts: [list(t.encode("utf-8", "surrogatepass")) for t in texts],
        lambda text: list(text.encode("utf-8", "surrogatepass")),
        lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", "replace"),
        continues,
        lambda: np.array([chr(i) in ".!?\n" for i in range(256)]),
        bos=None,
        eos=0,
        hash=_hash(b"bytes"),
    )


def _pieces_continue(pieces: Sequence[str], special: Mapping[str, int]) -> Flags:
    """Whether each goes on with the word before it; special tokens never do. WordPiece marks such pieces with ##,
    SentencePiece what begins a word with an underscore of its own and byte-level BPE with a letter for the blank. The
    vocabulary shows which of them it is."""
    marked = any(p.startswith("##") for p in pieces)
    flags = np.array(
        [p.startswith("##") if marked else bool(p) and p[0] not in "▁Ġ Ċĉ\n\t" and p[0].isalnum() for p in pieces]
    )
    flags[list(special.values())] = False
    return flags


def _pieces_end(pieces: Sequence[str], special: Mapping[str, int]) -> Flags:
    """Whether a sentence may end with each: those with a full stop, perhaps in quotes, or the end of a line."""
    flags = np.array([p.rstrip("\"')]").endswith((".", "!", "?", "\n", "Ċ")) for p in pieces])
    flags[list(special.values())] = False
    return flags


def _named(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    return value.get("content") if isinstance(value, dict) else value


def _settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json beside a tokenizer: which tokens begin and end a document, and its chat template."""
    file = path.parent / "tokenizer_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as e:
        raise DataError(f"data.tokenizer: {str(file)!r} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise DataError(f"data.tokenizer: {str(file)!r} is no mapping of keys")
    extra = path.parent / "chat_template.jinja"
    return found | ({"chat_template": extra.read_text(encoding="utf-8")} if extra.is_file() else {})


def _pick(special: Mapping[str, int], settings: Mapping[str, Any], key: str, usual: Sequence[str]) -> int | None:
    named = _named(settings, key)
    return next((special[name] for name in ([named] if named else usual) if name in special), None)


def _template(settings: Mapping[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template if isinstance(template, str) else None


def _hugging_face(path: Path, content: bytes) -> Tokenizer:
    tokenizers = need("tokenizers", f"data.tokenizer {str(path)!r}")
    try:
        plain = tokenizers.Tokenizer.from_str(content.decode())
        marked = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as e:  # the library raises bare Exception
        raise DataError(f"data.tokenizer: {str(path)!r} is no tokenizer.json: {str(e).splitlines()[0]}") from e
    plain.no_truncation(), plain.no_padding(), marked.no_truncation(), marked.no_padding()
    plain.encode_special_tokens = True
    vocab = marked.get_vocab(with_added_tokens=True)
    special = {t.content: i for i, t in marked.get_added_tokens_decoder().items() if t.special}
    settings = _settings(path)
    size = max(vocab.values()) + 1
    usual = marked.encode("a")
    begins = len(list(itertools.takewhile(bool, usual.special_tokens_mask)))

    def pieces() -> list[str]:
        names = [""] * size
        for name, i in vocab.items():
            names[i] = name
        return names

    return Tokenizer(
        str(path),
        size,
        lambda texts: [e.ids for e in plain.encode_batch(list(texts), add_special_tokens=False)],
        lambda text: list(marked.encode(text, add_special_tokens=False).ids),
        lambda ids: str(marked.decode(list(ids), skip_special_tokens=False)),
        lambda: _pieces_continue(pieces(), special),
        lambda: _pieces_end(pieces(), special),
        _pick(special, settings, "bos_token", _BOS),
        _pick(special, settings, "eos_token", _EOS),
        _hash(content),
        special,
        _template(settings),
        tuple(usual.ids[:begins]),
    )


def _sentencepiece(path: Path, content: bytes) -> Tokenizer:
    module = need("sentencepiece", f"data.tokenizer {str(path)!r}")
    try:
        model = module.SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:
        model = None
    if model is None:
        raise DataError(f"data.tokenizer: {str(path)!r} is no tokenizer.json, SentencePiece or tiktoken file")
    size = model.vocab_size()
    pieces = [model.id_to_piece(i) for i in range(size)]
    special = {p: i for i, p in enumerate(pieces) if model.is_control(i) or (p.startswith("<|") and p.endswith("|>"))}
    special |= {p: pieces.index(p) for p in BERT if p in pieces}
    cut = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None
    settings = _settings(path)

    def encode_special(text: str) -> list[int]:
        parts = cut.split(text) if cut else [text]
        return [i for p in parts if p for i in ([special[p]] if p in special else model.encode(p))]

    return Tokenizer(
        str(path),
        size,
        lambda texts: list(model.encode(list(texts))) if texts else [],
        encode_special,
        lambda ids: str(model.decode([int(i) for i in ids])),
        lambda: _pieces_continue(pieces, special),
        lambda: _pieces_end(pieces, special),
        model.bos_id() if model.bos_id() >= 0 else None,
        model.eos_id() if model.eos_id() >= 0 else None,
        _hash(content),
        special,
        _template(settings),
        (model.bos_id(),) if settings.get("add_bos_token", True) and model.bos_id() >= 0 else (),
    )


def _is_tiktoken(content: bytes) -> bool:
    """Lines of a token in base64 and its rank."""
    words = content.split(b"\n", 1)[0].split()
    try:
        return len(words) == 2 and words[1].isdigit() and bool(base64.b64decode(words[0], validate=True))
    except binascii.Error:
        return False


def _tiktoken(path: Path, content: bytes) -> Tokenizer:
    tiktoken = need("tiktoken", f"data.tokenizer {str(path)!r}")
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as e:
        raise DataError(f"data.tokenizer: {str(path)!r} is a damaged tiktoken file: {e}") from e
    n = max(ranks.values()) + 1
    pattern, special = _unwritten(n)
    made = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    settings = _settings(path)

    def pieces() -> list[str]:
        names = [""] * made.n_vocab
        for name, i in ranks.items():
            names[i] = name.decode("utf-8", "replace")
        return names

    return Tokenizer(
        str(path),
        made.n_vocab,
        lambda texts: list(made.encode_ordinary_batch(list(texts), num_threads=1)),
        lambda text: list(made.encode(text, allowed_special="all")),
        lambda ids: str(made.decode([int(i) for i in ids])),
        lambda: _pieces_continue(pieces(), special),
        lambda: _pieces_end(pieces(), special),
        _pick(special, settings, "bos_token", _BOS),
        _pick(special, settings, "eos_token", _EOS),
        _hash(content),
        special,
        _template(settings),
        (n,) if n == _LLAMA3 else (),
    )


def _llama3() -> list[str]:
    """Names of Llama 3's special tokens in the order of their ids."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    rest = iter(range(256))
    return [f"<|{named[i]}|>" if i in named else f"<|reserved_special_token_{next(rest)}|>" for i in range(256)]
