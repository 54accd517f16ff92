"""What a held-out loss says: perplexity per token, and per word of the text, which no tokenizer changes.

The protocol is that of Megatron-LM's WikiText-103 evaluation (Shoeybi et al. 2019, appendix E.1): windows that overlap,
each predicting what is new in it, and the sum of losses divided by the words of the original, pretokenised text.
"""

from __future__ import annotations

import math
import re

from .batches import validation_batches
from .config import Source


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


def natural(text: str) -> str:
    """The text that WikiText's tokens stand for: joined punctuation, quotes, contractions and numbers, so that a
    tokenizer sees ordinary English. Words are counted before."""
    for pattern, to in _WIKITEXT:
        text = re.sub(pattern, to, text, flags=re.MULTILINE)
    return text
