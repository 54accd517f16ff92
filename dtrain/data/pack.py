"""`dtrain data pack`: tokenise texts once, into Megatron-LM's .bin and .idx with a manifest.

Documents are read in order by one process, tokenised by several and written in order, so the output does not depend on
their number. A journal says how far the files are valid: a second try goes on from there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
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
LONGEST = 2**31 - 1  # tokens of a document, as an .idx can say


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
    if wikitext and values.get("chat"):
        raise DataError("--wikitext: is for texts, not for chat=true")
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
    try:
        return _pack(out, options, workers, say)
    except OSError as e:
        raise DataError(f"{e.filename or out}: {e.strerror or e}; the same command goes on where it stopped") from e
    except BrokenProcessPool as e:
        raise DataError(
            "a worker was killed, often for want of memory; the same command goes on, with fewer --workers"
        ) from e


def _pack(out: str, options: Options, workers: int, say: Callable[[str], None]) -> list[Manifest]:
    used = tokenizer.load(options.tokenizer)
    bos, eos = (tokenizer.token(used, asked, what) for asked, what in ((options.bos, "bos"), (options.eos, "eos")))
    files = documents.files(options.paths, options.source or "text")
    names = [out, f"{out}-valid"] if options.hold_out else [out]
    journal = Path(f"{out}.part.json")
    for path in (Path(name + suffix) for name in names for suffix in (".json", ".bin", ".idx", ".learn")):
        if path.exists() and not journal.exists():
            raise DataError(f"{path}: is there already; remove it, or choose another OUT")
    Path(out).absolute().parent.mkdir(parents=True, exist_ok=True)
    identity = _identity(options, files, used)
    start, left_out, states = _resume(journal, identity, len(names), say)
    dtype = np.dtype(manifest.dtype_for(used.size))
    reading = Faults(options.bad == "skip", Counter(start.left_out))
    work = _Work(options, bos, eos, dtype.str)
    began = told = time.perf_counter()
    before = sum(state.get("bytes", 0) for state in states)

    def progress() -> str:
        size, seconds = sum(s.counts["bytes"] for s in sinks), max(1e-9, time.perf_counter() - began)
        n, t = (sum(s.counts[k] for s in sinks) for k in ("documents", "tokens"))
        rate = (size - before) / seconds / 1e6
        by = "1 worker" if workers == 1 else f"{workers} workers"
        return f"{n:,} documents, {t:,} tokens, {size / 1e6:,.1f} MB of text; {rate:.1f} MB/s, {by}"

    with ExitStack() as files_open:
        sinks = [_Sink(n, dtype, options.chat, state, files_open) for n, state in zip(names, states, strict=True)]
        for number, (place, done) in enumerate(_tokenised(files, start, reading, work, workers), 1):
            for side, sink in enumerate(sinks):
                sink.write(done, side)
            left_out += done.left_out
            if number % _EVERY == 0:
                _note(journal, identity, place, left_out, sinks)
            if time.perf_counter() - told > 2:
                told = time.perf_counter()
                say(f"{_there(place)} of {len(files)}: {progress()}")
        end = Place(len(files), 0, Counter(reading.counts))
        _note(journal, identity, end, left_out, sinks)  # whoever is stopped while it finishes has only that to do again
        made = [sink.finish(used, bos, eos, options.chat, left_out + reading.counts) for sink in sinks]
    journal.unlink(missing_ok=True)
    for name in names:
        Path(f"{name}.sizes.part").unlink(missing_ok=True)
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
    with ProcessPoolExecutor(workers, _context(), _begin, (work,)) as pool:
        try:
            for place, batch in batches:
                waiting.append((place, pool.submit(_do, batch)))
                if len(waiting) > 3 * workers:
                    place, done = waiting.popleft()
                    yield place, done.result()
            for place, done in waiting:
                yield place, done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _context() -> multiprocessing.context.BaseContext:
    """How workers start: as copies of a process that has imported everything, where there is such a way; each would
    need seconds of its own for it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


_mine: list[tuple[Tokenizer, _Work]] = []  # of a worker: a tokenizer cannot be sent to it


def _begin(work: _Work) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes; it ends these
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _mine[:] = [(tokenizer.load(work.options.tokenizer), work)]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # where it was killed nobody would ever tell this process to end
    os._exit(1)


def _do(batch: list[tuple[str, Any]]) -> Packed:
    return _tokenise(*_mine[0], batch)


def _tokenise(used: Tokenizer, work: _Work, batch: list[tuple[str, Any]]) -> Packed:
    options, faults = work.options, Faults(work.options.bad == "skip")
    sides: tuple[list[encode.Encoded], list[encode.Encoded]] = ([], [])
    words = [0, 0]
    before: dict[str, int] = {}
    if options.wikitext:
        batch, before = _natural(batch, faults)
    for d in encode.encode(batch, used, work.bos, work.eos, options.chat, faults):
        held = d.share < options.hold_out
        sides[held].append(d)
        words[held] += before.get(d.where, d.words)
    limit = np.iinfo(work.dtype).max
    for d in (*sides[0], *sides[1]):
        if d.ids.size and int(d.ids.max()) > limit:
            raise DataError(f"{d.where}: id {int(d.ids.max())} does not fit {np.dtype(work.dtype)}")
        if d.ids.size > LONGEST:
            raise DataError(
                f"{d.where}: a document of {d.ids.size:,} tokens; the format holds up to {LONGEST:,}: divide it"
            )
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


