"""What can go wrong between a compiled CuTe DSL function and the emulator."""

from __future__ import annotations

from ptxemu.errors import Error

__all__ = ["CompilerMissing", "HostError"]


class HostError(Error):
    """A compiled host function that cannot run here: wrong compiler version, unknown import, no PTX, no device."""


class CompilerMissing(HostError):
    """The C stand-in cannot be built: no C compiler, or the compiler refuses."""
