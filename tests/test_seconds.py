"""Seconds of kernels and collectives: hand-counted arithmetic, and the measurements they stand on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch import fx

from dtrain import hardware, layout
from dtrain.plan import ledger as ledgers
from dtrain.plan import seconds as sec
from dtrain.plan.ledger import Level
from dtrain.plan.predict import predict
from dtrain.plan.seconds import CONSTANTS, Constants, Machine, Piece
from dtrain.program import async_tp, cost
from dtrain.program.lower import Graph
from dtrain.program.passes import Cut

PLAIN = Constants(matmul=0.5, memory=0.5, gap=0.0, link=0.5, net=0.5, overlap=0.0)


def on(gpu: str, constants: Constants | None = None, **links: float) -> Machine:
    g = hardware.gpu(gpu)
    return Machine(g, constants or CONSTANTS[g.kind], {**g.links, **links})


# ------------------------------------------------------------------------------------------------------ products


def test_a_product_that_fills_its_waves() -> None:
    """132 tiles of 256 x 128 on the 132 multiprocessors of an H100: the whole peak times its share."""
    h100 = on("h100-sxm", PLAIN)
    took = sec.product(h100, cost.Product(256 * 12, 128 * 11, 4096, 1, torch.bfloat16))
    assert took == pytest.approx(2 * 256 * 12 * 128 * 11 * 4096 / (989.4e12 * 0.5))


def test_the_last_wave_takes_as_long_as_a_full_one() -> None:
    h100 = on("h100-sxm", PLAIN)
    full = sec.product(h100, cost.Product(256 * 12, 128 * 11, 8192, 1, torch.bfloat16))
    more = sec.product(h100, cost.Product(256 * 12, 128 * 12, 8192, 1, torch.bfloat16))
    assert more > 1.15 * full  # 144 tiles, or smaller ones at a lower rate, for 1.09 times the work


def test_dims_are_filled_up_and_rows_begin_at_16_bytes() -> None:
    a100 = on("a100-80", PLAIN)
    whole, part, odd = (sec.product(a100, cost.Product(8192, 8192, k, 1, torch.bfloat16)) for k in (4096, 4040, 4033))
    assert part == whole and odd == pytest.approx(2 * whole)


def test_a_small_result_is_split_along_the_inner_dimension() -> None:
    """128 x 128 from 1M: one tile would leave 107 of 108 multiprocessors idle."""
    a100 = on("a100-80", PLAIN)
    one_tile = 2 * 128 * 128 * 2**20 / (312e12 * 0.5 / 108)
    assert sec.product(a100, cost.Product(128, 128, 2**20, 1, torch.bfloat16)) < one_tile / 7


def test_precisions_have_their_peaks() -> None:
    v100 = on("v100-32")
    assert [v100.flops(d) / 1e12 for d in (torch.float16, torch.float32, torch.float64)] == [125, 15.7, 7.8]
    assert v100.flops(torch.bfloat16) == 15.7e12  # its tensor cores have none
    assert on("cpu").flops(torch.float32) == 1e11 and on("cpu").memory == pytest.approx(0.8e10)


# ----------------------------------------------------------------------------------------------- fusion and memory


def graph(fn: object, *examples: torch.Tensor) -> fx.Graph:
    return fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*examples).graph  # type: ignore[arg-type]


def rows(g: fx.Graph, fused: bool = True) -> list[tuple[str, int, int]]:
    return [(k.op, k.read, k.written) for k in cost.kernels(g, fused).values()]


def test_a_chain_between_two_products_is_one_kernel() -> None:
    x, w = torch.empty(64, 64), torch.empty(64, 64)
    g = graph(lambda x, w: [(torch.relu(x @ w) * 2 + 1) @ w], x, w)
    n = 64 * 64 * 4
    assert rows(g) == [("mm", 2 * n, n), ("add", n, n), ("mm", 2 * n, n)]
    apart = rows(g, fused=False)
    assert [r[1:] for r in apart] == [(2 * n, n), (n, n), (n, n), (n, n), (2 * n, n)]


def test_a_norm_is_one_kernel_that_reads_its_row_once() -> None:
    x = torch.empty(32, 256)

    def norm(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)]

    assert rows(graph(norm, x)) == [("mul", 32 * 256 * 4, 32 * 256 * 4)]


def test_common_inputs_are_read_once_and_sums_over_columns_are_apart() -> None:
    x, y = torch.empty(32, 256), torch.empty(32, 256)
    n = 32 * 256 * 4
    assert rows(graph(lambda x, y: [x * y, x + y], x, y)) == [("add", 2 * n, 2 * n)]
    got = rows(graph(lambda x, y: [x * y, (x + y).sum(0)], x, y))
    assert sorted(got) == [("mul", 2 * n, n), ("sum", 2 * n, 256 * 4)]


def test_a_lookup_reads_the_rows_it_takes() -> None:
    table, ids = torch.empty(10_000, 64), torch.zeros(8, dtype=torch.int64)
    got = rows(graph(lambda t, i: [torch.nn.functional.embedding(i, t) * 2], table, ids))
    assert got == [("mul", 8 * 64 * 4 + 8 * 8, 8 * 64 * 4)]


def test_pieces_of_a_value_are_read_as_pieces() -> None:
    x = torch.empty(8, 64)
    n = 8 * 64 * 4
    got = rows(graph(lambda x: [torch.cat([p * 2 for p in x.split(2)[:2]])], x))
    assert got == [("cat", n // 2, n // 2)]


def test_pointwise_kernels_are_bound_by_memory() -> None:
    g = graph(lambda x: [x * 2 + 1], torch.empty(2**20))
    (k,) = cost.kernels(g).values()
    assert sec.kernel(on("a100-80", replace(PLAIN, gap=1e-6)), k) == pytest.approx(8 * 2**20 / (2039e9 / 2) + 1e-6)


def test_math_attention_moves_its_scores() -> None:
    """Plain operations: the scores (1 x 4 x 8 x 8 doubles a head) are written by one product, read and written by the
    softmax, and read by the other."""
    seg = tiny.segment("gpt2", "block", "", ("model.dropout=0.0", "kernels.attention=math"))
    found = list(cost.kernels(seg.graphs["forward"].module.graph).values())
    scores = 4 * 8 * 8 * 8
    products = [k for k in found if k.op == "bmm"]
    assert [k.written for k in products] == [scores, 8 * 16 * 8]
    between = [k for k in found if k.written == scores and k.read >= scores and k not in products]
    assert len(between) == 1


# ------------------------------------------------------------------------------------------------------ attention


def attend(
    length: int, heads: int, batch: int, kernel: str = "flash", dtype: torch.dtype = torch.bfloat16
) -> cost.Attention:
    q, k, v = (torch.empty(batch, length, heads, 128, dtype=dtype, device="meta") for _ in range(3))
    g = graph(lambda q, k, v: list(torch.ops.dtrain.attention(q, k, v, None, True, kernel)), q, k, v)
    (a,) = (k.does for k in cost.kernels(g).values() if isinstance(k.does, cost.Attention))
    return a


@pytest.mark.parametrize(
    ("gpu", "kernel", "length", "tflops"),
    [("a100-80", "flash", 2048, 155), ("a100-80", "flash", 16384, 189), ("h100-sxm", "flash", 4096, 294),
     ("h100-sxm", "auto", 8192, 447), ("b200", "auto", 8192, 834)],
)  # fmt: skip
def test_attention_reaches_what_was_measured(gpu: str, kernel: str, length: int, tflops: float) -> None:
    """As it was measured, with 16k tokens and 16 heads of 128, whose blocks fill the GPU but for the last wave."""
    node = attend(length, 16, 16384 // length, kernel)
    rate = node.flops / sec.attention(on(gpu), node) / 1e12
    blocks, sms = 16 * 16384 / 128, hardware.gpu(gpu).processors
    assert rate * math.ceil(blocks / sms) * sms / blocks == pytest.approx(tflops, rel=0.01)


def test_few_heads_do_not_fill_a_gpu() -> None:
    h100 = on("h100-sxm")
    one, eight = (sec.attention(h100, attend(4096, heads, 1)) for heads in (1, 4))
    assert one == pytest.approx(eight)  # 32 blocks and 128, on 132 multiprocessors


def test_which_kernel_runs_where() -> None:
    assert sec.attention_kernel(on("h100-sxm"), attend(512, 1, 1, "auto")) == "cudnn"
    assert sec.attention_kernel(replace(on("h100-sxm"), deterministic=True), attend(512, 1, 1, "auto")) == "flash"
    assert sec.attention_kernel(on("a100-80"), attend(512, 1, 1, "auto")) == "flash"
    assert sec.attention_kernel(on("v100-32"), attend(512, 1, 1, "auto", torch.float16)) == "efficient"
    assert sec.attention_kernel(on("cpu"), attend(512, 1, 1, "auto")) == "cpu"


# ---------------------------------------------------------------------------------------------------- collectives

NODE = (Level("tp", "nvlink", 8),)


@pytest.mark.parametrize(
    ("size", "us"),
    [(2**10, 17), (2**16, 19.5), (2**18, 20.4), (2**20, 27.4), (2**21, 42.2), (2**22, 54.2), (2**23, 83), (2**24, 124),
     (2**25, 199), (2**26, 325), (2**27, 586), (2**28, 1113), (2**29, 2151), (2**30, 4029), (2**32, 15749),
     (2**34, 62648)],
)  # fmt: skip
def test_the_measured_all_reduce_of_eight_h100(size: int, us: float) -> None:
    h100 = on("h100-sxm", replace(CONSTANTS["hopper"], link=361 / 450))
    assert sec.collective(h100, "all_reduce", size, NODE) * 1e6 == pytest.approx(us, rel=0.03)


def test_small_messages_take_the_same_time_and_large_ones_reach_the_link() -> None:
    h100 = on("h100-sxm", replace(CONSTANTS["hopper"], link=361 / 450))
    small = [sec.collective(h100, "all_reduce", n, NODE) for n in (2**10, 2**14, 2**18)]
    assert max(small) / min(small) < 1.25
    gather = sec.collective(h100, "all_gather_into_tensor", 2**34, NODE)
    assert 7 / 8 * 2**34 / gather == pytest.approx(361e9, rel=0.01)
    assert gather == sec.collective(h100, "reduce_scatter_tensor", 2**34, NODE)
    # Tensor-parallel messages live where a ring reaches 150 to 350 of its 361 GB/s.
    rates = [7 / 8 * n / sec.collective(h100, "all_gather_into_tensor", n, NODE) for n in (2**23, 2**27)]
    assert 130e9 < rates[0] < rates[1] < 350e9


@pytest.mark.parametrize(("gpu", "link", "busbw"), [("a100-80", 0.78, 235e9), ("b200", 0.76, 838e9)])
def test_measured_large_all_reduces(gpu: str, link: float, busbw: float) -> None:
    machine = on(gpu, replace(CONSTANTS[hardware.gpu(gpu).kind], link=link))
    assert 1.75 * 2**34 / sec.collective(machine, "all_reduce", 2**34, NODE) == pytest.approx(busbw, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "size", "busbw", "off"),
    [("h200", 2**32, 365e9, 0.1), ("b200", 2**34, 382e9, 0.1), ("b200", 2**30, 362e9, 0.1),
     ("b200", 2**29, 327e9, 0.15)],
)  # fmt: skip
def test_measured_all_reduces_of_four_nodes(gpu: str, size: int, busbw: float, off: float) -> None:
    """Large ones. Below 256 MiB the published figures, over EFA, are lower than InfiniBand's latencies explain."""
    levels = (Level("dp", "nvlink", 8), Level("dp", "ib", 4))
    took = sec.collective(on(gpu), "all_reduce", size, levels)
    assert 2 * 31 / 32 * size / took == pytest.approx(busbw, rel=off)


