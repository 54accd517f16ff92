"""A prediction as one HTML page that needs no network: timeline, memory over time, bytes by link, placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dtrain.hardware import show_size
from dtrain.plan import ledger as ledgers
from dtrain.plan.advice import Advice
from dtrain.plan.ledger import Entry
from dtrain.plan.memory import capacity
from dtrain.plan.predict import Prediction
from dtrain.plan.report import (
    FORMULAS,
    PARTS,
    assumed,
    change,
    figures,
    heading,
    merged,
    show_bytes,
    show_seconds,
    verdict,
)
from dtrain.plan.timeline import COMPUTE, Span
from dtrain.plan.trace import memory_over_time, name_of

WIDTH, LEFT = 1100, 50  # of a picture and of its labels, in pixels
_NEAR = 1 / 2000  # of a step: spans that are closer are drawn as one, so that a page does not grow with the layers
_COLORS = {"F": "#4f7fd9", "B": "#3f9d6c", "I": "#3f9d6c", "W": "#8cc7a5", "wire": "#e08a3c"}
_OTHER = "#8a6fc0"  # gathers' copies, reductions, the update
_KINDS = {
    "F": "forward",
    "B": "backward",
    "W": "backward, for weights",
    "other": "update and packing",
    "wire": "communication",
}
_PARTS = ("#4f7fd9", "#3f9d6c", "#8a6fc0", "#e08a3c", "#5fb3c4", "#b8b04e", "#c96a8b", "#8c8c8c", "#cfcfcf")
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1d2430;max-width:1160px;margin:28px auto;padding:0 20px}
h1{font-size:24px;margin:0 0 2px}h2{font-size:17px;margin:34px 0 8px}p{margin:4px 0;color:#5a6472}
.verdict{display:inline-block;margin:12px 0;padding:8px 14px;border-radius:8px;font-weight:600;background:#eef1f5}
.yes{background:#e2f3e8;color:#176b3a}.no{background:#fbe4e2;color:#a3231b}
.cards{display:flex;flex-wrap:wrap;gap:10px}.card{border:1px solid #e1e5ea;border-radius:8px;padding:8px 14px}
.card b{display:block;font-size:20px}.card span,.key{color:#5a6472;font-size:13px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 14px}
.key i:first-child{margin-left:0}
table{border-collapse:collapse;font-size:13px}th{text-align:left;color:#5a6472;font-weight:500}
th,td{padding:3px 14px 3px 0;border-bottom:1px solid #eceff2;white-space:nowrap}td.n{text-align:right}
.wide{overflow-x:auto}.bar{height:15px;border-radius:3px;background:#4f7fd9}svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:#5a6472}
"""


