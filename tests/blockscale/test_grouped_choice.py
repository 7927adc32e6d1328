"""Which grouped products there are kernels for, and that each of these has a configuration which it supports."""

import random
from dataclasses import replace

import pytest

from blockscale import families, heuristics
from blockscale.config import Config
from blockscale.problem import BIASES, FORMS, GATED, OUT_DTYPES, GroupedProblem, target_named

ACTIVATIONS = (None, "relu", "gelu", "silu", *GATED)
MOST_ROWS = {"b200": 2**22, "b300": 2**22, "h200": 64}  # a group; on Hopper the kernel is asked for few


def problems(gpu, count):
    draw = random.Random(1)
    for _ in range(count):
        groups = draw.choice([1, 2, 3, 8, 60, 127, 128, 129, 256, 512])
        activation = draw.choice(ACTIVATIONS)
        n = draw.choice([1, 2, 7, 8, 40, 128, 256, 257, 384, 512, 4096, 28672])
        yield GroupedProblem(
            m=min(draw.choice([1, 2, 15, 16, 17, 64, 129, 1000, 65536, 2**22]), MOST_ROWS[gpu]),
            n=2 * n if activation in GATED else n,
            k=draw.choice([1, 16, 63, 64, 65, 7168, 22016, 65536]),
            a=draw.choice(["fp16", "bf16"]) if gpu == "h200" else "nvfp4",
            out_dtype=draw.choice(OUT_DTYPES),
            bias=draw.choice(BIASES),
            activation=activation,
            form=draw.choice(FORMS),
            groups=groups,
            alphas=draw.choice([1, groups]),
            biases=draw.choice([1, groups]),
            ends=draw.choice([True, False]),
        )


@pytest.mark.parametrize("gpu", MOST_ROWS)
def test_what_a_kernel_does_has_a_configuration(gpu):
    target, done = target_named(gpu), 0
    for problem in problems(gpu, 300):
        if families.unsupported(problem, target) is None:
            assert families.supports(problem, target, heuristics.choose(problem, target).config) is None
            done += 1
    assert done > 50


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", ["h200", "rtx5090", "gb10"])
def test_where_there_is_no_kernel_for_groups_a_reason_says_so(gpu, form):
    target = target_named(gpu)
    problem = GroupedProblem(m=8, n=64, k=64, a="bf16" if gpu == "h200" else "nvfp4", form=form, groups=4)
    if gpu == "h200" and form != "list":
        assert families.unsupported(problem, target) is None
        return
    expected = f"groups: 4 ({form}), expected none: {target.backend} multiplies such one after another"
    assert str(families.unsupported(problem, target)) == expected
    assert str(families.supports(problem, target, Config())) == expected
    with pytest.raises(heuristics.Unsupported, match="multiplies such one after another"):
        heuristics.choose(problem, target)


@pytest.mark.parametrize(
    ("form", "m", "rows"), [("masked", 2**22 - 2, 2**31), ("contiguous", 2**31 - 1024, 2**31 + 64_000)]
)
def test_rows_of_scales_are_numbers_of_32_bits(form, m, rows):
    """There are more of them than rows: each group's begin with an atom of 128."""
    problem = GroupedProblem(m=m, n=64, k=64, form=form, groups=512)
    reason = str(families.unsupported(problem, target_named("b200")))
    assert reason.startswith(f"a: 512 groups, {m} rows: {rows} rows of scales, at most")


@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "split"),
    [
        (512, 3072, 4096, 2, 2),
        (512, 4096, 1536, 2, 2),
        (512, 3072, 512, 2, 1),
        (1024, 4096, 7168, 8, 1),
        (16, 512, 4096, 60, 1),
    ],
)
def test_two_parts_of_k_where_tiles_are_few(m, n, k, groups, split):
    """For half of the multiprocessors or less, and where k is long; not beside a gate or NVFP4 results."""
    problem, target = GroupedProblem(m, n, k, groups=groups), target_named("b200")
    choice = heuristics.choose(problem, target)
    assert choice.config.split == split
    assert any(reason.startswith("two parts of k" if split == 2 else "k whole") for reason in choice.reasons)
    for beside in ({"activation": "swiglu"}, {"out_dtype": "nvfp4"}):
        assert heuristics.choose(replace(problem, **beside), target).config.split == 1


def test_two_parts_of_k_need_swap_and_no_gate():
    problem, target = GroupedProblem(512, 512, 4096, groups=2), target_named("b200")
    config = Config((128, 64), swap=True, split=2)
    assert families.supports(problem, target, config) is None
    for given, refused in (
        ((problem, replace(config, swap=False)), "config.split: 2, expected 1 beside swap False"),
        ((replace(problem, activation="geglu"), config), "config.split: 2, expected 1 beside swap True and geglu"),
        ((problem, replace(config, read=64)), "config.read: 64, expected 32 beside split 2"),
        ((problem, replace(config, split=4)), "config.split: 4, expected 1 or 2"),
    ):
        asked, tried = given
        assert str(families.supports(asked, target, tried)).startswith(refused)
