"""What `dtrain plan` expects of each shipped layout, in the first line of its file.

`python bench/heads.py [LAYOUT...]` writes these lines anew: after every change to what plan predicts, be it a GPU's
constants or what a program launches. `--check` writes nothing, prints the lines that would change, and exits 1 if there
are any; `tests/test_bench_heads.py` does the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dtrain import layout
from dtrain.plan.predict import predict
from dtrain.plan.report import expected

LAYOUTS = Path(__file__).resolve().parent.parent / "layouts"
COMMAND = re.compile(r"# dtrain \w+ \S+")  # what a file begins with


def head(path: Path) -> str:
    """The first line that a layout's file should have: the command that is there, and what is expected of it."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    command = COMMAND.match(first)
    if command is None:
        raise ValueError(
            f"{path}:1: {first!r}; must begin with the command that uses it, as `# dtrain run {path.name}`"
        )
    return f"{command[0]}  (expected: {expected(predict(layout.load(path)))})"


def changed(path: Path) -> tuple[str, str] | None:
    """The first line as it is and as it should be, where they differ."""
    now, new = path.read_text(encoding="utf-8").partition("\n")[0], head(path)
    return None if now == new else (now, new)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write what plan expects of each layout into its first line.")
    parser.add_argument("layouts", nargs="*", type=Path, default=sorted(LAYOUTS.glob("*.yaml")), metavar="LAYOUT")
    parser.add_argument("--check", action="store_true", help="only print what would change")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stale = 0
    for path in asked.layouts:
        found = changed(path)
        if found is None:
            continue
        now, new = found
        stale += 1
        print(f"- {now}\n+ {new}")
        if not asked.check:
            rest = path.read_text(encoding="utf-8").partition("\n")[2]
            path.write_text(f"{new}\n{rest}", encoding="utf-8")
    return 1 if asked.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
