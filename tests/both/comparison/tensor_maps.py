"""Tensor maps: 64 bytes as the driver encodes them, and fields that 'tensormap.replace' changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.builder import Kernel
from comparison.program import Map, Program
from comparison.tensor_copies import SIZES, SPANS

ADDRESS = 0x7F0123456000  # encoding does not look at the memory
PROMOTIONS = (0, 64, 128, 256)
TYPES = (*SIZES, "f32.ftz", "tf32", "tf32.ftz")


def maps() -> list[Map]:
    """Random maps that the driver accepts: every type, swizzle, rank, promotion and fill."""
    generator = np.random.default_rng(90)
    found = []
    for i in range(900):
        dtype = TYPES[i % len(TYPES)]
        size = SIZES.get(dtype, 4)
        swizzle = list(SPANS)[i // 3 % 4]
        rank = int(generator.integers(1, 6))
        large = generator.integers(0, 4) == 0
        dims = [int(x) for x in generator.integers(1, 1 << (22 if large else 9), rank)]
        inner = int(generator.integers(1, 1 + (SPANS[swizzle] if swizzle != "none" else 256 * size) // 16)) * 16 // size
        box = [min(inner, 256 // (16 // size) * (16 // size)), *(int(x) for x in generator.integers(1, 5, rank - 1))]
        strides, step = [], dims[0] * size
        for extent in dims[1:]:
            step = -(-step // 16) * 16 + 16 * int(generator.integers(0, 3))
            if step >= 1 << 40:
                step = 16 * int(generator.integers(1, 1 << 20))
            strides.append(step)
            step *= extent
        steps = tuple(int(x) for x in generator.integers(1, 9, rank)) if generator.integers(0, 2) else (1,) * rank
        nan = dtype not in ("u8", "u16", "u32", "s32", "u64", "s64") and bool(generator.integers(0, 2))
        promotion = PROMOTIONS[i // 7 % 4]
        found.append(Map("", dtype, tuple(dims), tuple(strides), tuple(box), steps, swizzle, nan, promotion))
    return found


FIELDS = (
    ("global_address", "b64", None, 0x7FEDCBA98760), ("rank", "b32", None, 2), ("rank", "b32", None, 4),
    ("box_dim", "b32", 0, 32), ("box_dim", "b32", 2, 7), ("box_dim", "b32", 1, 256), ("global_dim", "b32", 0, 12345),
    ("global_dim", "b32", 4, 99), ("global_dim", "b32", 2, 0xFFFFFFFF), ("global_stride", "b64", 0, 4096),
    ("global_stride", "b64", 3, 0x123456780), ("global_stride", "b64", 1, 0xFFFFFFFF0), ("element_stride", "b32", 0, 1),
    ("element_stride", "b32", 3, 8), ("element_stride", "b32", 1, 5), ("fill_mode", "b32", None, 1),
    ("interleave_layout", "b32", None, 0), ("swizzle_mode", "b32", None, 0), ("swizzle_mode", "b32", None, 1),
    ("swizzle_mode", "b32", None, 2), ("swizzle_mode", "b32", None, 3),
    *(("elemtype", "b32", None, i) for i in range(13)),
)  # fmt: skip
BASE = Map(
    "", "f16", (64, 32, 16, 8, 4), (128, 4096, 65536, 524288), (64, 4, 2, 1, 1), swizzle="128B", l2_promotion=128
)
ZEROED = Map("", "u8", (16,), (), (16,))


def replacements() -> Iterator[Program]:
    """Each field alone, in shared and in global memory: all 128 bytes of the map afterwards."""
    for space in ("shared::cta", "global"):
        for base, original in (("full", BASE), ("small", ZEROED)):
            kernel = Kernel(32, 1, ".shared .align 128 .b8 map[128];", (".param .u64 p_in", ".param .u64 p_maps"))
            kernel(
                "ld.param.u64 d0, [p_in]; mad.wide.u32 d0, lane, 4, d0;",
                "ld.global.b32 r100, [d0]; ld.param.u64 d1, [p_maps];",
            )
            kernel("mov.u32 r101, map; mad.lo.u32 r102, lane, 4, r101; mad.wide.u32 d2, lane, 4, d1;")
            for i, (field, kind, ordinal, value) in enumerate(FIELDS):
                place = f"d{10 + i % 2}" if space == "global" else "r101"
                kernel(f"add.u64 d{10 + i % 2}, d1, {128 * i}; st.global.b32 [d2 + {128 * i}], r100;")
                kernel("st.shared.b32 [r102], r100; bar.warp.sync -1;", f"setp.ne.u32 p1, lane, 0; @p1 bra L{i};")
                where = "" if ordinal is None else f"{ordinal}, "
                kernel(f"mov.{kind} {'d20' if kind == 'b64' else 'r103'}, {value};")
                kernel(
                    f"tensormap.replace.tile.{field}.{space}.b1024.{kind} [{place}], "
                    f"{where}{_value(field, kind, value)};"
                )
                kernel(f"L{i}: bar.warp.sync -1;")
                if space != "global":
                    kernel(f"ld.shared.b32 r104, [r102]; st.global.b32 [d2 + {128 * i}], r104; bar.warp.sync -1;")
            kernel.put("lane")
            raw = np.frombuffer(original.at(ADDRESS).encode(), np.uint8)
            yield kernel.program(
                f"tensormap.replace {space} {base}",
                lambda raw=raw: {"in": raw.copy(), "maps": np.zeros((len(FIELDS), 128), np.uint8)},
                ("in", "maps"),
                inputs=("in",),
            )


def _value(field: str, kind: str, value: int) -> str:
    """Codes are constants, everything else a register."""
    if field in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode"):
        return str(value)
    return "d20" if kind == "b64" else "r103"


def programs() -> Iterator[Program]:
    yield from replacements()
