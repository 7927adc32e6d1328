"""The errors that ptxemu raises.  All derive from `Error`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.report import Report

__all__ = ["Deadlock", "Error", "LaunchError", "MemoryFault", "ParseError", "TurnLimit", "UnknownInstruction"]


class Error(Exception):
    """Base of every ptxemu error.  report: of a launch that had begun, up to where it ended."""

    report: Report | None = None


class ParseError(Error):
    """The text is not PTX that this package reads; names the line."""


class UnknownInstruction(ParseError):
    """An instruction that the table does not hold; names the line, the text and the nearest known form."""


class LaunchError(Error):
    """A launch that cannot be: wrong target, grid, block, cluster, shared memory size or argument."""


class MemoryFault(Error):
    """An access outside every allocation, or one that is misaligned; names the address and the nearest allocation."""


class TurnLimit(Error):
    """A launch took more turns of the scheduler than the device allows; it may never end."""


class Deadlock(Error):
    """No warp can go on and no asynchronous work is left; lists every waiting warp and what it waits for."""
