"""Proof that the checks notice: faults of the kind that weak tests pass are put in, and each must be caught."""

import pytest
import torch
from operands import every_code_and_scale, small_integers

import blockscale as bs
from blockscale import reference


def _remade(t, codes=None, scales=None):
    return bs.NVFP4Tensor.from_parts(
        t.codes if codes is None else codes,
        t.scales if scales is None else scales,
        t.global_scale,
        shape=t.shape,
        layout=t.layout,
    )


def _swap_scale_bytes(t, first, second):
    scales = t.scales.clone().view(torch.uint8)
    scales[first], scales[second] = scales[second].clone(), scales[first].clone()
    return _remade(t, scales=scales.view(torch.float8_e4m3fn))


FAULTS = {
    "two scale bytes of neighbouring blocks swapped": lambda t: _swap_scale_bytes(t, (3, 1), (3, 2)),
    "two scale bytes of neighbouring rows swapped": lambda t: _swap_scale_bytes(t, (3, 1), (4, 1)),
    "nibbles of one byte swapped": lambda t: _remade(t, codes=_with(t.codes, (2, 5), lambda b: (b >> 4) | (b << 4))),
    "nibbles of every byte swapped": lambda t: _remade(t, codes=(t.codes >> 4) | (t.codes << 4)),
    "one sign flipped": lambda t: _remade(t, codes=_with(t.codes, (7, 9), lambda b: b ^ 0x80)),
    "a slice of K skipped": lambda t: _remade(t, codes=_with(t.codes, (slice(None), slice(32, 64)), lambda b: b * 0)),
    "a row taken for the next": lambda t: _remade(t, codes=t.codes.roll(1, 0)),
    "scales read in the wrong layout": lambda t: _remade(
        t, scales=bs.formats.layouts.swizzle(t.scales)[: t.shape[0], : t.scales.shape[1]].contiguous()
    ),
}


def _with(x, at, change):
    x = x.clone()
    x[at] = change(x[at])
    return x


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rows", [64, 129])
@pytest.mark.parametrize("kind", ["integers", "all codes and scales"])
def test_a_wrong_operand_is_noticed(fault, rows, kind):
    if kind == "integers":
        a, b = small_integers(rows, 128, 0, "linear")[0], small_integers(96, 128, 1)[0]
    else:
        a, b = every_code_and_scale(rows, 128, "linear"), every_code_and_scale(96, 128, seed=1)
    exact = reference.gemm(a, b)
    allowed = reference.tolerance(a, b, exact, out_dtype=torch.float32)
    reference.check(bs.gemm(a, b, out_dtype=torch.float32), exact, allowed)
    with pytest.raises(AssertionError, match="elements are wrong; the first at"):
        reference.check(bs.gemm(FAULTS[fault](a), b, out_dtype=torch.float32), exact, allowed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: _with(y, (3, 4), lambda v: v * float("nan")), r"1 of 40 .*first at \(3, 4\): got nan"),
        (lambda y: _with(y, (0, 0), lambda v: v * (1 + 2**-18)), r"1 of 40 .*first at \(0, 0\)"),
        (lambda y: y * 0, "40 of 40"),
        (lambda y: y[:, :4], r"shape \(5, 4\), expected \(5, 8\)"),
        (lambda y: y / 0, "40 of 40"),
    ],
)
def test_a_wrong_result_is_noticed(change, message):
    a, b = every_code_and_scale(5, 64, positive=True), every_code_and_scale(8, 64, positive=True, seed=1)
    y, exact = bs.gemm(a, b, out_dtype=torch.float32), reference.gemm(a, b)
    allowed = reference.tolerance(a, b, exact, out_dtype=torch.float32)
    reference.check(y, exact, allowed)
    with pytest.raises(AssertionError, match=message):
        reference.check(change(y), exact, allowed)


def test_overflow_of_the_output_is_right_only_where_the_exact_value_overflows():
    exact = torch.tensor([[1e5, -1e5, 1.0]], dtype=torch.float64)
    allowed = torch.full_like(exact, 0.01)
    right = torch.tensor([[float("inf"), float("-inf"), 1.0]], dtype=torch.float16)
    reference.check(right, exact, allowed)
    for wrong in (right.flip(1), right.abs(), torch.full_like(right, 65504)):
        with pytest.raises(AssertionError):
            reference.check(wrong, exact, allowed)
