"""Where each parameter lies among Hugging Face's tensors: names and, in axes, the order of dimensions.

Of a dtrain parameter `embed heads head_dim` the tensor of a torch.nn.Linear is `(heads head_dim) embed`. Rotary pairs
are (x[i], x[i + head_dim/2]) on both sides, so no rows move. A tied head has no tensor of its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from einops import rearrange
from torch import Tensor

from dtrain import models
from dtrain.axes import Param, paths
from dtrain.hf.config import kind_of

Box = tuple[range, ...]  # one contiguous range of indices a dimension


@dataclass(frozen=True)
class Home:
    """A parameter's place: the tensor `name`, whose dimensions are `axes`, those in parentheses being one dimension.
    Of a tensor that joins several parameters along its last dimension this is number `part` of `parts`."""

    name: str
    axes: str
    param: Param
    part: int = 0
    parts: int = 1

    @property
    def groups(self) -> list[list[int]]:
        """The positions of the parameter that each dimension of the tensor is made of."""
        words = re.findall(r"\(.*?\)|\S+", self.axes)
        return [[self.param.axes.index(axis) for axis in word.strip("()").split()] for word in words]

    @property
    def own(self) -> tuple[int, ...]:
        """The shape of the parameter's part of the tensor."""
        return tuple(math.prod(self.param.shape[i] for i in group) for group in self.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return (*self.own[:-1], self.own[-1] * self.parts)

    def box(self, wanted: Box) -> Box:
        """The part of the tensor that holds the part `wanted` of the parameter. Where several positions are one
        dimension it is all of the inner ones."""
        out = []
        for group in self.groups:
            inner = math.prod(self.param.shape[i] for i in group[1:])
            out.append(range(wanted[group[0]].start * inner, wanted[group[0]].stop * inner))
        skip = self.part * self.own[-1]
        out[-1] = range(out[-1].start + skip, out[-1].stop + skip)
        return tuple(out)

    def into(self, tensor: Tensor, wanted: Box) -> Tensor:
        """What `box(wanted)` holds -> the parameter's part `wanted`."""
        first = {group[0] for group in self.groups}
        sizes = {axis: len(wanted[i]) if i in first else self.param.shape[i] for i, axis in enumerate(self.param.axes)}
        x = rearrange(tensor, f"{self.axes} -> {' '.join(self.param.axes)}", **sizes)
        return x[tuple(slice(None) if i in first else slice(r.start, r.stop) for i, r in enumerate(wanted))]

    def out_of(self, value: Tensor) -> Tensor:
        """The whole parameter -> its part of the tensor."""
        return rearrange(value, f"{' '.join(self.param.axes)} -> {self.axes}").contiguous()


def homes(family: str, cfg: Any) -> dict[str, Home]:
    """Every stored parameter's home, by path. Raises HFError for a model that transformers has no class of."""
    kind = kind_of(family, cfg)
    table = _parse(_TABLES[kind])
    out = {}
    for path, p in paths(models.load(family).params(cfg), cfg.layers).items():
        if p.tied_to is not None:
            continue
        segment, name = path.split("/")
        block, _, layer = segment.partition(".")
        where, axes, part, parts = table[f"{block}/{name}"]
        out[path] = Home(where.format(layer), axes, p, part, parts)
    if family == "bert" and not cfg.tied:
        out["head/b_vocab"] = replace(out["head/b_vocab"], name="cls.predictions.decoder.bias")
    return out


def copies(family: str, cfg: Any) -> dict[str, str]:
    """Tensors that only repeat another: name -> that one's. Where `cfg.tied` they must be equal if they are there.
    Without ties transformers has both biases of BERT's scores and adds the decoder's."""
    if family == "bert":
        bias, decoder = "cls.predictions.bias", "cls.predictions.decoder.bias"
        table = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
        return table | {decoder: bias} if cfg.tied else {bias: decoder}
    return {"lm_head.weight": homes(family, cfg)["embed/table"].name} if cfg.tied else {}


def usual_name(family: str, name: str, expected: frozenset[str]) -> str | None:
    """The name of today for a tensor's name in a folder: without the model's prefix, as base models are saved, or with
    BERT's old names of norms. None for what holds no weight: tables that models once saved with their weights."""
    if re.search(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|embeddings\.position_ids)$", name):
        return None
    if family == "bert":
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
    prefix = {"llama": "model.", "gpt2": "transformer.", "bert": "bert."}[family]
    return prefix + name if name not in expected and prefix + name in expected else name


def _parse(text: str) -> dict[str, tuple[str, str, int, int]]:
    """Lines `path  name  axes  [part/parts]`, two blanks apart."""
    out = {}
    for line in text.strip().splitlines():
        path, name, axes, *joined = re.split(r"\s{2,}", line.strip())
        part, parts = map(int, joined[0].split("/")) if joined else (0, 1)
        out[path] = (name, axes, part, parts)
    return out


_LLAMA = """
embed/table      model.embed_tokens.weight                       vocab embed
block/norm_attn  model.layers.{}.input_layernorm.weight           embed
block/wq         model.layers.{}.self_attn.q_proj.weight          (heads head_dim) embed
block/wk         model.layers.{}.self_attn.k_proj.weight          (kv_heads head_dim) embed
block/wv         model.layers.{}.self_attn.v_proj.weight          (kv_heads head_dim) embed
block/wo         model.layers.{}.self_attn.o_proj.weight          embed (heads head_dim)
block/norm_mlp   model.layers.{}.post_attention_layernorm.weight  embed
block/w_gate     model.layers.{}.mlp.gate_proj.weight             mlp embed
block/w_up       model.layers.{}.mlp.up_proj.weight               mlp embed
block/w_down     model.layers.{}.mlp.down_proj.weight             embed mlp
head/norm        model.norm.weight                               embed
head/table       lm_head.weight                                  vocab embed
"""

# GPT-2's Conv1D is [in, out], as here, and joins query, key and value.
_GPT2 = """
embed/table           transformer.wte.weight                vocab embed
embed/positions       transformer.wpe.weight                positions embed
block/norm_attn       transformer.h.{}.ln_1.weight          embed
block/norm_attn_bias  transformer.h.{}.ln_1.bias            embed
block/wq              transformer.h.{}.attn.c_attn.weight   embed (heads head_dim)  0/3
block/wk              transformer.h.{}.attn.c_attn.weight   embed (heads head_dim)  1/3
block/wv              transformer.h.{}.attn.c_attn.weight   embed (heads head_dim)  2/3
block/bq              transformer.h.{}.attn.c_attn.bias     (heads head_dim)  0/3
block/bk              transformer.h.{}.attn.c_attn.bias     (heads head_dim)  1/3
block/bv              transformer.h.{}.attn.c_attn.bias     (heads head_dim)  2/3
block/wo              transformer.h.{}.attn.c_proj.weight   (heads head_dim) embed
block/bo              transformer.h.{}.attn.c_proj.bias     embed
block/norm_mlp        transformer.h.{}.ln_2.weight          embed
block/norm_mlp_bias   transformer.h.{}.ln_2.bias            embed
block/w_up            transformer.h.{}.mlp.c_fc.weight      embed mlp
block/b_up            transformer.h.{}.mlp.c_fc.bias        mlp
block/w_down          transformer.h.{}.mlp.c_proj.weight    mlp embed
block/b_down          transformer.h.{}.mlp.c_proj.bias      embed
head/norm             transformer.ln_f.weight               embed
head/norm_bias        transformer.ln_f.bias                 embed
head/table            lm_head.weight                        vocab embed
"""

_BERT = """
embed/table           bert.embeddings.word_embeddings.weight               vocab embed
embed/positions       bert.embeddings.position_embeddings.weight           positions embed
embed/types           bert.embeddings.token_type_embeddings.weight         types embed
embed/norm            bert.embeddings.LayerNorm.weight                     embed
embed/norm_bias       bert.embeddings.LayerNorm.bias                       embed
block/wq              bert.encoder.layer.{}.attention.self.query.weight     (heads head_dim) embed
block/bq              bert.encoder.layer.{}.attention.self.query.bias       (heads head_dim)
block/wk              bert.encoder.layer.{}.attention.self.key.weight       (heads head_dim) embed
block/bk              bert.encoder.layer.{}.attention.self.key.bias         (heads head_dim)
block/wv              bert.encoder.layer.{}.attention.self.value.weight     (heads head_dim) embed
block/bv              bert.encoder.layer.{}.attention.self.value.bias       (heads head_dim)
block/wo              bert.encoder.layer.{}.attention.output.dense.weight   embed (heads head_dim)
block/bo              bert.encoder.layer.{}.attention.output.dense.bias     embed
block/norm_attn       bert.encoder.layer.{}.attention.output.LayerNorm.weight  embed
block/norm_attn_bias  bert.encoder.layer.{}.attention.output.LayerNorm.bias    embed
block/w_up            bert.encoder.layer.{}.intermediate.dense.weight       mlp embed
block/b_up            bert.encoder.layer.{}.intermediate.dense.bias         mlp
block/w_down          bert.encoder.layer.{}.output.dense.weight             embed mlp
block/b_down          bert.encoder.layer.{}.output.dense.bias               embed
block/norm_mlp        bert.encoder.layer.{}.output.LayerNorm.weight         embed
block/norm_mlp_bias   bert.encoder.layer.{}.output.LayerNorm.bias           embed
head/norm             bert.encoder.ln.weight                               embed
head/norm_bias        bert.encoder.ln.bias                                 embed
head/w_mlm            cls.predictions.transform.dense.weight               embed_out embed
head/b_mlm            cls.predictions.transform.dense.bias                 embed_out
head/norm_mlm         cls.predictions.transform.LayerNorm.weight           embed
head/norm_mlm_bias    cls.predictions.transform.LayerNorm.bias             embed
head/table            cls.predictions.decoder.weight                       vocab embed
head/b_vocab          cls.predictions.bias                                 vocab
head/w_pool           bert.pooler.dense.weight                             embed_out embed
head/b_pool           bert.pooler.dense.bias                               embed_out
head/w_order          cls.seq_relationship.weight                          classes embed
head/b_order          cls.seq_relationship.bias                            classes
"""

# The norms of Megatron's BERT are in front of each half of a layer.
_MEGATRON_BERT = _BERT.replace("attention.output.LayerNorm", "attention.ln").replace(".{}.output.LayerNorm", ".{}.ln")

_TABLES = {"llama": _LLAMA, "gpt2": _GPT2, "bert": _BERT, "megatron-bert": _MEGATRON_BERT}
