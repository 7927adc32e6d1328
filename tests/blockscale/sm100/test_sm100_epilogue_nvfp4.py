"""NVFP4 output of the sm_100a kernel: the bits that `quantize` makes of its fp32 output."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

import torch
from emulated_kernel import SCHEDULES, Call, compile_kernel, compiled, operand, run, run_nvfp4

from blockscale import quantize
from blockscale.kernels.sm100 import Sm100Gemm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

PLAIN = Call()


def check(n, a, b, unit, call=PLAIN, bias=None, **config):
    """The fp32 output, and codes and scales that are those of quantising it."""
    if bias is not None:
        config["bias"] = "fp32"
    y = run(compiled(n, "fp32", **config), a, b, call, "fp32", bias).values
    codes, scales, around = run_nvfp4(compiled(n, "nvfp4", **config), a, b, unit, call, bias)
    expected = quantize(torch.from_numpy(np.ascontiguousarray(y)), global_scale=unit, nonfinite="saturate")
    assert np.array_equal(codes, expected.codes.numpy())
    assert np.array_equal(scales.reshape(-1), expected.scales.view(torch.uint8).numpy().reshape(-1))
    assert (around == 0xFF).all()
    return y, codes, scales


@pytest.mark.parametrize(
    ("n", "m", "columns"), [(64, 140, 150), (32, 140, 150), (96, 20, 33), (64, 20, 1), (256, 3, 60)]
)
def test_sizes(n, m, columns):
    """Tiles that end within the 64 columns of a word of scales, padding of rows and of columns."""
    check(n, operand(m, 200, seed=1), operand(columns, 200, seed=2), 0.5, Call(ctas=2, schedule=("random", 2)))


def test_batches():
    check(64, operand(130, 64, batch=3), operand(40, 64, seed=2), 2.0, Call(ctas=3, schedule=("fifo", 0)))


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("release", ["late", "early"])
@pytest.mark.parametrize("n", [32, 64, 96, 128, 160, 192, 224, 256])
def test_every_tile(n, release, schedule):
    call = Call(ctas=2, schedule=schedule)
    check(n, operand(140, 600, seed=1), operand(2 * n + 5, 600, seed=2), 0.25, call, release=release, accumulators=2)


def test_pairs_of_ctas_and_rows_that_no_atom_has():
    """The second CTA of the pair has no row, and writes no scales."""
    check(64, operand(100, 64, seed=1), operand(150, 64, seed=2), 0.5, rows=256)


@pytest.mark.parametrize("unit", [2.0**-126, 1e-30, 1e-4, 0.3, 1.0, 3e4, 1e20, 1.2e35])
def test_global_scales(unit):
    """From all values saturated, through all kinds of block, to all scales zero."""
    b = operand(70, 200, seed=2)
    b.codes[:, 5:40] = 0  # blocks of zeros, and one with some
    _, codes, scales = check(64, operand(20, 200, seed=1), b, unit)
    assert (scales == 0).any()
    assert (codes == 0).any()


def test_corners():
    """Zero blocks, scales that round to 0, tiny negatives, ties, saturating, infinities, NaN; brought in as a bias."""
    rows = [
        [0.0] * 16,
        [-0.0, 1e-9] * 8,  # amax / 6 below half of the least scale: no codes, no scale
        [-0.0, 6.0, -1e-7, 1e-7] * 4,
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0],
        [2688.0, 1344.0, 2689.0, 1e30, -1e30, 3e38, -3e38, 448.0] * 2,
        [np.inf, -np.inf, 1.0, np.nan, 448.0, 100.0, -0.0, 2000.0] * 2,
        [np.nan] * 16,
        [2.0**-140, -(2.0**-149), 2.0**-126, 0.0] * 4,
    ]
    bias = np.concatenate([np.array(row, np.float32) for row in rows])
    a, b = operand(5, 64), operand(len(bias), 64)
    b.codes[:] = 0
    y, codes, _ = check(64, a, b, 1.0, bias=bias)
    assert np.array_equal(y[0, 0], bias, equal_nan=True)
    first = codes[0, 0].reshape(-1, 8)
    assert not first[0].any()
    assert not first[1].any()
    assert first[2].tolist() == [0x70, 0x08] * 4  # -0 plus a sum of 0 is 0
    assert first[3].tolist() == [0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE]
    assert not first[6].any()
    check(64, a, b, 2.0**-126, bias=bias)
    check(64, a, b, 2.0**118, bias=bias)  # 2688 x this is beyond fp32


def test_negative_zeros_keep_their_sign():
    """Sums of zero times a negative alpha, beside others and by themselves."""
    b = operand(64, 64, seed=2, positive=True)
    b.codes[0, [3, 17], :], b.codes[0, 32:48, :] = 0, 0
    _, codes, _ = check(64, operand(2, 64, seed=1, positive=True), b, 0.25, Call(factor=-1.0))
    assert (codes[0, :, 1] >> 4 == 8).all()
    assert (codes[0, :, 8] >> 4 == 8).all()
    assert not codes[0, :, 16:24].any()


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_after_an_activation(activation):
    bias = np.linspace(-4, 4, 70, dtype=np.float32)
    call = Call(units=(0.5, 2.0, 2.0**-12))
    check(64, operand(20, 96, seed=1), operand(70, 96, seed=2), 0.01, call, bias, activation=activation)


def test_quotients_are_quotients():
    """No reciprocals and no flush to zero in the PTX of the codes."""
    ptx = compile_kernel(Sm100Gemm((128, 64), out_dtype="nvfp4"), "--keep-ptx").__ptx__
    assert len(re.findall(r"div\.rn\.f32", ptx)) == 64 + 2 * 4
    assert "rcp" not in ptx
    assert ".ftz" not in ptx
