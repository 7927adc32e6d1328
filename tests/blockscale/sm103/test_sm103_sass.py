"""What docs/notes/sm103-sass.md says of the kernels: no spills, and no more instructions and bytes than NVIDIA's."""

import re
from pathlib import Path

import pytest

from blockscale.config import Config
from blockscale.families.sm103.constraints import geometry
from blockscale.families.sm103.presets import PRESETS
from blockscale.problem import target_named

TEXT = (Path(__file__).parents[3] / "docs/notes/sm103-sass.md").read_text()
B300 = target_named("b300")
PAIR = Config((256, 256), mma_k=96, accumulators=2, release="preload")


def table():
    """{(whose, tile, other fields): the row's numbers}"""
    rows = re.findall(r"^\| (\w+) (\d+) x (\d+)(?: \((.*)\))? \| (.*) \|$", TEXT, re.MULTILINE)
    return {
        (who, (int(m), int(n)), fields): [float(x.replace(",", "")) for x in rest.split(" | ")]
        for who, m, n, fields, rest in rows
    }


def fields(config):
    return str(config).removeprefix("tile 256x256, ").replace(", mma_k 96", "")


def test_no_kernel_spills():
    rows = table()
    assert len(rows) > 8
    assert all(numbers[3:6] == [0, 0, 0] for numbers in rows.values())


@pytest.mark.parametrize("config", [PAIR, *(PRESETS[size].config for size in sorted(PRESETS))], ids=str)
def test_no_more_instructions_than_nvidias(config):
    """In the epilogue without alpha's multiplications, which NVIDIA's has not: a half for each column."""
    ours, theirs = table()["blockscale", (256, 256), fields(config)], table()["NVIDIA", (256, 256), ""]
    assert ours[:2] == [geometry(config, B300, "fp16").slots, geometry(config, B300, "fp16").smem_bytes]
    assert ours[0] >= theirs[0]
    assert ours[-2] <= theirs[-2]
    assert ours[-1] - 128 <= theirs[-1]


def test_no_more_bytes_than_nvidias():
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        k, theirs_l2, ours_l2, theirs_shared, ours_shared = (int(x.replace(",", "")) for x in row)
        assert ours_l2 <= theirs_l2
        assert ours_shared <= theirs_shared
        assert ours_l2 == 512 * k * 9 // 16
