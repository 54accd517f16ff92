"""Faults of a layout as one line: where it was written, the key, its value, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from pydantic import ValidationError

from dtrain.hardware import nearest
from dtrain.layout.reader import LayoutError, Where, place, show
from dtrain.layout.schema import Layout, Section, is_table, schema_keys, section_of


def fail(layout: Layout, path: str, message: str) -> NoReturn:
    """Raise the one-line error of a key."""
    raise LayoutError(f"{at(layout, path)}: {path}: {message}")


def at(layout: Layout, path: str) -> str:
    """Where a key (or the nearest section around it) was written: `x.yaml:14`, `override run.steps=5`."""
    return place(layout._where, path)


def first(error: ValidationError, where: Where) -> LayoutError:
    """Pydantic's errors -> the one to mend first: misspelt keys before what is missing because of them."""

    def order(item: Any) -> int:
        return 0 if item["type"] == "extra_forbidden" else 2 if item["type"] == "missing" else 1

    item = min(error.errors(include_url=False), key=order)
    loc = [part for part in item["loc"] if part not in ("[key]", "[name]", "[table]", "fields")]
    path = ".".join(str(part) for part in loc)
    spot = place(where, path)
    if item["type"] == "extra_forbidden":
        return LayoutError(f"{spot}: {path}: {_unknown(loc)}")
    if item["type"] == "missing":
        section = ".".join(str(part) for part in loc[:-1]) or "the layout"
        return LayoutError(f"{spot}: {path}: missing; {section} needs {loc[-1]}: {_allowed(path)}")
    return LayoutError(f"{spot}: {path}: {_value(item)}; {_reason(item)}")


def _value(item: Any) -> str:
    return str(item["loc"][-2]) if item["loc"][-1] == "[key]" else show(item["input"])


def _reason(item: Any) -> str:
    kind, value, ctx = item["type"], item["input"], item.get("ctx", {})
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "literal_error":
        options = [word.strip("'\"") for word in ctx["expected"].replace(" or ", ", ").split(", ")]
        return f"must be one of {', '.join(options)}{nearest(value, options)}"
    if kind in ("int_type", "float_type"):
        what = "a whole number" if kind == "int_type" else "a number"
        if isinstance(value, str) and _is_number(value):
            return f"must be {what}; write it without quotes: {value}"
        if isinstance(value, float) and value.is_integer():
            return f"must be {what}; write {int(value)}"
        return f"must be {what}"
    plain = {
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "finite_number": "must be a finite number",
        "dict_type": "must be a mapping of key: value",
        "model_type": "must be a mapping of key: value",
        "model_attributes_type": "must be a mapping of key: value",
        "tuple_type": "must be a list, as in [1, 2]",
    }
    bounds = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "too_short": "must have at least {min_length} entries",
        "too_long": "must have at most {max_length} entries",
    }
    if kind in bounds:
        return bounds[kind].format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in ctx.items()})
    return plain.get(kind, str(item["msg"]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown(loc: list[Any]) -> str:
    key, section = str(loc[-1]), ".".join(str(part) for part in loc[:-1])
    options = _keys(loc[:-1])
    # A letter amiss is a slip of the pen; a key that is right elsewhere is in the wrong section.
    hint = nearest(key, options, cutoff=0.85) or home(key, section) or nearest(key, options)
    return f"unknown key; {section or 'the layout'} has {', '.join(options)}{hint}"


def home(key: str, section: str) -> str:
    """Where a key that was written in `section` belongs instead, or nothing."""
    paths = [path.rpartition(".") for path in schema_keys()]
    homes = [at_home or "the top level" for at_home, _, name in paths if name == key and at_home != section]
    return f"; {key} belongs under {' or '.join(homes)}" if homes else ""


def _keys(loc: list[Any]) -> list[str]:
    """The keys that the section at `loc` may have."""
    section: type[Section] = Layout
    parts = list(loc)
    while parts:
        annotation = section.model_fields[str(parts.pop(0))].annotation
        if is_table(annotation) and parts:
            parts.pop(0)
        section = section_of(annotation) or section
    return list(section.model_fields)


def _allowed(path: str) -> str:
    """What a required key holds, for the error that it is missing."""
    return {
        "model": "{preset: ...}, {family: ...} or {file: ...}",
        "data": "{source, seq, batch, ...}",
        "data.seq": "tokens a sequence, a whole number",
        "data.batch": "sequences a step over all ranks, a whole number",
        "run": "{steps: ...}",
        "run.steps": "a whole number",
        "run.profile.steps": "[first, last]",
        "cluster.gpu.name": "how reports call it",
        "cluster.gpu.kind": "volta, ampere, hopper or blackwell",
        "cluster.gpu.processors": "its streaming multiprocessors, a whole number",
        "cluster.gpu.memory": "a size such as 79GiB",
        "cluster.gpu.peak": "{bf16: 989TFLOP/s, ...}, dense",
    }.get(path, "a whole number of at least 1" if path.endswith(".size") else "a rate such as 50GB/s")


def show_dims(dims: Iterable[str]) -> str:
    """`tp`, `[dp, fsdp]` or `nothing`."""
    words = list(dims)
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]" if words else "nothing"


def listed(items: Iterable[object], joint: str = ", ") -> str:
    """`1, 2, 4`, or `no dim`."""
    return joint.join(str(i) for i in items) or "no dim"


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
