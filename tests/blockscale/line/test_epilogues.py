"""Bias, activation and NVFP4 results through the public functions on the emulated B200."""

import pytest
import torch
from operands import quantize_on_cpu

import blockscale as bs
from blockscale import reference
from blockscale.config import Config

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

M, N, K = 200, 96, 272
A, B = (bs.quantize(torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))) for rows in (M, N))
CONFIGS = {
    "chosen": None,
    "registers": Config((128, 96)),
    "pair": Config((256, 32), accumulators=2, store="tma", release="early", pdl=True, schedule="clc"),
    "swapped": Config((128, 64), swap=True),
}


def poisoned(shape, global_scale, layout="128x4"):
    out = bs.NVFP4Tensor.zeros(shape, global_scale=global_scale, layout=layout)
    out.codes.fill_(0xFF)
    out.scales.view(torch.uint8).fill_(0x7F)
    return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("activation", "bias_dtype"), [("relu", torch.float32), ("gelu", torch.bfloat16), ("silu", None)]
)
def test_bias_and_activation(name, activation, bias_dtype):
    bias = None if bias_dtype is None else torch.linspace(-3, 3, N, dtype=bias_dtype)
    options = {"alpha": 0.01, "bias": bias, "activation": activation}
    exact = reference.gemm(A, B, **options)
    allowed = reference.tolerance(
        A, B, exact, alpha=0.01, bias=bias, out_dtype=torch.float32, c=reference.tensor_core_tolerance(K)
    )
    with bs.emulated("sm_100a", sms=4):
        for _ in range(2):  # the second call is a known one
            y = bs.gemm(A, B, out_dtype=torch.float32, config=CONFIGS[name], **options)
            reference.check(y, exact, allowed)


@pytest.mark.parametrize("layout", ["128x4", "linear"])
@pytest.mark.parametrize("name", ["chosen", "registers"])
def test_nvfp4_results_are_those_of_quantising_the_fp32_result(name, layout):
    bias = torch.linspace(-1, 1, N)
    options = {"alpha": 0.5, "bias": bias, "activation": "relu", "config": CONFIGS[name]}
    with bs.emulated("sm_100a", sms=4):
        y = bs.gemm(A, B, out_dtype=torch.float32, **options)
        for _ in range(2):
            out = poisoned((M, N), 2.0**-7, layout)
            bs.gemm(A, B, out=out, **options)
            expected = quantize_on_cpu(y, global_scale=2.0**-7, layout=layout)
            assert torch.equal(out.codes, expected.codes)
            assert torch.equal(out.scales.view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize("store", ["tma", "tma_rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boxes_leave_alone_what_lies_between_rows(store, dtype):
    """TMA goes on to the next 16 bytes where rows end in between."""
    n = 93
    rows = torch.full((M + 1, n + 3), 777.0, dtype=dtype)
    with bs.emulated("sm_100a", sms=4):
        bs.gemm(A, B[:n], out_dtype=dtype, out=rows[:M, :n], config=Config((128, 96), store=store, store_slots=1))
    assert (rows[:M, n:] == 777).all()
    assert (rows[M] == 777).all()
    assert (rows[:M, :n] != 777).all()


def test_a_batch_in_which_both_operands_broadcast_goes_matrix_by_matrix():
    a = bs.quantize(torch.randn(2, 1, 40, 64), global_scale=0.01)
    b = bs.quantize(torch.randn(1, 3, 32, 64), global_scale=0.01)
    with bs.emulated("sm_100a", sms=4):
        y = bs.gemm(a, b, out_dtype=torch.float32)
        out = poisoned((2, 3, 40, 32), 0.125)
        bs.gemm(a, b, out=out)
    expected = bs.quantize(y, global_scale=0.125)
    assert torch.equal(out.codes, expected.codes)
    assert torch.equal(out.scales.view(torch.uint8), expected.scales.view(torch.uint8))


def test_an_output_over_an_operand_is_refused_in_known_calls_too():
    square = bs.quantize(torch.randn(64, 64))
    out = bs.NVFP4Tensor.zeros((64, 64), global_scale=1.0)
    with bs.emulated("sm_100a", sms=4):
        bs.gemm(square, square, out=out)
        inside = bs.NVFP4Tensor(out.codes, square.scales, out.global_scale, "128x4", out.shape)
        with pytest.raises(ValueError, match="out: overlaps a"):
            bs.gemm(square, square, out=inside)
