"""Hugging Face folders against transformers itself, on tiny random models that the tests make."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dtrain import hf, models, reference
from dtrain.axes import ALONE
from dtrain.hf.config import KINDS
from dtrain.models import ModelError

SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)  # fmt: skip
GPT2 = dict(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=48, bos_token_id=0, eos_token_id=0)
BERT = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=48,
)  # fmt: skip
# name -> classes of the config and the model, and what the config is given
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "llama3.1": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_parameters": SCALING, "num_key_value_heads": 1}),
    "llama3.2": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": SCALING | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 6},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "n_inner": 80}),
    "bert": ("BertConfig", "BertForPreTraining", BERT),
    "bert-untied": ("BertConfig", "BertForPreTraining", BERT | {"tie_word_embeddings": False}),
    "bert-pre": ("MegatronBertConfig", "MegatronBertForPreTraining", BERT),
}


def quiet(work: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"transformers|torch\.jit|importlib")
        return work()


def random_model(name: str, seed: int = 0, **more: Any) -> Any:
    """A model of transformers in which no weight is at its initial one or zero."""
    import transformers

    config, cls, values = MODELS[name]
    torch.manual_seed(seed)
    made = quiet(lambda: getattr(transformers, cls)(getattr(transformers, config)(**values | more)).eval())
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
        if name == "bert-untied":  # the second of its biases is not used
            made.cls.predictions.bias.copy_(made.cls.predictions.decoder.bias)
    return made


def saved(name: str, path: Path, dtype: torch.dtype = torch.float32, shard: str = "20KB", **more: Any) -> Any:
    model = random_model(name, **more).to(dtype)
    quiet(lambda: model.save_pretrained(path, max_shard_size=shard))
    return model


def loaded(path: Path, name: str) -> Any:
    """The folder in transformers, which must find every weight there, and no other."""
    import transformers

    cls = getattr(transformers, MODELS[name][1])
    model, info = quiet(lambda: cls.from_pretrained(path, output_loading_info=True))
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def parameters(folder: hf.Folder) -> dict[str, Tensor]:
    return {path: folder.read(home) for path, home in hf.homes(folder.family, folder.cfg).items()}


def inputs(vocab: int, seq: int = 40) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        "tokens": torch.randint(vocab, (2, seq), generator=g),
        "labels": torch.randint(vocab, (2, seq), generator=g),
        "types": (torch.arange(seq) > seq // 2).long().expand(2, seq).contiguous(),
        "valid": torch.ones(2, seq, dtype=torch.int64),
        "order": torch.arange(2),
        "sample": torch.arange(2),
    }


def theirs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Scores of every token at every position, and BERT's of the sentence pair."""
    with torch.no_grad():
        if "Bert" in type(model).__name__:
            out = model(batch["tokens"], attention_mask=batch["valid"], token_type_ids=batch["types"])
            return out.prediction_logits, out.seq_relationship_logits
        return model(batch["tokens"]).logits, None


