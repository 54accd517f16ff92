"""The run: resuming, stopping, evaluating, and what happens when numbers go bad."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain import checkpoint, data, optim, plan, train, verify
from dtrain import layout as layouts
from dtrain.layout import Layout
from dtrain.program.update import UpdateConfig
from dtrain.rank import Rank

LLAMA = "family: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: 256"
GPT2 = "family: gpt2, layers: 2, embed: 32, heads: 4, vocab: 256, positions: 16, dropout: 0.1, attention_dropout: 0.1"
TP = "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make(
    folder: Path, *overrides: str, model: str = LLAMA, mesh: str = "", params: str = "", compute: str = ""
) -> Layout:
    world = math.prod(int(word.split("}")[0]) for word in mesh.split("size: ")[1:])
    text = f"""
cluster: {{gpus_per_node: {world}}}
mesh: {{{mesh}}}
shard: {{params: {{{params}}}, compute: {{{compute}}}}}
model: {{{model}}}
optim: {{lr: 3e-3, warmup: 4, length: 12, min_lr: 1e-4}}
data: {{source: stdlib, seq: 16, batch: 4, microbatch: 1, validation: {{batches: 1}}}}
run: {{steps: 10, compile: off, folder: {folder}}}
"""
    return layouts.loads(text, "layout.yaml", overrides)


def test_a_run_of_before_a_key_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    now = make(tmp_path)
    saved = train.as_dict(now)
    for key in ("packing", "document_mask", "mix", "masking", "eos"):
        del saved["data"][key]
    del saved["data"]["validation"]["split"]
    assert checkpoint.compare(layouts.completed(saved), train.as_dict(now)) == ({}, {})
    changed = train.as_dict(make(tmp_path, "data.packing=none", "data.validation.split=documents"))
    forbidden, _ = checkpoint.compare(layouts.completed(saved), changed)
    assert forbidden == {"data.packing": "concat -> none", "data.validation.split": "blocks -> documents"}


def alone(layout: Layout, stop_after: int = 10**9, quiet: bool = True) -> None:
    """Train in this process, as one rank; a signal arrives during step `stop_after`."""
    at = [0]

    def beat(step: int, what: str) -> None:
        at[0] = step

    train.train(layout, Rank(0, 1, 0, "cpu", "gloo", lambda: at[0] >= stop_after, beat), quiet=quiet)


def _one_rank(rank: int, port: int, layout: Layout, stop: tuple[int, int], out: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    at = [0]

    def beat(step: int, what: str) -> None:
        at[0] = step

    def stopping() -> bool:
        return rank == stop[0] and at[0] >= stop[1]

    try:
        train.train(layout, Rank(rank, layout.world, rank, "cpu", "gloo", stopping, beat), quiet=True)
        out.put((rank, None))
    except BaseException as error:
        out.put((rank, f"{type(error).__name__}: {error}"))


def together(layout: Layout, stop: tuple[int, int] = (-1, 0)) -> None:
    """Train in a process a rank, over gloo; `stop` is (rank, step) of a signal. Raises what a rank raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dtrain.train", "torch.distributed.checkpoint", "dtrain.models.llama"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = context.Queue()
    ranks = [context.Process(target=_one_rank, args=(r, port, layout, stop, out)) for r in range(layout.world)]
    for p in ranks:
        p.start()
    try:
        results = [out.get(timeout=120) for _ in ranks]
    finally:
        for p in ranks:
            p.join(5)
            p.kill()
    errors = [f"rank {r}: {e}" for r, e in sorted(results) if e]
    if errors:
        raise RuntimeError("; ".join(errors))


