"""The epilogue of the sm_100a kernel on the emulator: every way of storing, what it gives and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

import torch
from emulated_kernel import DTYPES, SCHEDULES, Call, compile_kernel, compiled, mistakes, operand, run

from blockscale import reference
from blockscale.kernels.parts import staging, store
from blockscale.kernels.sm100 import Sm100Gemm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

WAYS = {
    "direct": {"read": 64},
    "direct early": {"read": 64, "release": "early"},
    "direct evict_first": {"l2_out": "evict_first"},
    "tma": {"store": "tma"},
    "tma early, two columns of boxes": {"store": "tma", "read": 64, "release": "early"},
    "tma one slot, evict_last": {"store": "tma", "read": 64, "store_slots": 1, "l2_out": "evict_last"},
    "tma_rows": {"store": "tma_rows", "read": 64, "store_slots": 1},
    "swapped": {"swap": True},
    "swapped early": {"swap": True, "read": 64, "release": "early"},
}
SCHEDULE_NAMES = [f"{name}{seed}" for name, seed in SCHEDULES]

PLAIN = Call()


def check(n, m, columns, k, *, call=PLAIN, out_dtype="bf16", **config):
    a, b = operand(m, k, seed=1), operand(columns, k, seed=2)
    result = run(compiled(n, out_dtype, **config), a, b, call, out_dtype)
    assert mistakes(result, a, b, call, k) is None
    return result


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing(way):
    """Tails in m and n, rows that vectors of 32 and of 16 bytes and TMA may store, and rows that they may not."""
    for columns, ld, offset, seed in [(152, 160, 0, 1), (150, 152, 0, 2), (152, 160, 8, 3), (150, 151, 1, 4)]:
        check(64, 140, columns, 80, call=Call(ld=ld, offset=offset, ctas=3, schedule=("random", seed)), **WAYS[way])


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing_every_type(way, out_dtype, schedule):
    for n in (32, 128):
        call = Call(ld=160, ctas=2, schedule=schedule)
        check(n, 140, 152, 330, call=call, out_dtype=out_dtype, accumulators=2, **WAYS[way])


@pytest.mark.parametrize("n", [8, 24, 96, 192])
@pytest.mark.parametrize("out_dtype", ["fp16", "fp32"])
def test_boxes_of_every_width(n, out_dtype):
    """Rows of 16, 32, 64 and 128 bytes, each with a swizzle of its own."""
    columns = 2 * n - 3 if n % 32 == 0 else n - 1
    call = Call(ld=-(-columns // 8) * 8, schedule=("fifo", 0))
    check(n, 33, columns, 64, call=call, out_dtype=out_dtype, store="tma", read=96)


@pytest.mark.parametrize("release", ["late", "early"])
@pytest.mark.parametrize("store", ["direct", "tma"])
def test_accumulators_that_overlap(store, release):
    """The columns that both share are read first, from the end in one turn and from the beginning in the next."""
    config = {"accumulators": 2, "store": store, "release": release, "read": 64}
    check(256, 140, 600, 600, call=Call(ld=600, ctas=1, schedule=("random", 1)), **config)


def test_the_same_bits_whichever_way():
    a, b = operand(140, 200), operand(152, 200, seed=2)
    results = {run(compiled(64, **config), a, b, Call(ld=160)).values.tobytes() for config in WAYS.values()}
    assert len(results) == 1


def staged(report, vector):
    """(wavefronts, ideal) of stores to shared memory with so many bytes a thread."""
    lines = [
        t for t in report.traffic if (t.space, t.kind) == ("shared", "store") and t.nbytes == t.accesses * 32 * vector
    ]
    return sum(t.units for t in lines), sum(t.ideal for t in lines)


def test_wavefronts_of_staging():
    """Rows of 128 bytes, 8 at a time: sixteen threads in one bank. The ideal, and what the swizzle reaches: none."""
    m, n, ctas = 8192, 8192, {"m": 256, "n": 128}
    results = {name: check(64, ctas["m"], ctas["n"], 64, **WAYS[name]) for name in ("tma_rows", "tma")}
    tiles = m * n // (ctas["m"] * ctas["n"])
    early, ideal = staged(results["tma_rows"].report, 8)
    assert (early * tiles, ideal * tiles) == (2**24, 2**20)
    assert staged(check(64, 256, 128, 64, store="tma", read=64).report, 16) == (ideal, ideal)


def test_sectors_of_direct_stores():
    """A thread's 32 bytes are a sector, and so are 16 threads' 2 bytes where operands are swapped."""
    for config in ({"read": 64}, {"swap": True}):
        report = check(64, 256, 128, 64, **config).report
        stores = [t for t in report.traffic if (t.space, t.kind) == ("global", "store")]
        assert sum(t.units for t in stores) == sum(t.ideal for t in stores) == 256 * 128 * 2 // 32


@pytest.mark.parametrize("bias_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("config", [{}, {"swap": True}, {"store": "tma", "release": "early"}], ids=str)
def test_bias(bias_dtype, config):
    """Whole vectors of a bias, and its tail."""
    a, b = operand(20, 100, seed=1), operand(70, 100, seed=2)
    bias = (np.random.default_rng(3).standard_normal(70) * 1000).astype(DTYPES[bias_dtype])
    result = run(compiled(32, "fp32", bias=bias_dtype, **config), a, b, Call(), "fp32", bias)
    left, right = a.values()[0], b.values()[0].T
    exact = left @ right * Call().alpha + bias.astype(np.float64)
    slack = abs(left) @ abs(right) * Call().alpha * (4 + 100 / 1024) * 2.0**-20
    slack += 2.0**-24 * (abs(bias.astype(np.float64)) + 2 * abs(exact))
    assert (abs(result.values[0] - exact) <= slack).all()
    assert (result.around == 0xFF).all()


SPECIAL = [-0.0, 1e-40, 3e38, -3e38, np.inf, np.nan, 100.0, -20.0, -87.0, -104.0]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations(activation):
    """Operands of zeros leave the bias: within the contract's 2^-24 of it, whatever it is."""
    x = np.concatenate([np.linspace(-14, 14, 1001), np.linspace(-1, 1, 401), SPECIAL]).astype(np.float32)
    a, b = operand(1, 64), operand(len(x), 64)
    b.codes[:] = 0
    function = compiled(64, "fp32", bias="fp32", activation=activation)
    actual = run(function, a, b, Call(), "fp32", x).values[0, 0].astype(np.float64)
    exact = reference._ACTIVATIONS[activation](torch.from_numpy(x.astype(np.float64))).numpy()
    finite = np.isfinite(exact)
    slack = 2.0**-24 * (1.13 * abs(x[finite].astype(np.float64)) + 2.2 * abs(exact[finite])) + 2.0**-126
    assert (abs(actual[finite] - exact[finite]) <= slack).all()
    assert np.array_equal(actual[~finite], exact[~finite], equal_nan=True)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations_of_minus_infinity_are_zero(activation):
    a, b = operand(1, 64), operand(64, 64)
    b.codes[:] = 0
    function = compiled(64, "fp32", bias="fp32", activation=activation)
    bias = np.full(64, -np.inf, np.float32)
    assert (run(function, a, b, Call(), "fp32", bias).values == 0).all()


