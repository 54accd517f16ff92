"""What processes really do beside what `dtrain plan` says of them: every collective and its bytes, and the bytes held.

`python bench/trust.py [--only NAME...] [--json]`. Small layouts of every dim, family, schedule and way to recompute
train three steps over gloo, a process a rank, on the code of `dtrain run`, uncompiled. During the second step each rank
notes the collectives and transfers that torch is asked for, and after every action the storages that are alive; both
are compared with the ledger and with the memory of the same plan. A layout is lowered once, and its ranks are forked;
but the last rank lowers for itself, as in a run, and the hashes of its graphs are compared with those of the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import layout, plan, train
from dtrain.plan import Plan, footprint
from dtrain.plan.ledger import ledger
from dtrain.program import interpret
from dtrain.program.lower import Job, Program, lower
from dtrain.program.update import State
from dtrain.rank import Rank
from dtrain.torch_private import storage_key

TP = "vocab: tp, heads: tp, mlp: tp"
MODELS = {
    "llama": "family: llama, layers: 4, embed: 32, heads: 4, kv_heads: 2, mlp: 48, vocab: 131",
    "gpt2": "family: gpt2, layers: 4, embed: 32, heads: 4, vocab: 131, positions: 16, dropout: 0.1",
    "bert": "family: bert, layers: 4, embed: 32, heads: 4, vocab: 131, positions: 16, dropout: 0.1",
    "my_model": "file: my_model.py, layers: 4, embed: 32, heads: 4, kv_heads: 2, mlp: 48, vocab: 131",
}
ZERO1 = "shard.optimizer={embed: dp}"
FSDP = "shard.grads={embed: fsdp}"
# name -> the family, the mesh (outermost first) and overrides
LAYOUTS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "dp": ("llama", "dp2", ("run.remat=none",)),
    "ZeRO-1, tp, whole sequences": ("gpt2", "dp2 tp2", (ZERO1, "shard.compute.res_seq=[]")),
    "ZeRO-2": ("bert", "dp2", (ZERO1, "shard.grads={embed: dp}", "kernels.loss_chunks=2")),
    "fsdp, keep use": ("llama", "fsdp2", (FSDP, "unshard.keep=use", "model.tied=true")),
    "fsdp, keep forward": ("bert", "fsdp2", ("unshard.keep=forward", "run.remat=full")),
    "fsdp, keep step": ("gpt2", "fsdp2", (FSDP, "unshard.keep=step", "run.remat=[matmul, attention]")),
    "hsdp, tp": ("llama", "dp2 fsdp2 tp2", (FSDP, ZERO1)),
    "tp, ranks share KV heads": ("llama", "tp4", ("run.remat=full",)),
    "tp, own model": ("my_model", "tp2", ("run.remat=[gathered, reduced]",)),
    "1f1b, tp": ("llama", "pp2 tp2", ("model.tied=true",)),
    "gpipe, ZeRO-2": ("gpt2", "pp2 dp2", ("pipeline.schedule=gpipe", ZERO1, "shard.grads={embed: dp}")),
    "interleaved, dp": ("gpt2", "pp2 dp2", ("pipeline={schedule: interleaved, chunks: 2}", "model.tied=true")),
    "zero-bubble, fsdp": ("bert", "pp2 fsdp2", (FSDP, "pipeline.schedule=zero-bubble", "unshard.keep=use")),
    "zbv, tp": ("llama", "pp2 tp2", ("pipeline.schedule=zbv", "run.remat=none")),
    "uneven stages, dp, tp, a budget": (
        "llama",
        "pp2 dp2 tp2",
        ("pipeline.layers_per_stage=[1, 3]", "run.remat={budget: 60KiB}"),
    ),
}
KINDS = ("parameters", "gradients, buffers", "optimizer", "saved", "gathered")  # of memory, that are compared
SECONDS = 120  # that a layout may take


def make(family: str, mesh: str, more: Sequence[str], folder: str) -> layout.Layout:
    """A layout on a mesh written `dp2 tp2`, every axis on the dims that it usually has."""
    sizes = {word[:-1]: int(word[-1]) for word in mesh.split()}
    heads = TP if family in ("gpt2", "bert") else f"{TP}, kv_heads: tp"
    params = [heads] * ("tp" in sizes) + ["layers: pp"] * ("pp" in sizes)
    data = [d for d in sizes if d in ("dp", "fsdp")]
    compute = params + ["res_seq: tp"] * ("tp" in sizes) + [f"batch: [{', '.join(data)}]"] * bool(data)
    params += ["embed: fsdp"] * ("fsdp" in sizes)
    world = torch.Size(sizes.values()).numel()
    text = f"""
