"""What docs/notes/sm100-sass.md says of the kernels: up to date, without spills, and no worse than NVIDIA's."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from blockscale.kernels.parts.geometry import Geometry

ROOT = Path(__file__).parents[3]


TILES = [(rows, n) for rows in (128, 256) for n in (64, 128, 192, 256)]


def table():
    """{(whose, tile, other fields): the row's numbers}"""
    text = (ROOT / "docs/notes/sm100-sass.md").read_text()
    rows = re.findall(r"^\| (\w+) (\d+) x (\d+)(?: \((.*)\))? \| (.*) \|$", text, re.MULTILINE)
    return {
        (who, (int(m), int(n)), fields): [float(x.replace(",", "")) for x in rest.split(" | ")]
        for who, m, n, fields, rest in rows
    }


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_record(tile):
    ours, theirs = table()["blockscale", tile, ""], table()["NVIDIA", tile, ""]
    assert ours[:2] == [Geometry(tile).slots, Geometry(tile).smem_bytes]
    assert ours[0] >= theirs[0]
    assert ours[-2] <= theirs[-2]


def test_no_configuration_spills_or_needs_more_than_nvidias():
    rows = table()
    assert len(rows) > 2 * len(TILES)
    for (who, tile, _), (stages, _, _, stack, local, spills, _, loop, _) in rows.items():
        theirs = rows["NVIDIA", tile, ""]
        assert (stack, local, spills) == (0, 0, 0)
        assert who == "NVIDIA" or (stages >= theirs[0] and loop <= theirs[-2])


def test_the_epilogue_of_a_pair_needs_no_more_than_nvidias_but_for_alpha():
    """NVIDIA's is of the static schedule."""
    rows = table()
    for (_, tile, fields), numbers in rows.items():
        if tile == (256, 256) and "clc" not in fields:
            assert numbers[-1] - tile[1] // 2 <= rows["NVIDIA", tile, ""][-1]


@pytest.mark.skipif(not (shutil.which("nvdisasm") and shutil.which("cuobjdump")), reason="no CUDA disassembler here")
def test_the_record_is_of_this_code(monkeypatch):
    pytest.importorskip("cutlass.operators", reason="nvidia-cutlass-operators is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "sass_table", raising=False)
    from sass_table import ours

    from blockscale.config import Config

    text = (ROOT / "docs/notes/sm100-sass.md").read_text()
    assert str(ours(Config((256, 128)))) in text
