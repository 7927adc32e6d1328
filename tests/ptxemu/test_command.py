"""`python -m ptxemu exec` and `isa`; `run` is in test_run.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ptxemu.__main__ import main
from ptxemu.isa.engine import forms

KERNEL = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry scale(.param .u64 out, .param .u32 start, .param .f32 factor)
{
    .reg .b32 r<5>;
    .reg .b64 d<4>;
    .reg .f32 f<3>;
    ld.param.u64 d0, [out];
    ld.param.u32 r1, [start];
    ld.param.f32 f1, [factor];
    mov.u32 r0, %tid.x;
    add.u32 r2, r0, r1;
    cvt.rn.f32.u32 f0, r2;
    mul.f32 f0, f0, f1;
    mul.wide.u32 d1, r0, 4;
    add.u64 d1, d0, d1;
    st.global.f32 [d1], f0;
    ret;
}
"""


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    path = tmp_path / "scale.ptx"
    path.write_text(KERNEL)
    return str(path)


def test_exec(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", kernel, "--block", "4", "--arg", "float32:4", "--arg", "0x3", "--arg", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "[1.5 2.  2.5 3. ]" in shown
    assert "warp_instructions: 1" in shown


def test_exec_with_a_file(kernel: str, tmp_path: Path) -> None:
    array = tmp_path / "x.npy"
    np.save(array, np.zeros((2, 16), np.float32))
    options = ["--kernel", "scale", "--schedule", "random", "--seed", "2", "--sms", "1"]
    assert main(["exec", kernel, *options, "--arg", str(array), "--arg", "0", "--arg", "2.0"]) == 0
    assert np.load(array).reshape(-1).tolist() == [2.0 * i for i in range(32)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arg", "float32:4"], "LaunchError: scale has 3 parameters, args has 1"),
        (["--arg", "float32:4", "--arg", "0", "--arg", "1.0"], "MemoryFault: global address"),
        (["--arg", "nothing:4"], "LaunchError: --arg nothing:4: an argument"),
        (["--arg", "absent.npy"], "LaunchError: --arg absent.npy"),
        (["--kernel", "other"], "LaunchError: kernel='other'"),
    ],
)
def test_errors_of_exec(kernel: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", kernel, *options]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "absent.ptx"]) == 1
    assert capsys.readouterr().err == "LaunchError: absent.ptx: No such file or directory\n"


@pytest.mark.parametrize("shape", ["1,2,3,4", "a", "-1", ""])
def test_a_shape_that_is_none(kernel: str, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["exec", kernel, f"--grid={shape}"])
    assert "one to three numbers" in capsys.readouterr().err


def test_isa(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["isa"]) == 0
    shown = capsys.readouterr().out
    assert all(f"- `{form.syntax}`" in shown for form in forms())


def test_isa_of_one_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["isa", "cp_async"]) == 0
    shown = capsys.readouterr().out
    assert "- `cp.async.commit_group`" in shown
    assert "tcgen05" not in shown
    assert main(["isa", "cooking"]) == 1
    assert "chapters ['cooking']: there are integer" in capsys.readouterr().err


def test_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "ptxemu", "isa", "remote"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "st.async" in result.stdout
