"""Documents to tokens: where a document begins and ends, and, of a conversation, which tokens are to be learnt."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .chat import conversation
from .documents import Faults, fault
from .errors import DataError
from .tokenizer import Tokenizer

_BATCH = 256  # documents that a tokenizer is given at a time


@dataclass(frozen=True)
class Encoded:
    """One document: its ids, which of them are targets (None: all), the place it came from, and its share of the hash
    space, 0 to 1, by which documents are held out."""

    ids: npt.NDArray[np.int64]
    learn: npt.NDArray[np.bool_] | None
    where: str
    share: float
    words: int
    size: int


def encode(
    records: Iterable[tuple[str, Any]],
    tokenizer: Tokenizer,
    bos: int | None,
    eos: int | None,
    chat: bool,
    faults: Faults,
) -> Iterator[Encoded]:
    """Tokens of each document, `bos` before and `eos` after it. Empty documents are counted and left out; bad ones
    are DataErrors or counted, as `faults` says."""
    first, last = ([] if t is None else [t] for t in (bos, eos))
    for batch in _batches(_texts(records, chat, tokenizer.name == "bytes", faults), _BATCH):
        if chat:
            for where, messages in batch:
                try:
                    ids, learn = conversation(tokenizer, messages)
                except DataError as e:
                    fault(faults, "not a conversation", f"{where}: {e}", e)
                    continue
                content = repr(messages).encode("utf-8", "surrogatepass")
                yield Encoded(ids, learn, where, share(content), 0, len(content))
        elif tokenizer.name == "bytes":
            for where, text in batch:
                own = np.frombuffer(text, np.uint8).astype(np.int64)
                ids = np.concatenate([np.array(first, np.int64), own, np.array(last, np.int64)])
                yield Encoded(ids, None, where, share(text), len(text.split()), len(text))
        else:
            for (where, text), body in zip(batch, tokenizer.encode([t for _, t in batch]), strict=True):
                content = text.encode()
                array = np.array([*first, *body, *last], np.int64)
                yield Encoded(array, None, where, share(content), len(text.split()), len(content))


def share(content: bytes) -> float:
    """A document's place in the hash space, 0 to below 1. A copy has the same one: both are held out, or none."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big") / 2**56


def _texts(records: Iterable[tuple[str, Any]], chat: bool, as_bytes: bool, faults: Faults) -> Iterator[tuple[str, Any]]:
    for where, value in records:
        if chat != isinstance(value, list):
            what = "a list of messages" if chat else "a text"
            fault(faults, f"not {what}", f"{where}: holds {type(value).__name__}, not {what}")
            continue
        if not value:
            faults.counts["empty"] += 1
            continue
        if chat:
            yield where, value
            continue
        try:
            if as_bytes:
                yield where, value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            elif isinstance(value, bytes):
                yield where, value.decode("utf-8")
            else:
                value.encode("utf-8")  # a lone surrogate, as JSON can write it
                yield where, value
        except UnicodeError as e:
            fault(faults, "not UTF-8", f"{where}: not UTF-8 ({e})", e)


def _batches(items: Iterable[Any], n: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, n)):
        yield batch