def ours(module: ModuleType, cfg: Any, params: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        x = reference.last_activation(module, cfg, params, batch)
        head = reference.segments(module, cfg, params)[-1]
        order = module.order_logits(cfg, head, x, ALONE) if hasattr(module, "order_logits") else None
        return module.logits(cfg, head, x, ALONE), order


def evaluation(family: str, cfg: Any) -> Any:
    return cfg if family == "llama" else dataclasses.replace(cfg, dropout=0.0, attention_dropout=0.0)


def write(path: Path, folder: hf.Folder, precision: str = "fp32", **more: Any) -> list[Path]:
    params = parameters(folder)
    config = hf.config_of(folder.family, folder.cfg, precision, 64, folder.config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return hf.write_folder(path, folder.family, folder.cfg, params.__getitem__, dtype, config, folder.path, **more)


def tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    both = [load_file(f) for f in files]
    names = [n for f in both for n in f]
    assert len(set(names)) == len(names)
    return {n: t for f in both for n, t in f.items()}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model, batch = saved(name, tmp_path), inputs(61)
    folder, said = hf.open_folder(tmp_path)
    assert said == []
    module = models.load(folder.family)
    scores, order = ours(module, evaluation(folder.family, folder.cfg), parameters(folder), batch)
    want, want_order = theirs(model, batch)
    assert want.std() > 0.1
    torch.testing.assert_close(scores, want, rtol=0, atol=1e-5)
    if want_order is not None:
        torch.testing.assert_close(order, want_order, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_read_and_written_is_the_same_bytes(name: str, precision: str, tmp_path: Path) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    saved(name, tmp_path / "in", dtype)
    folder, _ = hf.open_folder(tmp_path / "in")
    assert hf.dtype_of(folder.config) == precision
    write(tmp_path / "out", folder, precision)
    want, got = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert want.keys() == got.keys()
    for n, t in want.items():
        assert t.dtype == got[n].dtype == dtype and t.shape == got[n].shape, n
        assert t.contiguous().view(torch.uint8).equal(got[n].view(torch.uint8)), n
    again = loaded(tmp_path / "out", name)
    assert again.dtype == dtype
    batch = inputs(61)
    assert torch.equal(theirs(again, batch)[0], theirs(loaded(tmp_path / "in", name), batch)[0])


def assert_indexed(path: Path) -> None:
    """The index names each tensor once, in the file that has it, and their bytes together."""
    files = sorted(path.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: f.name for f in files for n in load_file(f)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(path).values())


def test_an_index_names_each_tensor_once_and_where_it_is(tmp_path: Path) -> None:
    saved("llama3", tmp_path / "in")
    folder, _ = hf.open_folder(tmp_path / "in")
    files = write(tmp_path / "out", folder, shard_bytes=20_000)
    assert len(files) > 3 and files == sorted((tmp_path / "out").glob("*.safetensors"))
    assert_indexed(tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == random_model("llama3").state_dict().keys()
    # No file is over the limit, unless one tensor is.
    assert all(f.stat().st_size < 20_000 + 4_096 or len(load_file(f)) == 1 for f in files)


@pytest.mark.parametrize("name", ["llama3.1", "gpt2", "bert"])
def test_a_part_of_a_parameter_is_read_from_the_part_of_the_tensor(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    folder, _ = hf.open_folder(tmp_path)
    read = []
    part = hf.Folder._part

    class Counting(hf.Folder):
        def _part(self, name: str, box: Any) -> Tensor:
            read.append(torch.Size(map(len, box)).numel())
            return part(self, name, box)

    counting = Counting(folder.path, folder.config, folder.family, folder.cfg, folder.tensors)
    for path, home in hf.homes(folder.family, folder.cfg).items():
        whole = folder.read(home)
        cuts = [[range(n), range(n // 2), range(n // 2, n)] for n in whole.shape]
        for box in itertools.product(*cuts):
            got = counting.read(home, box)
            assert torch.equal(got, whole[tuple(slice(r.start, r.stop) for r in box)]), path
            inner = [i for group in home.groups for i in group[1:]]
            exact = all(len(box[i]) == whole.shape[i] for i in inner)
            assert not exact or read[-1] == got.numel(), path  # not one byte more


def test_rotary_settings_are_under_old_and_new_keys(tmp_path: Path) -> None:
    saved("llama3.1", tmp_path / "in")
    folder, _ = hf.open_folder(tmp_path / "in")
    write(tmp_path / "out", folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == SCALING and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in SCALING.items() if k != "rope_theta"}
    assert config["torch_dtype"] == config["dtype"] == "float32"
    # And a folder from before has the old ones only.
    del config["rope_parameters"], config["dtype"]
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    assert hf.model_of(config) == (folder.family, hf.model_of(folder.config)[1])


@pytest.mark.parametrize("name", MODELS)
def test_ties_are_told(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "in")
    folder, _ = hf.open_folder(tmp_path / "in")
    write(tmp_path / "out", folder)
    head = {"lm_head.weight", "cls.predictions.decoder.weight"} & tensors(tmp_path / "out").keys()
    tied = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert (len(head) == 0) == tied == folder.cfg.tied


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3", {"model_type": "qwen2"}, "model_type: qwen2; allowed: llama, gpt2, bert, megatron-bert"),
        ("llama3", {"architectures": ["LlamaForSequenceClassification"]}, "architectures: LlamaForSequenceClassif"),
        ("llama3", {"attention_bias": True}, "attention_bias: True; allowed: False"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act: gelu; allowed: silu"),
        ("llama3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama3", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("llama3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: yarn; allowed: default, ll"),
        ("llama3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: linear"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ("llama3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ("llama3", {"rope_theta": 1e4}, "rope_theta: 500000.0 and 10000.0; keep the right one"),
        ("llama3", {"rms_norm_eps": None}, "rms_norm_eps: null; give a value"),
        ("llama3", {"architectures": 5}, "architectures: 5; allowed: LlamaForCausalLM"),
        (
            "llama3",
            {"rope_parameters": SCALING | {"low_freq_factor": 4}},
            "high_freq_factor: 4.0; must be above low_freq_factor, 4",
        ),
        ("llama3", {"rope_theta": "1e4"}, "rope_theta: 1e4; give a number above 0"),
        ("llama3", {"rope_parameters": [1]}, "rope_parameters: [1]; give a table of "),
        ("llama3", {"rope_parameters": SCALING | {"factor": 0}}, "rope_parameters.factor: 0; give a number above 0"),
        ("llama3", {"hidden_size": None}, "hidden_size is missing"),
        ("gpt2", {"activation_function": "relu"}, "activation_function: relu; allowed: gelu_new or gelu_pytorch_tanh"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2", {"embd_pdrop": 0.0}, "embd_pdrop: 0.0; it must equal resid_pdrop"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: relative_key"),
        ("bert", {"is_decoder": True}, "is_decoder: True"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = quiet(lambda: random_model(name).config.to_dict()) | change
    config = {k: v for k, v in config.items() if not (k == "hidden_size" and v is None)}
    with pytest.raises(hf.HFError) as error:
        hf.model_of(config)
    assert message in str(error.value) and "\n" not in str(error.value)


# Keys of transformers' configs that change nothing that is computed here.
HARMLESS = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype",
    "eos_token_id", "id2label", "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "reorder_and_upcast_attn", "return_dict", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "transformers_version", "use_cache", "rope_parameters", "embd_pdrop",
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama3", "gpt2", "bert", "bert-pre"])
def test_every_key_of_transformers_is_accounted_for(name: str) -> None:
    """A key that a later transformers adds has to be looked at."""
    config = random_model(name).config.to_dict()
    kind = KINDS[config["model_type"]]
    known = {key for key, _ in kind.fields.values()} | kind.fixed.keys() | HARMLESS
    assert config.keys() <= known
    # A missing key means what transformers takes for it.
    import transformers

    default = getattr(transformers, MODELS[name][0])().to_dict()
    for key, value in kind.fields.values():
        if value is not None and isinstance(value, (int, float, bool)):
            assert default[key] == value, key
    assert all(default.get(key, allowed[0]) == allowed[0] for key, allowed in kind.fixed.items())


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def refusal(path: Path, **allowed: bool) -> str:
    with pytest.raises(ModelError) as error:
        hf.open_folder(path, **allowed)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "32"}, "hidden_size: '32' is not allowed; give a whole number"),
        ({"vocab_size": 0}, "vocab_size: 0 is not allowed; give a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide heads, 4; allowed: 1, 2, 4"),
        ({"head_dim": 7}, "head_dim: 7 is odd; rotary positions need an even one"),
    ],
)
def test_sizes_that_cannot_be_are_named_as_in_config_json(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = quiet(lambda: random_model("llama3").config.to_dict()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(tmp_path) == f"{tmp_path}: config.json: {said}"


def test_differences_are_listed_and_allowed_only_when_asked(tmp_path: Path) -> None:
    saved("bert", tmp_path, shard="1GB")

    def change(w: dict[str, Tensor]) -> None:
        del w["bert.pooler.dense.bias"], w["cls.seq_relationship.bias"]
        w["classifier.weight"] = torch.zeros(2)

    edit(tmp_path, change)
    said = refusal(tmp_path)
    for part in ("bert.pooler.dense.bias is missing", "cls.seq_relationship.bias is missing", "classifier.weight is s"):
        assert part in said
    assert "--allow-extra" in refusal(tmp_path, allow_missing=True)
    _, lines = hf.open_folder(tmp_path, allow_missing=True, allow_extra=True)
    assert lines == [
        "missing: bert.pooler.dense.bias: initial values",
        "missing: cls.seq_relationship.bias: initial values",
        "surplus: classifier.weight: left out",
    ]
    edit(tmp_path, lambda w: w.update({"bert.embeddings.LayerNorm.bias": torch.zeros(31)}))
    said = refusal(tmp_path, allow_missing=True, allow_extra=True)
    assert "bert.embeddings.LayerNorm.bias has shape [31], not [32]" in said


def test_a_vocabulary_that_the_config_does_not_say_is_refused(tmp_path: Path) -> None:
    saved("gpt2", tmp_path, shard="1GB")
    edit(tmp_path, lambda w: w.update({"transformer.wte.weight": torch.zeros(64, 64)}))
    assert "transformer.wte.weight has shape [64, 64], not [61, 64]" in refusal(tmp_path)


def test_old_names_and_tables_are_understood(tmp_path: Path) -> None:
    """GPT-2 and BERT as they lie on the hub: no prefix, masks among the weights, gamma and beta."""
    saved("gpt2", tmp_path / "gpt2", shard="1GB")

    def older(w: dict[str, Tensor]) -> None:
        renamed = {n.removeprefix("transformer."): w.pop(n) for n in list(w)}
        w |= renamed | {"h.0.attn.bias": torch.ones(1, 1, 48, 48).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}

    want = parameters(hf.open_folder(tmp_path / "gpt2")[0])
    edit(tmp_path / "gpt2", older)
    got = parameters(hf.open_folder(tmp_path / "gpt2")[0])
    assert all(torch.equal(t, got[n]) for n, t in want.items())

    saved("bert", tmp_path / "bert", shard="1GB")

    def gamma(w: dict[str, Tensor]) -> None:
        for n in list(w):
            if "LayerNorm" in n:
                old = n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                w[old] = w.pop(n)
        w["cls.predictions.decoder.weight"] = w["bert.embeddings.word_embeddings.weight"].clone()
        w["bert.embeddings.position_ids"] = torch.arange(48)[None]

    want = parameters(hf.open_folder(tmp_path / "bert")[0])
    edit(tmp_path / "bert", gamma)
    got = parameters(hf.open_folder(tmp_path / "bert")[0])
    assert all(torch.equal(t, got[n]) for n, t in want.items())
    edit(tmp_path / "bert", lambda w: w["cls.predictions.decoder.weight"].add_(1))
    assert "differs from bert.embeddings.word_embeddings.weight" in refusal(tmp_path / "bert")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "none")
    assert "has no config.json" in refusal(tmp_path)
    saved("llama3", tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    content = files[1].read_bytes()
    files[1].write_bytes(content[: len(content) // 2])
    assert f"{files[1]} is damaged" in refusal(tmp_path)
    files[1].unlink()
    assert f"{files[1]} is missing" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for placed, said in (("x", "cannot be read"), ({"w": "../w.safetensors"}, "names '../w.safetensors'; files of we")):
        index.write_text(json.dumps({"weight_map": placed}))
        assert f"{index} {said}" in refusal(tmp_path)
    index.unlink()
    for f in files[:1] + files[2:]:
        f.unlink()
    assert "has no model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin and no safetensors; .bin files are pickles" in refusal(tmp_path)


def test_as_many_tokens_as_positions_and_no_more(tmp_path: Path) -> None:
    """48 positions of width 64: neither is taken for the other."""
    saved("gpt2", tmp_path)
    folder, _ = hf.open_folder(tmp_path)
    module, params = models.load("gpt2"), parameters(folder)
    ours(module, evaluation("gpt2", folder.cfg), params, inputs(61, 48))
    with pytest.raises(ModelError, match=r"49 tokens does not fit model\.positions, 48"):
        ours(module, folder.cfg, params, inputs(61, 49))


def test_a_folder_is_not_written_over_and_appears_when_complete(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "in")
    folder, _ = hf.open_folder(tmp_path / "in")
    with pytest.raises(hf.HFError, match="exists already"):
        write(tmp_path / "in", folder)
    config = hf.config_of(folder.family, folder.cfg, "fp32", 64)

    def fails(path: str) -> Tensor:
        raise OSError(28, "No space left on device")

    def go(fetch: Callable[[str], Tensor], **more: Any) -> None:
        hf.write_folder(tmp_path / "out", folder.family, folder.cfg, fetch, torch.float32, config, **more)

    with pytest.raises(hf.HFError, match="out cannot be written: No space left"):
        go(fails)
    with pytest.raises(hf.HFError, match="out cannot be written: No space left"):
        go(parameters(folder).__getitem__, also=lambda made: fails(str(made)))
    with pytest.raises(ZeroDivisionError):
        go(lambda path: torch.ones(1 // 0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    (tmp_path / "out.tmp").mkdir()  # somebody's
    with pytest.raises(hf.HFError, match=r"out\.tmp is in the way; .* remove it"):
        go(fails)
    assert (tmp_path / "out.tmp").is_dir()


def test_models_that_transformers_has_no_class_of_are_refused() -> None:
    cfg = models.load("bert").Config(layers=1, embed=8, heads=2, vocab=9, classes=3)
    with pytest.raises(hf.HFError, match=r"model\.classes: 3; BertForPreTraining has a head of 2"):
        hf.homes("bert", cfg)
    with pytest.raises(hf.HFError, match="has no class in transformers"):
        hf.homes("mine", cfg)