def rows(layout: Layout, *keys: str) -> list[tuple[Any, ...]]:
    """These columns of every training step in metrics.jsonl."""
    lines = (Path(str(layout.run.folder)) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [tuple(row[k] for k in ("step", *keys)) for row in found if "loss" in row]


def valid(layout: Layout) -> list[float]:
    lines = (Path(str(layout.run.folder)) / "metrics.jsonl").read_text().splitlines()
    return [row["valid_loss"] for row in map(json.loads, lines) if "valid_loss" in row]


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """A checkpoint's tensors, read without dtrain."""
    import torch.distributed.checkpoint as dcp

    path = folder / f"step-{step}"
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    out = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(out, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return out


def test_time_spent_waiting_for_data_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that needs half a second a step, beside steps of a few hundredths, is what a run waits for."""
    original = data.Reader.read

    def slow(self: data.Reader, step: int) -> dict[str, Tensor]:
        time.sleep(0.5)
        return original(self, step)

    alone(make(tmp_path / "fast", "run.steps=6"), quiet=False)
    fast = capsys.readouterr().out
    monkeypatch.setattr(data.Reader, "read", slow)
    layout = make(tmp_path / "slow", "run.steps=6")
    alone(layout, quiet=False)
    slow_said = capsys.readouterr().out
    shares = [float(said.split(" of the time waiting for data")[0].split()[-1][:-1]) for said in (fast, slow_said)]
    assert shares[0] < 20 and 50 < shares[1] <= 100
    assert all(0.3 < wait <= 1 for _, wait in rows(layout, "data_wait")[1:])


# ----------------------------------------------------------------------------------------------------- going on


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise, with dropout and accumulation: losses, norms, rates, samples, weights and moments, over interruptions at
    the end of an epoch (5 steps of 4 samples) and within one."""
    read: dict[int, list[int]] = {}
    original = data.Ahead.get

    def get(ahead: Any, index: int) -> Any:
        out = original(ahead, index)
        read.setdefault(index, []).extend(out["sample"].tolist())
        return out

    monkeypatch.setattr(data.Ahead, "get", get)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(20 * 16 + 1)))
    source = ("data.source=text", f"data.path={text}", "data.validation.fraction=0")
    straight = make(tmp_path / "straight", *source, model=GPT2)
    assert data.open_source(train.data_config(plan.plan(straight))).train == 20
    alone(straight)
    samples, read = read, {}
    broken = make(tmp_path / "broken", *source, model=GPT2)
    for stop in (5, 7, 10**9):
        alone(broken, stop_after=stop)
    assert checkpoint.steps(tmp_path / "broken") == [5, 7, 10]
    assert rows(broken, "loss", "grad_norm", "lr") == rows(straight, "loss", "grad_norm", "lr")
    assert [lr for _, lr in rows(broken, "lr")][:4] == [3e-3 * n / 4 for n in (1, 2, 3, 4)]
    assert read == samples
    a, b = tensors(tmp_path / "straight", 10), tensors(tmp_path / "broken", 10)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert a["exp_avg/block.1/wq"].abs().max() > 0


