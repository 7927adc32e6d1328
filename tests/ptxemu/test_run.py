"""`python -m ptxemu run`: a CuTe DSL program on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize("options", [[], ["--schedule", "random", "--seed", "3"]], ids=["default", "random"])
def test_the_example(options: list[str]) -> None:
    command = [sys.executable, "-m", "ptxemu", "run", *options, str(EXAMPLES / "softmax_rows.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "softmax of 6 rows of 1000: largest error" in result.stdout


def test_a_missing_script() -> None:
    command = [sys.executable, "-m", "ptxemu", "run", "no-such-script.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "'no-such-script.py' is not a file" in result.stderr
