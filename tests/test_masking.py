"""What a masked model is given: whole words, spans, and shares that are those of the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain import rng
from dtrain.data import DataConfig, DataError, Masking, Source, batch, masking, open_source
from dtrain.data.masking import Special, Words, masked, span_chance

SPECIAL = Special(pad=100, cls=101, sep=102, mask=103, ordinary=90)
CONTINUES = torch.tensor([i % 3 == 1 for i in range(104)])  # ids 1, 4, 7, ... go on with the word before them
WORDS = Words(CONTINUES, torch.tensor([i % 30 == 29 for i in range(104)]))  # 29, 59 and 89 end sentences


def draw(how: Masking, rows: int = 400, n: int = 61, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(90, (rows, n), generator=g)
    draws = rng.fold(rng.fold(torch.tensor(seed), 5), torch.arange(rows))
    return masked(text, torch.full((rows,), n), draws, SPECIAL, how, WORDS)


def words(out: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of every position: the number of its word, and whether it is to be predicted."""
    original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
    special = original >= 100
    begins = ~CONTINUES[original] | special | special.roll(1, 1)
    return begins.long().cumsum(1), out["labels"] >= 0


@pytest.mark.parametrize("unit", ["token", "word"])
@pytest.mark.parametrize("ngram", [1, 3])
def test_fifteen_percent_are_predicted(unit: Any, ngram: int) -> None:
    out = draw(Masking(unit, ngram), rows=800)
    share = float((out["labels"] >= 0).double().sum() / (800 * 61))
    # 48,800 tokens in spans of up to 3 words of a few tokens: 5 standard deviations are below 0.018. Spans do not
    # cross a border, so the first words of a segment are in fewer of them.
    assert 0.15 - 0.018 - 0.01 * (ngram > 1) < share < 0.15 + 0.018


def test_the_chance_of_a_span_solves_its_equation() -> None:
    assert span_chance(1) == 0.15
    q = span_chance(3)
    assert 1 - (1 - q) * (1 - q * 5 / 11) * (1 - q * 2 / 11) == pytest.approx(0.15, abs=1e-12)


def test_words_are_masked_as_a_whole() -> None:
    number, chosen = words(draw(Masking("word", 1)))
    for row in range(len(number)):
        for word in number[row].unique():
            assert len(set(chosen[row][number[row] == word].tolist())) == 1
    number, chosen = words(draw(Masking("token", 1)))
    split = [len(set(chosen[r][number[r] == w].tolist())) == 2 for r in range(40) for w in number[r].unique()]
    assert any(split)


def test_spans_are_of_whole_units_and_their_lengths_fall_as_one_over_n() -> None:
    _, chosen = words(draw(Masking("token", 3), rows=1000))
    runs = []
    for row in chosen:
        text = "".join("x" if c else " " for c in row.tolist()).split()
        runs += [len(r) for r in text]
    counts = [runs.count(n) for n in (1, 2, 3)]
    # Spans next to each other join, so runs are a little longer than spans, whose shares are 6, 3 and 2 of 11.
    assert counts[0] > counts[1] > counts[2] > 0 and max(runs) > 3
    assert abs(counts[0] / len(runs) - 6 / 11) < 0.12


def test_how_predicted_tokens_are_shown() -> None:
    out = draw(Masking("word", 3), rows=800)
    chosen = out["labels"] >= 0
    shown, true = out["tokens"][chosen], out["labels"][chosen]
    n = len(true)
    assert abs(float((shown == 103).double().sum()) / n - 0.8) < 5 * (0.16 / n) ** 0.5
    kept = (shown == true).double().sum() / n  # and one in 90 of the random ones
    assert abs(float(kept) - 0.1 - 0.1 / 90) < 5 * (0.09 / n) ** 0.5
    assert int(shown[shown != 103].max()) < 90 and int(true.max()) < 90


def test_masks_are_a_function_of_the_row_alone() -> None:
    whole = draw(Masking("word", 3), rows=6)
    g = torch.Generator().manual_seed(0)
    text = torch.randint(90, (6, 61), generator=g)[4:]
    draws = rng.fold(rng.fold(torch.tensor(0), 5), torch.arange(4, 6))
    part = masked(text, torch.full((2,), 61), draws, SPECIAL, Masking("word", 3), WORDS)
    assert all(torch.equal(part[k], whole[k][4:]) for k in part)


