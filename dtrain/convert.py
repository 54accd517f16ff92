"""Checkpoints from Hugging Face folders, and Hugging Face folders from checkpoints, one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain import checkpoint, data, hf, models, reference
from dtrain.checkpoint import CheckpointError, Piece, Record
from dtrain.plan import PRECISION


def import_folder(source: Path, out: Path, allow_missing: bool = False, allow_extra: bool = False) -> list[str]:
    """Make `out/step-0`, a checkpoint with weights only, of a Hugging Face folder, and `out/hf` of the small files
    beside them. Returns lines for a person; raises HFError or CheckpointError."""
    if there := checkpoint.steps(out):
        raise CheckpointError(f"{out} has step-{there[-1]} already; import into a folder without checkpoints")
    folder, said = hf.open_folder(source, allow_missing, allow_extra)
    homes = hf.homes(folder.family, folder.cfg)

    def fetch(name: str) -> Tensor:
        path = name.removeprefix("master/")
        home = homes[path]
        if home.name not in folder.tensors:
            return reference.value(path, home.param, 0, torch.float32)
        try:
            return folder.read(home).float()
        except hf.HFError as error:
            raise CheckpointError(str(error)) from error

    meta = {path: torch.empty(home.param.shape, device="meta") for path, home in homes.items()}
    pieces = {f"master/{path}": Piece(t, (0,) * t.ndim, tuple(t.shape)) for path, t in meta.items()}
    section = {"family": folder.family, **_fields(folder.cfg)}
    precision = hf.dtype_of(folder.config) or "fp32"
    record = Record(0, {"model": section, "run": {"precision": precision}}, "")
    hf.keep(source, out)
    made = checkpoint.save(out, record, pieces, fetch=fetch)
    count = sum(math.prod(home.param.shape) for home in homes.values())
    return [
        *said,
        f"{made}: {count:,} parameters of {source} ({precision})",
        f"to train it, a layout says  model: {{load: {made}}}  which is",
        "model:",
        *(f"  {key}: {json.dumps(value)}" for key, value in section.items()),
    ]


def export(
    source: Path,
    out: Path,
    precision: str | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> list[str]:
    """Make a Hugging Face folder of a checkpoint: `step-N`, or a run's folder, whose latest is taken.

    `precision` (default: that of the run) is what the weights are rounded to; `tokenizer` a tokenizer's file or folder
    (default: what the model came with, else what the run's data is read with). Returns lines for a person; raises
    CheckpointError, HFError or DataError.
    """
    source = at(source)
    record = checkpoint.read(source)
    family, cfg = model_in(record, source)
    beside = source.parent / hf.KEPT
    run, text = record.layout.get("run", {}), record.layout.get("data", {})
    precision = precision or run.get("precision", "fp32")
    like = hf.read_config(beside) if (beside / "config.json").is_file() else None
    context = getattr(cfg, "positions", text.get("seq", 0))
    if scaling := getattr(cfg, "rope_scaling", None):
        context = int(scaling.factor * scaling.original)
    config = hf.config_of(family, cfg, precision, context, like)
    shapes, read = checkpoint.open_tensors(source)
    wanted = {f"master/{path}": home.param.shape for path, home in hf.homes(family, cfg).items()}
    bad = next((n for n, shape in wanted.items() if shapes.get(n) != shape), None)
    if bad is not None:
        raise CheckpointError(f"{source}: {bad} has shape {shapes.get(bad)}, not {wanted[bad]}")
    tokenizer = tokenizer or tokenizer_of(record, beside)
    if like is None and tokenizer is not None:
        found = data.load_tokenizer(str(tokenizer))
        config |= {"bos_token_id": found.bos, "eos_token_id": found.eos}

    def fetch(path: str) -> Tensor:
        return read(f"master/{path}")

    def also(folder: Path) -> None:
        if tokenizer is not None:
            _write_tokenizer(tokenizer, folder)

    files = hf.write_folder(out, family, cfg, fetch, PRECISION[precision], config, beside, shard_bytes, also)
    size = sum(f.stat().st_size for f in files)
    return [f"{out}: step {record.step} of {source.parent}, {size / 1e9:.3g} GB of {precision} in {len(files)} files"]


def at(path: Path) -> Path:
    """A checkpoint: the folder itself, or the latest of a run's folder; verified. Raises CheckpointError."""
    if (step := checkpoint.latest(path)) is not None:
        path = checkpoint.find(path, step)
    elif not any((path / name).exists() for name in ("run.json", "manifest.json")):
        raise CheckpointError(f"{path} is no checkpoint, nor a run's folder with one")
    if found := checkpoint.problems(path):
        raise CheckpointError(f"{path} is damaged: {found[0]}; name an older one")
    return path


def model_in(record: Record, path: Path) -> tuple[str, Any]:
    """The family and the config of a checkpoint's model. Raises CheckpointError, or HFError for a model of a file."""
    section = dict(record.layout.get("model", {}))
    if section.get("file"):
        raise hf.HFError(f"{path} is of a model of its own, {section['file']}, which transformers has no class of")
    given = {key: section.pop(key, None) for key in ("family", "preset")}
    fields = {k: v for k, v in section.items() if k not in ("file", "vocab_pad", "load")}
    try:
        module, cfg = models.resolve(**given, fields=fields)
    except models.ModelError as error:
        raise CheckpointError(f"{path / 'run.json'}: {error}") from error
    return module.__name__.rpartition(".")[2], cfg


def _fields(cfg: Any) -> dict[str, Any]:
    """A config as a layout writes it: what differs from the family's defaults, and all sizes."""
    out = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if f.default is not dataclasses.MISSING and value == f.default:
            continue
        out[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return out


def has_tokenizer(folder: Path) -> bool:
    return any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"))


def tokenizer_of(record: Record, beside: Path) -> Path | None:
    """What a run's data is read with, where the model came without a tokenizer; None if that is lost."""
    name = record.layout.get("data", {}).get("tokenizer")
    return Path(name) if name and not has_tokenizer(beside) and (name == "bytes" or Path(name).exists()) else None


def _write_tokenizer(path: Path, out: Path) -> None:
    """A tokenizer under the names that transformers looks for, with what is beside it."""
    if str(path) == "bytes":
        (out / "tokenizer.json").write_text(json.dumps(_bytes(), ensure_ascii=False), encoding="utf-8")
    else:
        hf.copy_beside(path if path.is_dir() else path.parent, out, leave=("generation_config.json",))
        if path.is_file() and path.name not in hf.BESIDE:
            text = path.read_bytes().lstrip()[:1] == b"{"
            shutil.copyfile(path, out / ("tokenizer.json" if text else "tokenizer.model"))
    settings = out / "tokenizer_config.json"
    if (out / "tokenizer.json").is_file() and not settings.is_file():
        found = data.load_tokenizer(str(path))
        names = {i: name for name, i in found.special.items()}
        marks = {"bos_token": found.bos, "eos_token": found.eos}
        values = {key: names[i] for key, i in marks.items() if i in names}
        settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | values, indent=2) + "\n")


def _bytes() -> dict[str, Any]:
    """The tokenizer `bytes` as a tokenizer.json: byte-level BPE without a merge. The letter of a byte is its own where
    that can be printed, else one from U+0100 on (the table of GPT-2)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in printed}
    rest = [b for b in range(256) if b not in letters]
    letters |= {b: chr(0x100 + i) for i, b in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {letters[b]: b for b in range(256)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
