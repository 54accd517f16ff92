"""Layouts side by side, line by line: what they say differently, and what that does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtrain.hardware import show_size
from dtrain.layout import Layout
from dtrain.plan.predict import Prediction
from dtrain.plan.report import PARTS, report, show_bytes, show_seconds

Show = Callable[[Any], str]


def compare(names: Sequence[str], predictions: Sequence[Prediction]) -> RenderableType:
    """A table of the keys that differ, and one of what is predicted, with the change from the first to the second."""
    return Group(_keys(names, predictions), Text(), _figures(names, predictions))


def differing(layouts: Sequence[Layout]) -> dict[str, list[Any]]:
    """The keys whose values are not the same in all layouts; None where one lacks it."""
    flat = [_flat(json.loads(x.model_dump_json())) for x in layouts]
    keys = dict.fromkeys(k for values in flat for k in values)
    rows = {key: [values.get(key) for values in flat] for key in keys if key != "run.folder"}
    return {key.replace("model.fields.", "model."): row for key, row in rows.items() if any(v != row[0] for v in row)}


def _flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return out


def _keys(names: Sequence[str], predictions: Sequence[Prediction]) -> RenderableType:
    rows = differing([p.plan.layout for p in predictions])
    if not rows:
        return Text("the layouts say the same")
    table = _table("key", names)
    for key, values in rows.items():
        table.add_row(key, *("" if v is None else json.dumps(v).replace('"', "") for v in values))
    return table


def _figures(names: Sequence[str], predictions: Sequence[Prediction]) -> RenderableType:
    made = [report(p) for p in predictions]
    two = len(made) == 2
    table = _table("", [*names, "change"] if two else names)

    def row(name: str, show: Show, values: Sequence[Any]) -> None:
        if any(v is not None for v in values):
            cells = ["" if v is None else show(v) for v in values]
            table.add_row(name, *cells, *([_change(*values)] if two else []))

    table.add_row("verdict", *(_verdict(m["fits"]) for m in made), *([""] if two else []))
    row("margin", lambda n: f"{'-' if n < 0 else ''}{show_size(abs(n))}", [m["margin_bytes"] for m in made])
    row("step time", show_seconds, [m["step_seconds"] for m in made])
    row("tokens/s/GPU", lambda n: f"{n:,.0f}", [m["tokens_per_second_per_gpu"] for m in made])
    row("TFLOP/s/GPU", lambda n: f"{n:.1f}", [m["tflops_per_gpu"] for m in made])
    for key in ("mfu", "hfu", "bubble", "exposed"):
        row(key.upper() if key.endswith("fu") else key, lambda n: f"{n:.1%}", [m[key] for m in made])
    for part in ("peak", *PARTS):
        values = [m["memory"][part] for m in made]
        row(f"memory: {part}", show_size, values if any(values) else [None])
    for what in ("link", "dim"):
        for key in dict.fromkeys(k for m in made for k in m[f"bytes_by_{what}"]):
            row(f"sent over {key}", show_bytes, [m[f"bytes_by_{what}"].get(key, 0.0) for m in made])
    return table


def _verdict(fits: bool | None) -> Text:
    if fits is None:
        return Text("not known")
    return Text("fits", "bold green") if fits else Text("does not fit", "bold red")


def _change(one: Any, other: Any) -> str:
    """The second relative to the first: `+12.5%`."""
    if not one or other is None or one == other:
        return ""
    return f"{(other - one) / abs(one):+.1%}"


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in columns:
        table.add_column(justify="right", overflow="fold")
    table.add_row(Text(first, "dim"), *(Text(c, "bold") for c in columns))
    return table
