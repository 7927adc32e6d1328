"""The tensor map's bytes and the rules that a map must keep."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from ptxemu.machine import swizzle as sw
from ptxemu.machine.tensormap import TYPES, InvalidTensorMap, TensorMap, replace_field

MAP: dict[str, Any] = {
    "address": 0x7F0000001000,
    "dtype": "f16",
    "dims": (4096, 100, 7),
    "strides": (8192, 8192 * 100),
    "box": (64, 128, 1),
    "swizzle": sw.B128,
}


def word(raw: bytes, index: int) -> int:
    return int(struct.unpack_from("<Q", raw, 8 * index)[0])


def test_fields_lie_where_the_driver_puts_them() -> None:
    raw = TensorMap(**MAP, element_strides=(1, 2, 1), nan_fill=True, l2_promotion=128).encode()
    assert len(raw) == 128
    assert raw[60:] == bytes(68)
    assert word(raw, 0) == 0x7F0000001000
    low = word(raw, 1) & 0xFFFFFFFF
    assert low >> 4 & 7 == 2  # rank - 1
    assert low >> 7 & 15 == 6  # f16
    assert low >> 13 & 3 == 3  # 128B
    assert low >> 15 & 1 == 1  # NaN fill
    assert low >> 17 & 3 == 2  # L2 promotion 128B
    assert word(raw, 1) >> 32 == 8192 >> 4
    assert word(raw, 2) & 0xFFFFFFFF == 8192 * 100 >> 4
    assert word(raw, 4) == 4095 | 99 << 32
    assert word(raw, 5) & 0xFFFFFFFF == 6
    assert word(raw, 6) >> 56 == 63
    assert word(raw, 7) & 0xFFFF == 127
    assert word(raw, 6) >> 32 & 0xFFFFFF == 1 << 3  # an element stride of 2 in dimension 1 sets bit 35


def test_tf32_and_32_byte_atoms_are_flag_bits() -> None:
    raw = TensorMap(0, "tf32", (32, 8), (128,), (32, 8), swizzle=sw.B128_ATOM32).encode()
    low = word(raw, 1) & 0xFFFFFFFF
    assert (low >> 7 & 15, low >> 16 & 1, low >> 13 & 3, low >> 19 & 1) == (7, 1, 3, 1)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_decode_inverts_encode(dtype: str, rank: int) -> None:
    m = TensorMap(
        address=1 << 40,
        dtype=dtype,
        dims=(256, 3, 4, 5, 6)[:rank],
        strides=(4096, 16384, 65536, 1 << 20)[: rank - 1],
        box=(128 if TYPES[dtype].packed else 16, 2, 3, 4, 5)[:rank],
        element_strides=(1, 2, 3, 4, 8)[:rank],
        swizzle=sw.NONE,
        nan_fill=TYPES[dtype].floating,
        l2_promotion=256,
    )
    assert TensorMap.decode(m.encode()) == m


def test_only_the_first_64_bytes_are_read() -> None:
    m = TensorMap(**MAP)
    assert TensorMap.decode(m.encode()[:64] + b"\xab" * 64) == m


def test_box_bytes_count_the_elements_that_the_traversal_step_leaves() -> None:
    """Traversal-Stride: ceil(box / step) elements move in each dimension; dimension 0's step is ignored."""
    m = TensorMap(0, "u8", (256, 256, 8), (256, 65536), (128, 7, 3), element_strides=(5, 2, 3))
    assert m.counts == (128, 4, 1)
    assert m.box_bytes == 128 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f8"}, "dtype='f8'"),
        ({"dims": (), "strides": (), "box": ()}, "1 to 5"),
        ({"strides": (8192,)}, r"strides=\(8192,\): 2 values"),
        ({"address": 8}, "address=0x8: a multiple of 16"),
        ({"strides": (8200, 8192)}, r"strides\[0\]=8200 .*multiple of 16"),
        ({"strides": (1 << 40, 8192)}, "under 2\\^40"),
        ({"box": (64, 257, 1)}, r"box\[1\]=257: 1 to 256"),
        ({"box": (64, 0, 1)}, r"box\[1\]=0"),
        ({"box": (4, 1, 1)}, r"box\[0\]=4 of f16: its bytes must be a multiple of 16"),
        ({"box": (128, 1, 1)}, "256 bytes: swizzle 128B takes at most 128"),
        ({"dims": (0, 1, 1)}, r"dims\[0\]=0"),
        ({"element_strides": (1, 9, 1)}, r"element_strides\[1\]=9: 1 to 8"),
        ({"l2_promotion": 32}, "l2_promotion=32"),
        ({"dtype": "u16", "nan_fill": True}, "nan_fill with dtype u16"),
        ({"dtype": "b4x16", "dims": (33, 2, 2), "box": (64, 1, 1)}, r"dims\[0\]=33 of b4x16: an even"),
        ({"dtype": "b4x16_p64", "dims": (192, 2, 2), "box": (128, 1, 1)}, "multiple of 128 and exactly 128"),
        ({"dtype": "b4x16_p64", "dims": (256, 2, 2), "box": (64, 1, 1)}, "exactly 128"),
        ({"dtype": "b4x16_p64", "dims": (256, 2, 2), "box": (128, 1, 1), "address": 16}, "multiple of 32"),
        ({"dtype": "b4x16", "box": (64, 1, 1), "nan_fill": True}, "nan_fill with dtype b4x16"),
    ],
)
def test_a_broken_rule_names_field_value_and_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTensorMap, match=message):
        TensorMap(**{**MAP, **change})


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, 5 << 4, "rank 6"),
        (8, 1 << 11, "interleaved"),
        (8, 14 << 7, "type field 14"),
        (8, 1 << 13 | 1 << 19, "only 128B"),
    ],
)
def test_bytes_that_are_no_map_are_refused(offset: int, value: int, message: str) -> None:
    raw = bytearray(128)
    struct.pack_into("<I", raw, offset, value)
    with pytest.raises(InvalidTensorMap, match=message):
        TensorMap.decode(bytes(raw))
    with pytest.raises(InvalidTensorMap, match="at least 64"):
        TensorMap.decode(bytes(raw[:63]))


