"""`dtrain data pack`: tokenise texts once, into Megatron-LM's .bin and .idx with a manifest.

Documents are read in order by one process, tokenised by several and written in order, so the output does not depend on
their number. A journal says how far the files are valid: a second try goes on from there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from dataclasses import field as default
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from . import documents, encode, manifest, tokenizer
from .documents import Faults, kind_of
from .errors import DataError
from .manifest import Manifest
from .perplexity import natural, original
from .tokenizer import Tokenizer
from .tokens import write_index

_BATCH = 1 << 20  # bytes of text that a worker is given at a time
_DOCUMENTS = 1024  # and at most so many documents
_EVERY = 64  # batches between two entries of the journal


@dataclass(frozen=True)
class Options:
    """What to pack and how. `source` is the kind of the files, by their names if empty; `hold_out` the share of
    documents, by their hash, that go to OUT-valid instead; `wikitext` undoes WikiText's tokenisation first."""

    paths: tuple[str, ...]
    source: str = ""
    field: str = ""
    tokenizer: str = "bytes"
    bos: bool | str = False
    eos: bool | str = True
    chat: bool = False
    bad: str = "error"
    hold_out: float = 0.0
    wikitext: bool = False


def options(paths: Sequence[str], values: Mapping[str, object], hold_out: float, wikitext: bool) -> Options:
    """Options from what a command says in KEY=VALUE. Raises DataError for a key or a type that is not one."""
    known = {f.name: f.default for f in fields(Options) if f.name not in ("paths", "hold_out", "wikitext")}
    for key, value in values.items():
        if key not in known:
            raise DataError(f"{key}: is nothing that packing asks for; it asks for {', '.join(known)}")
        if not isinstance(value, (bool, str) if key in ("bos", "eos") else type(known[key])):
            raise DataError(f"{key}: {value!r} is not allowed; see data.{key} in layouts/README.md")
    for key, words in (("source", ("", *documents.KINDS)), ("bad", ("error", "skip"))):
        if values.get(key, words[0]) not in words:
            raise DataError(f"{key}: {values[key]!r} must be one of {', '.join(w for w in words if w)}")
    if not 0 <= hold_out < 1:
        raise DataError(f"--hold-out: {hold_out} must be a fraction from 0 to below 1")
    return Options(tuple(paths), **values, hold_out=hold_out, wikitext=wikitext)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Packed:
    """What a worker makes of some documents, for OUT and for OUT-valid: ids, sizes, targets, and counts."""

    ids: tuple[Any, Any]
    sizes: tuple[Any, Any]
    learn: tuple[Any, Any]
    words: tuple[int, int]
    bytes: tuple[int, int]
    left_out: Counter[str]


@dataclass(frozen=True)
class Place:
    """How far the documents are read: `record` of file number `file`; `left_out` are those of the files before."""

    file: int = 0
    record: int = 0
    left_out: Counter[str] = default(default_factory=Counter)


def pack(out: str, options: Options, workers: int, say: Callable[[str], None]) -> list[Manifest]:
    """Write OUT.bin, OUT.idx and OUT.json (OUT.learn too for chats, and OUT-valid.* with `hold_out`), and say how fast.
    Raises DataError."""
    used = tokenizer.load(options.tokenizer)
    bos, eos = (tokenizer.token(used, asked, what) for asked, what in ((options.bos, "bos"), (options.eos, "eos")))
    files = documents.files(options.paths, options.source or "text")
    names = [out, f"{out}-valid"] if options.hold_out else [out]
    for name in names:
        if Path(f"{name}.json").exists():
            raise DataError(f"{name}.json: is there already; remove it, or choose another OUT")
    Path(out).absolute().parent.mkdir(parents=True, exist_ok=True)
    journal = Path(f"{out}.part.json")
    start, left_out, states = _resume(journal, _identity(options, files, used), len(names), say)
    dtype = np.dtype(manifest.dtype_for(used.size))
    sinks = [_Sink(name, dtype, options.chat, state) for name, state in zip(names, states, strict=True)]
    reading = Faults(options.bad == "skip", Counter(start.left_out))
    work = _Work(options, bos, eos, dtype.str)
    began = told = time.perf_counter()
    before = sum(s.counts["bytes"] for s in sinks)

    def progress() -> str:
        size, seconds = sum(s.counts["bytes"] for s in sinks), max(1e-9, time.perf_counter() - began)
        n, t = (sum(s.counts[k] for s in sinks) for k in ("documents", "tokens"))
        rate = (size - before) / seconds / 1e6
        return f"{n:,} documents, {t:,} tokens, {size / 1e6:,.1f} MB of text; {rate:.1f} MB/s, {workers} workers"

    try:
        for number, (place, done) in enumerate(_tokenised(files, start, reading, work, workers), 1):
            for side, sink in enumerate(sinks):
                sink.write(done, side)
            left_out += done.left_out
            if number % _EVERY == 0:
                _note(journal, _identity(options, files, used), place, left_out, sinks)
            if time.perf_counter() - told > 2:
                told = time.perf_counter()
                say(f"file {place.file + 1} of {len(files)}: {progress()}")
    finally:
        for sink in sinks:
            sink.close()
    made = [sink.finish(used, bos, eos, options.chat, left_out + reading.counts) for sink in sinks]
    journal.unlink(missing_ok=True)
    say(progress())
    return made


