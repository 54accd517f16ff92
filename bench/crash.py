"""Does the newest whole checkpoint always load? Kills, full disks and damaged files, counted.

Two processes save small tensors over gloo without end, in the foreground and in the background, pruning as they go,
and are killed at random moments; each life goes on from what the one before left. Then checkpoints are written to a
disk that is too small, and files of good ones are damaged in turn. After each the checkpoint that a run would go on
from is loaded and compared, bit for bit, with what was saved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain import checkpoint
from dtrain.checkpoint import CheckpointError, Piece, Record, SaveConfig

WORLD, ROWS, COLUMNS = 2, 1024, 512  # 2 MiB a rank and tensor
LIFE_S = 0.5  # at most, after both ranks are up: several saves
NAMES = ("master/a", "exp_avg/a", "exp_avg_sq/a")


def rows(step: int, rank: int, name: str) -> torch.Tensor:
    """What a rank has of a tensor after a step: no two steps, ranks or tensors alike."""
    first = ((step * WORLD + rank) * len(NAMES) + NAMES.index(name)) * 7919
    return torch.arange(first, first + ROWS * COLUMNS, dtype=torch.int32).view(torch.float32).view(ROWS, COLUMNS)


def pieces(step: int, rank: int) -> dict[str, Piece]:
    return {n: Piece(rows(step, rank, n), (ROWS * rank, 0), (ROWS * WORLD, COLUMNS)) for n in NAMES}


def loaded(folder: Path, step: int) -> bool:
    """Whether a checkpoint can be read and holds what was saved."""
    found = {n: Piece(torch.zeros(ROWS * WORLD, COLUMNS), (0, 0), (ROWS * WORLD, COLUMNS)) for n in NAMES}
    checkpoint.restore(folder / f"step-{step}", found, set(NAMES), None, 1)
    right = {n: torch.cat([rows(step, rank, n) for rank in range(WORLD)]) for n in NAMES}
    return all(torch.equal(found[n].tensor.view(torch.int32), right[n].view(torch.int32)) for n in NAMES)


# ------------------------------------------------------------------------------------------------------- kills


def one_rank(rank: int, folder: Path, meet: str, first: int, busy: str | None, said: int) -> None:
    """Save for ever; rank 0 writes each step to `said` when a run would print that it is saved."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)
    with checkpoint.open_saver(SaveConfig(folder, rank, WORLD, None, busy, keep=(2, 5))) as saver:
        if rank == 0:
            os.write(said, b"0\n")
        for step in itertools.count(first):
            saver.save(Record(step, {}, ""), pieces(step, rank))
            for of, line in saver.news():
                if rank == 0 and line.startswith("saved"):
                    os.write(said, f"{of}\n".encode())


def life(folder: Path, first: int, busy: str | None, seconds: float) -> int:
    """Start both ranks, kill them after so long, and return the last step that they called saved (0: none)."""
    context = multiprocessing.get_context("fork")
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as name:
        args = (folder, f"file://{name}/meet", first, busy, write)
        ranks = [context.Process(target=one_rank, args=(rank, *args)) for rank in range(WORLD)]
        for p in ranks:
            p.start()
        os.close(write)
        with os.fdopen(read) as said:
            assert said.readline() == "0\n", "the ranks did not start"
            time.sleep(seconds)
            for p in ranks:
                if p.exitcode is not None:
                    raise RuntimeError(f"a rank ended by itself, with {p.exitcode}")
            for p in random.sample(ranks, len(ranks)):
                p.kill()
            for p in ranks:
                p.join()
            return max((int(line) for line in said.read().split("\n")[:-1]), default=0)


def kills(folder: Path, count: int) -> dict[str, int]:
    """Kill so many lives. What is loaded must be the newest checkpoint that is there, and no older than was said."""
    good = unfinished = first = 0
    for i in range(count):
        left = unfinished_in(folder)
        told = life(folder, first + 1, (None, "wait")[i % 2], random.uniform(0, LIFE_S))
        unfinished += bool(unfinished_in(folder) - left)
        record, lines = checkpoint.choose(folder)
        step = record.step if record else 0
        newest = checkpoint.latest(folder) or 0
        good += told <= step == newest and not lines and (step == 0 or loaded(folder, step))
        first = step
    return {"tried": count, "good": good, "with a checkpoint half written": unfinished, "checkpoints written": first}


def unfinished_in(folder: Path) -> set[tuple[str, int]]:
    return {(p.name, p.stat().st_ctime_ns) for p in folder.glob("step-*.tmp")}


# -------------------------------------------------------------------------------------------------- a full disk


