"""PTX chapter 'Control Flow Instructions', and trap."""

from __future__ import annotations

from ptxemu.errors import Error
from ptxemu.isa.engine import flow, warp
from ptxemu.machine.warp import Warp


@flow("bra{.uni} target")
def bra() -> str:
    """PTX 'Control Flow Instructions: bra'."""
    return "branch"


@flow("brx.idx{.uni} index, targets")
def brx_idx() -> str:
    """PTX 'Control Flow Instructions: brx.idx'.  To the target that the index picks of a list."""
    return "indexed"


@flow("ret{.uni}")
def ret() -> str:
    """PTX 'Control Flow Instructions: ret'.  Of a kernel: ends the thread."""
    return "exit"


@flow("exit")
def exit_() -> str:
    """PTX 'Control Flow Instructions: exit'."""
    return "exit"


@warp("trap")
@warp("brkpt")
def trap(w: Warp, m: int) -> None:
    """PTX 'Miscellaneous Instructions: trap'.  Ends the launch with an error."""
    raise Error(f"{w.name}: trap")
