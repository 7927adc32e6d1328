"""tcgen05.mma and tcgen05.cp: operands in through descriptors, results out to tensor memory.

Source: PTX ISA, "tcgen05.mma", "Data Path Layout Organization", "Block Scaling for tcgen05.mma", "tcgen05.cp".

With cta_group::2 descriptors and tensor memory addresses mean the same offsets in both CTAs: each holds half of A's
rows, half of B's columns, the scales of its own A rows, the scales of all of B, and the accumulator of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.errors import MemoryFault
from ptxemu.machine import arithmetic as ar
from ptxemu.machine import descriptors as ds
from ptxemu.machine import tmem

Bytes = npt.NDArray[np.uint8]
Lanes = Any  # a slice or an index array of lanes


class SharedReader(Protocol):
    """`read(address, size, granules)` gives a view of bytes of the CTA's own shared memory, of which these 16-byte
    granules are used, or raises MemoryFault."""

    def __call__(self, address: int, size: int, granules: npt.NDArray[np.int64]) -> Bytes: ...


class Touch(Protocol):
    """Told which quarters of the lanes and which columns of tensor memory are accessed, a mask of the lanes of each
    quarter, two a bit, and whether they are written and what is there is needed."""

    def __call__(self, cells: tuple[slice, slice], mask: int, write: bool, needs: bool) -> None: ...


ALL_LANES = 0xFFFF


@dataclass(frozen=True)
class CtaUnits:
    """What a tensor core reaches of one CTA."""

    read: SharedReader
    memory: tmem.TensorMemory
    touch: Touch | None = None

    def block(
        self,
        address: int,
        columns: int,
        *,
        write: bool = False,
        needs: bool = True,
        quarters: tuple[int, ...] = (0, 1, 2, 3),
        mask: int = ALL_LANES,
    ) -> npt.NDArray[np.uint32]:
        """All lanes of columns, of which some quarters' `mask` are accessed; needs: what is there matters.  Nobody is
        told of a read that a write of the same operation follows: write=False, needs=False."""
        found = self.memory.block(address, tmem.LANES, columns)
        if self.touch is not None and (write or needs):
            cells = slice(quarters[0], quarters[-1] + 1), slice(address, address + columns)
            self.touch(cells, mask, write, needs)
        return found

    def gather(self, matrix: ds.SharedMatrix, part: ds.Footprint) -> Bytes:
        """An operand's granules in shared memory."""
        return part.read(self.read(ds.pattern_start(matrix) + part.low, part.size, part.index))


@dataclass(frozen=True)
class Mma:
    """The operands of one instruction. a: a descriptor, or with `a_in_tmem` an address. Addresses of tensor memory.

    disabled: mask of 128 (or 256) accumulator lanes that are not written. scale_d: D is divided by 2^scale_d first.
    block: k elements that share a scale.
    """

    d: int
    a: int
    b: int
    accumulate: bool
    a_in_tmem: bool = False
    scale_a: int = 0
    scale_b: int = 0
    block: int = 0
    disabled: int = 0
    scale_d: int = 0


@dataclass(frozen=True)
class Tile:
    """A part of D with one place in tensor memory: rows of the CTA's A, columns of B, `lanes` of D.

    quarters: the 32-lane quarters that hold the tile; mask: which of their lanes, two a bit.
    """

    rows: slice
    columns: slice
    lanes: Lanes
    quarters: tuple[int, ...]
    mask: int = ALL_LANES


