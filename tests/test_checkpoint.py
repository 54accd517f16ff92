"""Folders that appear only when complete, and tensors that carry no trace of ranks."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtrain import checkpoint, optim, plan
from dtrain import layout as layouts
from dtrain.checkpoint import CheckpointError, Piece, Record, tensors
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, initial_weights, publish
from dtrain.program.lower import Program, lower
from dtrain.program.update import State

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
GOLDEN = Path(__file__).parents[1] / "checkpoints" / "golden"


def piece(values: list[float]) -> dict[str, Piece]:
    t = torch.tensor(values)
    return {"master/a": Piece(t, (0,), (len(values),))}


def load(path: Path, n: int) -> torch.Tensor:
    out = {"master/a": Piece(torch.zeros(n), (0,), (n,))}
    checkpoint.restore(path, out, {"master/a"}, None, 1)
    return out["master/a"].tensor


def test_the_latest_is_the_largest_number_and_foreign_names_are_left_alone(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, Record(step, {}, ""), piece([step]))
    for name in ("step-100.backup", "foo-step-500", "step-999.tmp", "step-", "step-200"):
        (tmp_path / name).mkdir()  # step-200 is empty
    (tmp_path / "step-300").write_text("a file")
    assert checkpoint.steps(tmp_path) == [9, 10, 100]
    assert checkpoint.latest(tmp_path) == 100
    checkpoint.save(tmp_path, Record(101, {}, ""), piece([101]))
    names = {p.name for p in tmp_path.iterdir()}
    assert {"step-100.backup", "foo-step-500", "step-999.tmp", "step-200", "step-9"} <= names
    assert load(checkpoint.find(tmp_path, 100), 1).tolist() == [100]


def test_one_run_writes_to_a_folder(tmp_path: Path) -> None:
    run, file = tmp_path / "a" / "run", tmp_path / "file"
    file.write_text("")
    with checkpoint.claimed(run), checkpoint.claimed(tmp_path / "b"):
        again = pytest.raises(CheckpointError, match=r"a/run: another run is still writing to it")
        with again, checkpoint.claimed(run):
            pass
    with checkpoint.claimed(run):
        assert list(run.iterdir()) == []
    with pytest.raises(CheckpointError, match=rf"file: {os.strerror(errno.EEXIST)}"), checkpoint.claimed(file):
        pass


def test_a_missing_step_names_those_there_are(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint.save(tmp_path / "run", Record(step, {}, ""), piece([1]))
    with pytest.raises(CheckpointError, match=r"step-7 does not exist; .*run has step-4, step-8$"):
        checkpoint.find(tmp_path / "run", 7)
    with pytest.raises(CheckpointError, match=r"rum has no checkpoint$"):
        checkpoint.find(tmp_path / "rum", 7)


@pytest.mark.parametrize("moment", ["rename", "fsync"])
def test_a_crash_before_the_rename_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoint.save(tmp_path, Record(2, {}, ""), piece([2]))

    class Killed(BaseException):
        pass

    def kill(*args: Any) -> None:
        raise Killed

    monkeypatch.setattr(os, moment, kill)
    with pytest.raises(BaseException):  # noqa: B017  (DCP wraps what happens while it writes)
        checkpoint.save(tmp_path, Record(4, {}, ""), piece([4]))
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == 2
    assert load(checkpoint.find(tmp_path, 2), 1).tolist() == [2]
    checkpoint.save(tmp_path, Record(4, {}, ""), piece([5]))  # over what the crash left
    assert load(checkpoint.find(tmp_path, 4), 1).tolist() == [5]
    assert not list(tmp_path.glob("*.tmp"))


@contextmanager
def largest_file(n: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, Record(2, {}, ""), piece([2]))
    with largest_file(1 << 16), pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path, Record(4, {}, ""), piece([0.5] * 100_000))
    assert str(error.value).startswith("no checkpoint of step 4: ")
    assert str(error.value).endswith(f"the last good one is {tmp_path / 'step-2'}")
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    assert load(checkpoint.find(tmp_path, 2), 1).tolist() == [2]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOTDIR)):
        checkpoint.save(tmp_path / "run" / "x", Record(1, {}, ""), piece([1]))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, Record(2, {}, ""), piece([2]))
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path, Record(2, {}, ""), piece([3]))
    assert load(checkpoint.find(tmp_path, 2), 1).tolist() == [2]


def test_a_file_that_another_node_kept_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tensors.write_part

    def write(path: Path, *rest: Any) -> tensors.Part:
        part = original(path, *rest)
        next(path.glob("*.distcp")).unlink()
        return part

    monkeypatch.setattr("dtrain.checkpoint.saving.write_part", write)
    with pytest.raises(CheckpointError, match=r"run\.folder must be on a disk that all nodes share"):
        checkpoint.save(tmp_path, Record(2, {}, ""), piece([2]))
    assert list(tmp_path.iterdir()) == []


def test_loading_is_strict(tmp_path: Path) -> None:
    mine = {**piece([1, 2]), "master/b": Piece(torch.ones(3), (0,), (3,))}
    path = checkpoint.save(tmp_path, Record(1, {}, ""), mine)
    with pytest.raises(CheckpointError, match="of another model: master/c is missing, master/b is surplus; allow"):
        checkpoint.restore(path, {}, {"master/a", "master/c"}, None, 1)
    with pytest.raises(CheckpointError, match=r"master/b has shape \[3\], not \[4\]$"):
        wrong = {"master/b": Piece(torch.ones(4), (0,), (4,))}
        checkpoint.restore(path, wrong, {"master/a", "master/b"}, None, 1)
    (path / "run.json").write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        checkpoint.read(path)
    (path / ".metadata").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.restore(path, mine, set(mine), None, 1)


def test_what_may_change_on_resume() -> None:
    old = {
        "optim": {"lr": 0.1},
        "mesh": {"tp": {"size": 2, "link": None}},
        "model": {"layers": 2, "vocab_pad": "auto"},
        "data": {"batch": 8, "microbatch": 1},
        "run": {"steps": 5, "seed": 0},
        "allow": [],
    }
    new = {
        "optim": {"lr": 0.2},
        "mesh": {"tp": {"size": 4}},
        "shard": {"params": {"embed": ["fsdp"]}},
        "model": {"layers": 3, "vocab_pad": 512},
        "data": {"batch": 8, "microbatch": 2, "seq": 4},
        "run": {"steps": 9, "seed": 1},
    }
    forbidden, changed = checkpoint.compare(old, new)
    assert forbidden == {"model.layers": "2 -> 3", "run.seed": "0 -> 1", "data.seq": "nothing -> 4"}
    assert changed == {
        "data.microbatch": "1 -> 2",
        "mesh.tp.size": "2 -> 4",
        "model.vocab_pad": "auto -> 512",
        "optim.lr": "0.1 -> 0.2",
        "run.steps": "5 -> 9",
        "shard.params.embed": "nothing -> ['fsdp']",
    }


def make(fsdp: int, vocab: int = 257, model: str = "embed: 16, tied: true") -> tuple[plan.Plan, Program]:
    mesh, rules = (f"fsdp: {{size: {fsdp}}}", "vocab: fsdp, embed: fsdp") if fsdp > 1 else ("", "")
    if fsdp > 1:
        rules = "vocab: fsdp"
    made = plan.plan(
        layouts.loads(
            f"""
