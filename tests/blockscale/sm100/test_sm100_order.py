"""The order of tiles: every tile exactly once, for every raster, group, schedule and shape of cluster."""

import numpy as np
import pytest

from blockscale.kernels.parts.geometry import MOST_CLUSTER, SIDES
from blockscale.kernels.parts.order import place, tile

LARGEST = 40
SHAPES = [(width, height) for width in SIDES for height in SIDES if width * height <= MOST_CLUSTER]


def grids(shape):
    """Of all matrices up to 40 x 40 tiles, for each CTA of the grid of each: (m, n, blocks of m, of n, x, y)."""
    width, height = shape
    m, n = (size.ravel() for size in np.mgrid[1 : LARGEST + 1, 1 : LARGEST + 1].astype(np.int32))
    down, across = -(-m // width), -(-n // height)
    ctas = down * across * width * height
    which = np.repeat(np.arange(len(m)), ctas)
    cta = np.arange(len(which), dtype=np.int32) - np.repeat(np.cumsum(ctas) - ctas, ctas).astype(np.int32)
    return m[which], n[which], down[which], across[which], cta // height, cta % height, which


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("raster", ["m", "n"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_tile_has_exactly_one_place_in_the_grid(shape, raster, group):
    m, n, down, across, x, y, which = grids(shape)
    row, column, matrix = tile(x, y, (down, across), shape, raster, group, np.minimum)
    assert not matrix.any()
    assert (row >= 0).all()
    assert (column >= 0).all()
    assert (row < down * shape[0]).all()
    assert (column < across * shape[1]).all()
    inside = (row < m) & (column < n)
    key = (which * LARGEST + row) * LARGEST + column
    times = np.bincount(key[inside], minlength=(which[-1] + 1) * LARGEST**2).reshape(-1, LARGEST, LARGEST)
    i = np.arange(LARGEST)
    size = np.arange(LARGEST**2)
    wanted = (i[:, None] <= (size // LARGEST)[:, None, None]) & (i <= (size % LARGEST)[:, None, None])
    assert np.array_equal(times, wanted)


@pytest.mark.parametrize(("m", "n", "batch", "group"), [(7, 5, 3, 2), (1, 9, 2, 4), (6, 1, 4, 64), (3, 3, 1, 3)])
def test_matrices_of_a_batch_follow_one_another(m, n, batch, group):
    matrix = np.array([place(i, m, n, group, min)[2] for i in range(m * n * batch)])
    assert np.array_equal(matrix, np.repeat(np.arange(batch), m * n))


@pytest.mark.parametrize("group", [1, 7, 1024])
@pytest.mark.parametrize(("inner", "outer", "batch"), [(2**24 - 1, 127, 1), (2**24 - 1, 1, 127), (46340, 46340, 1)])
def test_32_bits_are_enough_for_the_largest_results(inner, outer, batch, group):
    last = np.arange(2**31 - 2**16 - 64, 2**31 - 2**16, dtype=np.int64) % (inner * outer * batch)
    exact = place(last, inner, outer, group, np.minimum)
    sizes = np.int32(inner), np.int32(outer)
    with np.errstate(over="raise"):
        found = place(last.astype(np.int32), *sizes, group, np.minimum)
    assert all(np.array_equal(x, y) for x, y in zip(exact, found, strict=True))


@pytest.mark.parametrize(
    ("shape", "fallback"), [((4, 2), (2, 1)), ((4, 2), (4, 1)), ((2, 4), (2, 2)), ((4, 1), (1, 1))]
)
def test_clusters_of_two_shapes_share_blocks(shape, fallback):
    """Whichever blocks run as smaller clusters, their CTAs have the same tiles as those of the larger one."""
    (width, height), (w, h), (down, across) = shape, fallback, (3, 4)
    whole = [
        tile(block * width + x, y, (down, across), shape, "m", 2, min)
        for block in range(down * across)
        for x in range(width)
        for y in range(height)
    ]
    parts = [
        tile(first_x + x, first_y + y, (down, across), shape, "m", 2, min)
        for first_x in range(0, down * across * width, w)
        for first_y in range(0, height, h)
        for x in range(w)
        for y in range(h)
    ]
    assert sorted(whole) == sorted(parts)
    assert len(set(whole)) == len(whole) == down * across * width * height


def test_a_group_is_crossed_before_the_next_row():
    along_m = [tile(i, 0, (2, 6), (1, 1), "m", 4, min)[:2] for i in range(12)]
    assert along_m == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (0, 4), (0, 5), (1, 4), (1, 5)]
    lines = [tile(i, 0, (2, 3), (1, 1), "n", 1, min)[:2] for i in range(6)]
    assert lines == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
