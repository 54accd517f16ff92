"""The loader alone: tokens/s against a plain read of the mapped file, and what opening costs as a corpus grows.

`python bench/data.py [--seconds S] [--json]`. Both readers touch the same sequences in the same order and make int64
tensors of them; the plain one copies windows out of a memory map and does nothing else. CPU seconds are counted, which
other work on the machine disturbs less than the clock. Opening is measured in a process of its own for each size: its
CPU seconds and the memory that is its own (mapped pages left out), beyond those of importing.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from dtrain.data import DataConfig, batch, open_source
from dtrain.data.order import locate
from dtrain.data.tokens import SAMPLES

SIZES = {"1 MB": 10**6, "1 GB": 10**9, "1 TB, sparse": 10**12, "10 TB, sparse": 10**13}
DOCUMENT = 500  # tokens
SHAPES = ((128, 8), (2048, 16), (8192, 8))  # seq, batch


def corpus(prefix: Path, size: int, sparse: bool) -> None:
    """Megatron files of `size` bytes in 16 bits, documents of DOCUMENT tokens; sparse: zeros that take no disk."""
    n = size // 2 // DOCUMENT
    with open(f"{prefix}.bin", "wb") as file:
        if sparse:
            file.truncate(n * DOCUMENT * 2)
        else:
            block = np.random.default_rng(0).integers(0, 50_000, 10_000 * DOCUMENT, np.uint16)
            for at in range(0, n, 10_000):
                file.write(block[: min(10_000, n - at) * DOCUMENT].tobytes())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, n + 1))
        if sparse:  # only the entries that are looked at when it is opened, and the last
            looked = sorted({*range(0, n - 1, max(1, (n - 1) // SAMPLES)), n - 1})
            for i in {k for j in looked for k in (j, j + 1) if k < n}:
                file.seek(34 + 4 * i)
                file.write(struct.pack("<i", DOCUMENT))
                file.seek(34 + 4 * n + 8 * i)
                file.write(struct.pack("<q", i * DOCUMENT * 2))
            file.seek(34 + 12 * n + 8 * n)
            file.write(struct.pack("<q", n))
            return
        file.write(np.full(n, DOCUMENT, np.int32).tobytes())
        file.write((np.arange(n) * DOCUMENT * 2).tobytes())
        file.write(np.arange(n + 1).tobytes())


def own_memory() -> int:
    """Bytes of this process that are not mapped files (Linux), else 0."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def opening(prefix: str) -> dict[str, float]:
    """In this process: CPU seconds and bytes to open a corpus and to read its first batch."""
    cfg = DataConfig("megatron", 1024, 8, 50_000, paths=(prefix,))
    faults = sum(resource.getrusage(resource.RUSAGE_SELF)[6:8])
    memory, began = own_memory(), time.process_time()
    source = open_source(cfg)
    opened = time.process_time()
    batch(source, 0, range(8))
    return {
        "tokens": source.tokens,
        "open_cpu_s": opened - began,
        "first_batch_cpu_s": time.process_time() - opened,
        "own_bytes": own_memory() - memory,
        "page_faults": sum(resource.getrusage(resource.RUSAGE_SELF)[6:8]) - faults,
    }


def rates(prefix: str, seconds: float) -> list[dict[str, float]]:
    """Tokens per CPU second of the loader and of a plain read, by shape, in turns."""
    out = []
    plain = np.memmap(f"{prefix}.bin", np.uint16, "r")
    for seq, size in SHAPES:
        row: dict[str, float] = {"seq": seq, "batch": size}
        for kind, changes in (("concat", {}), ("documents masked", {"document_mask": True})):
            source = open_source(DataConfig("megatron", seq, size, 50_000, paths=(prefix,), **changes))
            spent = {"loader": 0.0, "plain": 0.0}
            step = 0
            while min(spent.values()) < seconds and step < 20_000:
                steps = range(step, step + 8)
                begins = [[locate(source, s * size + r, "train")[1] * seq for r in range(size)] for s in steps]
                began = time.process_time()
                for s in steps:
                    batch(source, s, range(size))
                middle = time.process_time()
                for rows in begins:
                    both = torch.from_numpy(np.stack([plain[b : b + seq + 1] for b in rows]).astype(np.int64))
                    both[:, :-1].contiguous(), both[:, 1:].contiguous()
                spent["loader"] += middle - began
                spent["plain"] += time.process_time() - middle
                step += 8
            for name, value in spent.items():
                row[f"{kind}: {name} tokens/s"] = step * size * seq / value
        out.append(row)
    return out


def main(
    seconds: Annotated[float, typer.Option(help="CPU seconds for each reader and shape.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if one:
        print(json.dumps(opening(one)))
        return
    found: dict[str, Any] = {"opening": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            prefix = Path(folder, name.replace(" ", "").replace(",", ""))
            corpus(prefix, size, "sparse" in name)
            done = subprocess.run([sys.executable, __file__, "--one", str(prefix)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            found["opening"][name] = json.loads(done.stdout)
        found["rates"] = rates(str(Path(folder, "1GB")), seconds)
    if as_json:
        print(json.dumps(found))
        return
    for name, o in found["opening"].items():
        print(
            f"{name:13} {o['tokens']:>16,.0f} tokens: opened in {o['open_cpu_s'] * 1e3:.0f} ms of CPU, first batch "
            f"{o['first_batch_cpu_s'] * 1e3:.0f} ms, "
            f"{o['own_bytes'] / 2**20:.1f} MiB of its own, {o['page_faults']:,.0f} page faults"
        )
    for row in found["rates"]:
        for kind in ("concat", "documents masked"):
            ours, plain = row[f"{kind}: loader tokens/s"], row[f"{kind}: plain tokens/s"]
            print(
                f"seq {row['seq']:>5} x {row['batch']:<3} {kind:17} {ours / 1e6:7.1f} M tokens per CPU second, "
                f"plain read {plain / 1e6:7.1f} M: {ours / plain:.2f}"
            )


if __name__ == "__main__":
    typer.run(main)
