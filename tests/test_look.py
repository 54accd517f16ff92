"""`dtrain checkpoint ls|show|verify|diff`: what they say of checkpoints whole, damaged and different."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from dtrain import checkpoint, cli
from dtrain.checkpoint import Piece, Record, look

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ("embed/table", *(f"block.{i}/wq" for i in range(12)), "head/norm")


def save(folder: Path, step: int, values: dict[str, torch.Tensor], **record: Any) -> Path:
    pieces = {name: Piece(t, (0,) * t.ndim, tuple(t.shape)) for name, t in values.items()}
    layout = {"model": {"layers": 12, "load": None}, "optim": {"lr": 0.25}} | record.pop("layout", {})
    return checkpoint.save(folder, Record(step, layout, "abc", **record), pieces)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"embed/table": (8, 4), "head/norm": (4,)}
    return {f"master/{n}": torch.randn(shapes.get(n, (4, 2, 2)), generator=g) for n in NAMES}


def dtrain(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["checkpoint", *map(str, words)])


def flip(path: Path) -> None:
    """One bit of the first tensor's file."""
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_ls(tmp_path: Path) -> None:
    for step in (2, 10):
        save(tmp_path, step, weights())
    result = dtrain("ls", tmp_path)
    assert result.exit_code == 0, result.output
    first, *rows = (line.split() for line in result.stdout.splitlines())
    assert first == ["checkpoint", "written", "size"]
    assert [(row[0], row[-1]) for row in rows] == [("step-2", "whole"), ("step-10", "whole")]

    file = next((tmp_path / "step-10").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "step-12.tmp").mkdir()
    (tmp_path / "step-10.backup").mkdir()  # somebody else's
    result = dtrain("ls", tmp_path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [c["name"] for c in found] == ["step-2", "step-10", "step-12.tmp"]
    assert found[0]["wrong"] is None and found[2]["wrong"] == "was never finished"
    assert found[1]["wrong"].startswith(f"{file.name} has ")
    assert found[0]["bytes"] == sum(f.stat().st_size for f in (tmp_path / "step-2").iterdir())


def test_show(tmp_path: Path) -> None:
    path = save(tmp_path, 3, weights() | {"updates": torch.tensor(3.0)}, valid_loss=1.5)
    result = dtrain("show", tmp_path)  # the latest
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [f"{path}:", "step", "3,", "format", str(checkpoint.read(path).format)] in lines
    for row in (
        ["valid_loss", "1.5"], ["optim.lr", "0.25"], ["model.layers", "12"],
        ["master/block.0..11/wq", "float32", "[4,", "2,", "2]", "64"],
        ["master/embed/table", "float32", "[8,", "4]", "128"],
        ["updates", "float32", "[]", "4"],
        ["15", "tensors,", "916B"],
    ):  # fmt: skip
        assert row in lines, row
    values = json.loads(dtrain("show", path, "--json").stdout)
    assert values["record"]["layout"]["optim"] == {"lr": 0.25} and values["path"] == str(path)
    # Layers count as numbers.
    names = [t["name"] for t in values["tensors"] if "block" in t["name"]]
    assert names == [f"master/block.{i}/wq" for i in range(12)]
    assert values["tensors"][0] == {"name": names[0], "dtype": "float32", "shape": [4, 2, 2], "bytes": 64}


def test_verify(tmp_path: Path) -> None:
    path = save(tmp_path, 3, weights())
    result = dtrain("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{path}: whole\n")
    flip(path)
    assert dtrain("ls", tmp_path).exit_code == 0  # which does not read it
    result = dtrain("verify", path)
    assert result.exit_code == 1 and result.stdout.startswith(f"{path}: ") and ".distcp" in result.stdout
    values = json.loads(dtrain("verify", path, "--json").stdout)
    assert values["path"] == str(path) and len(values["problems"]) == 1


def test_diff(tmp_path: Path) -> None:
    first = weights() | {"gone": torch.ones(1), "wide": torch.ones(2), "updates": torch.tensor(3.0)}
    first["master/block.10/wq"][1, 1, 1] = 1.0
    a = save(tmp_path / "a", 3, first)
    same = dtrain("diff", a, tmp_path / "a")
    assert same.exit_code == 0 and same.stdout.splitlines() == [f"{a} -> {a}", "17 tensors are the same bits"]

    second = {k: v.clone() for k, v in first.items() if k != "gone"} | {"new": torch.ones(1), "wide": torch.ones(3)}
    second["master/block.10/wq"][1, 1, 1] = 1.5
    second["master/block.2/wq"][0, 0, 0] = float("nan")
    second["updates"] = second["updates"].double()
    b = save(tmp_path / "b", 4, second, layout={"optim": {"lr": 0.5}})
    result = dtrain("diff", a, b)
    assert result.exit_code == 1
    assert [line.split("  ")[0] + " " + line.split("  ")[-1].strip() for line in result.stdout.splitlines()[1:-1]] == [
        "optim.lr 0.25 -> 0.5",
        "step 3 -> 4",
        f"gone only in {a}",
        "master/block.2/wq differs by up to nan",
        "master/block.10/wq differs by up to 0.5",
        f"new only in {b}",
        "updates float32 [] -> float64 []",
        "wide float32 [2] -> float32 [3]",
    ]
    assert result.stdout.endswith("12 tensors are the same bits, 6 differ\n")
    values = json.loads(dtrain("diff", a, b, "--json").stdout)
    assert values["record"] == {"optim.lr": "0.25 -> 0.5", "step": "3 -> 4"} and values["equal"] == 12
    assert {"name": "master/block.10/wq", "what": None, "most": 0.5} in values["tensors"]
    assert {"name": "master/block.2/wq", "what": None, "most": None} in values["tensors"]


def test_a_difference_is_of_bits_and_nans_and_infinities_are_no_distance(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    assert look._most(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.0])) is None
    assert look._most(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.5])) == 0.5
    assert look._most(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    assert look._most(torch.tensor([inf]), torch.tensor([1.0])) == inf


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 3, weights())
    (tmp_path / "empty").mkdir()
    bad = shutil.copytree(path, tmp_path / "bad" / "step-3")
    (bad / "run.json").write_text("{")
    (bad / ".metadata").write_bytes(b"x")
    for said, *words in (
        ("has no checkpoint", "ls", tmp_path / "empty"),
        ("run.json has no checkpoint", "ls", path / "run.json"),
        ("run.json is no checkpoint", "show", path / "run.json"),
        ("none does not exist; give a run's folder", "ls", tmp_path / "none"),
        ("none does not exist", "show", tmp_path / "none"),
        ("is no checkpoint, nor a run's folder with one", "verify", tmp_path / "empty"),
        ("run.json cannot be read", "show", bad),
        ("run.json cannot be read", "diff", path, bad),
    ):
        result = dtrain(*words)
        assert result.exit_code == 2 and said in result.stderr, result.output
        assert result.stderr.count("\n") == 1 and not result.stdout
