"""What a held-out loss says: perplexity per token, and per word of the text, which no tokenizer changes.

The protocol is that of Megatron-LM's WikiText-103 evaluation (Shoeybi et al. 2019, appendix E.1): windows that overlap,
each predicting what is new in it, and the sum of losses divided by the words of the original, pretokenised text.
"""

from __future__ import annotations

import math
import re

import numpy as np

from .batches import validation_batches
from .config import DataConfig, Source
from .masking import Special
from .order import MIX
from .sources import all_held_out, cut
from .tokens import Ints, Shard, stream


def windows(name: str, ids: Ints, words: int, seq: int, stride: int, batch: int, vocab: int) -> Source:
    """One text as held-out windows of `seq` tokens that begin `stride` apart, `batch` at a time, and nothing else. Its
    first token is context only. Raises DataError."""
    cfg = DataConfig("tokens", seq, batch, vocab, validation=0.0, stride=stride)
    whole = cut(cfg, name, stream([Shard(name, ids, np.zeros(1, np.int64))]), "", words)
    return Source(cfg, (), (all_held_out(cfg, whole),), (MIX,), Special(0, 0, 0, 0, vocab), None, "")


def perplexity(loss: float) -> float:
    """exp(loss), infinity where that is too large."""
    return math.exp(loss) if loss < 700 else math.inf


def predicted(source: Source) -> int | None:
    """Tokens that the held-out windows predict: each but the first of every text. None where windows do not overlap."""
    if not source.apart or any(not p.stride or p.stream is None for p in source.apart):
        return None
    return sum(p.stream.tokens - 1 for p in source.apart if p.stream is not None)


def report(source: Source, loss: float, batches: int) -> str | None:
    """One line on a held-out loss in nats a token after `batches` batches, None where nothing is held out apart."""
    tokens, words = predicted(source), sum(p.words for p in source.apart)
    if tokens is None:
        return None
    line = f"held-out perplexity {perplexity(loss):.2f} a token"
    if batches < validation_batches(source):
        return f"{line}, of {batches} of {validation_batches(source)} batches (raise data.validation.batches for all)"
    if not words:
        return line
    return f"{line}, {perplexity(loss * tokens / words):.2f} a word ({tokens:,} tokens, {words:,} words)"


# Pairs of what WikiText's tokens were made of: a pattern, and what the text had there.
_WIKITEXT = [
    (r" @([-,.])@ ", r"\1"),
    (r"(?<=\S) ([.,:;?!)\]}%])", r"\1"),
    (r"([(\[{$]) (?=\S)", r"\1"),
    (r'(^|[\s(\[]|- )" (.+?) "(?=[\s.,:;?!)\]]|$)', r'\1"\2"'),
    (r"(\w) ('(?:s|re|ve|ll|d|m|t)\b|n't\b)", r"\1\2"),
    (r"(\w) ' (?=\w)", r"\1' "),
    (r"= (?==)", r"="),
    (r" \n", "\n"),
    (r"\n ", "\n"),
]


def original(text: str) -> int:
    """WikiText's own tokens in a text: what blanks separate, ends of lines too, which count in published perplexities
    (Megatron-LM's `zeroshot_gpt` counts so: 245,569 in the test set of WikiText-103)."""
    return len(text.strip().split(" "))


def natural(text: str) -> str:
    """The text that WikiText's tokens stand for: joined punctuation, quotes, contractions and numbers, so that a
    tokenizer sees ordinary English. Words are counted before."""
    for pattern, to in _WIKITEXT:
        text = re.sub(pattern, to, text, flags=re.MULTILINE)
    return text
