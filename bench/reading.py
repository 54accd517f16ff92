"""What is read off the programs of rows of published runs: lowered once, and kept in a folder."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from rows import Row, SkipError, layout_of  # noqa: E402

import dtrain  # noqa: E402
from dtrain import layout as layouts  # noqa: E402
from dtrain.layout import Layout, LayoutError  # noqa: E402
from dtrain.plan import Plan, plan  # noqa: E402
from dtrain.plan.loads import Loads, loads_of  # noqa: E402
from dtrain.plan.memory import memories  # noqa: E402
from dtrain.program.lower import trace  # noqa: E402
from dtrain.program.shared import alike, cut_of  # noqa: E402
from dtrain.sharding import LoweringError  # noqa: E402

Say = Callable[[str], None]
PACKAGE = Path(dtrain.__file__).parent
# What lowering and memory are made of.
LOWERING = (
    *("program/*.py", "models/*.py", "layout/*.py"),
    *(f"plan/{name}.py" for name in ("__init__", "memory", "footprint", "liveness", "loads")),
    *("axes.py", "hardware.py", "mesh.py", "ops.py", "rng.py", "sharding.py", "storage.py"),
)


@dataclass(frozen=True)
class Read:
    """What is read off a row's lowered program: its loads, and the bytes that its heaviest rank holds, without the
    reserve. Neither depends on the constants."""

    loads: Loads
    held: int


def read_all(rows: Sequence[Row], cache: Path, workers: int = 2, say: Say = lambda line: None) -> dict[str, Read | str]:
    """What is read off the rows' programs, by id, or why a row is skipped. Rows that compute alike share a trace, and
    what is read is kept in the folder `cache`, so that a run that is stopped goes on where it was."""
    out: dict[str, Read | str] = {}
    shared: dict[str, list[Row]] = {}
    for row in rows:
        try:
            shared.setdefault(repr(alike(plan(cut(layout_of(row), 1)).job)), []).append(row)
        except (SkipError, LayoutError) as error:
            out[row["id"]] = str(error)
    cache.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), 0
    with _mapping(workers) as map_:
        for found in map_(_read_rows, shared.values(), [cache] * len(shared)):
            out |= found
            done += len(found)
            say(f"{done} of {sum(map(len, shared.values()))} rows, {time.monotonic() - began:.0f} s")
    return out


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """map in this process, or over processes of one thread each (spawned: forked ones would inherit torch's)."""
    if workers == 1:
        yield map
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        yield pool.map


def _read_rows(rows: Sequence[Row], cache: Path) -> dict[str, Read | str]:
    """The rows of one trace."""
    found: dict[str, Read | str] = {}
    traced, loads = None, {}
    for row in rows:
        layout = layout_of(row)
        path = cache / (hashlib.sha256(repr((code(), layout)).encode()).hexdigest()[:24] + ".pickle")
        if path.exists():
            found[row["id"]] = pickle.loads(path.read_bytes())
            continue
        made, ways = shortened(layout), (layout.run.compile != "off", layout.kernels.async_tp)
        try:
            traced = traced or trace(alike(made.job))
            program = cut_of(made.job, traced)
        except LoweringError as error:
            found[row["id"]] = str(error)
        else:
            key = repr((made.job, ways))
            loads[key] = loads.get(key) or loads_of(program, *ways)
            found[row["id"]] = Read(loads[key], max(m.peak - m.reserve for m in memories(made, program)))
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found[row["id"]]))
        part.replace(path)
    return found


@cache
def code() -> str:
    """A digest of the code that what is read off a program depends on."""
    digest = hashlib.sha256((HERE / "squared_relu.py").read_bytes())
    for file in sorted(f for part in LOWERING for f in PACKAGE.glob(part)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def shortened(layout: Layout, times: int = 4) -> Plan:
    """The plan of a layout, of a step of at most `times` microbatches for each stage: the pipeline is full by then,
    and more of them add the same time each and no memory but their tokens."""
    return plan(cut(layout, min(layouts.microbatches(layout), times * layout.sizes["pp"])))


def cut(layout: Layout, microbatches: int) -> Layout:
    batch = layout.data.batch // layouts.microbatches(layout) * microbatches
    return layout.model_copy(update={"data": layout.data.model_copy(update={"batch": batch})})