def test_a_bias_is_added_before_results_leave_the_range_of_fp16():
    a, b = operand(3, 64, positive=True), operand(8, 64, positive=True, seed=1)
    a.codes[:, :, :], b.codes[:, :, :] = 7, 7
    a.scales[:, :3], b.scales[:, :8] = 0x7E, 0x7E
    exact = 64 * (6 * 448) ** 2 * 2.0**-13
    bias = np.full(8, 1000 - exact, np.float32)
    result = run(compiled(32, "fp16", bias="fp32"), a, b, Call(units=(1.0, 1.0, 2.0**-13), factor=1.0), "fp16", bias)
    assert (result.values == 1000).all()


@pytest.mark.parametrize(
    "config",
    [
        {"tile_n": 256, "rows": 256, "store": "tma", "read": 128, "release": "early"},
        {"tile_n": 256, "out_dtype": "fp32", "read": 128, "release": "early"},
        {"tile_n": 192, "read": 192, "release": "early"},
        {"tile_n": 256, "out_dtype": "fp32", "store": "tma", "read": 64, "release": "early", "bias": "bf16"},
        {"tile_n": 256, "read": 64, "release": "early", "activation": "gelu", "accumulators": 2},
        {"tile_n": 256, "out_dtype": "fp32", "read": 64, "release": "early", "activation": "gelu", "bias": "fp32"},
        {"tile_n": 256, "read": 128, "release": "early", "activation": "silu", "store": "tma"},
        {"tile_n": 256, "out_dtype": "nvfp4", "release": "early", "activation": "silu"},
        {"tile_n": 64, "read": 64, "swap": True, "bias": "fp16"},
    ],
    ids=str,
)
def test_no_stack_and_no_spills(config, capfd):
    rows, n = config.get("rows", 128), config["tile_n"]
    rest = {name: value for name, value in config.items() if name not in ("rows", "tile_n")}
    compile_kernel(Sm100Gemm((rows, n), **rest), "remarks{ptx}")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in capfd.readouterr().err


def test_shared_memory_for_boxes():
    assert staging.staging_bytes("direct", 2, 256, 64, "bf16") == 0
    assert staging.staging_bytes("tma", 2, 256, 64, "bf16") == 4 * 2 * 4096
    assert staging.staging_bytes("tma_rows", 1, 256, 64, "bf16") == 4 * 4096
    assert staging.staging_bytes("tma", 2, 8, 64, "bf16") == 4 * 2 * 512
    for n in range(8, 257, 8):
        for out_dtype in ("fp16", "fp32"):
            columns = staging.fragment(n, 64, out_dtype)
            width = staging.box_bytes(columns, out_dtype)
            assert n % columns == 0
            assert columns * staging.BITS[out_dtype] // 8 % width == 0
            assert width in (16, 32, 64, 128)


def without(name):
    def fault(monkeypatch):
        monkeypatch.setattr(store.cute.arch, name, lambda *arguments, **named: None)

    return fault


@pytest.mark.parametrize("name", ["fence_proxy", "cp_async_bulk_wait_group"])
def test_faults_of_staging_would_be_seen(name, monkeypatch):
    """Without the fence TMA may not see what it stores; without the wait a box is overwritten under it."""
    without(name)(monkeypatch)
    function = compile_kernel(Sm100Gemm((128, 64), store="tma", read=32))
    with pytest.raises(Exception, match=r"fence\.proxy\.async|race|bulk"):
        run(function, operand(140, 80), operand(152, 80, seed=2), Call(ld=160, ctas=1, schedule=("lazy", 0)))
