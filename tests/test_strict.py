"""What is read must be what the model has: differences are listed and stop, or are allowed and told."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_hf
import test_train
import torch

from dtrain import checkpoint, convert, hf, launch, reference
from dtrain import layout as layouts
from dtrain.checkpoint import CheckpointError
from dtrain.layout import Layout
from dtrain.strict import Allow, differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STILL = ("optim.lr=1e-30", "optim.min_lr=0")
LLAMA = "family: llama, layers: 4, embed: 8, heads: 2, mlp: 12, vocab: 256"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_all_differences_are_in_one_line() -> None:
    found = {"a": (2,), "b": (3,), "spare": (9,), "old": (1,)}
    both = differences(found, {"a": (2,), "b": (4,), "c": ()}, rest=["spare"])
    assert both.refused(Allow()) == "c is missing, old is surplus, b has shape [3], not [4]"
    assert both.refused(Allow(True, True)) == "b has shape [3], not [4]"  # which is never allowed
    names = differences(found, {"a": (2,), "c": (), "b": (3,)})
    assert names.refused(Allow(True)) == "old is surplus, spare is surplus; allow it with --allow-extra"
    assert names.refused(Allow(extra=True)) == "c is missing; allow it with --allow-missing"
    assert names.refused(Allow(True, True)) is None
    assert names.said() == ["missing: c: initial values", "surplus: old: left out", "surplus: spare: left out"]
    many = differences({}, {f"w{i}": () for i in range(20)})
    assert str(many.refused(Allow())).endswith("w15 is missing and 12 more; allow it with --allow-missing")


def start(load: Path, folder: Path, *overrides: str) -> Layout:
    return test_train.make(folder, "run.steps=1", "data.source=synthetic", *overrides, model=f"load: {load}")


def test_a_loaded_model_of_more_or_fewer_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_train.alone(test_train.make(tmp_path / "four", "run.steps=1", "data.source=synthetic", model=LLAMA))
    four = tmp_path / "four" / "step-1"
    with pytest.raises(CheckpointError, match=r"block.3/norm_attn is surplus, .* and 1 more; allow it with --allow-ex"):
        test_train.alone(start(four, tmp_path / "three", "model.layers=3"))
    with pytest.raises(CheckpointError, match=r"block.4/norm_attn is missing, .* and 1 more; allow it with --allow-mi"):
        test_train.alone(start(four, tmp_path / "five", "model.layers=5", "allow=extra-tensors"))
    assert not list(tmp_path.glob("t*/step-*"))
    capsys.readouterr()
    fewer = start(four, tmp_path / "three", "model.layers=3", "allow=extra-tensors")
    test_train.alone(fewer, quiet=False)
    told = capsys.readouterr().out
    assert "surplus: block.3/wq: left out" in told and told.count("left out") == 9 and "missing" not in told
    more = start(four, tmp_path / "five", "model.layers=5", "allow=missing-tensors", *STILL)
    test_train.alone(more, quiet=False)
    told = capsys.readouterr().out
    assert "missing: block.4/wq: initial values" in told and told.count("initial values") == 9
    # Read where it was there, else as a new run's: with no rate to speak of, one step on.
    _, was = checkpoint.open_tensors(four)
    _, now = checkpoint.open_tensors(tmp_path / "five" / "step-1")
    assert torch.equal(now("master/block.3/wq"), was("master/block.3/wq"))
    module, cfg = layouts.family(more)
    assert torch.equal(now("master/block.4/wq"), reference.init(module, cfg)["block.4/wq"])
    assert now("master/block.4/wq").std() > 0


def test_a_folder_without_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_hf.saved("llama3", tmp_path / "in", shard="1GB")
    test_hf.edit(tmp_path / "in", lambda w: (w.pop("model.norm.weight"), w.update(more=torch.ones(1))))
    words = ("data.seq=8", "model.vocab_pad=61")
    with pytest.raises(hf.HFError, match=r"model.norm.weight is missing, more is surplus; allow it with --allow-mis"):
        test_train.alone(start(tmp_path / "in", tmp_path / "run", *words))
    allow = "allow=[missing-tensors, extra-tensors]"
    test_train.alone(start(tmp_path / "in", tmp_path / "run", allow, *STILL, *words), quiet=False)
    told = capsys.readouterr().out
    assert "missing: model.norm.weight: initial values" in told and "surplus: more: left out" in told
    _, now = checkpoint.open_tensors(tmp_path / "run" / "step-1")
    assert now("master/head/norm").tolist() == [1.0] * 32
    # An imported model says the same.
    lines = convert.import_folder(tmp_path / "in", tmp_path / "out", True, True)
    assert lines[:2] == ["missing: model.norm.weight: initial values", "surplus: more: left out"]


OWN = """
from dtrain.axes import Init, Param
from dtrain.models import llama
from dtrain.models.llama import ACT, BATCH, Config, block, counts, embed

