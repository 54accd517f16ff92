"""Generated text: a cache changes no score, greedy is transformers' `generate`, draws follow what was asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_hf
import torch
from torch import Tensor

from dtrain import generate, hf, models, reference
from dtrain.axes import ALONE
from dtrain.generate import Cache, Choice, Decoder, GenerateError

LAYOUTS = Path(__file__).parent.parent / "layouts"
SMALL: dict[str, Any] = {"layers": 3, "embed": 16, "heads": 4, "vocab": 61}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "fields": SMALL | {"mlp": 24, "kv_heads": 2, "rope_scaling": {"original": 4}}},
    "gpt2": {"family": "gpt2", "fields": SMALL | {"positions": 12}},
    "my_model": {"file": LAYOUTS / "my_model.py", "fields": SMALL | {"mlp": 24}},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def decoder(module: ModuleType, cfg: Any, params: dict[str, Tensor]) -> Decoder:
    cfg = generate.check(module, cfg, "it")
    return Decoder(module, cfg, reference.segments(module, cfg, params), ALONE, cfg.vocab)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [1, 5, 12])
def test_scores_with_a_cache_are_those_without(name: str, first: int) -> None:
    """In float64, of every position: `first` tokens at once, then one at a time. Dropout is off."""
    module, cfg = models.resolve(**MODELS[name])
    params = reference.init(module, cfg, dtype=torch.float64)
    params = {n: t + 0.2 * torch.randn(t.shape, dtype=t.dtype) for n, t in params.items()}
    model = decoder(module, cfg, params)
    tokens = torch.randint(61, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = {"tokens": torch.tensor([tokens]), "sample": torch.zeros(1, dtype=torch.int64)}
    with torch.no_grad():
        whole = reference.logits(module, model.cfg, params, batch)[0]
        cache = Cache()
        for begin, end in [(0, first), *((i, i + 1) for i in range(first, 12))]:
            got = generate.scores(model, tokens[begin:end], cache)
            torch.testing.assert_close(got, whole[end - 1], rtol=0, atol=1e-12)
            assert cache.length == end
    assert whole.std() > 0.1 and (whole[0] - whole[-1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama3.2", "gpt2", "gpt2-untied"])
def test_greedy_is_the_generate_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = test_hf.saved(name, tmp_path)
    folder, _ = hf.open_folder(tmp_path)
    model = decoder(models.load(folder.family), folder.cfg, test_hf.parameters(folder))
    prompt = [7, 3, 50, 11, 29]
    with torch.no_grad():
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        got = list(generate.generate(model, prompt, Choice(), 40))
    assert got == want[0, 5:].tolist() and len(got) == 40
    # The first token to come again ends both.
    stop = next(t for i, t in enumerate(got) if i > 3)
    with torch.no_grad():
        want = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
        got = list(generate.generate(model, prompt, Choice(), 40, {stop}))
    assert got == want[0, 5:].tolist() and got[-1] == stop and len(got) < 40


@pytest.mark.parametrize(
    ("k", "p"), [(None, None), (1, None), (5, None), (100, None), (None, 0.7), (None, 1e-9), (9, 0.5)]
)
def test_what_may_be_drawn_is_what_transformers_keeps(k: int | None, p: float | None) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = 2 * torch.randn(61, generator=torch.Generator().manual_seed(3))
    want = TemperatureLogitsWarper(0.8)(torch.zeros(1, 1), scores[None])
    want = want if k is None else TopKLogitsWarper(k)(torch.zeros(1, 1), want)
    want = want if p is None else TopPLogitsWarper(p)(torch.zeros(1, 1), want)
    torch.testing.assert_close(generate.keep(scores, Choice(0.8, k, p)), want[0])
    assert 1 <= int(want.isfinite().sum()) <= (k or 61)


def test_draws_have_the_probabilities_of_softmax() -> None:
    """Chi-square of 4,000 draws over 5 tokens: 18.5 has a probability of 0.001 with 4 degrees of freedom."""
    scores, n = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 4000
    drawn = torch.bincount(torch.tensor([generate.choose(scores, Choice(2.0, seed=5), 0, i) for i in range(n)]))
    expected = n * (scores / 2).softmax(-1)
    assert float(((drawn - expected) ** 2 / expected).sum()) < 18.5
    cut = {generate.choose(scores, Choice(2.0, top_k=2), 0, i) for i in range(100)}
    assert cut == {1, 3}


def test_a_seed_repeats_and_another_differs() -> None:
    module, cfg = models.resolve(**MODELS["llama"])
    model = decoder(module, cfg, reference.init(module, cfg))

    def text(number: int = 0, **how: Any) -> list[int]:
        with torch.no_grad():
            return list(generate.generate(model, [1, 2], Choice(**{"temperature": 1.0} | how), 20, number=number))

    assert text() == text()
    assert len({tuple(t) for t in (text(), text(seed=1), text(number=1), text(temperature=0))}) == 4
    # It does not depend on what is asked for besides: a longer text begins with the shorter one.
    assert text()[:5] == list(generate.generate(model, [1, 2], Choice(1.0), 5))


def test_models_that_cannot_are_told_by_name() -> None:
    module, cfg = models.resolve(family="bert", fields=SMALL)
    with pytest.raises(GenerateError, match=r"^bert generates no text: .* learns masked tokens from both sides"):
        generate.check(module, cfg, "bert")

    module, cfg = models.resolve(**MODELS["llama"])
    old = ModuleType("old")
    old.__file__ = "old.py"
    old.__dict__.update({k: getattr(module, k) for k in ("BATCH", "embed", "logits", "params")})

    def block(cfg: Any, p: Any, x: Tensor, *rest: Any) -> Tensor:
        return x

    old.block = block  # type: ignore[attr-defined]
    with pytest.raises(GenerateError, match=r"^old.py: block attends without a cache; write k, v = here.cached"):
        generate.scores(decoder(old, cfg, reference.init(module, cfg)), [1], Cache())
    del old.logits
    with pytest.raises(GenerateError, match=r"^old generates no text: its file has no logits"):
        generate.check(old, cfg, "old")
    assert dataclasses.replace(cfg) == generate.check(module, cfg, "llama")
