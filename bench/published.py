"""Published runs against `dtrain.plan`: `python bench/published.py bench/data/published.csv`.

Every row that says its whole layout becomes a `Layout`, and its predicted step time, peak memory and verdict are
compared with what was published. The error of a row is |predicted / published - 1|, of a source the median over its
groups (layout families) of their medians, and the score the median over sources; the 90th percentile is over groups.
Within a sweep (rows that differ in their layout alone) the order of predicted and published times is compared by
Spearman's rank correlation, and regret is how much longer the layout predicted fastest really takes than the fastest.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from reading import Read, cut, read_all  # noqa: E402
from rows import ONE_LAYER, Row, SkipError, complete, layout_of, source_of, sweep_of  # noqa: E402

from dtrain import layout as layouts  # noqa: E402
from dtrain.layout import Layout  # noqa: E402
from dtrain.plan import Plan, plan, seconds  # noqa: E402
from dtrain.plan.memory import capacity, context, total  # noqa: E402
from dtrain.plan.timeline import COMPUTE, Timeline, timed  # noqa: E402

LEAST = 4  # rows of a sweep, below which an order says nothing


@dataclass(frozen=True)
class Found:
    """A row's prediction: seconds of a step, bytes that the row's tool would show, whether it fits; or why not."""

    id: str
    skipped: str = ""
    step: float = 0.0
    memory: float = 0.0
    fits: bool = True


# ------------------------------------------------------------------------------------------------- predictions


def sample_of(rows: Sequence[Row], n: int) -> list[Row]:
    """About `n` rows that can be modelled, of every source the same share and at least one, always the same."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        if not skipped(row):
            members.setdefault(source_of(row), []).append(row)
    share = n / max(1, sum(map(len, members.values())))
    return [
        row
        for source, of in members.items()
        for row in random.Random(source).sample(of, min(len(of), max(1, round(share * len(of)))))
    ]


def skipped(row: Row) -> str:
    """Why a row is not modelled, or nothing."""
    try:
        layout_of(row)
    except SkipError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Timed:
    """A row that is ready to be timed with any constants: its step, or two shorter ones of `count` microbatches."""

    row: Row
    layout: Layout
    read: Read
    plans: tuple[Plan, ...]
    counts: tuple[int, ...]

    def step(self, constants: seconds.Constants | None = None) -> float:
        """Seconds of the step; of a layer, where the row timed one."""
        times = [timed(p, self.read.loads, constants) for p in self.plans]
        if self.row["step_target_basis"].startswith(ONE_LAYER):
            return _layer(times[0])
        steps = [t.step for t in times]
        each = (steps[-1] - steps[0]) / max(1, self.counts[-1] - self.counts[0])
        return steps[-1] + each * (layouts.microbatches(self.layout) - self.counts[-1])


def timing(row: Row, read: Read) -> Timed:
    """A row with the plans of its step. Of a long step, two that differ by a microbatch for each stage."""
    layout = layout_of(row)
    whole, stages = layouts.microbatches(layout), layout.sizes["pp"]
    counts = (whole,) if whole <= 4 * stages else (3 * stages, 4 * stages)
    return Timed(row, layout, read, tuple(plan(cut(layout, n)) for n in counts), counts)


def predict_row(of: Timed, constants: seconds.Constants | None = None) -> Found:
    """The prediction of a row, with the constants of its GPU's class or others."""
    peak = total(of.read.held, of.layout)
    have = capacity(of.layout)
    outside = 0 if "nvidia-smi" in of.row["peak_mem_unit"] else context(of.layout)
    return Found(of.row["id"], "", of.step(constants), peak - outside, have is None or peak <= have)


def _layer(times: Timeline) -> float:
    """Seconds of a layer's forward and backward."""
    spans = [s for s in times.spans[0] if s.stream == COMPUTE and s.action.unit == 1 and s.action.kind in "FB"]
    return sum(s.end - s.start for s in spans)


# ------------------------------------------------------------------------------------------------------ scores


def errors(rows: Iterable[Row], found: Mapping[str, Found]) -> dict[str, float]:
    """|predicted / published - 1| of the step time, by row."""
    used = [r for r in rows if r["step_s_target"] and not found[r["id"]].skipped]
    return {r["id"]: abs(found[r["id"]].step / float(r["step_s_target"]) - 1) for r in used}


def memory_errors(rows: Iterable[Row], found: Mapping[str, Found]) -> dict[str, float]:
    """The same of peak memory. nvidia-smi and torch count in units of 2^30, whatever they call them."""
    used = [r for r in rows if r["peak_mem"] and r["measured"] == "1" and not found[r["id"]].skipped]
    return {r["id"]: abs(found[r["id"]].memory / (float(r["peak_mem"]) * 2**30) - 1) for r in used}