def test_replace_builds_a_map_from_zeros_field_by_field() -> None:
    wanted = TensorMap(
        1 << 40,
        "bf16",
        (512, 64, 9),
        (1024, 65536),
        (64, 32, 2),
        element_strides=(1, 2, 3),
        swizzle=sw.B128,
        nan_fill=True,
    )
    raw = bytearray(128)
    replace_field(raw, "global_address", 1 << 40)
    replace_field(raw, "rank", 2)
    replace_field(raw, "elemtype", 10)
    replace_field(raw, "interleave_layout", 0)
    replace_field(raw, "swizzle_mode", 3)
    replace_field(raw, "swizzle_atomicity", 0)
    replace_field(raw, "fill_mode", 1)
    for i in range(3):
        replace_field(raw, "global_dim", wanted.dims[i], i)
        replace_field(raw, "box_dim", wanted.box[i], i)
        replace_field(raw, "element_stride", wanted.element_strides[i], i)
    for i in range(2):
        replace_field(raw, "global_stride", wanted.strides[i], i)
    assert TensorMap.decode(bytes(raw)) == wanted
    replace_field(raw, "elemtype", 11)
    replace_field(raw, "swizzle_atomicity", 1)
    replace_field(raw, "box_dim", 32, 0)
    changed = TensorMap.decode(bytes(raw))
    assert (changed.dtype, changed.swizzle) == ("tf32", sw.B128_ATOM32)


@pytest.mark.parametrize(
    ("field", "value", "ordinal", "message"),
    [
        ("box_dim", 300, 0, "does not fit its 8 bits"),
        ("global_dim", 1, 5, "0 to 4 are allowed"),
        ("global_stride", 8, 0, "multiple of 16"),
        ("global_stride", 16, 4, "0 to 3 are allowed"),
        ("rank", 8, 0, "does not fit its 3 bits"),
        ("swizzle_mode", 4, 0, "does not fit"),
        ("swizzle_atomicity", 3, 0, "does not fit"),
        ("elemtype", 16, 0, "0 to 15"),
        ("l2_promotion", 1, 0, "no such field"),
    ],
)
def test_replace_refuses_values_that_no_field_holds(field: str, value: int, ordinal: int, message: str) -> None:
    with pytest.raises(InvalidTensorMap, match=message):
        replace_field(bytearray(128), field, value, ordinal)


def test_a_map_of_an_array() -> None:
    array = np.zeros((3, 8, 64), np.float16)
    m = TensorMap.of(array[:, 1:, :], (32, 4, 1), swizzle="64B", nan_fill=True)
    assert (m.address, m.dtype, m.dims, m.strides) == (array.ctypes.data + 128, "f16", (64, 7, 3), (128, 1024))
    assert (m.box, m.swizzle, m.nan_fill) == ((32, 4, 1), sw.B64, True)
    packed = TensorMap.of(np.zeros((16, 64), np.uint8), (64, 8), dtype="b4x16", swizzle="32B")
    assert (packed.dims, packed.strides) == ((128, 16), (64,))


def test_an_array_that_no_map_describes() -> None:
    array = np.zeros((8, 64), np.float32)
    for given, more, message in (
        (array.T, {}, "last axis has to be contiguous"),
        (array, {"swizzle": "256B"}, "swizzle='256B': allowed are none, 32B"),
        (array.astype(np.int8), {}, "dtype='int8'"),
    ):
        with pytest.raises(InvalidTensorMap, match=message):
            TensorMap.of(given, (16, 8), **more)
