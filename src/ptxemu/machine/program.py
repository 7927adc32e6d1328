"""What a grid runs: a kernel's basic blocks as Python functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.text.module import Variable

__all__ = ["Block", "Program"]


@dataclass(eq=False, slots=True)
class Block:
    """A basic block: `run(warp, registers, mask)` carries it out for the lanes of the mask and returns the next block,
    or None when the warp has to look again (it split, waits or ended).

    live: indices of the registers that are read in it or after it before they are written.
    lines: the PTX lines of its instructions, opcodes: their short names.
    """

    index: int
    lines: tuple[int, ...]
    live: tuple[int, ...]
    opcodes: tuple[str, ...]
    run: Callable[..., Block | None] = field(repr=False, default=lambda *_: None)


@dataclass(eq=False, slots=True)
class Program:
    """A kernel, decoded.

    widths: the bits of each register.  offsets: of each parameter in the parameter buffer.
    variables: of the module, in global and constant memory.  shared_size: bytes of static shared memory, which starts
    the CTA's; dynamic_align: of the dynamic part after it.  local_size: bytes of local memory a thread.
    independent: whether clusters can run apart from each other.
    generated_lines: the PTX line of each line of the generated code.  lines: the PTX text.
    locations: PTX line to (source file, line), from `.loc`.
    """

    name: str
    target: str
    filename: str  # of the generated code, in tracebacks
    blocks: list[Block]
    widths: list[int]
    parameters: list[Variable]
    offsets: dict[str, int]
    parameter_size: int
    variables: list[Variable]
    shared_size: int
    dynamic_align: int
    local_size: int
    directives: dict[str, tuple[int, ...]]
    independent: bool
    generated_lines: list[int] = field(repr=False)
    lines: list[str] = field(repr=False)
    locations: dict[int, tuple[str, int]] = field(repr=False)
    _places: dict[tuple[int, int], int] = field(repr=False, default_factory=dict)  # PTX lines by code and instruction

    @property
    def register_count(self) -> int:
        return len(self.widths)

    def ptx_line(self, frame: FrameType | None) -> int:
        """The PTX line that a frame of the generated code, or the nearest such caller of the frame, is at; 0: none."""
        filename, places = self.filename, self._places
        while frame is not None:
            code = frame.f_code
            if code.co_filename == filename:
                place = id(code), frame.f_lasti
                line = places.get(place)
                if line is None:  # looking up f_lineno takes long in a long block
                    line = places[place] = self.generated_lines[frame.f_lineno - 1]
                return line
            frame = frame.f_back
        return 0

    def source_of(self, line: int) -> tuple[str, int] | None:
        """Where the source has a PTX line: what the last `.loc` before it says."""
        before = [at for at in self.locations if at <= line]
        return self.locations[max(before)] if before else None

    def describe(self, line: int) -> str:
        """A PTX line for reports: its number, its text and where the source has it."""
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        source = self.source_of(line)
        return f"line {line}: {text}" + (f" ({source[0]}:{source[1]})" if source else "")