def _natural(batch: list[tuple[str, Any]], faults: Faults) -> tuple[list[tuple[str, Any]], dict[str, int]]:
    """WikiText's documents as English, and the words that each had before, by its place."""
    texts: list[tuple[str, Any]] = []
    words = {}
    for where, value in batch:
        try:
            text = value.decode("utf-8") if isinstance(value, bytes) else value
        except UnicodeDecodeError as e:
            documents.fault(faults, "not UTF-8", f"{where}: not UTF-8 ({e})", e)
            continue
        if isinstance(text, str):
            words[where] = original(text)
            text = natural(text)
        texts.append((where, text))
    return texts, words


# ------------------------------------------------------------------------------------------------ writing


class _Sink:
    """OUT.bin and what else grows with it, as OUT.*.part until all is there."""

    def __init__(
        self, prefix: str, dtype: np.dtype[Any], chat: bool, state: Mapping[str, int], files_open: ExitStack
    ) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.counts = Counter(state)
        self.files: dict[str, BinaryIO] = {}
        n, docs = self.counts["tokens"], self.counts["documents"]
        lengths = {".bin": n * dtype.itemsize, ".sizes": docs * 4} | ({".learn": n} if chat else {})
        for suffix, length in lengths.items():
            path, whole = Path(f"{prefix}{suffix}.part"), Path(prefix + suffix)
            if state and whole.exists() and not path.exists():
                os.replace(whole, path)  # the first try was stopped while it finished
            path.touch()
            file = self.files[suffix] = files_open.enter_context(path.open("r+b"))
            _lock(file, path)
            if (size := path.stat().st_size) < length:
                raise DataError(
                    f"{path}: has {size:,} bytes, but the journal beside it says {length:,}; "
                    f"remove {prefix}*.part* to begin anew"
                )
            file.truncate(length)  # what was written after the journal's last entry is done again
            file.seek(length)
        Path(f"{prefix}.json").unlink(missing_ok=True)

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

    def finish(
        self, used: Tokenizer, bos: int | None, eos: int | None, chat: bool, left_out: Mapping[str, int]
    ) -> Manifest:
        counted = Path(f"{self.prefix}.sizes.part")
        sizes = np.memmap(counted, np.int32, "r") if counted.stat().st_size else np.zeros(0, np.int32)
        write_index(Path(f"{self.prefix}.idx"), self.dtype, sizes)
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


def _lock(file: BinaryIO, path: Path) -> None:
    """Raises DataError where another process is writing the file (as where every task of srun packs the same)."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise DataError(f"{path}: another process is packing into it") from e


# ------------------------------------------------------------------------------------------------ the journal


def _identity(options: Options, files: Sequence[str], used: Tokenizer) -> dict[str, Any]:
    """What has to be the same for a second try to go on with the first one's files."""
    found = [(f, os.stat(f) if "://" not in f else None) for f in files]
    asked = json.loads(json.dumps(asdict(options)))
    about = [[f, stat.st_size, stat.st_mtime_ns] if stat else [f] for f, stat in found]
    return {"options": asked, "tokenizer": used.hash, "files": about}


def _note(path: Path, identity: dict[str, Any], place: Place, left_out: Counter[str], sinks: Sequence[_Sink]) -> None:
    for sink in sinks:
        sink.flush()
    values = {"of": identity, "place": asdict(place), "left_out": left_out, "counts": [s.counts for s in sinks]}
    new = path.with_name(path.name + ".tmp")
    new.write_text(json.dumps(values), encoding="utf-8")
    os.replace(new, path)


def _there(place: Place) -> str:
    return f"document {place.record:,} of file {place.file + 1:,}" if place.record else f"file {place.file:,}"


def _resume(
    path: Path, identity: dict[str, Any], outputs: int, say: Callable[[str], None]
) -> tuple[Place, Counter[str], list[dict[str, int]]]:
    """Where to go on: the journal's last entry, or the beginning."""
    if not path.exists():
        return Place(), Counter(), [{}] * outputs
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise DataError(f"{path}: is no journal of a packing ({e}); remove it to begin anew") from e
    if values["of"] != identity:
        raise DataError(f"{path}: is of another command, or its input has changed; finish that one, or remove it")
    place = Place(values["place"]["file"], values["place"]["record"], Counter(values["place"]["left_out"]))
    say(f"goes on after {_there(place)}")
    return place, Counter(values["left_out"]), values["counts"]
