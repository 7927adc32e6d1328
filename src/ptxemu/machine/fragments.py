"""How the matrices of mma.sync, and tiles of those of wgmma, lie in the registers of a warp, for many at a time.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k8" to "mma.m16n8k64", "Block Scaling for mma.sync".  With lane =
4 g + t, register r of A holds the word of consecutive k elements at row g + 8 (r % 2), word t + 4 (r // 2); of B, at
column g, word t + 4 r; of C and D, row g + 8 i, columns 2 t and 2 t + 1 are the registers 2 i and 2 i + 1, or the two
halves of register i.

Registers are (instructions, registers, 32) uint32, a row of words is (words,) uint32 in the order of k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["a_rows", "b_columns", "c_registers", "c_values", "scale_places"]

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]
_GROUP, _QUAD = 8, 4  # lane = _QUAD * g + t


def a_rows(registers: Words, rows: int = 16) -> Words:
    """A as words: (instructions, rows, words)."""
    count, _, _ = registers.shape
    halves = rows // _GROUP
    parts = registers.reshape(count, -1, halves, _GROUP, _QUAD)
    return np.asarray(parts.transpose(0, 2, 3, 1, 4).reshape(count, rows, -1))


def b_columns(registers: Words) -> Words:
    """B as words: (instructions, 8 columns, words)."""
    return a_rows(registers, _GROUP)


def c_values(registers: Words, kind: Any) -> npt.NDArray[Any]:
    """The accumulator as numbers of a type of 2 or 4 bytes: (instructions, rows, 8)."""
    count, _, _ = registers.shape
    pair = np.dtype(kind).itemsize // 2  # registers a pair of columns
    parts = registers.reshape(count, -1, pair, _GROUP, _QUAD).transpose(0, 1, 3, 4, 2)
    return np.asarray(np.ascontiguousarray(parts).view(kind).reshape(count, -1, _GROUP))


def c_registers(values: npt.NDArray[Any]) -> Words:
    """The registers of an accumulator, (instructions, registers, 32)."""
    count = values.shape[0]
    pair = values.dtype.itemsize // 2
    words = np.ascontiguousarray(values).view(np.uint32).reshape(count, -1, _GROUP, _QUAD, pair)
    return np.ascontiguousarray(words.transpose(0, 1, 4, 2, 3)).reshape(count, -1, _GROUP * _QUAD)


def scale_places(rows: int, thread: Index, byte: Index, count: int) -> Index:
    """Where scale codes lie among the bytes of words (instructions, 32): (instructions, rows, count).

    rows: 16 of A or 8 of B.  thread, byte: (instructions,), the selectors: which threads of a quad hold the scales, two
    neighbours for A or one for B, and the first of the `count` bytes.
    """
    row = np.arange(rows)
    lane = row % _GROUP * _QUAD + row // _GROUP + thread[:, None] * (rows // _GROUP)
    word = np.arange(len(thread))[:, None] * _GROUP * _QUAD + lane
    return np.asarray(word[..., None] * 4 + byte[:, None, None] + np.arange(count))
