"""Conversations: the ids that a chat template makes of them, and which of these a model learns, the assistant's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError, need
from .tokenizer import Tokenizer

# Without a chat template of the tokenizer's own: ChatML, whose marks are then plain text to it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Stand around what is between {% generation %} and {% endgeneration %} until the places are known: two of the
# characters that Unicode gives to no one.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Span = tuple[int, int]


def conversation(tokenizer: Tokenizer, messages: Sequence[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """A conversation's ids, and True for those that are learnt: what the template marks with {% generation %}, as for
    transformers' `return_assistant_tokens_mask`, or, where it marks nothing, the assistant's answers with what ends
    them. What comes before an answer is tokenised alone too, as it is when the model is asked; a token across the
    border belongs to the answer. Raises DataError."""
    for m in messages:
        if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)):
            raise DataError('a message must be like {"role": "user", "content": "..."}')
        if _BEGIN in m["content"] or _END in m["content"]:
            raise DataError("a message holds U+FDD0 or U+FDD1, which Unicode gives to no character")
    render = _renderer(tokenizer)
    text, spans = _marked(render(messages, False))
    spans = spans or _answers(render, messages, text)
    ids = tokenizer.encode_special(text)
    learn = np.zeros(len(ids), bool)
    for begin, end in spans:
        first, last = (tokenizer.encode_special(text[:at]) for at in (begin, end))
        reached = _common(ids, last)
        learn[_common(ids, first) : reached + (reached < len(last))] = True
    if not learn.any():
        raise DataError("has no answer of the assistant, so nothing to learn")
    return np.array(ids, np.int64), learn


Render = Callable[[Sequence[Any], bool], str]


def _answers(render: Render, messages: Sequence[Any], text: str) -> list[Span]:
    """Where the assistant's answers are in a conversation's text: between what it is with the messages before, when an
    answer is asked for, and with the answer."""
    spans = []
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            before = render(messages[:i], True)
            after = text if i == len(messages) - 1 else render(messages[: i + 1], False)
            if not (text.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"the chat template writes message {i + 1} or those before in another way when more follow, so "
                    "where the answer is cannot be told; mark it in the template with {% generation %} ... "
                    "{% endgeneration %}"
                )
            spans.append((len(before), len(after)))
    return spans


def _marked(text: str) -> tuple[str, list[Span]]:
    """A rendered text without its marks, and the spans between them."""
    out, *rest = text.split(_BEGIN)
    spans = []
    for piece in rest:
        inside, _, outside = piece.partition(_END)
        spans.append((len(out), len(out) + len(inside)))
        out += inside + outside
    return out, spans


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ------------------------------------------------------------------------------------------------ templates


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A template as Hugging Face's are compiled. `strftime_now` is not there, on purpose: tokens would depend on the
    day."""
    sandbox, extensions = (need(f"jinja2.{m}", "a chat template") for m in ("sandbox", "ext"))
    nodes = need("jinja2.nodes", "a chat template")

    class Generation(extensions.Extension):  # type: ignore[misc, name-defined]
        tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )

    def refuse(message: str) -> None:
        raise DataError(f"the chat template refuses it: {message}")

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:  # Jinja's own writes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = tojson
    return environment.from_string(template)


def _renderer(tokenizer: Tokenizer) -> Render:
    """What writes messages as the tokenizer's template, or ChatML, does."""
    jinja2 = need("jinja2", "a chat template")
    template = tokenizer.template or CHATML
    name = {i: n for n, i in tokenizer.special.items()}
    marks: Mapping[str, str] = {
        f"{what}_token": name.get(token, "") if token is not None else ""
        for what, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
    }

    def render(messages: Sequence[Any], prompt: bool) -> str:
        try:
            given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": prompt}
            out: str = _compiled(template).render(**given, **marks)
        except jinja2.TemplateError as e:
            raise DataError(f"the chat template fails: {' '.join(str(e).split())}") from e
        return out

    return render
