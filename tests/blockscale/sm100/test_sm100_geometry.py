"""The sizes of sm_100a tiles: what fits, and that a tile's scales are always among the atoms that are loaded."""

import pytest

from blockscale.kernels.parts.geometry import CTA_ROWS, MOST_CLUSTER, ROWS, SIDES, STEPS, TILE_K, Geometry, widths

TILES = [(rows, n) for rows in ROWS for n in widths(rows)]
# Of its kernels, docs/notes/sm100-sass.md.
NVIDIA_STAGES = {
    (128, 64): 7, (128, 128): 5, (128, 192): 4, (128, 256): 3,
    (256, 64): 8, (256, 128): 7, (256, 192): 6, (256, 256): 5,
}  # fmt: skip
CLUSTERS = [(m, n) for m in SIDES for n in SIDES if m * n <= MOST_CLUSTER]


@pytest.mark.parametrize("accumulators", [1, 2])
@pytest.mark.parametrize("tile", TILES)
def test_as_many_stages_as_fit(tile, accumulators):
    g = Geometry(tile, accumulators=accumulators)
    assert g.smem_bytes <= 232448
    assert g.smem_bytes + g.stage_bytes > 232448
    assert g.tmem_columns <= 512
    assert g.tmem_allocation in (32, 64, 128, 256, 512)
    assert g.tmem_columns <= g.tmem_allocation
    assert g.slots >= NVIDIA_STAGES.get(tile, 4)


@pytest.mark.parametrize("tile", NVIDIA_STAGES)
def test_stages_beside_a_staged_output(tile):
    """16 KiB, one buffer for each warp of the epilogue."""
    g = Geometry(tile, staging=16384)
    assert g.smem_bytes <= 232448
    assert g.slots >= NVIDIA_STAGES[tile]


@pytest.mark.parametrize("tile", TILES)
def test_two_accumulators_overlap_where_they_have_to(tile):
    g = Geometry(tile, accumulators=2)
    n = tile[1]
    fits = 2 * n + 2 * g.scale_columns <= 512
    assert (g.overlap == 0) == fits
    assert 0 <= g.overlap < n
    assert g.accumulator_columns == 2 * n - g.overlap
    assert g.accumulator_slots == (2 if fits else 1)
    assert g.scale_slots >= min(2, g.slots)
    assert Geometry(tile).overlap == 0


def test_the_largest_tile_overlaps_by_two_sets_of_scales():
    g = Geometry((256, 256), accumulators=2)
    assert (g.scale_slots, g.scale_columns, g.overlap, g.accumulator_stride) == (2, 48, 96, 160)
    assert g.tmem_columns == 512


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile[1] % 32 == 0])
def test_every_tile_finds_its_scales_in_the_atoms_loaded(tile):
    n = tile[1]
    rows = Geometry(tile).atoms_n * 128
    begins = [tile * n % 128 for tile in range(64)]
    assert max(begins) + n <= rows
    assert max(begins) + n > rows - 128
    assert all(begin % 32 == 0 for begin in begins)


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile[1] % 32])
def test_other_widths_serve_one_tile(tile):
    g, n = Geometry(tile), tile[1]
    assert g.atoms_n * 128 >= n > g.atoms_n * 128 - 128
    assert g.can_tile(n)
    assert g.can_tile(1)
    assert not g.can_tile(n + 1)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_boxes_of_a_cluster_make_up_a_slot(cluster):
    for tile in (tile for tile in TILES if cluster[0] % (tile[0] // CTA_ROWS) == 0):
        g = Geometry(tile, cluster=cluster)
        assert CTA_ROWS % (8 * g.a_boxes) == 0
        assert g.divides == (tile[1] % (8 * cluster[0]) == 0)
        assert STEPS % g.sfa_boxes == STEPS % g.sfb_boxes == 0
        assert g.slots == Geometry(tile).slots


def test_sizes_of_one_stage():
    g = Geometry((128, 256), stages=3)
    assert g.stage_bytes == 128 * 128 + 256 * 128 + 2048 + 2 * 2048
    assert (g.smem_bytes, g.scale_columns, g.tmem_columns) == (1024 + 3 * 55296, 16 + 32, 256 + 3 * 48)
    g = Geometry((256, 256), stages=3, staging=4096)
    assert g.stage_bytes == 128 * 128 + 128 * TILE_K // 2 + 2048 + 2 * 2048
    assert (g.smem_bytes, g.tmem_columns) == (1024 + 4096 + 3 * 38912, 256 + 3 * 48)


def test_shared_memory_limits_the_stages():
    assert Geometry((128, 128), smem=101_376).slots == 2
    assert Geometry((128, 64), smem=20_000).most_stages < 1


MULTIPROCESSOR = 233_472  # bytes of shared memory, of which a CTA takes 1,024 more than it asks for


@pytest.mark.parametrize("cluster", [(2, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_clusters_do_not_wait_for_columns_of_one_another(tile, cluster):
    """As many CTAs as a multiprocessor takes by shared memory have columns of their own, however few stages there are;
    and what is asked for can be had."""
    for stages in (1, None):
        g = Geometry(tile, stages, cluster=cluster)
        assert MULTIPROCESSOR // (g.smem_bytes + 1024) * g.tmem_allocation <= 512
        assert g.smem_used <= g.smem_bytes <= 232448


def test_what_clusters_of_one_stage_ask_for():
    g = Geometry((128, 256), 1, cluster=(2, 2))
    assert (g.smem_used, g.smem_bytes, g.tmem_allocation) == (1024 + 55296, 116_736, 512)
    assert Geometry((128, 256), 1).smem_bytes == 1024 + 55296  # alone, it waits for another that ends by itself
    assert not Geometry((128, 40), cluster=(1, 2)).can_tile(40)
