"""A folder of Hugging Face: parts of its tensors read from safetensors, a new one written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain import models
from dtrain.hf.config import HFError, key_of, model_of
from dtrain.hf.names import Box, Home, copies, homes, usual_name
from dtrain.strict import Allow, differences

# What goes along with the weights, unread: tokenizers, chat templates, how to generate.
BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
KEPT = "hf"  # in a run's folder: what its model came with


@dataclass(frozen=True)
class Folder:
    """A model that is there to be read: its config.json, what that means here, and for each tensor by today's name the
    file, its name in the file and its shape."""

    path: Path
    config: Mapping[str, Any]
    family: str
    cfg: Any
    tensors: Mapping[str, tuple[Path, str, tuple[int, ...]]]

    def read(self, home: Home, wanted: Box | None = None) -> Tensor:
        """A part of a parameter (None: all of it), in the folder's dtype; no other bytes are read. Raises HFError."""
        wanted = tuple(range(n) for n in home.param.shape) if wanted is None else wanted
        return home.into(self._part(home.name, home.box(wanted)), wanted)

    def _part(self, name: str, box: Box) -> Tensor:
        file, stored, _ = self.tensors[name]
        with _opened(file) as handle:
            part: Tensor = handle.get_slice(stored)[tuple(slice(r.start, r.stop) for r in box)]
        if part.dtype not in _NAMES:
            raise HFError(f"{file}: {stored} is {part.dtype}; weights are float32, bfloat16, float16 or float64")
        return part


def read_config(path: Path) -> dict[str, Any]:
    """A folder's config.json. Raises HFError."""
    file = path / "config.json"
    if not file.is_file():
        what = "has no config.json; give a folder as transformers' save_pretrained writes it"
        raise HFError(f"{path} {what}" if path.is_dir() else f"{path} is not a folder")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HFError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise HFError(f"{file} is no mapping of keys")
    return values


def model(path: Path) -> tuple[str, dict[str, object]]:
    """The family and the fields of its config that a folder's config.json means. Raises HFError."""
    try:
        return model_of(read_config(path))
    except HFError as error:
        raise HFError(f"{path}: {error}" if str(error).startswith("config.json") else str(error)) from error


def open_folder(path: Path, allow_missing: bool = False, allow_extra: bool = False) -> tuple[Folder, list[str]]:
    """A folder whose tensors are those of its model, and lines that say what was allowed. Raises HFError with every
    difference otherwise. Only the headers of the files are read."""
    family, fields = model(path)
    try:
        cfg = models.build(models.load(family).Config, fields, "model")
    except models.ModelError as error:  # whose first words are the field
        raise HFError(f"{path}: config.json: {key_of(family, error.key)}: {str(error).partition(': ')[2]}") from error
    wanted = {home.name: home.shape for home in homes(family, cfg).values()}
    repeated = copies(family, cfg)
    found: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    for file, names in _files(path).items():
        with _opened(file) as handle:
            there = set(handle.keys())
            for stored in there if names is None else names:
                if stored not in there:
                    raise HFError(f"{path}: the index says that {file.name} has {stored}, but it does not")
                name = usual_name(family, stored, frozenset(wanted) | frozenset(repeated))
                if name is not None:
                    found[name] = (file, stored, tuple(handle.get_slice(stored).get_shape()))
    folder = Folder(path, read_config(path), family, cfg, found)
    for name, original in repeated.items():
        if cfg.tied and name in found and original in found:
            _check_copy(folder, name, original)
    shapes = {name: shape for name, (_, _, shape) in found.items()}
    differing = differences(shapes, wanted, repeated)
    if fault := differing.refused(Allow(allow_missing, allow_extra)):
        raise HFError(f"{path}: {fault}")
    return folder, differing.said()