def whole(step: int) -> dict[str, Piece]:
    """What both ranks have, for one process."""
    shape = (ROWS * WORLD, COLUMNS)
    return {n: Piece(torch.cat([rows(step, rank, n) for rank in range(WORLD)]), (0, 0), shape) for n in NAMES}


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A tmpfs of so many bytes, where it may be mounted; else no file of this process may be larger than `size` less
    what is there."""
    folder.mkdir()
    if may_mount(folder):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def may_mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["umount", folder], check=True)
    return True


def full_disks(folder: Path, count: int) -> dict[str, int]:
    """A first checkpoint fits, the second one does not, by more and less. It must fail in one line, leave nothing
    behind and the first one as it was."""
    folder.mkdir()
    mounted = may_mount(folder)
    checkpoint.save(folder / "sizes", Record(1, {}, ""), whole(1))
    size = sum(f.stat().st_size for f in (folder / "sizes" / "step-1").iterdir())
    good = 0
    for i in range(count):
        disk = folder / f"disk-{i}"
        share = (i + 0.5) / count
        with small_disk(disk, int(size * (1 + share)) if mounted else size):
            checkpoint.save(disk / "run", Record(1, {}, ""), whole(1))
            if not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * share), resource.RLIM_INFINITY))
            saver = checkpoint.Saver(SaveConfig(disk / "run", busy=(None, "wait")[i % 2]))
            try:
                saver.save(Record(2, {}, ""), whole(2))
                saver.settle()
                failed = ""
            except CheckpointError as error:
                failed = str(error)
            record, lines = checkpoint.choose(disk / "run")
            alone = [p.name for p in (disk / "run").iterdir()] == ["step-1"]
            one_line = failed.startswith("no checkpoint of step 2: ") and "\n" not in failed
            good += one_line and alone and not lines and record is not None and loaded(disk / "run", 1)
    return {"tried": count, "good": good, "on a tmpfs": count if mounted else 0}


# ------------------------------------------------------------------------------------------------------- damage


def truncate(file: Path) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def unreadable(file: Path) -> None:
    if os.geteuid():
        file.chmod(0)
    else:  # root reads what it likes, but not a link to itself
        file.unlink()
        file.symlink_to(file.name)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "one bit flipped": flip,
    "unreadable": unreadable,
    "missing": Path.unlink,
}


def damage(folder: Path, how: Callable[[Path], None], count: int) -> dict[str, int]:
    """Damage one file of the newest of two checkpoints, each file in turn. It must be named and the older one loaded,
    or refused where it is asked for; a flipped bit that changes nothing (white space in the manifest) may be loaded."""
    for step in (1, 2):
        checkpoint.save(folder / "good", Record(step, {}, ""), whole(step))
    names = sorted(f.name for f in (folder / "good" / "step-2").iterdir())
    good = harmless = 0
    for i in range(count):
        copy = folder / f"{i}"
        shutil.copytree(folder / "good", copy, copy_function=os.link)
        file = copy / "step-2" / names[i % len(names)]
        file.unlink()
        shutil.copy(folder / "good" / "step-2" / file.name, file)
        how(file)
        if not checkpoint.problems(copy / "step-2"):
            harmless += 1
            good += loaded(copy, 2)
            continue
        try:
            checkpoint.choose(copy, asked=2)
            refused = False
        except CheckpointError as error:
            refused = file.name in str(error) and "\n" not in str(error)
        record, lines = checkpoint.choose(copy)
        named = any("step-2 is damaged and skipped" in line and file.name in line for line in lines)
        good += refused and named and record is not None and record.step == 1 and loaded(copy, 1)
        shutil.rmtree(copy)
    return {"tried": count, "good": good, "harmless": harmless}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--disks", type=int, default=20)
    parser.add_argument("--damages", type=int, default=100, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="on the disk to be tried; by default that of temporary files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(args.seed)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    found: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        found["killed while saving"] = kills(folder / "kills", args.kills)
        found["disk full"] = full_disks(folder / "disks", args.disks)
        for kind, how in DAMAGE.items():
            found[f"a file {kind}"] = damage(folder / kind, how, args.damages)
    if args.json:
        print(json.dumps({"seed": args.seed, "seconds": round(time.monotonic() - began, 1), "counts": found}, indent=1))
    else:
        for what, counts in found.items():
            more = ", ".join(f"{n} {word}" for word, n in list(counts.items())[2:] if n)
            print(
                f"{what:24} newest whole one loaded {counts['good']} of {counts['tried']}"
                + (f" ({more})" if more else "")
            )
    return 0 if all(counts["good"] == counts["tried"] for counts in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
