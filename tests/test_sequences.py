"""Documents packed together are each document alone: loss and gradients, on one device and on simulated ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import equality
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain import data, layout, ops, plan, reference
from dtrain.data import DataConfig, DataError, batch, open_source, sequences
from dtrain.models import gpt2, llama
from dtrain.plan import seconds
from dtrain.plan.predict import predict
from dtrain.plan.report import heading
from dtrain.program import cost
from dtrain.program.lower import LoweringError, lower

LLAMA = llama.Config(2, 32, 4, 48, 61, kv_heads=2, document_mask=True)
GPT2 = gpt2.Config(2, 32, 4, 61, positions=40, dropout=0.0, attention_dropout=0.0, document_mask=True)
LENGTHS = [5, 3, 17, 9, 2, 30, 1, 11, 4, 13]


# ------------------------------------------------------------------------------------------------ best fit


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), max_size=60), st.integers(12, 20))
def test_best_fit_is_the_textbooks(counts: list[int], length: int) -> None:
    """One item at a time, the longest first, into the fullest bin that has room."""
    room: list[int] = []
    for n in sorted(counts, reverse=True):
        fits = [b for b, r in enumerate(room) if r >= n]
        if not fits:
            room.append(length)
            fits = [len(room) - 1]
        room[min(fits, key=lambda b: room[b])] -= n
    where = sequences.fit(np.array(counts, np.int64), length)
    used = np.bincount(where, weights=counts, minlength=len(room)) if counts else np.zeros(0)
    assert len(used) == len(room)
    assert sorted(length - used) == sorted(room)


def corpus(tmp_path: Path, lengths: list[int] = LENGTHS, **changes: Any) -> DataConfig:
    """Documents of bytes of these lengths, each of its own letters, with the 0 of the end included in the length."""
    g = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in g.integers(1, 60, n - 1)) for n in lengths]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t or "x"}) + "\n" for t in texts))
    given = {"seq": 16, "batch": 1, "vocab": 256, "paths": (str(tmp_path / "a.jsonl"),), "validation": 0.0} | changes
    return DataConfig("jsonl", **given)


@pytest.mark.parametrize("packing", ["concat", "best-fit", "none"])
@pytest.mark.parametrize("mask", [False, True])
def test_every_token_is_predicted_once_from_its_own_document(tmp_path: Path, packing: Any, mask: bool) -> None:
    source = open_source(corpus(tmp_path, packing=packing, document_mask=mask))
    stream = source.parts[0].stream
    assert stream is not None
    begins, sizes = sequences.document_spans(stream)
    want = {(int(b + i), int(b + i + 1)) for b, n in zip(begins, sizes, strict=True) for i in range(n - 1)}
    text = np.concatenate([stream.shards[0].tokens, [0]])
    pairs = sorted((int(text[a]), int(text[b])) for a, b in want)
    got = []
    for step in range(source.train):
        out = {k: v[0] for k, v in batch(source, step, [0]).items()}
        kept = out["labels"] >= 0
        got += list(zip(out["tokens"][kept].tolist(), out["labels"][kept].tolist(), strict=True))
        assert (out["start"].max() > 0) <= mask
    if packing != "concat":  # best-fit and none never let a document's last token predict the next document
        assert sorted(got) == pairs and source.dropped == 0
    else:
        crossing = 0 if mask else len(sizes) - 1
        assert len(got) + source.dropped >= len(pairs) + crossing - len(sizes)


def test_the_positions_of_packed_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ABC"}\n{"text": "D"}\n{"text": "E"}\n')
    cfg = DataConfig("jsonl", 6, 1, 256, paths=(str(tmp_path / "a.jsonl"),), validation=0.0, document_mask=True)
    out = batch(open_source(cfg), 0, [0])
    assert out["tokens"][0].tolist() == [65, 66, 67, 0, 68, 0]
    assert (torch.arange(6) - out["start"][0]).tolist() == [0, 1, 2, 3, 0, 1]
    assert out["labels"][0].tolist() == [66, 67, 0, -1, 0, -1]


# ------------------------------------------------------------------------------------------------ equal to alone


def packed(seq: int, rows: int, vocab: int, seed: int = 0) -> tuple[dict[str, Tensor], list[tuple[int, int, int]]]:
    """A random batch of packed documents, and each document's (row, begin, end)."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, seq), generator=g)
    start = (torch.arange(seq) * (torch.rand(rows, seq, generator=g) < 0.25)).cummax(1).values
    labels = torch.cat([tokens[:, 1:], torch.randint(vocab, (rows, 1), generator=g)], 1)
    labels[:, :-1][start[:, 1:] != start[:, :-1]] = -1
    spans = []
    for row in range(rows):
        begins = start[row].unique().tolist()
        spans += [(row, b, e) for b, e in zip(begins, [*begins[1:], seq], strict=True)]
    return {"tokens": tokens, "labels": labels, "start": start, "sample": torch.arange(rows)}, spans


