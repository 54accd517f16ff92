"""Layouts: good ones mean what they say, bad ones are one line: the place, the value and the way out."""

import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain import layout
from dtrain.axes import DIMS, split
from dtrain.hardware import LINKS, show_size
from dtrain.layout import LayoutError, load, loads
from dtrain.mesh import Mesh, all_groups
from dtrain.program.schedule import coordinate_of

SHIPPED = sorted((Path(__file__).parent.parent / "layouts").glob("*.yaml"))

BASE = """\
# a comment
cluster: {nodes: 2, gpus_per_node: 4, gpu: h100-sxm}
mesh:
  pp: {size: 2, link: ib}
  dp: {size: 2, link: nvlink}
  tp: {size: 2, link: nvlink}
shard:
  params: {layers: pp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute: {layers: pp, batch: dp, res_seq: tp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  optimizer: {embed: dp}
pipeline: {schedule: 1f1b}
model:
  family: llama
  layers: 4
  embed: 64
  heads: 4
  kv_heads: 2
  mlp: 128
  vocab: 256
optim:
  lr: 3e-4
  warmup: 2
data:
  source: stdlib
  seq: 32
  batch: 8
  microbatch: 1
run:
  steps: 10
  precision: bf16
"""


def edit(*changes: tuple[str, str]) -> str:
    text = BASE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


OWN = (
    "{name: mine, kind: hopper, processors: 100, memory: 60GiB, memory_rate: 3TB/s, peak: {bf16: 500TFLOP/s},"
    " links: {nvlink: 300GB/s, ib: 40GB/s}}"
)


