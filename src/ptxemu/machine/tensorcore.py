"""tcgen05.mma and tcgen05.cp: operands in through descriptors, results out to tensor memory.

Source: PTX ISA, "tcgen05.mma", "Data Path Layout Organization", "Block Scaling for tcgen05.mma", "tcgen05.cp".

With cta_group::2 descriptors and tensor memory addresses mean the same offsets in both CTAs: each holds half of A's
rows, half of B's columns, the scales of its own A rows, the scales of all of B, and the accumulator of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.machine import arithmetic as ar
from ptxemu.machine import descriptors as ds
from ptxemu.machine import tmem

Bytes = npt.NDArray[np.uint8]
Lanes = Any  # a slice or an index array of lanes

ADDRESS = 0x3FFFFFFF  # the upper two bits of a scale's address hold its id, which the instruction descriptor repeats


class SharedReader(Protocol):
    """`read(address, size)` gives a view of bytes of the CTA's own shared memory, or raises MemoryFault."""

    def __call__(self, address: int, size: int) -> Bytes: ...


@dataclass(frozen=True)
class CtaUnits:
    """What a tensor core reaches of one CTA."""

    read: SharedReader
    memory: tmem.TensorMemory
    actor: object = None

    def block(self, address: int, lanes: int, columns: int, write: bool = False) -> npt.NDArray[np.uint32]:
        return self.memory.block(address, lanes, columns, write=write, actor=self.actor)


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

    quarters: the 32-lane quarters that hold the tile.
    """

    rows: slice
    columns: slice
    lanes: Lanes
    quarters: tuple[int, ...]


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
    return (Tile(slice(0, 64), slice(0, n), first_lane + row % 16 + 32 * (row // 16), (0, 1, 2, 3)),)


def multiply(d: ds.MmaDescriptor, ctas: Sequence[CtaUnits], op: Mma) -> None:
    """Carry out one MMA on one CTA or a pair (even CTA first).

    Raises:
        InvalidDescriptor: an operand's descriptor or place that this kind does not take.
        MemoryFault: an operand outside its memory.
    """
    rows = d.m // len(ctas)
    codes = [_b_codes(d, cta, op, d.n // len(ctas)) for cta in ctas]
    b_codes = codes[0] if len(codes) == 1 else np.concatenate(codes)
    for side, cta in enumerate(ctas):
        a_codes = _a_codes(d, cta, op, rows, len(ctas))
        disabled = op.disabled >> 128 * side & ((1 << 128) - 1)
        for tile in _tiles(rows, d.n, len(ctas), op.d >> 16 & 0x1F):
            accumulator = _accumulator(d, cta, op, tile)
            for part, result in _products(d, cta, op, tile, a_codes[tile.rows], b_codes[tile.columns], accumulator):
                _store(d, cta, op, tile, part, result, disabled)


def _a_codes(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, rows: int, group: int) -> npt.NDArray[Any]:
    """A's codes (rows, K) of one CTA."""
    if not op.a_in_tmem:
        return _codes(d, d.a, _gather(cta, op.a, rows, d.k_bytes, d.a, d.a_mn_major), d.a_mn_major)
    if d.a_mn_major or (rows == 64 and group == 2) or (d.kind == "mxf8f6f4" and d.a.sign_bit < 0x80):
        raise ds.InvalidDescriptor("this form of A in tensor memory is not modelled")
    lanes = _tiles(rows, d.n, group, op.a >> 16 & 0x1F)[0].lanes
    block = cta.block(op.a & 0xFFFF, tmem.LANES, d.k_bytes // 4)
    return _codes(d, d.a, np.ascontiguousarray(block[lanes]).view(np.uint8), False)


def _b_codes(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, columns: int) -> npt.NDArray[Any]:
    return _codes(d, d.b, _gather(cta, op.b, columns, d.k_bytes, d.b, d.b_mn_major), d.b_mn_major)


def _gather(cta: CtaUnits, descriptor: int, rows: int, k_bytes: int, fmt: nx.Format, mn_major: bool) -> Bytes:
    """An operand's bytes: (rows, K bytes), or MN-major (K, row bytes)."""
    matrix = ds.SharedMatrix.decode(descriptor)
    if mn_major:
        size = 4 if fmt is nx.TF32 else max(1, fmt.sign_bit.bit_length() // 8)
        part = ds.footprint(matrix, rows * size // 16, k_bytes // size, True)
    else:
        part = ds.footprint(matrix, rows, k_bytes // 16, False)
    return part.read(cta.read(ds.pattern_start(matrix) + part.low, part.size))


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


def _accumulator(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile) -> npt.NDArray[np.float32] | None:
    """C of a tile as float32 values (rows, columns); None where the product replaces it."""
    if not op.accumulate:
        return None
    words = np.ascontiguousarray(cta.block(op.d & 0xFFFF, tmem.LANES, _width(tile))[tile.lanes])
    if d.d_f16:
        values = nx.decode(nx.F16, words & np.uint32(0xFFFF)).astype(np.float32)
    else:
        values = words.view(np.float32)
    return values * np.float32(2.0**-op.scale_d) if op.scale_d else values


def _width(tile: Tile) -> int:
    return int(tile.columns.stop - tile.columns.start)


def _store(
    d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile, part: slice, result: npt.NDArray[np.float32], disabled: int
) -> None:
    """Write rows `part` of a tile's result, but for the disabled lanes."""
    block = cta.block(op.d & 0xFFFF, tmem.LANES, _width(tile), write=True)
    words = nx.f32_to_f16(result).astype(np.uint32) if d.d_f16 else result.view(np.uint32)
    if isinstance(tile.lanes, slice) and not disabled:
        block[tile.lanes][part] = words
        return
    lanes = np.arange(tmem.LANES)[tile.lanes][part]
    keep = np.array([not disabled >> int(lane) & 1 for lane in lanes], dtype=bool)
    block[lanes[keep]] = words[keep]


Result = tuple[slice, npt.NDArray[np.float32]]


def _products(
    d: ds.MmaDescriptor,
    cta: CtaUnits,
    op: Mma,
    tile: Tile,
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    c: npt.NDArray[np.float32] | None,
) -> Iterator[Result]:
    """The results of a tile, as rows and values; in one piece unless quarters hold different scales of B."""
    if not d.block_scaled:
        left, right = ar.decode_operand(d.a, a, d.negate_a), ar.decode_operand(d.b, b, d.negate_b)
        yield slice(0, len(a)), ar.multiply_wide(left, right, c, d.d_f16)
        return
    sfa = _a_scales(d, cta, op, tile, len(a))
    for part, sfb in _b_scales(d, cta, op, tile):
        acc = None if c is None else c[part]
        if d.packed_fp4:
            left4 = ar.Fp4Operand(_fp4_values(a[part], d.negate_a), sfa.rows(part))
            yield part, ar.multiply_fp4(left4, ar.Fp4Operand(_fp4_values(b, d.negate_b), sfb), acc)
        else:
            left = ar.decode_operand(d.a, a[part], d.negate_a, sfa.rows(part))
            right = ar.decode_operand(d.b, b, d.negate_b, sfb)
            yield part, ar.multiply_wide(left, right, acc)


_FP4_PAIRS = nx.decode(nx.E2M1, nx.unpack_fp4(np.arange(256, dtype=np.uint8)[:, None]))


def _fp4_values(packed: Bytes, negate: bool) -> npt.NDArray[np.float64]:
    values = _FP4_PAIRS[packed].reshape(packed.shape[0], -1)
    return -values if negate else values


def _scale_words(d: ds.MmaDescriptor, op: Mma, rows: int) -> tuple[int, int]:
    """Scales a row of a K step, and columns from one group of four scales to the next."""
    return d.k // op.block, 4 if rows <= 128 else 8


def _scale_bytes(words: npt.NDArray[np.uint32], rows: int, count: int, stride: int, first: int) -> Bytes:
    """Scale codes (rows, count) from a quarter's words (32, columns).

    Row r lies at lane r % 32, scale b at byte (first + b) % 4 of column r // 32 + (first + b) // 4 * stride.
    """
    columns = -(-rows // 32)
    groups = [words[:, g * stride : g * stride + columns] for g in range(-(-(first + count) // 4))]
    per_row = [np.ascontiguousarray(group.T).reshape(-1, 1)[:rows].view(np.uint8) for group in groups]
    joined = per_row[0] if len(per_row) == 1 else np.concatenate(per_row, axis=1)
    return joined[:, first : first + count]


def _scale_columns(rows: int, count: int, stride: int, first: int) -> int:
    return (-(-(first + count) // 4) - 1) * stride + -(-rows // 32)


def _a_scales(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile, rows: int) -> ar.Scales:
    """Scales of A's rows; each quarter of lanes reads its own copy, for the rows whose results it holds."""
    count, stride = _scale_words(d, op, 128)
    first = d.a_scale_id
    words = cta.block(op.scale_a & ADDRESS & 0xFFFF, tmem.LANES, _scale_columns(rows, count, stride, first))
    codes = np.empty((rows, count), np.uint8)
    for i, quarter in enumerate(tile.quarters[: rows // 32]):
        part = slice(32 * i, 32 * (i + 1))
        codes[part] = _scale_bytes(words[32 * quarter : 32 * (quarter + 1)], rows, count, stride, first)[part]
    return ar.decode_scales(codes, d.scale_e8m0)


def _b_scales(d: ds.MmaDescriptor, cta: CtaUnits, op: Mma, tile: Tile) -> list[tuple[slice, ar.Scales]]:
    """Scales of a tile's columns of B, for all its rows, or by quarter where the copies differ."""
    columns = _width(tile)
    count, stride = _scale_words(d, op, columns)
    first = d.b_scale_id
    words = cta.block(op.scale_b & ADDRESS & 0xFFFF, tmem.LANES, _scale_columns(columns, count, stride, first))
    copies = words.reshape(4, 32, -1)[list(tile.quarters)]
    same = bool((copies == copies[0]).all())
    found = []
    for i, copy in enumerate(copies[:1] if same else copies):
        codes = _scale_bytes(copy, columns, count, stride, first)
        rows = slice(0, 32 * len(tile.quarters)) if same else slice(32 * i, 32 * (i + 1))
        found.append((rows, ar.decode_scales(codes, d.scale_e8m0)))
    return found


COPY_SHAPES = {"128x256b": (128, 2), "128x128b": (128, 1), "64x128b": (64, 1), "32x128b": (32, 1)}


def copy(shape: str, multicast: str, ctas: Sequence[CtaUnits], address: int, descriptor: int) -> None:
    """tcgen05.cp: rows from each CTA's shared memory to its own tensor memory.

    Raises:
        InvalidDescriptor, MemoryFault: as `multiply`.
    """
    rows, granules = COPY_SHAPES[shape]
    matrix = ds.SharedMatrix.decode(descriptor)
    part = ds.footprint(matrix, rows, granules, False)
    for cta in ctas:
        raw = part.read(cta.read(ds.pattern_start(matrix) + part.low, part.size))
        words = tmem.spread(np.ascontiguousarray(raw).view(np.uint32), multicast)
        cta.block(address & 0xFFFF, tmem.LANES, granules * 4, write=True)[:] = words


def shift_down(ctas: Sequence[CtaUnits], address: int) -> None:
    """tcgen05.shift.down: 32-byte rows move one lane down, all but the last, from the address's lane on."""
    for cta in ctas:
        lane, _ = tmem.split(address)
        block = cta.block(address, tmem.LANES - lane, 8, write=True)
        block[:-1] = block[1:].copy()