def alone(module: Any, cfg: Any, params: dict[str, Tensor], one: dict[str, Tensor], spans: list[Any]) -> Any:
    """The sum of every document's loss and gradients, each in a batch of its own, without any mask."""
    plain = replace(cfg, document_mask=False)
    count = module.counts(cfg, one)
    loss, grads = torch.zeros((), dtype=torch.float64), {k: torch.zeros_like(v) for k, v in params.items()}
    for row, begin, end in spans:
        piece = {k: one[k][row : row + 1, begin:end] for k in ("tokens", "labels")}
        piece["sample"] = one["sample"][row : row + 1]
        if int((piece["labels"] >= 0).sum()) == 0:
            continue
        got, more = reference.loss_and_grads(module, plain, params, piece, counts=count)
        loss += got
        grads = {k: grads[k] + more[k] for k in grads}
    return loss, grads


@pytest.mark.parametrize("kernel", ["auto", "math"])
@pytest.mark.parametrize(("module", "cfg"), [(llama, LLAMA), (gpt2, GPT2)], ids=["llama", "gpt2"])
def test_packed_equals_each_document_alone(module: Any, cfg: Any, kernel: str) -> None:
    cfg = replace(cfg, attention=kernel)
    params = reference.init(module, cfg, 0, torch.float64)
    one, spans = packed(24, 2, cfg.vocab)
    assert len(spans) > 6
    loss, grads = reference.loss_and_grads(module, cfg, params, one)
    want, theirs = alone(module, cfg, params, one, spans)
    assert abs(float(loss - want)) < 1e-12
    for path, g in theirs.items():
        torch.testing.assert_close(grads[path], g, rtol=1e-9, atol=1e-12, msg=path)


@pytest.mark.parametrize(("module", "cfg"), [(llama, LLAMA), (gpt2, GPT2)], ids=["llama", "gpt2"])
def test_a_changed_token_is_not_seen_by_the_next_document(module: Any, cfg: Any) -> None:
    params = reference.init(module, cfg, 0, torch.float32)
    one = {
        "tokens": torch.tensor([[1, 2, 3, 5, 4, 6]]),
        "labels": torch.full((1, 6), -1),
        "sample": torch.zeros(1).long(),
    }
    one["start"] = torch.tensor([[0, 0, 0, 0, 4, 4]])
    before = reference.logits(module, cfg, params, one)
    one["tokens"][0, 0] = 9
    after = reference.logits(module, cfg, params, one)
    assert torch.equal(before[0, 4:], after[0, 4:]) and not torch.equal(before[0, :4], after[0, :4])
    plain = replace(cfg, document_mask=False)
    assert not torch.equal(reference.logits(module, plain, params, one)[0, 4:], after[0, 4:])


LAYOUTS = {
    "tp2 with res_seq": ("tp: {size: 2}", "vocab: tp, heads: tp, mlp: tp", "res_seq: tp", 2),
    "pp2 x fsdp2": ("pp: {size: 2}, fsdp: {size: 2}", "layers: pp", "batch: fsdp", 4),
}


@pytest.mark.parametrize(
    ("name", "family"), [("tp2 with res_seq", "llama"), ("tp2 with res_seq", "gpt2"), ("pp2 x fsdp2", "llama")]
)
def test_packed_on_ranks_equals_each_document_alone(name: str, family: str) -> None:
    mesh, rules, more, ranks = LAYOUTS[name]
    kv = ", kv_heads: tp" if family == "llama" and "heads" in rules else ""
    sizes = {"llama": "kv_heads: 2, mlp: 48", "gpt2": "positions: 40, dropout: 0.0, attention_dropout: 0.0"}[family]
    text = f"""
cluster: {{gpus_per_node: {ranks}}}
mesh: {{{mesh}}}
shard: {{params: {{{rules}{kv}}}, compute: {{{rules}{kv}, {more}}}}}
model: {{family: {family}, layers: 2, embed: 32, heads: 4, vocab: 61, {sizes}}}
data: {{source: synthetic, seq: 24, batch: 4, document_mask: true}}
run: {{steps: 1, precision: fp64}}
"""
    made = plan.plan(layout.loads(text))
    module, cfg = made.job.module, made.job.config
    one, spans = packed(24, 4, cfg.vocab, seed=1)
    many = equality.on_ranks(equality.Case(text, "all", 0, None), made, [one])
    loss, grads = alone(module, cfg, reference.init(module, cfg, 0, torch.float64), one, spans)
    assert abs(many.reports[0].loss - float(loss)) < 1e-10
    for path, g in grads.items():
        assert float((many.grads[0][path] - g).abs().max()) < 1e-10, path


def test_a_model_that_ignores_the_mask_is_refused() -> None:
    text = """
model: {file: my_model.py, layers: 1, embed: 16, heads: 2, mlp: 24, vocab: 61}
data: {source: synthetic, seq: 8, batch: 1, document_mask: true}
run: {steps: 1}
"""
    made = plan.plan(layout.loads(text, str(Path(__file__).parent.parent / "layouts" / "x.yaml")))
    with pytest.raises(LoweringError, match=r"document_mask is on, but block does not use batch\['start'\]"):
        lower(made.job)