def test_levels_work_at_the_same_time() -> None:
    """8 GPUs of 4 nodes gather 32 GB: 28 over NVLink, 3 over the NIC, which takes longer at an eighteenth."""
    machine = on("h100-sxm", PLAIN, nvlink=450e9, ib=25e9)
    took = sec.collective(machine, "all_gather_into_tensor", 32e9, (Level("fsdp", "nvlink", 8), Level("fsdp", "ib", 4)))
    assert took == pytest.approx(3e9 / (25e9 * 0.5), rel=0.01)


def test_rings_pay_for_hops_and_trees_for_their_height() -> None:
    def took(op: str, nodes: int) -> float:
        return sec.collective(on("h100-sxm"), op, 1024, (Level("dp", "ib", nodes),))

    assert took("all_gather_into_tensor", 512) - took("all_gather_into_tensor", 256) == pytest.approx(
        256 * 2.7e-6, rel=1e-3
    )
    assert took("all_reduce", 512) - took("all_reduce", 256) == pytest.approx(2 * 5.0e-6, rel=1e-3)
    assert sec.collective(on("h100-sxm"), "all_reduce", 1024, (Level("dp", "ib", 1),)) == 0


def test_nics_that_gpus_share() -> None:
    """Eight 12.5 GB/s NICs for sixteen GPUs: 6.25 GB/s each, when all use them."""
    made = sec.machine(layout.load(tiny.LAYOUTS / "gpt2-8.3b-32x16-v100.yaml"))
    assert made.links == {"nvlink": 150e9, "pcie": 16e9, "ib": 6.25e9} and made.gpu.processors == 80
    net = made.constants.net
    send = sec.collective(made, "send", 100e6, (Level("pp", "ib", 2),))
    assert send == pytest.approx(100e6 / (6.25e9 * net), rel=0.01)


