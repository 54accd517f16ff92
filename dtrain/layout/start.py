"""`model.load`: the model of a Hugging Face folder or of a checkpoint, in place of a family's or a preset's fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dtrain import hf
from dtrain.layout.reader import LayoutError, Where, place, show


def started(model: dict[str, Any], where: Where) -> dict[str, Any]:
    """A `model:` section as written -> with the family (or preset, or file) and the fields of what it loads, under
    those that are written. Raises LayoutError."""
    path = model.get("load")
    if not isinstance(path, str):
        return model

    def wrong(key: str, message: str) -> LayoutError:
        return LayoutError(f"{place(where, key)}: {key}: {message}")

    for key in ("family", "preset", "file"):
        if model.get(key) is not None:
            raise wrong(f"model.{key}", f"{show(model[key])}; model.load says what the model is; write one of them")
    folder = Path(path)
    if not folder.is_dir():
        raise wrong("model.load", f"{show(path)}; no such folder (looked from {Path.cwd()})")
    if (folder / "run.json").is_file():
        try:
            return _saved(folder) | model
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())
            raise wrong("model.load", f"{show(path)}; its run.json cannot be read: {why}") from None
    steps = {int(p.name[5:]): p for p in folder.glob("step-*") if p.name[5:].isdecimal()}
    if steps and not (folder / "config.json").is_file():
        latest = steps[max(steps)]
        raise wrong("model.load", f"{show(path)}; a run's folder; name one of its checkpoints, as in {latest}")
    try:
        family, fields = hf.model(folder)
    except hf.HFError as error:
        raise wrong("model.load", str(error)) from None
    return {"family": family} | fields | model


def _saved(folder: Path) -> dict[str, Any]:
    """The model that a checkpoint's record says."""
    model: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))["layout"]["model"]
    return {key: value for key, value in model.items() if key not in ("load", "vocab_pad") and value is not None}
