"""Operands that make mistakes visible, for all tests of products."""

import contextvars

import torch

import blockscale as bs

POISON = 0x7F  # an E4M3 NaN


def every_code_and_scale(rows, k, layout="128x4", positive=False, seed=0):
    """An operand over all codes and all finite scales, drawn at random: distinct from row to row and block to block."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, (k + 1) // 2), dtype=torch.uint8, generator=random)
    if positive:
        codes &= 0x77
    if k % 2:
        codes[:, -1] &= 0xF
    scales = torch.randint(0, 127, (rows, -(-k // 16)), dtype=torch.uint8, generator=random)
    t = bs.NVFP4Tensor.from_parts(codes, scales.view(torch.float8_e4m3fn), 0.0123, shape=(rows, k), layout="linear")
    return t.with_layout(layout)


def small_integers(rows, k, seed=0, layout="128x4"):
    """(operand, its values as int64): 0, 1, 2, 3, 4, 6 and negatives times 1, 2, 4 or 8, never that of a neighbour."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], dtype=torch.uint8)
    codes = codes[torch.randint(0, len(codes), (rows, k + k % 2), generator=random)]
    codes[:, k:] = 0
    scales = 2 ** ((torch.arange(rows)[:, None] + 3 * torch.arange(-(-k // 16))) % 4)
    magnitudes = torch.tensor([0, 0, 1, 0, 2, 3, 4, 6])
    values = magnitudes[(codes & 7).long()] * torch.where(codes >= 8, -1, 1)
    values = values[:, :k] * scales.repeat_interleave(16, dim=1)[:, :k]
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    t = bs.NVFP4Tensor.from_parts(packed, scales.float().to(torch.float8_e4m3fn), 1.0, shape=(rows, k), layout="linear")
    return t.with_layout(layout), values


def quantize_on_cpu(*values, **options):
    """`quantize` by the CPU, around an emulator too: no launch of its, and none of its time."""
    return contextvars.Context().run(bs.quantize, *values, **options)


def bits(x):
    """A tensor's raw bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def same_bits(x, y):
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def same_tensor(x, y):
    """Whether two NVFP4Tensors hold the same bytes."""
    return (
        x.shape == y.shape
        and x.layout == y.layout
        and same_bits(x.codes, y.codes)
        and same_bits(x.scales, y.scales)
        and same_bits(x.global_scale, y.global_scale)
    )
