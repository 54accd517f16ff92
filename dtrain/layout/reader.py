"""YAML text and overrides -> plain values, each with the place it was written at.

YAML 1.2: `on` and `off` are words, `3e-4` and `1e3` are numbers (not whole ones), repeated keys are errors.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

# Dotted key -> "x.yaml:14" or "override run.steps=5".
Where = dict[str, str]


class LayoutError(Exception):
    """A layout cannot be used; str() is one line: where, which key, what it says, what is allowed."""


def place(where: Where, path: str) -> str:
    """Where a key was written, or the nearest section around it that was written."""
    while path not in where and path:
        path = path.rpartition(".")[0]
    return where[path]


def show(value: object) -> str:
    """A value the way YAML writes it; text keeps its quotes so that '10' is not taken for 10."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return repr(value)


def read(text: str, name: str) -> tuple[dict[str, Any], Where]:
    """A layout's text -> its mapping and where each key was written. Raises LayoutError."""
    where: Where = {"": f"{name}:1"}
    node = _load(text, lambda line: f"{name}:{line}")
    if node is None:
        raise LayoutError(f"{name}:1: the layout is empty; it needs at least model:, data: and run:")
    if not isinstance(node, CommentedMap):
        raise LayoutError(
            f"{name}:1: {show(_shorten(node))}; a layout is a mapping of sections such as model:, data:, run:"
        )
    data = _plain(node, "", where, lambda line: f"{name}:{line}")
    assert isinstance(data, dict)
    return data, where


def override(data: dict[str, Any], where: Where, text: str) -> None:
    """Apply one `key.path=value` of the command line to what `read` gave. Raises LayoutError."""
    spot = f"override {text}"
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise LayoutError(f"{spot}: an override is written key.path=value, as in run.steps=10")
    here = data
    for depth, key in enumerate(keys[:-1]):
        if here.get(key) is None:
            here[key] = {}
            where[".".join(keys[: depth + 1])] = spot
        if not isinstance(here[key], dict):
            section = ".".join(keys[: depth + 1])
            raise LayoutError(f"{spot}: {section}: {show(here[key])} at {place(where, section)} has no keys inside it")
        here = here[key]
    full = ".".join(keys)
    for old in [k for k in where if k == full or k.startswith(full + ".")]:
        del where[old]
    where[full] = spot
    here[keys[-1]] = _plain(_load(value, lambda line: spot), full, where, lambda line: spot)


def _load(text: str, spot: Any) -> Any:
    try:
        return YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).partition('"')[2].partition('"')[0]
        raise LayoutError(f"{spot(_line(error))}: {key}: this key is repeated in its section; keep one") from None
    except MarkedYAMLError as error:
        line = _line(error)
        if "\\t" in str(error.problem):
            raise LayoutError(f"{spot(line)}: a tab; YAML is indented with spaces") from None
        raise LayoutError(f"{spot(line)}: this is not YAML: {' '.join(str(error.problem).split())}") from None
    except YAMLError as error:
        raise LayoutError(f"{spot(1)}: this is not YAML: {' '.join(str(error).split())}") from None


def _line(error: MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return 1 if mark is None else int(mark.line) + 1


def _shorten(node: Any) -> Any:
    return [*node[:3], "..."] if isinstance(node, CommentedSeq) and len(node) > 3 else node


def _plain(node: Any, path: str, where: Where, spot: Any) -> Any:
    """ruamel's nodes -> Python's own types, noting where each key was written."""
    if isinstance(node, CommentedMap):
        out = {}
        for key, value in node.items():
            line = node.lc.data[key][0] + 1 if key in (node.lc.data or {}) else node.lc.line + 1
            if not isinstance(key, str):
                raise LayoutError(f"{spot(line)}: {path or 'layout'}: key {show(key)}; keys are words")
            inner = f"{path}.{key}" if path else key
            where[inner] = spot(line)
            out[key] = _plain(value, inner, where, spot)
        return out
    if isinstance(node, CommentedSeq):
        for i in range(len(node)):
            where[f"{path}.{i}"] = spot(node.lc.data[i][0] + 1)
        return [_plain(value, f"{path}.{i}", where, spot) for i, value in enumerate(node)]
    if node is None or isinstance(node, bool):
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    raise LayoutError(f"{place(where, path)}: {path}: {node}; must be plain text, a number, a list or a mapping")
