"""The choice of a configuration: supported for every shape, with reasons, and as the rules say."""

import random
from dataclasses import replace

import pytest

import blockscale as bs
from blockscale import heuristics
from blockscale.config import Config
from blockscale.families import LARGEST_EXTENT, supports
from blockscale.families.sm100.constraints import MOST_TILES
from blockscale.problem import ACTIVATIONS, BIASES, OUT_DTYPES, Problem, target_named

B200 = target_named("b200")


def chosen(m, n, k=512, **options):
    return heuristics.choose(Problem(m, n, k, **options), B200)


def anything(draw):
    """A problem with sizes of every order of magnitude."""
    size = [int(2 ** draw.uniform(0, 16)) for _ in range(3)]
    batch = draw.choice((1, 1, 3, 1000))
    rest = draw.choice(OUT_DTYPES), draw.choice(BIASES), draw.choice(ACTIVATIONS), draw.random() < 0.2
    return Problem(*size, batch, batch, 1, "nvfp4", "nvfp4", *rest)


def test_a_choice_is_supported_and_has_its_reasons():
    draw = random.Random(0)
    for _ in range(1500):
        problem = anything(draw)
        choice = heuristics.choose(problem, B200)
        assert supports(problem, B200, choice.config) is None, (problem, choice)
        assert len(choice.reasons) == 7 + problem.invariant
        assert all(reason for reason in choice.reasons)


@pytest.mark.parametrize("m", [1, 7, 8, 9, 127, 128, 129, 255, 257, LARGEST_EXTENT])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 33, 255, 256, 257, LARGEST_EXTENT])
def test_edges_of_tiles_and_of_what_there_is(m, n):
    for k in (1, LARGEST_EXTENT):
        problem = Problem(m, n, k)
        if m == n == LARGEST_EXTENT:
            with pytest.raises(heuristics.Unsupported, match=f"at most {MOST_TILES}"):
                heuristics.choose(problem, B200)
        else:
            assert supports(problem, B200, heuristics.choose(problem, B200).config) is None


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (8192, 8192, 8192, {"tile": (256, 256), "accumulators": 2, "schedule": "clc", "store": "tma", "group": 1}),
        (16384, 16384, 16384, {"tile": (256, 256), "schedule": "clc", "raster": "m", "group": 9}),
        (4096, 4096, 4096, {"tile": (256, 256), "accumulators": 2, "schedule": "static", "swap": False}),
        (4096, 4096, 16384, {"schedule": "clc"}),
        (2048, 2048, 2048, {"tile": (256, 256), "accumulators": 1, "schedule": "static"}),
        (128, 4096, 7168, {"tile": (128, 64), "swap": False, "schedule": "static"}),
        (1, 8192, 8192, {"tile": (128, 8), "swap": True, "store": "direct"}),
        (20, 512, 512, {"tile": (256, 32), "swap": True}),
        (384, 96, 512, {"tile": (128, 64), "swap": False}),
    ],
)
def test_the_rules(m, n, k, expected):
    config = chosen(m, n, k).config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.pdl


def test_swapping_is_worth_what_it_saves():
    assert not chosen(128, 4096).config.swap  # 128 rows waste nothing
    assert chosen(100, 4096).config.swap
    assert not chosen(129, 4096).config.swap  # beyond what was published
    assert not chosen(8, 8).config.swap  # nothing to save
    assert not chosen(16, 4096, out_dtype="nvfp4").config.swap
    assert "m = 100 as columns makes 425,984 sums" in chosen(100, 4096).reasons[0]


def test_a_pair_is_not_taken_where_a_third_of_its_rows_is_none():
    assert chosen(300, 65536).config.tile[0] == 128
    assert chosen(512, 65536).config.tile[0] == 256


def test_bands_hold_what_l2_has():
    """Narrower bands where L2 is smaller, down to none, and then lines again."""
    huge = Problem(2**17, 2**17, 2**15)
    assert heuristics.choose(huge, B200).config.group == 9
    assert heuristics.choose(huge, replace(B200, l2=78 * 2**20)).config.group == 1
    deep = heuristics.choose(replace(huge, k=2**18), B200)
    assert deep.config.group == 1
    assert "no band fits L2" in deep.reasons[5]


def test_results_leave_by_tma_where_that_costs_no_stage():
    assert chosen(8192, 8192).config.store == "tma"
    assert chosen(8192, 8191).config.store == "direct"  # rows of no multiple of 16 bytes
    assert "7 stages of 8" in chosen(128, 4096).reasons[3]


@pytest.mark.parametrize("m", [1, 128, 5000])
def test_an_invariant_choice_does_not_know_m(m):
    assert chosen(m, 4096, invariant=True).config == chosen(1, 4096, invariant=True).config


@pytest.mark.parametrize("change", [{"batch": 8, "batch_a": 8}, {"m": 4096}])
@pytest.mark.parametrize("sms", [8, 132, 148])
def test_an_invariant_choice_knows_n_k_and_dtypes_alone(change, sms):
    asked = Problem(128, 4096, 512, invariant=True)
    choice = heuristics.choose(replace(asked, **change), replace(B200, sms=sms))
    assert choice.config == heuristics.choose(asked, B200).config
    assert choice.reasons[0].startswith("invariant: ")


def test_what_is_too_large_is_named():
    largest = LARGEST_EXTENT
    with pytest.raises(heuristics.Unsupported, match=rf"config\.tile: .* tiles of 256x256, at most {MOST_TILES}"):
        heuristics.choose(Problem(largest, largest, 64), B200)
    assert supports(Problem(largest, 1, 64), B200, Config()) is None


def test_explain_prints_them():
    text = bs.explain(512, 4096, 7168, gpu="sm_100a").splitlines()
    assert text[0] == f"512 x 4096 x 7168 on b200 (sm_100a): {bs.config_for(512, 4096, 7168, gpu='b200')}"
    assert [line[:2] for line in text[1:]] == [f"{i}." for i in range(1, 8)]
    assert "(published)" in text[1]
    assert "derived)" in text[2]