def test_a_run_over_a_stream_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} says {i * i}"}) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    stream = ("data.source=jsonl", f"data.path={tmp_path}/a.jsonl", "data.stream=true", "data.shuffle=7")
    stream += ("data.validation.fraction=0", "run.steps=8")
    whole, parts = (make(tmp_path / name, *stream) for name in ("whole", "parts"))
    alone(whole)
    alone(parts, stop_after=3)
    (cursor,) = checkpoint.read(tmp_path / "parts" / "step-3").cursors
    assert cursor is not None and cursor["window"] * 7 + cursor["taken"] == 3 * 4
    alone(make(tmp_path / "parts", *stream, "data.microbatch=2"))
    first, second = rows(whole, "loss"), rows(parts, "loss")
    assert first[:3] == second[:3] and [s for s, _ in second] == list(range(1, 9))
    # A microbatch of 2 rounds otherwise.
    assert [v for _, v in second] == pytest.approx([v for _, v in first], abs=1e-6)
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(train.RunError, match=r"was trained on other data"):
        alone(make(tmp_path / "parts", *stream, "run.steps=9"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_padded_state_survives_a_resume(tmp_path: Path) -> None:
    """A vocabulary of 257 over fsdp 4: padded shards in memory, none of it on disk, and the same curve. What is written
    while training goes on is the same as what is not."""
    kinds: dict[str, str] = {
        "model": LLAMA.replace("vocab: 256", "vocab: 257, tied: true"),
        "mesh": "fsdp: {size: 4}",
        "params": "vocab: fsdp",
        "compute": "batch: fsdp",
    }
    layout = make(tmp_path, "run.steps=4", "run.save_every=2", **kinds)
    together(make(tmp_path, "run.steps=4", "run.save_every=2", "run.background_save=wait", **kinds))
    straight, after = rows(layout, "loss", "grad_norm"), tensors(tmp_path, 4)
    assert after["master/embed/table"].shape == (257, 32)
    shutil.rmtree(tmp_path / "step-4")
    together(layout)
    assert rows(layout, "loss", "grad_norm") == straight and len(straight) == 4
    again = tensors(tmp_path, 4)
    assert all(torch.equal(again[k], after[k]) for k in after)


TIED = LLAMA.replace("vocab: 256", "vocab: 257, tied: true").replace("kv_heads: 2", "kv_heads: 1")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_under_any_layout(tmp_path: Path) -> None:
    """Begun under fsdp 4; gone on under a pipeline with the tied table on both stages, one KV head shared over tp and a
    vocabulary padded otherwise; ended by one process. The same samples, rates and curve."""
    straight = make(tmp_path / "straight", "run.steps=6", model=TIED)
    alone(straight)
    options = {"model": TIED}
    folder = tmp_path / "moved"
    fsdp = {"mesh": "fsdp: {size: 4}", "params": "embed: fsdp", "compute": "batch: fsdp"}
    both = {"mesh": "pp: {size: 2}, tp: {size: 2}", "params": f"layers: pp, {TP}", "compute": f"layers: pp, {TP}"}
    together(make(folder, "run.steps=2", **options, **fsdp))
    assert rows(make(folder, **options), "loss")[0][1] == pytest.approx(rows(straight, "loss")[0][1], rel=1e-6)
    together(make(folder, "run.steps=4", "model.vocab_pad=512", "data.microbatch=2", **options, **both))
    last = make(folder, "run.steps=6", **options)
    alone(last)
    for (_, *ours), (_, *theirs) in zip(
        rows(last, "loss", "grad_norm", "lr"), rows(straight, "loss", "grad_norm", "lr"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=2e-5)
    a, b = tensors(tmp_path / "straight", 6), tensors(folder, 6)
    assert a.keys() == b.keys() and {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}
    assert all(torch.allclose(a[k], b[k], atol=1e-4) for k in a)


def test_a_finished_run_says_so_and_can_be_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone(make(tmp_path, "run.steps=2"), quiet=False)
    out = capsys.readouterr().out
    assert "finished: 2 steps" in out and f"checkpoint {tmp_path / 'step-2'}" in out
    assert "with weight decay" in out and "one process" in out
    alone(make(tmp_path, "run.steps=2"))
    assert capsys.readouterr().out.startswith("this run is finished (2 of 2 steps")
    alone(make(tmp_path, "run.steps=3", "optim.lr=1e-3", "optim.length=24"), quiet=False)
    out = capsys.readouterr().out
    for line in ("optim.lr: 0.003 -> 0.001", "optim.length: 12 -> 24", "run.steps: 2 -> 3"):
        assert f"changed: {line}\n" in out
    assert checkpoint.steps(tmp_path) == [2, 3]
    assert [lr for step, lr in rows(make(tmp_path), "lr") if step == 3] == [1e-3 * 3 / 4]


def test_a_damaged_checkpoint_is_skipped_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped bit in the weights of the last checkpoint: the run goes on from the one before, to the same end."""
    layout = make(tmp_path, "run.steps=4", "run.save_every=2")
    alone(layout)
    straight = rows(layout, "loss", "grad_norm")
    file = tmp_path / "step-4" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"^run\.resume 4: .*step-4 is damaged: __0_0\."):
        alone(make(tmp_path, "run.steps=6", "run.resume=4"))
    capsys.readouterr()
    longer = make(tmp_path, "run.steps=6", "run.save_every=2", "optim.length=12")
    alone(longer)
    assert f"warning: {tmp_path / 'step-4'} is damaged and skipped: __0_0.distcp is not" in capsys.readouterr().err
    assert checkpoint.steps(tmp_path) == [2, 4, 6] and (tmp_path / "step-4.aside").is_dir()
    assert rows(longer, "loss", "grad_norm")[:4] == straight


def test_another_layout_or_other_data_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 200)
    source = ("data.source=text", f"data.path={text}", "data.validation.fraction=0")
    alone(make(tmp_path / "run", "run.steps=1", *source))
    with pytest.raises(train.RunError) as error:
        alone(
            make(
                tmp_path / "run",
                "run.steps=2",
                "run.seed=3",
                *source,
                model=LLAMA.replace("mlp: 64", "mlp: 96"),
            )
        )
    assert "model.mlp 64 -> 96 (layout.yaml:5)" in str(error.value)
    assert "run.seed 0 -> 3 (override run.seed=3)" in str(error.value)
    text.write_text("that is the question " * 200)
    with pytest.raises(train.RunError, match="other data"):
        alone(make(tmp_path / "run", "run.steps=2", *source))


# ------------------------------------------------------------------------------------------------- bad numbers


def test_a_bad_weight_is_named_and_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = train.training_step

    def planted(r: train.Run, number: int, state: Any) -> Any:
        if number == 4:
            state.weights.masters["block.1/w_gate"][3, 5] = math.nan
        return original(r, number, state)

    monkeypatch.setattr(train, "training_step", planted)
    with pytest.raises(train.RunError) as error:
        alone(make(tmp_path, "run.save_every=2"))
    assert str(error.value).startswith("step 4: loss nan")
    assert "the first bad tensor: parameter block.1/w_gate is nan" in str(error.value)
    assert "layer 1 on rank 0" in str(error.value)
    assert f"The last good state is {tmp_path / 'step-2'}" in str(error.value)
    assert checkpoint.steps(tmp_path) == [2]
    assert len(rows(make(tmp_path))) == 3
    monkeypatch.undo()
    alone(make(tmp_path, "run.save_every=2"))
    assert checkpoint.latest(tmp_path) == 10


MODEL = """
from dtrain.models.llama import *
from dtrain.models import llama

def block(cfg, p, x, batch, key, on):
    y = llama.block(cfg, p, x, batch, key, on)
    return y / ((key.step != 3) | (key.layer != 2))
"""


@pytest.mark.parametrize("backward", [False, True])
def test_a_bad_operation_is_named_with_its_line(tmp_path: Path, backward: bool) -> None:
    text = MODEL
    if backward:  # sqrt of a zero is fine, its derivative is not
        text = text.replace("return y / (", "return y + 0 * (y.detach() - y + 1.0 * (").replace(
            "!= 2))", "!= 2))).sqrt()"
        )
    (tmp_path / "model.py").write_text(text)
    line = 1 + text.split("\n").index(next(t for t in text.split("\n") if "return" in t))
    model = LLAMA.replace("family: llama", f"file: {tmp_path / 'model.py'}")
    with pytest.raises(train.RunError) as error:
        alone(make(tmp_path / "run", model=model))
    assert f"model.py:{line} gives" in str(error.value)
    assert f"in {'backward' if backward else 'forward'} of microbatch 0 of layer 1 on rank 0" in str(error.value)
    assert "There is no checkpoint yet" in str(error.value)


def test_of_several_ranks_the_one_that_began_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = LLAMA.replace("family: llama", f"file: {tmp_path / 'model.py'}")
    layout = make(tmp_path / "run", model=model, mesh="pp: {size: 2}", params="layers: pp", compute="layers: pp")
    with pytest.raises(RuntimeError) as error:
        together(layout)
    assert str(error.value).count("of layer 1 on rank 1 (pp 1)") == 2  # both ranks say the same


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_skips_overflows_together(ranks: int) -> None:
    mesh = "dp: {size: 2}" if ranks == 2 else ""
    layout = make(
        Path("unused"),
        "run.precision=fp16",
        "kernels.attention=math",
        mesh=mesh,
        compute="batch: dp" if mesh else "",
    )
    made = plan.plan(layout)
    source = data.open_source(train.data_config(made))
    batches = [data.batch(source, i, range(4)) for i in range(6)]
    counts = [made.job.module.counts(made.job.config, b) for b in batches]
    config = UpdateConfig(optim.Adamw(), 1.0, optim.LossScaling(start=2.0**20, every=2))
    done = verify.train(made, batches, counts, config, lambda step: 1e-3)  # raises if ranks disagree
    skipped = [r.skipped for r in done.reports]
    assert skipped[0] and not all(skipped)
    first_good = skipped.index(False)
    start = done.params[0]
    assert all(torch.equal(start[k], done.params[first_good - 1][k]) for k in start)
    assert not torch.equal(start["head/table"], done.params[first_good]["head/table"])


def test_fp16_keeps_its_scale_and_counts_what_it_skipped(tmp_path: Path) -> None:
    options = ("run.precision=fp16", "kernels.attention=math", "run.loss_scale={start: 4194304, every: 3}")
    straight, broken = make(tmp_path / "a", *options), make(tmp_path / "b", *options)
    alone(straight)
    for stop in (5, 10**9):
        alone(broken, stop_after=stop)
    columns = ("loss", "loss_scale", "skipped")
    assert rows(straight, *columns) == rows(broken, *columns)
    scales = [scale for _, scale in rows(straight, "loss_scale")]
    assert rows(straight, "skipped")[-1][1] > 0 and scales[-1] < scales[0]
    assert checkpoint.read(tmp_path / "b" / "step-10").skipped == rows(straight, "skipped")[-1][1]


def test_a_step_without_valid_labels_is_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = data.Reader.read

    def read(self: data.Reader, step: int) -> dict[str, Tensor]:
        out = original(self, step)
        if step == 1:
            out["labels"].fill_(-1)
        return out

    monkeypatch.setattr(data.Reader, "read", read)
    layout = make(tmp_path, "run.steps=3")
    alone(layout, quiet=False)
    assert "step 2: no label in the whole batch is valid" in capsys.readouterr().out
    assert [(step, loss > 0, norm > 0) for step, loss, norm in rows(layout, "loss", "grad_norm")] == [
        (1, True, True),
        (2, False, False),
        (3, True, True),
    ]


# ------------------------------------------------------------------------------------ evaluating and looking


def test_evaluation_counts_every_sequence_once(tmp_path: Path) -> None:
    """Five held-out sequences on two replicas: three batches each, and the loss of one process. Also, one rank gets a
    signal and both stop."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(16 * 25 + 1)))
    options = ("run.steps=1", "run.eval_every=1", "data.source=text", f"data.path={text}", "data.batch=2")
    options += ("data.validation={fraction: 0.2, batches: 9}",)
    one = make(tmp_path / "one", *options)
    source = data.open_source(train.data_config(plan.plan(one)))
    assert source.valid == 5
    alone(one)
    two = make(tmp_path / "two", *options, "run.steps=3", mesh="dp: {size: 2}", compute="batch: dp")
    together(two, stop=(1, 1))
    assert checkpoint.steps(tmp_path / "two") == [1]
    assert valid(two) == pytest.approx(valid(one), rel=1e-6)
    # The same by hand: each label once.
    batch = data.batch(source, 0, range(5), "valid")
    assert (batch["labels"] >= 0).sum() == 5 * 16


def test_evaluation_is_without_dropout_and_changes_nothing(tmp_path: Path) -> None:
    often = make(tmp_path / "often", "run.steps=3", "run.eval_every=1", model=GPT2)
    never = make(tmp_path / "never", "run.steps=3", model=GPT2)
    alone(often)
    alone(never)
    assert rows(often, "loss") == rows(never, "loss")
    made = plan.plan(often)
    assert train.without_dropout(made.job.config).dropout == 0
    assert made.job.config.dropout == 0.1
    assert len(valid(often)) == 4 and len(valid(never)) == 0  # before step 1 and after each


@pytest.mark.parametrize("first", [0, 3])
def test_a_profile_holds_exactly_the_steps_asked_for(tmp_path: Path, first: int) -> None:
    if first:
        alone(make(tmp_path), stop_after=first)
    alone(make(tmp_path, "run.steps=6", "run.profile={steps: [4, 5]}"))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "steps-4-5-rank-0.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert sorted(e["name"] for e in events if e["name"].startswith("step ")) == ["step 4", "step 5"]


def test_deterministic_is_set_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original: Callable[..., Any] = plan.plan

    def build(layout: Layout) -> plan.Plan:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(layout)  # type: ignore[no-any-return]

    monkeypatch.setattr(plan, "plan", build)
    try:
        alone(make(tmp_path, "run.steps=1", "run.deterministic=true"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]