def params(cfg):
    tree = llama.params(cfg)
    gain = Param((cfg.embed,), ("embed",), Init("ones"))
    return {**tree, "head": {**tree["head"], GAIN}}

def head_and_loss(cfg, p, x, batch, counts, key, on):
    rest = {k: v for k, v in p.items() if k != "gain"}
    x = x * on.gather(p["gain"]) if "gain" in p else x
    return llama.head_and_loss(cfg, rest, x, batch, counts, key, on)
"""


def test_a_model_file_that_changed_goes_on_as_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"

    def go(gain: bool, steps: int, *overrides: str) -> None:
        own.write_text(OWN.replace("GAIN", '"gain": gain' if gain else ""))
        model = f"file: {own}, layers: 1, embed: 8, heads: 2, mlp: 12, vocab: 256"
        words = (f"run.steps={steps}", "data.source=synthetic", *overrides)
        test_train.alone(test_train.make(tmp_path / "run", *words, model=model), quiet=False)

    go(False, 2)
    missing = "exp_avg/head/gain is missing, exp_avg_sq/head/gain is missing, master/head/gain is missing; allow"
    with pytest.raises(CheckpointError, match=rf"step-2 is of another model: {missing} it with --allow-missing$"):
        go(True, 3)
    with pytest.raises(CheckpointError, match=r"is missing"):
        go(True, 3, "allow=extra-tensors")
    capsys.readouterr()
    go(True, 3, "allow=missing-tensors", *STILL)
    assert "missing: master/head/gain: initial values" in capsys.readouterr().out
    _, read = checkpoint.open_tensors(tmp_path / "run" / "step-3")
    assert read("master/head/gain").tolist() == [1.0] * 8 and read("exp_avg/head/gain").abs().sum() > 0
    with pytest.raises(CheckpointError, match=r"exp_avg/head/gain is surplus, .*; allow it with --allow-extra$"):
        go(False, 4)
    go(False, 4, "allow=extra-tensors")
    assert "surplus: master/head/gain: left out" in capsys.readouterr().out
    assert "master/head/gain" not in checkpoint.open_tensors(tmp_path / "run" / "step-4")[0]


def test_the_flags_of_a_run_are_keys_of_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(launch, "_perform_all", lambda layout, *rest: seen.append(layout.allow) or 0)
    file = tmp_path / "x.yaml"
    file.write_text(
        "model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 12, vocab: 61}\n"
        "data: {source: synthetic, seq: 8, batch: 1}\nallow: spans-two-levels\n"
        f"run: {{steps: 1, folder: {tmp_path}/run}}\n"
    )
    for allow in ([], ["missing-tensors"], ["extra-tensors", "missing-tensors"]):
        assert launch.start(str(file), [], True, allow=allow) == 0
    assert seen == [
        ("spans-two-levels",),
        ("missing-tensors", "spans-two-levels"),
        ("extra-tensors", "missing-tensors", "spans-two-levels"),
    ]
