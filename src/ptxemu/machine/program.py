"""What a grid runs: a kernel's basic blocks as Python functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ptxemu.text.module import Variable

__all__ = ["Block", "Program"]


@dataclass(eq=False, slots=True)
class Block:
    """A basic block: `run(warp, registers, mask)` carries it out for the lanes of the mask and returns the next block,
    or None when the warp has to look again (it split, waits or ended).

    live: indices of the registers that are read in it or after it before they are written.
    lines: the PTX lines of its instructions.
    """

    index: int
    lines: tuple[int, ...]
    live: tuple[int, ...]
    opcodes: tuple[str, ...]
    run: Callable[..., Block | None] = field(repr=False, default=lambda *_: None)


@dataclass(eq=False, slots=True)
class Program:
    """A kernel, decoded.

    widths: the bits of each register.  parameters: name to (offset, bytes) in the parameter buffer.
    shared_size: bytes of static shared memory, which starts the CTA's; dynamic_align: of the dynamic part after it.
    """

    name: str
    target: str
    blocks: list[Block]
    widths: list[int]
    names: list[str]
    parameters: dict[str, Variable]
    offsets: dict[str, int]
    parameter_size: int
    shared_size: int
    dynamic_align: int
    local_size: int
    directives: dict[str, tuple[int, ...]]
    ptx_line: Callable[[int], int]  # from a line of the generated code
    lines: list[str] = field(repr=False, default_factory=list)
    locations: dict[int, tuple[str, int]] = field(repr=False, default_factory=dict)
    symbols: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def register_count(self) -> int:
        return len(self.widths)

    def describe(self, line: int) -> str:
        """A PTX line for reports: its number, its text and where the source has it."""
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        source = self.locations.get(line)
        return f"line {line}: {text}" + (f" ({source[0]}:{source[1]})" if source else "")
