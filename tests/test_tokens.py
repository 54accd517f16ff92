"""Token files: what other programs wrote is read as they meant it, and damage is told before a run starts."""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import DataConfig, DataError, batch, open_source, tokens
from dtrain.data.tokens import DTYPES, edges, open_array, open_megatron, read, stream, write_index

DOCUMENTS = [[5, 6, 7], [8], [1, 2, 3, 4, 5, 6], [9, 9]]


def mapped(prefix: Path, dtype: str, documents: Sequence[Sequence[int]] = DOCUMENTS, code: int | None = None) -> str:
    """A .bin with an .idx as Megatron-LM's mapped datasets have, written from its description."""
    code = code or next(k for k, v in DTYPES.items() if v == dtype)
    sizes = [len(d) for d in documents]
    item = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *sizes[:-1]]) * item
    np.array([t for d in documents for t in d], dtype).tofile(f"{prefix}.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    head += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(sizes) + 1)
    body = np.array(sizes, np.int32).tobytes() + pointers.astype(np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(head + body + np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
    return str(prefix)


def old(prefix: Path, dtype: str, documents: Sequence[Sequence[int]] = DOCUMENTS, code: int | None = None) -> str:
    """The same with the older index (lazy and cached datasets)."""
    code = code or next(k for k, v in DTYPES.items() if v == dtype)
    sizes = np.array([len(d) for d in documents], np.int64)
    n, item = len(sizes), np.dtype(dtype).itemsize
    np.array([t for d in documents for t in d], dtype).tofile(f"{prefix}.bin")
    head = b"TNTIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<QQ", code, item)
    head += struct.pack("<QQ", n, n) + struct.pack("<Q", n + 1)
    arrays = [np.arange(n + 1), np.append(0, np.cumsum(sizes)), sizes, np.arange(n + 1)]
    Path(f"{prefix}.idx").write_bytes(head + b"".join(a.astype(np.int64).tobytes() for a in arrays))
    return str(prefix)


def check(prefix: str) -> None:
    shard = open_megatron(prefix)
    assert tokens.documents(shard) == 4
    assert edges(shard, 0, 12).tolist() == [0, 3, 4, 10] and edges(shard, 1, 10).tolist() == [3, 4]
    assert read(stream([shard]), 0, 12, 100).tolist() == [t for d in DOCUMENTS for t in d]


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values())))
def test_both_indexes_and_every_type_are_read(tmp_path: Path, dtype: str) -> None:
    check(mapped(tmp_path / "a", dtype))
    check(old(tmp_path / "b", dtype))


def test_a_type_whose_code_was_used_twice_is_told_by_the_size(tmp_path: Path) -> None:
    check(mapped(tmp_path / "a", "f8", code=7))
    check(old(tmp_path / "b", "f4", code=6))


def test_sentences_of_a_document_belong_together(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2")
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    raw[26:34] = struct.pack("<Q", 3)
    raw[-40:] = np.array([0, 2, 4], np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(raw)
    shard = open_megatron(prefix)
    assert tokens.documents(shard) == 2 and edges(shard, 0, 12).tolist() == [0, 4]
    assert edges(shard, 1, 4).tolist() == [] and edges(shard, 4, 12).tolist() == [4]


@pytest.mark.parametrize("dtype", ["u2", "i4"])
def test_what_is_written_is_what_the_format_says(tmp_path: Path, dtype: str) -> None:
    expected = mapped(tmp_path / "a", dtype)
    write_index(tmp_path / "b.idx", np.dtype(dtype), np.array([len(d) for d in DOCUMENTS], np.int32))
    assert (tmp_path / "b.idx").read_bytes() == Path(f"{expected}.idx").read_bytes()


def test_ids_above_65535_come_back(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "i4", [[70_000, 128_255, 1]])
    assert read(stream([open_megatron(prefix)]), 0, 3, 128_256).tolist() == [70_000, 128_255, 1]


def cut(path: str, n: int) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:n])