# ------------------------------------------------------------------------------------------------ reading, tokenising


@dataclass(frozen=True)
class _Work:
    options: Options
    bos: int | None
    eos: int | None
    dtype: str


def _batches(
    files: Sequence[str], options: Options, start: Place, reading: Faults
) -> Iterator[tuple[Place, list[tuple[str, Any]]]]:
    """Documents from `start` on in batches, each with the place after it."""
    key = options.field or ("messages" if options.chat else "text")
    for index in range(start.file, len(files)):
        path, before = files[index], Counter(reading.counts)
        batch: list[tuple[str, Any]] = []
        size = 0
        for n, record in enumerate(documents.records(options.source or kind_of(path), path, key, reading), 1):
            if index == start.file and n <= start.record:
                continue
            batch.append(record)
            size += len(record[1])
            if size > _BATCH or len(batch) == _DOCUMENTS:
                yield Place(index, n, before), batch
                batch, size = [], 0
        yield Place(index + 1, 0, Counter(reading.counts)), batch


def _tokenised(
    files: Sequence[str], start: Place, reading: Faults, work: _Work, workers: int
) -> Iterator[tuple[Place, Packed]]:
    """What the workers made of each batch, in order; a few batches are under way at a time."""
    batches = _batches(files, work.options, start, reading)
    if workers == 1:
        used = tokenizer.load(work.options.tokenizer)
        yield from ((place, _tokenise(used, work, batch)) for place, batch in batches)
        return
    waiting: deque[tuple[Place, Future[Packed]]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (work,)) as pool:
        for place, batch in batches:
            waiting.append((place, pool.submit(_do, batch)))
            if len(waiting) > 3 * workers:
                place, done = waiting.popleft()
                yield place, done.result()
        for place, done in waiting:
            yield place, done.result()


_mine: list[tuple[Tokenizer, _Work]] = []  # of a worker: a tokenizer cannot be sent to it


def _begin(work: _Work) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _mine[:] = [(tokenizer.load(work.options.tokenizer), work)]


def _do(batch: list[tuple[str, Any]]) -> Packed:
    return _tokenise(*_mine[0], batch)


