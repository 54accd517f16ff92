"""What a run is asked to read, and what was found: sources, their sequences, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as default
from typing import Literal

from .masking import Masking, Special, Words
from .sequences import Bins
from .tokenizer import Tokenizer
from .tokens import Stream

SYNTHETIC_TOKENS = 1 << 40


@dataclass(frozen=True)
class From:
    """One source: `paths` are files, globs, folders or URLs, `field` the key of a document's text, `dtype` the type of
    raw token files, `stream` whether texts are read as the run goes on, `weight` its share of a mixture (None: by its
    size), `epochs` how often it may be read."""

    source: str
    paths: tuple[str, ...] = ()
    field: str = ""
    dtype: str = "uint16"
    stream: bool = False
    weight: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """What to read. `seq` is tokens a sequence, `batch` sequences a step over all ranks, `vocab` the model's real
    vocabulary, `validation` the fraction held out: of the sequences (`blocks`) or of the `documents`, by their hash;
    `valid_paths` are held-out files of their own, read in windows that begin `stride` tokens apart (0: `seq`).

    `packing` is how documents become sequences, `document_mask` whether their tokens see their own document only, of
    which a sequence has up to `max_documents` (0: any number).
    With `stream` texts are read as the run goes on, `shuffle` sequences at a time in another order (0: as they are).
    `mix` are the sources of a mixture, in place of source and paths; `steps` those of the run, where known."""

    source: str
    seq: int
    batch: int
    vocab: int
    seed: int = 0
    paths: tuple[str, ...] = ()
    objective: Literal["causal", "masked"] = "causal"
    validation: float = 0.05
    field: str = ""
    dtype: str = "uint16"
    mix: tuple[From, ...] = ()
    tokenizer: str = "bytes"
    bos: bool | str = False
    eos: bool | str | int = True
    chat: bool = False
    packing: Literal["concat", "best-fit", "none"] = "concat"
    document_mask: bool = False
    max_documents: int = 0
    bad: Literal["error", "skip"] = "error"
    stream: bool = False
    shuffle: int = 1024
    masking: Masking = default(default_factory=Masking)
    split: Literal["blocks", "documents"] = "blocks"
    valid_paths: tuple[str, ...] = ()
    stride: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Texts:
    """Files that are read front to back while a run goes on, and their sizes in bytes when it was opened (-1: not
    known); `bos` and `eos` begin and end each document."""

    given: From
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    tokenizer: Tokenizer
    bos: int | None
    eos: int | None


@dataclass(frozen=True)
class Part:
    """One corpus: `train + valid` sequences of a stream (None: drawn from a hash, or, where there are `texts`, out of
    these, so that nobody knows how many), by `bins` unless it is cut evenly.
    `apart`: `valid` is all there is, in windows where `stride` is not 0; otherwise the last `held` of every
    `period` sequences are held out. `dropped` tokens at the end do not fill a sequence."""

    name: str
    stream: Stream | None
    bins: Bins | None
    train: int
    valid: int
    period: int
    held: int
    dropped: int
    hash: str
    words: int = 0
    stride: int = 0
    texts: Texts | None = None


@dataclass(frozen=True)
class Source:
    """What a run reads. `parts` are the corpora that it is trained on, `apart` the held-out ones, if these are others;
    a training sample is of part k `quotas[k]` times in every MIX. `notes` are lines for a person."""

    cfg: DataConfig
    parts: tuple[Part, ...]
    apart: tuple[Part, ...]
    quotas: tuple[int, ...]
    special: Special
    words: Words | None
    hash: str
    notes: tuple[str, ...] = ()

    @property
    def train(self) -> int:
        """Training sequences; none are counted of what is read as the run goes on."""
        return sum(p.train for p in self.parts)

    @property
    def valid(self) -> int:
        """Held-out sequences."""
        return sum(p.valid for p in self.apart or self.parts)

    @property
    def tokens(self) -> int:
        return sum(p.stream.tokens if p.stream else 0 if p.texts else SYNTHETIC_TOKENS for p in self.parts)

    @property
    def streams(self) -> bool:
        """Whether anything is read as the run goes on."""
        return any(p.texts for p in self.parts)

    @property
    def dropped(self) -> int:
        return sum(p.dropped for p in self.parts)


def stride(cfg: DataConfig) -> int:
    """Tokens from one sequence to the next: `seq`, or what [CLS] A [SEP] B [SEP] leaves of it."""
    return cfg.seq if cfg.objective == "causal" else cfg.seq - 3


def length(cfg: DataConfig) -> int:
    """Tokens that a sequence reads: one more than `seq` for a causal model, whose labels are shifted by one
    before the cut, so that no label is lost at the seams."""
    return cfg.seq + 1 if cfg.objective == "causal" else cfg.seq - 3


def periods(cfg: DataConfig, sequences: int) -> tuple[int, int]:
    """(period, held): the last `held` sequences of every `period` are for validation.

    16 contiguous blocks, and one that may be cut, spread over the corpus, so that the held-out text resembles the
    rest, and fewer in a small one, where blocks of a few sequences would round the fraction coarsely."""
    if cfg.validation == 0:
        return max(sequences, 1), 0
    blocks = max(1, min(16, int(sequences * min(cfg.validation, 1 - cfg.validation) / 4)))
    period = max(1, sequences // blocks)
    if sequences > period * (blocks + 1):  # rounded down so far that there would be more blocks
        period = -(-sequences // blocks)
    return period, max(1, round(period * cfg.validation))
