"""Whether a kernel's clusters can be run apart from each other: nothing in it has them take turns or share a count."""

from __future__ import annotations

import re

from ptxemu.text.module import Function, Instruction

__all__ = ["independent"]

# Atomics and strong accesses other than those of shared memory, launch control and dependent launches, clocks.
_TOGETHER = re.compile(
    r"""(atom|red)(?!\S*\.shared)\.
    | cp\.reduce\.async\.bulk\.(tensor\.\dd\.)?global
    | (ld|st)(?!\S*\.shared)\.\S*\b(acquire|release|relaxed|volatile|mmio)\b
    | (clusterlaunchcontrol|griddepcontrol|multimem)\.
    | [^;]*%(clock|globaltimer)""",
    re.VERBOSE,
)


def independent(function: Function) -> bool:
    """True when no instruction is for clusters to meet in global memory, or tells how far others are."""
    texts = (f"{item.opcode} {item.text}" for item in function.body if isinstance(item, Instruction))
    return not any(_TOGETHER.match(text) for text in texts)