def by_group(rows: Iterable[Row], error: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """The median of each group, by source and group."""
    found: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        if r["id"] in error:
            found.setdefault((source_of(r), r["group"]), []).append(error[r["id"]])
    return {key: statistics.median(values) for key, values in found.items()}


def over_sources(values: Mapping[tuple[str, str], float]) -> float | None:
    """The median over sources of the medians of each."""
    sources: dict[str, list[float]] = {}
    for (source, _), value in values.items():
        sources.setdefault(source, []).append(value)
    return statistics.median(map(statistics.median, sources.values())) if sources else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Linear interpolation between ranks."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def sweeps(rows: Iterable[Row], found: Mapping[str, Found]) -> dict[tuple[str, str], tuple[float, float]]:
    """Rank correlation and regret of each sweep with enough rows, by source and name."""
    members: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        if r["step_s_target"] and not found[r["id"]].skipped:
            members.setdefault(sweep_of(r), []).append(r)
    out = {}
    for key, of in members.items():
        real, said = [float(r["step_s_target"]) for r in of], [found[r["id"]].step for r in of]
        if len({_layout_key(r) for r in of}) >= LEAST and len(set(real)) > 1 and len(set(said)) > 1:
            picked = real[said.index(min(said))]
            out[key[0], " ".join(key[1:])] = (spearman(said, real), picked / min(real) - 1)
    return out


def _layout_key(row: Row) -> tuple[str, ...]:
    return tuple(row[k] for k in ("tp", "sp", "pp", "vpp", "dp", "fsdp", "micro_batch", "recompute", "compile_kernels"))


def verdicts(rows: Iterable[Row], found: Mapping[str, Found]) -> Counter[tuple[str, bool]]:
    """How often a published verdict (ok, OOM) met a predicted one."""
    used = [r for r in rows if r["fits"] and r["measured"] == "1" and not found[r["id"]].skipped]
    return Counter((r["fits"], found[r["id"]].fits) for r in used)


def balanced(table: Counter[tuple[str, bool]]) -> float | None:
    """The mean over the published verdicts of the share that is predicted right."""
    shares = [
        table[said, said == "ok"] / (table[said, True] + table[said, False])
        for said in ("ok", "OOM")
        if table[said, True] + table[said, False]
    ]
    return sum(shares) / len(shares) if shares else None


def scores(rows: Sequence[Row], found: Mapping[str, Found]) -> dict[str, Any]:
    """The figures of some rows."""
    steps, memory = by_group(rows, errors(rows, found)), by_group(rows, memory_errors(rows, found))
    swept = sweeps(rows, found)
    whole = [r for r in rows if complete(r) and r["measured"] == "1" and r["confidence"] != "from-memory"]
    return {
        "median_abs_err": over_sources(steps),
        "p90_abs_err": percentile(steps.values(), 0.9),
        "fits_accuracy": balanced(verdicts(rows, found)),
        "memory_median_abs_err": over_sources(memory),
        "spearman_median": over_sources({k: s for k, (s, _) in swept.items()}),
        "top1_regret": over_sources({k: r for k, (_, r) in swept.items()}),
        "modelled_share": sum(not found[r["id"]].skipped for r in whole) / len(whole) if whole else None,
    }


# ------------------------------------------------------------------------------------------------------ output


def _show(value: float | None, percent: bool = True) -> str:
    return "-" if value is None else f"{100 * value:.1f}%" if percent else f"{value:.2f}"


def table(rows: Sequence[Row], found: Mapping[str, Found], key: Callable[[Row], str], title: str) -> list[str]:
    """The figures by some key, a line each."""
    keys = dict.fromkeys(map(key, rows))
    width = max(map(len, [title, *keys]))
    head = "rows  used  step   bias   p90    memory  Spearman  regret  fits    ok->ok ok->OOM OOM->OOM OOM->ok"
    lines = [f"{title:{width}} {head}"]
    for k in keys:
        of = [r for r in rows if key(r) == k]
        s, t, used = scores(of, found), verdicts(of, found), errors(of, found)
        bias = [
            found[r["id"]].step / float(r["step_s_target"]) - 1
            for r in of
            if r["step_s_target"] and not found[r["id"]].skipped
        ]
        lines.append(
            f"{k:{width}} {len(of):4}  {len(used):4}  {_show(s['median_abs_err']):6} "
            f"{_show(statistics.median(bias) if bias else None):6} {_show(s['p90_abs_err']):6} "
            f"{_show(s['memory_median_abs_err']):7} {_show(s['spearman_median'], False):9} {_show(s['top1_regret']):7} "
            f"{_show(s['fits_accuracy']):7} {t['ok', True]:6} {t['ok', False]:7} {t['OOM', False]:8} {t['OOM', True]:7}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="a file with the columns of data/published.md")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--rows", action="store_true", help="print each row too")
    parser.add_argument("--sample", type=int, metavar="N", help="only about N rows, the same share of each source")
    parser.add_argument("--cache", type=Path, default=Path("build/published"), help="folder of what is lowered")
    asked = parser.parse_args(arguments)
    start = time.monotonic()
    with asked.csv.open(newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    if asked.sample:
        rows = sample_of(rows, asked.sample)
    read = read_all(rows, asked.cache, asked.workers, lambda line: print(line, file=sys.stderr, flush=True))
    found = {
        r["id"]: Found(r["id"], of) if isinstance(of := read[r["id"]], str) else predict_row(timing(r, of))
        for r in rows
    }
    sources = dict.fromkeys(map(source_of, rows))
    if asked.json:
        each = {s: scores([r for r in rows if source_of(r) == s], found) for s in sources}
        print(json.dumps({**scores(rows, found), "sources": each}))
        return 0
    if asked.rows:
        for r in rows:
            print(json.dumps({**asdict(found[r["id"]]), "published": r["step_s_target"], "peak_mem": r["peak_mem"]}))
    print("\n".join(table(rows, found, source_of, "source")), end="\n\n")
    print("\n".join(table(rows, found, lambda r: r["gpu"], "GPU")), end="\n\n")
    print("skipped:")
    for (source, why), n in sorted(Counter((source_of(r), found[r["id"]].skipped) for r in rows).items()):
        if why:
            print(f"  {source}: {n} ({why})")
    print("\nover sources:")
    for name, value in scores(rows, found).items():
        print(f"  {name} {_show(value, name != 'spearman_median')}")
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
