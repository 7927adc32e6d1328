"""A stream: launches that depend on each other and start as early as they may (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.errors import MemoryFault
from ptxemu.machine.memory import Region

if TYPE_CHECKING:
    from ptxemu.device import Device
    from ptxemu.report import Report
    from ptxemu.text import Module

__all__ = ["Stream"]


class Stream:
    """Launches of one device, to be used in a `with` block.

    A launch starts once every CTA of the one before has issued griddepcontrol.launch_dependents or ended, and finds
    memory as it was then; what the grid before writes later comes when the schedule pleases, at griddepcontrol.wait at
    the latest.  Arrays among the arguments stay in global memory, at their own address, until the block ends.

    reports: of each launch, in order.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reports: list[Report] = []
        self._regions: list[Region] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for region in self._regions:
            self.device.memory.unregister(region)
        self._regions = []

    def launch(
        self, ptx: str | Module, kernel: str | None = None, *, args: Sequence[Any] = (), pdl: bool = True, **shapes: Any
    ) -> Report:
        """Launches as `Device.launch` does, with its other arguments as `shapes`.

        pdl: False for a launch that comes after the one before is complete; the first one always does.

        Raises what `Device.launch` and `Device.register` raise: arrays have to be contiguous.
        """
        for number, arg in enumerate(args):
            if isinstance(arg, np.ndarray) and arg.size and not self._known(arg):
                self._regions.append(self.device.register(arg, f"argument {number}, {arg.dtype} {arg.shape}"))
        report = self.device.launch(ptx, kernel, args=args, pdl=pdl and bool(self.reports), **shapes)
        self.reports.append(report)
        return report

    def _known(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether its memory is global memory already."""
        start = array.ctypes.data
        try:
            self.device.memory.find(start, start + array.nbytes)
        except MemoryFault:
            return False
        return True
