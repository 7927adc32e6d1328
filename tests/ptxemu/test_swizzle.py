"""Swizzles against the manual's tables of 16-byte cells ("Swizzling Modes")."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.machine import swizzle as sw

# Rows of 128 bytes; each number is the logical cell (within its row's eight) that the position holds.
TABLES = {
    sw.NONE: ["01234567"] * 8,
    sw.B32: ["01234567", "10325476"] * 4,
    sw.B64: ["01234567", "10325476", "23016745", "32107654"] * 2,
    sw.B128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    sw.B128_ATOM32: ["01234567", "23016745", "45670123", "67452301"] * 2,
}


@pytest.mark.parametrize("swizzle", list(TABLES), ids=lambda s: s.name)
def test_pattern_equals_the_manuals_table(swizzle: sw.Swizzle) -> None:
    placed = sw.apply(swizzle, np.arange(64))
    holds = np.empty(64, dtype=np.int64)
    holds[placed] = np.arange(64)
    rows = ["".join(str(cell % 8) for cell in row) for row in holds.reshape(8, 8)]
    assert rows == TABLES[swizzle]


@pytest.mark.parametrize("swizzle", list(TABLES), ids=lambda s: s.name)
@pytest.mark.parametrize("offset", [0, 128, 640, 4096 + 384])
def test_scatter_anchors_the_pattern_to_absolute_addresses(swizzle: sw.Swizzle, offset: int) -> None:
    data = np.arange(2048, dtype=np.uint16).view(np.uint8)
    memory = np.zeros(16384, dtype=np.uint8)
    sw.scatter(swizzle, memory[offset : offset + data.size], offset, data)
    for byte in (0, 17, 130, 555, 2047, 4095):
        assert memory[sw.address(swizzle, offset + byte)] == data[byte]
    np.testing.assert_array_equal(sw.gather(swizzle, memory[offset:], offset, data.size), data)


def test_a_granule_is_moved_whole() -> None:
    assert sw.address(sw.B128, 128 * 3 + 16 * 5 + 7) == 128 * 3 + 16 * (5 ^ 3) + 7
    assert (sw.B128.atom, sw.B128_ATOM32.atom) == (16, 32)
