"""The K = 96 kernel as compiled, on the emulator, against float64: rests of k, widths, clusters, orders of completion,
and each field that the sm_100a kernel has not."""

import re

import pytest
import torch
from operands import POISON, every_code_and_scale, same_bits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import blockscale as bs
import ptxemu
from blockscale import compile, plan, reference
from blockscale.config import Config
from blockscale.families import supports
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.sm103 import Sm103Gemm
from blockscale.problem import Problem, target_named

B300 = target_named("b300")
SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
PAIR = Config((256, 256), mma_k=96, accumulators=2, release="preload")
SMALL = Config((256, 64), mma_k=96, stages=3)


def operand(rows, k, seed=0):
    """Every code and every finite scale; NaN for scales of rows that are only padding."""
    t = every_code_and_scale(rows, k, seed=seed)
    scales = t.scales.view(torch.uint8).clone()
    real = torch.zeros(scales.numel(), dtype=torch.bool)
    whole = bs.NVFP4Tensor(t.codes, t.scales, t.global_scale, t.layout, torch.Size((rows, -(-k // 64) * 64)))
    real[torch.from_numpy(reference.scale_index(whole)).flatten()] = True
    scales.view(-1)[~real] = POISON
    scales = scales.view(torch.float8_e4m3fn)
    return bs.NVFP4Tensor.from_parts(t.codes, scales, t.global_scale, shape=t.shape, check_values=False)


def check(m, n, k, config, *, schedule=("lazy", 0), sms=2):
    """The result and the report; a finding raises, and so does an element beside the result that was written."""
    a, b = operand(m, k), operand(n, k, seed=1)
    wide = torch.full((m, n + 3), torch.nan)
    y = wide[:, :n]
    with bs.emulated("sm_103a", schedule=schedule[0], seed=schedule[1], sms=sms, checks="strict") as gpu:
        bs.gemm(a, b, out=y, out_dtype=torch.float32, config=config)
    exact = reference.gemm(a, b)
    c = reference.tensor_core_tolerance(k)
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=y.dtype, c=c))
    assert wide[:, n:].isnan().all()
    return y.clone(), gpu.report


def ptx(config, **product):
    """Of a kernel for no size in particular."""
    problem = Problem(300, 300, 800, out_dtype="fp16", **product)
    assert supports(problem, B300, config) is None
    return plan.artefact(problem, B300, config, plan.store.default_store()).parts["ptx"].read_text()


@pytest.mark.parametrize(
    "k",
    [1, 64, 96, 100, 192, 256, 257, 384, 448, 512, 513, 576, 640, 700, 768, 769, 1024, 1280, 1536, 2304],
)
def test_every_rest_of_k(k):
    """One to eight instructions, one to three slots of codes, of which the last instruction may need one more."""
    check(33, 40, k, Config((128, 32), mma_k=96, stages=2))


@pytest.mark.parametrize("tile", [(128, 8), (128, 96), (128, 160), (256, 48), (256, 192), (256, 224)], ids=str)
def test_widths(tile):
    """Two columns of tiles where tiles may be repeated, so that scales begin within an atom."""
    repeats = tile[1] % 32 == 0 and tile[1] not in (96, 224)
    check(130, 2 * tile[1] + 5 if repeats else tile[1], 850, Config(tile, mma_k=96))


@pytest.mark.prove
@pytest.mark.parametrize(
    "tile", [*((128, n) for n in range(8, 257, 8)), *((256, n) for n in range(16, 257, 16))], ids=str
)
def test_every_width(tile):
    repeats = tile[1] % 32 == 0 and tile[1] not in (96, 224)
    check(290, 2 * tile[1] + 5 if repeats else tile[1], 1345, Config(tile, mma_k=96), schedule=("random", 1), sms=4)


def test_widths_that_are_not_repeated():
    """The instruction takes scales of a tile's rows from two atoms at most, or from one."""
    for columns in (96, 224):
        reason = supports(Problem(128, columns + 1, 768), B300, Config((128, columns), mma_k=96))
        assert reason.argument == "config.tile"
        assert "no multiple of 32, or 96 or 224" in reason.message
        assert supports(Problem(128, columns, 768), B300, Config((128, columns), mma_k=96)) is None


def test_overlapping_sums_of_a_pair_under_every_schedule():
    """Three tiles a pair, a whole k tile of 768 and one with two slots of codes whose last instruction needs a third.
    The same bits whatever the schedule."""
    found = [check(200, 700, 1280, PAIR, schedule=schedule) for schedule in SCHEDULES]
    assert all(same_bits(y, found[0][0]) and report.counters["ctas"] == 2 for y, report in found)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_few_slots_under_every_schedule(schedule):
    """Two slots of codes are the fewest, and beside them two of scales; the rest of k takes three. Tiles on request."""
    config = Config((128, 32), mma_k=96, stages=2, accumulators=2, schedule="clc", pdl=True)
    check(150, 100, 1408, config, schedule=schedule)


@pytest.mark.parametrize(
    ("cluster", "fallback", "sms"),
    [((4, 2), (2, 1), 12), ((8, 2), (2, 1), 20), ((4, 4), (2, 1), 20), ((2, 4), None, 8)],
    ids=str,
)
def test_clusters(cluster, fallback, sms):
    """More than eight CTAs too; of two shapes the emulator splits a seeded half."""
    config = Config((256, 64), mma_k=96, stages=3, cluster=cluster, fallback_cluster=fallback, prefetch=3)
    check(128 * cluster[0] + 5, 64 * cluster[1] + 40, 900, config, schedule=("random", 1), sms=sms)


def test_clusters_of_single_ctas_request_tiles():
    config = Config((128, 32), mma_k=96, cluster=(2, 2), fallback_cluster=(1, 1), schedule="clc")
    check(700, 100, 850, config, schedule=("random", 2), sms=6)


def test_operands_of_a_cluster_are_fetched_once_and_none_beyond_k():
    """k = 512: two slots of codes, and eight atoms of scales in three slots. Of a 512 rows to both columns of CTAs, of
    b 128 rows to all; of the scales of a four atoms a step of k, of b one a column."""
    _, report = check(512, 128, 512, Config((256, 64), mma_k=96, cluster=(4, 2)), sms=8)
    fetched = 2 * (512 + 128) * 128 + 8 * (4 + 2) * 512
    assert report.counters["bytes"]["TMA load, global memory"] == fetched


@pytest.mark.parametrize("ownership", ["turns", "lines"])
def test_orders_with_uneven_shares(ownership):
    """Six blocks of tiles for four pairs."""
    group = 2 if ownership == "turns" else 1
    config = Config((256, 64), mma_k=96, stages=3, raster="n", group=group, ownership=ownership, ctas=8)
    check(600, 128, 200, config, sms=8)


def test_a_batch_with_all_that_an_epilogue_does():
    a, b, bias = operand(290, 520), operand(70, 520, seed=1), torch.randn(70)
    batch = bs.NVFP4Tensor(
        a.codes.view(2, 145, -1),
        every_code_and_scale(145, 520).scales.view(torch.uint8).repeat(2, 1, 1).view(torch.float8_e4m3fn),
        a.global_scale,
        a.layout,
        torch.Size((2, 145, 520)),
    )
    options = {"bias": bias, "alpha": 0.01}
    config = Config((256, 64), mma_k=96, accumulators=2)
    with bs.emulated("sm_103a", checks="strict", sms=4):
        y = bs.gemm(batch, b, out_dtype=torch.float32, config=config, activation="silu", **options)
    exact = reference.gemm(batch, b, activation="silu", **options)
    c = reference.tensor_core_tolerance(520)
    reference.check(y, exact, reference.tolerance(batch, b, exact, out_dtype=y.dtype, c=c, **options))


# Fields of their own


def loads(text):
    """The TMA loads of a kernel in order: (offset in shared memory, hint for L2)."""
    constants = dict(re.findall(r"mov\.b64\s+(%rd\d+), (\d+);", text))
    found = re.findall(r"cp\.async\.bulk\.tensor\S*shared::cluster\.global\S* \[%r\d+\+(\d+)\].*, (%rd\d+);", text)
    return [(int(offset), constants.get(hint, hint)) for offset, hint in found]


def test_the_operand_that_is_loaded_first():
    """Codes of b are behind those of a in shared memory, and so are its scales."""
    b_first = Config((256, 64), mma_k=96, stages=3, first="b")
    one, other = ([offset for offset, _ in loads(ptx(config))] for config in (SMALL, b_first))
    assert one == sorted(one)
    assert other == [one[i] for i in (1, 0, 3, 2)]
    check(300, 70, 850, b_first)


def test_hints_of_each_operand():
    """Codes and scales of each have their own; what is dropped turns from one hint to the other."""
    first, last = str(0x12F0000000000000), str(0x14F0000000000000)
    for i, field in enumerate(("l2_a", "l2_b", "l2_sfa", "l2_sfb")):
        text = ptx(Config((256, 64), mma_k=96, stages=3, **{field: "evict_last"}))
        assert [hint for _, hint in loads(text)] == [last if i == j else "0" for j in range(4)]
    kept = Config((256, 64), mma_k=96, stages=3, l2_a="evict_last", l2_sfa="evict_last", drop=1, raster="n")
    chosen = re.findall(rf"selp\.b64\s+(%rd\d+), {last}, {first},", text := ptx(kept))
    assert [hint for _, hint in loads(text)] == [chosen[0], "0", chosen[1], "0"]
    check(300, 200, 300, kept)


def test_dropping_is_refused_where_nothing_was_kept():
    reason = supports(Problem(300, 200, 300), B300, Config((256, 64), mma_k=96, drop=1))
    assert reason.argument == "config.drop"


def test_paced_stores():
    """Between pieces of all tiles but the last; a pause changes no result."""
    assert "nanosleep" not in ptx(PAIR)
    paced = Config((256, 256), mma_k=96, accumulators=2, release="preload", pace=300)
    assert "nanosleep.u32 300;" in ptx(paced)
    reports = [check(200, n, 100, paced)[1] for n in (250, 500)]
    one, two = (sum(n for name, n in r.counters["instructions"].items() if "nanosleep" in name) for r in reports)
    assert (one, two) == (0, 7 * 4 * 2)  # between eight pieces, 4 warps, 2 CTAs


def test_unrolled_loads():
    counts = [len(loads(ptx(Config((256, 64), mma_k=96, stages=3, unroll=unroll)))) for unroll in (1, 2)]
    assert counts[1] >= 2 * counts[0]
    check(300, 70, 1600, Config((256, 64), mma_k=96, stages=3, unroll=2))


def test_fixed_sizes():
    """The kernel asks for none of them, and is for no others."""
    sizes = (300, 200, 850)
    fixed = Config((256, 64), mma_k=96, stages=3, fixed=sizes)
    check(*sizes, fixed)
    check(300, 60, 850, Config((128, 64), mma_k=96, stages=2, swap=True, fixed=(300, 60, 850)))
    reason = supports(Problem(300, 200, 851), B300, fixed)
    assert (reason.argument, "expected None or (300, 200, 851)" in reason.message) == ("config.fixed", True)
    general, special = (
        compile.compile_kernel(B300, config, Problem(*sizes))["ptx"].decode() for config in (SMALL, fixed)
    )
    assert special.count("div.") < general.count("div.")
    assert len(special) < len(general)


def test_preloaded_sums():
    """All that two accumulators share is read, and given up, before any of it is converted."""
    text = ptx(PAIR)
    begin = text.index("tcgen05.ld")
    converted = text.index("cvt.rn.f16x2", begin)
    assert text.count("tcgen05.ld", begin, converted) == 3  # 72 columns, by 32
    assert "mbarrier.arrive" in text[begin:converted]


# What may not be left out


@pytest.fixture
def mutant(monkeypatch, tmp_path):
    """A way to change the kernel; what is compiled then goes to a store of its own."""
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))

    def change(cls, name, replacement):
        monkeypatch.setattr(cls, name, replacement)

    return change


