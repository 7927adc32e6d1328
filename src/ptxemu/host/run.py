"""`python -m ptxemu run script.py`: a CuTe DSL program whose kernels run on the emulator."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptxemu.host.errors import HostError
from ptxemu.host.install import installed

if TYPE_CHECKING:
    from ptxemu.device import Device

__all__ = ["run"]


def run(script: str, arguments: list[str], device: Device) -> list[Any]:
    """Runs a script as `__main__` with every CPU torch tensor as device memory; returns a report for each launch.

    Raises:
        HostError: there is no such file; whatever `installed` raises.
        ptxemu.Error: what the kernels raise.
    """
    if not Path(script).is_file():
        raise HostError(f"script {script!r} is not a file")
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        with installed(device) as emulator:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
    return emulator.reports
