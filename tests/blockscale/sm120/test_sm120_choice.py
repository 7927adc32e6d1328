"""The choice for RTX PRO 6000, RTX 50 and DGX Spark: supported for every shape on each of them, with its reasons."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import blockscale as bs
from blockscale import heuristics
from blockscale.cli.app import app
from blockscale.config import Config
from blockscale.families import LARGEST_EXTENT, supports
from blockscale.families.sm120.choice import DRAM, TOLERANCE, _Kernel
from blockscale.families.sm120.constraints import MOST_TILES
from blockscale.problem import ACTIVATIONS, BIASES, OUT_DTYPES, TARGETS, Problem

GPUS = [target for target in TARGETS if target.backend == "sm120"]
RTXPRO, RTX5090, RTX5080, GB10 = GPUS
REASONS = 8
UNMARKED = ("operands as they are: nothing may depend on m",)
each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


def chosen(m, n, k=512, gpu=RTXPRO, **options):
    return heuristics.choose(Problem(m, n, k, **options), gpu)


def anything(draw):
    """A problem with sizes of every order of magnitude."""
    size = [int(2 ** draw.uniform(0, 16)) for _ in range(3)]
    batch = draw.choice((1, 1, 3, 1000))
    rest = draw.choice(OUT_DTYPES), draw.choice(BIASES), draw.choice(ACTIVATIONS), draw.random() < 0.2
    return Problem(*size, batch, batch, 1, "nvfp4", "nvfp4", *rest)


def served(draw):
    """A product as a server of language models has them: tokens by a layer's weight."""
    n, k = draw.choice(((4096, 4096), (14336, 4096), (4096, 14336), (7168, 2048), (512, 7168), (24576, 1536)))
    return Problem(
        draw.choice((1, 2, 8, 16, 17, 64, 65, 200, 512, 2048, 8192)), n, k, out_dtype=draw.choice(OUT_DTYPES)
    )


@each_gpu
@pytest.mark.parametrize("kind", [anything, served])
def test_a_choice_is_supported_and_has_its_reasons(kind, gpu):
    draw = random.Random(GPUS.index(gpu))
    for _ in range(60):
        problem = kind(draw)
        choice = heuristics.choose(problem, gpu)
        assert supports(problem, gpu, choice.config) is None, (problem, choice)
        assert len(choice.reasons) == REASONS + problem.invariant
        for reason in choice.reasons[problem.invariant :]:
            assert re.search(r"\b(derived|published)\)$", reason) or reason in UNMARKED


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 64, 65, 128, 129, LARGEST_EXTENT])
@pytest.mark.parametrize("n", [1, 15, 33, 256, 257, LARGEST_EXTENT])
def test_edges_of_tiles_and_of_what_there_is(m, n):
    for k in (1, LARGEST_EXTENT):
        problem = Problem(m, n, k)
        if m == n == LARGEST_EXTENT:
            with pytest.raises(heuristics.Unsupported, match=f"at most {MOST_TILES}"):
                heuristics.choose(problem, RTX5080)
        else:
            assert supports(problem, RTX5080, heuristics.choose(problem, RTX5080).config) is None


@pytest.mark.parametrize(
    ("gpu", "m", "n", "k", "expected"),
    [
        (RTXPRO, 2048, 2048, 2048, {"tile": (64, 128), "accumulators": 2, "schedule": "static"}),
        (GB10, 2048, 2048, 2048, {"tile": (128, 256), "accumulators": 1}),
        (RTX5090, 4096, 4096, 4096, {"tile": (64, 128), "accumulators": 2, "schedule": "clc", "group": 1}),
        (RTXPRO, 16384, 16384, 16384, {"tile": (128, 256), "schedule": "clc", "raster": "m", "group": 10}),
        (GB10, 16384, 16384, 16384, {"tile": (128, 256), "schedule": "clc", "group": 5}),
        (RTX5080, 1, 8192, 8192, {"tile": (256, 8), "swap": True, "schedule": "static", "chunk": 256}),
        (RTX5090, 16, 512, 16384, {"tile": (128, 16), "swap": True, "split": 8}),
        (RTXPRO, 512, 4096, 7168, {"tile": (64, 128), "split": 2, "schedule": "static", "accumulators": 1}),
        (RTX5090, 64, 4096, 7168, {"tile": (64, 64), "swap": True}),
        (RTX5090, 65, 4096, 7168, {"swap": False}),
        (RTX5090, 16, 8, 4096, {"swap": False}),
    ],
)
def test_the_rules(gpu, m, n, k, expected):
    config = chosen(m, n, k, gpu).config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.pdl


def test_the_second_wave_of_2048_is_not_left_idle():
    """Tiles of 128 x 128 are 256, for 188 multiprocessors: a second wave of which two thirds have nothing to do."""
    reason = chosen(2048, 2048, 2048).reasons[1]
    cycles = {tile: int(count.replace(",", "")) for tile, count in re.findall(r"(\d+x\d+) ([\d,]+)[,;] ", reason)}
    assert cycles["64x128"] < 0.8 * cycles["128x128"]
    assert "512 for 188 CTAs are 3 waves" in reason


