"""Whether overlap pays: `python bench/prefetch.py [--rounds N] [--ranks N] [--json]`.

A small FSDP model on real gloo processes of this machine, uncompiled. Every round runs one step under each variant,
in turn: gathers started 0, 1 or 2 units ahead, and reductions waited for at once or one in flight. Each variant is
compared with the first in the same round, so that what else the machine does cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dtrain import layout, plan, verify
from dtrain.mesh import Limits, join_world
from dtrain.program.compile import uncompiled
from dtrain.program.interpret import Place, Step, bind, initial_weights, publish, run
from dtrain.program.lower import lower
from dtrain.program.schedule import defer

VARIANTS = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1))  # units gathered ahead, reductions in flight
TEXT = """
cluster: {{gpus_per_node: {ranks}}}
mesh: {{fsdp: {{size: {ranks}}}}}
shard: {{params: {{embed: fsdp}}, compute: {{batch: fsdp}}, grads: {{embed: fsdp}}}}
model: {{family: llama, layers: 4, embed: 256, heads: 4, mlp: 1024, vocab: 1024}}
data: {{source: synthetic, seq: 128, batch: {batch}, microbatch: 2}}
run: {{steps: 1}}
"""


def rank_of(rank: int, ranks: int, port: int, rounds: int, out: str) -> None:
    """One process; rank 0 writes the seconds of every step, by variant, to `out`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    text = TEXT.format(ranks=ranks, batch=4 * ranks)
    made = {d: plan.plan(layout.loads(text, overrides=[f"unshard.prefetch={d}"])) for d, _ in VARIANTS}
    first = made[0]
    program = lower(first.job)
    groups = join_world(first.job.mesh, [*program.groups(), "world"], rank, "gloo", "cpu", Limits(600, 600, 600))
    place, calls = Place(first.job.mesh, rank, groups, first.units[0]), uncompiled(program)
    batch = verify.random_batch(first, 0, 1)
    counts = first.job.module.counts(first.job.config, batch)
    step = Step(
        1,
        0,
        lambda mb: {k: v[list(plan.rows(first, place.at, mb))] for k, v in batch.items()},
        {k: v.float() for k, v in counts.items()},
        torch.ones(()),
    )
    bound = [bind(program, calls, place, defer(made[d].train[0], most)) for d, most in VARIANTS]
    seconds: list[list[float]] = [[] for _ in VARIANTS]
    with torch.no_grad():
        weights = publish(program, calls, place, initial_weights(program, place, 0))
        for number in range(rounds + 2):  # the first two warm up
            for i, b in enumerate(bound):
                dist.barrier()
                began = time.perf_counter()
                run(b, weights, step)
                dist.barrier()
                if number >= 2:
                    seconds[i].append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "seconds.json")
        mp.spawn(rank_of, (asked.ranks, port, asked.rounds, out), nprocs=asked.ranks)
        seconds = json.loads(Path(out).read_text())
    rows = []
    for (ahead, flying), mine in zip(VARIANTS, seconds, strict=True):
        ratios = [a / b for a, b in zip(mine, seconds[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"prefetch": ahead, "in_flight": flying, "ms": statistics.median(mine) * 1e3}
        rows.append(row | {"ratio": middle, "ratio_quarter": low, "ratio_three_quarters": high})
    machine = f"{os.cpu_count()} cores, {platform.machine()} {platform.system()}, torch {torch.__version__}"
    if asked.json:
        print(json.dumps({"machine": machine, "ranks": asked.ranks, "rounds": asked.rounds, "variants": rows}))
        return
    print(f"{machine}; load {os.getloadavg()[0]:.1f}; {asked.ranks} gloo ranks, {asked.rounds} rounds")
    for r in rows:
        print(
            f"prefetch {r['prefetch']}, reductions in flight {r['in_flight']}: {r['ms']:.1f} ms a step, ratio "
            f"{r['ratio']:.3f} (middle half {r['ratio_quarter']:.3f} to {r['ratio_three_quarters']:.3f})"
        )


if __name__ == "__main__":
    main()
