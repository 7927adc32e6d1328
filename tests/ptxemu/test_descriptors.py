"""Shared matrix descriptors (bit fields and canonical layouts) and instruction descriptors."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from ptxemu import numerics as nx
from ptxemu.machine import swizzle as sw
from ptxemu.machine.descriptors import (
    Footprint,
    InvalidDescriptor,
    MmaDescriptor,
    SharedMatrix,
    footprint,
    pattern_start,
)

SWIZZLED = [sw.B32, sw.B64, sw.B128]


def test_fields_of_the_shared_memory_descriptor() -> None:
    m = SharedMatrix(start=0x12340, leading=0x450, stride=1024, swizzle=sw.B128)
    bits = m.encode()
    assert bits & 0x3FFF == 0x1234
    assert bits >> 16 & 0x3FFF == 0x45
    assert bits >> 32 & 0x3FFF == 64
    assert bits >> 46 & 7 == 0b001
    assert bits >> 61 == 2
    assert SharedMatrix.decode(bits) == m


@pytest.mark.parametrize(
    ("mode", "swizzle"), [(0, sw.NONE), (1, sw.B128_ATOM32), (2, sw.B128), (4, sw.B64), (6, sw.B32)]
)
def test_swizzle_modes(mode: int, swizzle: sw.Swizzle) -> None:
    assert SharedMatrix.decode(1 << 46 | mode << 61).swizzle is swizzle


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (0, "bits 46-48"),
        (1 << 46 | 1 << 53, "bits 53-60"),
        (1 << 46 | 3 << 61, "swizzle mode 3"),
        (1 << 46 | 5 << 61, "swizzle mode 5"),
        (1 << 46 | 1 << 49 | 2 << 61, "base offset 1"),
        (1 << 46 | 1 << 52 | 4 << 61, "absolute leading dimension"),
    ],
)
def test_undefined_shared_memory_descriptors(bits: int, message: str) -> None:
    with pytest.raises(InvalidDescriptor, match=message):
        SharedMatrix.decode(bits)


def test_adding_two_to_a_descriptor_moves_32_bytes_along_k() -> None:
    m = SharedMatrix.decode(SharedMatrix(1024, 16, 1024, sw.B128).encode() + 2)
    assert m.start == 1056


def bytes_at(m: SharedMatrix, part: Footprint) -> npt.NDArray[np.int64]:
    """The shared address of each byte of an operand, in the order that `read` returns them."""
    start = pattern_start(m) + part.low
    return (part.index * 16)[:, :, None] + np.arange(16) + start


@pytest.mark.parametrize("swizzle", SWIZZLED, ids=lambda s: s.name)
@pytest.mark.parametrize("start", [0x400, 0x400 + 32, 0x2400])
def test_k_major_rows_lie_a_swizzle_span_apart_and_groups_of_eight_a_stride(swizzle: sw.Swizzle, start: int) -> None:
    """byte = start + (row / 8) * SBO + (row % 8) * span + k, then the swizzle on the absolute address."""
    m = SharedMatrix(start, 16, 2048, swizzle)
    address = bytes_at(m, footprint(m, 128, 2, False)).reshape(128, 32)
    for row, k in itertools.product((0, 1, 7, 8, 77, 127), (0, 15, 16, 31)):
        assert address[row, k] == sw.address(swizzle, start + row // 8 * 2048 + row % 8 * swizzle.span + k)


def test_k_steps_stay_inside_the_128_byte_row() -> None:
    for step in range(4):
        m = SharedMatrix(0x1400 + 32 * step, 16, 1024, sw.B128)
        address = bytes_at(m, footprint(m, 16, 2, False)).reshape(16, 32)
        assert address[5, 20] == sw.address(sw.B128, 0x1400 + 5 * 128 + 32 * step + 20)
        assert address[9, 0] == sw.address(sw.B128, 0x1400 + 1024 + 128 + 32 * step)


def test_k_major_without_swizzle_is_core_matrices_of_8_rows_by_16_bytes() -> None:
    m = SharedMatrix(0x800, 4096, 256, sw.NONE)
    address = bytes_at(m, footprint(m, 64, 2, False)).reshape(64, 32)
    for row, k in itertools.product((0, 7, 8, 63), (0, 15, 16, 31)):
        assert address[row, k] == 0x800 + row // 8 * 256 + row % 8 * 16 + k // 16 * 4096 + k % 16


def test_scale_factors_are_32_rows_of_16_bytes_with_a_stride_of_128() -> None:
    m = SharedMatrix(0x600, 16, 128, sw.NONE)
    address = bytes_at(m, footprint(m, 32, 1, False)).reshape(-1)
    np.testing.assert_array_equal(address, 0x600 + np.arange(512))


@pytest.mark.parametrize("swizzle", SWIZZLED, ids=lambda s: s.name)
def test_mn_major_swizzled(swizzle: sw.Swizzle) -> None:
    """((T, span, m), (8, k)) : ((1, T, LBO), (span, SBO)) in 16-byte units."""
    m = SharedMatrix(0x2000, 8192, 1024, swizzle)
    span = swizzle.span
    address = bytes_at(m, footprint(m, 16, 16, True)).reshape(16, 256)
    for k, byte in itertools.product((0, 7, 8, 15), (0, 17, span - 1, span, 255)):
        expected = 0x2000 + byte % span + byte // span * 8192 + k % 8 * span + k // 8 * 1024
        assert address[k, byte] == sw.address(swizzle, expected)


def test_mn_major_without_swizzle() -> None:
    """((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))."""
    m = SharedMatrix(0x2000, 2048, 128, sw.NONE)
    address = bytes_at(m, footprint(m, 8, 16, True)).reshape(16, 128)
    for k, byte in itertools.product((0, 7, 8, 15), (0, 16, 127)):
        assert address[k, byte] == 0x2000 + k % 8 * 16 + k // 8 * 2048 + byte // 16 * 128 + byte % 16


def test_absolute_leading_dimension_continues_at_column_zero_of_the_next_buffer() -> None:
    """K of 48 bytes: bytes past the row's 128 lie in the continuation buffer, same row, from its column 0."""
    m = SharedMatrix.decode(SharedMatrix(0x8400 + 96, 0xC400, 1024, sw.B128, absolute=True).encode())
    assert (m.absolute, m.leading) == (True, 0xC400)
    address = bytes_at(m, footprint(m, 16, 3, False)).reshape(16, 48)
    for row, k in itertools.product((0, 3, 9), (0, 31, 32, 47)):
        base, column = (0x8400, 96 + k) if k < 32 else (0xC400, k - 32)
        assert address[row, k] == sw.address(sw.B128, base + row // 8 * 1024 + row % 8 * 128 + column)
    with pytest.raises(InvalidDescriptor, match="only K-major"):
        footprint(m, 16, 3, True)


def test_read_gathers_from_the_window() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 1 << 15, dtype=np.uint8)
    m = SharedMatrix(0x1460, 16, 1024, sw.B128)
    part = footprint(m, 64, 2, False)
    start = pattern_start(m) + part.low
    np.testing.assert_array_equal(
        part.read(memory[start : start + part.size]), memory[bytes_at(m, part)].reshape(64, 32)
    )