cluster: {{gpus_per_node: {fsdp}}}
mesh: {{{mesh}}}
shard: {{params: {{{rules}}}, compute: {{{"batch: fsdp" if fsdp > 1 else ""}}}}}
model: {{family: llama, layers: 2, heads: 2, kv_heads: 1, mlp: 16, vocab: {vocab}, {model}}}
data: {{source: synthetic, seq: 8, batch: {fsdp}}}
run: {{steps: 2}}
"""
        )
    )
    return made, lower(made.job)


def state(made: plan.Plan, program: Program, rank: int, seed: int) -> tuple[Place, State]:
    place = Place(made.job.mesh, rank, {}, made.units[0])
    with torch.no_grad():
        masters = initial_weights(program, place, seed)
        moments = optim.init(list(masters.values()))
        for i, m in enumerate(masters.values()):
            moments.exp_avg[i].copy_(m * 2)
            moments.exp_avg_sq[i].copy_(m * m)
        weights = publish(program, uncompiled(program), place, masters)
    return place, State(weights, moments, None)


def test_tensors_on_disk_are_global_and_unpadded(tmp_path: Path) -> None:
    """A vocabulary of 257 (padded to 384 in compute) in shards of 4; the tied table is there once."""
    one, program_one = make(1)
    place, whole = state(one, program_one, 0, seed=7)
    path = checkpoint.save(tmp_path, Record(1, {}, ""), checkpoint.pieces(program_one, place, whole))
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert tuple(metadata["master/embed/table"].size) == (257, 16)
    assert "master/head/table" not in metadata
    assert set(metadata) == tensors.names(program_one, scaled=False)

    four, program_four = make(4)
    rows = []
    for rank in range(4):
        place, mine = state(four, program_four, rank, seed=8)
        pieces = checkpoint.pieces(program_four, place, mine)
        checkpoint.restore(path, pieces, tensors.names(program_four, scaled=False), None, 1)
        _, right = state(four, program_four, rank, seed=7)
        for name, p in checkpoint.pieces(program_four, place, right).items():
            assert torch.equal(p.tensor, pieces[name].tensor), name
        table = pieces.get("master/embed/table")
        rows.append(0 if table is None else table.tensor.shape[0])
        # What is padding in memory stays zero.
        for name, t in right.weights.masters.items():
            assert torch.equal(t, mine.weights.masters[name]), name
    assert sum(rows) == 257


def test_the_golden_checkpoint_still_loads() -> None:
    """Written by the first version; every later one must read it."""
    (step,) = checkpoint.steps(GOLDEN)
    record = checkpoint.read(checkpoint.find(GOLDEN, step))
    assert record.step == step == 3 and record.layout["model"]["layers"] == 1
    made, program = golden()
    place, mine = state(made, program, 0, seed=1)
    pieces = checkpoint.pieces(program, place, mine)
    checkpoint.restore(GOLDEN / f"step-{step}", pieces, tensors.names(program, scaled=False), None, 1)
    assert mine.moments.step == 3
    assert mine.weights.masters["embed/table"].double().sum().item() == pytest.approx(GOLDEN_SUM, abs=1e-9)


GOLDEN_SUM = 0.36952429902157746


def golden() -> tuple[plan.Plan, Program]:
    made = plan.plan(layouts.loads(GOLDEN_LAYOUT))
    return made, lower(made.job)


GOLDEN_LAYOUT = """
model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 16}
data: {source: synthetic, seq: 8, batch: 2}
run: {steps: 3, compile: off, folder: checkpoints/golden}
"""
