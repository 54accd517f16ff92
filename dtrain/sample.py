"""`dtrain sample`: text from a checkpoint or a Hugging Face folder, in one process or over tensor-parallel ranks.

The model runs as its functions are written, uncompiled: on one rank directly, on several with DTensors in place of the
graphs of training, since a sequence that grows has no one shape to lower.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dtrain import checkpoint, convert, data, generate, hf, models
from dtrain import layout as layouts
from dtrain import plan as plans
from dtrain.axes import ALONE
from dtrain.checkpoint import look
from dtrain.data import Tokenizer
from dtrain.generate import Choice, Decoder
from dtrain.layout import Layout
from dtrain.mesh import Limits, join_world
from dtrain.program.interpret import unit_path, unit_segment
from dtrain.program.lower import Job, store_tree
from dtrain.rank import Rank
from dtrain.sharding import Held, Tracing, on_mesh, placements, wrap


class SampleError(Exception):
    """Text cannot be generated as asked; one line for a person."""


@dataclass(frozen=True)
class Source:
    """A model to generate with: the checkpoint or folder, the `model:` section that it means, the precision that it was
    made in, the positions that it was made for, its tokenizer, whether a text begins with the tokenizer's first token,
    and the ids that end one."""

    path: Path
    model: dict[str, Any]
    precision: str
    context: int
    tokenizer: Tokenizer
    lead: tuple[int, ...]
    stops: frozenset[int]


@dataclass(frozen=True)
class Ask:
    """What every rank is told. `prompts` are texts and their ids; at most `most` tokens follow each, `vocab` are drawn
    from, and `tokenizer` names what they are read with."""

    path: Path
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    tokenizer: str
    vocab: int
    stops: frozenset[int]
    context: int
    most: int
    how: Choice


def open_source(path: Path, tokenizer: str | None = None, file: str | None = None) -> Source:
    """What `path` is, a checkpoint, a run's folder (its latest) or a Hugging Face folder. `tokenizer` stands in for its
    own, `file` is where the file of a model of the user's own lies. Raises CheckpointError, HFError, DataError or
    SampleError."""
    if (path / "config.json").is_file() and not (path / "run.json").is_file():
        return _of_folder(path, tokenizer)
    if not (path / "run.json").is_file() and checkpoint.latest(path) is None:
        raise SampleError(f"{path} is no checkpoint, no run's folder with one, and no Hugging Face folder")
    path = look.resolve(path)
    if wrong := checkpoint.problems(path, content=False):
        raise SampleError(f"{path} is damaged: {wrong[0]}; name an older one")
    record = checkpoint.read(path)
    model = {k: v for k, v in record.layout["model"].items() if k not in ("load", "vocab_pad") and v is not None}
    if model.get("file"):
        if file is None:
            raise SampleError(f"{path} is of a model of its own, {model['file']}; say where it is with --model-file")
        model["file"] = str(Path(file).absolute())
    text, beside = record.layout.get("data", {}), path.parent / hf.KEPT
    like = hf.read_config(beside) if (beside / "config.json").is_file() else {}
    known = tokenizer or convert.tokenizer_of(record, beside) or (beside if convert.has_tokenizer(beside) else None)
    if known is None:
        raise SampleError(f"{path}: its tokenizer, {text.get('tokenizer')}, is not there; say which with --tokenizer")
    found = data.load_tokenizer(str(known))
    begin = data.token(found, text.get("bos", False), "bos")
    end = data.token(found, text["eos"], "eos") if isinstance(text.get("eos"), str) else found.eos
    context = max(text.get("seq", 0), like.get("max_position_embeddings", 0))
    stops = frozenset(i for i in (end, *_ends(beside, like)) if i is not None)
    lead = found.lead if not text else () if begin is None else (begin,)
    return Source(path, model, record.layout["run"]["precision"], context, found, lead, stops)


def _of_folder(path: Path, tokenizer: str | None) -> Source:
    (family, fields), config = hf.model(path), hf.read_config(path)
    hf.open_folder(path)  # looks whether all is there
    if tokenizer is None and not convert.has_tokenizer(path):
        raise SampleError(f"{path} has no tokenizer; say which with --tokenizer")
    found = data.load_tokenizer(tokenizer or str(path))
    stops = frozenset(_ends(path, config) or {i for i in (found.eos,) if i is not None})
    context = config.get("max_position_embeddings", 0)
    return Source(path, {"family": family} | fields, hf.dtype_of(config) or "fp32", context, found, found.lead, stops)


def _ends(folder: Path, config: dict[str, Any]) -> set[int]:
    """The ids that end a text, as transformers takes them: those of generation_config.json, else of config.json."""
    file = folder / "generation_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise SampleError(f"{file} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise SampleError(f"{file} is no mapping of keys")
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def layout_of(source: Source, tp: int, gpu: str = "cpu", precision: str = "") -> tuple[Layout, Any]:
    """The layout of the ranks, and the model's config. Raises GenerateError or LayoutError."""
    family = source.model.get("family") or source.model.get("file") or models.presets()[source.model["preset"]]
    text = {
        "cluster": {"nodes": 1, "gpus_per_node": tp, "gpu": gpu},
        "model": source.model,
        "data": {"source": "synthetic", "seq": 2, "batch": 1},
        "run": {"steps": 1, "precision": precision or source.precision, "folder": str(source.path.parent)},
    }
    layout = layouts.loads(json.dumps(text | {"cluster": {"nodes": 1}}), f"the model of {source.path}")
    module, cfg = layouts.family(layout)
    cfg = generate.check(module, cfg, str(family))
    if tp > 1:
        axes = {axis for table in module.params(cfg).values() for p in table.values() for axis in p.axes}
        rules = {axis: "tp" for axis in ("vocab", "heads", "kv_heads", "mlp") if axis in axes}
        text |= {"mesh": {"tp": {"size": tp}}, "shard": {"params": rules, "compute": rules}}
    return layouts.loads(json.dumps(text), f"--tp {tp} for the model of {source.path}"), cfg