def test_a_domain_larger_than_a_node() -> None:
    """18 trays of 4 GPUs share NVLink: 72 of them gather without a NIC."""
    rack = layout.loads(
        """
cluster: {nodes: 18, gpus_per_node: 4, gpu: gb200, nvlink_domain: 72}
mesh: {fsdp: {size: 72}}
shard: {params: {embed: fsdp}, compute: {batch: fsdp}}
model: {family: llama, layers: 1, embed: 64, heads: 4, mlp: 64, vocab: 64}
data: {source: synthetic, seq: 8, batch: 72}
run: {steps: 1, precision: bf16}
"""
    )
    levels = tuple(Level("fsdp", link, n) for link, n in layout.levels(rack, "fsdp", 72))
    assert levels == (Level("fsdp", "nvlink", 72),)
    machine = sec.machine(rack)
    took = sec.collective(machine, "all_gather_into_tensor", 2**30, levels)
    assert took < 2**30 / (900e9 * machine.constants.link) + 1e-3


def test_a_dim_over_two_racks_is_booked_on_both_links() -> None:
    """Two NVL72 racks of trays of 4: tp 8 spans two trays and is all NVLink, of dp 18 nine replicas share a rack."""
    racks = layout.loads(
        """
cluster: {nodes: 36, gpus_per_node: 4, gpu: gb200, nvlink_domain: 72}
mesh: {dp: {size: 18, link: [nvlink, ib]}, tp: {size: 8, link: nvlink}}
shard:
  params:  {heads: tp, kv_heads: tp, mlp: tp, vocab: tp}
  compute: {heads: tp, kv_heads: tp, mlp: tp, vocab: tp, batch: dp}
model: {family: llama, layers: 1, embed: 64, heads: 8, mlp: 64, vocab: 64}
data: {source: synthetic, seq: 8, batch: 18}
run: {steps: 1, precision: bf16}
"""
    )
    p = predict(racks)
    assert [(x.link, x.ranks) for x in ledgers.levels(racks, "tp")] == [("nvlink", 8)]
    assert [(x.link, x.ranks) for x in ledgers.levels(racks, "dp")] == [("nvlink", 9), ("ib", 2)]
    (sums,) = [e for e in p.ledger[0] if e.phase == "reduce" and e.segment == "block" and e.dims == ("dp",)]
    near, far = sums.shares
    assert (near, far) == pytest.approx((2 * 8 / 9 * sums.bytes, 2 * 1 / 2 * sums.bytes / 9))
    assert ledgers.by_link(p.ledger[0])["ib"] >= far


