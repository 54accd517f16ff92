"""The schema of a layout: sections of known keys with strict types, all frozen.

`layouts/README.md` is the reference of every key; a test holds it to this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Tag,
)

from dtrain import hardware
from dtrain.axes import AXES, DIMS
from dtrain.hardware import LINKS, nearest
from dtrain.layout.reader import Where

# What `allow: [...]` lets pass by name: differences between the model and what is read, and where a dim runs.
DIFFERENCES = ("missing-tensors", "extra-tensors")
CHECKS = ("tp-across-nodes", "link-leaves-domain", "spans-two-levels", "slow-inside-fast", *DIFFERENCES)


# What forward keeps for backward, by a name or as a list of kinds; `program.remat` says what they mean.
REMAT = ("none", "selective", "full")
KEEP = ("matmul", "attention", "scores", "reduced", "gathered", "pointwise")


class Section(BaseModel):
    """A mapping of known keys with strict types: no text for numbers, no 1e3 for a whole number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _one_or_many(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, tuple) else (value,)


def _list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _known(options: Iterable[str]) -> Callable[[str], str]:
    def check(word: str) -> str:
        if word not in options:
            raise ValueError(f"must be one of {', '.join(options)}{nearest(word, options)}")
        return word

    return check


def _once(words: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(words)) < len(words):
        raise ValueError("names a dim twice; a dim is spent once")
    return words


def _gpu(name: str) -> str:
    return hardware.gpu(name).name


def _own_name(name: str) -> str:
    if not name or name in (*hardware.GPUS, *hardware.ALIASES):
        raise ValueError("is in the catalog; give your own hardware another name, or write gpu: NAME alone")
    return name


def _link(value: object) -> object:
    return value if isinstance(value, (dict, BaseModel)) else {"rate": value}


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("must be auto or a whole number of at least 1")


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Dim = Annotated[str, AfterValidator(_known(DIMS))]
Axis = Annotated[str, AfterValidator(_known(AXES))]
Precision = Annotated[str, AfterValidator(_known(hardware.PRECISIONS))]
LinkName = Annotated[str, AfterValidator(_known(LINKS))]
DimList = Annotated[tuple[Dim, ...], BeforeValidator(_one_or_many), AfterValidator(_once)]
Table: TypeAlias = dict[Axis, DimList]


class Link(Section):
    """`rate` in bytes/s, one direction: of each GPU, or of each of the `per_node` NICs that GPUs share."""

    rate: Annotated[float, PlainValidator(hardware.parse_rate)]
    per_node: Count | None = None


class OwnGpu(Section):
    """A GPU that is not in the catalog: peaks as its datasheet says them, dense."""

    name: Annotated[str, AfterValidator(_own_name)]
    memory: Annotated[int, PlainValidator(hardware.parse_size)]
    memory_rate: Annotated[float, PlainValidator(hardware.parse_rate)]
    peak: dict[Precision, Annotated[float, PlainValidator(hardware.parse_flops)]]
    links: dict[LinkName, Annotated[float, PlainValidator(hardware.parse_rate)]] = {}
    kind: Literal["volta", "ampere", "hopper", "blackwell"]
    processors: Count

    def __str__(self) -> str:
        return self.name


class Cluster(Section):
    nodes: Count = 1
    gpus_per_node: Count = 1
    gpu: Annotated[
        Annotated[str, AfterValidator(_gpu), Tag("[name]")] | Annotated[OwnGpu, Tag("[table]")],
        Discriminator(lambda v: "[table]" if isinstance(v, (dict, BaseModel)) else "[name]"),
    ] = "cpu"
    links: dict[LinkName, Annotated[Link, BeforeValidator(_link)]] = {}
    nvlink_domain: Count | None = None

    @property
    def device(self) -> hardware.Gpu:
        """The GPU, of the catalog or the layout's own."""
        if isinstance(self.gpu, str):
            return hardware.gpu(self.gpu)
        g = self.gpu
        return hardware.Gpu(g.name, g.memory, g.memory_rate, g.peak, g.links, g.kind, g.processors)


class MeshDim(Section):
    size: Count
    link: Annotated[
        tuple[LinkName, ...] | None,
        BeforeValidator(lambda v: None if v is None else _one_or_many(v)),
        Field(min_length=1, max_length=2),
    ] = None


