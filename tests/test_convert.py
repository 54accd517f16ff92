"""Weights in and out: Hugging Face folder -> ranks of a layout -> checkpoint -> Hugging Face folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import test_hf
import test_train
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from dtrain import checkpoint, cli, convert, hf, models, optim, plan, reference, train
from dtrain import layout as layouts
from dtrain.checkpoint import Record
from dtrain.layout import Layout, LayoutError
from dtrain.program.interpret import Place, Weights
from dtrain.program.lower import lower
from dtrain.program.update import State

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MESHES = {
    "one": ("", "", ""),
    "tp2": ("tp: {size: 2}", "HEADS", "HEADS, res_seq: tp"),
    "tp4": ("tp: {size: 4}", "HEADS", "HEADS"),  # KV heads are shared
    "pp2": ("pp: {size: 2}", "layers: pp", "layers: pp"),
    "fsdp3": ("fsdp: {size: 3}", "embed: fsdp", "batch: fsdp"),
    "fsdp-heads": ("fsdp: {size: 3}", "head_dim: fsdp, vocab: fsdp", "batch: fsdp"),
    "tp2xpp2": ("pp: {size: 2}, tp: {size: 2}", "HEADS, layers: pp", "HEADS, layers: pp, res_seq: tp"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make(load: Path, mesh: str, folder: Path | str = "x", *overrides: str) -> Layout:
    dims, params, compute = MESHES[mesh]
    heads = "vocab: tp, heads: tp, mlp: tp" + (", kv_heads: tp" if "llama" in load.name else "")
    world = math.prod(int(word.split("}")[0]) for word in dims.split("size: ")[1:])
    batch = 12
    return layouts.loads(
        f"""
