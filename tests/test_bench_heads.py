"""The first line of a shipped layout says what plan expects of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

QUICK = ("quickstart", "llama3-8b-1x8-h100")  # one without times, one with


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.long)
        for p in sorted(tiny.LAYOUTS.glob("*.yaml"))
    ],
)
def test_the_head_of_a_layout_is_what_plan_prints(path: Path) -> None:
    assert tiny.bench("heads").changed(path) is None, "python bench/heads.py writes it anew"


def test_a_stale_head_is_found_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tiny.bench("heads")
    path = tmp_path / "one-process.yaml"
    text = (tiny.LAYOUTS / path.name).read_text()
    first, _, rest = text.partition("\n")
    path.write_text(f"{first.partition('  (')[0]}  (expected: wonders)\n{rest}")
    assert heads.main([str(path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "wonders" in said and first in said and "wonders" in path.read_text()
    assert heads.main([str(path)]) == 0 and path.read_text() == text
    assert heads.main([str(path), "--check"]) == 0
    path.write_text(f"# nothing\n{rest}")
    with pytest.raises(ValueError, match=r"one-process.yaml:1: '# nothing'; must begin with the command"):
        heads.head(path)
