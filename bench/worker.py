"""One process of one side: `worker.py SIDE RANK RANKS COMPILED TASK_FILE`, told what to do on its standard input.

SIDE is a peer's file without `.py`, or `dtrain:LAYOUT`. When ready it writes one line of JSON with its versions. Each
line `FIRST COUNT` that it reads asks for these steps, and is answered by one line, [[begin, end, cpu, loss], ...]:
seconds of the machine's monotonic clock, and CPU seconds of this process. It waits without work in between, and ends
with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import task as tasks


def main(side: str, rank: str, ranks: str, compiled: str, path: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    task = tasks.read(Path(path))
    turns = (int(rank), int(ranks), compiled == "True")
    if side.startswith("dtrain:"):
        import trainer

        step = trainer.start(side.removeprefix("dtrain:"), task.shape, *turns)
    else:
        step = importlib.import_module(f"peers.{side}").start(task, *turns)
    known = {name: version(name) for name in ("torch", "jax", "numpy") if name in sys.modules}
    print(json.dumps(known), file=answers, flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        out = []
        for number in range(first, first + count):
            begin, used = time.perf_counter(), time.process_time()
            loss = step(number)
            out.append((begin, time.perf_counter(), time.process_time() - used, loss))
        print(json.dumps(out), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
