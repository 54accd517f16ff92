"""What the links of a cluster reach, measured, and a `links:` line of it for a layout's `cluster` section.

`python bench/links.py [--ranks N]` on one machine (gloo between processes on CPUs, NCCL between GPUs), or on several

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 bench/links.py

All-reduce, all-gather and a send are timed over sizes from 1 kB: inside each node, all nodes at once, and between nodes
over the ranks of equal number on each, all of them at once, since that is how GPUs share a node's NICs. A time is the
longest of any rank, the median of rounds. Each operation is fitted by alpha + bytes / bandwidth, where bytes are those
that a rank sends in a ring (`dtrain.plan.ledger.sent`), by least squares of relative errors.

The rate of the printed line is not that bandwidth but the link's own: `dtrain plan` takes the share of it that
collectives reach on this class of GPU (`dtrain.plan.seconds.CONSTANTS`), so with the line it predicts the measured
all-gather.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from dtrain.hardware import CLASSES, show_rate
from dtrain.plan.ledger import sent
from dtrain.plan.seconds import CONSTANTS
from dtrain.torch_private import gloo

OPS = ("all_reduce", "all_gather_into_tensor", "send")
PCIE = 64e9  # bytes/s of a generation 5 slot: what is faster inside a node is NVLink
ROUNDS, LEAST = 5, 0.02  # rounds that a median is of, and seconds that a round lasts at least


@dataclass(frozen=True)
class Point:
    """A measurement: `bytes` of the whole tensor, `wire` of them that a rank sends, and `seconds` of one call."""

    op: str
    bytes: int
    wire: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """seconds = alpha + wire / bandwidth; `worst` is the largest relative error of a point."""

    alpha: float
    bandwidth: float
    worst: float


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of relative errors, so that small sizes say the latency and large ones the bandwidth. Alpha is not
    negative."""
    rows = torch.tensor([[1 / p.seconds, p.wire / p.seconds] for p in points], dtype=torch.float64)
    wanted = torch.ones(len(points), 1, dtype=torch.float64)
    scale = rows.norm(dim=0)
    alpha, slope = (torch.linalg.lstsq(rows / scale, wanted).solution[:, 0] / scale).tolist()
    if alpha < 0 or slope <= 0:
        alpha, slope = 0.0, float(rows[:, 1].sum() / rows[:, 1].square().sum())
    return Fit(alpha, 1 / slope, max(abs((alpha + slope * p.wire) / p.seconds - 1) for p in points))


# ------------------------------------------------------------------------------------------------------- measuring


def sizes(most: int) -> Iterator[int]:
    """Bytes from 1 kB to `most`, each four times the one before."""
    size = 1024
    while size <= most:
        yield size
        size *= 4


