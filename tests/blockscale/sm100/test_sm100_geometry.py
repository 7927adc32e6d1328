"""The sizes of sm_100a tiles: what fits, and that a tile's scales are always among the atoms that are loaded."""

import pytest

from blockscale.kernels.parts.geometry import Geometry

SIZES = range(8, 257, 8)
NVIDIA_STAGES = {64: 7, 128: 5, 192: 4, 256: 3}  # of its one-CTA kernels, docs/notes/sm100-sass.md


@pytest.mark.parametrize("n", SIZES)
def test_as_many_stages_as_fit(n):
    g = Geometry(n)
    assert g.smem_bytes <= 232448 < g.smem_bytes + g.stage_bytes
    assert g.tmem_columns <= 512
    assert g.tmem_allocation in (32, 64, 128, 256, 512)
    assert g.tmem_columns <= g.tmem_allocation
    assert g.ring >= NVIDIA_STAGES.get(n, 4)


@pytest.mark.parametrize("n", [n for n in SIZES if n % 32 == 0])
def test_every_tile_finds_its_scales_in_the_atoms_loaded(n):
    rows = Geometry(n).atoms_n * 128
    begins = [tile * n % 128 for tile in range(64)]
    assert max(begins) + n <= rows
    assert max(begins) + n > rows - 128
    assert all(begin % 32 == 0 for begin in begins)


@pytest.mark.parametrize("n", [n for n in SIZES if n % 32])
def test_other_widths_serve_one_tile(n):
    g = Geometry(n)
    assert g.atoms_n * 128 >= n > g.atoms_n * 128 - 128
    assert g.tiles(n)
    assert g.tiles(1)
    assert not g.tiles(n + 1)


def test_sizes_of_one_stage():
    g = Geometry(256, stages=3)
    assert g.stage_bytes == 128 * 128 + 256 * 128 + 2048 + 2 * 2048
    assert (g.smem_bytes, g.scale_columns, g.tmem_columns) == (1024 + 3 * 55296, 16 + 32, 256 + 3 * 48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "tile_n: 0, expected a multiple of 8 from 8 to 256"),
        ((20,), "tile_n: 20"),
        ((264,), "tile_n: 264"),
        ((128, 7), "stages: 7, expected 1 to 6 for tiles of 128 x 128"),
        ((128, 0), "stages: 0"),
        ((256, None, 2), "accumulators: 2, tiles of 128 x 256 in 4 stages would take 704 columns"),
        ((128, None, 0), "accumulators: 0"),
    ],
)
def test_what_cannot_be_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        Geometry(*arguments)
