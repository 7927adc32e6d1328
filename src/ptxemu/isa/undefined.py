"""Registers that may be read before they are written: code that tells the warp, for these registers alone.

Which they are is known when a kernel is decoded: what is live where it begins.  Most kernels have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ptxemu.isa.engine import Decoded
from ptxemu.isa.operands import registers_in
from ptxemu.text.module import Immediate, Operand, Register

__all__ = ["Undefined"]


class Undefined:
    """live_in: of the kernel's first block, a bit for each register; numbers: of the registers by name; predicate: the
    text for one."""

    def __init__(self, live_in: int, numbers: Mapping[str, int], predicate: Callable[[Register], str]) -> None:
        self.predicate = predicate
        self.suspects = {name: number for name, number in numbers.items() if live_in >> number & 1}

    def _of(self, operands: Sequence[Operand | None]) -> str:
        """The suspects among operands, as the text of a tuple; empty: none."""
        names = dict.fromkeys(r.name for o in operands for r in registers_in(o) if r.name in self.suspects)
        return "".join(f"{self.suspects[name]}, " for name in names)

    def reads(self, group: Sequence[Decoded]) -> list[str]:
        """Lines to come before instructions."""
        if not self.suspects:
            return []
        lines = []
        for found in group:
            guard = found.instruction.guard
            lines += self.guard(guard)
            updated = found.updated
            if used := self._of([source for source in found.sources if source not in updated]):
                lines.append(f"w.uses(({used}), {self._lanes(guard)})")
            if used := self._of(updated):
                lines.append(f"w.uses(({used}), {self._lanes(guard)} & {self._asked(found)})")
        return lines

    def guard(self, operand: Operand | None) -> list[str]:
        """Lines to come before all lanes look at an operand."""
        used = self._of([operand]) if self.suspects else ""
        return [f"w.uses(({used}), m)"] if used else []

    def writes(self, group: Sequence[Decoded]) -> list[str]:
        """Lines to come after instructions."""
        if not self.suspects:
            return []
        written = [(self._of(found.results), found.instruction.guard) for found in group]
        return [f"w.defines(({registers}), {self._lanes(guard)})" for registers, guard in written if registers]

    def _asked(self, found: Decoded) -> str:
        """The lanes in which it matters what an instruction updates: those of its predicate `p`."""
        asked = dict(zip(found.form.sources, found.sources, strict=True)).get("p")
        if isinstance(asked, Immediate):
            return "m" if asked.value else "0"
        return self.predicate(asked) if isinstance(asked, Register) else "m"

    def _lanes(self, guard: Register | None) -> str:
        """The lanes that a guard lets through."""
        return "m" if guard is None else f"{self.predicate(guard)} & m"
