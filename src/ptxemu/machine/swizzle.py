"""Shared-memory swizzles, on 16-byte granules.

Source: PTX ISA, "Swizzling Modes" (tensor copies) and "Shared Memory Layout and Swizzling" (tcgen05 operands); both use
the same patterns.  A swizzle permutes 16-byte granules within a repeating pattern that is anchored to absolute shared
addresses: with address bits 4 and up counting granules, a ^= ((a >> 7) & mask) << 4.

Every function here counts in granules from the start of a CTA's shared memory, which lies on a 1024-byte boundary of
the shared window, so that offsets and absolute addresses swizzle alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

GRANULE = 16
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
def _run(swizzle: Swizzle, phase: int, count: int) -> npt.NDArray[np.int64]:
    """Granules phase..phase+count-1 of a pattern that starts at 0."""
    order = apply(swizzle, np.arange(phase, phase + count, dtype=np.int64))
    order.flags.writeable = False
    return order


def scatter(swizzle: Swizzle, memory: npt.NDArray[np.uint8], offset: int, data: npt.NDArray[Any]) -> None:
    """Write contiguous `data` at byte `offset` (a multiple of 16) of `memory`, swizzled."""
    raw = data.reshape(-1).view(np.uint8)
    if swizzle.mask == 0:
        memory[offset : offset + raw.size] = raw
        return
    phase, base = _phase(offset)
    granules(memory[base:])[_run(swizzle, phase, raw.size // GRANULE)] = granules(raw)


def gather(swizzle: Swizzle, memory: npt.NDArray[np.uint8], offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Read `size` bytes that `scatter` wrote at byte `offset`; a new array."""
    if swizzle.mask == 0:
        return np.array(memory[offset : offset + size])
    phase, base = _phase(offset)
    picked: Granules = granules(memory[base:])[_run(swizzle, phase, size // GRANULE)]
    return np.asarray(picked.view(np.uint8))


def _phase(offset: int) -> tuple[int, int]:
    """Granule within the 1024-byte pattern, and the byte where that pattern starts."""
    return (offset & 1023) // GRANULE, offset & ~1023
