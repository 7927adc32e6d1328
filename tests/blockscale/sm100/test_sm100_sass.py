"""What docs/notes/sm100-sass.md says of the kernels: up to date, without spills, and no worse than NVIDIA's."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from blockscale.kernels.parts.geometry import Geometry

ROOT = Path(__file__).parents[3]


def table():
    """{(whose, n): the row's numbers}"""
    text = (ROOT / "docs/notes/sm100-sass.md").read_text()
    rows = re.findall(r"^\| (\w+) 128 x (\d+) \| (.*) \|$", text, re.MULTILINE)
    return {(who, int(n)): [float(x.replace(",", "")) for x in rest.split(" | ")] for who, n, rest in rows}


@pytest.mark.parametrize("n", [64, 128, 192, 256])
def test_the_record(n):
    ours, theirs = table()["blockscale", n], table()["NVIDIA", n]
    stages, smem, _, stack, local, spills, _, loop = ours
    assert (stages, smem) == (Geometry(n).slots, Geometry(n).smem_bytes)
    assert stages >= theirs[0]
    assert (stack, local, spills) == (0, 0, 0)
    assert loop <= theirs[-1]


@pytest.mark.skipif(not (shutil.which("nvdisasm") and shutil.which("cuobjdump")), reason="no CUDA disassembler here")
def test_the_record_is_of_this_code(monkeypatch):
    pytest.importorskip("cutlass.operators", reason="nvidia-cutlass-operators is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "sass_table", raising=False)
    from sass_table import ours

    text = (ROOT / "docs/notes/sm100-sass.md").read_text()
    assert str(ours(128)) in text
