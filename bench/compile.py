"""What compiling costs: `python bench/compile.py`.

Each line is a start of a small Llama in processes of its own. Cold: Inductor's cache is a new, empty folder. Time must
not grow with depth, for every layer calls the same graphs; a second start must compile nothing; of two ranks each must
compile a part and load the rest. A compilation is a miss of Inductor's graph cache; C++ compilers are counted by a
wrapper around the one that Inductor uses. CPU seconds are those of the whole process with its children, imports
included. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEPTHS = (4, 20, 80)
TP = "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"


def layout_text(layers: int, ranks: int) -> str:
    """The layout that is started: tp over the ranks."""
    return f"""
cluster: {{gpus_per_node: {ranks}}}
mesh: {f"{{tp: {{size: {ranks}}}}}" if ranks > 1 else "{}"}
shard: {f"{{params: {{{TP}}}, compute: {{{TP}, res_seq: tp}}}}" if ranks > 1 else "{}"}
model: {{family: llama, layers: {layers}, embed: 64, heads: 4, kv_heads: 2, mlp: 128, vocab: 256}}
data: {{source: synthetic, seq: 32, batch: 2}}
run: {{steps: 1, compile: on, folder: unused}}
"""


def child(layers: int, rank: int, ranks: int) -> dict[str, Any]:
    """One rank: get as far as `dtrain run` does before its first step."""
    import torch
    from torch._dynamo.utils import counters

    from dtrain import data, layout, metrics, plan, train
    from dtrain.rank import Rank

    torch.set_num_threads(1)
    began = time.perf_counter()
    made = plan.plan(layout.loads(layout_text(layers, ranks)))
    planned = time.perf_counter() - began
    source = data.open_source(train.data_config(made))
    with tempfile.TemporaryDirectory() as folder:
        config = metrics.LogConfig(Path(folder), 1, 1, False, True)
        with metrics.open_log(config) as log:
            began = time.perf_counter()
            r = train.prepare(made, Rank(rank, ranks, rank, "cpu", "gloo"), source, log)
            prepared = time.perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    compiled = sum(r.calls[k] is not g.module for k, g in graphs(r.program).items())
    return {
        "plan_s": planned,
        "lower_s": r.program.seconds,
        "compile_s": prepared - r.program.seconds,
        "cpu_s": sum(u.ru_utime + u.ru_stime for u in used),
        "graphs": compiled,
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
    }


def graphs(program: Any) -> dict[tuple[str, str], Any]:
    return {(s.name, k): g for s in program.segments.values() for k, g in s.graphs.items()}


def start(layers: int, ranks: int, cache: Path) -> dict[str, Any]:
    """Start `ranks` processes on this cache; the slowest one's times, and compilations of all."""
    from dtrain.torch_private import cpp_compiler

    compiler = cpp_compiler()
    if compiler is None:
        raise SystemExit("bench/compile.py: there is no C++ compiler (g++ or clang++)")
    # The same place for all starts on a cache: Inductor's keys hold the compiler's path.
    calls, wrapper = cache / "calls", cache / "c++"
    calls.write_text("")
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {compiler} "$@"\n')
    wrapper.chmod(0o755)
    env = {
        **os.environ,
        "CXX": str(wrapper),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, __file__, "--child", str(layers), str(rank), str(ranks)]
        own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    said = [p.communicate()[0] for p in processes]
    if any(p.returncode for p in processes):
        raise SystemExit(f"bench/compile.py: a start with {layers} layers and {ranks} ranks failed")
    each = [json.loads(text.splitlines()[-1]) for text in said]
    # Not counted: the version, and a header that is preprocessed (-E) to hash it.
    built = sum(" -o " in line and " -E " not in line for line in calls.read_text().splitlines())
    out = {k: max(e[k] for e in each) for k in ("plan_s", "lower_s", "compile_s", "cpu_s", "graphs")}
    by_rank = [e["compiled"] for e in each]
    return {**out, "compiled": sum(by_rank), "compiled_by_rank": by_rank, "compiler_calls": built}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def measure(depths: Sequence[int]) -> dict[str, Any]:
    """All starts: cold at each depth, again at the last one, cold with two ranks."""
    rows: dict[str, Any] = {}
    for layers in depths:
        with tempfile.TemporaryDirectory() as cache:
            rows[f"{layers} layers, cold"] = start(layers, 1, Path(cache))
            if layers == depths[-1]:
                rows[f"{layers} layers, again"] = start(layers, 1, Path(cache))
    with tempfile.TemporaryDirectory() as cache:
        rows[f"{depths[0]} layers, 2 ranks, cold"] = start(depths[0], 2, Path(cache))
    return rows


def verdict(rows: Mapping[str, Any], depths: Sequence[int]) -> dict[str, Any]:
    """What the numbers are to show."""
    first, last = (rows[f"{n} layers, cold"] for n in (depths[0], depths[-1]))
    again, shared = rows[f"{depths[-1]} layers, again"], rows[f"{depths[0]} layers, 2 ranks, cold"]
    seconds = [r["plan_s"] + r["lower_s"] + r["compile_s"] for r in (first, last)]
    return {
        "deepest_over_shallowest": seconds[1] / seconds[0],
        "deepest_over_shallowest_cpu": last["cpu_s"] / first["cpu_s"],
        "graphs_at_each_depth": [rows[f"{n} layers, cold"]["graphs"] for n in depths],
        "compiled_again": again["compiled"] + again["compiler_calls"],
        "compiled_by_two_ranks_over_graphs": shared["compiled"] / shared["graphs"],
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, metavar="LAYERS")
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(args)
    if asked.child:
        print(json.dumps(child(*asked.child)))
        return
    import torch

    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    rows = measure(asked.depths)
    found = verdict(rows, asked.depths)
    if asked.json:
        print(json.dumps({"machine": machine, "starts": rows, "verdict": found}))
        return
    print("  ".join(f"{k} {v}" for k, v in machine.items()))
    for name, r in rows.items():
        print(
            f"{name:<26} plan {r['plan_s']:5.2f} s  lower {r['lower_s']:5.2f} s  compile {r['compile_s']:6.2f} s  "
            f"({r['cpu_s']:.1f} s of CPU)  "
            f"{r['graphs']} graphs, {r['compiled']} compiled ({' + '.join(map(str, r['compiled_by_rank']))}), "
            f"{r['compiler_calls']} C++ compilations"
        )
    print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