def _check_copy(folder: Folder, name: str, original: str) -> None:
    shape = folder.tensors[original][2]
    every = tuple(range(n) for n in shape)
    if folder.tensors[name][2] != shape or not torch.equal(folder._part(name, every), folder._part(original, every)):
        raise HFError(
            f"{folder.path}: {name} differs from {original}, though config.json ties them; "
            "tie_word_embeddings: false says that they are two"
        )


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files of weights, and for each the tensors that the index puts there (None without an index: all)."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            placed: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HFError(f"{index} cannot be read: {type(error).__name__} {error}") from error
        odd = next((f for f in placed.values() if not isinstance(f, str) or Path(f).name != f), None)
        if odd is not None:
            raise HFError(f"{index} names {odd!r}; files of weights are beside it")
        out: dict[Path, list[str] | None] = {}
        for name, file in placed.items():
            names = out.setdefault(path / file, [])
            assert names is not None
            names.append(name)
        lost = next((f for f in out if not f.is_file()), None)
        if lost is not None:
            raise HFError(f"{lost} is missing; {index.name} says that it holds {len(out[lost] or ())} tensors")
        return out
    if (path / "model.safetensors").is_file():
        return {path / "model.safetensors": None}
    old = sorted(path.glob("*.bin"))
    if old:
        raise HFError(
            f"{path} has {old[0].name} and no safetensors; .bin files are pickles, which may run any code and are not "
            "read: download the model's safetensors, or save it again with transformers' save_pretrained"
        )
    raise HFError(f"{path} has no model.safetensors and no model.safetensors.index.json")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise HFError(f"{file} is damaged or cannot be read: {' '.join(str(error).split())}") from error


# ------------------------------------------------------------------------------------------------------- writing


def write_folder(
    path: Path,
    family: str,
    cfg: Any,
    fetch: Callable[[str], Tensor],
    precision: torch.dtype,
    config: Mapping[str, Any],
    beside: Path | None = None,
    shard_bytes: int = 5 * 10**9,
    also: Callable[[Path], None] = lambda folder: None,
) -> list[Path]:
    """Write a model as a new folder, and return its files of weights.

    `fetch(path)` gives one whole parameter; one tensor is in memory at a time. `beside` is a folder whose tokenizer
    and generation config come along, and `also` may add to the folder. It appears when it is complete. Raises HFError.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise HFError(f"{path} exists already and is not overwritten")
    made: dict[str, list[tuple[str, Home]]] = {}
    for where, home in homes(family, cfg).items():
        made.setdefault(home.name, []).append((where, home))
    if not cfg.tied:
        made |= {name: made[original] for name, original in copies(family, cfg).items()}
    shapes = {name: members[0][1].shape for name, members in made.items()}
    shards = _shards(shapes, precision.itemsize, shard_bytes)
    names = [
        f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        for i in range(1, len(shards) + 1)
    ]

    def tensor(name: str) -> Tensor:
        parts = [home.out_of(fetch(where)).to(precision) for where, home in made[name]]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    temporary = path.absolute().with_name(path.absolute().name + ".tmp")
    if temporary.exists():
        raise HFError(f"{temporary} is in the way; if it is of an export that was killed, remove it")
    try:
        temporary.mkdir(parents=True)
        for name, shard in zip(names, shards, strict=True):
            _write(temporary / name, {n: shapes[n] for n in shard}, precision, tensor)
        if len(shards) > 1:
            total = sum(math.prod(s) for s in shapes.values()) * precision.itemsize
            placed = {n: name for name, shard in zip(names, shards, strict=True) for n in shard}
            _json(temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})
        _json(temporary / "config.json", config)
        copy_beside(beside, temporary)
        if not (temporary / "generation_config.json").exists() and family != "bert":
            marks = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
            _json(temporary / "generation_config.json", marks)
        also(temporary)
        if path.exists():
            path.rmdir()
        os.rename(temporary, path)
    except OSError as error:
        raise HFError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [path / name for name in names]


def copy_beside(source: Path | None, out: Path, leave: Sequence[str] = ()) -> None:
    """Copy what goes along with the weights, apart from `leave`."""
    for name in BESIDE:
        if source is not None and name not in leave and (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def keep(source: Path, out: Path) -> None:
    """Copy config.json and what goes along with the weights into `out/hf`, where an export finds them again. Raises
    HFError."""
    try:
        (out / KEPT).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / "config.json", out / KEPT / "config.json")
        copy_beside(source, out / KEPT)
    except OSError as error:
        raise HFError(f"{error.filename or out / KEPT}: {error.strerror or error}") from error


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Names in order, in as few files of at most `limit` bytes (a larger tensor has its own)."""
    out: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if not out or size > room:
            out.append([])
            room = limit
        out[-1].append(name)
        room -= size
    return out


def _write(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, get: Callable[[str], Tensor]) -> None:
    """One safetensors file: a length, a header of names, types, shapes and offsets, then the bytes of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            out.write(get(name).contiguous().flatten().view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())


def _json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
