"""How the ranks of a machine watch one another: heartbeats, reports of failures, and who is to blame.

Each rank has three files in a folder that the ranks of a machine share: `rank3.beat`, a small memory map of
where it is; `rank3.json`, why it failed; `rank3.stack`, where its threads were when it crashed or was asked.
No process of the run is needed to read them, so a rank that hangs or dies is seen all the same.
"""

from __future__ import annotations

import json
import linecache
import mmap
import os
import re
import signal
import struct
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# The record: pid and last signal at 0, then what every beat writes: step, when, phase, what.
_WHO = struct.Struct("<qq")
_BEAT = struct.Struct("<qdq104s")
_SIZE = 2 * 8 + _BEAT.size
PHASES = ("start", "step", "save", "done")


@dataclass(frozen=True)
class Beat:
    """Where a rank was last: `at` in seconds of the machine's monotonic clock, `signal` 0 when none came."""

    rank: int
    pid: int
    signal: int
    step: int
    at: float
    phase: str
    what: str


def heart(folder: Path, rank: int) -> mmap.mmap:
    """Create a rank's beat file; from here on it counts as started."""
    path = folder / f"rank{rank}.beat"
    path.write_bytes(bytes(_SIZE))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _SIZE)
    _write(memory, 0, 0, b"start")
    _WHO.pack_into(memory, 0, os.getpid(), 0)
    return memory


def _write(memory: mmap.mmap, step: int, phase: int, what: bytes) -> None:
    # In one copy: `pack_into` clears the record first, and a reader in between would see a rank that never beat.
    memory[16:_SIZE] = _BEAT.pack(step, time.monotonic(), phase, what)


def beater(memory: mmap.mmap) -> Callable[[int, str], None]:
    """`beat(step, what)`: what this rank is about to do. `start` and `save` have their own time limits; so
    has the first step, in which kernels are compiled and buffers made, the limit of `start`.
    """
    first: list[int] = []

    def beat(step: int, what: str) -> None:
        if what == "start" or what == "save":
            phase = 0 if what == "start" else 2
        else:
            if not first:
                first.append(step)
            phase = 0 if step == first[0] else 1
        _write(memory, step, phase, what.encode())

    return beat


def note_signal(memory: mmap.mmap, number: int) -> None:
    _WHO.pack_into(memory, 0, os.getpid(), number)


def done(memory: mmap.mmap) -> None:
    """The rank has finished its work; it may now end when it likes."""
    step, _, _, what = _BEAT.unpack_from(memory, 16)
    _write(memory, step, PHASES.index("done"), what)


def beats(folder: Path) -> dict[int, Beat]:
    """Every rank that has started, by rank."""
    out = {}
    for path in folder.glob("rank*.beat"):
        data = path.read_bytes()
        if len(data) < _SIZE:
            continue
        pid, number = _WHO.unpack_from(data, 0)
        step, at, phase, what = _BEAT.unpack_from(data, 16)
        if pid:
            rank = int(path.stem[4:])
            text = what.split(b"\0")[0].decode(errors="replace")
            out[rank] = Beat(rank, pid, number, step, at, PHASES[phase], text)
    return dict(sorted(out.items()))


