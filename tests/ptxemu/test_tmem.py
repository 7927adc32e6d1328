"""Tensor memory: addresses, allocation rules, the shapes of ld and st, the multicasts of cp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptxemu.errors import MemoryFault
from ptxemu.machine import tmem
from ptxemu.machine.tmem import Pair, TensorMemory


def full() -> TensorMemory:
    memory = TensorMemory()
    memory.take(0, 512)
    memory.data[:] = np.arange(128, dtype=np.uint32)[:, None] << 16 | np.arange(512, dtype=np.uint32)
    return memory


def test_an_address_is_lane_and_column() -> None:
    block = full().block(5 << 16 | 300, 2, 3)
    np.testing.assert_array_equal(
        block, [[5 << 16 | c for c in (300, 301, 302)], [6 << 16 | c for c in (300, 301, 302)]]
    )
    assert tmem.split(0x00210040) == (33, 64)


def test_fresh_memory_is_nan() -> None:
    memory = TensorMemory()
    memory.take(0, 64)
    assert np.isnan(memory.block(0, 128, 64).view(np.float32)).all()
    memory.block(0, 128, 64)[:] = 0
    memory.release(0, 64)
    memory.take(0, 32)
    assert np.isnan(memory.block(0, 128, 32).view(np.float32)).all()


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_alloc_takes_a_power_of_two_from_32_to_512(columns: int) -> None:
    with pytest.raises(MemoryFault, match=f"tcgen05.alloc of {columns} columns"):
        TensorMemory().check_request(columns)


def test_allocations_do_not_grow_and_end_with_the_permit() -> None:
    memory = TensorMemory()
    memory.check_request(64)
    memory.take(0, 64)
    with pytest.raises(MemoryFault, match="may not grow"):
        memory.check_request(128)
    memory.check_request(32)
    memory.relinquish()
    with pytest.raises(MemoryFault, match="after tcgen05"):
        memory.check_request(32)


def test_allocations_do_not_overlap_and_no_room_is_none() -> None:
    memory = TensorMemory()
    for expected in (0, 128, 256, 384):
        assert memory.place(128) == expected
        memory.take(expected, 128)
    assert memory.place(32) is None
    memory.release(256, 128)
    assert memory.place(64) == 256


def test_dealloc_frees_exactly_what_was_allocated() -> None:
    memory = TensorMemory()
    memory.take(0, 64)
    for address, columns in ((0, 32), (64, 64)):
        with pytest.raises(MemoryFault, match="allocated is 64 at 0x0"):
            memory.release(address, columns)
    memory.release(0, 64)
    with pytest.raises(MemoryFault, match="allocated is nothing"):
        memory.release(0, 64)


def test_access_needs_an_allocation_and_stays_inside() -> None:
    memory = TensorMemory()
    memory.take(32, 32)
    memory.take(64, 32)
    assert memory.block(32, 128, 64).shape == (128, 64)
    for address, lanes, columns in ((0, 128, 64), (64, 128, 33), (96, 1, 1)):
        with pytest.raises(MemoryFault, match="is not allocated"):
            memory.block(address, lanes, columns)
    for address, lanes, columns in ((96 << 16 | 32, 33, 1), (500, 1, 13)):
        with pytest.raises(MemoryFault, match="leave its 128 by 512"):
            memory.block(address, lanes, columns)


def test_pair_allocates_the_same_columns_in_both_ctas_once_both_came() -> None:
    pair, memories = Pair(), (TensorMemory(), TensorMemory())
    wait = pair.ask(0, memories[0], "alloc", 128)
    assert not wait.ready()
    assert pair.ask(1, memories[1], "alloc", 128).ready()
    assert wait.ready()
    assert memories[0].allocations == memories[1].allocations == {0: 128}
    wait = pair.ask(1, memories[1], "dealloc", 128, 0)
    assert not wait.ready()
    assert memories[1].allocations
    pair.ask(0, memories[0], "dealloc", 128, 0)
    assert wait.ready()
    assert not memories[0].allocations
    assert not memories[1].allocations


def test_a_pairs_allocation_waits_for_the_pairs_deallocation() -> None:
    pair, memories = Pair(), (TensorMemory(), TensorMemory())
    for side in (0, 1):
        pair.ask(side, memories[side], "alloc", 512)
    waits = [pair.ask(side, memories[side], "alloc", 256) for side in (0, 1)]
    assert "waits for the peer CTA or for room" in waits[0].what()
    pair.ask(0, memories[0], "dealloc", 512)
    assert not waits[0].ready()
    pair.ask(1, memories[1], "dealloc", 512)
    assert waits[0].ready()
    assert waits[1].ready()
    assert memories[1].allocations == {0: 256}


def test_a_pair_that_disagrees_is_a_fault() -> None:
    pair = Pair()
    pair.ask(0, TensorMemory(), "alloc", 128)
    with pytest.raises(MemoryFault, match="ask for 128 columns at 0x0 and 64 columns at 0x0"):
        pair.ask(1, TensorMemory(), "alloc", 64)


def test_a_second_warp_may_not_join_its_own_ctas_request() -> None:
    pair, memory = Pair(), TensorMemory()
    pair.ask(0, memory, "alloc", 128)
    with pytest.raises(MemoryFault, match="second warp"):
        pair.ask(0, memory, "alloc", 128)


# The manual's figures as formulas: thread t, register r -> (lane, column).
MAPS: dict[str, tuple[int, Callable[[int, int], tuple[int, int]]]] = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
    "16x32bx2": (1, lambda t, r: (t % 16, r + (40 if t >= 16 else 0))),
}


@pytest.mark.parametrize("shape", list(MAPS))
@pytest.mark.parametrize("repeat", [1, 2, 4, 8, 16, 32, 64, 128])
def test_each_register_is_where_the_manual_puts_it(shape: str, repeat: int) -> None:
    per, place = MAPS[shape]
    if per * repeat > 128:
        with pytest.raises(MemoryFault, match="at most"):
            tmem.fragment(shape, repeat)
        return
    memory, part = full(), tmem.fragment(shape, repeat, 40 if shape == "16x32bx2" else 0)
    assert part.registers == per * repeat
    values = part.load(memory.block(32 << 16, part.lanes, part.columns))
    for t in range(32):
        for r in range(part.registers):
            lane, column = place(t, r)
            assert values[r, t] == (32 + lane) << 16 | column


@pytest.mark.parametrize("shape", list(MAPS))
def test_store_inverts_load_and_touches_each_word_once(shape: str) -> None:
    part = tmem.fragment(shape, 4, 40 if shape == "16x32bx2" else 0)
    values = np.arange(part.registers * 32, dtype=np.uint32).reshape(part.registers, 32)
    block = np.full((part.lanes, part.columns), 0xFFFFFFFF, np.uint32)
    part.store(block, values)
    np.testing.assert_array_equal(part.load(block), values)
    assert np.count_nonzero(block != 0xFFFFFFFF) == values.size


def test_packed_registers_hold_two_columns() -> None:
    part = tmem.fragment("32x32b", 4, halves=True)
    np.testing.assert_array_equal(part.column[3], [0, 2, 4, 6])
    assert part.columns == 8


def test_multicasts_of_cp() -> None:
    rows = np.arange(64, dtype=np.uint32)[:, None]
    first, second = rows[:32], rows[32:]
    for multicast, source, expected in (
        ("warpx4", first, [first] * 4),
        ("warpx2::02_13", rows, [first, first, second, second]),
        ("warpx2::01_23", rows, [first, second, first, second]),
        ("", np.concatenate([rows, rows + 64]), [first, second, first + 64, second + 64]),
    ):
        block = np.zeros((128, 3), np.uint32)[:, :1]
        tmem.spread(block, source, multicast)
        np.testing.assert_array_equal(block, np.concatenate(expected))
