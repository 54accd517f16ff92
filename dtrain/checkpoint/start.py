"""The weights that a run starts from: each rank reads its own part of a Hugging Face folder or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtrain import hf, storage
from dtrain.checkpoint.tensors import CheckpointError, Piece, open_tensors, read_pieces
from dtrain.mesh import Mesh
from dtrain.program.interpret import Place, owned
from dtrain.program.lower import Program
from dtrain.storage import Stored


def starting_weights(path: Path, program: Program, place: Place) -> dict[str, Tensor]:
    """A rank's masters as `path` has them, see `read_weights`."""
    stored = {name: s for name, (s, _, _) in owned(program, place.units).items()}
    return read_weights(path, stored, place.mesh, place.rank, program.job.master, place.device)


def read_weights(
    path: Path, stored: Mapping[str, Stored], mesh: Mesh, rank: int, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """A rank's shards of parameters as `path` has them, a Hugging Face folder or a checkpoint. The rank holds no more
    than its shards and the part of a tensor that it reads. Raises HFError or CheckpointError."""
    out, pieces = {}, {}
    for name, s in stored.items():
        spans = storage.spans(s, mesh, mesh.coordinates(rank), len(s.steps))
        out[name] = torch.zeros([p.length for p in spans], dtype=dtype, device=device)
        real = out[name][tuple(slice(0, p.stop - p.start) for p in spans)]
        pieces[s.param.tied_to or name] = Piece(real, tuple(p.start for p in spans), s.real)
    read = _of_checkpoint if (path / "run.json").is_file() else _of_folder
    read(path, pieces)
    return out


def _of_folder(path: Path, pieces: Mapping[str, Piece]) -> None:
    folder, _ = hf.open_folder(path)
    homes = hf.homes(folder.family, folder.cfg)
    for name, piece in pieces.items():
        _check(path, name, homes[name].param.shape if name in homes else None, piece)
        box = tuple(range(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        if piece.tensor.numel():
            piece.tensor.copy_(folder.read(homes[name], box))


def _of_checkpoint(path: Path, pieces: Mapping[str, Piece]) -> None:
    shapes, _ = open_tensors(path)
    for name, piece in pieces.items():
        _check(path, name, shapes.get(f"master/{name}"), piece)
    read_pieces(path, {f"master/{name}": piece for name, piece in pieces.items() if piece.tensor.numel()})


def _check(path: Path, name: str, shape: tuple[int, ...] | None, piece: Piece) -> None:
    if shape != piece.shape:
        has = "is not there" if shape is None else f"has shape {list(shape)}, not {list(piece.shape)}"
        raise CheckpointError(f"{path}: {name} {has}; a layout may not change the sizes of the model that it loads")
