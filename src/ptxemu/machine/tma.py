"""Tensor copies as pure functions: a tensor map, coordinates and bytes in, bytes out.

Source: PTX ISA, "Tiled Mode", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor".

A copy has two halves: `read_box` and `write_box` move a dense box (rows x row bytes, in the order of shared memory)
from and to global memory; `place` and `collect` move it to and from shared memory through the swizzle.  Both are a few
numpy operations whatever the box's size.  Global memory is reached through `GlobalWindow`, shared memory is a byte
array, so that whoever owns the memories sees every access.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.machine import swizzle as sw
from ptxemu.machine.memory import Touched
from ptxemu.machine.tensormap import InvalidTensorMap, TensorMap
from ptxemu.numerics import TF32, encode, f32_to_bf16

Bytes = npt.NDArray[np.uint8]

SHARED_ALIGNMENT = 128
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
NAN_FILL = np.uint16(0x7FF7)  # whatever the type, over and over; read off an H200
_UNDEFINED = 0xFF  # what the padding bytes of padded element types hold


class GlobalWindow(Protocol):
    """`window(address, size, write, touched)` gives a writable view of global bytes, of which the 16-byte granules of
    `touched` are used; raises MemoryFault."""

    def __call__(self, address: int, size: int, write: bool, touched: Touched) -> Bytes: ...


class _Region:
    """The part of a box that lies inside the tensor.

    `inside` are slices into the dense box, slowest dimension first; `view` the matching strided global bytes, or None
    where the box misses the tensor.
    """

    def __init__(self, m: TensorMap, coords: Sequence[int], window: GlobalWindow, write: bool) -> None:
        inside, shape, strides, start = _clip(m, coords, write)
        self.inside = inside
        self.complete = shape == _box_shape(m)
        self.view: Bytes | None = None
        if 0 in shape:
            return
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        at = m.address + start
        raw = window(at, span, write, _granules(at % sw.GRANULE, shape, strides))
        self.view = np.ndarray(shape, np.uint8, raw, 0, strides)


@functools.lru_cache(maxsize=256)
def _granules(skipped: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Touched:
    """The granules of a strided region that starts `skipped` bytes into the first, and which of their bytes."""
    outer = np.zeros((1,), np.int64)  # first byte of each row; strides are multiples of a granule
    for count, stride in zip(shape[:-1], strides[:-1], strict=True):
        outer = (outer[:, None] + np.arange(count) * stride).ravel()
    end = skipped + shape[-1]
    masks = np.full(-(-end // sw.GRANULE), 0xFFFF, np.uint16)
    masks[0] &= 0xFFFF << skipped & 0xFFFF
    if end % sw.GRANULE:
        masks[-1] &= (1 << end % sw.GRANULE) - 1
    granules = (outer[:, None] // sw.GRANULE + np.arange(masks.size)).ravel()
    whole = bool((masks == 0xFFFF).all())
    return granules, 0xFFFF if whole else np.tile(masks, outer.size)


def _box_shape(m: TensorMap) -> tuple[int, ...]:
    return (*reversed(m.counts[1:]), m.row_bytes)


def _clip(
    m: TensorMap, coords: Sequence[int], write: bool
) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...], int]:
    """Slices into the box, shape and byte strides of the region inside the tensor, and its first byte.

    What is written ends at a multiple of 16 bytes in dimension 0, beyond the tensor's end where that is none.
    """
    bits = m.type.bits
    end = -(-m.dims[0] * bits // 128) * 128 // bits if write else m.dims[0]
    row_start, row_stop = max(0, coords[0]), min(end, coords[0] + m.box[0])
    start = row_start * bits // 8
    row = max(0, row_stop - row_start) * bits // 8
    skipped = (row_start - coords[0]) * bits // 8
    inside = [slice(skipped, skipped + row)]
    shape, strides = [row], [1]
    for d in range(1, m.rank):
        step, first = m.element_strides[d], coords[d]
        low = -(first // step) if first < 0 else 0
        high = min(m.counts[d], max(low, -((first - m.dims[d]) // step)))
        inside.append(slice(low, high))
        shape.append(max(0, high - low))
        strides.append(m.strides[d - 1] * step)
        start += (first + low * step) * m.strides[d - 1]
    return tuple(reversed(inside)), tuple(reversed(shape)), tuple(reversed(strides)), start


def inside_bytes(m: TensorMap, coords: Sequence[int], write: bool = False) -> int:
    """Bytes of global memory that a box at `coords` touches: without what lies outside the tensor."""
    return int(np.prod(_clip(m, coords, write)[1]))


def check_coordinates(m: TensorMap, coords: Sequence[int], store: bool) -> None:
    """Raise what a copy's coordinates may not be.

    Raises:
        InvalidTensorMap: a count that differs from the map's rank, a start that packed types do not allow, a negative
            start of a store, or a type that the direction or this emulator does not copy.
    """
    if len(coords) != m.rank:
        raise InvalidTensorMap(f"{len(coords)} coordinates for a tensor map of rank {m.rank}")
    step = 128 if m.type.padded else 2 if m.type.packed else 1
    if coords[0] % step:
        raise InvalidTensorMap(f"coordinate 0 is {coords[0]}: a multiple of {step} is needed for {m.dtype}")
    if store and min(coords) < 0:
        raise InvalidTensorMap(f"coordinates {tuple(coords)}: a store may not start below zero")
    if store and m.type.padded:
        raise InvalidTensorMap(f"{m.dtype} can only be loaded")


def check_first_coordinate(m: TensorMap, coords: Sequence[int]) -> None:
    """A copy has to start at a multiple of 16 bytes in dimension 0: an H200 ends the kernel otherwise.

    Raises:
        InvalidTensorMap: another first coordinate.
    """
    if coords[0] * m.type.bits % 128 and not m.type.packed:
        raise InvalidTensorMap(
            f"coordinate 0 is {coords[0]}: a copy starts at multiples of 16 bytes, {128 // m.type.bits} of {m.dtype}"
        )


def read_box(m: TensorMap, coords: Sequence[int], window: GlobalWindow) -> Bytes:
    """The box at `coords` as dense bytes (rows, shared row bytes); elements outside the tensor are zero or NaN.

    Args:
        coords: first element in each dimension, dimension 0 first; may be negative or past the end.

    Raises:
        InvalidTensorMap: see check_coordinates.
    """
    check_coordinates(m, coords, store=False)
    region = _Region(m, coords, window, write=False)
    if region.complete and region.view is not None:
        box = np.ascontiguousarray(_converted(m, region.view))
    else:
        box = _filled(m)
        if region.view is not None:
            box[region.inside] = _converted(m, region.view)
    rows = box.reshape(-1, m.row_bytes)
    return _pad(m, rows) if m.type.padded else rows


def _converted(m: TensorMap, data: Bytes) -> Bytes:
    """Elements as a load leaves them: tf32 is rounded to nearest even; flushing types keep their subnormals."""
    if not m.type.tf32:
        return data
    return encode(TF32, np.ascontiguousarray(data).view(np.float32), "rn").view(np.uint8)


def _filled(m: TensorMap) -> Bytes:
    if not m.nan_fill:
        return np.zeros(_box_shape(m), dtype=np.uint8)
    shape = _box_shape(m)
    return np.full(int(np.prod(shape)) // 2, NAN_FILL).view(np.uint8).reshape(shape)


def _pad(m: TensorMap, rows: Bytes) -> Bytes:
    """Sixteen 4- or 6-bit elements to the low bytes of each 16-byte granule."""
    packed = m.type.bits * 2
    wide = np.full((rows.shape[0], rows.shape[1] // packed, sw.GRANULE), _UNDEFINED, dtype=np.uint8)
    wide[:, :, :packed] = rows.reshape(rows.shape[0], -1, packed)
    return wide.reshape(rows.shape[0], -1)


def write_box(m: TensorMap, coords: Sequence[int], box: Bytes, window: GlobalWindow) -> int:
    """Store a dense box; past the tensor's end it is dropped, in dimension 0 from the next 16 bytes on.  Returns the
    bytes written.

    Raises:
        InvalidTensorMap: see check_coordinates.
    """
    check_coordinates(m, coords, store=True)
    region = _Region(m, coords, window, write=True)
    if region.view is None:
        return 0
    region.view[...] = box.reshape(_box_shape(m))[region.inside]
    return int(region.view.size)


def reduce_box(m: TensorMap, coords: Sequence[int], box: Bytes, operation: str, window: GlobalWindow) -> int:
    """Combine a dense box into global memory, element by element.  Returns the bytes written.

    Raises:
        InvalidTensorMap: see check_coordinates; also a type that the reduction does not take.
    """
    check_coordinates(m, coords, store=True)
    if m.type.packed:
        raise InvalidTensorMap(f"reduction on {m.dtype}: packed types have none")
    region = _Region(m, coords, window, write=True)
    if region.view is None:
        return 0
    old = np.ascontiguousarray(region.view)
    new = np.ascontiguousarray(box.reshape(_box_shape(m))[region.inside])
    region.view[...] = combine(operation, m.dtype, old, new).reshape(old.shape)
    return int(old.size)


_NUMPY = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "tf32": np.float32,
    "f32.ftz": np.float32,
    "tf32.ftz": np.float32,
    "f64": np.float64,
}
_ALLOWED = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64", "tf32", "f32.ftz", "tf32.ftz"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64", "u32", "s32", "u64"),
    "or": ("b32", "b64", "u32", "s32", "u64"),
    "xor": ("b32", "b64", "u32", "s32", "u64"),
}


def combine(operation: str, dtype: str, old: Bytes, new: Bytes) -> Bytes:
    """`old` op `new` on bytes that hold `dtype`, contiguous and of one size; a new byte array.

    Additions round to nearest even and keep subnormals, but for the flushing types. inc and dec wrap at `new`, as atom
    does.

    Raises:
        InvalidTensorMap: the operation does not take the type.
    """
    if dtype not in _ALLOWED.get(operation, ()):
        allowed = ", ".join(_ALLOWED.get(operation, ("no type",)))
        raise InvalidTensorMap(f"reduction {operation} on {dtype}: it takes {allowed}")
    if dtype == "bf16":
        wide = (_bf16_to_f32(old), _bf16_to_f32(new))
        return f32_to_bf16(_OPERATIONS[operation](*wide)).view(np.uint8)
    kind = _NUMPY[dtype.replace("b", "u")]
    with np.errstate(over="ignore", invalid="ignore"):
        operands = [raw.reshape(-1).view(kind) for raw in (old, new)]
        if dtype.endswith(".ftz"):
            operands = [_flush(x) for x in operands]
        result = _OPERATIONS[operation](*operands)
        if dtype.endswith(".ftz"):
            result = _flush(result)
    return np.ascontiguousarray(result).view(np.uint8)


def _flush(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.asarray(np.where(tiny, np.copysign(np.float32(0), values), values))


def _bf16_to_f32(raw: Bytes) -> npt.NDArray[np.float32]:
    return np.asarray((raw.reshape(-1).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))


_OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def check_shared(m: TensorMap, address: int) -> None:
    """Raise what the shared-memory side of a copy may not be.

    Raises:
        MemoryFault: an address that is not 128-byte aligned.
    """
    if address % SHARED_ALIGNMENT:
        raise MemoryFault(f"tensor copy at shared {address:#x}: {SHARED_ALIGNMENT}-byte alignment is needed")


def place(m: TensorMap, box: Bytes, window: Bytes, address: int) -> None:
    """Put a dense box, swizzled, into `window`: the `m.box_bytes` bytes at shared `address`."""
    sw.scatter(m.swizzle, window, address, box, m.shared_row_bytes, m.pitch)


def collect(m: TensorMap, window: Bytes, address: int) -> Bytes:
    """The inverse of `place`: a dense box (rows, shared row bytes)."""
    size = m.rows * m.shared_row_bytes
    return sw.gather(m.swizzle, window, address, size, m.shared_row_bytes, m.pitch).reshape(-1, m.shared_row_bytes)
