"""The ledger is what real processes issue, op for op and byte for byte; links, levels and totals add up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dtrain import layout, plan
from dtrain.plan.ledger import Entry, by_dim, by_dim_and_phase, by_link, by_phase, graphs_run, ledger, levels, sent
from dtrain.program.lower import lower
from dtrain.program.schedule import Action


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def entries(family: str, mesh: str, *more: str, pp: int = 0) -> list[Entry]:
    made = tiny.make(family, mesh, more)
    return ledger(made, tiny.program(family, mesh, more), pp)


def row(e: Entry) -> tuple[Any, ...]:
    return (e.op, e.phase, e.segment, e.group, e.count, e.bytes, round(e.wire, 6))


# ------------------------------------------------------------------------------- against what processes really do


FEW = ("fsdp, keep use", "gpipe, ZeRO-2", "1f1b, tp")


@pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), pytest.param((), id="all", marks=pytest.mark.long)])
def test_processes_issue_and_hold_what_plan_says(names: tuple[str, ...]) -> None:
    """Gloo processes, op for op and byte for byte; what they hold after every action of a step; and the graphs that
    they lower to have the hashes of plan's."""
    bench = tiny.bench("trust")
    only = ["--only", *names] if names else []
    command = [sys.executable, str(tiny.LAYOUTS.parent / "bench" / "trust.py"), "--json", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["layout"] for row in rows] == list(names or bench.LAYOUTS)
    for row in rows:
        assert row["issued"] == row["said"] > 0 and row["issued_bytes"] == row["said_bytes"] and not row["differing"]
        assert row["alike"]
        assert all(a == b and not c for a, b, c in row["memory"].values()), row
        assert row["memory"]["saved"][0] > 0 and row["memory"]["gradients, buffers"][0] > 0


def test_every_dim_family_schedule_and_policy_is_among_them() -> None:
    layouts = tiny.bench("trust").LAYOUTS
    assert len(layouts) >= 10
    assert {word[:-1] for _, mesh, _ in layouts.values() for word in mesh.split()} == {"pp", "dp", "fsdp", "tp"}
    assert {family for family, _, _ in layouts.values()} == {"llama", "gpt2", "bert", "my_model"}
    text = " ".join(word for _, _, more in layouts.values() for word in more) + " schedule: 1f1b"
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        assert re.search(f"schedule(=|: ){schedule}", text)
    for said in ("remat=none", "remat=full", "remat=[", "remat={budget", "keep=use", "keep=forward", "keep=step"):
        assert said in text
    assert all(d in text for d in ("optimizer={embed: dp}", "grads={embed: dp}", "grads={embed: fsdp}", "res_seq=[]"))


def test_a_call_too_many_or_of_another_size_is_seen() -> None:
    made, program, bench = tiny.make("llama", "pp2 dp2"), tiny.program("llama", "pp2 dp2"), tiny.bench("trust")
    said = bench.said_calls(made, program, 0)
    op, group, size = next(iter(said))
    assert bench.differing(said, said) == 0
    assert bench.differing(said, said + Counter({(op, group, size): 1})) == 1
    assert bench.differing(said, said - Counter({(op, group, size): 1}) + Counter({(op, group, size + 4): 1})) == 2


# ---------------------------------------------------------------------------------------------- a whole small ledger


def test_one_process_has_nothing_to_say() -> None:
    assert entries("llama", "") == []


def test_data_parallel_by_hand() -> None:
    """One all-reduce of a unit's gradients (fp64: 8 bytes), one of the valid labels, one of norm, loss and stop."""
    tree = tiny.make("llama", "dp2").job
    parts = {s.name: s for s in tiny.program("llama", "dp2").segments.values()}
    n = {name: sum(torch.Size(p.local).numel() for p in s.stored.values()) for name, s in parts.items()}
    assert tree.layers == 2
    assert Counter(map(row, entries("llama", "dp2"))) == Counter(
        [
            ("all_reduce", "forward", "head", "dp", 1, 8, 8),
            *(
                (
                    "all_reduce",
                    "reduce",
                    s,
                    "dp/reduce",
                    2 if s == "block" else 1,
                    8 * n[s],
                    8 * n[s] * (1 + (s == "block")),
                )
                for s in n
            ),
            ("all_reduce", "update", "", "world", 1, 24, 24),
        ]
    )


def test_counts_follow_the_action_list() -> None:
    """FSDP gathers as often as UNSHARD runs; 8 sequences over 2 replicas in microbatches of 1 are 4."""

    def unshards(keep: str) -> dict[str, int]:
        found = entries("llama", "fsdp2", f"unshard.keep={keep}", "shard.grads={embed: fsdp}")
        assert {e.count for e in found if e.graph == "reduce_early" and e.segment == "head"} == {4}
        return {e.segment: e.count for e in found if e.phase == "unshard"}

    # The head's loss and gradient are one use, and embed's forward follows its backward at once three times.
    assert unshards("use") == {"embed": 5, "block": 16, "head": 4}
    assert unshards("forward") == {"embed": 1, "block": 8, "head": 4}
    assert unshards("step") == {"embed": 1, "block": 2, "head": 1}


def test_each_entry_names_the_model_line_that_asked() -> None:
    found = entries("llama", "tp2")
    assert all(e.line.startswith("llama.py:") for e in found if e.phase in ("forward", "backward"))
    lines = Path(tiny.LAYOUTS.parent / "dtrain/models/llama.py").read_text().splitlines()
    for e in found:
        if e.segment == "block" and e.line:
            assert "on.constrain" in lines[int(e.line.partition(":")[2]) - 1]


