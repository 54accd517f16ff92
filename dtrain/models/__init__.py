"""Model families, and how a layout's `model:` section becomes one.

A model is a module, one of this package or a user's file, with

- `Config`, a frozen dataclass of sizes, at least `layers`, `embed` and `vocab` (a family also has `PRESETS`);
- `BATCH`, the axes of each batch field, and `ACT`, the axes of what passes between segments;
- `params(cfg)`, the abstract parameters of `embed`, of one `block` and of `head`;
- `counts(cfg, batch)`, the number of valid items of each loss term in a batch;
- the segments `embed(cfg, p, batch, key, on)`, `block(cfg, p, x, batch, key, on)` and
  `head_and_loss(cfg, p, x, batch, counts, key, on)`.

`p` holds a segment's parameters by name, read through `on.gather` only; activations are placed through
`on.constrain` only; work on local shards is an `on.island`. With `dtrain.axes.ALONE` as `on` a model runs on
one device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from dtrain import ops

FAMILIES = ("llama", "gpt2", "bert")
_PARTS = ("Config", "BATCH", "ACT", "params", "counts", "embed", "block", "head_and_loss")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class ModelError(ValueError):
    """A model cannot be built as asked; one line for a person. `key` is the field to blame, or None."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def presets() -> dict[str, str]:
    """Every preset and its family."""
    return {name: family for family in FAMILIES for name in load(family).PRESETS}


def load(family: str) -> ModuleType:
    """The module of a family, by name. Raises ModelError for an unknown name."""
    if family not in FAMILIES:
        raise ModelError(f"model family {family!r} does not exist{_nearest(family, FAMILIES)}", "family")
    return importlib.import_module(f"dtrain.models.{family}")


def load_file(path: Path) -> ModuleType:
    """A user's model file as a module. Raises ModelError if it is missing, broken or lacks a part."""
    if not path.is_file():
        raise ModelError(f"model file {str(path)!r} does not exist; the path is taken from the layout's folder", "file")
    # The content is part of the name: the same file is one module, an edited one a new module.
    name = f"dtrain_model_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ModelError(f"model file {str(path)!r} is not Python; give a file that ends in .py", "file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception as e:
            del sys.modules[name]
            raise ModelError(f"model file {str(path)!r} fails to import: {type(e).__name__}: {e}", "file") from e
    missing = [part for part in _PARTS if not hasattr(module, part)]
    if missing:
        raise ModelError(
            f"model file {str(path)!r} lacks {', '.join(missing)}; a model has {', '.join(_PARTS)}", "file"
        )
    return module


def resolve(
    *,
    family: str | None = None,
    preset: str | None = None,
    file: str | Path | None = None,
    fields: Mapping[str, object] | None = None,
    base: Path | None = None,
) -> tuple[ModuleType, Any]:
    """A model's module and its Config, from exactly one of `family`, `preset` and `file` and from field
    values.

    `fields` override a preset's. `base` is the folder that a relative `file` starts from. Raises ModelError.
    """
    fields = fields or {}
    if [family, preset, file].count(None) != 2:
        raise ModelError("a model is given by exactly one of family, preset and file")
    if file is not None:
        module, start = load_file((base or Path()) / file), {}
    elif preset is not None:
        known = presets()
        if preset not in known:
            raise ModelError(f"model preset {preset!r} does not exist{_nearest(preset, known)}", "preset")
        module = load(known[preset])
        start = module.PRESETS[preset]
    else:
        assert family is not None
        module, start = load(family), {}
    return module, build(module.Config, {**start, **fields}, "model")


def build(cls: Any, fields: Mapping[str, object], where: str) -> Any:
    """A frozen dataclass from a dict; unknown or missing keys and wrong types are ModelErrors."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, object] = {}
    for key, value in fields.items():
        if key not in known:
            raise ModelError(f"{where}: unknown key {key!r}{_nearest(key, known)}", key)
        values[key] = _value(value, hints[key], f"{where}.{key}", key)
    missing = [
        name
        for name, f in known.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ModelError(f"{where}: missing {', '.join(missing)}")
    return cls(**values)


def _value(value: object, hint: Any, where: str, key: str) -> object:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return build(option, value, where)
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and type(value) is int:
            return float(value)
        elif type(value) is option or (option is type(None) and value is None):
            return value
    raise ModelError(f"{where}: {value!r} is not allowed; give {' or '.join(map(_name, options))}", key)


def _name(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(repr(a) for a in typing.get_args(option))
    if dataclasses.is_dataclass(option):
        return "a table of " + ", ".join(f.name for f in dataclasses.fields(option))
    return "nothing" if option is type(None) else _NAMES.get(option, str(option))


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(known)}"


def batch_fields(module: ModuleType, cfg: Any) -> dict[str, str]:
    """The axes of each batch field: the model's, and `start`, where each position's document begins, when attention
    stops at documents."""
    return {**module.BATCH, **({"start": "batch seq"} if getattr(cfg, "document_mask", False) else {})}


def starts(cfg: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """One more argument of an island where attention stops at documents: the field `start`. None otherwise."""
    return (batch["start"],) if cfg.document_mask else ()


def check(cfg: Any) -> None:
    """What holds for every family: positive sizes, dropout rates in [0, 1), a known attention kernel.

    Called by each Config's `__post_init__`. Raises ModelError.
    """
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if type(value) is int and value < 1:
            raise ModelError(f"model.{f.name}: {value} is not allowed; give a whole number from 1", f.name)
        if f.name.endswith("dropout") and not 0 <= value < 1:
            raise ModelError(f"model.{f.name}: {value} is not allowed; give a rate from 0 to below 1", f.name)
    if cfg.attention not in ops.KERNELS:
        raise ModelError(
            f"model.attention: {cfg.attention!r} does not exist{_nearest(cfg.attention, ops.KERNELS)}",
            "attention",
        )
    if getattr(cfg, "attention_dropout", 0) > 0 and cfg.attention not in ("auto", "math"):
        raise ModelError(
            f"model.attention: {cfg.attention!r} has no dropout, but "
            f"attention_dropout is {cfg.attention_dropout}; "
            "set attention_dropout: 0 or attention: math",
            "attention",
        )


def check_divides(cfg: Any, part: str, whole: str) -> None:
    """Raises ModelError, with the legal values, unless field `part` divides field `whole`."""
    n, of = getattr(cfg, part), getattr(cfg, whole)
    if of % n:
        legal = ", ".join(str(d) for d in range(1, of + 1) if of % d == 0)
        raise ModelError(f"model.{part}: {n} does not divide {whole}, {of}; allowed: {legal}", part)
