"""wgmma: where operands lie, in shared memory and in the registers of a warpgroup, and what one instruction computes.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": "Matrix Fragments",
"Shared Memory Matrix Layout", "Matrix Descriptor Format"; arithmetic: microsoft/MMA-Sim (arXiv 2511.10909), whose
model of Hopper aligns f16, bf16 and tf32 at 25 bits, FP8 at 13 and cuts an FP8 result off after 13 bits of mantissa.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.machine import arithmetic as ar
from ptxemu.machine import fragments as fr
from ptxemu.machine import swizzle as sw
from ptxemu.machine.descriptors import InvalidDescriptor, SharedMatrix, footprint, pattern_start
from ptxemu.machine.lanes import LANES
from ptxemu.machine.tensorcore import SharedReader

__all__ = ["WARPS", "Kind", "Wgmma", "multiply", "shared_matrix"]

U32 = npt.NDArray[np.uint32]
M, WARPS = 64, 4
TILE = 8  # columns that lie in the registers as those of an mma.sync
K_BYTES = 32  # of one instruction, whatever the type
_SWIZZLES = {0: sw.NONE, 1: sw.B128, 2: sw.B64, 3: sw.B32}
_UNUSED = 0x3FF << 52 | 7 << 46 | 3 << 30 | 3 << 14
_FP8_BITS = 13


@dataclass(frozen=True)
class Kind:
    """Types and shape: m64 n K, K as many elements as 32 bytes hold.  a, b, d: names of PTX types."""

    n: int
    a: str
    b: str
    d: str

    @property
    def size(self) -> int:
        """Bytes of an element of A and B."""
        return {"f16": 2, "bf16": 2, "tf32": 4}.get(self.a, 1)

    @property
    def k(self) -> int:
        return K_BYTES // self.size

    @property
    def registers(self) -> int:
        """Of the accumulator, a thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def __str__(self) -> str:
        return f"wgmma {self.a if self.a == self.b else f'{self.a} x {self.b}'} {M}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Wgmma:
    """One instruction.  a: a descriptor, None where A is in registers; b: a descriptor.

    accumulate: D = A B + D, else D = A B.  saturate: of integers.
    """

    kind: Kind
    a: int | None
    b: int
    accumulate: bool
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    saturate: bool = False


@lru_cache(maxsize=4096)
def shared_matrix(descriptor: int) -> SharedMatrix:
    """Reads a 64-bit matrix descriptor of sm_90, which is not that of tcgen05.

    Raises:
        InvalidDescriptor: unused bits that are set, or a base offset other than 0.
    """
    if descriptor & _UNUSED:
        raise InvalidDescriptor(
            f"wgmma matrix descriptor {descriptor:#018x}: bits 14-15, 30-31, 46-48 and 52-61 must be zero"
        )
    if base := descriptor >> 49 & 7:
        raise InvalidDescriptor(
            f"wgmma matrix descriptor {descriptor:#018x}: base offset {base}; only 0 is modelled, "
            "start the matrix's swizzle pattern where it repeats"
        )
    return SharedMatrix(
        start=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLES[descriptor >> 62],
    )


def multiply(op: Wgmma, read: SharedReader, a: U32 | None, c: U32 | None) -> U32:
    """What the warpgroup's accumulator registers hold afterwards.

    Args:
        read: of the CTA's shared memory.
        a: (4 warps, 4 registers, 32 lanes), where A is in registers.
        c: (4 warps, registers, 32 lanes), or None where D is not read.

    Returns:
        (4 warps, registers, 32 lanes).

    Raises:
        InvalidDescriptor, MemoryFault: an operand's descriptor, or an operand outside shared memory.
    """
    kind = op.kind
    raw_a = _fragments(a) if op.a is None else _gather(read, op.a, M, kind.size, op.a_mn_major)
    raw_b = _gather(read, op.b, kind.n, kind.size, op.b_mn_major)
    if kind.d == "s32":
        return _from_matrix(_integers(op, raw_a, raw_b, c))
    left = ar.decode_operand(nx.FORMATS[kind.a], _codes(raw_a, kind.size), op.negate_a)
    right = ar.decode_operand(nx.FORMATS[kind.b], _codes(raw_b, kind.size), op.negate_b)
    narrow = kind.size == 1
    f16 = kind.d == "f16"
    before = None if c is None else _to_matrix(c, kind)
    if before is not None:
        before = nx.decode(nx.F16, before).astype(np.float32) if f16 else before.view(np.float32)
    bits, mantissa = (_FP8_BITS, _FP8_BITS) if narrow else (ar.WIDE_BITS, 23)
    result = ar.multiply_wide(left, right, before, f16, bits=bits, mantissa=mantissa)
    return _from_matrix(nx.f32_to_f16(result) if f16 else result.view(np.uint32))


def _gather(read: SharedReader, descriptor: int, rows: int, size: int, mn_major: bool) -> npt.NDArray[Any]:
    """An operand's bytes, (rows, 32), or, MN-major, its elements (rows, K) as unsigned numbers."""
    matrix = shared_matrix(descriptor)
    if not mn_major:
        part = footprint(matrix, rows, K_BYTES // sw.GRANULE, False)
        return part.read(read(pattern_start(matrix) + part.low, part.size, part.index))
    part = footprint(matrix, rows * size // sw.GRANULE, K_BYTES // size, True)
    found = part.read(read(pattern_start(matrix) + part.low, part.size, part.index))
    return np.ascontiguousarray(found.view(np.uint16).T)


def _codes(raw: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Element codes (rows, K)."""
    return raw.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])


def _fragments(a: U32 | None) -> npt.NDArray[np.uint8]:
    """A's bytes (64, 32) of the threads' registers: every warp has 16 rows."""
    assert a is not None
    return np.ascontiguousarray(fr.a_rows(a)).reshape(M, K_BYTES // 4).view(np.uint8)


def _to_matrix(registers: U32, kind: Kind) -> npt.NDArray[Any]:
    """Accumulator codes (64, N) of registers (4 warps, registers, 32): tiles of 16 x 8, as mma.sync has them."""
    each = kind.registers // (kind.n // TILE)
    tiles = fr.c_values(registers.reshape(-1, each, LANES), np.uint16 if kind.d == "f16" else np.uint32)
    rows = M // WARPS
    return np.asarray(tiles.reshape(WARPS, -1, rows, TILE).transpose(0, 2, 1, 3).reshape(M, kind.n))


def _from_matrix(codes: npt.NDArray[Any]) -> U32:
    """The registers (4 warps, registers, 32 lanes) of accumulator codes (64, N)."""
    rows = M // WARPS
    tiles = codes.reshape(WARPS, rows, -1, TILE).transpose(0, 2, 1, 3).reshape(-1, rows, TILE)
    return fr.c_registers(tiles).reshape(WARPS, -1, LANES)


def _integers(op: Wgmma, a: npt.NDArray[Any], b: npt.NDArray[Any], c: U32 | None) -> U32:
    """s8 and u8: exact, and s32 wraps around or saturates."""
    types = {"s8": np.int8, "u8": np.uint8}
    left, right = (raw.view(types[name]).astype(np.float64) for raw, name in ((a, op.kind.a), (b, op.kind.b)))
    total = (left @ right.T).astype(np.int64)
    if c is not None:
        total += _to_matrix(c, op.kind).view(np.int32)
    return ar.to_s32(total, op.saturate).view(np.uint32)
