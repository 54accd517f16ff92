"""The page of `dtrain plan --html` in a real browser: it needs no network and shows what was predicted."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_cli import QUICK, dtrain
from test_report import SMALL, predicted

from dtrain.plan.ledger import by_link
from dtrain.plan.report import show_bytes, show_seconds

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def page(path: Path) -> str:
    result = dtrain("plan", QUICK, *SMALL, "--html", str(path))
    assert result.exit_code == 0, result.output
    return path.read_text()


def test_the_page_stands_alone(tmp_path: Path) -> None:
    text = page(tmp_path / "report.html")
    assert not re.search(r"https?:|<link|<script|@import|url\(|src=", text)
    assert "block.0..3/wq" in text and "heads/tp" in text
    p = predicted()
    assert f'nvlink</td><td class="n">{show_bytes(by_link(p.ledger[p.busiest])["nvlink"])}' in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine to open the page in")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    assert BROWSER is not None
    path = tmp_path / "report.html"
    page(path)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    p = predicted()
    assert dom.count("<svg") == 3 and dom.count("<polyline") == len(p.memory)
    assert dom.count("<rect") > 2 * p.plan.microbatches * len(p.memory)
    for said in ("FITS", f"<b>{show_seconds(p.step_seconds)}</b>", f"<b>{p.mfu:.1%}</b>", "llama.py:", "Placement"):
        assert said in dom, said