def _tokenise(used: Tokenizer, work: _Work, batch: list[tuple[str, Any]]) -> Packed:
    options, faults = work.options, Faults(work.options.bad == "skip")
    sides: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
    words = [0, 0]
    if options.wikitext:
        counted = [original(_text(value)) for _, value in batch]
        batch = [(where, natural(_text(value))) for where, value in batch]
        words[0] = sum(counted)
    for d in encode.encode(batch, used, work.bos, work.eos, options.chat, faults):
        held = d.share < options.hold_out
        sides[held].append(d)
        words[held] += 0 if options.wikitext else d.words
    limit = np.iinfo(work.dtype).max
    for d in (*sides[0], *sides[1]):
        if d.ids.size and int(d.ids.max()) > limit:
            raise DataError(f"{d.where}: id {int(d.ids.max())} does not fit {np.dtype(work.dtype)}")
    ids, sizes, learn = [], [], []
    for side in sides:
        ids.append(np.concatenate([np.zeros(0, np.int64), *(d.ids for d in side)]).astype(work.dtype))
        sizes.append(np.array([d.ids.size for d in side], np.int32))
        flags = [np.ones(d.ids.size, bool) if d.learn is None else d.learn for d in side]
        learn.append(np.concatenate([np.zeros(0, bool), *flags]).astype(np.uint8) if options.chat else None)
    size = [sum(d.size for d in side) for side in sides]
    return Packed(
        (ids[0], ids[1]),
        (sizes[0], sizes[1]),
        (learn[0], learn[1]),
        (words[0], words[1]),
        (size[0], size[1]),
        faults.counts,
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else value


# ------------------------------------------------------------------------------------------------ writing


class _Sink:
    """OUT.bin and what else grows with it, as OUT.*.part until all is there."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], chat: bool, state: Mapping[str, int]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.counts = Counter(state)
        self.files: dict[str, BinaryIO] = {}
        n, docs = self.counts["tokens"], self.counts["documents"]
        lengths = {".bin": n * dtype.itemsize, ".sizes": docs * 4} | ({".learn": n} if chat else {})
        for suffix, length in lengths.items():
            path = Path(f"{prefix}{suffix}.part")
            path.touch()
            file = open(path, "r+b")  # noqa: SIM115 - `close` closes it
            file.truncate(length)  # what was written after the journal's last entry is done again
            file.seek(length)
            self.files[suffix] = file

    def write(self, done: Packed, side: int) -> None:
        ids, sizes, learn = done.ids[side], done.sizes[side], done.learn[side]
        self.files[".bin"].write(ids.tobytes())
        self.files[".sizes"].write(sizes.tobytes())
        if learn is not None:
            self.files[".learn"].write(learn.tobytes())
        self.counts.update(documents=sizes.size, tokens=ids.size, words=done.words[side], bytes=done.bytes[side])
        self.counts["highest"] = max(self.counts["highest"], int(ids.max(initial=0)))

    def flush(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(
        self, used: Tokenizer, bos: int | None, eos: int | None, chat: bool, left_out: Mapping[str, int]
    ) -> Manifest:
        counted = Path(f"{self.prefix}.sizes.part")
        sizes = np.memmap(counted, np.int32, "r") if counted.stat().st_size else np.zeros(0, np.int32)
        write_index(Path(f"{self.prefix}.idx"), self.dtype, sizes)
        counted.unlink()
        kept = [suffix for suffix in self.files if suffix != ".sizes"]
        for suffix in kept:
            os.replace(f"{self.prefix}{suffix}.part", self.prefix + suffix)
        made = Manifest(
            tokenizer=used.name,
            tokenizer_hash=used.hash,
            vocab=used.size,
            dtype=self.dtype.name,
            documents=self.counts["documents"],
            tokens=self.counts["tokens"],
            words=self.counts["words"],
            bytes=self.counts["bytes"],
            highest=self.counts["highest"],
            bos=bos,
            eos=eos,
            chat=chat,
            left_out=dict(sorted(left_out.items())),
            files={suffix: manifest.about(Path(self.prefix + suffix)) for suffix in [".idx", *kept]},
        )
        manifest.write(self.prefix, made)
        return made


# ------------------------------------------------------------------------------------------------ the journal


def _identity(options: Options, files: Sequence[str], used: Tokenizer) -> dict[str, Any]:
    """What has to be the same for a second try to go on with the first one's files."""
    sizes = [os.path.getsize(f) if "://" not in f else -1 for f in files]
    asked = json.loads(json.dumps(asdict(options)))
    return {"options": asked, "tokenizer": used.hash, "files": [[f, n] for f, n in zip(files, sizes, strict=True)]}


def _note(path: Path, identity: dict[str, Any], place: Place, left_out: Counter[str], sinks: Sequence[_Sink]) -> None:
    for sink in sinks:
        sink.flush()
    values = {"of": identity, "place": asdict(place), "left_out": left_out, "counts": [s.counts for s in sinks]}
    new = path.with_name(path.name + ".tmp")
    new.write_text(json.dumps(values), encoding="utf-8")
    os.replace(new, path)


def _resume(
    path: Path, identity: dict[str, Any], outputs: int, say: Callable[[str], None]
) -> tuple[Place, Counter[str], list[dict[str, int]]]:
    """Where to go on: the journal's last entry, or the beginning."""
    if not path.exists():
        return Place(), Counter(), [{}] * outputs
    values = json.loads(path.read_text(encoding="utf-8"))
    if values["of"] != identity:
        raise DataError(f"{path}: is of another command or input; finish that one, or remove it")
    place = Place(values["place"]["file"], values["place"]["record"], Counter(values["place"]["left_out"]))
    say(f"goes on after document {place.record:,} of file {place.file + 1}")
    return place, Counter(values["left_out"]), values["counts"]
