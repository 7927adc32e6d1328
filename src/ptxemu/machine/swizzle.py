"""Shared-memory swizzles, on 16-byte granules.

Source: PTX ISA, "Swizzling Modes" (tensor copies) and "Shared Memory Layout and Swizzling" (tcgen05 operands); both use
the same patterns.  A swizzle permutes 16-byte granules within a repeating pattern that is anchored to absolute shared
addresses: with address bits 4 and up counting granules, a ^= ((a >> 7) & mask) << 4.

A CTA's shared memory starts on a 1024-byte boundary of the shared window, so that offsets in it and absolute addresses
swizzle alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

GRANULE = 16
_PATTERN = 1024  # bytes after which every pattern repeats
Granules = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Swizzle:
    """One mode: granule ^= ((granule >> shift) & mask) << unit.

    `span` is the row length in bytes that the mode is named after (16 for none); `atom` the bytes that stay together.
    """

    name: str
    span: int
    mask: int
    unit: int = 0
    shift: int = 3

    @property
    def atom(self) -> int:
        return GRANULE << self.unit


NONE = Swizzle("none", 16, 0)
B32 = Swizzle("32B", 32, 1)
B64 = Swizzle("64B", 64, 3)
B128 = Swizzle("128B", 128, 7)
B128_ATOM32 = Swizzle("128B with 32B atoms", 128, 3, unit=1)


def granules(memory: npt.NDArray[np.uint8]) -> Granules:
    """View bytes (a multiple of 16) as 16-byte items; complex128 is numpy's fastest 16-byte type to gather."""
    return memory.view(np.complex128)


def apply(swizzle: Swizzle, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where granules `index` (absolute, any shape) really lie."""
    if swizzle.mask == 0:
        return index
    return index ^ (((index >> swizzle.shift) & swizzle.mask) << swizzle.unit)


def address(swizzle: Swizzle, byte: int) -> int:
    """Where the byte at shared offset `byte` really lies."""
    granule = byte // GRANULE
    return (granule ^ (((granule >> swizzle.shift) & swizzle.mask) << swizzle.unit)) * GRANULE + byte % GRANULE


@lru_cache(maxsize=1024)
def _order(swizzle: Swizzle, phase: int, count: int, row: int = 1, pitch: int = 1) -> npt.NDArray[np.int64]:
    """Where granules phase..phase+count-1 of a pattern lie, counted from the first; phase starts a row of 128 bytes.

    row, pitch: the granules are in rows of `row` that start `pitch` apart.
    """
    index = np.arange(count, dtype=np.int64)
    order = apply(swizzle, phase + index // row * pitch + index % row) - phase
    order.flags.writeable = False
    return order


def scatter(
    swizzle: Swizzle, window: npt.NDArray[np.uint8], offset: int, data: npt.NDArray[Any], row: int = 16, pitch: int = 16
) -> None:
    """Write contiguous `data`, swizzled, to `window`: the bytes of shared memory from `offset` on.

    offset: a multiple of 16, of 128 where the data is swizzled, so that rows of 128 bytes stay inside the window.
    row, pitch: bytes of a row and between the beginnings of rows, where swizzled data is not without gaps.
    """
    raw = data.reshape(-1).view(np.uint8)
    if swizzle.mask == 0:
        window[: raw.size] = raw
        return
    order = _order(swizzle, offset % _PATTERN // GRANULE, raw.size // GRANULE, row // GRANULE, pitch // GRANULE)
    granules(window)[order] = granules(raw)


def gather(
    swizzle: Swizzle, window: npt.NDArray[np.uint8], offset: int, size: int, row: int = 16, pitch: int = 16
) -> npt.NDArray[np.uint8]:
    """Read `size` bytes that `scatter` wrote; a new array."""
    if swizzle.mask == 0:
        return np.array(window[:size])
    order = _order(swizzle, offset % _PATTERN // GRANULE, size // GRANULE, row // GRANULE, pitch // GRANULE)
    picked: Granules = granules(window)[order]
    return np.asarray(picked.view(np.uint8))