@lru_cache(maxsize=64)
def _tiles(rows: int, n: int, group: int, first_lane: int) -> tuple[Tile, ...]:
    """Layouts A and D (128 rows a CTA), B (64 rows a CTA of a pair: columns split) and F (64 rows: half the lanes)."""
    if rows == 128:
        return (Tile(slice(0, 128), slice(0, n), slice(0, 128), (0, 1, 2, 3)),)
    if group == 2:
        half = n // 2
        return (
            Tile(slice(0, 64), slice(0, half), slice(0, 64), (0, 1)),
            Tile(slice(0, 64), slice(half, n), slice(64, 128), (2, 3)),
        )
    row = np.arange(64)
    lanes = first_lane + row % 16 + 32 * (row // 16)
    return (Tile(slice(0, 64), slice(0, n), lanes, (0, 1, 2, 3), 0xFF << first_lane // 2),)


def multiply(d: ds.MmaDescriptor, ctas: Sequence[CtaUnits], op: Mma) -> None:
    """Carry out one MMA on one CTA or a pair (even CTA first).

    Raises:
        InvalidDescriptor: an operand's descriptor or place that this kind does not take.
        MemoryFault: an operand outside its memory.
    """
    group = len(ctas)
    rows = d.m // group
    half_lanes = rows == 64 and group == 1
    column = _column(op.d, "D", (0, 16) if half_lanes else (0,))
    gathered = [_gather(cta, op.b, d.n // group, d.k_bytes, d.b, d.b_mn_major) for cta in ctas]
    codes = [_codes(d, d.b, raw, d.b_mn_major) for raw in gathered]
    b = _decode(d, d.b, codes[0] if group == 1 else np.concatenate(codes), d.negate_b)
    b_scaled: dict[tuple[int, bytes], ScaledB] = {}
    for side, cta in enumerate(ctas):
        a = _decode(d, d.a, _a_codes(d, cta, op, rows, group), d.negate_a)
        disabled = op.disabled >> 128 * side & ((1 << 128) - 1)
        for tile in _tiles(rows, d.n, group, op.d >> 16):
            c = _accumulator(d, cta, op, tile, column) if op.accumulate else None
            rows_of_a, columns_of_b = a.rows(tile.rows), b.rows(tile.columns)
            if not d.block_scaled:
                result = ar.multiply_wide(rows_of_a, columns_of_b, c, d.d_f16)
                _store(d, cta, tile, column, tile.rows, result, disabled, op.accumulate)
                continue
            sfa = _a_scales(d, cta, op, tile)
            for part, codes_b in _b_scales(d, cta, op, tile):
                key = tile.columns.start, codes_b.tobytes()  # mostly the same in both CTAs
                right = b_scaled.get(key) or b_scaled.setdefault(key, _scale(d, columns_of_b, codes_b))
                left = _scale(d, rows_of_a.rows(part), sfa[part])
                result = _multiply(left, right, None if c is None else c[part])
                _store(d, cta, tile, column, part, result, disabled, op.accumulate)


ScaledB = ar.Fp4Operand | ar.Operand


def _scale(d: ds.MmaDescriptor, operand: ar.Operand, codes: Bytes) -> ScaledB:
    """An operand with its block scales' codes (rows, blocks)."""
    scales = ar.decode_scales(codes, d.scale_e8m0)
    return ar.Fp4Operand(operand.values, scales) if d.packed_fp4 else operand.scaled(scales)


def _multiply(a: ScaledB, b: ScaledB, c: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    if isinstance(a, ar.Fp4Operand):
        assert isinstance(b, ar.Fp4Operand)
        return ar.multiply_fp4(a, b, c)
    assert isinstance(b, ar.Operand)
    return ar.multiply_wide(a, b, c)


def _column(address: int, what: str, lanes: tuple[int, ...] = (0,)) -> int:
    """The column of an operand's address; its lane may be one of `lanes`."""
    lane, column = tmem.split(address)
    if lane not in lanes:
        raise MemoryFault(f"tensor memory address {address:#x} of {what}: lane {lane}, allowed are {lanes}")
    return column


def _scale_column(address: int, what: str) -> int:
    """As `_column`; the upper two bits of a scale's address hold its id, which the instruction descriptor repeats."""
    return _column(address & 0x3FFFFFFF, what)


def _a_codes(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, rows: int, group: int) -> npt.NDArray[Any]:
    """A's codes (rows, K) of one CTA."""
    if not op.a_in_tmem:
        return _codes(d, d.a, _gather(cta, op.a, rows, d.k_bytes, d.a, d.a_mn_major), d.a_mn_major)
    if d.a_mn_major or (rows == 64 and group == 2) or (d.kind.endswith("f8f6f4") and d.a.sign_bit < 0x80):
        raise ds.InvalidDescriptor("this form of A in tensor memory is not modelled")
    half_lanes = rows == 64
    column = _column(op.a, "A", (0, 16) if half_lanes else (0,))
    tile = _tiles(rows, d.n, group, op.a >> 16)[0]
    block = cta.block(column, d.k_bytes // 4, quarters=tile.quarters, mask=tile.mask)
    return _codes(d, d.a, np.ascontiguousarray(block[tile.lanes]).view(np.uint8), False)


def _gather(cta: CtaUnits, descriptor: int, rows: int, k_bytes: int, fmt: nx.Format, mn_major: bool) -> Bytes:
    """An operand's bytes: (rows, K bytes), or MN-major (K, row bytes)."""
    matrix = ds.SharedMatrix.decode(descriptor)
    if mn_major:
        size = 4 if fmt is nx.TF32 else max(1, fmt.sign_bit.bit_length() // 8)
        part = ds.footprint(matrix, rows * size // 16, k_bytes // size, True)
    else:
        part = ds.footprint(matrix, rows, k_bytes // 16, False)
    return cta.gather(matrix, part)


def _codes(d: ds.MmaDescriptor, fmt: nx.Format, raw: Bytes, mn_major: bool) -> npt.NDArray[Any]:
    """Element codes (rows, K) of gathered bytes; packed FP4 stays as bytes, two elements each."""
    if d.packed_fp4:
        return raw
    if fmt.sign_bit < 0x80:
        return _unpad(raw, fmt)
    kind = np.uint32 if fmt is nx.TF32 else np.uint16 if fmt.sign_bit > 0x80 else np.uint8
    codes = raw.view(kind)
    return codes.T if mn_major else codes


def _unpad(raw: Bytes, fmt: nx.Format) -> Bytes:
    """Sixteen 4- or 6-bit elements in the low bytes of each 16, to a byte an element."""
    granules = raw.reshape(raw.shape[0], -1, 16)
    if fmt is nx.E2M1:
        return nx.unpack_fp4(granules[:, :, :8]).reshape(raw.shape)
    bits = np.unpackbits(granules[:, :, :12], axis=2, bitorder="little").reshape(*granules.shape, 6)
    return np.packbits(bits, axis=3, bitorder="little").reshape(raw.shape)


def _decode(d: ds.MmaDescriptor, fmt: nx.Format, codes: npt.NDArray[Any], negate: bool) -> ar.Operand:
    if not d.packed_fp4:
        return ar.decode_operand(fmt, codes, negate)
    values = ar.decode_fp4(codes)
    return ar.Operand(-values if negate else values, _NO_EXPONENTS)


_NO_EXPONENTS = np.zeros((0, 0), np.int16)  # the FP4 kinds align by the scales alone


def _accumulator(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile, column: int) -> npt.NDArray[np.float32]:
    """C of a tile as float32 values (rows, columns)."""
    block = cta.block(column, _width(tile), needs=False)  # `_store` tells of it
    words = np.ascontiguousarray(block[tile.lanes])
    values = words.view(np.float32)
    if d.d_f16:
        values = nx.decode(nx.F16, words & np.uint32(0xFFFF)).astype(np.float32)
    return values * np.float32(2.0**-op.scale_d) if op.scale_d else values


def _width(tile: Tile) -> int:
    return int(tile.columns.stop - tile.columns.start)


def _store(
    d: ds.MmaDescriptor,
    cta: CtaUnits,
    tile: Tile,
    column: int,
    part: slice,
    result: npt.NDArray[np.float32],
    disabled: int,
    accumulated: bool,
) -> None:
    """Write rows `part` of a tile's result, but for the disabled lanes; accumulated: D was read before."""
    block = cta.block(column, _width(tile), write=True, needs=accumulated, quarters=tile.quarters, mask=tile.mask)
    words = nx.f32_to_f16(result).astype(np.uint32) if d.d_f16 else result.view(np.uint32)
    if isinstance(tile.lanes, slice) and not disabled:
        block[tile.lanes][part] = words
        return
    lanes = np.arange(tmem.LANES)[tile.lanes][part]
    keep = np.array([not disabled >> int(lane) & 1 for lane in lanes], dtype=bool)
    block[lanes[keep]] = words[keep]


def _scale_columns(rows: int, count: int, first: int) -> tuple[int, int, int]:
    """Of `count` scales a row from byte `first` on: columns between groups of four, groups, columns in all.

    Row r lies at lane r % 32; its scale b at byte (first + b) % 4 of column r // 32 + (first + b) // 4 * stride.
    """
    stride = 4 if rows <= 128 else 8
    groups = -(-(first + count) // 4)
    return stride, groups, (groups - 1) * stride + -(-rows // 32)


def _a_scales(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile) -> Bytes:
    """Scale codes of the tile's rows; each quarter of lanes reads its own copy, for the rows whose results it holds."""
    rows, count, first = tile.rows.stop, d.k // op.block, d.a_scale_id
    stride, groups, columns = _scale_columns(rows, count, first)
    block = cta.block(_scale_column(op.scale_a, "the scales of A"), columns, quarters=tile.quarters)
    words = block.reshape(4, 32, columns)
    row_groups = np.arange(rows // 32)
    quarters = np.array(tile.quarters)[row_groups]
    picked = [words[quarters, :, row_groups + g * stride].reshape(rows, 1) for g in range(groups)]
    return _scale_bytes(picked, count, first)


def _scale_bytes(words: list[npt.NDArray[np.uint32]], count: int, first: int) -> Bytes:
    """Scale codes (rows, count) from a word (rows, 1) of four each."""
    codes = words[0].view(np.uint8) if len(words) == 1 else np.concatenate(words, axis=1).view(np.uint8)
    return codes[:, first : first + count]


def _b_scales(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile) -> list[tuple[slice, Bytes]]:
    """Scale codes of a tile's columns of B, for all its rows, or by quarter where the copies differ."""
    n, count, first = _width(tile), d.k // op.block, d.b_scale_id
    stride, groups, columns = _scale_columns(n, count, first)
    block = cta.block(_scale_column(op.scale_b, "the scales of B"), columns, quarters=tile.quarters)
    words = block.reshape(4, 32, columns)
    copies = words[tile.quarters[0] : tile.quarters[-1] + 1]
    same = bool((copies[1:] == copies[0]).all())
    width = -(-n // 32)
    found = []
    for i, one in enumerate(copies[:1] if same else copies):
        picked = [one[:, g * stride : g * stride + width].T.reshape(-1, 1)[:n] for g in range(groups)]
        rows = slice(0, 32 * len(tile.quarters)) if same else slice(32 * i, 32 * (i + 1))
        found.append((rows, _scale_bytes(picked, count, first)))
    return found


COPY_SHAPES = {"128x256b": (128, 2), "128x128b": (128, 1), "64x128b": (64, 1), "32x128b": (32, 1)}


def copied_bytes(shape: str) -> int:
    """Bytes of one CTA's tensor memory that a tcgen05.cp writes, replicas included."""
    return tmem.LANES * COPY_SHAPES[shape][1] * 16


def copy(shape: str, multicast: str, ctas: Sequence[CtaUnits], address: int, descriptor: int) -> None:
    """tcgen05.cp: rows from each CTA's shared memory to its own tensor memory.

    Raises:
        InvalidDescriptor, MemoryFault: as `multiply`.
    """
    rows, granules = COPY_SHAPES[shape]
    matrix = ds.SharedMatrix.decode(descriptor)
    part = ds.footprint(matrix, rows, granules, False)
    for cta in ctas:
        raw = cta.gather(matrix, part)
        block = cta.block(_column(address, "tcgen05.cp"), granules * 4, write=True, needs=False)
        tmem.spread(block, raw.view(np.uint32), multicast)


def shift_down(ctas: Sequence[CtaUnits], address: int) -> None:
    """tcgen05.shift.down: of the 32 lanes from the address on, 8 columns, lane i moves to i + 1 (31 lanes of 256 bits).

    That "down" means towards higher lanes is the manual's wording taken at its word; it was not seen on silicon.

    Raises:
        MemoryFault: a lane that is not a multiple of 32, or a block outside what is allocated.
    """
    for cta in ctas:
        column = _column(address, "tcgen05.shift", (0, 32, 64, 96))
        lane = address >> 16
        block = cta.block(column, 8, write=True, quarters=(lane // 32,))[lane : lane + 32]
        block[1:] = block[:-1].copy()
