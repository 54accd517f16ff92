"""Peer: Hugging Face transformers' LlamaForCausalLM, trained in a loop of its own and compiled as a whole.

Settings: fp32 parameters under bf16 autocast, as transformers' Trainer does with `bf16=True`; `attn_implementation`
sdpa, so torch chooses the kernel; model and loss through one `torch.compile(dynamic=False)`; fused AdamW, foreach
clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.models.llama import Config
from peers.titan_style import CLIP, Batch, optimizer


def make(cfg: Config, seq: int, device: str) -> nn.Module:
    """The model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        rope |= {"rope_type": s.kind, "factor": s.factor, "low_freq_factor": s.low, "high_freq_factor": s.high}
        rope |= {"original_max_position_embeddings": s.original}
    config = LlamaConfig(
        vocab_size=cfg.vocab, hidden_size=cfg.embed, num_hidden_layers=cfg.layers, intermediate_size=cfg.mlp,
        num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads, head_dim=cfg.head_dim,
        rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tied, rope_parameters=rope,
        max_position_embeddings=max(seq, 131072), use_cache=False, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def load(model: nn.Module, cfg: Config, weights: Mapping[str, Tensor]) -> None:
    """Copy in weights by dtrain's paths; nn.Linear keeps its matrices as (out, in)."""
    names = {
        "norm_attn": "input_layernorm", "norm_mlp": "post_attention_layernorm", "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "w_gate": "mlp.gate_proj",
        "w_up": "mlp.up_proj", "w_down": "mlp.down_proj",
    }  # fmt: skip
    state = {"model.embed_tokens.weight": weights["embed/table"], "model.norm.weight": weights["head/norm"]}
    state["lm_head.weight"] = weights["embed/table" if cfg.tied else "head/table"]
    for path, w in weights.items():
        unit, name = path.split("/")
        if unit.startswith("block"):
            if w.ndim == 3:
                w = w.flatten(0, 1) if name == "wo" else w.flatten(1)
            state[f"model.layers.{unit.split('.')[1]}.{names[name]}.weight"] = w.T if w.ndim == 2 else w
    model.load_state_dict(state)


def start(
    cfg: Config,
    weights: Mapping[str, Tensor] | None,
    batch: Batch,
    microbatches: int,
    device: str,
    dtype: torch.dtype,
    compiled: bool,
) -> Callable[[int], float]:
    """The function that makes one training step, the first 1, and returns its loss. Random weights by default."""
    model = make(cfg, batch(1)[0].shape[1], device)
    if weights is not None:
        load(model, cfg, weights)
    optim = optimizer(model)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        pieces = zip(*(x.chunk(microbatches) for x in batch(number)), strict=True)
        for tokens, labels in pieces:
            with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
                loss = forward(tokens, labels) / microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optim.step()
        optim.zero_grad()
        return float(total)

    return step
