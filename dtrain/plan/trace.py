"""A predicted step as Chrome trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process for each pipeline coordinate, a thread for each of its streams, a counter for the memory that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtrain.plan.predict import Prediction
from dtrain.plan.timeline import COMPUTE, Span
from dtrain.program.interpret import unit_segment


def trace(p: Prediction) -> dict[str, Any]:
    """The JSON Object Format of "Trace Event Format": times in microseconds."""
    return {"displayTimeUnit": "ms", "traceEvents": [e for pp in range(len(p.memory)) for e in _events(p, pp)]}


def _events(p: Prediction, pp: int) -> Iterator[dict[str, Any]]:
    streams = streams_of(p.timeline.spans[pp])
    yield {"ph": "M", "name": "process_name", "pid": pp, "args": {"name": f"pp {pp}"}}
    for tid, stream in enumerate(streams):
        yield {"ph": "M", "name": "thread_name", "pid": pp, "tid": tid, "args": {"name": stream}}
    for s in p.timeline.spans[pp]:
        yield {
            "ph": "X",
            "name": name_of(p, s),
            "cat": "compute" if s.stream == COMPUTE else "communication",
            "pid": pp,
            "tid": streams.index(s.stream),
            "ts": s.start * 1e6,
            "dur": (s.end - s.start) * 1e6,
            "args": {"action": str(s.action), "waits_us": s.wire * 1e6},
        }
    for at, held in memory_over_time(p, pp):
        yield {"ph": "C", "name": "memory", "pid": pp, "ts": at * 1e6, "args": {"bytes": held}}


def streams_of(spans: tuple[Span, ...]) -> list[str]:
    """Kernels first, then the communicators in the order of their first use."""
    return list(dict.fromkeys([COMPUTE, *(s.stream for s in spans)]))


def name_of(p: Prediction, s: Span) -> str:
    """`F block 3, microbatch 0`, `SEND act, microbatch 2`, `UPDATE`."""
    a = s.action
    segment, layer = unit_segment(a.unit, p.plan.job.layers) if a.unit >= 0 else ("", 0)
    part = a.what if a.kind in ("SEND", "RECV") else f"{segment} {layer}" if segment == "block" else segment
    return " ".join(x for x in (a.kind, part) if x) + (f", microbatch {a.mb}" if a.mb >= 0 else "")


def memory_over_time(p: Prediction, pp: int) -> list[tuple[float, int]]:
    """Seconds from which on a rank at a coordinate holds so many bytes (reserve included). What is no work of its own
    (FREE, the start of a transfer) happens when the kernels before it have ended."""
    computes = iter([s for s in p.timeline.spans[pp] if s.stream == COMPUTE])
    span, now = next(computes, None), 0.0
    out: list[tuple[float, int]] = []
    for action, held in zip(p.plan.train[pp], p.memory[pp].over_time, strict=True):
        mine = span is not None and span.action == action
        if span is not None and mine:
            now = max(now, span.start)
        if not out or out[-1][1] != held:
            out.append((now, held))
        if span is not None and mine:
            now, span = span.end, next(computes, None)
    return [*out, (p.step_seconds, out[-1][1])] if out else []