def prepare(
    source: Source, prompts: Sequence[str], most: int, how: Choice, tp: int, gpu: str = "cpu", precision: str = ""
) -> tuple[Layout, Ask]:
    """The layout of the ranks, and what they are asked. Raises SampleError, GenerateError or LayoutError for what can
    be known before they start."""
    layout, cfg = layout_of(source, tp, gpu, precision)
    vocab = min(cfg.vocab, source.tokenizer.size)
    context = getattr(cfg, "positions", source.context)
    read = [(prompt, _ids(source, prompt, cfg.vocab, context)) for prompt in prompts]
    ask = Ask(source.path, tuple(read), source.tokenizer.name, vocab, source.stops, context, most, how)
    return layout, ask


def _ids(source: Source, prompt: str, vocab: int, context: int) -> tuple[int, ...]:
    """A prompt's tokens, which begin as the model's texts do. Raises SampleError where there is none, or too many, or
    one that the model does not know."""
    tokenizer = source.tokenizer
    try:
        prompt.encode()
    except UnicodeEncodeError:  # what the shell gave is kept as lone surrogates
        raise SampleError(f"--prompt {ascii(prompt)[:60]} is not UTF-8") from None
    ids = tuple(tokenizer.encode_special(prompt))
    if ids[: len(source.lead)] != source.lead:
        ids = source.lead + ids
    if not ids:
        raise SampleError("--prompt '': an empty prompt needs a token that begins texts, and this model's has none")
    shown = repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")
    unknown = next((i for i in ids if i >= vocab), None)
    if unknown is not None:
        raise SampleError(
            f"--prompt {shown}: {tokenizer.decode([unknown])!r} is token {unknown} of {tokenizer.name}, and the model "
            f"has {vocab}; give the tokenizer that it was trained with, --tokenizer"
        )
    if context and len(ids) >= context:
        raise SampleError(
            f"--prompt {shown}: {len(ids)} tokens leave no room in the model's {context} positions; "
            f"give at most {context - 1}"
        )
    return ids


