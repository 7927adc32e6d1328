"""How the epilogue cuts a tile up, and what that takes of shared memory.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

STORES = ("direct", "tma", "tma_rows")
RELEASES = ("late", "early")
WARPS = 4  # of the epilogue: warp w has lanes 32w to 32w + 31 of tensor memory
ROWS = 32  # of a warp: a row a thread
BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "nvfp4": 4}  # of an element of the output
WIDEST_BOX = 128  # bytes of a row that one TMA store takes: the width of the widest swizzle


def most_held(activation: str | None) -> int:
    """Columns that a thread may hold, one register each, since the compiler reads them all before it packs any; gelu
    takes many registers itself."""
    return 64 if activation == "gelu" else 128


def fragment(tile_n: int, read: int, out_dtype: str) -> int:
    """Columns of tensor memory that a thread reads before it waits: at most `read`, and a whole number of times in a
    tile. NVFP4 goes by 64 columns, a word of scales, or by 32 where a tile ends within one."""
    if out_dtype == "nvfp4":
        return 64 if tile_n % 64 == 0 else 32
    return next(columns for columns in range(min(read, tile_n) // 8 * 8, 0, -8) if tile_n % columns == 0)


def box_bytes(columns: int, out_dtype: str) -> int:
    """Bytes of a row that one TMA store takes: a power of two, from 16 to 128, that divides a row of a fragment."""
    row = columns * BITS[out_dtype] // 8
    return min(row & -row, WIDEST_BOX)


def staging_bytes(store: str, store_slots: int, tile_n: int, read: int, out_dtype: str) -> int:
    """Shared memory for boxes on their way to global memory: `store_slots` for each warp, whole KiB; 0 for "direct"."""
    if store == "direct":
        return 0
    slot = ROWS * box_bytes(fragment(tile_n, read, out_dtype), out_dtype)
    return -(-WARPS * store_slots * slot // 1024) * 1024