def fault(text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(LayoutError) as caught:
        loads(text, "x.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The parts of BASE that several cases change.
PARAMS = "heads: tp, kv_heads: tp, mlp: tp}\n  c"
COMPUTE = "heads: tp, kv_heads: tp, mlp: tp}\n  o"
DP, TP = "dp: {size: 2, link: nvlink}", "tp: {size: 2, link: nvlink}"

# name: (changes of BASE, what the blamed line contains, parts of the message: key, value, what is allowed)
BAD: dict[str, tuple[list[tuple[str, str]], str, list[str]]] = {
    # keys
    "unknown top-level key": (
        [("optim:", "optimizer:")],
        "optimizer:",
        ["optimizer: unknown key", "cluster, mesh"],
    ),
    "misspelt section": ([("pipeline:", "pipelin:")], "pipelin:", ["pipelin: ", "did you mean pipeline?"]),
    "misspelt key": (
        [("lr: 3e-4", "learning_rat: 1e-4")],
        "learning_rat",
        ["optim.learning_rat", "has name, lr,", "did you mean lr?"],
    ),
    "near key": ([("warmup: 2", "warm_up: 2")], "warm_up", ["optim.warm_up: ", "did you mean warmup?"]),
    "right key, wrong section": (
        [("warmup: 2", "steps: 5")],
        "steps: 5",
        ["optim.steps: ", "belongs under run"],
    ),
    "repeated key": ([("warmup: 2", "lr: 1e-3")], "lr: 1e-3", ["lr: ", "repeated"]),
    "repeated section": ([("run:\n", "data:\n")], "data:\n  steps", ["data: ", "repeated"]),
    "key that is a number": ([("  warmup: 2", "  3: 2")], "3: 2", ["optim: key 3", "words"]),
    "missing key": ([("  steps: 10\n", "")], "run:", ["run.steps: missing", "whole number"]),
    "missing section": (
        [("data:", "#"), ("  source: stdlib\n  seq: 32\n  batch: 8\n  microbatch: 1\n", "")],
        "# a comment",
        ["data: missing", "seq, batch"],
    ),
    "misspelt required key": (
        [("  seq: 32", "  sequence: 32")],
        "sequence",
        ["data.sequence: unknown key", "mean seq?"],
    ),
    # types
    "quoted number": ([("steps: 10", 'steps: "10"')], "steps:", ["run.steps: '10'", "without quotes: 10"]),
    "float for an int": (
        [("steps: 10", "steps: 1e3")],
        "steps:",
        ["run.steps: 1000.0", "whole number", "1000"],
    ),
    "text for a number": ([("lr: 3e-4", "lr: fast")], "lr:", ["optim.lr: 'fast'", "must be a number"]),
    "true for an int": ([("batch: 8", "batch: true")], "batch: true", ["data.batch: true", "whole number"]),
    "number for a boolean": (
        [("steps: 10", "steps: 10\n  deterministic: 1")],
        "determin",
        ["1; must be true or false"],
    ),
    "true for on": (
        [("steps: 10", "steps: 10\n  compile: true")],
        "compile",
        ["run.compile: true", "on, off, auto"],
    ),
    "list for a section": (
        [("pipeline: {schedule: 1f1b}", "pipeline: [1f1b]")],
        "[1f1b]",
        ["pipeline: ['1f1b']", "mapping"],
    ),
    "number for text": ([("family: llama", "family: 3")], "family", ["model.family: 3", "must be text"]),
    "infinite": ([("lr: 3e-4", "lr: .inf")], "lr:", ["optim.lr: inf", "finite"]),
    "a date": ([("warmup: 2", "warmup: 2020-01-01")], "warmup", ["optim.warmup: 2020-01-01"]),
    "a rate without unit": (
        [("gpu: h100-sxm}", "gpu: h100-sxm, links: {ib: 50}}")],
        "links",
        ["cluster.links.ib", "50; ", "450GB/s"],
    ),
    "a rate in bits": (
        [("gpu: h100-sxm}", "gpu: h100-sxm, links: {ib: 50Gb/s}}")],
        "links",
        ["'50Gb/s'", "kB, KB, MB"],
    ),
    "layers_per_stage as a number": (
        [("schedule: 1f1b", "layers_per_stage: 2")],
        "layers_per",
        ["2; must be a list"],
    ),
    # ranges and choices
    "negative lr": ([("lr: 3e-4", "lr: -1")], "lr: -1", ["optim.lr: -1", "more than 0"]),
    "zero batch": ([("batch: 8", "batch: 0")], "batch: 0", ["data.batch: 0", "at least 1"]),
    "zero timeout": (
        [("steps: 10", "steps: 10\n  timeouts: {step: 0}")],
        "timeouts",
        ["run.timeouts.step: 0", "more than 0"],
    ),
    "beta of one": ([("warmup: 2", "beta2: 1.0")], "beta2", ["optim.beta2: 1.0", "less than 1"]),
    "unknown gpu": (
        [("h100-sxm", "h100-smx")],
        "h100-smx",
        ["cluster.gpu: 'h100-smx'", "h200", "did you mean h100-sxm?"],
    ),
    "own gpu's misspelt key": (
        [("h100-sxm", OWN.replace("memory_rate", "memory_rat"))],
        "memory_rat",
        ["cluster.gpu.memory_rat: unknown key", "did you mean memory_rate?"],
    ),
    "own gpu without peaks": (
        [("h100-sxm", OWN.replace("peak: {bf16: 500TFLOP/s},", ""))],
        "mine",
        ["cluster.gpu.peak: missing", "cluster.gpu needs peak: {bf16: 989TFLOP/s, ...}, dense"],
    ),
    "own gpu's peak without a unit": ([("h100-sxm", OWN.replace("500TFLOP/s", "500e12"))], "mine", ["989TFLOP/s"]),
    "own gpu's unknown precision": ([("h100-sxm", OWN.replace("bf16:", "bf61:"))], "mine", ["bf61", "bf16, fp16"]),
    "own gpu's unknown class": (
        [("h100-sxm", OWN.replace("kind: hopper", "kind: hoper"))],
        "mine",
        ["cluster.gpu.kind: 'hoper'", "volta, ampere, hopper, blackwell", "did you mean hopper?"],
    ),
    "own gpu with a catalog name": (
        [("h100-sxm", OWN.replace("mine", "h200"))],
        "h200",
        ["cluster.gpu.name: 'h200'", "another name"],
    ),
    "own gpu lacks the precision": (
        [("h100-sxm", OWN), ("precision: bf16", "precision: fp16")],
        "fp16",
        ["run.precision: fp16", "mine computes in bf16"],
    ),
    "unknown schedule": (
        [("1f1b", "1f1")],
        "1f1",
        ["pipeline.schedule: '1f1'", "gpipe, 1f1b, interleaved", "mean 1f1b"],
    ),
    "unknown precision": ([("bf16", "bf61")], "bf61", ["run.precision: 'bf61'", "fp32, bf16, fp16, fp64"]),
    "unknown dim": (
        [("  dp: {", "  ddp: {")],
        "ddp",
        ["mesh.ddp: ddp", "pp, dp, fsdp, cp, tp", "did you mean dp?"],
    ),
    "unknown axis": (
        [("kv_heads: tp, mlp: tp}\n  c", "kv_head: tp, mlp: tp}\n  c")],
        "params:",
        ["shard.params.kv_head: kv_head", "mean kv_heads?"],
    ),
    "unknown dim in a rule": (
        [("batch: dp", "batch: ddp")],
        "compute",
        ["shard.compute.batch", "'ddp'", "fsdp"],
    ),
    "unknown link": ([(DP, "dp: {size: 2, link: nvlnk}")], "nvlnk", ["'nvlnk'", "did you mean nvlink?"]),
    "unknown exemption": (
        [("run:\n", "allow: [tp-anywhere]\nrun:\n")],
        "allow",
        ["'tp-anywhere'", "tp-across-nodes"],
    ),
    # mesh
    "wrong product": ([("pp: {size: 2", "pp: {size: 3")], "mesh:", ["pp 3 x dp 2 x tp 2 = 12", "8 GPUs"]),
    "no mesh on many GPUs": (
        [
            ("  pp: {size: 2, link: ib}\n  dp: {size: 2, link: nvlink}\n  tp: {size: 2, link: nvlink}\n", ""),
            ("mesh:\n", "mesh: {}\n"),
        ],
        "mesh",
        ["no dims = 1", "8 GPUs"],
    ),
    "context parallel": (
        [(DP, "cp: {size: 2, link: nvlink}")],
        "cp:",
        ["mesh.cp.size: 2", "not supported yet"],
    ),
    "slow inside fast": (
        [(TP, "tp: {size: 2, link: ib}")],
        "tp: {",
        ["tp over ib (50GB/s) is inside dp over nvlink (450GB/s)", "allow: [slow-inside-fast]"],
    ),
    "tp across nodes": (
        [
            ("  pp: {size: 2, link: ib}\n", ""),
            ("tp: {size: 2, link: nvlink}\n", "tp: {size: 2, link: nvlink}\n  pp: {size: 2, link: ib}\n"),
            ("size: 2, link: nvlink}\n  tp", "size: 1, link: nvlink}\n  tp"),
            (TP, "tp: {size: 4, link: nvlink}"),
        ],
        "tp: {",
        [
            "tp 4 over groups of 2 leaves its node of 4",
            "outermost first: dp, pp, tp",
            "allow: [tp-across-nodes]",
        ],
    ),
    "nvlink across nodes": (
        [("pp: {size: 2, link: ib}", "pp: {size: 2, link: nvlink}")],
        "pp: {",
        ["pp 2 over groups of 4", "nvlink", "4 GPUs"],
    ),
    "one link for two levels": (
        [("pp: {size: 2, link: ib}", "pp: {size: 1, link: ib}"), (DP, "dp: {size: 4, link: ib}")],
        "dp: {",
        ["dp 4", "[nvlink, ib]"],
    ),
    "two links for one level": ([(DP, "dp: {size: 2, link: [nvlink, ib]}")], "dp: {", ["nvlink alone"]),
    "link that the cluster lacks": (
        [("h100-sxm", "h100-pcie")],
        "dp: {",
        ["mesh.dp.link: nvlink", "pcie, ib"],
    ),
    "three links": ([(DP, "dp: {size: 2, link: [nvlink, ib, pcie]}")], "dp: {", ["at most 2"]),
    "odd domain": (
        [("gpu: h100-sxm}", "gpu: h100-sxm, nvlink_domain: 3}")],
        "nvlink_domain",
        ["3; must divide", "4"],
    ),
    # rules
    "axis no tensor has": (
        [("optimizer: {embed: dp}", "optimizer: {positions: dp}")],
        "optimizer",
        ["shard.optimizer.positions: dp", "no parameter", "layers"],
    ),
    "dim outside the mesh": (
        [("optimizer: {embed: dp}", "optimizer: {embed: fsdp}")],
        "optimizer",
        ["fsdp; is not in this mesh", "pp, dp, tp"],
    ),
    "dim twice in a list": ([("batch: dp", "batch: [dp, dp]")], "compute", ["shard.compute.batch", "twice"]),
    "dim on two axes": (
        [("optimizer: {embed: dp}", "optimizer: {embed: dp, mlp: dp}")],
        "optimizer",
        ["dp; block/w_gate (embed mlp)", "both embed", "x.yaml:10", "and mlp"],
    ),
    "params collide with optimizer": (
        [(PARAMS, "heads: tp, kv_heads: tp, mlp: [tp, dp]}\n  c")],
        "optimizer",
        ["dp; block/w_gate", "embed", "mlp", "x.yaml:8"],
    ),
    "optimizer repeats params": (
        [("params: {layers: pp,", "params: {embed: dp, layers: pp,")],
        "optimizer",
        ["dp; embed/table is already cut", "additions only", "x.yaml:8"],
    ),
    "tp in optimizer": (
        [("optimizer: {embed: dp}", "optimizer: {embed: tp}")],
        "optimizer",
        ["tp; optimizer may cut embed over dp, fsdp", "additions"],
    ),
    "layers on dp": (
        [("params: {layers: pp", "params: {layers: dp")],
        "params",
        ["dp; params may cut layers over pp"],
    ),
    "seq on tp": (
        [("res_seq: tp", "seq: tp")],
        "compute",
        ["tp; compute may cut seq over cp", "res_seq: tp"],
    ),
    "embed in compute": (
        [("batch: dp,", "batch: dp, embed: dp,")],
        "compute",
        ["shard.compute.embed: dp", "no dim", "params or optimizer"],
    ),
    "compute forgets a rule": (
        [
            (
                "res_seq: tp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}",
                "res_seq: tp, heads: tp, kv_heads: tp, mlp: tp}",
            )
        ],
        "params",
        ["shard.params.vocab", "params has tp and compute has nothing"],
    ),
    "params forget a rule": (
        [("params: {layers: pp, vocab: tp, ", "params: {layers: pp, ")],
        "compute",
        ["shard.compute.vocab", "params has nothing and compute has tp"],
    ),
    "kv heads unlike heads": (
        [(PARAMS, "heads: tp, mlp: tp}\n  c"), (COMPUTE, "heads: tp, mlp: tp}\n  o")],
        "compute",
        ["heads has tp and kv_heads has nothing", "alike"],
    ),
    "dim that nothing uses": ([("batch: dp, ", "")], "dp: {", ["mesh.dp: size 2", "batch: dp"]),
    "grads without optimizer": (
        [("optimizer: {embed: dp}", "grads: {embed: dp}")],
        "grads",
        ["shard.grads.embed: dp", "optimizer: {embed: dp}"],
    ),
    # model
    "unknown model key": ([("  heads: 4", "  haeds: 4")], "haeds", ["model.haeds: ", "unknown key", "heads"]),
    "model key of another section": (
        [("  vocab: 256", "  vocab: 256\n  lr: 1e-3")],
        "lr: 1e-3",
        ["model.lr: ", "unknown key", "belongs under optim"],
    ),
    "missing model key": ([("  layers: 4\n", "")], "model:", ["model: missing layers"]),
    "quoted model number": (
        [("  heads: 4", '  heads: "4"')],
        'heads: "4"',
        ["model.heads: ", "'4'", "whole number"],
    ),
    "unknown family": ([("llama", "lama")], "family", ["model.family: ", "'lama'", "llama"]),
    "unknown preset": (
        [("family: llama", "preset: lama3-8b")],
        "preset",
        ["model.preset: ", "'lama3-8b'", "llama3-8b"],
    ),
    "family and preset": (
        [("family: llama", "family: llama\n  preset: llama3-8b")],
        "model:",
        ["family and preset", "exactly one"],
    ),
    "misspelt preset key": (
        [("family: llama", "pre_set: llama3-8b")],
        "model:",
        ["pre_set; did you mean preset?", "exactly one"],
    ),
    "missing model file": (
        [("family: llama", "file: nowhere.py")],
        "file",
        ["model.file: ", "nowhere.py", "does not exist"],
    ),
    "kernel in the model": (
        [("  vocab: 256", "  vocab: 256\n  attention: math")],
        "attention",
        ["model.attention", "kernels"],
    ),
    "vocab_pad too small": (
        [("vocab: 256", "vocab: 256\n  vocab_pad: 200")],
        "vocab_pad",
        ["model.vocab_pad: 200", "256", "auto"],
    ),
    "vocab_pad indivisible": (
        [("vocab: 256", "vocab: 256\n  vocab_pad: 257")],
        "vocab_pad",
        ["257", "tp 2", "258"],
    ),
    "vocab_pad word": (
        [("vocab: 256", "vocab: 256\n  vocab_pad: some")],
        "vocab_pad",
        ["'some'", "auto or a whole number"],
    ),
    # divisibility
    "heads": (
        [("  heads: 4", "  heads: 3"), ("  kv_heads: 2", "  kv_heads: 3\n  head_dim: 16")],
        "compute",
        ["heads (3)", "tp 2", "legal: 1, 3"],
    ),
    "mlp": ([("mlp: 128", "mlp: 129")], "compute", ["mlp (129)", "tp 2", "1, 3, 43, 129"]),
    "sequence": ([("seq: 32", "seq: 33")], "seq: 33", ["data.seq: 33", "tp 2", "32 or 34"]),
    "batch": ([("batch: 8", "batch: 9")], "batch: 9", ["data.batch: 9", "dp 2", "8 or 10"]),
    "microbatch": (
        [("microbatch: 1", "microbatch: 3")],
        "microbatch",
        ["data.microbatch: 3", "4 sequences", "1, 2, 4"],
    ),
    "layers": (
        [("  layers: 4", "  layers: 5")],
        "pp: {",
        ["mesh.pp.size", "2 stages", "5 layers", "layers_per_stage: [2, 3]"],
    ),
    "more stages than layers": (
        [("  layers: 4", "  layers: 1")],
        "pp: {",
        ["2 stages", "1 layers", "at most 1"],
    ),
    "stages that do not add up": (
        [("schedule: 1f1b", "layers_per_stage: [1, 2]")],
        "layers_per_stage",
        ["[1, 2]", "2 numbers", "4 layers", "add up to 3"],
    ),
    "chunks without interleaving": (
        [("schedule: 1f1b", "chunks: 2")],
        "chunks",
        ["pipeline.chunks: 2", "interleaved"],
    ),
    "interleaving without chunks": (
        [("schedule: 1f1b", "schedule: interleaved, chunks: 1")],
        "chunks",
        ["pipeline.chunks: 1", "at least 2"],
    ),
    "indivisible chunks": (
        [("schedule: 1f1b", "schedule: interleaved, chunks: 3")],
        "chunks",
        ["6 stages", "4 layers"],
    ),
    # run, optim, data
    "bf16 on a V100": (
        [("h100-sxm", "v100")],
        "precision",
        ["run.precision: bf16", "v100-32 computes in fp32, fp16, fp64"],
    ),
    "loss scale in bf16": (
        [("steps: 10", "steps: 10\n  loss_scale: {start: 8}")],
        "loss_scale",
        ["fp16 only", "bf16"],
    ),
    "warm-up longer than the run": (
        [("warmup: 2", "warmup: 20")],
        "warmup",
        ["optim.warmup: 20", "at most", "10 steps"],
    ),
    "wsd without decay": ([("warmup: 2", "schedule: wsd")], "wsd", ["optim.schedule: wsd", "optim.decay"]),
    "decay without wsd": ([("warmup: 2", "decay: 2")], "decay", ["optim.decay: 2", "wsd"]),
    "min_lr above lr": ([("warmup: 2", "min_lr: 0.1")], "min_lr", ["optim.min_lr: 0.1", "optim.lr (0.0003)"]),
    "profile beyond the run": (
        [("steps: 10", "steps: 10\n  profile: {steps: [10, 12]}")],
        "profile",
        ["[10, 12]", "run.steps (10)"],
    ),
    "profile of one step": (
        [("steps: 10", "steps: 10\n  profile: {steps: 3}")],
        "profile",
        ["run.profile.steps: 3", "list"],
    ),
    "profiled rank": (
        [("steps: 10", "steps: 10\n  profile: {steps: [1, 2], ranks: [8]}")],
        "profile",
        ["[8]", "0 to 7"],
    ),
    "text without a path": (
        [("source: stdlib", "source: text")],
        "source",
        ["data.source: text", "data.path"],
    ),
    "path without files": (
        [("source: stdlib", "source: stdlib\n  path: a.txt")],
        "path",
        ["data.path: ['a.txt']", "text or jsonl"],
    ),
    "evaluation of nothing": (
        [
            ("microbatch: 1", "microbatch: 1\n  validation: {fraction: 0}"),
            ("steps: 10", "steps: 10\n  eval_every: 5"),
        ],
        "eval_every",
        ["run.eval_every: 5", "fraction"],
    ),
    "attention dropout with flash": (
        [
            ("family: llama", "family: gpt2"),
            ("  kv_heads: 2\n", ""),
            (PARAMS, "heads: tp, mlp: tp}\n  c"),
            (COMPUTE, "heads: tp, mlp: tp}\n  o"),
            ("run:\n", "kernels: {attention: flash}\nrun:\n"),
        ],
        "kernels",
        ["kernels.attention: 'flash'", "dropout", "math"],
    ),
    "flash on a V100": (
        [
            ("gpu: h100-sxm", "gpu: v100"),
            ("precision: bf16", "precision: fp16"),
            ("run:\n", "kernels: {attention: flash}\nrun:\n"),
        ],
        "kernels",
        ["kernels.attention: 'flash' cannot do float16", "compute capability 8.0"],
    ),
    "flash in fp32": (
        [("precision: bf16", "precision: fp32"), ("run:\n", "kernels: {attention: flash}\nrun:\n")],
        "kernels",
        ["kernels.attention: 'flash' cannot do float32", "fp16 or bf16"],
    ),
    "cudnn and deterministic": (
        [
            ("precision: bf16", "precision: bf16\n  deterministic: true"),
            ("run:\n", "kernels: {attention: cudnn}\nrun:\n"),
        ],
        "kernels",
        ["kernels.attention: cudnn", "not deterministic"],
    ),
    "flex": (
        [("run:\n", "kernels: {attention: flex}\nrun:\n")],
        "kernels",
        ["kernels.attention: 'flex'", "auto, flash, efficient, cudnn, math"],
    ),
    "async tensor parallelism on CPUs": (
        [
            ("cluster: {nodes: 2, gpus_per_node: 4, gpu: h100-sxm}", "cluster: {nodes: 1, gpus_per_node: 8}"),
            ("pp: {size: 2, link: ib}", "pp: {size: 2, link: loopback}"),
            ("dp: {size: 2, link: nvlink}", "dp: {size: 2, link: loopback}"),
            ("tp: {size: 2, link: nvlink}", "tp: {size: 2, link: loopback}"),
            ("run:\n", "kernels: {async_tp: true}\nrun:\n"),
        ],
        "kernels",
        ["kernels.async_tp: true", "needs GPUs", "symmetric memory", "cpu"],
    ),
    "async tensor parallelism without sequence parallelism": (
        [("res_seq: tp, ", ""), ("run:\n", "kernels: {async_tp: true}\nrun:\n")],
        "kernels",
        ["kernels.async_tp: true", "needs sequence parallelism", "res_seq: tp"],
    ),
    "async tensor parallelism over PCIe": (
        [
            ("tp: {size: 2, link: nvlink}", "tp: {size: 2, link: pcie}"),
            ("dp: {size: 2, link: nvlink}", "dp: {size: 2, link: pcie}"),
            ("run:\n", "kernels: {async_tp: true}\nrun:\n"),
        ],
        "kernels",
        ["kernels.async_tp: true", "nvlink", "not pcie"],
    ),
    "async tensor parallelism uncompiled": (
        [("precision: bf16", "precision: bf16\n  compile: off"), ("run:\n", "kernels: {async_tp: true}\nrun:\n")],
        "kernels",
        ["kernels.async_tp: true", "run: {compile: on}"],
    ),
    "products in fp8": (
        [("precision: bf16", "precision: fp8")],
        "precision",
        ["run.precision: 'fp8'", "not built", "scales", "use bf16"],
    ),
    "a CUDA graph on CPUs": (
        [
            ("cluster: {nodes: 2, gpus_per_node: 4, gpu: h100-sxm}", "cluster: {nodes: 1, gpus_per_node: 8}"),
            ("pp: {size: 2, link: ib}", "pp: {size: 2, link: loopback}"),
            ("dp: {size: 2, link: nvlink}", "dp: {size: 2, link: loopback}"),
            ("tp: {size: 2, link: nvlink}", "tp: {size: 2, link: loopback}"),
            ("precision: bf16", "precision: bf16\n  cuda_graph: true"),
        ],
        "cuda_graph",
        ["run.cuda_graph: true", "needs GPUs, not cpu"],
    ),
    "a CUDA graph of a pipeline": (
        [("precision: bf16", "precision: bf16\n  cuda_graph: true")],
        "cuda_graph",
        ["run.cuda_graph: true", "one pipeline stage, not pp 2"],
    ),
    "a CUDA graph in fp16": (
        [
            ("  pp: {size: 2, link: ib}\n", ""),
            ("nodes: 2, gpus_per_node: 4", "nodes: 1, gpus_per_node: 4"),
            ("precision: bf16", "precision: fp16\n  cuda_graph: true"),
        ],
        "cuda_graph",
        ["run.cuda_graph: true", "constant loss scale", "bf16"],
    ),
    # text
    "a tab": ([("  warmup: 2", "\twarmup: 2")], "\twarmup", ["tab", "spaces"]),
    "not YAML": ([("family: llama", "family: llama: 3")], "family", ["not YAML"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_layouts_are_one_line(name):
    changes, blamed, parts = BAD[name]
    text = edit(*changes)
    # The last match: shortened forms (`data:`) also occur in what comes before a repetition.
    line = text[: text.rindex(blamed)].count("\n") + 1
    message = fault(text)
    assert message.startswith(f"x.yaml:{line}: "), message
    for part in parts:
        assert part in message, message


def test_there_are_enough_bad_layouts():
    assert len(BAD) >= 45


def test_a_bad_layout_starts_nothing():
    """The loader imports neither torch.distributed's groups nor the launcher; it cannot start a process."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from dtrain import layout\n"
        "new = set(sys.modules) - before\n"
        "sys.exit(any(m.startswith(('torch.distributed.elastic', 'dtrain.mesh')) for m in new))"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_whole_text_faults(tmp_path):
    assert fault("").startswith("x.yaml:1: the layout is empty")
    assert fault("# only a comment\n").startswith("x.yaml:1: the layout is empty")
    assert "mapping" in fault("- 1\n- 2\n") and "'text'" in fault("text")
    assert fault("a: 1\n---\nb: 2\n").startswith("x.yaml:2: ")
    with pytest.raises(LayoutError, match=r"no such file; did you mean right\.yaml\?$"):
        (tmp_path / "right.yaml").write_text(BASE)
        load(tmp_path / "rihgt.yaml")
    with pytest.raises(LayoutError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="UTF-8"):
        load(tmp_path / "binary.yaml")


def test_the_base_is_good_and_frozen():
    x = loads(BASE)
    assert x.sizes == {"pp": 2, "dp": 2, "fsdp": 1, "cp": 1, "tp": 2} and x.world == 8
    assert list(x.mesh) == ["pp", "dp", "tp"] and x.mesh["pp"].link == ("ib",)
    assert layout.data_parallel(x) == 2 and layout.microbatches(x) == 4
    assert x.optim.lr == 3e-4 and x.optim.length == 10
    with pytest.raises(Exception, match="frozen"):
        x.run.steps = 5  # type: ignore[misc]


def test_numbers_are_yaml_1_2():
    x = loads(edit(("lr: 3e-4", "lr: 1e-3"), ("steps: 10", "steps: 1_0\n  compile: off")))
    assert x.optim.lr == 1e-3 and x.run.steps == 10 and x.run.compile == "off"
    assert loads(edit(("lr: 3e-4", "lr: 1"))).optim.lr == 1
    assert loads(edit(("warmup: 2", "clip: null"))).optim.clip is None


# ------------------------------------------------------------------------------------------------ overrides


def test_overrides():
    x = loads(BASE, "x.yaml", ["run.steps=20", "optim.lr=1e-4", "optim.clip=null", "data.validation.fraction=0.1"])
    assert (x.run.steps, x.optim.lr, x.optim.clip, x.data.validation.fraction) == (20, 1e-4, None, 0.1)
    assert loads(BASE, "x.yaml", ["kernels.attention=math"]).kernels.attention == "math"  # a new section
    assert loads(BASE, "x.yaml", ["shard.compute.res_seq=[]"]).shard.compute["res_seq"] == ()
    assert loads(BASE, "x.yaml", ["run.steps=20", "run.steps=30"]).run.steps == 30
    assert list(loads(BASE, "x.yaml", ["mesh.pp.size=2"]).mesh) == ["pp", "dp", "tp"]
    assert loads(BASE, "x.yaml", ["model.layers=8"]).model.fields["layers"] == 8
    text, whole = edit(("run:\n  steps: 10\n  precision: bf16\n", "")), "run={steps: 3}"
    assert loads(text, "x.yaml", [whole]).run.steps == 3


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.step=10", ["run.step: unknown key", "did you mean steps?"]),
        ("optim.learning_rat=1e-4", ["optim.learning_rat: unknown key"]),
        ("optim.steps=10", ["belongs under run"]),
        ("mesh.tpp.size=2", ["mesh.tpp: tpp", "did you mean tp?"]),
        ("run.steps=1e3", ["run.steps: 1000.0", "whole number"]),
        ("run.steps='10'", ["run.steps: '10'", "without quotes"]),
        ("run.steps=", ["run.steps: null", "whole number"]),
        ("run.steps", ["key.path=value"]),
        ("=3", ["key.path=value"]),
        ("run..steps=3", ["key.path=value"]),
        ("run.steps.more=3", ["run.steps: 10 at x.yaml:29", "no keys inside"]),
        ("data.path=[a", ["not YAML"]),
        ("data.seq=33", ["data.seq: 33", "32 or 34"]),
        ("model.haeds=3", ["model.haeds: ", "unknown key"]),
    ],
)
def test_bad_overrides_are_cited(override, parts):
    message = fault(BASE, (override,))
    assert message.startswith(f"override {override}: "), message
    for part in parts:
        assert part in message, message


# -------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_layouts_load_fast(path):
    load(path)  # imports
    start = time.perf_counter()
    x = load(path)
    assert time.perf_counter() - start < 0.3
    assert x.run.folder == f"checkpoints/{path.stem}"
    assert layout.coords(x, x.world - 1) == {d: n - 1 for d, n in x.sizes.items() if d in x.mesh}


def test_shipped_layouts_say_what_they_are_for():
    named = {path.stem: load(path) for path in SHIPPED}
    assert set(named) >= {
        "quickstart",
        "one-process",
        "llama3-70b-4x8-h100",
        "llama3-70b-8x8-h100",
        "llama3-8b-1x8-h100",
        "gpt2-8.3b-32x16-v100",
        "bert-3.9b-v100",
    }
    x = named["llama3-70b-4x8-h100"]
    _, cfg = layout.family(x)
    assert (x.sizes["tp"], x.sizes["pp"], x.sizes["dp"], x.data.seq) == (8, 4, 1, 4096)
    assert layout.stage_layers(x) == (20, 20, 20, 20) and cfg.heads // 8 == 8 and cfg.kv_heads // 8 == 1
    assert x.mesh["tp"].link == ("nvlink",) and x.mesh["pp"].link == ("ib",)
    assert named["llama3-70b-8x8-h100"].sizes == x.sizes | {"dp": 2}
    gpt2 = named["gpt2-8.3b-32x16-v100"]
    _, cfg = layout.family(gpt2)
    assert (cfg.layers, cfg.embed, cfg.heads, cfg.vocab) == (72, 3072, 32, 50257)
    assert layout.pad(gpt2) == {"vocab": 51200} and gpt2.sizes["tp"] == 8 and gpt2.sizes["dp"] == 64
    bert = named["bert-3.9b-v100"]
    _, cfg = layout.family(bert)
    assert (cfg.layers, cfg.embed, cfg.heads, cfg.norm, bert.world) == (48, 2560, 40, "pre", 512)
    for old in (gpt2, bert):
        assert old.run.precision == "fp16" and old.run.loss_scale is not None
        assert layout.link_rate(old, "ib") == 6.25e9  # eight NICs for sixteen GPUs
    for name, y in named.items():
        assert y.cluster.gpu == "cpu" or y.data.source == "synthetic", name
    one, four = named["one-process"], named["quickstart"]
    assert one.world == 1 and (one.model, one.optim, one.data) == (four.model, four.optim, four.data)


def test_groups_follow_the_mesh_order():
    """B81: the last dim varies fastest over ranks."""
    x = loads(BASE.replace(DP, "dp: {size: 2, link: ib}"))
    assert layout.groups(x, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups(x, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups(x, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.coords(x, 5) == {"pp": 1, "dp": 0, "tp": 1}
    mesh = Mesh(tuple((dim, d.size) for dim, d in x.mesh.items()))
    for dim in x.mesh:
        assert layout.groups(x, dim) == all_groups(mesh, dim)
    assert [layout.coords(x, r) for r in range(8)] == [{d: mesh.coordinates(r)[d] for d in x.mesh} for r in range(8)]


def test_links_are_inferred_from_the_order():
    text = re.sub(r", link: \w+}", "}", BASE)
    assert {d: m.link for d, m in loads(text).mesh.items()} == {
        "pp": ("ib",),
        "dp": ("nvlink",),
        "tp": ("nvlink",),
    }
    text = text.replace("pp: {size: 2}", "pp: {size: 1}").replace("dp: {size: 2}", "dp: {size: 4}")
    assert loads(text).mesh["dp"].link == ("nvlink", "ib")


def test_an_nvlink_domain_can_span_nodes():
    text = edit(
        (
            "nodes: 2, gpus_per_node: 4, gpu: h100-sxm",
            "nodes: 2, gpus_per_node: 4, gpu: gb200, nvlink_domain: 8",
        ),
        ("pp: {size: 2, link: ib}", "pp: {size: 2, link: nvlink}"),
    )
    assert loads(text).mesh["pp"].link == ("nvlink",)
    assert "leaves the 4 GPUs" in fault(text.replace("nvlink_domain: 8", "nvlink_domain: 4"))


def test_allow_silences_a_check_by_name():
    bad = edit((TP, "tp: {size: 2, link: ib}"))
    assert "slow-inside-fast" in fault(bad)
    assert loads(bad + "allow: [slow-inside-fast]\n").allow == ("slow-inside-fast",)
    assert "slow-inside-fast" in fault(bad + "allow: [tp-across-nodes]\n")


# ---------------------------------------------------------------------------------- stages and microbatches


def test_stages():
    """B34: every layer is on one stage, uneven splits are written out, and the schedule agrees."""
    x = loads(edit(("schedule: 1f1b", "layers_per_stage: [1, 3]")))
    assert [layout.stage_of(x, "block", i) for i in range(4)] == [0, 1, 1, 1]
    assert layout.stage_of(x, "embed") == 0 and layout.stage_of(x, "head") == 1
    for schedule, chunks in (("interleaved", 2), ("zbv", 2), ("1f1b", 1), ("zero-bubble", 1), ("gpipe", 1)):
        x = loads(BASE, "x.yaml", [f"pipeline.schedule={schedule}"])
        assert x.pipeline.chunks == chunks and layout.stages(x) == 2 * chunks
        owners = [layout.pp_of(x, s) for s in range(layout.stages(x))]
        assert owners == coordinate_of(schedule, 2, chunks)
    with pytest.raises(ValueError, match="layer 4"):
        layout.stage_of(x, "block", 4)


def small(pp: int, layers: int, extra: tuple[str, ...] = ()) -> str | tuple[int, ...]:
    text = f"""\
cluster: {{gpus_per_node: {pp}}}
mesh: {{pp: {{size: {pp}}}}}
shard: {{params: {{layers: pp}}, compute: {{layers: pp}}}}
model: {{family: llama, layers: {layers}, embed: 8, heads: 2, mlp: 8, vocab: 256}}
data: {{seq: 8, batch: 8}}
run: {{steps: 1}}
"""
    try:
        return layout.stage_layers(loads(text, "x.yaml", extra))
    except LayoutError as error:
        return str(error)


def test_uneven_pipelines_are_refused_or_written_out():
    """B34."""
    assert "3 stages" in small(3, 10) and "10 layers" in small(3, 10) and "1, 2, 5, 10" in small(3, 10)
    assert "layers_per_stage: [3, 4]" in small(2, 7) and "30 layers" in small(4, 30)
    assert small(2, 7, ("pipeline.layers_per_stage=[3, 4]",)) == (3, 4)
    assert "add up to 6" in small(2, 7, ("pipeline.layers_per_stage=[3, 3]",))


def test_fewer_microbatches_than_stages_is_a_layout():
    x = loads(BASE, "x.yaml", ["data.batch=2"])
    assert layout.microbatches(x) == 1


def heads(n: int, kv: int, tp: int, family: str = "llama") -> str:
    kv_rule, kv_size = (", kv_heads: tp", f", kv_heads: {kv}") if family == "llama" else ("", "")
    text = f"""\
cluster: {{gpus_per_node: {tp}}}
mesh: {{tp: {{size: {tp}}}}}
shard: {{params: {{heads: tp{kv_rule}}}, compute: {{heads: tp{kv_rule}}}}}
model: {{family: {family}, layers: 1, embed: {n * 64}, heads: {n}{kv_size}, mlp: 64, vocab: 256}}
data: {{seq: 8, batch: 8}}
run: {{steps: 1}}
"""
    try:
        loads(text)
    except LayoutError as error:
        return str(error)
    return "good"


def test_legal_tp_degrees_are_listed():
    """B10: KV heads fewer than tp are replicated; query heads must divide, legal ones are named."""
    assert heads(8, 2, 4) == "good" and heads(8, 4, 2) == "good"
    assert heads(52, 52, 8).endswith("legal: 1, 2, 4, 13, 26, 52") and "tp 8" in heads(52, 52, 8)
    assert heads(25, 25, 4, "gpt2").endswith("legal: 1, 5, 25")
    message = heads(12, 6, 4)  # neither divides the other
    assert "6 kv_heads" in message and message.endswith("legal: 1, 2, 3, 6, 12")


def test_a_sequence_that_tp_does_not_divide():
    """B09."""
    assert "32 or 34" in fault(edit(("seq: 32", "seq: 33")))
    assert loads(edit(("seq: 32", "seq: 33"), ("res_seq: tp, ", ""))).data.seq == 33  # without res_seq nothing cuts it


def test_batches_are_never_truncated():
    """B91 and B37: naming both numbers, before anything starts."""
    model = "model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 256}\n"
    rules = "shard: {compute: {batch: dp}}\n" + model
    four = f"cluster: {{gpus_per_node: 4}}\nmesh: {{dp: {{size: 4}}}}\n{rules}run: {{steps: 1}}\n"
    message = fault(four + "data: {seq: 8, batch: 10, microbatch: 1}\n")
    assert "data.batch: 10" in message and "dp 4" in message and message.endswith("use 8 or 12")
    assert layout.microbatches(loads(four + "data: {seq: 8, batch: 8}\n")) == 2
    assert "12" not in fault(four + "data: {seq: 8, batch: 3}\n") and "use 4" in fault(
        four + "data: {seq: 8, batch: 3}\n"
    )
    message = fault(four + "data: {seq: 8, batch: 24, microbatch: 4}\n")
    assert "data.microbatch: 4" in message and "6 sequences" in message and message.endswith("1, 2, 3, 6")
    message = fault(
        four.replace("gpus_per_node: 4", "gpus_per_node: 8").replace("size: 4", "size: 6")
        + "data: {seq: 8, batch: 6}\n"
    )
    assert "dp 6 = 6 ranks" in message and "8 GPUs" in message


def test_misspelt_keys_stop_the_run():
    """B89: in the file and on the command line alike."""
    assert "did you mean seq?" in fault(edit(("seq: 32", "sek: 32")))
    assert fault(BASE, ("data.sek=32",)).startswith("override data.sek=32: data.sek: unknown key")


def test_vocabularies_are_padded():
    pad = lambda *changes: layout.pad(loads(edit(*changes)))  # noqa: E731
    assert pad() == {"vocab": 256} and pad(("vocab: 256", "vocab: 257")) == {"vocab": 512}
    assert pad(("vocab: 256", "vocab: 257\n  vocab_pad: 258")) == {"vocab": 258}
    assert layout.pad(load(SHIPPED[0].parent / "llama3-70b-4x8-h100.yaml")) == {"vocab": 129024}


# ---------------------------------------------------------------------------------------------------- rules


def test_complete_tables():
    x = loads(BASE, "x.yaml", ["shard.grads={embed: dp}"])
    t = layout.tables(x)
    axes = ("embed", "heads", "head_dim")
    assert split(axes, t.params) == ((), ("tp",), ())
    assert split(axes, t.optimizer) == (("dp",), ("tp",), ())
    assert split(axes, t.grads) == (("dp",), ("tp",), ())  # additions to compute
    assert layout.tables(loads(BASE)).grads == x.shard.compute


def test_grads_follow_the_cuts_of_storage():
    text = """\
cluster: {gpus_per_node: 4}
mesh: {dp: {size: 2}, fsdp: {size: 2}}
shard:
  params: {embed: fsdp}
  compute: {batch: [dp, fsdp]}
  optimizer: {embed: dp}
  grads: {embed: dp}
model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 256}
data: {seq: 8, batch: 8}
run: {steps: 1}
"""
    message = fault(text)
    assert message.startswith("x.yaml:7: shard.grads.embed: dp; embed/table is cut by embed: fsdp, embed: dp at rest")
    for grads in ("{embed: fsdp}", "{embed: [fsdp, dp]}", "{}"):
        loads(text.replace("grads: {embed: dp}", f"grads: {grads}"))


def test_fp16_has_a_loss_scale():
    x = loads(edit(("bf16", "fp16")))
    assert x.run.loss_scale is not None and x.run.loss_scale.start == 65536
    assert loads(BASE).run.loss_scale is None


def test_a_file_model_is_found_beside_its_layout(tmp_path):
    (tmp_path / "mine.py").write_text("from dtrain.models.llama import *\n")
    (tmp_path / "mine.yaml").write_text(edit(("family: llama", "file: mine.py")))
    module, cfg = layout.family(load(tmp_path / "mine.yaml"))
    assert module.__file__ == str(tmp_path / "mine.py") and cfg.layers == 4
    assert layout.family(loads(edit(("run:\n", "kernels: {attention: math}\nrun:\n"))))[1].attention == "math"


def test_place(tmp_path):
    """What this machine lacks is a list, not an error: the same layout is planned here and run elsewhere."""
    here = SHIPPED[0].parent / "quickstart.yaml"
    assert layout.check_place(load(here, [f"run.folder={tmp_path}/new"])) == []
    missing = load(here, ["data.source=text", "data.path=nowhere/*.txt", f"run.folder={tmp_path}"])
    (note,) = layout.check_place(missing)
    assert note.startswith("override data.path=nowhere/*.txt: data.path: 'nowhere/*.txt'; matches no file")
    (tmp_path / "file").write_text("")
    (note,) = layout.check_place(load(here, [f"run.folder={tmp_path}/file"]))
    assert "cannot be written" in note
    many = load(
        SHIPPED[0].parent / "llama3-8b-1x8-h100.yaml",
        ["cluster.gpus_per_node=512", "mesh.fsdp.size=512", "data.batch=512", f"run.folder={tmp_path}"],
    )
    assert any("cluster.gpus_per_node: 512; this machine has" in note for note in layout.check_place(many))


def test_a_disk_without_room_for_checkpoints(tmp_path, monkeypatch):
    """None fits: a run is refused. One does, and those that a run comes to hold do not: a warning."""
    free = [0]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))
    words = [f"run.folder={tmp_path}", "run.steps=10", "run.save_every=2"]
    x = load(SHIPPED[0].parent / "one-process.yaml", words)
    size = 12 * sum(
        math.prod(p.shape) * (x.model.fields["layers"] if s == "block" else 1)
        for s, params in layout.family(x)[0].params(layout.family(x)[1]).items()
        for p in params.values()
    )
    shown = show_size(size)
    for free[0], refused, warned in ((size - 1, 1, 0), (size, 0, 1), (5 * size - 1, 0, 1), (5 * size, 0, 0)):
        assert (len(layout.check_place(x)), len(layout.room_notes(x))) == (refused, warned), free
    free[0] = 2 * size
    assert layout.room_notes(x) == [
        f"override run.folder={tmp_path}: run.folder: '{tmp_path}'; 5 checkpoints of {shown} do not fit: "
        f"{tmp_path} has {show_size(2 * size)} free; run.keep removes old ones"
    ]
    # With the last one kept two are there at a time, and step 4 where each fourth step stays.
    for keep, count in (("{last: 1}", 2), ("{last: 1, every: 4}", 3), ("{last: 8}", 5)):
        x = load(SHIPPED[0].parent / "one-process.yaml", [*words, f"run.keep={keep}"])
        free[0] = count * size
        assert layout.room_notes(x) == [], keep
        free[0] -= 1
        assert len(layout.room_notes(x)) == 1, keep


# -------------------------------------------------------------------------------------------- the reference


def reference() -> list[list[str]]:
    """Rows of the tables of keys: key, type, unit, default, allowed, meaning."""
    lines = (SHIPPED[0].parent / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    return [[row[0].strip("`"), *row[1:]] for row in rows if len(row) == 6]


def test_own_hardware() -> None:
    x = loads(BASE.replace("h100-sxm", OWN))
    gpu = x.cluster.device
    assert (gpu.name, gpu.kind, gpu.capability, gpu.processors) == ("mine", "hopper", (9, 0), 100)
    assert (gpu.memory, gpu.memory_rate, gpu.peak) == (60 * 2**30, 3e12, {"bf16": 500e12})
    assert str(x.cluster.gpu) == "mine"
    assert layout.link_rate(x, "nvlink") == 300e9 and layout.link_rate(x, "ib") == 40e9
    over = loads(BASE.replace("h100-sxm", OWN), "x.yaml", ("cluster.links={ib: 20GB/s}",))
    assert layout.link_rate(over, "ib") == 20e9 and layout.link_rate(over, "nvlink") == 300e9


def test_the_reference_has_every_key_once():
    keys = [row[0] for row in reference()]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(layout.schema_keys())


def test_the_reference_tells_types_and_defaults():
    x = loads(
        "model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 256}\n"
        "data: {seq: 8, batch: 8}\nrun: {steps: 7}\n"
    )
    types = {"whole number": int, "number": float, "word": str, "true or false": bool}
    checked = 0
    for key, kind, _, default, _, _ in reference():
        value: object = x
        for part in key.split("."):
            value = getattr(value, part, None)
        if kind in types and value is not None:
            assert type(value) is types[kind], key
        if (
            kind in types
            and default not in ("required", "null")
            and " " not in default
            and "." not in key.split(".")[1:]
        ):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if (
                re.fullmatch(r"[a-z0-9.\-]+", default)
                and value is not None
                and default not in ("gpus_per_node", "run.steps")
            ):
                assert default == shown, key
                checked += 1
        if default == "null" and key != "model.family":
            assert value is None, key
    assert checked > 30


WORDS = [row for row in reference() if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*(, [a-z0-9-]+)+(, null)?", row[4])]


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row[0])
def test_the_reference_lists_every_word(row):
    """Where the legal values are words, the message of a wrong one lists the same words."""
    key, words = row[0], set(row[4].split(", ")) - {"null"}
    if key in ("mesh", "cluster.links"):
        assert words == set(DIMS if key == "mesh" else LINKS)
        return
    message = fault(BASE, (f"{key}=zzz",))
    assert words <= set(re.findall(r"[a-z0-9.-]+", message.partition("; ")[2])), message


def test_the_layouts_in_the_reference_load():
    text = (SHIPPED[0].parent / "README.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    whole = [b for b in blocks if "\nrun:" in b]
    assert whole
    for block in whole:
        loads(block, "README.md")


def test_an_attention_kernel_that_needs_a_gpu_is_refused_on_a_cpu() -> None:
    text = """
model: {family: llama, layers: 1, embed: 32, heads: 4, mlp: 64, vocab: 64}
data: {source: synthetic, seq: 8, batch: 1}
run: {steps: 1}
"""
    assert loads(text, "x.yaml", ["kernels.attention=flash"]).kernels.attention == "flash"  # torch's CPU kernel
    with pytest.raises(LayoutError, match=r"kernels.attention: 'cudnn' does not run on a CPU; set .* auto or math$"):
        loads(text, "x.yaml", ["kernels.attention=cudnn"])