cluster: {{gpus_per_node: {world}}}
mesh: {{{dims}}}
shard: {{params: {{{params.replace("HEADS", heads)}}}, compute: {{{compute.replace("HEADS", heads)}}}}}
model: {{load: {load}}}
data: {{source: synthetic, seq: 8, batch: {batch}}}
run: {{steps: 2, compile: off, folder: {folder}}}
""",
        "layout.yaml",
        overrides,
    )


def started(layout: Layout, out: Path) -> Path:
    """A checkpoint of the ranks of a layout, each of which read its own part of what the layout loads."""
    made = plan.plan(layout)
    program, held = lower(made.job), []
    for rank in range(made.job.mesh.world):
        at = made.job.mesh.coordinates(rank)
        place = Place(made.job.mesh, rank, {}, made.units[at.get("pp", 0)])
        masters, _ = checkpoint.starting_weights(Path(str(layout.model.load)), program, place)
        state = State(Weights(masters, masters), optim.init(list(masters.values())), None)
        held.append(checkpoint.pieces(program, place, state))
    tiny.save_ranks(out, Record(1, train.as_dict(layout), ""), held)
    return out


CASES = [
    *((name, "tp2") for name in test_hf.MODELS),
    *((name, mesh) for name in ("llama3.2", "gpt2", "bert") for mesh in ("pp2", "fsdp3", "tp2xpp2")),
    *(("llama3.1", mesh) for mesh in ("one", "tp4", "fsdp-heads")),
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_from_a_folder_over_ranks_to_a_folder(name: str, mesh: str, tmp_path: Path) -> None:
    """A vocabulary of 61 is padded on every mesh; what comes out is the bytes that went in."""
    model = test_hf.saved(name, tmp_path / name)
    step = started(make(tmp_path / name, mesh), tmp_path / "run" / "step-1")
    (line,) = convert.export(step, tmp_path / "out", shard_bytes=20_000)
    assert line.startswith(f"{tmp_path / 'out'}: step 1")
    want, got = test_hf.tensors(tmp_path / name), test_hf.tensors(tmp_path / "out")
    assert want.keys() == got.keys()
    assert all(torch.equal(t, got[n]) for n, t in want.items())
    batch = test_hf.inputs(61)
    again = test_hf.loaded(tmp_path / "out", name)
    assert again.config.vocab_size == 61 and again.config.tie_word_embeddings == model.config.tie_word_embeddings
    test_hf.assert_indexed(tmp_path / "out")
    torch.testing.assert_close(test_hf.theirs(again, batch), test_hf.theirs(model, batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "table", "padded"),
    [
        ("gpt2", {"vocab_size": 50257, "n_embd": 8, "n_layer": 1}, "transformer.wte.weight", 50304),
        ("bert", {"vocab_size": 30522, "hidden_size": 8, "num_hidden_layers": 1}, "cls.predictions.bias", 30592),
    ],
)
def test_vocabularies_that_are_padded_are_cut(
    name: str, sizes: dict[str, int], table: str, padded: int, tmp_path: Path
) -> None:
    """Under tp 2, which pads them, to a folder, and from there into one process."""
    test_hf.saved(name, tmp_path / name, **sizes)
    layout = make(tmp_path / name, "tp2", "x", f"model.vocab_pad={padded}")
    convert.export(started(layout, tmp_path / "run" / "step-1"), tmp_path / "out" / name)
    want, got = test_hf.tensors(tmp_path / name), test_hf.tensors(tmp_path / "out" / name)
    assert want.keys() == got.keys() and all(torch.equal(t, got[n]) for n, t in want.items())
    config = json.loads((tmp_path / "out" / name / "config.json").read_text())
    assert got[table].shape[0] == config["vocab_size"] == sizes["vocab_size"]
    test_hf.loaded(tmp_path / "out" / name, name)
    convert.import_folder(tmp_path / "out" / name, tmp_path / "again")
    (_, one), (_, other) = (checkpoint.open_tensors(tmp_path / p) for p in ("run/step-1", "again/step-0"))
    assert torch.equal(one("master/embed/table"), other("master/embed/table"))


@pytest.mark.parametrize("name", ["llama3.1", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_and_export_give_the_same_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    test_hf.saved(name, tmp_path / "in", dtype)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.6}')
    result = CliRunner().invoke(cli.app, ["import", str(tmp_path / "in"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'run' / 'step-0'}: " in result.stdout
    # What it prints is what `load` means.
    section = result.stdout[result.stdout.index("model:\n") :]
    rest = "data: {source: synthetic, seq: 8, batch: 1}\nrun: {steps: 1}\n"
    loaded = layouts.loads(f"model: {{load: {tmp_path / 'run' / 'step-0'}}}\n{rest}")
    assert layouts.family(layouts.loads(section + rest)) == layouts.family(loaded)

    result = CliRunner().invoke(cli.app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    want, got = test_hf.tensors(tmp_path / "in"), test_hf.tensors(tmp_path / "out")
    assert want.keys() == got.keys()
    for n, t in want.items():
        assert t.dtype == got[n].dtype and t.contiguous().view(torch.uint8).equal(got[n].view(torch.uint8)), n
    for beside in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / beside).read_bytes() == (tmp_path / "in" / beside).read_bytes()
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("in", "out"))
    assert {k: after[k] for k in before} == before


def test_a_run_starts_from_a_folder_or_a_checkpoint_and_ends_as_a_folder(tmp_path: Path) -> None:
    test_hf.saved("llama3.1", tmp_path / "llama")
    convert.import_folder(tmp_path / "llama", tmp_path / "imported")
    for load, folder in ((tmp_path / "llama", "a"), (tmp_path / "imported" / "step-0", "b")):
        test_train.alone(make(load, "one", tmp_path / folder, "run.steps=3"))
    _, a = checkpoint.open_tensors(tmp_path / "a" / "step-3")
    shapes, b = checkpoint.open_tensors(tmp_path / "b" / "step-3")
    assert all(torch.equal(a(n), b(n)) for n in shapes)
    # The same command goes on, and the folder may have moved.
    (tmp_path / "llama").rename(tmp_path / "llama2")
    test_train.alone(make(tmp_path / "llama2", "one", tmp_path / "a", "run.steps=4"))
    assert checkpoint.latest(tmp_path / "a") == 4
    convert.export(tmp_path / "a", tmp_path / "out")
    got = test_hf.parameters(hf.open_folder(tmp_path / "out")[0])
    was = test_hf.parameters(hf.open_folder(tmp_path / "llama2")[0])
    changed = [(got[p] - t).abs().max().item() for p, t in was.items()]
    assert all(0 < c < 0.1 for c in changed)
    test_hf.loaded(tmp_path / "out", "llama3.1")


def logits(step: Path, batch: dict[str, Tensor]) -> Tensor:
    """What a checkpoint's weights say, by dtrain's own functions."""
    family, cfg = convert.model_in(checkpoint.read(step), step)
    shapes, read = checkpoint.open_tensors(step)
    params = {name.removeprefix("master/"): read(name) for name in shapes if name.startswith("master/")}
    scores: Tensor = test_hf.ours(models.load(family), test_hf.evaluation(family, cfg), params, batch)[0]
    return scores


@pytest.mark.parametrize(
    "name",
    ["llama3.2", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama3.1", "gpt2", "gpt2-untied", "bert"))],
)
def test_a_fine_tuned_model_is_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    """From a random model of transformers, three steps of real processes under pp 2 x tp 2, and back."""
    before = test_hf.saved(name, tmp_path / name)
    layout = make(tmp_path / name, "tp2xpp2", tmp_path / "run", "run.steps=3", "data.microbatch=3")
    test_train.together(layout)
    convert.export(tmp_path / "run", tmp_path / "out")
    batch = test_hf.inputs(61)
    scores = test_hf.theirs(test_hf.loaded(tmp_path / "out", name), batch)[0]
    torch.testing.assert_close(scores, logits(tmp_path / "run" / "step-3", batch), rtol=0, atol=1e-5)
    assert (scores - test_hf.theirs(before, batch)[0]).abs().max() > 1e-3
    # And it is the curve of one process.
    alone = make(tmp_path / name, "one", tmp_path / "one", "run.steps=3")
    test_train.alone(alone)
    for ours, theirs in zip(*(test_train.rows(r, "loss", "grad_norm") for r in (layout, alone)), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_missing_heads_start_at_their_initial_values(tmp_path: Path) -> None:
    test_hf.saved("bert", tmp_path / "in", shard="1GB")
    test_hf.edit(tmp_path / "in", lambda w: w.pop("bert.pooler.dense.weight"))
    words = ["import", str(tmp_path / "in"), str(tmp_path / "run")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "bert.pooler.dense.weight is missing; allow it with --allow-missing" in result.stderr
    result = CliRunner().invoke(cli.app, [*words, "--allow-missing"])
    assert result.stdout.startswith("missing: bert.pooler.dense.weight: initial values\n")
    _, read = checkpoint.open_tensors(tmp_path / "run" / "step-0")
    folder, _ = hf.open_folder(tmp_path / "in", allow_missing=True)
    home = hf.homes(folder.family, folder.cfg)["head/w_pool"]
    assert torch.equal(read("master/head/w_pool"), reference.value("head/w_pool", home.param, 0, torch.float32))


def test_a_model_of_bytes_is_exported_with_a_tokenizer(tmp_path: Path) -> None:
    test_train.alone(test_train.make(tmp_path / "run", "run.steps=1"))
    convert.export(tmp_path / "run", tmp_path / "out", "bf16")
    import transformers

    tokenizer = test_hf.quiet(lambda: transformers.AutoTokenizer.from_pretrained(tmp_path / "out"))
    text = "def f(x):\n\treturn 'é€\x00\x7f'  # 0"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (0, 16)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    test_hf.loaded(tmp_path / "out", "llama3")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("load: {folder}, family: llama", "model.load says what the model is; write one of them"),
        ("load: {folder}/none", "no such folder"),
        ("load: {folder}/empty", "has no config.json"),
        ("load: {folder}/run", "a run's folder; name one of its checkpoints, as in {folder}/run/step-10"),
        ("load: {folder}/torn", "its run.json cannot be read: "),
        ("load: {folder}, layrs: 3", "unknown key 'layrs'"),
        ("load: {folder}/bad", "config.json: hidden_act: relu; allowed: silu"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(model: str, said: str, tmp_path: Path) -> None:
    test_hf.saved("llama3", tmp_path)
    for name in ("empty", "run/step-3", "run/step-10", "run/step-20.tmp", "bad", "torn"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "torn" / "run.json").write_text('{"step": 3, "lay')
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "relu"}
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError) as error:
        layouts.loads(
            f"model: {{{model.replace('{folder}', str(tmp_path))}}}\n"
            "data: {source: synthetic, seq: 8, batch: 1}\nrun: {steps: 1}\n"
        )
    said = said.replace("{folder}", str(tmp_path))
    assert said in str(error.value) and str(error.value).startswith("layout.yaml:1: ") and "\n" not in str(error.value)


def test_sizes_may_not_differ_from_what_is_loaded(tmp_path: Path) -> None:
    test_hf.saved("llama3", tmp_path / "llama")
    with pytest.raises(checkpoint.CheckpointError, match=r"block.0/w_gate has shape \[32, 48\], not \[32, 64\]"):
        test_train.alone(make(tmp_path / "llama", "one", tmp_path / "run", "model.mlp=64"))


def test_an_imported_model_in_the_runs_folder_is_not_passed_over(tmp_path: Path) -> None:
    test_hf.saved("llama3", tmp_path / "llama")
    convert.import_folder(tmp_path / "llama", tmp_path / "run")
    layout = test_train.make(tmp_path / "run")
    with pytest.raises(train.RunError, match=r"holds an imported model; .* model: {load: .*step-0}"):
        test_train.alone(layout)


def test_an_import_that_fails_leaves_nothing_to_be_taken_for_a_model(tmp_path: Path) -> None:
    test_hf.saved("llama3", tmp_path / "in", shard="1GB")
    convert.import_folder(tmp_path / "in", tmp_path / "run")
    with pytest.raises(checkpoint.CheckpointError, match=r"run has step-0 already; import into a folder without"):
        convert.import_folder(tmp_path / "in", tmp_path / "run")
    test_hf.edit(tmp_path / "in", lambda w: w.update({"model.norm.weight": w["model.norm.weight"].int()}))
    with pytest.raises(checkpoint.CheckpointError, match=r"step 0: .*model.norm.weight is torch.int32; weights are fl"):
        convert.import_folder(tmp_path / "in", tmp_path / "other")
    assert not list((tmp_path / "other").glob("step-*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.HFError, match=rf"^{tmp_path}/file/hf: Not a directory$"):
        convert.import_folder(tmp_path / "in", tmp_path / "file")


def test_a_model_of_a_file_is_refused(tmp_path: Path) -> None:
    record = Record(1, {"model": {"file": "my_model.py", "layers": 1}}, "")
    with pytest.raises(hf.HFError, match=r"a model of its own, my_model.py"):
        convert.model_in(record, tmp_path)


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from dtrain import convert, hf, models
torch.set_num_threads(1)

def held():  # bytes of this process that are no file's
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def peak(work):
    most, done = [0], threading.Event()
    def watch():
        while not done.is_set():
            most[0] = max(most[0], held())
            time.sleep(0.0005)
    before, thread = held(), threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return most[0] - before

def models_of(layers, folder):
    cfg = models.load("llama").Config(layers=layers, embed=512, heads=8, kv_heads=2, mlp=2048, vocab=8192)
    homes = hf.homes("llama", cfg)
    config = hf.config_of("llama", cfg, "fp32", 64)
    fetch = lambda path: torch.full(homes[path].param.shape, 0.5)
    hf.write_folder(folder / "in", "llama", cfg, fetch, torch.float32, config)
    into = peak(lambda: convert.import_folder(folder / "in", folder / "run"))
    out = peak(lambda: convert.export(folder / "run", folder / "out", "bf16"))
    size = sum(f.stat().st_size for f in (folder / "in").glob("*.safetensors"))
    print(size, into, out)

models_of(1, Path(sys.argv[1]) / "warm")
models_of(12, Path(sys.argv[1]) / "big")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_conversion_holds_a_tensor_at_a_time(tmp_path: Path) -> None:
    """A model of 232 MB whose largest tensor is 17 MB: what 70 GB of 4 GB would be."""
    ran = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    size, into, out = map(int, ran.stdout.splitlines()[-1].split())
    largest = 8192 * 512 * 4
    assert size > 12 * largest
    assert into < 3.5 * largest and out < 3.5 * largest, (into / largest, out / largest)