def idesc(**fields: int) -> int:
    position = {"sparse": 2, "d": 4, "sfb": 4, "a": 7, "b": 10, "neg_a": 13, "neg_b": 14, "major_a": 15, "major_b": 16}
    position |= {"n8": 17, "scale": 23, "m16": 24, "sfa": 29, "k96": 31}
    return sum(value << position[name] for name, value in fields.items())


def test_the_manuals_example_for_nvfp4() -> None:
    d = MmaDescriptor.decode("mxf4nvf4", 0x10400480, 2)
    assert (d.m, d.n, d.k, d.a, d.b, d.scale_e8m0) == (256, 256, 64, nx.E2M1, nx.E2M1, False)
    assert (d.packed_fp4, d.block_scaled, d.k_bytes, d.d_f16) == (True, True, 32, False)


def test_fields_of_the_instruction_descriptor() -> None:
    d = MmaDescriptor.decode("f16", idesc(d=1, a=1, b=0, neg_b=1, major_a=1, n8=16, m16=8), 1)
    assert (d.m, d.n, d.k, d.a, d.b) == (128, 128, 16, nx.BF16, nx.F16)
    assert (d.negate_a, d.negate_b, d.a_mn_major, d.b_mn_major, d.d_f16) == (False, True, True, False, False)
    d = MmaDescriptor.decode("mxf8f6f4", idesc(a=5, b=3, scale=1, n8=4, m16=8, sfa=3, sfb=2), 1)
    assert (d.a, d.b, d.k, d.a_scale_id, d.b_scale_id, d.scale_e8m0) == (nx.E2M1, nx.E2M3, 32, 3, 2, True)
    assert MmaDescriptor.decode("mxf4nvf4", idesc(a=1, b=1, n8=32, m16=16, k96=1), 2).k == 96
    assert MmaDescriptor.decode("tf32", idesc(d=1, a=2, b=2, n8=1, m16=4), 1).k == 8


@pytest.mark.parametrize(
    ("kind", "fields", "group", "message"),
    [
        ("i8", {"n8": 16, "m16": 8}, 1, "kind::i8 is not modelled"),
        ("f16", {"d": 1, "n8": 16, "m16": 8, "sparse": 1}, 1, "sparse"),
        ("f16", {"d": 1, "n8": 16, "m16": 8, "a": 2}, 1, r"A type 2, allowed are \[0, 1\]"),
        ("f16", {"d": 2, "n8": 16, "m16": 8}, 1, "D type 2"),
        ("f16", {"d": 0, "n8": 16, "m16": 8, "a": 1}, 1, "f16 accumulator"),
        ("tf32", {"d": 0, "n8": 16, "m16": 8, "a": 2, "b": 2}, 1, "D type 0"),
        ("f16", {"d": 1, "n8": 16, "m16": 16}, 1, r"M=256 with cta_group::1, allowed are \(64, 128\)"),
        ("f16", {"d": 1, "n8": 16, "m16": 4}, 2, "M=64 with cta_group::2"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 16, "m16": 4}, 1, r"allowed are \(128,\)"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 0, "m16": 8}, 1, "N=0"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 33, "m16": 8}, 1, "N=264"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 3, "m16": 16}, 2, "N=24 .* steps of 16"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 16, "m16": 4, "k96": 1}, 1, r"M=64 .* allowed are \(128,\)"),
        ("mxf4nvf4", {"a": 1, "b": 1, "n8": 16, "m16": 8, "major_b": 1}, 1, "K-major"),
        ("mxf4", {"a": 1, "b": 1, "n8": 16, "m16": 8}, 1, "takes UE8M0 only"),
        ("mxf8f6f4", {"a": 5, "b": 0, "scale": 1, "n8": 16, "m16": 8, "major_a": 1}, 1, "MN-major A of e2m1"),
    ],
)
def test_undefined_instruction_descriptors(kind: str, fields: dict[str, int], group: int, message: str) -> None:
    with pytest.raises(InvalidDescriptor, match=message):
        MmaDescriptor.decode(kind, idesc(**fields), group)