def measure(group: Any, members: Sequence[int], device: torch.device, most: int) -> list[Point]:
    """Every operation at every size over a process group of these ranks, at the same time as its siblings. Called by
    all ranks of the world, since times are agreed on over it."""
    ranks, me = len(members), members.index(dist.get_rank())
    pair, c10d, found = me - me % 2, torch.ops._c10d_functional, []  # the collectives that graphs have
    for op in OPS:
        for size in sizes(most):
            whole = torch.zeros(-(-size // (4 * ranks)) * ranks, device=device)  # in fp32, cut evenly
            part = whole[: whole.numel() // ranks]

            def call(whole: torch.Tensor = whole, part: torch.Tensor = part, op: str = op) -> None:
                if op == "all_reduce":
                    c10d.wait_tensor(c10d.all_reduce_(whole, "sum", group.group_name))
                elif op == "all_gather_into_tensor":
                    c10d.wait_tensor(c10d.all_gather_into_tensor(part, ranks, group.group_name))
                elif pair + 1 < ranks:  # neighbours in pairs; the last of an odd number has none
                    (dist.send if me == pair else dist.recv)(whole, members[pair + (me == pair)], group=group)

            bytes = 4 * whole.numel()
            found.append(Point(op, bytes, sum(sent(op, bytes, [ranks])), seconds_of(call, device)))
    return found


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, of the rank that takes longest."""
    timed(call, 2, device)  # the first calls set up connections
    times = max(1, min(1000, round(LEAST / max(1e-7, timed(call, 3, device) / 3))))
    return statistics.median(timed(call, times, device) / times for _ in range(ROUNDS))


def timed(call: Callable[[], None], times: int, device: torch.device) -> float:
    ended = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    ended()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


# ---------------------------------------------------------------------------------------------------------- the line


def kind_of(device: torch.device) -> str:
    """The class of GPU whose constants plan takes."""
    if device.type == "cpu":
        return "cpu"
    major = torch.cuda.get_device_capability(device)[0]
    return next((kind for kind, c in CLASSES.items() if c is not None and c[0] == major), "hopper")


def link_and_rate(kind: str, across: bool, bandwidth: float) -> tuple[str, float]:
    """A link's name and own rate, where all-gathers over it reach `bandwidth` bytes/s."""
    if across:
        return "ib", bandwidth / CONSTANTS[kind].net
    rate = bandwidth / CONSTANTS[kind].link
    return "loopback" if kind == "cpu" else "nvlink" if rate > PCIE else "pcie", rate


def line(rates: Mapping[str, float]) -> str:
    """What to paste under `cluster:`, three digits each."""
    words = [f"{name}: {show_rate(float(f'{rate:.3g}'))}" for name, rate in rates.items()]
    return f"links: {{{', '.join(words)}}}"


def work(most: int, as_json: bool) -> None:
    """Measure as one rank of a world that is there; rank 0 prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    inside = [list(range(first, first + each)) for first in range(0, world, each)] if each > 1 else []
    across = [list(range(local, world, each)) for local in range(each)] if world > each else []
    kind, rates, out = kind_of(device), {}, []
    for where, groups in (("inside a node", inside), ("across nodes", across)):
        made = [(members, dist.new_group(members)) for members in groups]
        mine = next(((members, g) for members, g in made if rank in members), None)
        if mine is None:
            continue
        points = measure(mine[1], mine[0], device, most)
        fits = {op: fit([p for p in points if p.op == op]) for op in OPS}
        link, rate = link_and_rate(kind, where == "across nodes", fits["all_gather_into_tensor"].bandwidth)
        rates[link] = rate
        out.append({"where": where, "ranks": len(mine[0]), "link": link, "points": points, "fits": fits})
    if rank:
        return
    if as_json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        plain = [
            o | {"points": [asdict(p) for p in o["points"]], "fits": {k: asdict(f) for k, f in o["fits"].items()}}
            for o in out
        ]
        print(json.dumps({"versions": versions, "kind": kind, "measured": plain, "line": line(rates)}, indent=1))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {world} ranks over {dist.get_backend()}")
    for o in out:
        print(f"\n{o['where']}, {o['ranks']} ranks a group\n{'operation':24}{'bytes':>14}{'us':>12}{'GB/s sent':>11}")
        for p in o["points"]:
            print(f"{p.op:24}{p.bytes:>14,}{p.seconds * 1e6:>12.1f}{p.wire / p.seconds / 1e9:>11.3f}")
        for op, f in o["fits"].items():
            print(f"{op}: {f.alpha * 1e6:.1f} us + bytes / {f.bandwidth / 1e9:.3g} GB/s, at worst {f.worst:.0%} off")
    print(f"\nunder cluster: in a layout (rates such that plan predicts these all-gathers, with its share for {kind}):")
    print(f"  {line(rates)}")


# ------------------------------------------------------------------------------------------------------- processes


def join(backend: str, local: int, most: int, as_json: bool) -> None:
    if backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if backend == "nccl" else gloo())
    try:
        work(most, as_json)
    finally:
        dist.destroy_process_group()


def one_of(rank: int, ranks: int, port: int, backend: str, most: int, as_json: bool) -> None:
    here = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    join(backend, rank, most, as_json)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure links, and print a links: line for a layout.")
    parser.add_argument("--ranks", type=int, help="processes, where no launcher says (default: the GPUs, or 2)")
    parser.add_argument("--most", type=int, help="bytes of the largest tensor (default: 256 MiB on GPUs, 16 on CPUs)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus else "gloo"
    most = asked.most or (256 << 20 if gpus else 16 << 20)
    if "RANK" in os.environ:
        join(backend, int(os.environ.get("LOCAL_RANK", 0)), most, asked.json)
        return
    ranks = asked.ranks or gpus or 2
    if ranks < 2 or (gpus and ranks > gpus):
        parser.error(f"--ranks {ranks}: needs from 2 to as many as there are GPUs ({gpus}); a link has two ends")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn" if gpus else "fork")  # CUDA wants new processes
    given = [(rank, ranks, port, backend, most, asked.json) for rank in range(ranks)]
    processes = [context.Process(target=one_of, args=each) for each in given]
    for p in processes:
        p.start()
    running = processes
    while running and not any(p.exitcode for p in processes):
        wait([p.sentinel for p in running])
        running = [p for p in running if p.is_alive()]
    for p in processes:  # of a world that has lost a rank, the others would wait for it
        p.kill()
        p.join()
    if any(p.exitcode for p in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
