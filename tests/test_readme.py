"""What the READMEs say to type exists and loads; the files, keys and links that they name are there."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dtrain import cli, layout, plan, show
from dtrain.launch import commands

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [p for folder in (".", "layouts", "checkpoints", "bench", "tests") for p in (ROOT / folder).glob("*.md")]
VERBS = ("run", "show", "verify", "plan")  # of layouts
OTHERS = ("export", "sample", "eval", "checkpoint")
KEYS = set(layout.schema_keys())


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def typed(text: str) -> list[list[str]]:
    """Every command of the shell blocks, in words."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines() if line]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


def dtrains() -> list[list[str]]:
    """The words after `dtrain`, also where a launcher starts it."""
    out = []
    for words in typed(README):
        at = [i for i, word in enumerate(words) if word in ("dtrain", "dtrain.cli")]
        out += [words[i + 1 :] for i in at]
    return out


def test_there_is_something_to_test() -> None:
    assert len(dtrains()) >= 8 and {words[0] for words in dtrains()} == {*VERBS, *OTHERS}
    assert len(blocks(README, "yaml")) >= 1 and len(PAGES) >= 6


@pytest.mark.parametrize("words", [w for w in dtrains() if w[0] in OTHERS], ids=lambda words: words[0])
def test_options_of_the_other_commands_exist(words: list[str]) -> None:
    command: Any = get_command(cli.app)
    for word in words:
        command = getattr(command, "commands", {word: command}).get(word, command)
    assert not hasattr(command, "commands")  # not a group
    assert {word for word in words if word.startswith("--")} <= {o for p in command.params for o in p.opts}


@pytest.mark.parametrize("words", [w for w in dtrains() if w[0] in VERBS], ids=lambda words: " ".join(words[:2]))
def test_commands_of_dtrain_load(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    verb, path, *overrides = words
    assert verb in VERBS
    made = plan.plan(layout.load(path, overrides))
    if verb == "show":
        page = show.show(made.layout)
        assert "parameters" in page and "block" in page


def test_other_commands_name_files_that_exist() -> None:
    others = [words for words in typed(README) if words[0] not in ("dtrain", "torchrun", "srun")]
    assert {words[0] for words in others} == {"pip", "pytest", "python"}
    for words in others:
        for word in words[1:]:
            made_by_runs = word.startswith("checkpoints/")
            assert "/" not in word or made_by_runs or (ROOT / word).exists(), word


def test_the_commands_for_a_cluster_are_those_that_dtrain_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in typed(README):
        if words[0] in ("torchrun", "srun"):
            line = " ".join(words)
            assert line in commands(layout.load(words[-1]), words[-1]), line


def test_the_layout_written_out_is_a_layout() -> None:
    for text in blocks(README, "yaml"):
        made = plan.plan(layout.loads(text, str(ROOT / "layouts" / "readme.yaml")))
        assert made.layout.world == 4 and made.microbatches == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", t.lower()).replace(" ", "-") for t in titles], target


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "checkpoints"], ids=lambda p: p.parent.name)
def test_files_named_exist(page: Path) -> None:
    for word in re.findall(r"`([\w./-]+\.(?:py|yaml|md|png|jsonl))`", page.read_text()):
        if word in ("metrics.jsonl", "loss.png"):
            continue  # in a run's folder
        assert any((folder / word).exists() for folder in (ROOT, page.parent)), word
    for word in re.findall(r"`(dtrain(?:\.\w+)+)`", page.read_text()):
        assert importlib.util.find_spec(word), word


def test_keys_named_exist() -> None:
    sections = {key.split(".")[0] for key in KEYS}
    named = [w for w in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", README) if w.split(".")[0] in sections]
    assert len(named) >= 3
    for word in named:
        assert word in KEYS, word


def test_the_strategies_are_rules_that_load() -> None:
    """Each row of the table whose rules are written out; `and` and `the same` go on from the row before."""
    table = README[README.index("| strategy |") : README.index("They combine")]
    rules: dict[str, str] = {}
    loaded = []
    for line in table.splitlines()[2:]:
        if not line.strip():
            continue
        name, cell = (part.strip() for part in line.strip("|").split("|"))
        written = dict(re.findall(r"`(params|compute|optimizer|grads): (\{[^`]*\})`", cell))
        if not written:
            continue
        rules = (rules if cell.startswith(("and", "the same")) else {}) | written
        dims = [d for d in ("dp", "fsdp") if any(re.search(rf"\b{d}\b", rule) for rule in rules.values())]
        made = layout.loads(
            f"cluster: {{gpus_per_node: {2 ** len(dims)}}}\n"
            f"mesh: {{{', '.join(f'{d}: {{size: 2}}' for d in dims)}}}\n"
            f"shard: {{{', '.join(f'{k}: {v}' for k, v in rules.items())}}}\n"
            "model: {family: llama, layers: 2, embed: 16, heads: 4, mlp: 24, vocab: 61}\n"
            "data: {seq: 8, batch: 8}\nrun: {steps: 1}\n"
        )
        assert plan.plan(made).replicas == 2 ** len(dims)
        loaded.append(name)
    assert loaded == ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP", "HSDP"]


def test_every_claim_names_a_test_file() -> None:
    table = README[README.index("| claim |") : README.index("## On a cluster")]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10
    for row in rows:
        assert re.search(r"`tests/test_\w+\.py`", row), row


def test_the_picture_is_drawn_from_the_runs_beside_it(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("curve", ROOT / "bench" / "curve.py")
    assert spec and spec.loader
    curve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(curve)
    results = ROOT / "bench" / "results"
    curve.main([str(results / "quickstart"), str(results / "one-process"), "-o", str(tmp_path / "out.png")])
    for picture in (tmp_path / "out.png", results / "quickstart.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
    (one, one_held_out), (four, four_held_out) = (curve.read(results / n) for n in ("one-process", "quickstart"))
    assert [step for step, _ in one] == [step for step, _ in four]
    # The layout does not change the numbers, to rounding that training amplifies.
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, four, strict=True)) < 0.01
    (_, first), (_, last) = four_held_out[0], four_held_out[-1]
    assert f"{first:.2f} to {last:.2f}" in README and len(one_held_out) == len(four_held_out)
