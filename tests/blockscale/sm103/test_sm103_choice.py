"""The choice for B300: presets, K = 96 where it pays, supported for every shape, with reasons."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

import blockscale as bs
from blockscale import heuristics
from blockscale.families import LARGEST_EXTENT, supports
from blockscale.families.sm103.constraints import cluster_count, cluster_shape
from blockscale.families.sm103.presets import PRESETS
from blockscale.kernels.parts.order import owned_tile, tile
from blockscale.problem import ACTIVATIONS, BIASES, OUT_DTYPES, Problem, target_named

B300, GB300 = target_named("b300"), target_named("gb300")
SIZES = sorted(PRESETS)


def chosen(m, n, k=512, target=B300, **options):
    return heuristics.choose(Problem(m, n, k, **options), target)


def anything(draw):
    """A problem with sizes of every order of magnitude."""
    size = [int(2 ** draw.uniform(0, 16)) for _ in range(3)]
    batch = draw.choice((1, 1, 3, 1000))
    rest = draw.choice(OUT_DTYPES), draw.choice(BIASES), draw.choice(ACTIVATIONS), draw.random() < 0.2
    return Problem(*size, batch, batch, 1, "nvfp4", "nvfp4", *rest)


@pytest.mark.parametrize(
    "target", [B300, GB300, replace(B300, sms=4)], ids=lambda target: f"{target.name}-{target.sms}"
)
def test_a_choice_is_supported_and_has_its_reasons(target):
    draw, seen = random.Random(0), set()
    for _ in range(400):
        problem = anything(draw)
        choice = heuristics.choose(problem, target)
        assert supports(problem, target, choice.config) is None, (problem, choice)
        assert len(choice.reasons) == (7 if choice.config.mma_k == 96 else 8) + problem.invariant
        assert all(reason for reason in choice.reasons)
        seen.add(choice.config.mma_k)
    assert seen == {64, 96}


@pytest.mark.parametrize("m", [1, 7, 128, 129, 257, LARGEST_EXTENT])
@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, LARGEST_EXTENT])
def test_edges_of_tiles_and_of_what_there_is(m, n):
    for k in (1, LARGEST_EXTENT):
        problem = Problem(m, n, k)
        if m == n == LARGEST_EXTENT:
            with pytest.raises(heuristics.Unsupported, match="at most "):
                heuristics.choose(problem, B300)
        else:
            assert supports(problem, B300, heuristics.choose(problem, B300).config) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("target", [B300, GB300], ids=lambda target: target.name)
def test_presets_are_chosen_for_their_sizes(size, out_dtype, target):
    problem = Problem(*size, out_dtype=out_dtype)
    choice = heuristics.choose(problem, target)
    assert choice.config == PRESETS[size].config
    assert supports(problem, target, choice.config) is None
    assert all(reason.endswith(("(published)", "(derived)")) for reason in choice.reasons)
    assert str(PRESETS[size].microseconds) in choice.reasons[0]


@pytest.mark.parametrize(
    "change", [{"out_dtype": "fp32"}, {"batch": 2, "batch_a": 2}, {"invariant": True}, {"m": 8191}, {"k": 8256}]
)
def test_presets_are_for_what_was_published_alone(change):
    problem = replace(Problem(8192, 8192, 8192), **change)
    choice = heuristics.choose(problem, B300)
    assert choice.config != PRESETS[8192, 8192, 8192].config
    assert choice.config.mma_k == 96 or problem.invariant


def test_a_part_of_a_gpu_has_no_presets():
    choice = heuristics.choose(Problem(8192, 8192, 8192), replace(B300, sms=143))
    assert not choice.reasons[0].startswith("preset")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [B300, GB300], ids=lambda target: target.name)
def test_every_tile_of_a_preset_exactly_once(size, target):
    config, problem = PRESETS[size].config, Problem(*size)
    (width, height), blocks = cluster_shape(config), cluster_count(problem, config)
    count = math.prod(blocks)
    cta = np.arange(count * width * height, dtype=np.uint32)
    x, y = cta // height, cta % height
    if config.ownership == "lines":
        slots = np.uint32(target.sms // (width * height))
        found = owned_tile(x, y, blocks, 1, slots, (width, height), config.raster, np.minimum, np.where)
    else:
        found = tile(x, y, blocks, (width, height), config.raster, config.group, np.minimum)
    row, column, matrix = (np.asarray(place, np.int64) for place in found)
    assert not matrix.any()
    across = size[1] // config.tile[1]
    assert np.array_equal(np.bincount(row * across + column), np.ones(size[0] // 128 * across))


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (8192, 8192, 4096, {"mma_k": 96, "cluster": (8, 2), "ownership": "lines", "l2_a": "evict_last", "drop": 0}),
        (16384, 16384, 8192, {"cluster": (8, 2), "raster": "n", "group": 4, "first": "b", "l2_out": "evict_first"}),
        (65536, 8192, 65536, {"cluster": (4, 4), "group": 2, "drop": 8, "pace": 0}),
        (4096, 4096, 7168, {"cluster": (4, 2), "fallback_cluster": (2, 1), "group": 2, "prefetch": 3, "pace": 550}),
        (2048, 2048, 2048, {"mma_k": 96, "tile": (256, 256), "accumulators": 1, "cluster": (4, 1), "pace": 0}),
        (1024, 3072, 4096, {"mma_k": 96}),
        (1024, 2048, 4096, {"mma_k": 64, "tile": (256, 128)}),
        (128, 4096, 7168, {"mma_k": 64, "tile": (128, 64)}),
        (4096, 255, 4096, {"mma_k": 64}),
        (1, 8192, 8192, {"mma_k": 64, "tile": (128, 8), "swap": True}),
        (20000, 4096, 4096, {"mma_k": 96, "tile": (256, 256)}),
    ],
)
def test_the_rules(m, n, k, expected):
    config = chosen(m, n, k).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_why_k_is_64():
    assert chosen(4096, 255).reasons[0] == "K = 64: 255 columns, and K = 96 pays with 256 (published)"
    assert "exchanged operands have 20 columns" in chosen(20, 4096).reasons[0]
    assert "1 round of 256 columns / 1.5 beside 1 of 64" in chosen(128, 4096).reasons[0]


@pytest.mark.parametrize("m", [1, 128, 5000])
def test_an_invariant_choice_does_not_know_m(m):
    for n in (4096, 65536):
        assert chosen(m, n, invariant=True).config == chosen(1, n, target=GB300, invariant=True).config


def test_explain_prints_them():
    text = bs.explain(8192, 8192, 8192, gpu="b300").splitlines()
    config = bs.config_for(8192, 8192, 8192, gpu="gb300")
    assert text[0] == f"8192 x 8192 x 8192 on b300 (sm_103a): {config}"
    assert text[1].startswith("1. preset: modelled on GEMM3's for 8192 x 8192 x 8192")
    assert config.persist_mb == 48