def html(
    p: Prediction,
    name: str,
    placement: tuple[Sequence[str], Sequence[Sequence[str]]],
    notes: Sequence[str],
    advice: Sequence[Advice] = (),
) -> str:
    """The page; `placement` is the table of parameters, headers and rows."""
    lines = heading(p.plan)
    fits = {True: "yes", False: "no", None: ""}[p.fits]
    parts = [
        f"<h1>{escape(lines[0].partition(':')[0])}</h1><p>{escape(name)}</p>",
        *(f"<p>{escape(line)}</p>" for line in [lines[0].partition(": ")[2], *lines[1:]]),
        f'<div class="verdict {fits}">{escape(verdict(p).plain)}</div>',
        _advice(advice),
        _cards(p) if p.timed else "<p>No time: what this machine reaches is not known. Only the order is shown.</p>",
        *(f'<p class="key">{escape(line)}</p>' for line in assumed(p.plan.layout)),
        f"<h2>One step, by pipeline coordinate</h2>{_key(_KINDS)}{_timeline(p)}",
        f"<h2>Memory of a rank over the step</h2>{_memory_lines(p)}",
        f"<h2>Memory at the peak</h2>{_memory_bars(p)}",
        f"<h2>Bytes that a rank{_where(p)} sends in a step</h2>{_bytes(p)}",
        f"<h2>Collectives and transfers</h2>{_ledger(p)}",
        f'<h2>Placement of parameters</h2><p>" is as in the column before</p>{_table(*placement)}',
    ]
    if notes:
        parts.append("<h2>Notes</h2>" + "".join(f"<p>{escape(n)}</p>" for n in notes))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dtrain plan {escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _advice(advice: Sequence[Advice]) -> str:
    items = [f"<li>{escape(said)}<br><code>{escape(typed)}</code></li>" for said, typed in map(change, advice)]
    return f"<h2>It fits with</h2><ul>{''.join(items)}</ul>" if items else ""


def _cards(p: Prediction) -> str:
    cards = "".join(f'<div class="card"><b>{v}</b><span>{k}</span></div>' for k, v in figures(p).items())
    return f'<div class="cards">{cards}</div><p class="key">{escape(FORMULAS)}</p>'


def _key(kinds: Mapping[str, str]) -> str:
    return '<p class="key">' + "".join(f'<i style="background:{_color(k)}"></i>{v}' for k, v in kinds.items()) + "</p>"


def _color(kind: str) -> str:
    return _COLORS.get(kind, _OTHER)


# ------------------------------------------------------------------------------------------------- the pictures


def _timeline(p: Prediction) -> str:
    """Kernels above, the communication of all streams below, of each coordinate."""
    row, out = 40, []
    for pp, spans in enumerate(p.timeline.spans):
        y = pp * row
        out.append(f'<text x="0" y="{y + 17}">pp {pp}</text>')
        kernels = [s for s in spans if s.stream == COMPUTE]
        wires = sorted((s for s in spans if s.stream != COMPUTE), key=lambda s: s.start)
        out += [_rect(p, run, y, 22) for run in _runs(p, kernels)]
        out += [_rect(p, run, y + 24, 8) for run in _runs(p, wires)]
    return _svg(out, len(p.memory) * row, p)


def _runs(p: Prediction, spans: Sequence[Span]) -> Iterable[list[Span]]:
    """Spans of one kind and microbatch that follow each other closely; communication of all kinds together."""
    run: list[Span] = []
    end = 0.0
    for s in spans:
        near = s.start - end <= _NEAR * p.step_seconds
        if run and not (near and (s.stream != COMPUTE or _same(run[-1], s))):
            yield run
            run = []
        run.append(s)
        end = max(end, s.end)
    if run:
        yield run


def _same(one: Span, other: Span) -> bool:
    return (one.action.kind, one.action.mb) == (other.action.kind, other.action.mb)


def _rect(p: Prediction, run: Sequence[Span], y: int, height: int) -> str:
    start, end = run[0].start, max(s.end for s in run)
    kind = run[0].action.kind if run[0].stream == COMPUTE else "wire"
    what = name_of(p, run[0]) + (f" to {name_of(p, run[-1])}" if len(run) > 1 else "")
    x, width = _x(p, start), max(0.3, _x(p, end) - _x(p, start))
    title = f"{what}: {start * 1e3:.3f} to {end * 1e3:.3f} ms" if p.timed else what
    return (
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{height}" fill="{_color(kind)}" stroke="#fff" '
        f'stroke-width="{0.4 if width > 3 else 0}"><title>{escape(title)}</title></rect>'
    )


def _x(p: Prediction, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - 10) * seconds / (p.step_seconds or 1.0)


def _svg(parts: Iterable[str], height: int, p: Prediction) -> str:
    ticks = ""
    if p.timed:
        for i in range(5):
            at, anchor = p.step_seconds * i / 4, "end" if i == 4 else "middle" if i else "start"
            ticks += f'<text x="{_x(p, at):.0f}" y="{height + 16}" text-anchor="{anchor}">{show_seconds(at)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {height + 22}">{"".join(parts)}{ticks}</svg>'


def _memory_lines(p: Prediction) -> str:
    """Bytes of a rank at each coordinate, the most of every pixel."""
    have, height = capacity(p.plan.layout), 240
    top = 1.05 * max([m.peak for m in p.memory] + ([have] if have else []))
    out = [f'<text x="0" y="12">{show_size(top)}</text><text x="0" y="{height}">0</text>']
    for pp in range(len(p.memory)):
        most: dict[int, int] = {}
        for at, held in memory_over_time(p, pp):
            x = round(_x(p, at))
            most[x] = max(most.get(x, 0), held)
        points = [f"{x},{height * (1 - n / top):.1f}" for x, n in sorted(most.items())]
        color = _PARTS[pp % len(_PARTS)]
        line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.5">'
        out.append(f"{line}<title>pp {pp}</title></polyline>")
    if have:
        y = height * (1 - have / top)
        ends, place = f'x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"', f'x="{WIDTH - 10}" y="{y + 14:.1f}"'
        out.append(f'<line {ends} stroke="#a3231b" stroke-dasharray="5 4"/>')
        out.append(f'<text {place} text-anchor="end">memory of the GPU, {show_size(have)}</text>')
    key = "".join(f'<i style="background:{_PARTS[i % len(_PARTS)]}"></i>pp {i}' for i in range(len(p.memory)))
    return f'<p class="key">{key}</p>{_svg(out, height, p)}'


def _memory_bars(p: Prediction) -> str:
    top = max([m.peak for m in p.memory] + [capacity(p.plan.layout) or 0])
    key = "".join(f'<i style="background:{c}"></i>{part}' for part, c in zip(PARTS, _PARTS, strict=True))
    out = []
    for pp, m in enumerate(p.memory):
        x, y = float(LEFT), 26 * pp
        out.append(f'<text x="0" y="{y + 16}">pp {pp}</text>')
        for part, color in zip(PARTS, _PARTS, strict=True):
            n = getattr(m, part)
            width = (WIDTH - LEFT - 90) * n / top
            box = f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="19" fill="{color}">'
            out.append(f"{box}<title>{part} {show_size(n)}</title></rect>")
            x += width
        out.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{show_size(m.peak)}</text>')
    height = 26 * len(p.memory)
    return f'<p class="key">{key}</p><svg viewBox="0 0 {WIDTH} {height}">{"".join(out)}</svg>'


# --------------------------------------------------------------------------------------------------- the tables


def _where(p: Prediction) -> str:
    return f" of pp {p.busiest}, the busiest," if len(p.ledger) > 1 else ""


def _bytes(p: Prediction) -> str:
    entries = p.ledger[p.busiest]
    sums = [("link", ledgers.by_link(entries)), ("dim", ledgers.by_dim(entries))]
    top = max([n for _, s in sums for n in s.values()], default=0.0)
    rows = "".join(
        f'<tr><td>{what} {key}</td><td class="n">{show_bytes(n)}</td>'
        f'<td style="width:520px"><div class="bar" style="width:{max(0.4, 100 * n / top):.1f}%"></div></td></tr>'
        for what, s in sums
        for key, n in sorted(s.items(), key=lambda item: -item[1])
    )
    return f"<table>{rows}</table>" if rows else "<p>none</p>"


def _ledger(p: Prediction) -> str:
    headers = ["phase", "op", "pp", "dim", "link", "count", "bytes", "sent", "segment", "model line"]
    return _table(headers, [_row(e, pps) for e, pps in merged(p.ledger)])


def _row(e: Entry, pps: Sequence[int]) -> list[str]:
    where = " ".join(map(str, pps)) if len(pps) < 5 else f"{pps[0]} .. {pps[-1]}, {len(pps)} of them"
    sizes = [f"{e.count:,}", show_bytes(e.bytes), show_bytes(e.wire)]
    return [e.phase, e.op, where, ".".join(e.dims), ".".join(e.links), *sizes, e.segment, e.line]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
