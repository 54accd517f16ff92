"""What a run tells: metrics.jsonl, TensorBoard events and the console, all from one rank.

Conventions. A token is counted once, whatever the number of ranks that share it. MFU counts 6 FLOPs a token
for each weight that is multiplied (the input table is only looked up), attention once at its true cost (half
of it for a causal model), and no recomputation.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def flops_per_token(params: int, layers: int, heads: int, head_dim: int, seq: int, causal: bool = True) -> float:
    """Model FLOPs of forward and backward for one token.

    `params` are the weights without the input table (a tied table counts: it is the head's matrix); `heads`
    are query heads. 6 * params for the matmuls; 12 * layers * heads * head_dim * seq for attention's two
    products (Chowdhery et al. 2022, appendix B), of which a causal model needs half.
    """
    return 6.0 * params + 12.0 * layers * heads * head_dim * seq * (0.5 if causal else 1.0)


def tokens_per_s(batch: int, seq: int, step_s: float) -> float:
    """Tokens a second of the whole run; `batch` is the global batch in sequences, `step_s` seconds a step."""
    return batch * seq / step_s


def mfu(rate: float, flops: float, gpus: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0..1: `rate` tokens/s of the whole run at `flops` a token, over `gpus` devices
    of `peak` FLOP/s each; None where the peak is unknown."""
    return None if peak is None else rate * flops / (gpus * peak)


def peak_memory(device: torch.device) -> int:
    """Bytes, this rank's highest so far: what torch allocated on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Row:
    """One training step. `loss` is the global loss: the writing rank has to have received it, for no
    placeholder is ever written. `step_s` seconds a step, `tokens_per_s` of the whole run, `mfu` None where
    the peak is unknown, `data_wait` the share of the time (0..1) that the writing rank waited for data, `extra` further
    columns (the loss scale)."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    mfu: float | None
    peak_memory_bytes: int
    data_wait: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LogConfig:
    """`folder` of the run; `steps` it will have; `first` the first step now to be done (1, or one past the
    checkpoint); `writes` on the one rank that tells, elsewhere every call does nothing; `quiet` leaves the
    console alone."""

    folder: Path
    steps: int
    first: int = 1
    writes: bool = True
    quiet: bool = False


@dataclass(frozen=True)
class Log:
    """An open log; any part may be absent."""

    cfg: LogConfig
    file: TextIO | None = None
    board: SummaryWriter | None = None
    console: Console | None = None
    bar: Progress | None = None
    task: TaskID | None = None


@contextmanager
def open_log(cfg: LogConfig, console: Console | None = None) -> Iterator[Log]:
    """Open `folder/metrics.jsonl` and `folder/tensorboard`, and on a terminal a live display.

    A run that resumes appends; rows of steps at or past `first`, which it will do again, are dropped. With
    `first` 1 everything starts over.
    """
    if not cfg.writes:
        yield Log(cfg)
        return
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and needed on one rank only

    cfg.folder.mkdir(parents=True, exist_ok=True)
    path = cfg.folder / "metrics.jsonl"
    _rewind(path, cfg.first)
    console = None if cfg.quiet else console or Console()
    bar = None
    if console is not None and console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        bar = Progress(*columns, console=console)
    board = SummaryWriter(str(cfg.folder / "tensorboard"), purge_step=cfg.first if cfg.first > 1 else 0)
    try:
        with open(path, "a", encoding="utf-8") as file:
            if bar is None:
                yield Log(cfg, file, board, console)
            else:
                with bar:
                    task = bar.add_task("", total=cfg.steps, completed=cfg.first - 1, text="")
                    yield Log(cfg, file, board, console, bar, task)
    finally:
        board.close()


def advance(log: Log, step: int) -> None:
    """Move the live display to a finished step that is not logged."""
    if log.bar is not None and log.task is not None:
        log.bar.update(log.task, completed=step)


def record(log: Log, row: Row) -> None:
    """Write one training step everywhere."""
    values = asdict(row)
    values |= values.pop("extra")
    _write(log, "train", values)
    left = duration((log.cfg.steps - row.step) * row.step_s)
    text = f"loss {row.loss:.4f}  norm {row.grad_norm:.3g}  lr {row.lr:.3g}  {row.tokens_per_s:,.0f} tokens/s"
    text += "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
    text += f"  {row.peak_memory_bytes / 2**30:.2f} GiB  left {left}"
    if log.bar is not None and log.task is not None:
        log.bar.update(log.task, completed=row.step, text=text)
    else:
        say(log, f"step {row.step}/{log.cfg.steps}  {text}")


def record_validation(log: Log, step: int, loss: float) -> None:
    """Write the held-out loss after a step everywhere."""
    _write(log, "valid", {"step": step, "valid_loss": loss})
    say(log, f"step {step}/{log.cfg.steps}  held-out loss {loss:.4f}")


def record_predicted(log: Log, step: int, values: Mapping[str, float | int | None]) -> None:
    """Write what was predicted of the run that ended with a step, beside what was measured."""
    _write(log, "predicted", {"step": step, **values})


def say(log: Log, text: str) -> None:
    """One line for a person, above the live display if there is one."""
    if log.console is not None:
        log.console.print(text, soft_wrap=True, markup=False, highlight=False)


def warn(log: Log, text: str) -> None:
    """A line that a quiet run prints too, on stderr."""
    if log.console is not None:
        say(log, text)
    elif log.cfg.writes:
        print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:04:05`."""
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _write(log: Log, group: str, values: Mapping[str, Any]) -> None:
    if log.file is None or log.board is None:
        return
    # JSON has no NaN or infinity; the run stops at one and says so.
    row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    log.file.write(json.dumps(row) + "\n")
    log.file.flush()
    for name, value in values.items():
        if name != "step" and value is not None:
            log.board.add_scalar(f"{group}/{name}", value, values["step"])
    log.board.flush()


def _rewind(path: Path, first: int) -> None:
    """Leave the rows before step `first`, then a mark `{"step": ..., "resumed": true, "dropped": rows}`."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if first > 1 and _step(line) < first]
    if first > 1:
        kept.append(json.dumps({"step": first - 1, "resumed": True, "dropped": len(lines) - len(kept)}))
    new = path.with_suffix(".tmp")
    new.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(new, path)


def _step(line: str) -> float:
    """The row's step; infinity for a line that a dying run left half written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
