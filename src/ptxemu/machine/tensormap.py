"""Tensor maps: the descriptor that tensor copies read, and its bytes.

Source: PTX ISA, "Tensors", "Tensor-map" and "Restriction on Tensor Copy instructions"; the bit positions were read off
maps that the driver encoded.  A map is 128 bytes, of which the first 64 carry meaning; the rest is written as zero and
never looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import Error
from ptxemu.machine import swizzle as sw

SIZE = 128
MAX_RANK = 5


class InvalidTensorMap(Error):
    """A tensor map that no tensor copy accepts; names the field, its value and what is allowed."""


@dataclass(frozen=True)
class ElementType:
    """An element type of tensor copies.

    `ptx` is the value that tensormap.replace.elemtype takes, `field` the map's type field, `bits` the size in global
    memory. In shared memory each 16 elements of a padded type take 16 bytes.
    """

    name: str
    ptx: int
    field: int
    bits: int
    tf32: bool = False
    floating: bool = False

    @property
    def padded(self) -> bool:
        return self.name in ("b4x16_p64", "b6x16_p32")

    @property
    def packed(self) -> bool:
        return self.bits < 8


TYPES = {
    t.name: t
    for t in (
        ElementType("u8", 0, 0, 8),
        ElementType("u16", 1, 1, 16),
        ElementType("u32", 2, 2, 32),
        ElementType("s32", 3, 3, 32),
        ElementType("u64", 4, 4, 64),
        ElementType("s64", 5, 5, 64),
        ElementType("f16", 6, 6, 16, floating=True),
        ElementType("f32", 7, 7, 32, floating=True),
        ElementType("f32.ftz", 8, 8, 32, floating=True),
        ElementType("f64", 9, 9, 64, floating=True),
        ElementType("bf16", 10, 10, 16, floating=True),
        ElementType("tf32", 11, 7, 32, tf32=True, floating=True),
        ElementType("tf32.ftz", 12, 8, 32, tf32=True, floating=True),
        ElementType("b4x16", 13, 11, 4),
        ElementType("b4x16_p64", 14, 12, 4),
        ElementType("b6x16_p32", 15, 13, 6),
    )
}
_NUMPY_TYPES = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "s32",
    "uint64": "u64",
    "int64": "s64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
}
_BY_FIELD = {(t.field, t.tf32): t for t in TYPES.values()}
_SWIZZLES = {0: sw.NONE, 1: sw.B32, 2: sw.B64, 3: sw.B128}
_SWIZZLE_FIELD = {sw.NONE: (0, 0), sw.B32: (1, 0), sw.B64: (2, 0), sw.B128: (3, 0), sw.B128_ATOM32: (3, 1)}
_L2_PROMOTION = (0, 64, 128, 256)


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor in global memory and the box that one copy moves.

    Dimension 0 is the contiguous one. `dims`, `box` and coordinates count elements (single FP4 elements for b4x16);
    `strides` are bytes, for dimensions 1 and up. `element_strides` are traversal steps; dimension 0's is ignored.

    Raises:
        InvalidTensorMap: on construction, where a field breaks a rule of the manual.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: sw.Swizzle = sw.NONE
    nan_fill: bool = False
    l2_promotion: int = 0

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.dims))
        _validate(self)

    @classmethod
    def of(
        cls,
        array: npt.NDArray[Any],
        box: tuple[int, ...],
        *,
        dtype: str | None = None,
        swizzle: str = "none",
        **more: Any,
    ) -> TensorMap:
        """A map over a numpy array whose last axis is contiguous.

        Args:
            array: up to 5 axes; the last one becomes dimension 0. Packed FP4 comes as uint8, two elements a byte.
            box: elements, dimension 0 first.
            dtype: element type; by default that of the array.
            swizzle: "none", "32B", "64B", "128B" or "128B with 32B atoms".
            more: `element_strides`, `nan_fill`, `l2_promotion`.

        Raises:
            InvalidTensorMap: an array or a field that breaks a rule.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidTensorMap(f"array is a {type(array).__name__}: allowed is a numpy array")
        if not isinstance(box, tuple | list) or not all(isinstance(b, int | np.integer) for b in box):
            raise InvalidTensorMap(f"box={box!r}: allowed is a tuple of ints")
        name = dtype or _NUMPY_TYPES.get(array.dtype.name, array.dtype.name)
        modes = {s.name: s for s in _SWIZZLE_FIELD}
        if swizzle not in modes:
            raise InvalidTensorMap(f"swizzle={swizzle!r}: allowed are {', '.join(modes)}")
        if name not in TYPES:
            raise InvalidTensorMap(f"dtype={name!r}: allowed are {', '.join(TYPES)}")
        if array.ndim == 0 or array.strides[-1] != array.itemsize:
            raise InvalidTensorMap(f"array of strides {array.strides}: the last axis has to be contiguous")
        dims = [*reversed(array.shape)]
        dims[0] = dims[0] * array.itemsize * 8 // TYPES[name].bits
        strides = tuple(reversed(array.strides[:-1]))
        return cls(array.ctypes.data, name, tuple(dims), strides, box, swizzle=modes[swizzle], **more)

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def type(self) -> ElementType:
        return TYPES[self.dtype]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the box's dimension 0 in global memory."""
        return self.box[0] * self.type.bits // 8

    @cached_property
    def shared_row_bytes(self) -> int:
        """Bytes of the box's dimension 0 in shared memory."""
        return self.box[0] if self.type.padded else self.row_bytes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy moves in each dimension: the box over the traversal step, rounded up."""
        steps = (1, *self.element_strides[1:])
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @cached_property
    def rows(self) -> int:
        """Rows of dimension 0 that a copy moves."""
        rows = 1
        for count in self.counts[1:]:
            rows *= count
        return rows

    @cached_property
    def pitch(self) -> int:
        """Bytes from one row to the next in shared memory: under a swizzle as many as it spans, however short a row."""
        return self.shared_row_bytes if self.swizzle is sw.NONE else self.swizzle.span

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of shared memory that a full box lies in, gaps behind short rows among them."""
        return self.rows * self.pitch

    @cached_property
    def transaction_bytes(self) -> int:
        """What a load adds to complete_tx: the full box, out-of-bounds elements included, padding not (which is what
        published kernels with padded types announce)."""
        return self.rows * self.row_bytes

    def encode(self) -> bytes:
        """The map's 128 bytes."""
        mode, atom32 = _SWIZZLE_FIELD[self.swizzle]
        t = self.type
        low = (self.rank - 1) << 4 | t.field << 7 | mode << 13 | self.nan_fill << 15 | t.tf32 << 16 | atom32 << 19
        low |= _L2_PROMOTION.index(self.l2_promotion) << 17
        strides = [s >> 4 & 0xFFFFFFFF for s in self.strides] + [0] * (MAX_RANK - self.rank)
        high = sum((s >> 36) << 4 * i for i, s in enumerate(self.strides))
        dims = [d - 1 for d in self.dims] + [0] * (MAX_RANK - self.rank)
        box = [b - 1 for b in self.box] + [0] * (MAX_RANK - self.rank)
        steps = 0
        for i, step in enumerate(self.element_strides):
            steps |= (step - 1) << 3 * i
        words = struct.pack("<Q6I", self.address, low, *strides, high)
        words += struct.pack("<5I", *dims) + struct.pack("<I", steps | box[0] << 24)
        return (words + bytes(box[1:])).ljust(SIZE, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """Read a map from its first 64 bytes.

        Raises:
            InvalidTensorMap: a field that means nothing, an interleaved layout, or a broken rule.
        """
        return _decode(bytes(raw[:64]))


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> TensorMap:
    if len(raw) != 64:
        raise InvalidTensorMap(f"tensor map of {len(raw)} bytes: at least 64 are needed")
    address, low, *strides, high = struct.unpack_from("<Q6I", raw, 0)
    dims = struct.unpack_from("<5I", raw, 32)
    (steps,) = struct.unpack_from("<I", raw, 52)
    box = raw[55:60]
    rank = (low >> 4 & 7) + 1
    if rank > MAX_RANK:
        raise InvalidTensorMap(f"rank {rank}: 1 to {MAX_RANK} are allowed")
    key = (low >> 7 & 15, bool(low >> 16 & 1))
    if key not in _BY_FIELD:
        raise InvalidTensorMap(f"element type field {key[0]}: no such type")
    if low >> 11 & 3:
        raise InvalidTensorMap("interleaved layouts are not modelled")
    swizzle = _SWIZZLES[low >> 13 & 3]
    if low >> 19 & 1:
        if swizzle is not sw.B128:
            raise InvalidTensorMap(f"32-byte swizzle atoms with swizzle {swizzle.name}: only 128B has them")
        swizzle = sw.B128_ATOM32
    return TensorMap(
        address=address,
        dtype=_BY_FIELD[key].name,
        dims=tuple(d + 1 for d in dims[:rank]),
        strides=tuple(s << 4 | (high >> 4 * i & 15) << 36 for i, s in enumerate(strides[: rank - 1])),
        box=tuple(b + 1 for b in box[:rank]),
        element_strides=tuple((steps >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=swizzle,
        nan_fill=bool(low >> 15 & 1),
        l2_promotion=_L2_PROMOTION[low >> 17 & 3],
    )


def _validate(m: TensorMap) -> None:
    if m.dtype not in TYPES:
        raise InvalidTensorMap(f"dtype={m.dtype!r}: allowed are {', '.join(TYPES)}")
    if not 1 <= m.rank <= MAX_RANK:
        raise InvalidTensorMap(f"{m.rank} dims: 1 to {MAX_RANK} are allowed")
    for name, values, count in (
        ("strides", m.strides, m.rank - 1),
        ("box", m.box, m.rank),
        ("element_strides", m.element_strides, m.rank),
    ):
        if len(values) != count:
            raise InvalidTensorMap(f"{name}={values}: {count} values are needed for {m.rank} dims")
    _validate_layout(m, 32 if m.type.padded else 16)
    _validate_ranges(m)
    if m.type.packed:
        _validate_packed(m)
    if m.nan_fill and not m.type.floating:
        raise InvalidTensorMap(f"nan_fill with dtype {m.dtype}: only floating-point types have it")


def _validate_layout(m: TensorMap, alignment: int) -> None:
    if m.address % alignment:
        raise InvalidTensorMap(f"address={m.address:#x}: a multiple of {alignment} is needed for {m.dtype}")
    for i, stride in enumerate(m.strides, 1):
        if stride % alignment or not 0 <= stride < 1 << 40:
            raise InvalidTensorMap(
                f"strides[{i - 1}]={stride} (dimension {i}): a multiple of {alignment} bytes under 2^40 is needed"
            )
    if m.swizzle not in _SWIZZLE_FIELD:
        raise InvalidTensorMap(f"swizzle={m.swizzle}: allowed are {', '.join(s.name for s in _SWIZZLE_FIELD)}")
    if m.box[0] * m.type.bits % (16 * 8) and not m.type.padded:
        raise InvalidTensorMap(f"box[0]={m.box[0]} of {m.dtype}: its bytes must be a multiple of 16")
    if m.swizzle is not sw.NONE and m.shared_row_bytes > m.swizzle.span:
        raise InvalidTensorMap(
            f"box[0]={m.box[0]} of {m.dtype} is {m.shared_row_bytes} bytes: swizzle {m.swizzle.name} takes at most "
            f"{m.swizzle.span}"
        )


def _validate_ranges(m: TensorMap) -> None:
    for name, values, top in (
        ("dims", m.dims, 1 << 32),
        ("box", m.box, 256),
        ("element_strides", m.element_strides, 8),
    ):
        for i, value in enumerate(values):
            if not 1 <= value <= top:
                raise InvalidTensorMap(f"{name}[{i}]={value}: 1 to {top} are allowed")
    if m.l2_promotion not in _L2_PROMOTION:
        raise InvalidTensorMap(f"l2_promotion={m.l2_promotion}: allowed are {_L2_PROMOTION}")


def _validate_packed(m: TensorMap) -> None:
    if not m.type.padded:
        if m.dims[0] % 2:
            raise InvalidTensorMap(f"dims[0]={m.dims[0]} of {m.dtype}: an even number is needed")
        return
    if m.dims[0] % 128 or m.box[0] != 128:
        raise InvalidTensorMap(
            f"dims[0]={m.dims[0]}, box[0]={m.box[0]} of {m.dtype}: a multiple of 128 and exactly 128 are needed"
        )
    if m.swizzle not in (sw.NONE, sw.B128, sw.B128_ATOM32):
        raise InvalidTensorMap(f"swizzle {m.swizzle.name} with {m.dtype}: only none and 128B are allowed")


FIELDS = {
    "global_address": (0, 0, 64),
    "rank": (1, 4, 3),
    "interleave_layout": (1, 11, 2),
    "fill_mode": (1, 15, 1),
}
_STRIDE_WORDS = ((1, 32), (2, 0), (2, 32), (3, 0))
_DIM_WORDS = ((4, 0), (4, 32), (5, 0), (5, 32), (6, 0))
_BOX_WORDS = ((6, 56), (7, 0), (7, 8), (7, 16), (7, 24))
_TYPES_BY_PTX = {t.ptx: t for t in TYPES.values()}


def replace_field(raw: bytearray, field: str, value: int, ordinal: int = 0) -> None:
    """tensormap.replace: change one field of a map's bytes, in place; the map need not be valid in between.

    Args:
        field: as PTX names it. value: as PTX takes it (rank minus one; dimensions, boxes and steps as they are; stride
            in bytes; codes of Table "new_val validity").
        ordinal: of the dimension, or of the stride (0 is that of dimension 1).

    Raises:
        InvalidTensorMap: an ordinal or a value that the field does not have.
    """
    places = {"box_dim": _BOX_WORDS, "global_dim": _DIM_WORDS, "global_stride": _STRIDE_WORDS}.get(field)
    count = len(places) if places else MAX_RANK if field == "element_stride" else 1
    if not 0 <= ordinal < count:
        raise InvalidTensorMap(f"tensormap.replace.{field} of ordinal {ordinal}: 0 to {count - 1} are allowed")
    if field in FIELDS:
        _set(raw, *FIELDS[field], value, field)
    elif field == "elemtype":
        if value not in _TYPES_BY_PTX:
            raise InvalidTensorMap(f"tensormap.replace.elemtype {value}: 0 to 15 are allowed")
        _set(raw, 1, 7, 4, _TYPES_BY_PTX[value].field, field)
        _set(raw, 1, 16, 1, _TYPES_BY_PTX[value].tf32, field)
    elif field == "swizzle_mode":
        _set(raw, 1, 13, 2, value, field)
    elif field == "swizzle_atomicity":
        _set(raw, 1, 19, 1, value, field)
    elif field == "element_stride":
        _set(raw, 6, 32 + 3 * ordinal, 3, value - 1, field)
    elif places is not None:
        bits = 8 if field == "box_dim" else 32
        if field == "global_stride" and value % 16:
            raise InvalidTensorMap(f"tensormap.replace.global_stride {value}: a multiple of 16 is needed")
        _set(raw, *places[ordinal], bits, value >> 4 if field == "global_stride" else value - 1, field)
    else:
        raise InvalidTensorMap(f"tensormap.replace.{field}: no such field")


def _set(raw: bytearray, word: int, shift: int, bits: int, value: int, field: str) -> None:
    if not 0 <= value < 1 << bits:
        raise InvalidTensorMap(f"tensormap.replace.{field}: the value does not fit its {bits} bits")
    (old,) = struct.unpack_from("<Q", raw, 8 * word)
    mask = ((1 << bits) - 1) << shift
    struct.pack_into("<Q", raw, 8 * word, old & ~mask | value << shift)
