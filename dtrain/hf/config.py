"""config.json <-> a family and the fields of its config.

Of a config.json are read the keys that change the mathematics of the class it names; what a key means when it is left
out is what transformers takes then. A value that a family here cannot compute is refused, by its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.models import ModelError

REQUIRED: Any = object()
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


class HFError(ModelError):
    """A Hugging Face folder that cannot be read, or a model that cannot be written as one; one line for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "load")


@dataclass(frozen=True)
class Kind:
    """One `model_type`: the family that computes it, the classes whose weights are known (the first is written), each
    of the family's fields with its key and the value of a missing key, the keys whose value is `fixed` to one of a few,
    the first of which is written and is what a missing key means, and fields that follow from the type."""

    family: str
    classes: tuple[str, ...]
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    implied: Mapping[str, Any]


_BERT_FIELDS = {
    "layers": ("num_hidden_layers", REQUIRED),
    "embed": ("hidden_size", REQUIRED),
    "heads": ("num_attention_heads", REQUIRED),
    "vocab": ("vocab_size", REQUIRED),
    "positions": ("max_position_embeddings", 512),
    "types": ("type_vocab_size", 2),
    "mlp": ("intermediate_size", REQUIRED),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "init_std": ("initializer_range", 0.02),
}
_BERT_FIXED = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
KINDS = {
    "llama": Kind(
        "llama",
        ("LlamaForCausalLM", "LlamaModel"),
        {
            "layers": ("num_hidden_layers", REQUIRED),
            "embed": ("hidden_size", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "kv_heads": ("num_key_value_heads", None),
            "head_dim": ("head_dim", None),
            "mlp": ("intermediate_size", REQUIRED),
            "vocab": ("vocab_size", REQUIRED),
            "tied": ("tie_word_embeddings", False),
            "norm_eps": ("rms_norm_eps", 1e-6),
            "init_std": ("initializer_range", 0.02),
        },
        {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0.0,)},
        {},
    ),
    "gpt2": Kind(
        "gpt2",
        ("GPT2LMHeadModel", "GPT2Model"),
        {
            "layers": ("n_layer", REQUIRED),
            "embed": ("n_embd", REQUIRED),
            "heads": ("n_head", REQUIRED),
            "vocab": ("vocab_size", REQUIRED),
            "positions": ("n_positions", 1024),
            "mlp": ("n_inner", None),
            "tied": ("tie_word_embeddings", True),
            "dropout": ("resid_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "init_std": ("initializer_range", 0.02),
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # the same function
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        {},
    ),
    "bert": Kind(
        "bert",
        ("BertForPreTraining", "BertForMaskedLM", "BertModel"),
        _BERT_FIELDS,
        _BERT_FIXED,
        {"norm": "post"},
    ),
    "megatron-bert": Kind(
        "bert",
        ("MegatronBertForPreTraining", "MegatronBertForMaskedLM", "MegatronBertModel"),
        _BERT_FIELDS,
        _BERT_FIXED,
        {"norm": "pre"},
    ),
}


def model_of(config: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
    """What a config.json says -> the family and the fields of its config. Raises HFError."""
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        raise _bad("model_type", config.get("model_type"), f"allowed: {', '.join(KINDS)}")
    named = config.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        if name not in kind.classes:
            raise _bad("architectures", name, f"allowed: {', '.join(kind.classes)}")
    for key in ("quantization_config", "auto_map"):
        if config.get(key):
            why = "weights must be plain tensors" if key == "quantization_config" else "a model's own code is not run"
            raise _bad(key, "set", why)
    for key, allowed in kind.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise _bad(key, config[key], f"allowed: {' or '.join(map(str, allowed))}")
    if kind.family == "gpt2" and config.get("embd_pdrop", 0.1) != config.get("resid_pdrop", 0.1):
        raise _bad("embd_pdrop", config.get("embd_pdrop", 0.1), "it must equal resid_pdrop; make them equal")
    fields: dict[str, object] = dict(kind.implied)
    for field, (key, default) in kind.fields.items():
        value = config.get(key, default)
        if value is REQUIRED:
            raise HFError(f"config.json: {key} is missing")
        if value is None and default is not None:
            raise _bad(key, "null", "give a value")
        if value is not None:
            fields[field] = value
    return kind.family, fields | (_rope(config) if kind.family == "llama" else {})


_ROPE = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original": "original_max_position_embeddings",
}
_ROPE_KEYS = {"rope_theta", "rope_type", "type", *_ROPE.values()}


def _rope(config: Mapping[str, Any]) -> dict[str, object]:
    """The rotary fields, from the block of transformers 5 or from the keys before it; both must agree."""
    blocks = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    found = {}
    for key, block in blocks.items():
        if not isinstance(block, Mapping):
            raise _bad(key, block, f"give a table of {', '.join(sorted(_ROPE_KEYS))}")
        unknown = sorted(set(block) - _ROPE_KEYS)
        if unknown:
            raise _bad(f"{key}.{unknown[0]}", block[unknown[0]], f"allowed: {', '.join(sorted(_ROPE_KEYS))}")
        name = block.get("rope_type", block.get("type", "default"))
        if name not in ("default", "llama3"):
            raise _bad(f"{key}.rope_type", name, "allowed: default, llama3")
        for k in (*_ROPE.values(), "rope_theta"):
            _positive(f"{key}.{k}", block.get(k, 1))
        lacks = [k for k in _ROPE.values() if k not in block] if name == "llama3" else []
        if lacks:
            raise HFError(f"config.json: {key}.{lacks[0]} is missing")
        values = {field: block[k] for field, k in _ROPE.items()} if name == "llama3" else None
        if values is not None and not values["low"] < values["high"]:
            raise _bad(f"{key}.high_freq_factor", values["high"], f"must be above low_freq_factor, {values['low']}")
        if values is not None:
            values = {k: int(v) if k == "original" else float(v) for k, v in values.items()}
        found[key] = values
    if len({str(v) for v in found.values()}) > 1:
        raise HFError("config.json: rope_parameters and rope_scaling disagree; keep the right one")
    _positive("rope_theta", config.get("rope_theta", 1))
    thetas = [b["rope_theta"] for b in (*blocks.values(), config) if "rope_theta" in b]
    if len(set(thetas)) > 1:
        raise _bad("rope_theta", " and ".join(map(str, dict.fromkeys(thetas))), "keep the right one")
    scaling = next(iter(found.values()), None)
    theta = float(thetas[0]) if thetas else 10_000.0
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def key_of(family: str, field: str | None) -> str:
    """The key of config.json that a field of a family's config is under."""
    keys = next(kind.fields for kind in KINDS.values() if kind.family == family)
    return keys[field][0] if field is not None and field in keys else str(field)


def _positive(key: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise _bad(key, value, "give a number above 0")


def kind_of(family: str, cfg: Any) -> str:
    """The `model_type` that a model is written as. Raises HFError for a model that transformers has no class of."""
    for name, kind in KINDS.items():
        if kind.family == family and all(getattr(cfg, k) == v for k, v in kind.implied.items()):
            if family == "bert" and cfg.classes != 2:
                raise HFError(f"model.classes: {cfg.classes}; {kind.classes[0]} has a head of 2 classes")
            return name
    raise HFError(f"a model of family {family!r} has no class in transformers; exported are {', '.join(KINDS)}")


def config_of(
    family: str, cfg: Any, precision: str, context: int, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model whose weights are in `precision` (`bf16`). `context` is how many positions it is
    meant for, where the model does not say; `like` is a config.json of the same kind, whose other keys (special
    tokens, labels) are kept. Raises HFError.

    Rotary settings and the dtype are under the keys of transformers 5 and of those before it.
    """
    name = kind_of(family, cfg)
    kind = KINDS[name]
    dtype = next(long for long, short in DTYPES.items() if short == precision)
    out: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if like and like.get("model_type") == name:
        out = dict(like)
    out |= {"architectures": [kind.classes[0]], "model_type": name, "torch_dtype": dtype, "dtype": dtype}
    out |= {key: allowed[0] for key, allowed in kind.fixed.items() if out.get(key) not in allowed}
    meant = {key: getattr(cfg, field) for field, (key, _) in kind.fields.items()}
    if family == "gpt2" and out.get("n_inner", 0) is None and cfg.mlp == 4 * cfg.embed:
        del meant["n_inner"]
    out |= meant
    if family == "gpt2":
        out["embd_pdrop"] = cfg.dropout
    if family == "llama":
        scaling = cfg.rope_scaling
        block = {k: getattr(scaling, field) for field, k in _ROPE.items()} if scaling else {}
        block = {"rope_type": "llama3" if scaling else "default", **block}
        out |= {"rope_theta": cfg.rope_theta, "rope_scaling": dict(block) if scaling else None}
        out["rope_parameters"] = block | {"rope_theta": cfg.rope_theta}
        out.setdefault("max_position_embeddings", context)
    return out


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The precision (`bf16`) that a config.json names, if it names one."""
    named = config.get("dtype") or config.get("torch_dtype")
    return DTYPES.get(str(named).removeprefix("torch.")) if named else None


def _bad(key: str, value: object, allowed: str) -> HFError:
    return HFError(f"config.json: {key}: {value}; {allowed}")