@pytest.mark.parametrize("n", [2, 3, 9, 20])
def test_shorter_texts_are_padded(n: int) -> None:
    text = torch.arange(20).expand(64, -1)
    draws = rng.fold(torch.tensor(1), torch.arange(64))
    out = masked(text, torch.full((64,), n), draws, SPECIAL, Masking(), None)
    original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
    assert bool((out["valid"].sum(1) == n + 3).all()) and bool((original[:, n + 3 :] == 100).all())
    assert bool((original[:, n + 2] == 102).all()) and bool((original[:, 0] == 101).all())
    for row, order in zip(original, out["order"].tolist(), strict=True):
        kept = [t for t in row.tolist() if t < 100]
        first = (n + 1) // 2
        assert kept == ([*range(first, n), *range(first)] if order else list(range(n)))
    assert set(out["order"].tolist()) == {0, 1}
    assert bool((out["types"].sum(1) == torch.where(out["order"] == 1, (n + 1) // 2, n // 2) + 1).all())


def word_pieces(tmp_path: Path, **changes: Any) -> Source:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    text = ["masking whole words of pieces", "words and pieces masked as wholes"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        text, tokenizers.trainers.WordPieceTrainer(vocab_size=50, special_tokens=special, show_progress=False)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": " ".join(text * k)}) for k in (1, 2, 3)))
    given = {"seq": 40, "batch": 2, "vocab": 60, "objective": "masked", "tokenizer": str(tmp_path / "tokenizer.json")}
    given |= {"paths": (str(tmp_path / "a.jsonl"),), "validation": 0.0, "eos": False, "packing": "none"}
    return open_source(DataConfig("jsonl", **(given | changes)))  # type: ignore[arg-type]


def test_whole_words_of_a_word_piece_tokenizer(tmp_path: Path) -> None:
    source = word_pieces(tmp_path, masking=Masking("word", 2))
    assert (source.special.pad, source.special.cls, source.special.sep, source.special.mask) == (0, 2, 3, 4)
    assert source.words is not None
    names = {i: n for n, i in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"].items()}
    assert [bool(source.words.continues[i]) for i in names] == [n.startswith("##") for n in names.values()]
    out = batch(source, 3, range(2))
    original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
    goes_on = source.words.continues[original] & (original.roll(1, 1) > 4)
    chosen = out["labels"] >= 0
    assert bool((chosen == chosen.roll(1, 1))[goes_on].all()) and bool(goes_on.any())


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    source = word_pieces(tmp_path)
    path.write_text(path.read_text().replace("[MASK]", "[HIDE]"))
    with pytest.raises(DataError, match=r"data\.tokenizer: .* has no \[MASK\], which a masked model needs"):
        open_source(source.cfg)
    assert masking.MASKED == 0.15


# ------------------------------------------------------------------------------------------------ many draws


def chi_squared(counts: Tensor, expected: Tensor | float) -> float:
    return float(((counts.double() - expected) ** 2 / torch.as_tensor(expected).double()).sum())


@pytest.mark.parametrize("how", [Masking(), Masking("word", 3)], ids=["tokens", "spans of words"])
def test_draws_have_the_distributions_of_the_paper(how: Masking) -> None:
    """Bounds that chi-squared exceeds with probability 1e-5, of fixed draws."""
    out = draw(how, rows=3000, seed=3)
    chosen = out["labels"] >= 0
    shown, true = out["tokens"][chosen], out["labels"][chosen]
    n = len(true)
    masks, kept = int((shown == 103).sum()), int((shown == true).sum())
    kinds = torch.tensor([masks, kept, n - masks - kept])
    shares = torch.tensor([0.8, 0.1 + 0.1 / 90, 0.1 - 0.1 / 90])  # one in 90 random tokens is the true one
    assert n > 20_000 and chi_squared(kinds, n * shares) < 23.1  # 2 degrees of freedom
    other = shown[(shown != 103) & (shown != true)]
    drawn = torch.bincount(other, minlength=90)
    assert len(drawn) == 90 and chi_squared(drawn, len(other) / 90) < 157  # 89 degrees of freedom: all ids alike
    assert abs(int(out["order"].sum()) - 1500) < 4.42 * (3000 / 4) ** 0.5
    if how == Masking():
        # Every place is chosen alike, and one says nothing of the next.
        per_place = chosen[:, 1:].sum(0)[(out["types"][0, 1:] >= 0)]
        used = per_place[per_place > 0.05 * 3000]
        assert len(used) >= 58 and abs(float(used.double().mean()) / 3000 - 0.15) < 0.01
        pairs = chosen[:, 2:30] & chosen[:, 3:31]
        assert abs(float(pairs.double().mean()) - 0.15**2) < 5 * (0.0225 / pairs.numel()) ** 0.5


def test_other_rows_and_seeds_draw_anew() -> None:
    g = torch.Generator().manual_seed(0)
    text = torch.randint(90, (1, 61), generator=g).expand(50, -1)
    full = torch.full((50,), 61)
    seeds = [rng.fold(rng.fold(torch.tensor(s), 5), torch.arange(50)) for s in (0, 1)]
    one, two = (masked(text, full, d, SPECIAL, Masking(), None)["labels"] for d in seeds)
    assert len({tuple(r.tolist()) for r in torch.cat([one, two])}) == 100
    both = ((one >= 0) & (two >= 0))[:, 1:31].double().mean()
    assert abs(float(both) - 0.0225) < 5 * (0.0225 / 1500) ** 0.5


def test_halves_meet_between_two_sentences() -> None:
    """At the place nearest to the middle, no more than a quarter of the text away, and not within a word."""
    n = 24
    text = torch.full((6, n), 2)
    text[0, 10] = 29  # behind place 10
    text[1, [9, 14]] = 59  # 10 and 15 are as near as 2 and 3
    text[2, 3] = 89  # too far
    text[3, 11], text[3, 12] = 29, 4  # goes on: no place
    text[4, 6], text[4, 17] = 29, 29  # 7 and 18 are as near as 5 and 6
    draws = rng.fold(torch.tensor(1), torch.arange(6))
    out = masked(text, torch.full((6,), n), draws, SPECIAL, Masking(), WORDS)
    original = torch.where(out["labels"] >= 0, out["labels"], out["tokens"])
    middle = (original == 102).long().argmax(1) - 1
    first = torch.where(out["order"] == 1, n - middle, middle)
    assert first.tolist() == [11, 10, 12, 12, 7, 12]
    for row, order, k in zip(original.tolist(), out["order"].tolist(), first.tolist(), strict=True):
        kept = [t for t in row if t < 100]
        back = kept[n - k :] + kept[: n - k] if order else kept
        assert back == text[original.tolist().index(row)].tolist()


def test_special_tokens_of_a_text_are_not_predicted() -> None:
    text = torch.full((400, 20), 5)
    text[:, 7] = SPECIAL.sep
    draws = rng.fold(torch.tensor(2), torch.arange(400))
    for how in (Masking(), Masking("word", 2)):
        labels = masked(text, torch.full((400,), 20), draws, SPECIAL, how, WORDS)["labels"]
        assert set(labels.unique().tolist()) == {-1, 5}
