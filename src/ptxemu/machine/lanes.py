"""Masks of lanes as ints with a bit a lane, and their two other forms."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FULL", "LANES", "WORD", "bools", "first", "lanes", "merge", "pack"]

LANES = 32
FULL = (1 << LANES) - 1
WORD: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits


@functools.lru_cache(maxsize=4096)
def bools(mask: int) -> NDArray[np.bool_]:
    """The mask as 32 booleans (do not write to it)."""
    array = np.array([mask >> lane & 1 for lane in range(LANES)], dtype=np.bool_)
    array.setflags(write=False)
    return array


@functools.lru_cache(maxsize=4096)
def lanes(mask: int) -> tuple[int, ...]:
    """The lanes of the mask, in order."""
    return tuple(lane for lane in range(LANES) if mask >> lane & 1)


def first(mask: int) -> int:
    """The lowest lane of a mask that has one."""
    return (mask & -mask).bit_length() - 1


def pack(array: NDArray[np.bool_]) -> int:
    """32 booleans as a mask."""
    return int.from_bytes(np.packbits(array, None, "little").tobytes(), "little")


def merge(mask: int, new: Any, old: Any, width: int) -> Any:
    """A register of `width` bits with `new` in the lanes of the mask and `old` in the others."""
    if width == 1:
        return new & mask | old & ~mask
    if width == 128:
        return tuple(merge(mask, a, b, 64) for a, b in zip(new, old or (0, 0), strict=True))
    if type(new) is int:
        if type(old) is int:
            if new == old:
                return new
            return np.where(bools(mask), WORD[width](new), WORD[width](old))
        return np.where(bools(mask), old.dtype.type(new), old)
    if type(old) is int:
        return np.where(bools(mask), new, new.dtype.type(old))
    return np.where(bools(mask), new, old)
