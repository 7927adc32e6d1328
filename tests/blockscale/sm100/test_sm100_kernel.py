"""The sm_100a kernel as compiled, on the emulator, against float64: widths, schedules, types, tails, order of tiles."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from cutlass import Float32, cute
from cutlass.experimental import primitives as ptx
from emulated_kernel import SCHEDULES, Call, compile_kernel, compiled, integers, mistakes, operand, run

import ptxemu
from blockscale.kernels.parts import storage, tensorcore
from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.sm100 import Sm100Gemm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

SIZES = range(8, 257, 8)
SCHEDULE_NAMES = [f"{name}{seed}" for name, seed in SCHEDULES]
SAMPLE = (8, 40, 64, 96, 192, 224, 256)


def check(n, m, columns, k, *, call=None, out_dtype="bf16", batch=(1, 1), positive=False, **config):
    a = operand(m, k, batch=batch[0], seed=1, positive=positive)
    b = operand(columns, k, batch=batch[1], seed=2, positive=positive)
    call = call or Call()
    result = run(compiled(n, out_dtype, **config), a, b, call, out_dtype)
    assert mistakes(result, a, b, call, k) is None
    return result


@pytest.mark.parametrize("n", SAMPLE)
def test_every_width_of_tile(n):
    """Two tiles and a tail of n where tiles may be repeated, so that scales begin within an atom; a tail in m and k."""
    check(n, 33, 2 * n + 5 if n % 32 == 0 else n - 3, 329)


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("n", SIZES)
def test_every_width_of_tile_under_every_schedule(n, schedule):
    check(n, 131, 4 * n + 5 if n % 32 == 0 else n, 1329, call=Call(schedule=schedule, ctas=3))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("accumulators", [1, 2])
def test_several_waves_under_every_schedule(accumulators, schedule):
    """Six tiles for two CTAs, more k tiles than stages."""
    call = Call(ctas=2, schedule=schedule)
    result = check(32, 140, 75, 1100, call=call, accumulators=accumulators, stages=3, positive=True)
    assert result.report.counters["ctas"] == 2


def test_two_accumulators_of_192_columns():
    """Two stages are left; every tile but the first begins within an atom, and the first accumulator comes again."""
    result = check(192, 20, 3 * 192 + 5, 900, call=Call(ctas=1, schedule=("random", 4)), accumulators=2)
    assert result.report.counters["ctas"] == 1


@pytest.mark.parametrize("k", [1, 15, 16, 48, 64, 100, 256, 257, 3600])
def test_every_tail_of_k(k):
    check(32, 5, 40, k)


@pytest.mark.parametrize("m", [1, 31, 128, 129, 257])
def test_every_tail_of_m(m):
    check(32, m, 33, 80, call=Call(ctas=1))


@pytest.mark.parametrize("call", [Call(), Call(ld=72), Call(ld=71), Call(ld=72, offset=1)], ids=repr)
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_outputs_of_every_type_and_alignment(out_dtype, call):
    """Vector stores where rows are aligned, single ones otherwise; columns beyond n and bytes around stay."""
    check(32, 130, 64, 96, call=replace(call, units=(0.5, 2.0, 2.0**-16)), out_dtype=out_dtype)
    check(32, 130, 61, 96, call=replace(call, units=(0.5, 2.0, 2.0**-16)), out_dtype=out_dtype)


@pytest.mark.parametrize("batch", [(3, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("raster", ["m", "n"])
def test_batches_and_broadcast(batch, raster):
    check(32, 130, 40, 130, batch=batch, raster=raster, call=Call(ctas=4, schedule=("random", 5)))


@pytest.mark.parametrize("padding", [0x7F, 0x7E])
def test_scales_of_rows_that_do_not_exist_change_nothing(padding):
    clean, dirty = (
        run(compiled(64), operand(5, 512, padding=p), operand(70, 512, seed=2, padding=p)) for p in (0, padding)
    )
    assert clean.values.tobytes() == dirty.values.tobytes()


def test_whole_numbers_are_exact():
    a, b = integers(130, 500, seed=1), integers(100, 500, seed=2)
    result = run(compiled(64, "fp32"), a, b, Call(units=(1.0, 1.0, 1.0), factor=1.0), "fp32")
    assert np.array_equal(result.values.astype(np.float64), a.values() @ b.values().transpose(0, 2, 1))


@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_alpha_comes_before_the_cast(out_dtype):
    """All codes 6 and scales 448: the sum, 3e10, is beyond fp16; times 1e-6 it is not."""
    a, b = operand(3, 4096), operand(8, 4096)
    for t in (a, b):
        t.codes[:], t.scales[:, : t.rows] = 7, 0x7E
    call = Call(units=(1.0, 1.0, 1e-6), factor=1.0)
    result = run(compiled(32, out_dtype), a, b, call, out_dtype)
    assert mistakes(result, a, b, call, 4096) is None
    assert np.isfinite(result.values.astype(np.float64)).all()


@pytest.mark.parametrize(
    ("units", "factor"),
    [
        ((2.0**-126, 2.0**-120, 2.0**120), 2.0**120),
        ((2.0**100, 2.0**120, 2.0**-120), 2.0**-116),
        ((1.5 * 2.0**-126, 2.0**110, 1.0), 0.7),
        ((1.0, 1.0, -0.3), 1.1),
        ((1e-20, 1e-20, 1.0), 1e39),
        ((1e-30, 1e-30, 1.0), 1e60),
        ((1e20, 1e20, 1.0), 1e-46),
    ],
)
def test_products_of_scales_may_leave_the_range_of_fp32(units, factor):
    check(32, 9, 32, 64, call=Call(units=units, factor=factor), out_dtype="fp32")


def test_a_sum_of_zero_stays_zero_where_others_overflow():
    a, b = operand(3, 64, positive=True), operand(8, 64, seed=1, positive=True)
    a.codes[:, 1] = 0
    result = run(compiled(32, "fp32"), a, b, Call(units=(7e35, 7e35, -1.0), factor=1e6), "fp32")
    assert np.array_equal(result.values[0] == 0, np.repeat([[False], [True], [False]], 8, 1))
    assert np.isneginf(result.values[0, [0, 2]]).all()


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan")])
def test_alpha_that_is_no_number(factor):
    a, b = operand(2, 64, positive=True), operand(8, 64, seed=1, positive=True)
    result = run(compiled(32, "fp32"), a, b, Call(factor=factor), "fp32")
    with np.errstate(invalid="ignore"):
        expected = (a.values() @ b.values().transpose(0, 2, 1)).astype(np.float32) * np.float32(factor)
    assert np.array_equal(result.values, expected, equal_nan=True)


def test_the_same_bits_whatever_the_order():
    """Stages, accumulators, the order of tiles, CTAs and schedules do not show."""
    a, b = operand(140, 700), operand(70, 700, seed=2)
    results = [
        run(compiled(32, **config), a, b, call).values.tobytes()
        for config, call in [
            ({}, Call()),
            ({"stages": 2}, Call(schedule=("random", 7))),
            ({"accumulators": 2, "raster": "n"}, Call(ctas=2, schedule=("eager", 0))),
            ({}, Call(ctas=1, schedule=("fifo", 0))),
        ]
    ]
    assert len(set(results)) == 1


def swap_scales(t):
    t.scales[0, [3, 40], 2] = t.scales[0, [40, 3], 2]


def swap_nibbles(t):
    t.codes[0, 7, [10, 11]] = t.codes[0, 7, [11, 10]]


def skip_a_slice_of_k(t):
    t.codes[:, :, 64:80] = 0


def shift_a_block(t):
    t.scales[0, 5, [1, 2]] = t.scales[0, 5, [2, 1]]


@pytest.mark.parametrize("mistake", [swap_scales, swap_nibbles, skip_a_slice_of_k, shift_a_block])
def test_mistakes_of_layout_would_be_seen(mistake):
    a, b = operand(64, 100, seed=3), operand(32, 100, seed=4)
    result = run(compiled(32), a, b)
    assert mistakes(result, a, b, Call(), 100) is None
    mistake(a)
    assert "are wrong" in mistakes(result, a, b, Call(), 100)


def wrong_count(g, smem, cluster):
    return Ring("acc", smem.acc_full.data_ptr(), smem.acc_empty.data_ptr(), g.accumulator_slots, fills=1, empties=128)


def wrong_bytes(g, smem, cluster):
    barriers = smem.ab_full.data_ptr(), smem.ab_empty.data_ptr()
    return Ring("ab", *barriers, g.slots, fills=1, empties=1, copied=16384)


@pytest.mark.parametrize(
    ("name", "ring", "message"),
    [
        ("sum_ring", wrong_count, "ring acc: .*'empties': 128.*'empties': 4"),
        ("operand_ring", wrong_bytes, "ring ab: .*16384"),
    ],
)
def test_counts_that_do_not_add_up_are_not_compiled(name, ring, message, monkeypatch):
    monkeypatch.setattr(storage, name, ring)
    with pytest.raises(AssertionError, match=message):
        compile_kernel(Sm100Gemm((128, 32)))


def without_fences(monkeypatch):
    monkeypatch.setattr(tensorcore, "after_sync", lambda: None)


def scales_in_one_place(monkeypatch):
    columns = tensorcore.TensorCore.scale_columns
    monkeypatch.setattr(tensorcore.TensorCore, "scale_columns", lambda self, scales: columns(self, scales * 0))


def freed_while_in_use(monkeypatch):
    monkeypatch.setattr(Sm100Gemm, "finish", free_at_once)


@cute.jit
def free_at_once(self, c):
    if c.warp == 4:
        tensorcore.free(c.tmem, self.geometry.tmem_allocation, 1)


def slots_filled_for_itself_alone(monkeypatch):
    monkeypatch.setattr(Cluster, "receivers", 1)


def sums_given_up_to_itself(monkeypatch):
    monkeypatch.setattr(Cluster, "leader_rank", property(lambda self: self.x))


def sets_of_scales_not_waited_for(monkeypatch):
    behind = Ring.behind
    monkeypatch.setattr(Ring, "behind", lambda self, slots: behind(self, self.slots))


def answers_without_a_fence(monkeypatch):
    monkeypatch.setattr(cute.arch, "fence_view_async_shared", lambda: None)


PLAIN, PAIR = {}, {"rows": 256}


@pytest.mark.parametrize(
    ("fault", "config", "error", "message"),
    [
        (without_fences, PLAIN, ptxemu.FindingError, "missing tcgen05.fence"),
        (scales_in_one_place, PLAIN, ptxemu.FindingError, "race"),
        (freed_while_in_use, PLAIN, ptxemu.Error, "not allocated|freed|deallocat"),
        (slots_filled_for_itself_alone, {"rows": 128, "cluster": (2, 2)}, ptxemu.Error, "race|arriv"),
        (sums_given_up_to_itself, PAIR, ptxemu.Deadlock, "mbarrier"),
        (sets_of_scales_not_waited_for, {"accumulators": 2, "tile_n": 256}, ptxemu.FindingError, "race"),
        (answers_without_a_fence, {"schedule": "clc"}, ptxemu.FindingError, "proxy"),
    ],
)
def test_faults_of_protocol_would_be_seen(fault, config, error, message, monkeypatch):
    """Several tiles for one CTA, pair or cluster and more k tiles than stages: the numbers may come out right."""
    fault(monkeypatch)
    rest = {name: value for name, value in config.items() if name not in ("rows", "tile_n")}
    function = compile_kernel(Sm100Gemm((config.get("rows", 128), config.get("tile_n", 32)), **rest))
    columns = 140 if "tile_n" not in config else 500
    with pytest.raises(error, match=message):
        run(function, operand(130, 2600), operand(columns, 2600, seed=2), Call(ctas=1, sms=4 if config else None))


@pytest.mark.parametrize("n", [8, 64, 128, 192, 256])
def test_no_stack_and_no_spills(n, capfd):
    compile_kernel(Sm100Gemm((128, n)), "remarks{ptx}")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in capfd.readouterr().err


def load_without_wait(address, columns):
    values = ptx.tcgen05_ld("32x32b", tensorcore.tmem(address), num=columns)
    loaded = cute.TensorSSA(values, columns, Float32)
    return [loaded[i] for i in range(columns)]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_compiler_finds_nothing_to_warn_about(wrong, capfd, monkeypatch):
    """Its checker of barriers and tensor memory, which does see a wait that is missing."""
    if wrong:
        monkeypatch.setattr(tensorcore, "load", load_without_wait)
    compile_kernel(Sm100Gemm((128, 128)), "warnings{nvvm}")
    said = capfd.readouterr().err
    assert ("without tcgen05.wait" in said) == wrong
    assert ("warning" in said) == wrong
