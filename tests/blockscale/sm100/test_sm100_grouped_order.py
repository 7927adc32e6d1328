"""Grouped products, counted: every tile once, and what GPU MODE's four shapes take of work, bytes and time slots."""

import numpy as np
import pytest

from blockscale import families
from blockscale.config import Config, Reason
from blockscale.families.sm100.grouped.choice import choose
from blockscale.families.sm100.grouped.constraints import most_tiles
from blockscale.families.sm100.grouped.counts import count
from blockscale.kernels.parts.group_order import counts, width, within
from blockscale.problem import GroupedProblem, target_named

B200 = target_named("b200")
SHAPES = [
    ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
    ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
    ((192, 320), 3072, 4096),
    ((128, 384), 4096, 1536),
]


@pytest.mark.parametrize("raster", ["m", "n"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("tile", [(128, 32), (256, 384)], ids=str)
def test_every_row_and_column_of_a_group_is_in_one_tile(tile, swap, raster):
    for size, n in [(1, 1), (1, 500), (385, 129), (700, 256)]:
        tiles = counts(size, n, tile, swap)
        rows, columns = (n, size) if swap else (size, n)
        covered = np.zeros((rows, columns), int)
        for index in range(tiles[0] * tiles[1]):
            row, column = within(index, tiles, raster)
            own = width(columns - column * tile[1], tile[1], 16, min)
            assert own % 16 == 0
            assert 0 < own <= tile[1]
            covered[row * tile[0] : (row + 1) * tile[0], column * tile[1] : column * tile[1] + own] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize(("sizes", "n", "k"), SHAPES, ids=lambda x: str(x) if isinstance(x, int) else f"G{len(x)}")
def test_the_shapes_of_the_competition(sizes, n, k):
    problem = GroupedProblem(sum(sizes), n, k, groups=len(sizes), out_dtype="fp16")
    found = count(problem, choose(problem, B200).config, sizes, B200.sms)
    assert found.work <= 1.15
    assert found.weights <= 1.05
    assert found.most < found.ideal + 1


def test_random_problems_are_served():
    """Whatever is chosen is supported, and has no more tiles than was said."""
    random = np.random.default_rng(0)
    served = 0
    for _ in range(200):
        groups, m, n, k = (int(2 ** random.uniform(0, bits)) for bits in (9, 14, 13, 13))
        form = str(random.choice(["contiguous", "masked"]))
        activation = [None, "gelu", "swiglu", "geglu"][random.integers(4)]
        n = n * 256 if activation in ("swiglu", "geglu") else n
        out_dtype = str(random.choice(["fp32", "bf16", "nvfp4"]))
        problem = GroupedProblem(
            m, n, k, form=form, groups=groups, activation=activation, bias="fp32", out_dtype=out_dtype
        )
        if families.unsupported(problem, B200):
            continue
        chosen = choose(problem, B200)
        assert not isinstance(chosen, Reason), f"{problem}: {chosen}"
        assert families.supports(problem, B200, chosen.config) is None
        served += 1
        most = m if form == "masked" else 0
        sizes = np.full(groups, most) if most else np.bincount(random.integers(0, groups, m), minlength=groups)
        assert count(problem, chosen.config, sizes.tolist(), B200.sms).tiles <= most_tiles(problem, chosen.config)
    assert served > 120


@pytest.mark.parametrize(
    ("fields", "changes", "reason"),
    [
        ({"groups": 513}, {}, "513 groups, at most 512"),
        ({"a": "bf16"}, {}, "NVFP4 by NVFP4"),
        ({"activation": "swiglu", "n": 320}, {}, "multiple of 128"),
        ({}, {"tile": (128, 320)}, "320 columns"),
        ({}, {"tile": (64, 64)}, "64 rows"),
        ({}, {"order": "shortest"}, "'given' or 'longest'"),
        ({}, {"read": 40}, "multiple of 16"),
        ({}, {"store": "tma"}, "config.store"),
        ({}, {"cluster": (2, 1)}, "config.cluster"),
        ({}, {"stages": 20}, "config.stages"),
        ({}, {"tile": (128, 256), "accumulators": 2}, "do not fit"),
        ({"out_dtype": "nvfp4"}, {"swap": True}, "config.swap"),
        ({"out_dtype": "nvfp4"}, {"tile": (128, 96)}, "multiple of 64"),
        ({"activation": "geglu", "n": 512}, {"tile": (128, 128), "swap": False}, "expected 256"),
        ({"activation": "swiglu", "n": 512}, {"swap": True, "read": 128}, "config.read"),
        ({"form": "masked", "m": 2**25, "groups": 64}, {}, "rows"),
    ],
    ids=str,
)
def test_what_is_refused(fields, changes, reason):
    problem = GroupedProblem(**{"m": 1000, "n": 512, "k": 512, "groups": 8, **fields})
    refused = families.supports(problem, B200, Config(**changes))
    assert reason in str(refused)


def test_a_count_of_nothing():
    with pytest.raises(ValueError, match="sizes"):
        count(GroupedProblem(8, 64, 64, groups=2), Config(), (0, 0), 4)
