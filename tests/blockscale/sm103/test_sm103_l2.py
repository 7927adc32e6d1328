"""The model of L2: what it has to say of cases that can be counted by hand, and that the document has what it says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.config import Config
from blockscale.families.sm103.presets import PRESETS
from blockscale.problem import Problem, target_named

ROOT = Path(__file__).parents[3]
B300 = target_named("b300")
PAIRS = Config((256, 256), mma_k=96)
ROW = 768 * 9 // 16  # bytes of a row with k = 768


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import l2_model

        yield l2_model
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("k", [768, 1000, 4096])
@pytest.mark.parametrize("config", [PAIRS, replace(PAIRS, cluster=(4, 2), raster="n", group=2)], ids=str)
def test_with_room_for_everything_each_operand_is_read_once(model, config, k):
    problem = Problem(4096, 3072, k)
    read = model.memory_read(problem, config, B300, B300.l2)
    assert read == pytest.approx(model.operands(problem), rel=1e-3)


def test_without_room_every_request_is_read(model):
    """16 x 16 tiles for one pair: line after line along m, a and b of each."""
    one = replace(B300, sms=2)
    assert model.memory_read(Problem(4096, 4096, 768), PAIRS, one, 0) == 16 * 16 * 512 * ROW
    assert model.memory_read(Problem(4096, 4096, 1536), PAIRS, one, 0) == 16 * 16 * 512 * 2 * ROW


def test_with_room_for_a_tile_of_b_it_stays_for_a_line(model):
    """What is asked for last stays: b's piece of the column, which all tiles of the line share."""
    one, problem = replace(B300, sms=2), Problem(4096, 4096, 768)
    plain = replace(PAIRS, l2_out="evict_first")
    assert model.memory_read(problem, plain, one, 512 * ROW) == (16 * 16 + 16) * 256 * ROW
    assert model.memory_read(problem, replace(plain, raster="n"), one, 512 * ROW) == (16 * 16 + 16) * 256 * ROW


def test_what_is_kept_stays_and_what_is_dropped_does_not(model):
    """A band of 2 x 256 rows of a, in the part that is set aside, while b passes by."""
    one, problem = replace(B300, sms=2, l2=4 * 2**20), Problem(1024, 4096, 768)
    kept = replace(PAIRS, raster="n", group=2, l2_out="evict_first")
    hinted = replace(kept, l2_a="evict_last", persist_mb=1)
    tight = 2**20 + 512 * ROW
    assert model.memory_read(problem, replace(kept, group=1), one, 256 * ROW) > model.operands(problem)
    assert model.memory_read(problem, hinted, replace(one, l2=tight), tight) == (1024 + 2 * 4096) * ROW


def test_multicast_brings_less(model):
    problem = Problem(8192, 8192, 8192)
    pairs, wide = (model.brought(problem, config) for config in (PAIRS, replace(PAIRS, cluster=(8, 2))))
    assert pairs == 32 * 32 * 512 * 8192 * 9 // 16
    assert wide == 8 * 16 * 1536 * 8192 * 9 // 16


@pytest.mark.parametrize("size", [*sorted(PRESETS)[:3], pytest.param(sorted(PRESETS)[3], marks=pytest.mark.prove)])
def test_the_document_has_these_figures(model, size):
    rows = model.table((size,)).splitlines()
    assert set(rows) <= set((ROOT / "docs/sm103.md").read_text().splitlines()), "run: python tools/l2_model.py"
