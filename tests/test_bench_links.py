"""bench/links.py measures real processes, fits them, and prints a line that a layout takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tiny

from dtrain import layout
from dtrain.hardware import gpu
from dtrain.plan.ledger import Level
from dtrain.plan.seconds import collective, machine

LAYOUT = """
cluster:
  gpus_per_node: 2
  {line}
mesh: {{dp: {{size: 2}}}}
shard: {{compute: {{batch: dp}}}}
model: {{family: gpt2, layers: 1, embed: 16, heads: 2, vocab: 64, positions: 8}}
data: {{source: synthetic, seq: 8, batch: 2}}
run: {{steps: 1}}
"""


@pytest.fixture(scope="module")
def links() -> Any:
    return tiny.bench("links")


def test_two_processes_end_to_end() -> None:
    """A line of a real measurement is read by a layout, and plan's all-gather is then the fitted one."""
    command = [sys.executable, str(tiny.LAYOUTS.parent / "bench" / "links.py"), "--ranks", "2", "--most", "70000"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    (measured,) = got["measured"]
    assert (got["kind"], measured["link"], measured["ranks"]) == ("cpu", "loopback", 2)
    assert [(p["op"], p["bytes"]) for p in measured["points"]] == [
        (op, 4**i * 1024) for op in ("all_reduce", "all_gather_into_tensor", "send") for i in range(4)
    ]
    assert all(p["seconds"] > 0 and p["wire"] > 0 for p in measured["points"])
    made = layout.loads(LAYOUT.format(line=got["line"]))
    fitted = measured["fits"]["all_gather_into_tensor"]
    both = [collective(machine(made), "all_gather_into_tensor", n, (Level("dp", "loopback", 2),)) for n in (1e6, 2e6)]
    assert both[1] - both[0] == pytest.approx(0.5e6 / fitted["bandwidth"], rel=0.01)


def test_a_fit_finds_what_made_the_points(links: Any) -> None:
    points = [links.Point("all_reduce", n, n * 1.5, 20e-6 + n * 1.5 / 400e9) for n in links.sizes(1 << 28)]
    got = links.fit(points)
    assert (got.alpha, got.bandwidth) == pytest.approx((20e-6, 400e9)) and got.worst < 1e-9
    times = [(1 << n, (1 << n) / 1e9 * (1.2 if n % 2 else 0.9)) for n in range(10, 24)]
    jumpy = [links.Point("send", size, float(size), took) for size, took in times]
    assert links.fit(jumpy).alpha >= 0 and 0 < links.fit(jumpy).worst < 0.4


def test_a_rate_is_the_links_own(links: Any) -> None:
    """What NCCL reaches on eight H100 and over their NICs is the datasheet's links again; slower ones are PCIe."""
    own = gpu("h100-sxm").links
    inside, across = links.link_and_rate("hopper", False, 361e9), links.link_and_rate("hopper", True, 36e9)
    assert inside == ("nvlink", pytest.approx(own["nvlink"], rel=0.01))
    assert across == ("ib", pytest.approx(own["ib"], rel=0.01))
    assert links.link_and_rate("ampere", False, 20e9)[0] == "pcie"
    assert links.line({"nvlink": 451.234e9, "ib": 12.5e9}) == "links: {nvlink: 451GB/s, ib: 12.5GB/s}"


def test_a_link_has_two_ends(links: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        links.main(["--ranks", "1"])
    assert "a link has two ends" in capsys.readouterr().err