FAULTS = {
    "bin one byte short": (lambda p: cut(f"{p}.bin", -1), r"a\.bin: has 23 bytes, but a\.idx describes 24 .*cut short"),
    "bin too long": (
        lambda p: Path(f"{p}.bin").write_bytes(bytes(30)),
        r"a\.bin: has 30 bytes.*do not belong together",
    ),
    "idx cut": (lambda p: cut(f"{p}.idx", -1), r"a\.idx: at offset 121: ends, but its header promises 122 bytes"),
    "idx cut in its header": (lambda p: cut(f"{p}.idx", 20), r"a\.idx: at offset 20: ends within its header of 34"),
    "no idx": (lambda p: Path(f"{p}.idx").unlink(), r"a\.idx: does not exist"),
    "no bin": (lambda p: Path(f"{p}.bin").unlink(), r"a\.bin: does not exist"),
    "wrong magic": (lambda p: Path(f"{p}.idx").write_bytes(b"PK" * 40), r"a\.idx: at offset 0: is no Megatron index"),
    "wrong version": (lambda p: patch(p, 9, b"\x02"), r"a\.idx: at offset 9: version 2; this dtrain reads 1"),
    "unknown type": (lambda p: patch(p, 17, b"\x63"), r"a\.idx: at offset 17: unknown type of token 99"),
    "pointer past the end": (
        lambda p: patch(p, 58, b"\x07"),
        r"a\.idx: at offset 58: sequence 1 begins at 7, not at 6",
    ),
    "learn of another size": (lambda p: Path(f"{p}.learn").write_bytes(b"1"), r"a\.learn: 1 bytes for the 12 tokens"),
}


def patch(prefix: str, at: int, new: bytes) -> None:
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    raw[at : at + len(new)] = new
    Path(f"{prefix}.idx").write_bytes(raw)


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_told_with_file_offset_and_what_was_expected(tmp_path: Path, name: str) -> None:
    prefix = mapped(tmp_path / "a", "u2")
    damage, words = FAULTS[name]
    damage(prefix)
    with pytest.raises(DataError, match=words) as e:
        open_megatron(prefix)
    assert "\n" not in str(e.value)


