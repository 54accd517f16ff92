"""`dtrain eval`: how well a checkpoint or a Hugging Face folder predicts a text, in windows that overlap.

The protocol is that of `data.validation.stride` in a layout (`dtrain.data.perplexity`), for a model that is there. The
model runs as `dtrain sample` runs it: its functions as they are written, on one rank or over tensor-parallel ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtrain import data, sample
from dtrain.data import documents, perplexity
from dtrain.data.tokens import Ints, Shard, check_ids
from dtrain.generate import Decoder
from dtrain.layout import Layout
from dtrain.rank import Rank
from dtrain.rng import Key
from dtrain.sample import SampleError

_CHUNK = 512  # positions whose scores exist at a time
_EVERY = 10.0  # seconds between two lines on what is done


@dataclass(frozen=True)
class How:
    """Windows of `seq` tokens (None: what the model was made for) that begin `stride` apart, `batch` at a time.
    `wikitext` undoes WikiText's tokenisation; `as_json` prints one object."""

    seq: int | None = None
    stride: int = 32
    batch: int = 8
    wikitext: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Ask:
    """What every rank is told: the model, the text's name, tokens and number of words, and the sizes of windows."""

    path: Path
    text: str
    ids: Ints
    words: int
    vocab: int
    seq: int
    how: How


def prepare(
    source: sample.Source, text: str, how: How, tp: int, gpu: str = "cpu", precision: str = ""
) -> tuple[Layout, Ask]:
    """The layout of the ranks, and what they are asked. A text begins with what the model's texts begin with. Raises
    SampleError, DataError, GenerateError or LayoutError for what can be known before they start."""
    layout, cfg = sample.layout_of(source, tp, gpu, precision)
    most = getattr(cfg, "positions", source.context)
    seq = how.seq or most
    if not seq:
        raise SampleError(f"{source.path} does not say for how many positions it was made; say so with --seq")
    if how.seq and hasattr(cfg, "positions") and seq > most:
        raise SampleError(f"--seq {seq}: the model has {most} positions; give at most {most}")
    if how.stride > seq:
        raise SampleError(f"--stride {how.stride}: windows of {seq} tokens predict at most {seq}; give at most {seq}")
    ((_, raw),) = documents.records("text", text, "", documents.Faults())
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(f"{text}: not UTF-8 ({error})") from None
    words = perplexity.original(content) if how.wikitext else len(content.split())
    body = source.tokenizer.encode([perplexity.natural(content) if how.wikitext else content])[0]
    ids = np.array([*source.lead, *body], np.int64)
    if len(ids) < 2:
        raise SampleError(f"{text}: has {len(ids)} tokens, so none to predict from those before it")
    check_ids(Shard(text, ids), ids, 0, cfg.vocab)
    return layout, Ask(source.path, text, ids, words, cfg.vocab, seq, how)


def work(ask: Ask, layout: Layout, rank: Rank, *, quiet: bool) -> None:
    """Predict every token of the text and, on the first rank, print what it says of the model."""
    rank.beat(0, "start")
    how = ask.how
    source = perplexity.windows(ask.text, ask.ids, ask.words, ask.seq, how.stride, how.batch, ask.vocab)
    batches, told, total = data.validation_batches(source), time.perf_counter(), 0.0
    with torch.no_grad():
        model = sample.decoder(ask.path, ask.vocab, layout, rank)
        for step in range(batches):
            total += loss(model, data.batch(source, step, range(how.batch), "valid"))
            rank.beat(step + 1, "batch")
            if rank.rank == 0 and time.perf_counter() - told > _EVERY:
                told = time.perf_counter()
                print(f"{min((step + 1) * how.batch, source.valid):,} of {source.valid:,} windows", file=sys.stderr)
    if rank.rank == 0:
        line = perplexity.report(source, total / (len(ask.ids) - 1), batches)
        print(told_as_json(ask, total) if how.as_json else line)
    if dist.is_initialized():
        dist.destroy_process_group()


def told_as_json(ask: Ask, total: float) -> str:
    tokens = len(ask.ids) - 1
    by_word = perplexity.perplexity(total / ask.words) if ask.words else None
    values = {
        "text": ask.text,
        "seq": ask.seq,
        "stride": ask.how.stride,
        "tokens": tokens,
        "words": ask.words,
        "loss": total / tokens,
        "perplexity_a_token": perplexity.perplexity(total / tokens),
        "perplexity_a_word": by_word,
    }
    return json.dumps(values, indent=2)


def loss(model: Decoder, batch: Mapping[str, Tensor]) -> float:
    """The sum of -log p(label) over a batch's labels, in nats; those below 0 do not count."""
    module, cfg, (first, *blocks, head) = model.module, model.cfg, model.units
    labels_BS = batch["labels"].to(model.device)
    given = {name: model.lift(batch[name].to(model.device)) for name in module.BATCH}
    key = Key(*(torch.zeros((), dtype=torch.int64, device=model.device) for _ in range(3)))
    x = module.embed(cfg, first, given, key, model.on)
    for unit in blocks:
        x = module.block(cfg, unit, x, given, key, model.on)
    total = 0.0
    for at in range(0, labels_BS.shape[1], _CHUNK):
        labels = labels_BS[:, at : at + _CHUNK]
        if bool((labels >= 0).any()):
            scores = model.whole(module.logits(cfg, head, x[:, at : at + _CHUNK], model.on))[..., : model.vocab]
            scores = scores if scores.dtype == torch.float64 else scores.float()
            total += float(F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"))
    return total
