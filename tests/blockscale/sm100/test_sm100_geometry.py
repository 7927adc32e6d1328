"""The sizes of sm_100a tiles: what fits, and that a tile's scales are always among the atoms that are loaded."""

import pytest

from blockscale.kernels.parts.geometry import Geometry

SIZES = range(8, 257, 8)
NVIDIA_STAGES = {64: 7, 128: 5, 192: 4, 256: 3}  # of its one-CTA kernels, docs/notes/sm100-sass.md


@pytest.mark.parametrize("n", SIZES)
def test_as_many_stages_as_fit(n):
    g = Geometry(n)
    assert g.smem_bytes <= 232448
    assert g.tmem_columns <= 512
    assert g.smem_bytes + g.stage_bytes > 232448 or g.tmem_columns + g.scale_columns > 512
    assert g.tmem_allocation in (32, 64, 128, 256, 512)
    assert g.tmem_columns <= g.tmem_allocation
    assert g.slots >= NVIDIA_STAGES.get(n, 4)


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
    assert g.can_tile(n)
    assert g.can_tile(1)
    assert not g.can_tile(n + 1)


def test_sizes_of_one_stage():
    g = Geometry(256, stages=3)
    assert g.stage_bytes == 128 * 128 + 256 * 128 + 2048 + 2 * 2048
    assert (g.smem_bytes, g.scale_columns, g.tmem_columns) == (1024 + 3 * 55296, 16 + 32, 256 + 3 * 48)


def test_either_memory_limits_the_stages():
    assert Geometry(128, smem=101_376).slots == 2
    assert Geometry(192).slots == 4  # by shared memory
    assert Geometry(192, accumulators=2).slots == 2  # by tensor memory: 128 columns are left for scales
    assert Geometry(256, accumulators=2).most_stages < 1
    assert Geometry(64, smem=20_000).most_stages < 1