@pytest.mark.parametrize(
    ("trays", "dp", "domain", "refused"),
    [
        (4, 1, 72, None),
        (16, 4, 72, None),
        (4, 1, 4, "tp 16 leaves its node of 4"),
        (36, 9, 72, "leaves its node of 72"),
    ],
)
def test_tp_16_over_trays_needs_their_nvlink(trays: int, dp: int, domain: int, refused: str | None) -> None:
    """Trays of 4 in a rack of 72, of which it may use a part. In two whole racks the fifth group would lie in both."""
    text = f"""
cluster: {{nodes: {trays}, gpus_per_node: 4, gpu: gb200, nvlink_domain: {domain}}}
mesh: {{dp: {{size: {dp}}}, tp: {{size: 16}}}}
shard: {{params: {{mlp: tp}}, compute: {{mlp: tp, batch: dp}}}}
model: {{family: llama, layers: 1, embed: 64, heads: 16, mlp: 64, vocab: 64}}
data: {{source: synthetic, seq: 8, batch: {dp}}}
run: {{steps: 1, precision: bf16}}
"""
    if refused is None:
        assert layout.levels(layout.loads(text), "tp", 16) == (("nvlink", 16),)
    else:
        with pytest.raises(layout.LayoutError, match=refused):
            layout.loads(text)


# --------------------------------------------------------------------------------------------------------- graphs


def test_a_graph_of_collectives_is_left_with_its_last_ones_in_flight() -> None:
    """ZeRO-1 with tensor parallelism: gradients are scattered over dp, then norms' are summed over tp, and that sum is
    what `reduce_wait` waits for."""
    more = ("shard.optimizer={embed: dp}",)
    made, seg = tiny.make("llama", "dp2 tp2", more), tiny.segment("llama", "block", "dp2 tp2", more)
    machine = sec.machine(made.layout)

    def levels(group: str) -> tuple[Level, ...]:
        return (Level(group.partition("/")[0], "loopback", 2),)

    def launches(g: Graph) -> list[cost.Launch]:
        return cost.launches(g.module.graph, g.inputs, g.outputs)

    start, wait = (sec.pieces(machine, launches(seg.graphs[g]), levels) for g in ("reduce", "reduce_wait"))
    assert [p.stream for p in start if p.kind == "start"] == ["dp/reduce", "tp/reduce"]
    waited = {p.name for p in wait if p.kind == "wait"}
    assert waited == {p.name for p in start if p.kind == "start" and p.stream == "tp/reduce"}


