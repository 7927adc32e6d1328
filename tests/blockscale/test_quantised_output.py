"""Products that are quantised as they are written: an NVFP4Tensor as `out`, whose global scale is given."""

import math

import numpy as np
import pytest
import torch
from operands import POISON

import blockscale as bs
from blockscale import reference
from blockscale.backends import sm90
from blockscale.formats import packing
from blockscale.formats.layouts import round_up


def pair(m, n, k, seed=0, batch=()):
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(*batch, m, k, generator=random)
    b = torch.randn(n, k, generator=random)
    return bs.quantize(a), bs.quantize(b)


def poisoned(shape, global_scale, layout="128x4"):
    """Nothing of it may survive, least of all in the padding."""
    out = bs.NVFP4Tensor.zeros(shape, global_scale=global_scale, layout=layout)
    out.codes.fill_(0xFF)
    out.scales.view(torch.uint8).fill_(POISON)
    return out


def same_bits(x, y):
    return (
        torch.equal(x.codes, y.codes)
        and torch.equal(x.scales.view(torch.uint8), y.scales.view(torch.uint8))
        and torch.equal(x.global_scale, y.global_scale)
        and x.layout == y.layout
        and x.shape == y.shape
    )


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(("m", "n", "batch"), [(1, 1, ()), (5, 24, ()), (130, 70, ()), (3, 64, (2, 2)), (0, 8, ())])
def test_the_bits_are_those_of_quantising_the_fp32_result(m, n, batch, layout):
    a, b = pair(m, n, 100, batch=batch)
    bias = torch.linspace(-1, 1, n)
    options = {"alpha": 0.7, "bias": bias, "activation": "silu"}
    out = poisoned((*batch, m, n), 2.0**-9, layout)
    assert bs.gemm(a, b, out=out, **options) is out
    y = bs.gemm(a, b, out_dtype=torch.float32, **options)
    assert same_bits(out, bs.quantize(y, global_scale=2.0**-9, layout=layout))


def test_the_bits_are_the_references():
    a, b = pair(7, 40, 64)
    out = poisoned((7, 40), 0.01)
    bs.gemm(a, b, out=out)
    codes, scales, unit = reference.quantize(bs.gemm(a, b, out_dtype=torch.float32), global_scale=0.01)
    assert np.array_equal(packing.unpack(out.codes).numpy()[:, :40], codes)
    assert np.array_equal(out.linear_scales().view(torch.uint8).numpy()[:, : scales.shape[1]], scales)
    assert float(out.global_scale) == float(unit)


def test_the_hopper_backends_arithmetic_gives_its_own_bits():
    a, b = pair(33, 50, 80)
    y = torch.empty(33, 50)
    sm90.gemm(a, b, y, alpha=2.0)
    out = poisoned((33, 50), 0.25)
    sm90.gemm(a, b, out, alpha=2.0)
    assert same_bits(out, bs.quantize(y, global_scale=0.25))


def test_corners_of_the_format():
    """A block of zeros, one whose scale underflows, negative zeros, saturation: rows of an identity bring them."""
    rows = torch.zeros(4, 64)
    rows[1, :16] = 2.0**-14
    rows[2, :16] = -0.0
    rows[3, :32] = 6 * 448
    b = bs.quantize(torch.eye(64), global_scale=1.0 / 6)
    a = bs.quantize(rows, global_scale=1.0)
    y = bs.gemm(a, b, out_dtype=torch.float32)
    out = poisoned((4, 64), 2.0**-3)
    bs.gemm(a, b, out=out)
    assert same_bits(out, bs.quantize(y, global_scale=2.0**-3))
    assert int(out.linear_scales()[3].view(torch.uint8).max()) == 0x7E


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_saturates(value):
    a, b = pair(4, 48, 64)
    bias = torch.zeros(48)
    bias[20] = value
    out = poisoned((4, 48), 0.01)
    bs.gemm(a, b, bias=bias, out=out)
    y = bs.gemm(a, b, bias=bias, out_dtype=torch.float32)
    assert same_bits(out, bs.quantize(y, global_scale=0.01, nonfinite="saturate"))


def test_weight_only_and_invariant_products_too():
    a, b = torch.randn(3, 64), pair(1, 32, 64)[1]
    for options in ({}, {"invariant": True}):
        out = poisoned((3, 32), 0.5)
        bs.gemm(a, b, out=out, **options)
        assert same_bits(out, bs.quantize(bs.gemm(a, b, out_dtype=torch.float32, **options), global_scale=0.5))


def test_zeros_are_a_tensor_of_zeros():
    t = bs.NVFP4Tensor.zeros((2, 130, 70), global_scale=0.5)
    assert t.shape == (2, 130, 70)
    assert t.codes.shape == (2, 130, 64)
    assert t.scales.shape == (2, 256, round_up(5, 4))
    assert torch.equal(t.dequantize(), torch.zeros(2, 130, 70))
    assert bs.NVFP4Tensor.zeros((3, 4), global_scale=1.0, layout="linear").scales.shape == (3, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shape": (4,)}, ValueError, "shape: "),
        ({"shape": (4, 0)}, ValueError, "shape: "),
        ({"shape": 4}, TypeError, "shape: "),
        ({"layout": "128x4-grouped"}, ValueError, "group_sizes: missing"),
        ({"layout": "fragment"}, ValueError, "layout: "),
        ({"global_scale": 0.0}, ValueError, "global_scale: "),
        ({"global_scale": "1"}, TypeError, "global_scale: "),
    ],
)
def test_zeros_that_are_refused(change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        bs.NVFP4Tensor.zeros(**{"shape": (4, 64), "global_scale": 1.0} | change)


def test_outputs_that_are_refused():
    a, b = pair(4, 64, 64)
    good = bs.NVFP4Tensor.zeros((4, 64), global_scale=1.0)
    with pytest.raises(TypeError, match=r"out_dtype: torch.float32, but out is an NVFP4Tensor; expected torch.float4"):
        bs.gemm(a, b, out=good, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"out: shape \(4, 64\) on cpu, expected \(5, 64\)"):
        bs.gemm(pair(5, 64, 64)[0], b, out=good)
    with pytest.raises(TypeError, match=r"out_dtype: torch.float4_e2m1fn_x2, .* or an NVFP4Tensor as out"):
        bs.gemm(a, b, out_dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match="out: overlaps a"):
        bs.gemm(a, b, out=a)
    with pytest.raises(ValueError, match="out: layout '128x4-grouped'"):
        bs.gemm(a, b, out=good.with_layout("128x4-grouped", torch.tensor([3, 1])))
    tiny = bs.NVFP4Tensor.zeros((4, 64), global_scale=2.0**-127)
    with pytest.raises(ValueError, match="out: global scale"):
        bs.gemm(a, b, out=tiny)
    with pytest.raises(ValueError, match="out: an NVFP4Tensor, which a call that is traced or differentiated"):
        bs.gemm(torch.ones(4, 64, requires_grad=True), b, out=good)
    grouped = good.with_layout("128x4-grouped", torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="out: 2 groups, but b has 1"):
        bs.grouped_gemm(a, bs.quantize(torch.randn(1, 64, 64)), group_sizes=torch.tensor([4]), out=grouped)


def test_float4_may_be_said():
    a, b = pair(4, 64, 64)
    first, second = (poisoned((4, 64), 0.5) for _ in range(2))
    bs.gemm(a, b, out=first)
    bs.gemm(a, b, out=second, out_dtype=torch.float4_e2m1fn_x2)
    assert same_bits(first, second)