cluster: {{gpus_per_node: {world}}}
mesh: {{{", ".join(f"{d}: {{size: {n}}}" for d, n in sizes.items())}}}
shard: {{params: {{{", ".join(params)}}}, compute: {{{", ".join(compute)}}}}}
model: {{{MODELS[family]}}}
optim: {{lr: 0.001, schedule: constant}}
data: {{source: synthetic, seq: 16, batch: 8, microbatch: 1}}
run: {{steps: 3, compile: off, folder: {folder}}}
"""
    return layout.loads(text, str(Path(__file__).parent.parent / "layouts" / "trust.yaml"), more)


# ------------------------------------------------------------------------------------------------- what is done


Calls = Counter[tuple[str, str, int]]  # how often: op, group and bytes of the whole tensor


class Recorder(TorchDispatchMode):
    """Notes every collective and transfer that torch is asked for: its name, its group's and the whole tensor's
    bytes. `reading` are the inputs of those that have not been waited for, which a device holds until then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Calls = Counter()
        self.reading: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].partition(".")[0]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            whole = args[0].numel() * args[0].element_size() * (args[1] if name.startswith("all_gather") else 1)
            self.seen[name, str(args[-1]), whole] += 1
        elif func.namespace == "c10d":
            whole = sum(x.numel() * x.element_size() for x in args[0])
            self.seen[name.rstrip("_"), "pp", whole] += 1
        out = func(*args, **(kwargs or {}))
        if name == "wait_tensor":
            self.reading.pop(storage_key(args[0]), None)
        elif func.namespace == "_c10d_functional" and name != "all_reduce":  # that one works on a copy
            self.reading[storage_key(out)] = args[0]
        return out


