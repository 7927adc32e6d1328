"""Sizes at which 32-bit indices would wrap around. Long, and several gigabytes: `make prove`."""

import pytest
import torch
from operands import same_bits

import blockscale as bs

pytestmark = pytest.mark.prove


def test_a_result_of_more_than_2_to_the_31_elements():
    m, n, k = 65537, 32768, 16
    x, w = torch.randn(m, k).bfloat16(), bs.quantize(torch.randn(n, k))
    y = bs.gemm(x, w)
    for row in (0, 1, 32767, 65535, 65536):
        assert same_bits(y[row : row + 1], bs.gemm(x[row : row + 1], w))


def test_an_input_of_more_than_2_to_the_31_elements():
    row = torch.randn(1, 32768).bfloat16()
    q = bs.quantize(row.expand(65537, 32768), layout="linear")
    one = bs.quantize(row, layout="linear")
    assert same_bits(q.global_scale, one.global_scale)
    for r in (0, 1, 65535, 65536):
        assert same_bits(q.codes[r], one.codes[0])
        assert same_bits(q.scales[r], one.scales[0])