def alive(pid: int) -> bool:
    """Whether a process exists (a dead one that its parent has not collected yet does not count on Linux)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, or another user's process
        return True


# --------------------------------------------------------------------------------------------------- failures


@dataclass(frozen=True)
class Report:
    """Why a rank failed. `kind`: `user` (a mistake of the user's, the message says it all), `error`,
    `collateral` (it lost its peers or waited for one in vain), `death` (it ended without a word), `hang`."""

    rank: int
    at: float
    kind: str
    message: str
    trace: str = ""


# What gloo, NCCL and the store say when a peer is gone or late.
_LOST_PEER = re.compile(
    r"clos(ed|ing)( the)? (by peer|connection)|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|timed? ?out|network error|remote process|recvvalue failed|ncclsystemerror|ncclremoteerror"
    r"|nccl communicator|failed to recv|stop_waiting|wait timeout|store.*(down|failed)|socket",
    re.IGNORECASE,
)


def is_ours(error: BaseException) -> bool:
    """Whether dtrain raised it for a person to read: its message is one line that needs no traceback."""
    return type(error).__module__.partition(".")[0] == "dtrain"


def report(rank: int, error: BaseException) -> Report:
    """An exception that ended a rank."""
    message = " ".join(str(error).split("\n")[0].split()) if is_ours(error) else _line(error)
    trace = "".join(traceback.format_exception(error))
    lost = isinstance(error, (RuntimeError, OSError)) and _LOST_PEER.search(str(error)) is not None
    kind = "user" if is_ours(error) else "collateral" if lost else "error"
    return Report(rank, time.monotonic(), kind, message, trace)


def _line(error: BaseException) -> str:
    """`ValueError: message`, on one line of sensible length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else text[:400] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def write_report(folder: Path, r: Report) -> None:
    path = folder / f"rank{r.rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(asdict(r)))
    os.replace(path.with_suffix(".new"), path)


def reports(folder: Path) -> list[Report]:
    return [Report(**json.loads(path.read_text())) for path in sorted(folder.glob("rank*.json"))]


def death(rank: int, at: float, code: int | None) -> Report:
    """A rank that ended without a report; `code` as multiprocessing has it, minus the signal's number, None
    where nobody knows."""
    if code is None:
        return Report(rank, at, "death", "was killed or ended without a word")
    if code >= 0:
        return Report(rank, at, "death", f"ended without a word, exit code {code}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hints = {"SIGKILL": "; often out of memory", "SIGBUS": "; often a mapped file that was cut short meanwhile"}
    hint = hints.get(name, "")
    return Report(rank, at, "death", f"was killed by signal {-code} ({name}{hint})")


def _doubtful(r: Report) -> bool:
    """A death that may only be the libraries' answer to a peer's: NCCL aborts a process that waited in
    vain."""
    return r.kind == "death" and ("SIGABRT" in r.message or "exit code" in r.message)


def first_cause(found: Iterable[Report]) -> Report | None:
    """The failure that the others follow from: what a peer's end or absence explains counts last, then the
    first in time."""
    return min(found, key=lambda r: (2 if r.kind == "collateral" else 1 if _doubtful(r) else 0, r.at), default=None)


def in_vain(found: Iterable[Report]) -> bool:
    """Whether all that is known is that ranks gave up waiting: then a rank that is still there is the
    cause."""
    known = list(found)
    if any(r.kind != "collateral" and not _doubtful(r) for r in known):
        return False
    return any(re.search(r"timed? ?out|SIGABRT", r.message, re.IGNORECASE) for r in known)


# ------------------------------------------------------------------------------------------------------ hangs


def overdue(seen: Mapping[int, Beat], limits: Mapping[str, float], now: float) -> float | None:
    """The time limit in seconds that some rank has outrun, or None. While any rank is in a longer phase, such
    as a save, the others may be waiting for it, so that phase's limit holds for all."""
    running = [b for b in seen.values() if b.phase != "done"]
    if not running:
        return None
    limit = max(limits[b.phase] for b in running)
    return limit if any(now - b.at > limit for b in running) else None


def behind(seen: Mapping[int, Beat], stacks: Mapping[int, str], gave_up: Collection[int] = ()) -> int | None:
    """The rank that the others wait for: one that is not itself waiting in a collective, at the earliest
    step, silent for the longest. None if all have finished or are among those that `gave_up` waiting."""
    running = [b for b in seen.values() if b.phase != "done" and b.rank not in gave_up]
    late = min(running, key=lambda b: (waits(stacks.get(b.rank, "")), b.step, b.at), default=None)
    return None if late is None else late.rank


_FRAME = re.compile(r'File "(.*)", line (\d+)')
_WAITING = re.compile(
    r"\bwait|barrier|all_?reduce|all_?gather|reduce_scatter|all_to_all|broadcast|\brecv|\bsend|init_process_group"
    r"|new_group|\.get\("
)


def waits(stack: str) -> bool:
    """Whether a dumped stack is that of a rank inside a collective (or, what looks the same, in some
    operation of torch). Without a stack: yes, so that a rank with one that says otherwise comes first."""
    frames = _FRAME.findall(stack.partition("Current thread")[2])
    if not frames:
        return True
    path, number = frames[0]
    return "/torch/" in path or _WAITING.search(linecache.getline(path, int(number))) is not None


def stacks(folder: Path, seen: Mapping[int, Beat], patience: float = 2.0) -> dict[int, str]:
    """Ask every rank where its threads are. Works while they are stuck: the answer comes from a signal
    handler that needs no Python."""
    files = {rank: folder / f"rank{rank}.stack" for rank in seen}
    sizes = {rank: path.stat().st_size if path.exists() else -1 for rank, path in files.items()}
    for rank, b in seen.items():
        if sizes[rank] >= 0 and alive(b.pid):
            os.kill(b.pid, signal.SIGUSR1)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(0.1)
        if all(size < 0 or files[rank].stat().st_size > size for rank, size in sizes.items()):
            time.sleep(0.1)
            break
    return {rank: files[rank].read_text(errors="replace") for rank, size in sizes.items() if size >= 0}


def hang(
    seen: Mapping[int, Beat],
    stack: Mapping[int, str],
    limits: Mapping[str, float],
    now: float,
    gave_up: Collection[int] = (),
) -> Report | None:
    """The verdict on a run that makes no progress; None if no rank that is still there can be blamed."""
    rank = behind(seen, stack, gave_up)
    if rank is None:
        return None
    culprit = seen[rank]
    waiting: dict[str, list[int]] = {}
    for b in seen.values():
        if b.rank != rank and b.phase != "done":
            where = b.what if b.step == culprit.step else f"{b.what} of step {b.step}"
            waiting.setdefault(where, []).append(b.rank)
    others = "; ".join(
        f"rank {r[0]} waits in {w}" if len(r) == 1 else f"ranks {', '.join(map(str, r))} wait in {w}"
        for w, r in waiting.items()
    )
    limit = f"run.timeouts.{culprit.phase} is {limits[culprit.phase]:g} s"
    limit = "the others gave up waiting" if gave_up else limit
    text = f"no progress for {now - culprit.at:.0f} s ({limit})"
    return Report(rank, now, "hang", f"{text}; {others}" if others else text, stack.get(rank, ""))


# ----------------------------------------------------------------------------------------------- what is told


def verdict(r: Report, b: Beat | None, place: str = "") -> str:
    """One line on the first cause: `rank 2 failed at step 3 in REDUCE(4): ...`. `place` is the rank's
    coordinates."""
    if r.kind == "user":
        return r.message
    who = f"rank {r.rank}" + (f" ({place})" if place else "")
    where = "" if b is None else f"at step {b.step} in {b.what}" if b.step > 0 else f"in {b.what}"
    if r.kind == "death":
        return f"{who} {r.message} {where}".rstrip()
    verb = {"hang": "hangs", "collateral": "lost a peer"}.get(r.kind, "failed")
    return f"{who} {verb}{' ' if where else ''}{where}: {r.message}"


def write_errors(
    path: Path,
    line: str,
    cause: Report,
    found: Iterable[Report],
    seen: Mapping[int, Beat],
    extra: Mapping[str, str],
) -> None:
    """Everything that is known of a failure, the first cause on top. `extra`: heading -> text."""
    now = time.monotonic()
    parts = [line, cause.trace]
    parts += [
        "ranks",
        *(f"  rank {b.rank}: step {b.step}, {b.what}, last seen {now - b.at:.1f} s ago" for b in seen.values()),
        "",
    ]
    for r in found:
        if r != cause:
            parts += [f"rank {r.rank} then ({r.kind}): {r.message}", r.trace]
    for heading, text in extra.items():
        if text.strip():
            parts += [heading, text]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")