def storages(*tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each piece of memory that the tensors lie in; 0-dim tensors left out."""
    return {storage_key(x): x.untyped_storage().nbytes() for group in tensors for x in group if x.ndim}


def holds(slots: Any, state: State, reading: Iterable[Tensor] = ()) -> dict[str, int]:
    """Bytes that a rank holds in a step, by the kinds of `dtrain.plan.footprint`, each piece of memory once. `reading`
    is what collectives in flight still read."""
    rest = storages(state.weights.rest.values())
    masters = storages(state.weights.masters.values())
    moments = storages(state.moments.exp_avg, state.moments.exp_avg_sq)
    saved = storages(*slots.saved.values())
    batch = storages(*slots.batches.values())
    gathered = storages(*slots.params.values())
    flights = [flight for (what, _, _), flight in slots.flying.items() if what in ("params", "grads")]
    border = storages(
        slots.act.values(),
        slots.grad.values(),
        [x[1] for k, x in slots.flying.items() if len(x) == 2 and k[0] not in ("params", "grads")],
    )
    sums = storages(slots.accumulated.values(), slots.reduced.values(), *flights, reading)

    def total(x: Mapping[int, int], *but: Mapping[int, int]) -> int:
        return sum(n for k, n in x.items() if not any(k in b for b in but))

    return {
        "parameters": total(rest),
        "optimizer": total(masters, rest) + total(moments),
        "gradients, buffers": total(sums, rest, border),
        "saved": total(saved, batch, gathered),
        "gathered": total(gathered, rest),
        "carried": total(border, saved),
    }


def watched(made: Plan, program: Program, rank: int, port: int, folder: str, answer: Any) -> None:
    """Train as one rank of a layout, and answer with what its second step did and held. In a process of its own, whose
    copies of `train` and `interpret` tell of the step."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    pp = made.job.mesh.coordinates(rank).get("pp", 0)
    recorder, said, slots, alike = Recorder(), list(footprint.held(made, program, pp)), [], []
    most: dict[str, list[int]] = {kind: [0, 0, 0] for kind in KINDS}  # said and held, and the worst difference
    begin, make_slots = train.training_step, interpret._Slots

    def step(r: train.Run, number: int, state: State) -> Any:
        if number == 3:
            recorder.__exit__(None, None, None)
        if number != 2:
            return begin(r, number, state)
        recorder.__enter__()
        given, empty = begin(r, number, state)

        def watch(position: int, action: object) -> None:
            if position:
                got, want = holds(slots[-1], state, recorder.reading.values()), said[position - 1].after
                for kind, (one, other, worst) in most.items():
                    a, b = sum(want[word] for word in kind.split(", ")), got[kind]
                    most[kind] = [max(one, a), max(other, b), max(worst, abs(a - b))]

        return dataclasses.replace(given, watch=watch), empty

    def keep(*args: Any) -> Any:
        slots.append(make_slots(*args))
        return slots[-1]

    def lowered(job: Job) -> Program:
        assert job == made.job
        own = lower(job) if rank == made.job.mesh.world - 1 else program
        alike.append(own.hashes() == program.hashes())
        return own

    train.training_step, train.lower, interpret._Slots = step, lowered, keep  # type: ignore[assignment,misc]
    try:
        train.train(made.layout, Rank(rank, made.job.mesh.world, rank, "cpu", "gloo"), quiet=True)
        issued = [[*key, n] for key, n in sorted(recorder.seen.items())]
        answer.send({"issued": issued, "memory": most, "alike": all(alike)})
    except BaseException as error:
        answer.send({"error": f"rank {rank}: {type(error).__name__}: {error}"})
        raise


# ------------------------------------------------------------------------------------------------- side by side


def said_calls(made: Plan, program: Program, rank: int) -> Calls:
    """The ledger of a rank, as a Recorder would see it."""
    said: Calls = Counter()
    for e in ledger(made, program, made.job.mesh.coordinates(rank).get("pp", 0)):
        said[e.op, e.group, e.bytes] += e.count
    return said


def differing(said: Calls, issued: Calls) -> int:
    """How many calls of either side the other lacks."""
    return (said - issued).total() + (issued - said).total()


def compare(name: str) -> dict[str, Any]:
    """A layout's row: collectives and bytes of all ranks, said and issued, how many of either the other side lacks, and
    of memory by kind the most bytes of any rank, said and held, with the worst difference after any action; `alike`
    says that a run lowers to the plan's graphs."""
    folder = tempfile.mkdtemp()
    try:
        family, mesh, more = LAYOUTS[name]
        made = plan.plan(make(family, mesh, more, folder))
        program = lower(made.job)
        found = processes(made, program, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {"layout": name, "family": family, "mesh": mesh, "ranks": len(found)}
    said = [said_calls(made, program, rank) for rank in range(len(found))]
    issued = [Counter({(op, group, size): n for op, group, size, n in got["issued"]}) for got in found]
    for side, calls in (("said", sum(said, Calls())), ("issued", sum(issued, Calls()))):
        row[side] = calls.total()
        row[f"{side}_bytes"] = sum(n * size for (_, _, size), n in calls.items())
    row["differing"] = sum(map(differing, said, issued))
    row["alike"] = all(got["alike"] for got in found)
    row["memory"] = {kind: [max(g["memory"][kind][i] for g in found) for i in range(3)] for kind in KINDS}
    return row


def processes(made: Plan, program: Program, folder: str) -> list[dict[str, Any]]:
    """What every rank answers. Raises RuntimeError with the first rank's words where one fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(made.job.mesh.world)]
    ranks = [
        context.Process(target=watched, args=(made, program, rank, port, folder, answer))
        for rank, (_, answer) in enumerate(ends)
    ]
    for process, (_, answer) in zip(ranks, ends, strict=True):
        process.start()
        answer.close()
    try:
        found = []
        for rank, (end, _) in enumerate(ends):
            if not end.poll(SECONDS):
                raise RuntimeError(f"rank {rank} has not answered for {SECONDS} s")
            found.append(end.recv())
            if "error" in found[-1]:
                raise RuntimeError(found[-1]["error"])
        return found
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What gloo processes do and hold, beside what plan says of them.")
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    torch.set_num_threads(1)
    importlib.import_module("torch.utils.tensorboard")  # ranks log with it: imported once, before they are forked

    rows = []
    if not asked.json:
        print(f"torch {torch.__version__}, Python {platform.python_version()}; calls and bytes of all ranks in a step;")
        print("memory of the rank with most: KiB said, held / said; worst: difference after any action, in KiB")
        print(f"{'layout':32}{'family':9}{'mesh':16}{'said':>6}{'issued':>7}{'bytes':>11}{'issued':>7}", end="")
        print("".join(f"{kind:>20}" for kind in KINDS) + f"{'worst':>7}")
    for name in asked.only:
        rows.append(compare(name))
        if not asked.json:
            print(line(rows[-1]), flush=True)
    if asked.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"versions": versions, "rows": rows}, indent=1))


def line(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    calls = f"{row['said']:>6}{row['issued']:>7}{row['said_bytes']:>11,}{row['issued_bytes'] / row['said_bytes']:>7.3f}"
    memory = "".join(f"{a / 1024:>13.1f}{b / a if a else 1:>7.3f}" for a, b, _ in row["memory"].values())
    worst = max(c for _, _, c in row["memory"].values()) / 1024
    differs = f"  {row['differing']} calls differ" if row["differing"] else ""
    differs += "" if row["alike"] else "  graphs differ"
    return f"{row['layout']:32}{row['family']:9}{row['mesh']:16}{calls}{memory}{worst:>7.1f}{differs}"


if __name__ == "__main__":
    main()