@each_gpu
def test_of_tiles_with_about_as_few_cycles_the_one_that_loads_the_least(gpu):
    for size in (1024, 3000, 8192):
        choice = chosen(size, size, size, gpu)
        cycles = [int(x.replace(",", "")) for x in re.findall(r"\d+x\d+ ([\d,]+)[,;] ", choice.reasons[1])]
        assert int(re.search(r"; ([\d,]+) cycles", choice.reasons[1])[1].replace(",", "")) <= min(cycles) * (
            1 + TOLERANCE
        )


@each_gpu
@pytest.mark.parametrize("m", range(1, 17))
def test_few_rows_are_columns_and_load_little_but_the_weights(m, gpu):
    """Each weight once, and the rows again with every tile of weights: together within 5 % of the operands."""
    problem = Problem(m, 4096, 4096)
    config = heuristics.choose(problem, gpu).config
    assert config.swap
    assert config.tile[1] == (8 if m <= 8 else 16)
    view = _Kernel(problem, gpu, config)
    assert view.loaded <= 1.05 * view.operands
    assert view.busiest <= view.cycles * (1 + TOLERANCE)  # DRAM is what takes the time


@pytest.mark.parametrize("sms", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 1100), (8, 6, 2391), (621, 9, 3764)])
def test_clusters_fit_the_multiprocessors_that_there_are(m, n, k, sms):
    """Of few tiles k is split, but never among more CTAs than run at once."""
    problem, gpu = Problem(m, n, k), replace(RTXPRO, sms=sms)
    config = heuristics.choose(problem, gpu).config
    assert config.split <= sms
    for split in (1, 2, 4, 8):
        reason = supports(problem, gpu, Config(config.tile, swap=config.swap, split=split))
        assert (reason is None) == (split <= sms)
        assert reason is None or reason.argument == "config.split"


@pytest.mark.parametrize("split", [1, 2, 8])
def test_ctas_of_all_tiles_have_32_bit_numbers(split):
    config, most = Config((64, 8), split=split), MOST_TILES // split
    assert supports(Problem(1, 1, 4096, most, 1, 1), RTX5080, config) is None
    reason = supports(Problem(65, 1, 4096, most // 2 + 1, 1, 1), RTX5080, config)
    assert reason is not None
    assert f"at most {most}" in reason.message


@each_gpu
@pytest.mark.parametrize("m", [1, 16, 64, 65])
@pytest.mark.parametrize("n", [1, 48, 4096])
def test_nvfp4_results_have_tiles_of_whole_blocks_and_atoms(m, n, gpu):
    choice = chosen(m, n, 4096, gpu, out_dtype="nvfp4")
    assert not choice.config.swap
    assert choice.config.tile[0] == 128
    assert choice.config.tile[1] >= 64
    if n >= m and m <= 64:
        assert "no kernel does it with them exchanged" in choice.reasons[0]


@each_gpu
def test_bands_hold_what_l2_has(gpu):
    huge = Problem(2**15, 2**15, 2**14)
    assert heuristics.choose(huge, gpu).config.group > 1
    deep = heuristics.choose(replace(huge, k=2**18), gpu)
    assert deep.config.group == 1
    assert "no band fits L2" in deep.reasons[6]


@pytest.mark.parametrize("k", [256, 384, 512, 4096])
def test_long_stages_where_k_is_not_padded_by_much(k):
    config = chosen(256, 256, k).config
    assert (config.chunk == 256) == (k != 384)


@each_gpu
@pytest.mark.parametrize("change", [{"batch": 8, "batch_a": 8}, {"m": 4096}])
@pytest.mark.parametrize("part", [{"sms": 8}, {"sms": 48, "l2": 2**24}, {"sms": 188}])
def test_an_invariant_choice_knows_n_k_and_dtypes_alone(change, part, gpu):
    asked = Problem(128, 4096, 512, invariant=True)
    choice = heuristics.choose(replace(asked, **change), replace(gpu, **part))
    assert choice.config == heuristics.choose(asked, gpu).config
    assert choice.reasons[0].startswith("invariant: ")


def test_every_gpu_has_its_dram():
    assert set(DRAM) == {gpu.name for gpu in GPUS}
    assert [gpu.sms for gpu in GPUS] == [188, 170, 84, 48]


@each_gpu
def test_explain_prints_them(gpu):
    text = CliRunner().invoke(app, ["explain", "512", "4096", "7168", "--gpu", gpu.name])
    assert text.exit_code == 0
    lines = text.stdout.splitlines()
    assert lines[0].startswith(f"512 x 4096 x 7168 on {gpu.name} ({gpu.arch}): tile ")
    assert [line[:2] for line in lines[1:]] == [f"{i}." for i in range(1, REASONS + 1)]
    document = json.loads(
        CliRunner().invoke(app, ["explain", "512", "4096", "7168", "--gpu", gpu.name, "--json"]).stdout
    )
    assert (document["gpu"], document["sms"]) == (gpu.name, gpu.sms)
    assert bs.explain(512, 4096, 7168, gpu=gpu.name) == text.stdout.strip()


def test_the_documents_example():
    text = (Path(__file__).parents[3] / "docs/sm120.md").read_text()
    shown = re.search(
        r"^\$ blockscale explain (\d+) (\d+) (\d+) --gpu (\w+)\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL
    )
    assert bs.explain(*map(int, shown.groups()[:3]), gpu=shown[4]) == shown[5]