def test_a_graph_alone_takes_its_kernels_and_its_collectives() -> None:
    parts = [
        Piece("run", 1.0), Piece("start", 2.0, stream="tp", name="a"), Piece("run", 0.5), Piece("wait", name="a"),
        Piece("start", 1.0, stream="tp", name="b"), Piece("start", 1.0, stream="tp", name="c"), Piece("wait", name="c"),
    ]  # fmt: skip
    assert sec.at_once(parts) == (1.5, 1.5 + 2.0)


# ------------------------------------------------------------------- collectives in one operation with their products


def fused_launches(name: str) -> list[cost.Launch]:
    g = tiny.segment("llama", "block", "tp4").graphs[name]
    cut = async_tp.fuse(Cut(g.module, g.inputs, g.outputs)).cut
    return cost.launches(cut.module.graph, cut.inputs, cut.outputs, fused=True)


def test_a_fused_gather_has_its_bytes_and_its_products() -> None:
    """A block's forward over 4 ranks, 8 tokens of 16 doubles; q k v of the first gather, gate and up of the second."""
    found = [x for x in fused_launches("forward") if isinstance(x, cost.Together)]
    assert [(x.collective.op, x.collective.bytes, x.ranks) for x in found] == [
        (op, 8 * 16 * 8, 4) for op in ("all_gather_into_tensor", "reduce_scatter_tensor") * 2
    ]
    shapes = [[(k.does.m, k.does.n, k.does.k) for k in x.kernels if isinstance(k.does, cost.Product)] for x in found]
    assert shapes == [[(8, 4, 16)] * 3, [(8, 16, 4)], [(8, 6, 16)] * 2, [(8, 16, 6)]]
    last = found[1].kernels[-1]
    assert (last.op, last.read, last.written) == ("sum", 8 * 16 * 8, 2 * 16 * 8)  # parts of four ranks, added up


def test_fusing_moves_work_and_adds_none() -> None:
    """The same products, the same bytes on the wire; and no kernel but the sums of what came."""
    g = tiny.segment("llama", "block", "tp4").graphs["forward"]
    before, after = cost.launches(g.module.graph, g.inputs, g.outputs, fused=True), fused_launches("forward")
    inside = [k for x in after if isinstance(x, cost.Together) for k in x.kernels]
    kernels = [x for x in after if isinstance(x, cost.Kernel)]
    assert not any(isinstance(x, (cost.Collective, cost.Wait)) for x in after)
    for op in ("mm", "attention"):
        was = [k.does for k in before if isinstance(k, cost.Kernel) and k.op == op]
        assert sorted(map(str, was)) == sorted(str(k.does) for k in (*inside, *kernels) if k.op == op)
    wire = sum(x.bytes for x in before if isinstance(x, cost.Collective))
    assert wire == sum(x.collective.bytes for x in after if isinstance(x, cost.Together))


@pytest.mark.parametrize(("rate", "waits"), [(1e15, 0.0), (1e9, 1.0)])
def test_what_is_fused_takes_as_long_as_the_slower_of_the_two(rate: float, waits: float) -> None:
    """Four parts, one of which is here. Over a fast link the kernels never wait; over a slow one all but the kernels of
    one part run while the other three parts travel."""
    machine = on("h100-sxm", PLAIN, nvlink=rate)
    product = cost.Kernel("mm", 0, 0, does=cost.Product(2**14, 2**13, 2**13, 1, torch.bfloat16))
    gather = cost.Collective("all_gather_into_tensor", "tp", 2**28, "gather")
    level = (Level("tp", "nvlink", 4),)
    run = sec.kernel(machine, product)
    (piece,) = sec.pieces(machine, [cost.Together(gather, 4, (product,))], lambda group: level)
    wire = sec.collective(machine, gather.op, gather.bytes, level)
    assert piece.kind == "run" and piece.seconds == pytest.approx(run)
    assert piece.wire == pytest.approx(waits * (wire + run / 4 - run)) and (piece.wire > 0) == (waits > 0)
    assert sec.at_once([piece]) == (pytest.approx(run), pytest.approx(piece.wire))