def test_kernels_that_cannot_mask_are_refused() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ops.OpError, match="attention among packed documents is causal"):
        ops.attention(q, q, q, causal=False, start_BS=torch.zeros(1, 4).long())
    for family, sizes in (("llama", "mlp: 64"), ("bert", "positions: 8, dropout: 0.0, attention_dropout: 0.0")):
        text = f"""
cluster: {{gpu: a100-80}}
model: {{family: {family}, layers: 1, embed: 64, heads: 1, vocab: 64, {sizes}}}
data: {{source: synthetic, seq: 8, batch: 1, document_mask: true}}
run: {{steps: 1, precision: bf16}}
kernels: {{attention: flash}}
"""
        words = "no masks of documents" if family == "bert" else "'flash' cannot do bfloat16, head_dim 64 with a mask"
        with pytest.raises(layout.LayoutError, match=words):
            layout.loads(text)


GPUS = """
cluster: {gpus_per_node: 4, gpu: a100-80}
mesh: {dp: {size: 2}, tp: {size: 2}}
shard:
  params: {vocab: tp, heads: tp, kv_heads: tp, mlp: tp}
  compute: {vocab: tp, heads: tp, kv_heads: tp, mlp: tp, batch: dp, res_seq: tp}
model: {family: llama, layers: 2, embed: 128, heads: 4, kv_heads: 2, mlp: 64, vocab: 256}
data: {source: synthetic, seq: 64, batch: 4, microbatch: 2, document_mask: true}
run: {steps: 1, precision: bf16}
kernels: {attention: flash}
"""


def test_flash_with_a_bounded_number_of_documents_is_planned_as_it_runs() -> None:
    with pytest.raises(layout.LayoutError, match=r"no mask but one of documents with data\.max_documents"):
        layout.loads(GPUS)
    made = predict(layout.loads(GPUS, overrides=["data.max_documents=8"]))
    job = made.plan.job
    assert lower(job, job.mesh.world - 1).hashes() == made.program.hashes()
    graph = made.program.segments["block"].graphs["forward"].module.graph
    (does,) = [k.does for k in cost.kernels(graph).values() if k.op == "attention"]
    assert isinstance(does, cost.Attention) and (does.masked, does.documents) == (True, 8)
    assert seconds.attention_kernel(seconds.machine(made.plan.layout), does) == "flash"
    assert seconds.attention_kernel(seconds.machine(made.plan.layout), replace(does, kernel="auto")) == "flash"
    assert does.flops == 2 * (2 * 2 * 2 * 64 * 64 * 32) / 2  # of whole sequences: 2 heads a rank, two products
    assert "attention is counted (FLOPs, time) as if each sequence were one" in "\n".join(heading(made.plan))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.document_mask=false", r"data\.max_documents: 8; is for document_mask: true"),
        ("data.max_documents=40000", r"data\.max_documents: 40000; is at most 32767 with microbatches of 2"),
        ("data.max_documents=0", r"data\.max_documents: 0"),
    ],
)
def test_bounds_that_cannot_be_are_refused(change: str, words: str) -> None:
    with pytest.raises(layout.LayoutError, match=words):
        layout.loads(GPUS, overrides=["data.max_documents=8", change])


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_sequence_has_no_more_documents_than_are_allowed(tmp_path: Path, packing: Any, most: int) -> None:
    free = corpus(tmp_path, packing=packing, document_mask=True)
    source = open_source(replace(free, max_documents=most))
    rows = [batch(source, s, [0]) for s in range(source.train)]
    assert max(len(r["start"].unique()) for r in rows) <= most
    learnt = [sorted(t for r in of for t in r["labels"][r["labels"] >= 0].tolist()) for of in (rows, all_of(free))]
    assert learnt[0] == learnt[1]


def all_of(cfg: DataConfig) -> list[dict[str, Tensor]]:
    source = open_source(cfg)
    return [batch(source, s, [0]) for s in range(source.train)]


def test_a_sequence_of_more_documents_than_are_allowed_ends_a_run(tmp_path: Path) -> None:
    cfg = corpus(tmp_path, [3] * 12 + [40], document_mask=True)
    assert max(len(r["start"].unique()) for r in all_of(cfg)) == 6
    assert all_of(replace(cfg, max_documents=6))
    with pytest.raises(DataError, match=r"data\.max_documents: 5; the sequence from token \d+ of jsonl .* has 6 doc"):
        all_of(replace(cfg, max_documents=5))


def test_masked_models_read_documents_one_by_one(tmp_path: Path) -> None:
    cfg = corpus(tmp_path, [20, 9, 4, 30], vocab=260, objective="masked", seq=19, packing="none", eos=False)
    source = open_source(cfg)
    rows = [batch(source, s, [0]) for s in range(source.train)]
    assert all(bool(((r["tokens"] == 256) == (r["valid"] == 0)).all()) for r in rows)  # padding is [PAD] and not valid
    lengths = sorted(int(r["valid"].sum()) - 3 for r in rows)
    assert lengths == sorted([16, 3, 8, 3, 16, 13])  # 19, 8, 3 and 29 bytes in pieces of 16
    with pytest.raises(DataError, match=r"data\.document_mask: is for causal models"):
        open_source(replace(cfg, document_mask=True))
    assert data.validation_batches(source) == 0
