"""The NVFP4 round-to-nearest rules of torchao, compressed-tensors, ModelOpt, TransformerEngine and ours, in torch.

Each function takes a 2-D fp32 or bf16 tensor (M, K) with K a multiple of 16 and does every operation in the order and
the precision that the library does it in on the CPU, so that the bits come out the same; `test_peers.py` holds them to
the libraries. A number divided by a tensor is a reciprocal and a product in torch, each rounded, hence the spelling
here. All of them round to E2M1 and to E4M3 to nearest even and saturate at 6 and at 448. They differ in the
global scale, in what a small or empty block gets as its scale, in whether elements are divided or multiplied by a
reciprocal, and in the sign of zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
E4M3_SMALLEST = 2.0**-9
FP32_MAX = torch.finfo(torch.float32).max


class Quantized(NamedTuple):
    """codes (M, K) uint8 in 0..15, scales (M, K / 16) uint8 E4M3 bytes, global_scale () fp32, a multiplier."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor

    def dequantize(self) -> Tensor:
        """(M, K) fp32: code x (scale x global scale), whatever order the library itself multiplies in."""
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        values = torch.cat([grid, -grid])[self.codes.int()]
        scale = self.scales.view(torch.float8_e4m3fn).float() * self.global_scale
        return (_blocks(values) * scale.unsqueeze(-1)).reshape(self.codes.shape)


Rule = Callable[[Tensor], Quantized]


def blockscale(x: Tensor) -> Quantized:
    """Our own rule, as docs/format.md states it: divisions only; a zero scale empties its block; -0 is kept."""
    blocks = _blocks(x.float())
    amax = x.abs().max().float()
    global_scale = torch.where(amax == 0, 1.0, (amax / (E4M3_MAX * E2M1_MAX)).clamp(min=2.0**-126))
    scale = _e4m3(_amax(blocks) / E2M1_MAX / global_scale, 0.0)
    v = blocks / (scale.float() * global_scale).unsqueeze(-1)
    codes = _e2m1(v, torch.signbit(v)).masked_fill((scale.float() == 0).unsqueeze(-1), 0)
    return _quantized(x, codes, scale, global_scale)


def torchao_block(x: Tensor) -> Quantized:
    """torchao without a per-tensor scale: the block scale is never below the smallest normal E4M3 number."""
    blocks = _blocks(x.float())
    scale = _e4m3(_amax(blocks) / E2M1_MAX, E4M3_SMALLEST_NORMAL)
    v = blocks * scale.float().reciprocal().unsqueeze(-1)
    return _quantized(x, _e2m1(v, torch.signbit(v), of_nan=3), scale, torch.tensor(1.0))


def torchao(x: Tensor) -> Quantized:
    """torchao with its dynamic per-tensor scale; an all-zero tensor divides 0 by 0 and becomes NaN."""
    global_scale = x.abs().max().float() / (E4M3_MAX * E2M1_MAX)
    blocks = _blocks(x.float())
    scale = _e4m3(_amax(blocks) / E2M1_MAX / global_scale, E4M3_SMALLEST_NORMAL)
    v = blocks * (global_scale.reciprocal() / scale.float()).unsqueeze(-1)
    return _quantized(x, _e2m1(v, torch.signbit(v), of_nan=3), scale, global_scale)


def compressed_tensors(x: Tensor) -> Quantized:
    """compressed-tensors: the global scale is a divisor; it, its reciprocal and amax / 6 are rounded to the dtype of x.

    A block whose scale rounds to 0 gets 0.125. A divisor that overflows, as for an all-zero tensor, becomes 1.
    """
    blocks = _blocks(x)
    amax = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    divisor = (amax.reciprocal() * (E4M3_MAX * E2M1_MAX)).float()
    divisor = torch.where(divisor.isinf(), 1.0, divisor)
    scale = _e4m3((_amax(blocks) / E2M1_MAX).float() * divisor, 0.0)
    scale = torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn)
    v = blocks.float() / (scale.float() / divisor).unsqueeze(-1)
    return _quantized(x, _e2m1(v, v < 0), scale, divisor.reciprocal())


def modelopt(x: Tensor) -> Quantized:
    """ModelOpt: an empty block gets scale 1, any other at least 2^-9; an all-zero tensor becomes NaN."""
    blocks = _blocks(x.float())
    global_scale = x.abs().max().float() / (E2M1_MAX * E4M3_MAX)
    scale = _amax(blocks) / (E2M1_MAX * global_scale)
    scale = _e4m3(torch.where(scale == 0, 1.0, scale), E4M3_SMALLEST)
    v = blocks / (scale.float() * global_scale).unsqueeze(-1)
    return _quantized(x, _e2m1(v, v < 0, of_nan=7), scale, global_scale)


def transformer_engine(x: Tensor) -> Quantized:
    """TransformerEngine's reference quantiser, 1 x 16 blocks, no Hadamard transform.

    It folds 1/6 into the encoding scale 2688 / amax and multiplies elements by a reciprocal clamped to the largest
    fp32, so a non-zero block whose scale rounds to 0 keeps codes, mostly 7 or 15, that dequantise to 0.
    """
    blocks = _blocks(x.float())
    amax = x.abs().max().float()
    encode = (torch.tensor(E4M3_MAX * E2M1_MAX) / amax).clamp(max=FP32_MAX)
    sixth = torch.tensor(E2M1_MAX).reciprocal()
    scale = _e4m3(_amax(blocks) * (encode * sixth), 0.0)
    v = blocks * (scale.float() * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX).unsqueeze(-1)
    return _quantized(x, _e2m1(v, v < 0), scale, amax / (E2M1_MAX * E4M3_MAX))


PEERS: dict[str, Rule] = {
    "torchao, block scales only": torchao_block,
    "torchao, per-tensor scale": torchao,
    "compressed-tensors": compressed_tensors,
    "ModelOpt": modelopt,
    "TransformerEngine": transformer_engine,
}


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, BLOCK)


def _amax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(-1)


def _e4m3(scale: Tensor, smallest: float) -> Tensor:
    """Nearest-even E4M3 of the scale clamped to [smallest, 448]; NaN stays NaN."""
    return scale.clamp(smallest, E4M3_MAX).to(torch.float8_e4m3fn)


def _e2m1(v: Tensor, negative: Tensor, of_nan: int = 0) -> Tensor:
    """Nearest-even E2M1 codes of v, saturating; `of_nan` is the magnitude that the library's arithmetic gives NaN."""
    v = v.abs()
    code = torch.zeros(v.shape, dtype=torch.uint8)
    for half_way_that_goes_down in (0.25, 1.25, 2.5, 5.0):
        code += v > half_way_that_goes_down
    for half_way_that_goes_up in (0.75, 1.75, 3.5):
        code += v >= half_way_that_goes_up
    code = torch.where(v.isnan(), of_nan, code).to(torch.uint8)
    return code | (negative.to(torch.uint8) << 3)


def _quantized(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Quantized:
    return Quantized(codes.reshape(x.shape), scale.view(torch.uint8), global_scale.float().reshape(()))
