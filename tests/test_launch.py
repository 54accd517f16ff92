"""Starting, watching and ending ranks. The real processes talk over gloo; what they do is a small
stand-in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from dtrain.launch import Rank
from dtrain.layout import Layout, LayoutError

LAYOUT = """
cluster: {{nodes: {nodes}, gpus_per_node: {each}, gpu: cpu}}
mesh: {{dp: {{size: {world}}}}}
shard: {{compute: {{batch: dp}}}}
model: {{family: llama, layers: 1, embed: 8, heads: 2, mlp: 8, vocab: 11}}
data: {{source: synthetic, seq: 8, batch: {world}}}
run: {{steps: {steps}, folder: {folder}, timeouts: {{start: 60, step: {limit}, save: 60}}}}
"""


def layout_file(tmp_path: Path, world: int, nodes: int = 1, steps: int = 6, limit: float = 60) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(
        LAYOUT.format(
            nodes=nodes, each=world // nodes, world=world, steps=steps, folder=tmp_path / "run", limit=limit
        )
    )
    return str(path)


# What the ranks do: a loop of all-reduces over gloo; the fault is named by the environment.


def loop(layout: Layout, rank: Rank, *, quiet: bool) -> None:
    import torch
    import torch.distributed as dist

    fault, _, who = os.environ.get("FAULT", "").partition(":")
    mine = who == str(rank.rank)
    rank.beat(0, "start")
    dist.init_process_group("gloo")
    for step in range(1, layout.run.steps + 1):
        rank.beat(step, "B(1, 0)")
        time.sleep(0.2 if fault == "slow" else 0)
        if mine and step == 3:
            if fault == "raise":
                raise ValueError("a bad\nvalue")
            if fault == "user":
                raise LayoutError("x.yaml:1: data.path: no such file")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exit":
                os._exit(7)
            if fault == "sleep":
                time.sleep(600)
            if fault == "term":
                os.kill(os.getpid(), signal.SIGTERM)
        rank.beat(step, "REDUCE(1)")
        if mine and step == 3 and fault == "sleep-late":
            time.sleep(600)
        flag = torch.tensor([float(rank.stopping())])
        dist.all_reduce(flag)
        if flag.item():
            break
    rank.beat(step, "save")
    Path(layout.run.folder or "", f"rank{rank.rank}.step").parent.mkdir(exist_ok=True)
    Path(layout.run.folder or "", f"rank{rank.rank}.step").write_text(str(step))
    dist.destroy_process_group()
