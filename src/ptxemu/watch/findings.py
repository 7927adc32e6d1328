"""Findings: what is wrong with a program though it did not stop the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ptxemu.watch.roles import OTHER, role_of

if TYPE_CHECKING:
    from ptxemu.machine.program import Program
    from ptxemu.machine.warp import Warp

__all__ = ["Finding", "Findings"]


@dataclass(frozen=True)
class Finding:
    """Something wrong that did not stop the launch.

    kind: a short name; message: a sentence.  line: of the PTX, text: what stands there, source: "file:line" where
    `.loc` says it.  warp: who did it, role: what that warp is there for.  address: where, if it is about memory, and
    allocation: what that belongs to.  other: the other party, for what takes two, and other_line: its PTX line.
    count: how often it was found.
    """

    kind: str
    message: str
    line: int = 0
    text: str = ""
    source: str = ""
    warp: str = ""
    role: str = ""
    address: int | None = None
    allocation: str = ""
    other: str = ""
    other_line: int = 0
    count: int = 1

    def __str__(self) -> str:
        head = f"{self.kind} at line {self.line}" if self.line else self.kind
        parts = [f"{head}: {self.message}"]
        if self.text:
            parts.append(f"`{self.text}`" + (f" ({self.source})" if self.source else ""))
        if self.warp:
            parts.append(f"by {self.warp}" + _in_brackets(self.role))
        if self.address is not None:
            parts.append(f"address {self.address:#x}" + (f" in {self.allocation}" if self.allocation else ""))
        if self.other:
            parts.append(f"the other party: {self.other}")
        if self.count > 1:
            parts.append(f"found {self.count} times")
        return "\n    ".join(parts)


class Findings:
    """The findings of one launch, those of one kind at one pair of lines counted as one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[tuple[str, int, int], Finding] = {}

    def add(
        self,
        kind: str,
        message: str,
        *,
        line: int = 0,
        warp: Warp | None = None,
        address: int | None = None,
        allocation: str = "",
        other: str = "",
        other_line: int = 0,
    ) -> None:
        """Adds a finding, or counts one more of the same kind at the same lines."""
        key = (kind, line, other_line)
        if (before := self._found.get(key)) is not None:
            self._found[key] = replace(before, count=before.count + 1)
            return
        text, source = self.place(line)
        name, role = (warp.name, role_of(warp)) if warp is not None else ("", "")
        self._found[key] = Finding(
            kind, message, line, text, source, name, role, address, allocation, other, other_line
        )

    def who(self, warp: Warp) -> str:
        """A warp's name and its role, where that says something."""
        return warp.name + _in_brackets(role_of(warp))

    def place(self, line: int) -> tuple[str, str]:
        """The text of a PTX line, and "file:line" of the source or nothing."""
        lines = self.program.lines
        source = self.program.source_of(line) if line else None
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return text, f"{source[0]}:{source[1]}" if source else ""

    def party(self, line: int, warp: str, role: str, what: str = "") -> str:
        """The words for the other party of a finding."""
        text, source = self.place(line)
        return f"{what} by {warp}{_in_brackets(role)}, line {line}: `{text}`" + (f" ({source})" if source else "")

    def all(self) -> list[Finding]:
        """In the order in which they were found first."""
        return list(self._found.values())


def _in_brackets(role: str) -> str:
    """A role behind a warp's name, where it says something."""
    return "" if role in ("", OTHER) else f" ({role})"