# ------------------------------------------------------------------------------------------------ on every rank


def work(ask: Ask, layout: Layout, rank: Rank, *, quiet: bool) -> None:
    """Generate and, on the first rank, print: each prompt and, as they come, the tokens that follow it."""
    rank.beat(0, "start")
    with torch.no_grad():
        model = decoder(ask.path, ask.vocab, layout, rank)
        tokenizer = data.load_tokenizer(ask.tokenizer)
        for number, (prompt, ids) in enumerate(ask.prompts):
            most = min(ask.most, ask.context - len(ids)) if ask.context else ask.most
            new = _counted(generate.generate(model, ids, ask.how, most, ask.stops, number), rank)
            if rank.rank:
                for _ in new:
                    pass
                continue
            print(prompt, end="", flush=True)
            for piece in pieces(tokenizer, ids, (i for i in new if i not in ask.stops)):
                print(piece, end="", flush=True)
            print("\n" * (1 + (number + 1 < len(ask.prompts))), end="", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _counted(tokens: Iterable[int], rank: Rank) -> Iterator[int]:
    for number, token in enumerate(tokens, 1):
        rank.beat(number, "token")
        yield token


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], new: Iterable[int]) -> Iterator[str]:
    """The text of tokens as it grows. A character may take several tokens, and is held back until it is whole."""
    ids, before = list(prompt), tokenizer.decode(prompt)
    shown = len(before)
    for token in new:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def decoder(path: Path, vocab: int, layout: Layout, rank: Rank) -> Decoder:
    """This rank's part of the model at `path`, of which `vocab` tokens count, its weights read."""
    job = plans.plan(layout).job
    cfg = generate.check(job.module, job.config, "the model")
    limits = layout.run.timeouts
    join_world(job.mesh, [], rank.rank, rank.backend, rank.device, Limits(limits.start, limits.step, limits.save))
    units = _weights(path, job, rank)
    if job.mesh.world == 1:
        return Decoder(job.module, cfg, units, ALONE, vocab, device=rank.device)
    device = rank.device.partition(":")[0]
    mesh = DeviceMesh(device, torch.arange(job.mesh.world), mesh_dim_names=("tp",))
    at = {"tp": torch.tensor(rank.rank, device=rank.device)}
    model = str(job.module.__file__)
    tree = store_tree(job)

    def lift(x: Tensor) -> Tensor:
        return wrap(x, mesh, (Replicate(),))

    def whole(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    placed = [
        {
            name: Held(name, wrap(w, mesh, placements(("tp",), tree[unit_segment(u, job.layers)[0]][name].cut)), model)
            for name, w in unit.items()
        }
        for u, unit in enumerate(units)
    ]
    on = on_mesh(Tracing(mesh, job.trace_rules, at, model), {})
    return Decoder(job.module, cfg, placed, on, vocab, lift, whole, rank.device)


def _weights(path: Path, job: Job, rank: Rank) -> list[dict[str, Tensor]]:
    """This rank's parameters of every unit, by name, in the precision that they are used in."""
    tree, layers = store_tree(job), job.layers
    units = [(u, name, s) for u in range(layers + 2) for name, s in tree[unit_segment(u, layers)[0]].items()]
    stored = {unit_path(u, layers, name): s for u, name, s in units if s.param.tied_to is None}
    whole = {name: s.real for name, s in stored.items()}
    weights, _ = checkpoint.read_weights(path, stored, whole, job.mesh, rank.rank, job.dtype, rank.device)
    out: list[dict[str, Tensor]] = [{} for _ in range(layers + 2)]
    for u, name, s in units:
        out[u][name] = weights[s.param.tied_to or unit_path(u, layers, name)]
    return out