def test_scales_in_use_are_not_overwritten_unseen(mutant):
    """Without the wait for what had a set of columns before."""
    kept = Ring.wait_empty
    mutant(Ring, "wait_empty", lambda ring, slot: None if ring.name == "sf" and slot.first == 0 else kept(ring, slot))
    config = Config((128, 256), mma_k=96, accumulators=2, stages=4)
    with pytest.raises(ptxemu.Error):
        check(40, 300, 1600, config)


def test_a_slot_that_was_not_loaded_is_not_read_unseen(mutant):
    """Where rows of the last instruction go on in the next slot, although k has ended."""
    kept = Sm103Gemm.descriptors
    mutant(Sm103Gemm, "descriptors", lambda kernel, core, codes, slots: kept(kernel, core, codes, None))
    with pytest.raises(ptxemu.Error):
        check(33, 40, 256, Config((128, 64), mma_k=96, stages=4))


def test_repeated_visits_to_a_ring_are_counted():
    ring = Ring("r", None, None, 2, fills=1, empties=2)
    ring.traced.update(fills=1, empties=2)
    ring.again().traced.update(empties=2)
    ring.check()
    ring.again().traced.update(empties=1)
    with pytest.raises(AssertionError, match=r"ring r: .* traced in a repetition"):
        ring.check()


