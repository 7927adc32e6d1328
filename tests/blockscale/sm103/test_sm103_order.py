"""The order of tiles where clusters keep to lines: every tile exactly once, evenly, for any number of slots."""

import numpy as np
import pytest

from blockscale.kernels.parts.order import owned, owned_tile, tile

LARGEST = 64
SHAPES = [(4, 2), (8, 2), (4, 4)]
SIZES = np.array([[i, j] for i in range(1, LARGEST + 1) for j in range(1, LARGEST + 1)], np.int32)


def choose(condition, value, otherwise):
    return value if condition else otherwise


def grids(shape):
    """Of all matrices up to 64 x 64 tiles, for each CTA of the grid of each: (m, n, blocks of m, of n, x, y, which)."""
    width, height = shape
    m, n = SIZES.T
    down, across = -(-m // width), -(-n // height)
    ctas = down * across * width * height
    which = np.repeat(np.arange(len(m), dtype=np.int32), ctas)
    cta = np.arange(len(which), dtype=np.int32) - np.repeat(np.cumsum(ctas) - ctas, ctas).astype(np.int32)
    return m[which], n[which], down[which], across[which], cta // height, cta % height, which


def assert_every_tile_once(m, n, row, column, which):
    assert (row >= 0).all()
    assert (column >= 0).all()
    inside = (row < m) & (column < n)
    key = (which[inside] * LARGEST + row[inside]) * LARGEST + column[inside]
    times = np.bincount(key, minlength=len(SIZES) * LARGEST**2).reshape(-1, LARGEST, LARGEST)
    i = np.arange(LARGEST)
    wanted = (i[:, None] < SIZES[:, 0, None, None]) & (i < SIZES[:, 1, None, None])
    assert np.array_equal(times, wanted)


@pytest.mark.parametrize("raster", ["m", "n"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_tile_has_exactly_one_owner(shape, raster):
    """With as many slots as GPUs have, and any other number."""
    m, n, down, across, x, y, which = grids(shape)
    several = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 9, 9, 18, 18, 37], len(SIZES)).astype(np.int32)
    slots = np.minimum(several[which], down * across)  # a launch has no more clusters than blocks
    row, column, matrix = owned_tile(x, y, (down, across), 1, slots, shape, raster, np.minimum, np.where)
    assert not matrix.any()
    assert (row < down * shape[0]).all()
    assert (column < across * shape[1]).all()
    assert_every_tile_once(m, n, row, column, which)


@pytest.mark.parametrize(("raster", "group"), [("m", 1), ("n", 2), ("n", 4)])
@pytest.mark.parametrize("shape", [(8, 2), (4, 4)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_tile_has_exactly_one_turn(shape, raster, group):
    m, n, down, across, x, y, which = grids(shape)
    row, column, _ = tile(x, y, (down, across), shape, raster, group, np.minimum)
    assert_every_tile_once(m, n, row, column, which)


@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_pairs_in_the_place_of_a_cluster_have_its_tiles(shape, slots):
    """Whichever blocks of a grid run as pairs, their CTAs have the same tiles as those of the larger cluster."""
    (width, height), (down, across) = shape, (4, 3)

    def tile_of(x, y):
        return owned_tile(x, y, (down, across), 1, slots, shape, "n", min, choose)

    for block in range(down * across):
        start = block * width
        whole = {tile_of(start + x, y) for x in range(width) for y in range(height)}
        parts = {tile_of(x + half, y) for x in range(start, start + width, 2) for y in range(height) for half in (0, 1)}
        rows, columns = ({tile[i] for tile in whole} for i in (0, 1))
        assert whole == parts
        assert (len(whole), len(rows), len(columns)) == (width * height, width, height)
        assert min(rows) % width == min(columns) % height == 0


@pytest.mark.parametrize(("inner", "outer", "batch"), [(5, 3, 2), (16, 8, 1), (7, 11, 3), (1, 4, 5), (9, 1, 4)])
def test_a_batch_has_its_matrices_lines(inner, outer, batch):
    count = inner * outer * batch
    everything = {(i, j, k) for i in range(inner) for j in range(outer) for k in range(batch)}
    for slots in range(1, count + 1):
        blocks = [owned(i, slots, inner, outer, batch, min, choose) for i in range(count)]
        assert len(set(blocks)) == count
        assert set(blocks) == everything


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 9, 11, 16])
def test_slots_walk_lines_of_their_own_in_step(slots):
    """Whole lines while every slot has one; then each keeps to its line as long as blocks last, ends go to the rest."""
    inner, outer = 16, 8
    index = np.arange(inner * outer)
    along, line, _ = owned(index, slots, inner, outer, 1, np.minimum, np.where)
    slot, turn = index % slots, index // slots
    wanted = turn // inner * slots + slot
    own = wanted < outer
    assert np.array_equal(line[own], wanted[own])
    assert np.array_equal(along[own], turn[own] % inner)
    last = (outer - 1) // slots * slots  # the first of the last lines
    assert (line[~own] >= last).all()
    assert np.ptp(np.bincount(slot)) <= 1


def test_nine_slots_for_eight_rows():
    """8192 x 8192 in blocks of 1024 x 512: eight slots have a row of blocks, the ninth the ends of all rows."""
    along, line, _ = owned(np.arange(128), 9, 16, 8, 1, np.minimum, np.where)
    for slot in range(8):
        assert (line[slot::9] == slot).all()
        assert np.array_equal(along[slot::9], np.arange(15 if slot < 2 else 14))
    ends = list(zip(line[8::9].tolist(), along[8::9].tolist(), strict=True))
    assert ends == [(i, 14) for i in range(2, 8)] + [(i, 15) for i in range(8)]


@pytest.mark.parametrize("slots", [1, 9, 148, 65535])
@pytest.mark.parametrize(("inner", "outer", "batch"), [(2**24 - 1, 127, 1), (2**24 - 1, 1, 127), (46340, 46340, 1)])
def test_32_bits_are_enough_for_the_largest_results(inner, outer, batch, slots):
    count = inner * outer * batch
    last = np.concatenate((np.arange(64), np.arange(count - slots - 64, count)))
    exact = owned(last, slots, inner, outer, batch, np.minimum, np.where)
    sizes = (np.uint32(x) for x in (slots, inner, outer, batch))
    found = owned(last.astype(np.uint32), *sizes, np.minimum, np.where)
    assert all(np.array_equal(x, y) for x, y in zip(exact, found, strict=True))
