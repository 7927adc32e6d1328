"""A grid among those before and after it in a stream (PTX: griddepcontrol)."""

from types import SimpleNamespace
from typing import Any

from cutlass import cute


class Memory:
    """What of global memory a kernel reads and writes: a role gets at it by `after_grids_before` alone.

    A kernel that starts early must not, before the grids before it have ended: they may write what it reads, and read
    or write what it writes. Barriers, tensor memory and descriptors, which are the kernel's own, need not wait.
    """

    def __init__(self, early: bool, descriptors: list[Any], **parts: Any) -> None:
        self._early, self.descriptors, self._parts = early, descriptors, parts

    def after_grids_before(self) -> SimpleNamespace:
        """Waits until the grids before have ended, where this one may start early; then the memory is there."""
        if self._early:
            cute.arch.griddepcontrol_wait()
        return SimpleNamespace(**self._parts)

    def let_next_grid_start(self) -> None:
        """A grid after this one may start once all CTAs have said so, or ended; it still waits for what is written."""
        if self._early:
            cute.arch.griddepcontrol_launch_dependents()