def test_k64_is_the_sm_100a_kernel():
    config = Config((256, 64), accumulators=2, pdl=True)
    problem = Problem(300, 300, 800)
    texts = [
        plan.artefact(problem, target, config, plan.store.default_store()).parts["ptx"].read_text()
        for target in (target_named("b200"), B300)
    ]
    assert texts[0].replace("sm_100a", "sm_103a") == texts[1]


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"mma_k": 128}, "config.mma_k"),
        ({"mma_k": 64, "first": "b"}, "config.first"),
        ({"mma_k": 64, "release": "preload"}, "config.release"),
        ({"l2_scales": "evict_last"}, "config.l2_scales"),
        ({"stages": 1}, "config.stages"),
        ({"cluster": (8, 4)}, "config.cluster"),
        ({"ownership": "lines", "group": 2}, "config.group"),
        ({"ownership": "lines", "schedule": "clc"}, "config.schedule"),
        ({"ownership": "rows"}, "config.ownership"),
        ({"pace": -1}, "config.pace"),
        ({"unroll": 0}, "config.unroll"),
    ],
    ids=str,
)
def test_what_is_refused(fields, argument):
    config = Config(**{"tile": (256, 64), "mma_k": 96, **fields})
    assert supports(Problem(300, 300, 800), B300, config).argument == argument