def test_transfers_are_booked_once_by_the_sender() -> None:
    """Both ends have 8 microbatches of 8 x 16 doubles each way; only the send is on this rank's wire."""
    for pp, what in ((0, "act"), (1, "grad")):
        found = {e.op: e for e in entries("llama", "pp2", pp=pp) if e.phase == "pipeline"}
        assert (found["send"].graph, found["send"].count, found["send"].wire) == (what, 8, 8 * 1024)
        assert (found["recv"].count, found["recv"].bytes, found["recv"].wire) == (8, 1024, 0)


def test_an_action_runs_the_graphs_of_its_kind() -> None:
    made = tiny.make("llama", "dp2", ("shard.optimizer={embed: dp}",))
    program = tiny.program("llama", "dp2", ("shard.optimizer={embed: dp}",))

    def of(action: Action) -> list[tuple[int, str]]:
        return graphs_run(program, made.units[0], action)

    assert of(Action("F", 1, 0)) == [(1, "forward")] and of(Action("W", 1, 0)) == [(1, "backward_weight")]
    assert of(Action("REDUCE", 2)) == [(2, "reduce")] and of(Action("REDUCE", 2, 0)) == [(2, "reduce_early")]
    assert of(Action("UPDATE")) == [(u, "publish") for u in (0, 1, 2, 3)]
    assert of(Action("FREE", 1)) == of(Action("SEND", 1, 0, 1, "act")) == []
    kinds = {a.kind for a in made.train[0] if of(a)}
    assert {"UNSHARD", "F", "B", "REDUCE", "UPDATE"} <= kinds


# --------------------------------------------------------------------------------------------------- links and totals


def test_the_ring() -> None:
    assert sent("all_gather_into_tensor", 800, [4]) == (600.0,)
    assert sent("all_reduce", 800, [4]) == (1200.0,)
    assert sent("send", 800, [2]) == (800.0,) and sent("recv", 800, [2]) == (0.0,)
    inner, outer = sent("reduce_scatter_tensor", 800, [2, 4])
    assert (inner, outer) == (400.0, 300.0) and inner + outer == sum(sent("reduce_scatter_tensor", 800, [8]))


WIDE = """
cluster: {nodes: 4, gpus_per_node: 8, gpu: h100-sxm}
mesh: {pp: {size: 2, link: ib}, dp: {size: 4, link: [nvlink, ib]}, tp: {size: 4, link: nvlink}}
shard:
  params:  {layers: pp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute: {layers: pp, batch: dp, res_seq: tp, vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
model: {family: llama, layers: 2, embed: 64, heads: 8, kv_heads: 2, mlp: 96, vocab: 1000, tied: true}
data: {source: synthetic, seq: 32, batch: 16, microbatch: 2}
run: {steps: 1, precision: bf16}
"""


def test_the_levels_of_groups() -> None:
    """Two tp groups of 4 share a node of 8, so 2 of dp's 4 are joined by NVLink."""
    lay = layout.loads(WIDE)

    def parts(group: str) -> list[tuple[str, str, int]]:
        return [(x.dim, x.link, x.ranks) for x in levels(lay, group)]

    assert parts("tp") == [("tp", "nvlink", 4)]
    assert parts("dp") == parts("dp/reduce") == [("dp", "nvlink", 2), ("dp", "ib", 2)]
    assert parts("dp.tp") == [("tp", "nvlink", 4), ("dp", "nvlink", 2), ("dp", "ib", 2)]
    assert parts("tp%2") == [("tp", "nvlink", 2)]
    assert parts("pp@0+1") == [("pp", "ib", 2)]
    assert parts("world") == [("tp", "nvlink", 4), ("dp", "nvlink", 2), ("dp", "ib", 2), ("pp", "ib", 2)]


def test_neighbours_on_one_node_and_on_two() -> None:
    lay = layout.loads(WIDE)
    assert layout.link_between(lay, "dp", (0, 1)) == "nvlink" and layout.link_between(lay, "dp", (1, 2)) == "ib"
    assert layout.levels(lay, "dp", 2) == (("nvlink", 2),)  # tp%2-like blocks: neighbours
    assert layout.levels(lay, "tp", 1) == ()
    # 3 replicas in nodes of 2 never fill whole nodes: all on the slower link.
    odd = WIDE.replace("nodes: 4, gpus_per_node: 8", "nodes: 3, gpus_per_node: 8")
    odd = odd.replace("dp: {size: 4, link: [nvlink, ib]}", "dp: {size: 3, link: [nvlink, ib]}").replace(
        "batch: 16", "batch: 12"
    )
    odd += "allow: [spans-two-levels, slow-inside-fast, link-leaves-domain]\n"
    assert layout.levels(layout.loads(odd), "dp", 3) == (("ib", 3),)


def test_totals_are_the_same_sum() -> None:
    made = plan.plan(layout.loads(WIDE))
    program = lower(made.job)
    for pp in range(2):
        found = ledger(made, program, pp)
        total = sum(e.wire for e in found)
        assert total > 0
        for totals in (by_dim(found), by_link(found), by_phase(found), by_dim_and_phase(found)):
            assert sum(totals.values()) == pytest.approx(total)
        assert set(by_link(found)) == {"nvlink", "ib"} and set(by_dim(found)) == {"pp", "dp", "tp"}
        assert {"tp%2", "pp@0+1", "dp", "tp", "world"} <= {e.group.partition("/")[0] for e in found}
        assert all(e.ranks == torch.Size([x.ranks for x in e.levels]).numel() for e in found)
