"""The verbs, through typer's runner: exit codes, one-line mistakes, quick help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dtrain import __version__, cli, launch, verify
from dtrain.layout import Layout

LAYOUTS = Path(__file__).parent.parent / "layouts"
QUICK = str(LAYOUTS / "quickstart.yaml")


def dtrain(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def test_version() -> None:
    result = dtrain("--version")
    assert (result.exit_code, result.stdout) == (0, f"dtrain {__version__}\n")


@pytest.mark.parametrize(
    "words",
    [["run"], ["show"], ["verify"], ["plan"], ["plan", "run.steps=1"], ["walk", QUICK], ["run", QUICK, "--steps=3"]],
)
def test_a_wrong_command(words: list[str]) -> None:
    result = dtrain(*words)
    assert result.exit_code == 2
    assert "Usage: dtrain" in result.stderr or "Usage:" in result.stderr


@pytest.mark.parametrize("verb", ["run", "show", "verify", "plan"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such.yaml"], "no/such.yaml: no such file"),
        ([QUICK, "run.stps=3"], "override run.stps=3: run.stps: unknown key"),
        ([QUICK, "model.heads=6"], "model.heads"),
    ],
)
def test_a_mistake_is_one_line(verb: str, words: list[str], said: str) -> None:
    result = dtrain(verb, *words)
    assert result.exit_code == (1 if verb == "plan" else 2)
    assert said in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_run_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], bool, list[str]]] = []

    def start(path: str, overrides: list[str], quiet: bool, allow: list[str]) -> int:
        calls.append((path, overrides, quiet, allow))
        return 143

    monkeypatch.setattr(launch, "start", start)
    assert dtrain("run", "x.yaml").exit_code == 143
    assert dtrain("run", "x.yaml", "run.steps=3", "optim.lr=1e-4", "--quiet", "--allow-extra").exit_code == 143
    assert calls == [
        ("x.yaml", [], False, []),
        ("x.yaml", ["run.steps=3", "optim.lr=1e-4"], True, ["extra-tensors"]),
    ]


@pytest.mark.parametrize("equal", [True, False])
def test_verify_exits_with_its_answer(monkeypatch: pytest.MonkeyPatch, equal: bool) -> None:
    seen: list[int] = []

    def main(layout: Layout) -> bool:
        seen.append(layout.run.steps)
        return equal

    monkeypatch.setattr(verify, "main", main)
    assert dtrain("verify", QUICK, "run.steps=7").exit_code == (0 if equal else 1)
    assert seen == [7]


def test_an_internal_fault_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(layout: Layout) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(verify, "main", main)
    assert isinstance(dtrain("verify", QUICK).exception, ZeroDivisionError)


def test_show() -> None:
    result = dtrain("show", QUICK, "run.seed=1")
    assert result.exit_code == 0
    assert "block.0..3/wq" in result.stdout


def test_help_tells_the_exit_codes_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from dtrain import cli\n"
        "try:\n"
        "    cli.app(['run', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "130 or 143 stopped by Ctrl-C or SIGTERM" in " ".join(result.stdout.split())
