"""Kernels that the measurement needs and the library does not: reading alone, and a rival's way to expand weights.

Triton comes with torch's CUDA builds. Imported on a GPU alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(source, sink, count, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Each program reads every num_programs-th span of UNROLL blocks of 32-bit words, and stores what they come to."""
    total = tl.zeros((UNROLL, BLOCK), dtype=tl.int32)
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    step = tl.num_programs(0) * (BLOCK * UNROLL)
    for start in range(tl.program_id(0) * (BLOCK * UNROLL), count, step):
        at = start + lanes
        total ^= tl.load(source + at, mask=at < count, other=0)
    tl.store(sink + tl.program_id(0), tl.sum(total, axis=None))


READS = (
    (1024, 4, 4),
    (1024, 8, 2),
    (1024, 4, 8),
    (1024, 8, 4),
    (2048, 4, 4),
    (1024, 16, 2),
)  # BLOCK, UNROLL, CTAs an SM


def read(source: Tensor, sink: Tensor, how: tuple[int, int, int]) -> None:
    """Read `source` (int32, 1-D) once, by one of `READS`; `sink` (int32) takes a word a CTA."""
    block, unroll, per_sm = how
    ctas = per_sm * torch.cuda.get_device_properties(source.device).multi_processor_count
    grid = (min(ctas, sink.numel(), triton.cdiv(source.numel(), block * unroll)),)
    _read[grid](source, sink, source.numel(), BLOCK=block, UNROLL=unroll, num_warps=8)


@triton.jit
def _expand(codes, scales, out, count, BLOCKS: tl.constexpr):
    """BLOCKS blocks of 16 elements a program; all three dense, rows end to end."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    scale = tl.load(scales + block, mask=inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pairs = tl.load(codes + byte, mask=inside[:, None], other=0).to(tl.int32)
    both = tl.join(pairs & 15, pairs >> 4).reshape(BLOCKS, 16)
    # E2M1's exponent and mantissa where fp32 has its own are 2^126 too small, its subnormal included.
    small = (((both & 7) << 22) | ((both & 8) << 28)).to(tl.float32, bitcast=True)
    value = small * 8.507059173023462e37 * scale[:, None]
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside[:, None])


def expand(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """code x scale, exact: codes uint8 (N, K/2), scales uint8 (N, K/16) linear, out bf16 or fp16 (N, K)."""
    count = scales.numel()
    _expand[(triton.cdiv(count, 128),)](codes, scales, out, count, BLOCKS=128, num_warps=4)
