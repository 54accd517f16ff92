"""Texts that are read as a run goes on: too large to be tokenised when it starts, and nothing to find a sample by.

Documents come in a fixed order: epoch after epoch, in each the files in another order, the documents of a file as they
lie. Some `shuffle` sequences at a time are a window, cut or put together as a corpus of its own would be, and given out
in an order of its own. So a stream needs no more than the place where its window begins and how many of its sequences
are given out: the cursor. Every rank reads all of it and keeps its own rows.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from .. import rng
from . import documents, encode, manifest, texts, tokens
from .ahead import Ahead
from .batches import Read, assemble, batch, read, sequence
from .config import Part, Source, Texts, length, stride
from .documents import Faults
from .encode import Encoded
from .errors import DataError
from .order import order_of, permute, turn
from .sources import cut

CHUNK = 64  # documents that are tokenised together; a window begins some tokens after the first of a chunk
UNSHUFFLED = 64  # sequences of a window whose order stays


@dataclass(frozen=True)
class Cursor:
    """Where a stream stands. Window number `window` begins `token` tokens after the beginning of document `record`, in
    the `file`-th file of epoch `epoch`; `taken` of its sequences are given out. `left_out` are the documents before,
    by reason."""

    epoch: int = 0
    file: int = 0
    record: int = 0
    token: int = 0
    window: int = 0
    taken: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


class Reader:
    """Rows of one step's batch after another's. What can be indexed is read by the step alone; where there are streams
    `read` has to be asked for one step after another, from `step` on, with the `cursors` that `cursors(step - 1)` gave.
    """

    def __init__(
        self, source: Source, rows: Sequence[int], step: int = 0, cursors: Sequence[Mapping[str, Any] | None] = ()
    ) -> None:
        self.source, self.rows, self.next = source, rows, step
        given = [Cursor(**c) if c else Cursor() for c in cursors or [None] * len(source.parts)]
        self.now = {k: c for k, (c, part) in enumerate(zip(given, source.parts, strict=True)) if part.texts}
        self.left_out = {k: c.left_out for k, c in self.now.items()}
        self.after: dict[int, dict[int, Cursor]] = {step - 1: dict(self.now)}
        self.streams = {k: _sequences(source, k, cursor) for k, cursor in self.now.items()}

    def read(self, step: int) -> dict[str, Tensor]:
        """The batch of a step, which counts from 0. Raises DataError."""
        if not self.streams:
            return batch(self.source, step, self.rows)
        if step != self.next:
            raise ValueError(f"a stream stands at step {self.next}, not at {step}")
        size, wanted = self.source.cfg.batch, set(self.rows)
        found: dict[int, Read] = {}
        for row in range(size):
            k, _ = turn(self.source, step * size + row)
            get: Callable[[], Read] = partial(read, self.source, step * size + row, "train")
            if k in self.streams:
                get, self.now[k], self.left_out[k] = next(self.streams[k])
            if row in wanted:
                found[row] = get()
        self.next = step + 1
        self.after[step] = dict(self.now)
        self.after.pop(step - 3, None)  # one step is read ahead of the one that may be saved
        return assemble(self.source, [step * size + r for r in self.rows], [found[r] for r in self.rows], "train")

    def cursors(self, step: int) -> list[dict[str, Any] | None]:
        """What a run that goes on after `step` needs, for each part; nothing where there are no streams."""
        if not self.streams:
            return []
        now = self.after[step]
        return [asdict(now[k]) if k in now else None for k in range(len(self.source.parts))]

    def notes(self) -> list[str]:
        """Lines on documents that were left out so far."""
        total = sum(map(Counter, self.left_out.values()), Counter[str]())
        return [f"documents left out of what was read ({why}): {n:,}" for why, n in sorted(total.items())]


def _sequences(source: Source, k: int, start: Cursor) -> Iterator[tuple[Callable[[], Read], Cursor, Mapping[str, int]]]:
    """The sequences of a stream from a cursor on, without end, each with the cursor after it and what was left out of
    all that its window was made of. The next window is read on a thread of its own."""
    coming = _windows(source, k, start)
    ahead = Ahead(lambda _: next(coming), sys.maxsize)
    taken = start.taken
    for i in itertools.count():
        begin, part, left_out = ahead.get(i)
        order = rng.fold_int(order_of(source, "train", k), begin.window)
        for n in range(taken, part.train):
            number = permute(n, part.train, order) if source.cfg.shuffle else n
            yield partial(sequence, source, part, number), replace(begin, taken=n + 1), left_out
        taken = 0


def _windows(source: Source, k: int, start: Cursor) -> Iterator[tuple[Cursor, Part, Mapping[str, int]]]:
    """A stream in windows, each a corpus of its own, where it begins, and what was left out up to its end. Where
    documents are cut, the next window begins with what is left of the last one."""
    cfg = replace(source.cfg, validation=0.0)
    given = source.parts[k].texts
    assert given is not None
    chunks = _chunks(source, k, given, start)
    held = [next(chunks)]
    begin = replace(start, taken=0)
    needed = (cfg.shuffle or UNSHUFFLED) * stride(cfg) + length(cfg) - stride(cfg)
    while True:
        while sum(d.ids.size for _, found, _ in held for d in found) - begin.token < needed:
            held.append(next(chunks))
        whole = texts.flat(source.parts[k].name, [d for _, found, _ in held for d in found], _dtype(given), 0)
        first, last = begin.token, whole.tokens.size
        if cfg.packing == "concat":
            last = first + needed
        starts = whole.starts[(whole.starts >= first) & (whole.starts < last)] - first  # type: ignore[index, operator]
        learn = whole.learn[first:last] if whole.learn is not None else None
        shard = tokens.Shard(whole.name, whole.tokens[first:last], starts, learn=learn)
        part = cut(cfg, whole.name, tokens.stream([shard]), "", 0)
        if not part.train:
            raise DataError(f"data.path: the documents of {whole.name} are too short to learn from")
        yield begin, part, held[-1][2]
        end = first + part.train * stride(cfg) if cfg.packing == "concat" else last
        while held and end >= (size := sum(d.ids.size for d in held[0][1])):
            end -= size
            held.pop(0)
        held = held or [next(chunks)]
        begin = replace(held[0][0], token=end, window=begin.window + 1)


def _dtype(given: Texts) -> str:
    return manifest.dtype_for(given.tokenizer.size)


def _chunks(
    source: Source, k: int, given: Texts, start: Cursor
) -> Iterator[tuple[Cursor, list[Encoded], Mapping[str, int]]]:
    """The documents of a stream from a cursor's on, CHUNK at a time, where each chunk begins, and what was left out up
    to its end."""
    cfg, f = source.cfg, given.given
    order = rng.fold_int(order_of(source, "train", k), rng.site_number("data/files"))
    faults = Faults(cfg.bad == "skip")
    for epoch in itertools.count(start.epoch):
        seen, whole = 0, epoch > start.epoch or start.file == start.record == 0
        first = start.file if epoch == start.epoch else 0
        for nth in range(first, len(given.files)):
            index = permute(nth, len(given.files), rng.fold_int(order, epoch)) if cfg.shuffle else nth
            path, size = given.files[index], documents.size(given.files[index])
            if size != given.sizes[index]:
                raise DataError(f"{path}: has {size:,} bytes; it had {given.sizes[index]:,} when the run started")
            found = documents.records(f.source, path, f.field, faults)
            record = 0
            if (epoch, nth) == (start.epoch, start.file):
                record = sum(1 for _ in itertools.islice(found, start.record))
                faults.counts.clear()
                faults.counts.update(start.left_out)
            while True:
                begin = Cursor(epoch, nth, record, left_out=dict(faults.counts))
                some = list(itertools.islice(found, CHUNK))
                if not some:
                    break
                mine = list(encode.encode(some, given.tokenizer, given.bos, given.eos, cfg.chat, faults))
                record, seen = record + len(some), seen + len(mine)
                yield begin, mine, dict(faults.counts)
        if whole and not seen:
            raise DataError(f"data.path: none of the documents of {source.parts[k].name} can be used")