def test_arrays(tmp_path: Path) -> None:
    ids = np.arange(20, dtype=np.uint16)
    ids.tofile(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", ids.astype(np.int32))
    for name in ("train.bin", "train.npy"):
        shard = open_array(str(tmp_path / name), "uint16")
        assert shard.tokens.tolist() == list(range(20))
        assert edges(shard, 0, 20, eos=9).tolist() == [0, 10] and edges(shard, 11, 20, eos=9).tolist() == []
        assert edges(shard, 10, 12, eos=9).tolist() == [10]
    (tmp_path / "train.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match=r"train\.bin: 7 bytes are no whole number of uint16 \(2 bytes each\)"):
        open_array(str(tmp_path / "train.bin"), "uint16")
    np.save(tmp_path / "train.npy", ids.reshape(4, 5))
    with pytest.raises(DataError, match="is 2-dimensional uint16"):
        open_array(str(tmp_path / "train.npy"), "uint16")


def config(prefix: str, **changes: object) -> DataConfig:
    given = {"seq": 4, "batch": 1, "vocab": 10, "validation": 0.0, "paths": (prefix,)} | changes
    return DataConfig("megatron", **given)  # type: ignore[arg-type]


def test_an_id_outside_the_vocabulary_is_named_before_the_start_or_when_it_is_met(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2")
    with pytest.raises(DataError, match=r"a\.bin: token 10 has id 9, but model\.vocab is 9; ids are 0 to 8"):
        open_source(config(prefix, vocab=9))
    source = open_source(config(prefix))
    ids = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    ids[2] = 77  # after the start
    ids.flush()
    with pytest.raises(DataError, match=r"a\.bin: token 2 has id 77"):
        for step in range(source.train):
            batch(source, step, [0])


def test_a_file_of_seq_tokens_lacks_one_for_the_last_label(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2")
    with pytest.raises(DataError, match="only 0 training sequences"):
        open_source(config(prefix, seq=12))
    assert open_source(config(prefix, seq=11)).train == 1


def test_empty_documents_are_harmless(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2", [[], [1, 2], [], [], [3, 4, 5], []])
    shard = open_megatron(prefix)
    assert edges(shard, 0, 5).tolist() == [0, 2]
    source = open_source(config(prefix, packing="none", document_mask=True))
    rows = sorted(batch(source, s, [0])["tokens"][0].tolist() for s in range(2))
    assert source.train == 2 and rows == [[1, 0, 0, 0], [3, 4, 0, 0]]


def test_a_shard_that_vanishes_during_a_run_is_still_read(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2")
    source = open_source(config(prefix))
    before = [batch(source, s, [0])["tokens"].tolist() for s in range(source.train)]
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).unlink()
    assert [batch(source, s, [0])["tokens"].tolist() for s in range(source.train)] == before


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_mapped_file_that_is_cut_while_a_run_reads_it_is_named(tmp_path: Path, suffix: str) -> None:
    """Where nobody looks, reading past the end of a mapped file ends the process without a word (SIGBUS)."""
    prefix = mapped(tmp_path / "a", "u2")
    source = open_source(config(prefix, document_mask=True))
    batch(source, 0, [0])
    size = Path(prefix + suffix).stat().st_size
    with open(prefix + suffix, "r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match=rf"a\.bin: had {size} bytes when the run started and has 10 now"):
        batch(source, 1, [0])


def test_an_index_that_is_damaged_where_nobody_looked_is_told_when_it_is_met(tmp_path: Path) -> None:
    prefix = mapped(tmp_path / "a", "u2", [[1, 2, 3]] * 1000)
    starts_at = 34 + 4 * 1000
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(starts_at + 8 * 501)  # of 127 places, none
        file.write(struct.pack("<q", 1 << 40))
    cfg = config(prefix, document_mask=True, packing="none")
    with pytest.raises(DataError, match=r"a\.bin: its index is damaged: documents near token 0 do not begin in order"):
        open_source(cfg)
    source = open_source(replace(cfg, packing="concat"))
    with pytest.raises(DataError, match=r"a\.bin: its index is damaged: documents near token 1,50\d do not begin in"):
        for step in range(source.train):
            batch(source, step, [0])


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), -float("inf")])
def test_floats_that_are_no_ids_are_told_when_they_are_met(tmp_path: Path, value: float) -> None:
    prefix = mapped(tmp_path / "a", "f4")
    source = open_source(config(prefix))
    ids = np.memmap(f"{prefix}.bin", np.float32, "r+")
    ids[2] = value  # after the start
    ids.flush()
    with pytest.raises(DataError, match=r"a\.bin: token 2 is (1\.5|nan|inf|-inf) \(float32\); token ids are whole"):
        for step in range(source.train):
            batch(source, step, [0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_a_terabyte_reads_almost_nothing(tmp_path: Path) -> None:
    """A sparse file of 2^40 bytes and an index of 2^28 documents: what is read is counted, not timed."""
    n, each = 1 << 28, 1 << 11
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(n * each * 2)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, n + 1)
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(head)
        file.truncate(34 + n * 12 + (n + 1) * 8)
        for i in [*range(0, n - 1, max(1, (n - 1) // tokens.SAMPLES)), n - 1]:  # the places that are looked at
            for k in (i, i + 1):
                if k < n:
                    file.seek(34 + 4 * k)
                    file.write(struct.pack("<i", each))
                    file.seek(34 + 4 * n + 8 * k)
                    file.write(struct.pack("<q", k * each * 2))
        file.seek(34 + 12 * n + 8 * n)
        file.write(struct.pack("<q", n))
    if (tmp_path / "a.idx").stat().st_blocks > 1 << 18:
        pytest.skip("this file system has no sparse files")
    before, faults = resident(), page_faults()
    source = open_source(config(str(tmp_path / "a"), seq=1024, batch=8, vocab=50_000))
    assert source.tokens == n * each and source.train == (n * each - 1) // 1024
    assert batch(source, 10**6, range(8))["tokens"].shape == (8, 1024)
    # Three arrays of the index at up to 127 places, the tokens at 66 of 8 pages, and the first batch: no more of a
    # larger file. Whole pages around each place would be megabytes where a disk reads far ahead.
    assert page_faults() - faults < 2000 and resident() - before < 64 << 20


def page_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def resident() -> int:
    """Bytes of this process that are its own, mapped files left out."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10
