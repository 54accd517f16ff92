"""What a run measured beside what its plan predicted, so that a prediction can be trusted as far as it deserves."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.hardware import show_size
from dtrain.plan.predict import Prediction
from dtrain.plan.report import show_seconds


@dataclass(frozen=True)
class Measured:
    """A run: `step_seconds` of a step (None where there was none to time), and the most bytes that a rank held,
    `memory`: what torch allocated on a GPU, or, with `resident`, all memory of a process on a CPU."""

    step_seconds: float | None
    memory: int
    resident: bool


def tensors(p: Prediction) -> int:
    """Bytes that the heaviest rank is predicted to allocate: its peak without the reserve for what torch does not
    count."""
    return p.memory[p.heaviest].peak - p.memory[p.heaviest].reserve


def beside(p: Prediction, m: Measured) -> list[str]:
    """A line a figure: measured, predicted and by how much the first differs. What is not known or not comparable is
    said instead of a figure."""
    layout, lines = p.plan.layout, []
    tokens = layout.data.batch * layout.data.seq
    if not p.timed:
        lines.append(f"no predicted time: what a {layout.cluster.gpu} reaches in {layout.run.precision} is not known")
    elif m.step_seconds is None:
        lines.append(f"predicted step time {show_seconds(p.step_seconds)}; too few steps to measure it")
    else:
        for name, got, said, show in (
            ("step time", m.step_seconds, p.step_seconds, show_seconds),
            ("tokens/s", tokens / m.step_seconds, tokens / p.step_seconds, lambda n: f"{n:,.0f}"),
        ):
            lines.append(_line(name, show(got), show(said), got / said - 1))
    if m.resident:
        lines.append(
            f"predicted memory {show_size(tensors(p))} of tensors on the heaviest rank; measured is the whole process, "
            "Python and its libraries included"
        )
    else:
        said = tensors(p)
        lines.append(_line("peak memory", show_size(m.memory), show_size(said), m.memory / said - 1))
    return lines


def _line(name: str, got: str, said: str, off: float) -> str:
    return f"{name:<12}{got:>11} measured {said:>11} predicted  {off:+.1%}"


def columns(p: Prediction, m: Measured) -> dict[str, float | int | None]:
    """The same for metrics.jsonl; times are None where they are not known."""
    tokens = p.plan.layout.data.batch * p.plan.layout.data.seq
    return {
        "measured_step_s": m.step_seconds,
        "predicted_step_s": p.step_seconds if p.timed else None,
        "predicted_tokens_per_s": tokens / p.step_seconds if p.timed else None,
        "predicted_peak_memory_bytes": tensors(p),
    }
