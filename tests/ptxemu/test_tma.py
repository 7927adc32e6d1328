"""Tensor copies against a loop over single elements, and the manual's rules one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptxemu.errors import MemoryFault
from ptxemu.machine import swizzle as sw
from ptxemu.machine import tma
from ptxemu.machine.tensormap import InvalidTensorMap, TensorMap

BASE = 0x10000
Bytes = npt.NDArray[np.uint8]


class Global:
    """A block of global memory at BASE."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    def __call__(self, address: int, size: int, write: bool, touched: Any) -> Bytes:
        if address < BASE or address + size > BASE + self.bytes.size:
            raise MemoryFault(f"{address:#x}")
        view = self.bytes[address - BASE : address - BASE + size]
        if not write:
            view = view.view()
            view.flags.writeable = False
        return view


def element_copies(m: TensorMap, coords: tuple[int, ...], store: bool = False) -> list[tuple[int, int | None]]:
    """(first bit in the dense box, first bit in global memory or None where out of bounds) of each element.

    A store goes on to the next 16 bytes of dimension 0."""
    bits = m.type.bits
    width = -(-m.dims[0] * bits // 128) * 128 // bits if store else m.dims[0]
    pairs: list[tuple[int, int | None]] = []
    for row, index in enumerate(itertools.product(*(range(n) for n in reversed(m.counts[1:])))):
        outer = [c + i * s for c, i, s in zip(coords[1:], reversed(index), m.element_strides[1:], strict=True)]
        inside = all(0 <= x < d for x, d in zip(outer, m.dims[1:], strict=True))
        start = sum(x * s for x, s in zip(outer, m.strides, strict=True)) * 8
        for i in range(m.box[0]):
            x = coords[0] + i
            to = (row * m.box[0] + i) * bits
            pairs.append((to, start + x * bits if inside and 0 <= x < width else None))
    return pairs


def expected_box(m: TensorMap, coords: tuple[int, ...], memory: Global) -> Bytes:
    source = np.unpackbits(memory.bytes, bitorder="little")
    rows = int(np.prod(m.counts[1:]))
    box = np.zeros(rows * m.row_bytes * 8, dtype=np.uint8)
    for to, start in element_copies(m, coords):
        if start is not None:
            first = start + 8 * (m.address - BASE)
            box[to : to + m.type.bits] = source[first : first + m.type.bits]
    return np.packbits(box, bitorder="little").reshape(rows, m.row_bytes)


MAPS: dict[str, TensorMap] = {
    "1d": TensorMap(BASE + 32, "u32", (37,), (), (16,)),
    "2d": TensorMap(BASE, "f16", (40, 9), (96,), (32, 4), swizzle=sw.B64),
    "3d": TensorMap(BASE, "u8", (50, 5, 3), (64, 320), (16, 3, 2)),
    "4d scales": TensorMap(BASE, "u16", (16, 3, 2, 2), (32, 96, 192), (16, 2, 1, 2)),
    "5d": TensorMap(BASE, "f32", (12, 3, 2, 2, 2), (48, 144, 288, 576), (4, 2, 2, 1, 2)),
    "steps": TensorMap(BASE, "u8", (48, 17, 5), (48, 816), (32, 7, 3), element_strides=(1, 3, 2)),
    "fp4": TensorMap(BASE, "b4x16", (96, 7), (64,), (64, 4), swizzle=sw.B32),
    "broadcast": TensorMap(BASE, "u16", (24, 6), (0,), (8, 3)),
}
STARTS = [
    (0, 0, 0, 0, 0),
    (8, 1, 1, 1, 1),
    (-2, -1, 0, 0, 0),
    (34, 2, -1, 1, 0),
    (-200, 0, 0, 0, 0),
    (0, 90, 0, 0, 0),
    (4, -3, 2, 1, 0),
]


@pytest.mark.parametrize("name", list(MAPS))
@pytest.mark.parametrize("start", STARTS)
def test_load_equals_a_loop_over_elements(name: str, start: tuple[int, ...]) -> None:
    """Out-of-bounds elements, before the start and past the end, are zero; everything else is copied."""
    m = MAPS[name]
    memory = Global(4096)
    coords = start[: m.rank]
    box = tma.read_box(m, coords, memory)
    np.testing.assert_array_equal(box, expected_box(m, coords, memory))
    assert box.size == m.box_bytes


@pytest.mark.parametrize("name", [n for n in MAPS if n != "broadcast"])
@pytest.mark.parametrize("start", [s for s in STARTS if min(s) >= 0])
def test_store_writes_what_lies_inside_and_nothing_else(name: str, start: tuple[int, ...]) -> None:
    m = MAPS[name]
    memory, coords = Global(4096), start[: m.rank]
    box = np.random.default_rng(1).integers(0, 256, (m.box_bytes // m.row_bytes, m.row_bytes), dtype=np.uint8)
    before = np.unpackbits(memory.bytes, bitorder="little")
    bits = np.unpackbits(box.reshape(-1), bitorder="little")
    for to, start_bit in element_copies(m, coords, store=True):
        if start_bit is not None:
            first = start_bit + 8 * (m.address - BASE)
            before[first : first + m.type.bits] = bits[to : to + m.type.bits]
    tma.write_box(m, coords, box, memory)
    np.testing.assert_array_equal(memory.bytes, np.packbits(before, bitorder="little"))


@pytest.mark.parametrize("swizzle", [sw.NONE, sw.B32, sw.B64, sw.B128, sw.B128_ATOM32], ids=lambda s: s.name)
def test_shared_memory_holds_the_box_row_by_row_through_the_swizzle(swizzle: sw.Swizzle) -> None:
    width = 128 if swizzle is sw.NONE else swizzle.span
    m = TensorMap(BASE, "u8", (256, 64), (256,), (width, 24), swizzle=swizzle)
    memory = Global(256 * 64)
    shared = np.zeros(16384, dtype=np.uint8)
    tma.place(m, tma.read_box(m, (0, 3), memory), shared[640:], 640)
    for row, column in ((0, 0), (1, 5), (7, 30), (9, 17), (23, width - 1)):
        got = shared[sw.address(swizzle, 640 + row * width + column)]
        assert got == memory.bytes[(3 + row) * 256 + column]
    np.testing.assert_array_equal(tma.collect(m, shared[640:], 640), tma.read_box(m, (0, 3), memory))


def test_packed_fp4_stays_packed_and_256_elements_are_128_bytes() -> None:
    m = TensorMap(BASE, "b4x16", (512, 8), (256,), (256, 8), swizzle=sw.B128)
    assert (m.row_bytes, m.box_bytes) == (128, 1024)
    memory = Global(2048)
    box = tma.read_box(m, (256, 0), memory)
    np.testing.assert_array_equal(box, memory.bytes.reshape(8, 256)[:, 128:])


@pytest.mark.parametrize(("dtype", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_padded_types_take_sixteen_bytes_for_sixteen_elements(dtype: str, bits: int) -> None:
    row = 128 * bits // 8
    m = TensorMap(BASE, dtype, (256, 4), (2 * row,), (128, 2), swizzle=sw.B128)
    memory = Global(8 * row)
    box = tma.read_box(m, (128, 1), memory).reshape(2, 8, 16)
    source = memory.bytes.reshape(4, 2, 8, 2 * bits)[1:3, 1]
    np.testing.assert_array_equal(box[:, :, : 2 * bits], source)
    assert (m.box_bytes, m.transaction_bytes) == (256, 2 * row)  # the padding does not count
    with pytest.raises(InvalidTensorMap, match="multiple of 128"):
        tma.read_box(m, (64, 0), memory)
    with pytest.raises(InvalidTensorMap, match="only be loaded"):
        tma.write_box(m, (0, 0), box, memory)


def test_nan_fill_puts_nan_outside_the_tensor() -> None:
    """Out of Boundary Access: OOB-NaN fill mode."""
    for dtype, kind in (("f16", np.float16), ("f32", np.float32), ("f64", np.float64)):
        size = np.dtype(kind).itemsize
        m = TensorMap(BASE, dtype, (16, 2), (16 * size,), (16, 2), nan_fill=True)
        memory = Global(4096)
        memory.bytes[:] = 0
        values = tma.read_box(m, (-8, 1), memory).view(kind)
        expected = np.full((2, 16), np.nan)
        expected[0, 8:] = 0
        np.testing.assert_array_equal(values, expected)


def test_complete_tx_counts_the_full_box_even_out_of_bounds() -> None:
    m = MAPS["2d"]
    assert tma.read_box(m, (1000, 1000), Global(64)).size == m.transaction_bytes == 32 * 2 * 4


def test_a_box_outside_the_tensor_touches_no_global_memory() -> None:
    def forbidden(address: int, size: int, write: bool) -> Bytes:
        raise AssertionError("touched")

    m = MAPS["2d"]
    assert not tma.read_box(m, (1000, 0), forbidden).any()
    assert tma.write_box(m, (0, 9), np.ones(m.box_bytes, np.uint8), forbidden) == 0


def test_a_map_over_unregistered_memory_faults() -> None:
    with pytest.raises(MemoryFault):
        tma.read_box(MAPS["3d"], (0, 3, 1), Global(512))


@pytest.mark.parametrize(
    ("operation", "dtype", "kind"),
    [
        *(
            (op, t, k)
            for op in ("add", "min", "max")
            for t, k in (("u32", np.uint32), ("s32", np.int32), ("u64", np.uint64))
        ),
        ("min", "s64", np.int64),
        ("max", "s64", np.int64),
        ("add", "f32", np.float32),
        ("add", "f16", np.float16),
        ("min", "f16", np.float16),
        ("max", "f16", np.float16),
        ("and", "u32", np.uint32),
        ("or", "u64", np.uint64),
        ("xor", "s32", np.int32),
    ],
)
def test_reduce_combines_every_element_inside(operation: str, dtype: str, kind: Any) -> None:
    size = np.dtype(kind).itemsize
    m = TensorMap(BASE, dtype, (24, 5), (32 * size,), (16, 4))
    memory = Global(32 * 5 * size)
    rng = np.random.default_rng(2)
    grid = memory.bytes.view(kind).reshape(5, 32)
    grid[...] = rng.integers(0, 100, (5, 32)).astype(kind)
    data = rng.integers(0, 100, (4, 16)).astype(kind)
    numpy_op = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    expected = grid.copy()
    op = numpy_op.get(operation, np.bitwise_xor)
    expected[3:5, 8:24] = op(expected[3:5, 8:24], data[:2])
    tma.reduce_box(m, (8, 3), data.view(np.uint8), operation, memory)
    np.testing.assert_array_equal(grid, expected)


def u8(values: Any, kind: Any) -> Bytes:
    return np.asarray(values, dtype=kind).view(np.uint8)


def test_inc_and_dec_wrap_at_the_source_value() -> None:
    old, limit = u8([0, 4, 5, 9], np.uint32), u8([5, 5, 5, 5], np.uint32)
    np.testing.assert_array_equal(tma.combine("inc", "u32", old, limit).view(np.uint32), [1, 5, 0, 0])
    np.testing.assert_array_equal(tma.combine("dec", "u32", old, limit).view(np.uint32), [5, 3, 4, 5])


def test_bf16_adds_round_to_nearest_even_and_flushing_types_alone_flush_subnormals() -> None:
    one, half_ulp = u8([0x3F80], np.uint16), u8([0x3B80], np.uint16)  # 1 + 2^-8: a tie
    assert tma.combine("add", "bf16", one, half_ulp).view(np.uint16)[0] == 0x3F80
    assert tma.combine("max", "bf16", one, half_ulp).view(np.uint16)[0] == 0x3F80
    tiny = u8([2.0**-130, -(2.0**-126)], np.float32)
    other = u8([0.0, 1.5 * 2.0**-126], np.float32)
    for dtype in ("f32.ftz", "tf32.ftz"):
        np.testing.assert_array_equal(tma.combine("add", dtype, tiny, other).view(np.float32), [0.0, 0.0])
    for dtype in ("f32", "tf32"):
        kept = tma.combine("add", dtype, tiny, other).view(np.float32)
        np.testing.assert_array_equal(kept, np.array([2.0**-130, 2.0**-127], np.float32))


def test_reductions_refuse_types_that_the_table_does_not_list() -> None:
    with pytest.raises(InvalidTensorMap, match="reduction min on f32: it takes u32"):
        tma.combine("min", "f32", u8([1], np.float32), u8([1], np.float32))
    with pytest.raises(InvalidTensorMap, match="packed types have none"):
        tma.reduce_box(MAPS["fp4"], (0, 0), np.zeros(128, np.uint8), "add", Global(4096))


@pytest.mark.parametrize(
    ("coords", "store", "message"),
    [((0,), False, "1 coordinates .* rank 2"), ((1, 0), False, "multiple of 2"), ((0, -1), True, "start below zero")],
)
def test_coordinates_that_no_copy_takes(coords: tuple[int, ...], store: bool, message: str) -> None:
    with pytest.raises(InvalidTensorMap, match=message):
        tma.check_coordinates(MAPS["fp4"], coords, store)


def test_loads_of_tf32_round_to_nearest_even_and_flush_nothing() -> None:
    memory = Global(16)
    memory.bytes[:] = u8([0x3F801000, 0x3F803000, 0x00001001, 0x7FC00001], np.uint32)
    for dtype in ("tf32", "tf32.ftz"):
        box = tma.read_box(TensorMap(BASE, dtype, (4,), (), (4,)), (0,), memory)
        assert [hex(x) for x in box.view(np.uint32)[0]] == ["0x3f800000", "0x3f804000", "0x2000", "0x7fffe000"]
    box = tma.read_box(TensorMap(BASE, "f32.ftz", (4,), (), (4,)), (0,), memory)
    np.testing.assert_array_equal(box[0], memory.bytes)


def test_shared_memory_must_be_128_byte_aligned() -> None:
    tma.check_shared(MAPS["2d"], 0x480)
    with pytest.raises(MemoryFault, match="128-byte alignment"):
        tma.check_shared(MAPS["2d"], 0x440)


@pytest.mark.parametrize("swizzle", [sw.B32, sw.B64, sw.B128], ids=lambda s: s.name)
def test_rows_shorter_than_the_swizzle_lie_as_far_apart_as_it_spans(swizzle: sw.Swizzle) -> None:
    width = swizzle.span - 16
    m = TensorMap(BASE, "u8", (width, 9), (width,), (width, 9), swizzle=swizzle)
    assert (m.box_bytes, m.transaction_bytes) == (9 * swizzle.span, 9 * width)
    memory, shared = Global(9 * width), np.full(2048, 0xCC, np.uint8)
    box = tma.read_box(m, (0, 0), memory)
    tma.place(m, box, shared[128 : 128 + m.box_bytes], 128)
    places = [sw.address(swizzle, 128 + r * swizzle.span + c) for r in range(9) for c in range(width)]
    np.testing.assert_array_equal(shared[places], memory.bytes)
    assert (np.delete(shared, places) == 0xCC).all()
    np.testing.assert_array_equal(tma.collect(m, shared[128 : 128 + m.box_bytes], 128), box)


def test_a_copy_starts_at_multiples_of_16_bytes() -> None:
    tma.check_first_coordinate(MAPS["2d"], (-8, 3))
    with pytest.raises(InvalidTensorMap, match="coordinate 0 is 4: a copy starts at multiples of 16 bytes, 8 of f16"):
        tma.check_first_coordinate(MAPS["2d"], (4, 3))
