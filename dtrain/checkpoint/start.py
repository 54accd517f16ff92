"""The weights that a run starts from: each rank reads its own part of a Hugging Face folder or of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtrain import hf, storage
from dtrain.checkpoint.tensors import STRICT, CheckpointError, Piece, described, read_pieces
from dtrain.mesh import Mesh
from dtrain.program.interpret import Place, owned
from dtrain.program.lower import Program
from dtrain.storage import Stored
from dtrain.strict import Allow, Differences, Shape, differences


def starting_weights(
    path: Path, program: Program, place: Place, allow: Allow = STRICT, seed: int = 0
) -> tuple[dict[str, Tensor], list[str]]:
    """A rank's masters as `path` has them, see `read_weights`."""
    every = owned(program, range(program.job.layers + 2))
    mine = {name: s for name, (s, _, _) in owned(program, place.units).items()}
    whole = {s.param.tied_to or name: s.real for name, (s, _, _) in every.items()}
    return read_weights(path, mine, whole, place.mesh, place.rank, program.job.master, place.device, allow, seed)


def read_weights(
    path: Path,
    stored: Mapping[str, Stored],
    whole: Mapping[str, Shape],
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: str,
    allow: Allow = STRICT,
    seed: int = 0,
) -> tuple[dict[str, Tensor], list[str]]:
    """A rank's shards of the parameters `stored` as `path` has them, a Hugging Face folder or a checkpoint, and lines
    that say what was done about differences. The rank holds no more than its shards and the part of a tensor that it
    reads.

    `path` must have the parameters of the `whole` model, no more and no less: HFError or CheckpointError on all ranks
    otherwise, unless `allow` says that those which are missing get their initial values (of `seed`) and others are left
    out.
    """
    out, pieces = {}, {}
    for name, s in stored.items():
        spans = storage.spans(s, mesh, mesh.coordinates(rank), len(s.steps))
        out[name] = torch.zeros([p.length for p in spans], dtype=dtype, device=device)
        real = out[name][tuple(slice(0, p.stop - p.start) for p in spans)]
        pieces[s.param.tied_to or name] = Piece(real, tuple(p.start for p in spans), s.real)
    read = _of_checkpoint if (path / "run.json").is_file() else _of_folder
    missing, said = read(path, pieces, whole, allow)
    for name, s in stored.items():
        if (s.param.tied_to or name) in missing:
            out[name] = storage.fill(replace(s, path=name), mesh, mesh.coordinates(rank), seed, dtype, device)
    return out, said


def _of_folder(
    path: Path, pieces: Mapping[str, Piece], whole: Mapping[str, Shape], allow: Allow
) -> tuple[Collection[str], list[str]]:
    folder, said = hf.open_folder(path, allow.missing, allow.extra)
    homes = hf.homes(folder.family, folder.cfg)
    differing = _check(path, {name: home.param.shape for name, home in homes.items()}, whole, allow)
    lost = {name for name, home in homes.items() if home.name not in folder.tensors}
    for name, piece in pieces.items():
        box = tuple(range(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        if piece.tensor.numel() and name in homes and name not in lost:
            piece.tensor.copy_(folder.read(homes[name], box))
    return {*differing.missing, *lost}, said + differing.said()


def _of_checkpoint(
    path: Path, pieces: Mapping[str, Piece], whole: Mapping[str, Shape], allow: Allow
) -> tuple[Collection[str], list[str]]:
    found = {n.removeprefix("master/"): tuple(t.shape) for n, t in described(path).items() if n.startswith("master/")}
    differing = _check(path, found, whole, allow)
    there = {f"master/{n}": piece for n, piece in pieces.items() if n in found and piece.tensor.numel()}
    read_pieces(path, there)
    return differing.missing, differing.said()


def _check(path: Path, found: Mapping[str, Shape], whole: Mapping[str, Shape], allow: Allow) -> Differences:
    differing = differences(found, whole)
    if fault := differing.refused(allow):
        hint = "; a layout may not change the sizes of the model that it loads" if differing.shaped else ""
        raise CheckpointError(f"{path}: {fault}{hint}")
    return differing