class Shard(Section):
    params: Table = {}
    compute: Table = {}
    optimizer: Table = {}
    grads: Table | None = None


class Unshard(Section):
    keep: Literal["step", "forward", "use"] = "use"
    prefetch: Whole = 1


class Pipeline(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    chunks: Count | None = None
    layers_per_stage: Annotated[tuple[Count, ...] | None, BeforeValidator(_list)] = None


class Model(Section):
    preset: str | None = None
    family: str | None = None
    file: str | None = None
    load: str | None = None
    vocab_pad: Annotated[int | Literal["auto"], PlainValidator(_auto_or_count)] = "auto"
    fields: dict[str, Any] = {}  # every other key of the section: the family's own sizes


class Optim(Section):
    name: Literal["adamw"] = "adamw"
    lr: Positive = 3e-4
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: Whole = 0
    decay: Whole = 0
    length: Count | None = None
    min_lr: NotNegative = 0.0
    weight_decay: NotNegative = 0.1
    clip: Positive | None = 1.0
    beta1: Below1 = 0.9
    beta2: Below1 = 0.95
    eps: Positive = 1e-8


Paths = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
STREAMS = ("text", "jsonl", "parquet", "arrow")  # sources of texts, which can be read as the run goes on
FILES = (*STREAMS, "megatron", "tokens")  # sources that read files
SourceName = Literal["stdlib", "synthetic", "text", "jsonl", "parquet", "arrow", "megatron", "tokens"]
TokenType = Literal["uint8", "uint16", "int16", "int32", "uint32", "int64"]


def _mark(value: object) -> object:
    if isinstance(value, (bool, str)) or (isinstance(value, int) and value >= 0):
        return value
    raise ValueError("must be true, false, the name of a special token, or an id (source: tokens)")


class Validation(Section):
    fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    batches: Count = 4
    split: Literal["blocks", "documents"] = "blocks"
    path: Paths = ()
    stride: Count | None = None


class Mixed(Section):
    """One source of a mixture."""

    source: SourceName
    path: Paths = ()
    field: str | None = None
    dtype: TokenType = "uint16"
    stream: bool = False
    weight: Positive | None = None
    epochs: Positive | None = None


class Masking(Section):
    unit: Literal["token", "word"] = "token"
    ngram: Annotated[int, Field(ge=1, le=8)] = 1


class Data(Section):
    source: SourceName = "stdlib"
    path: Paths = ()
    field: str | None = None
    dtype: TokenType = "uint16"
    mix: Annotated[tuple[Mixed, ...], BeforeValidator(_list)] = ()
    seq: Annotated[int, Field(ge=2)]
    batch: Count
    microbatch: Count = 1
    validation: Validation = Validation()
    tokenizer: str = "bytes"
    bos: bool | str = False
    eos: Annotated[bool | str | int, PlainValidator(_mark)] = True
    chat: bool = False
    packing: Literal["concat", "best-fit", "none"] = "concat"
    document_mask: bool = False
    max_documents: Count | None = None
    masking: Masking = Masking()
    bad: Literal["error", "skip"] = "error"
    stream: bool = False
    shuffle: Whole = 1024


class LossScale(Section):
    start: Positive = 65536.0
    growth: Annotated[float, Field(gt=1)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    every: Count = 2000
    least: Positive = 1.0
    most: Positive = 16777216.0


class Profile(Section):
    steps: Annotated[tuple[Count, Count], BeforeValidator(_list)]
    ranks: Annotated[tuple[Whole, ...], BeforeValidator(_one_or_many)] = (0,)


class Timeouts(Section):
    start: Positive = 1800.0
    step: Positive = 600.0
    save: Positive = 1800.0


class Keep(Section):
    last: Count
    every: Count | None = None


class RematBudget(Section):
    """Bytes that a rank may keep from forwards to backwards."""

    budget: int


def _remat(value: object) -> str | tuple[str, ...] | RematBudget:
    if isinstance(value, str) and value in REMAT:
        return value
    if isinstance(value, (list, tuple)) and all(v in KEEP for v in value):
        return tuple(value)
    if isinstance(value, dict) and set(value) == {"budget"}:
        return RematBudget(budget=hardware.parse_size(value["budget"]))
    raise ValueError(f"must be {', '.join(REMAT)}, a list of what to keep ({', '.join(KEEP)}), or {{budget: 60GiB}}")


def _not_fp8(value: object) -> object:
    if value == "fp8":
        raise ValueError("is not built: products in fp8 need an operation with scales of its own; use bf16")
    return value


class Run(Section):
    steps: Count
    seed: Whole = 0
    precision: Annotated[Literal["fp32", "bf16", "fp16", "fp64"], BeforeValidator(_not_fp8)] = "fp32"
    loss_scale: LossScale | None = None
    remat: Annotated[
        str | tuple[str, ...] | RematBudget,
        PlainValidator(_remat),
        PlainSerializer(lambda v: v.model_dump() if isinstance(v, RematBudget) else v),
    ] = "selective"
    compile: Literal["on", "off", "auto"] = "auto"
    save_every: Count | None = None
    background_save: Literal["off", "wait", "skip"] = "off"
    keep: Keep | None = None
    resume: Count | None = None
    grace: Positive | None = None
    eval_every: Count | None = None
    log_every: Count = 1
    folder: str | None = None
    profile: Profile | None = None
    timeouts: Timeouts = Timeouts()
    deterministic: bool = False
    cuda_graph: bool = False


class Kernels(Section):
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    loss_chunks: Annotated[int | Literal["auto"], PlainValidator(_auto_or_count)] = "auto"
    async_tp: bool = False


class Layout(Section):
    """A whole layout. What the YAML leaves open is filled in by `loads`: the GPU's links, each dim's links,
    `shard.grads`, `pipeline.chunks`, `optim.length`, `run.folder`, `run.loss_scale`."""

    cluster: Cluster = Cluster()
    mesh: dict[Dim, MeshDim] = {}
    shard: Shard = Shard()
    unshard: Unshard = Unshard()
    pipeline: Pipeline = Pipeline()
    model: Model
    optim: Optim = Optim()
    data: Data
    run: Run
    kernels: Kernels = Kernels()
    allow: Annotated[tuple[Annotated[str, AfterValidator(_known(CHECKS))], ...], BeforeValidator(_one_or_many)] = ()
    _where: Where = PrivateAttr(default_factory=lambda: {"": "layout"})
    _folder: str = PrivateAttr(default="")
    _written: tuple[dict[str, Any], Where, str] = PrivateAttr(default_factory=lambda: ({}, {"": "layout"}, "layout"))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dim, 1 where the mesh does not have it."""
        return {dim: self.mesh[dim].size if dim in self.mesh else 1 for dim in DIMS}

    @property
    def world(self) -> int:
        """Ranks: one a GPU."""
        return self.cluster.nodes * self.cluster.gpus_per_node


def section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as `Link | None` or `dict[str, Link]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = [section_of(a) for a in get_args(annotation)]
    return next((s for s in found if s is not None), None)


def completed(values: Mapping[str, Any], section: type[Section] = Layout) -> dict[str, Any]:
    """A layout as plain JSON values that an earlier version wrote, with the defaults of the keys that came since."""
    out = dict(values)
    for key, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if isinstance(out.get(key), Mapping) and inner is not None and not is_table(info.annotation):
            out[key] = completed(out[key], inner)
        elif key not in out and not info.is_required():
            default = info.get_default()
            out[key] = json.loads(default.model_dump_json()) if isinstance(default, BaseModel) else default
            out[key] = list(default) if isinstance(default, tuple) else out[key]
    return out


def is_table(annotation: Any) -> bool:
    """Whether the user chooses the keys under this annotation."""
    return get_origin(annotation) is dict or any(is_table(a) for a in get_args(annotation))


def schema_keys(section: type[Section] = Layout, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted; `mesh.<dim>.size` where a name is the user's to choose."""
    names = {"mesh": "dim", "cluster.links": "link"}
    for key, info in section.model_fields.items():
        path = prefix + key
        if path == "model.fields":
            yield "model.<field>"
            continue
        yield path
        inner = section_of(info.annotation)
        if inner is not None:
            yield from schema_keys(inner, f"{path}.<{names[path]}>." if path in names else f"{path}.")
