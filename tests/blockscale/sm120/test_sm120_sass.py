"""What docs/notes/sm120-sass.md says of the kernels: up to date, without spills, and what share of them multiplies."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from blockscale.families.sm120.constraints import geometry
from blockscale.problem import target_named

ROOT = Path(__file__).parents[3]
REGISTERS = 65536  # of a multiprocessor


def table():
    """{kernel: its numbers}, ours and NVIDIA's."""
    text = (ROOT / "docs/notes/sm120-sass.md").read_text()
    rows = re.findall(r"^\| ((?:blockscale|NVIDIA) .*?) \| (.*) \|$", text, re.MULTILINE)
    return {kernel: [float(number.rstrip("%")) for number in rest.split(" | ")] for kernel, rest in rows}


def share(kernel):
    return table()[kernel][-1]


def test_no_kernel_spills_and_registers_move_where_they_have_to():
    rows = table()
    assert len(rows) > 10
    for kernel, (stages, registers, stack, local, spills, _, moves, loop, mmas, percent) in rows.items():
        assert (stack, local, spills) == (0, 0, 0), kernel
        assert stages >= 1
        assert moves in (0, 2)
        assert percent == pytest.approx(100 * mmas / loop, abs=0.06)
        warps = 12 if moves else 10
        assert 32 * warps * registers <= REGISTERS
        if "128 x 256" in kernel or ("128 x 128" in kernel and "accumulators 2" in kernel):
            assert moves == 2, kernel


def test_a_larger_share_multiplies_than_of_nvidias():
    """Beside kernels of as long stages; NVIDIA's of 256 have room for one."""
    for chunk in (128, 256):
        rest = {128: "", 256: "chunk 256"}[chunk]
        one = "blockscale 128 x 128" + f" ({rest})" * bool(rest)
        two = f"blockscale 128 x 128 (accumulators 2{', ' * bool(rest)}{rest})"
        assert share(one) > share(f"NVIDIA 128 x 128 (cooperative, chunk {chunk})")
        assert share(two) > share(f"NVIDIA 128 x 128 (pingpong, chunk {chunk})")
    assert share("blockscale 128 x 128 (chunk 256)") >= 45
    assert share("blockscale 128 x 128 (accumulators 2, chunk 256)") >= 58


def test_the_documents_table():
    text = (ROOT / "docs/sm120.md").read_text()
    for chunk in (128, 256):
        rest = {128: "", 256: "chunk 256"}[chunk]
        kernels = (
            "blockscale 128 x 128" + f" ({rest})" * bool(rest),
            f"NVIDIA 128 x 128 (cooperative, chunk {chunk})",
            f"blockscale 128 x 128 (accumulators 2{', ' * bool(rest)}{rest})",
            f"NVIDIA 128 x 128 (pingpong, chunk {chunk})",
        )
        cells = re.search(rf"^\| {chunk} \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
        assert [float(cell.split("%")[0]) for cell in cells] == [share(kernel) for kernel in kernels]


def test_the_chips_get_the_same_code():
    rows = table()
    both = [
        (numbers, rows[kernel.removesuffix(", sm_121a")]) for kernel, numbers in rows.items() if "sm_121a" in kernel
    ]
    assert both
    assert all(one == other for one, other in both)


@pytest.mark.skipif(not (shutil.which("nvdisasm") and shutil.which("cuobjdump")), reason="no CUDA disassembler here")
def test_the_record_is_of_this_code(monkeypatch):
    pytest.importorskip("cutlass.operators", reason="nvidia-cutlass-operators is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name in ("sass_table", "sass_table_sm120"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from sass_table_sm120 import CONFIGS, ours

    text = (ROOT / "docs/notes/sm120-sass.md").read_text()
    assert str(ours(CONFIGS[1])) in text
    stages = {kernel: numbers[0] for kernel, numbers in table().items()}
    assert stages["blockscale 128 x 128 (chunk 256)"] == geometry(CONFIGS[1], target_named("sm_120a")).slots
