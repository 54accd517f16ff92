"""The GPU benchmark runs from end to end on a CPU, and its peers train what dtrain trains."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"
sys.path[:0] = [str(BENCH)]

import gpu  # noqa: E402
from peers import hf_compile, titan_style  # noqa: E402

from dtrain import plan, reference  # noqa: E402

TINY = gpu.Setting("cpu", tiny=True, compile="off", steps=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard and transformers
def test_every_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--tiny", "--compile", "off", "--steps", "3", "--together", "--json"]
    assert gpu.main(flags) == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert list(made["cases"]) == [case.name for case in gpu.cases()]
    assert "FAILED" not in said.err and "skipped" not in said.err, said.err
    for name, result in made["cases"].items():
        if ":" in name:
            assert result["tokens_per_s"] > 0 and result["mfu"] is None
            assert ("predicted_bytes" in result) == name.endswith(":dtrain")
    losses = {who: made["cases"][f"3b-8192:{who}"]["loss"] for who in ("dtrain", "titan", "hf")}
    assert all(5.3 < loss < 5.8 for loss in losses.values())  # about log 256, of three random models
    assert set(made["cases"]["heads"]) == {"16", "24", "32"} and made["cases"]["heads"]["32"]["head_dim"] == 6
    assert made["cases"]["70b-tp8"]["block"]["backward_ms"] > 0
    assert all(made["cases"]["attention"][k]["error"] < 0.02 for k in ("flash", "math"))
    gaps = made["cases"]["launch-gaps"]
    assert gaps["losses_differ_by"] < 1e-3 and 0 < gaps["graph"]["idle_share"] < 1 and gaps["graph"]["kernels"] > 100
    found = made["cases"]["async-tp"]
    assert (found["forward"], found["backward"]) == ({"fused": 4, "of": 4}, {"fused": 2, "of": 6})
    assert found["operations"] == {"left_out": "symmetric memory needs CUDA"}
    assert made["gate"]["met"] is None and "not judged" in said.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("peer", [titan_style, hf_compile])
@pytest.mark.parametrize("preset", ["llama3.2-3b", "llama3-8b"])  # tied and rescaled, and neither
def test_peers_train_what_dtrain_trains(peer: Any, preset: str) -> None:
    lay = gpu.llama(TINY, preset, 4096)
    lay = lay.model_copy(update={"run": lay.run.model_copy(update={"precision": "fp32"})})
    made = plan.plan(lay)
    weights = reference.init(made.job.module, made.job.config)
    step, _, _ = gpu.dtrain_start(made, "cpu")
    theirs = gpu.peer_start(peer, made, TINY, weights)
    ours = [step(n) for n in range(1, 5)]
    assert [theirs(n) for n in range(1, 5)] == pytest.approx(ours, rel=1e-5)
    assert abs(ours[-1] - ours[0]) > 1e-3  # it did train


def test_a_case_in_a_process_of_its_own_and_one_that_no_longer_fits() -> None:
    said: list[str] = []
    results = gpu.measure(dataclasses.replace(TINY, steps=1), ["attention"], 1.0, True, said.append)
    assert results["attention"]["flash"]["ms"] > 0, results
    results = gpu.measure(TINY, ["3b-8192:titan"], 0.01, True, said.append)
    assert "needs about 5 s, 1 s are left" in results["3b-8192:titan"]["skipped"]
    assert said[-1].startswith("3b-8192:titan      skipped: needs about 5 s")
    assert gpu.apart(gpu.cases()[0], TINY, 0.1) == {"failed": "not done after the 0 s that were left"}


def test_a_case_that_fails_is_reported() -> None:
    def too_large(s: gpu.Setting) -> gpu.Result:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    result = gpu.perform(gpu.Case("x", 1.0, too_large), TINY)
    assert result["failed"].startswith("out of memory: CUDA out of memory")
    assert gpu.show("x", result).startswith("x                  FAILED: out of memory")


def test_the_gate() -> None:
    def results(mfu: float | None, *rates: float) -> dict[str, gpu.Result]:
        made = {f"3b-8192:{w}": {"tokens_per_s": r} for w, r in zip(("dtrain", "titan", "hf"), rates, strict=False)}
        made["3b-8192:dtrain"]["mfu"] = mfu
        return made

    assert gpu.gate(results(0.56, 3.0, 2.0, 1.0)) == {
        "mfu": 0.56,
        "at_least": 0.55,
        "over_titan": 1.5,
        "over_hf": 3.0,
        "met": True,
    }
    assert gpu.gate(results(0.54, 3.0, 2.0, 1.0))["met"] is False
    assert gpu.gate(results(0.56, 3.0, 3.1, 1.0))["met"] is False
    assert gpu.gate(results(None, 3.0, 2.0, 1.0))["met"] is None
    assert gpu.gate(results(0.56, 3.0, 2.0))["met"] is None
    assert gpu.gate({})["met"] is None


def test_idle_is_what_no_kernel_covers() -> None:
    assert gpu.busy_and_idle([]) == (0, 0)
    assert gpu.busy_and_idle([(1, 3)]) == (2, 0)
    # Two streams overlap, one kernel lies within another, and 1 + 2 seconds are empty.
    assert gpu.busy_and_idle([(10, 12), (1, 3), (2, 5), (2.5, 2.75), (6, 8)]) == (4 + 2 + 2, 1 + 2)


def test_without_a_gpu_one_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == (
        "bench/gpu.py: no CUDA GPU is here; to try the script on a CPU: --device cpu --tiny\n"
    )
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "4b"]) == 2
    assert "no case begins with '4b'; there are attention, 3b-8192:dtrain" in capsys.readouterr().err
