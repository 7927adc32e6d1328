"""Operands of tcgen05.mma for the tests: shared memory images, scale layouts, instruction descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.machine import swizzle as sw
from ptxemu.machine import tensorcore as tc
from ptxemu.machine import tmem
from ptxemu.machine.descriptors import SharedMatrix

ORIGIN = 0x400
A_AT, B_AT = 0x400, 0x8400
E2M1 = nx.decode(nx.E2M1, np.arange(16))
Array = npt.NDArray[Any]


class Cta:
    """Shared memory from ORIGIN on and a tensor memory that is all allocated."""

    def __init__(self) -> None:
        self.shared = np.full(1 << 17, 0xFF, np.uint8)
        self.memory = tmem.TensorMemory()
        self.memory.take(0, 512)
        self.units = tc.CtaUnits(self.read, self.memory)

    def read(self, address: int, size: int, granules: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        assert ORIGIN <= address <= ORIGIN + self.shared.size - size
        return self.shared[address - ORIGIN : address - ORIGIN + size]

    def write_rows(self, at: int, rows: Array) -> int:
        """Rows of at most 128 bytes, K-major with 128-byte swizzle; the descriptor."""
        raw = np.ascontiguousarray(rows).view(np.uint8)
        padded = np.full((raw.shape[0], 128), 0xEE, np.uint8)
        padded[:, : raw.shape[1]] = raw
        sw.scatter(sw.B128, self.shared[at - ORIGIN :], at, padded)
        return SharedMatrix(at, 16, 1024, sw.B128).encode()

    def write_scales(self, column: int, codes: Array, first: int = 0, stride: int = 4) -> None:
        """Codes (rows, count) where the manual puts them, in all four quarters."""
        for row, scales in enumerate(codes):
            for b, code in enumerate(scales, first):
                word = self.memory.data[row % 32 :: 32, column + row // 32 + b // 4 * stride]
                word.view()[:] = word & ~np.uint32(0xFF << 8 * (b % 4)) | np.uint32(int(code) << 8 * (b % 4))


def pack(codes: Array) -> Array:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def idesc(m: int, n: int, **bits: int) -> int:
    return m >> 4 << 24 | n >> 3 << 17 | sum(bits.values())


def scale_codes(rng: np.random.Generator, rows: int, count: int) -> Array:
    return (rng.integers(6, 9, (rows, count)) << 3).astype(np.uint8)  # 1/2, 1, 2 in UE4M3


def scaled(values: Array, codes: Array, e8m0: bool = False) -> Array:
    scale = nx.decode_ue8m0(codes) if e8m0 else nx.decode_ue4m3(codes)
    return values * np.repeat(scale, values.shape[1] // codes.shape[1], axis=1)


def unpadded(codes: Array, fmt: nx.Format) -> Array:
    """Element codes to the bytes of shared memory: 4- and 6-bit types take 16 bytes for 16 elements."""
    if fmt.sign_bit == 0x80:
        return codes.astype(np.uint8)
    bits = fmt.sign_bit.bit_length()
    one = np.unpackbits(codes.astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    packed = np.packbits(one.reshape(codes.shape[0], -1, 16 * bits), axis=2, bitorder="little")
    padded = np.full((*packed.shape[:2], 16), 0xEE, np.uint8)
    padded[:, :, : packed.shape[2]] = packed
    return padded.reshape(codes.shape)


def small(rng: np.random.Generator, kind: str, code: int, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Small integers, and their codes."""
    values = rng.integers(-6, 7, shape).astype(np.float64)
    fmt = {"f16": (nx.F16, nx.BF16)[min(code, 1)], "tf32": nx.TF32, "f8f6f4": nx.E4M3}[kind]
    width = {"f16": np.uint16, "tf32": np.uint32, "f8f6f4": np.uint8}[kind]
    return values, nx.encode(fmt, values).astype(width)
