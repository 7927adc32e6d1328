"""Counters of a launch: what its instructions ask of shared, global and tensor memory and of the tensor cores.

Shared memory: 32 banks of 4 bytes, and one wavefront serves one word of every bank (CUDA C++ Programming Guide,
"Shared Memory": threads that access the same word do not conflict).  A warp's access of 8 bytes a thread goes in two
passes of half a warp, one of 16 bytes in four passes of a quarter (NVIDIA, GTC 2019 talk S9593), and a pass takes as
many wavefronts as the busiest bank has words.  An ldmatrix or stmatrix passes once a matrix, whose eight rows of 16
bytes a quarter of the warp addresses.  Ideal are the wavefronts that the distinct words would fill, 32 to each.

Global memory: sectors of 32 bytes that an instruction touches, and those that its distinct bytes would fill.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from ptxemu.machine.lanes import LANES, first, lanes

__all__ = ["BANKS", "SECTOR", "Counters", "Traffic", "sectors", "wavefronts"]

BANKS = 32
WORD = 4
ROW = BANKS * WORD  # bytes of a wavefront
SECTOR = 32


@dataclass(frozen=True)
class Traffic:
    """What the executions of one instruction asked of a memory.

    line: of the PTX.  space: "shared" or "global".  kind: "load", "store" or "atomic".  accesses: executions by a warp.
    nbytes: of all threads.  units: wavefronts (shared) or sectors (global); ideal: the least that could be.
    """

    line: int
    space: str
    kind: str
    accesses: int
    nbytes: int
    units: int
    ideal: int

    @property
    def excess(self) -> int:
        """Wavefronts lost to bank conflicts, or sectors fetched for nothing."""
        return self.units - self.ideal


class Counters:
    """What one launch adds up.  `locate` gives the PTX line that a frame is at; parameters lie at addresses
    `parameters` (first, end), which are not counted as global memory.

    moved: bytes by path, such as "TMA load, global memory" (once for all CTAs of a multicast) and "TMA load, shared
    memory" (every copy, with the zeros outside the tensor).  mmas: by kind and shape.
    """

    def __init__(self, locate: Callable[[FrameType | None], int], parameters: tuple[int, int] = (0, 0)) -> None:
        self._locate = locate
        self._parameters = parameters
        self._lines: dict[tuple[int, str, str], list[int]] = {}
        self.moved: collections.Counter[str] = collections.Counter()
        self.mmas: collections.Counter[str] = collections.Counter()

    def shared(self, address: Any, nbytes: int, mask: int, kind: str) -> None:
        """A warp's access to shared memory: `nbytes` at each lane's address."""
        line = self._locate(sys._getframe(2))
        if type(address) is int:
            units = ideal = -(-nbytes // ROW)
        else:
            row = address.dtype.type(int(address[first(mask)]) & -ROW)
            units, ideal = wavefronts((address - row).tobytes(), address.dtype, nbytes, mask)
        self._add(line, "shared", kind, nbytes * mask.bit_count(), units, ideal)

    def global_(self, address: Any, nbytes: int, mask: int, kind: str) -> None:
        """A warp's access to global memory."""
        uniform = type(address) is int
        start = address if uniform else int(address[first(mask)])
        if self._parameters[0] <= start < self._parameters[1]:
            return
        line = self._locate(sys._getframe(2))
        if uniform:
            units = (start + nbytes - 1) // SECTOR - start // SECTOR + 1
            ideal = -(-nbytes // SECTOR)
        else:
            offset = address - address.dtype.type(start & ~(SECTOR - 1))
            units, ideal = sectors(offset.tobytes(), address.dtype, nbytes, mask)
        self._add(line, "global", kind, nbytes * mask.bit_count(), units, ideal)

    def mma(self, kind: str, m: int, n: int, k: int, accumulate: bool) -> None:
        """A tensor-core operation of m x n x k, over all its CTAs; its accumulators have 4 bytes."""
        self.mmas[f"{kind} {m}x{n}x{k}"] += 1
        self.moved["tensor memory, accumulators written"] += 4 * m * n
        if accumulate:
            self.moved["tensor memory, accumulators read"] += 4 * m * n

    def _add(self, line: int, space: str, kind: str, nbytes: int, units: int, ideal: int) -> None:
        key = (line, space, kind)
        sums = self._lines.get(key)
        if sums is None:
            self._lines[key] = [1, nbytes, units, ideal]
        else:
            sums[0] += 1
            sums[1] += nbytes
            sums[2] += units
            sums[3] += ideal

    def sums(self) -> tuple[Any, ...]:
        """All that was added up, for `add`."""
        return self._lines, self.moved, self.mmas

    def add(self, sums: tuple[Any, ...]) -> None:
        """Takes in what another process has added up."""
        lines, moved, mmas = sums
        for key, values in lines.items():
            self._lines[key] = [a + b for a, b in zip(self._lines.get(key, [0] * 4), values, strict=True)]
        self.moved.update(moved)
        self.mmas.update(mmas)

    def traffic(self) -> list[Traffic]:
        """By PTX line."""
        return [Traffic(*key, *sums) for key, sums in sorted(self._lines.items())]


@functools.lru_cache(maxsize=1 << 14)
def wavefronts(offsets: bytes, kind: np.dtype[Any], nbytes: int, mask: int) -> tuple[int, int]:
    """Wavefronts of an access of `nbytes` at each lane's offset from a row of the banks, and the least that its words
    could do with.

    offsets: of 32 lanes, as the bytes of an array of `kind`, so that those of a loop are worked out once; one that is
    negative wraps around, which keeps banks and words apart.
    """
    # Accesses are aligned to their size, so that all of its banks have the same conflicts.
    size = max(nbytes, WORD)
    together = ROW // size  # lanes of a pass, and accesses beside each other in a row of the banks
    places = [offset // size for offset in np.frombuffer(offsets, kind).tolist()]
    taken = 0
    for at in range(0, LANES, together):
        mine = {places[lane] for lane in lanes(mask & (1 << together) - 1 << at)}
        taken += max(collections.Counter(place % together for place in mine).values(), default=0)
    return taken, -(-len({places[lane] for lane in lanes(mask)}) * size // ROW)


@functools.lru_cache(maxsize=1 << 14)
def sectors(offsets: bytes, kind: np.dtype[Any], nbytes: int, mask: int) -> tuple[int, int]:
    """Sectors of an access of `nbytes` at each lane's offset from a sector, and the least that its bytes could fill."""
    # An offset may be negative: as an unsigned number it wraps around, which keeps sectors apart.
    starts = {int(x) for x in np.frombuffer(offsets, kind)[list(lanes(mask))]}
    touched = {sector for start in starts for sector in range(start // SECTOR, (start + nbytes - 1) // SECTOR + 1)}
    return len(touched), -(-len(starts) * nbytes // SECTOR)
