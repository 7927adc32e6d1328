"""PTX text by lines: what a line with one instruction holds, and which lines follow each other whatever happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s*(?:@(!?)([\w$%]+)\s+)?([a-z]\w*(?:(?:\.|::)[\w$]+)*)(?:\s+([^;]*?))?\s*;\s*(?://.*)?")
_LABEL = re.compile(r"\s*([\w$]+):\s*")
_REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyz])?")
# Opcodes whose first operand is written.
_NO_RESULT = re.compile(
    r"(st|red|bra|ret|exit|bar|barrier|fence|membar|prefetch|griddepcontrol|nanosleep|setmaxnreg"
    r"|mbarrier\.(init|inval|expect_tx|complete_tx)|cp|tcgen05\.(?!ld)\w+|clusterlaunchcontrol\.try_cancel)\b"
)


@dataclass(frozen=True)
class Line:
    """One instruction.  number: of the line, from 1.  guard: the predicate, with its `!`; empty without one."""

    number: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_branch(self) -> bool:
        return self.base in ("bra", "brx", "ret", "exit", "call")

    def text(self, *operands: str, opcode: str = "", guard: str | None = None) -> str:
        """The instruction with other operands, another opcode or another guard."""
        guard = self.guard if guard is None else guard
        given = ", ".join(operands or self.operands)
        return f"{f'@{guard} ' if guard else ''}{opcode or self.opcode}{f' {given}' if given else ''};"

    def replaced(self, index: int, operand: str) -> str:
        """The instruction with one operand replaced."""
        return self.text(*self.operands[:index], operand, *self.operands[index + 1 :])

    @property
    def writes(self) -> frozenset[str]:
        if not self.operands or _NO_RESULT.match(self.opcode):
            return frozenset()
        return frozenset(_REGISTER.findall(self.operands[0]))

    @property
    def reads(self) -> frozenset[str]:
        given = self.operands if not self.writes else self.operands[1:]
        return frozenset(_REGISTER.findall(" ".join((*given, self.guard))))


def read(text: str) -> dict[int, Line]:
    """The lines that hold just one instruction, by their numbers."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _INSTRUCTION.fullmatch(line)
        if match and match[3] not in ("reg",):
            guard = f"{match[1]}{match[2]}" if match[2] else ""
            found[number] = Line(number, guard, match[3], split(match[4] or ""))
    return found


def split(operands: str) -> tuple[str, ...]:
    """At the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, mark in enumerate(operands):
        depth += (mark in "[{(") - (mark in "]})")
        if mark == "," and not depth:
            parts.append(operands[start:at].strip())
            start = at + 1
    last = operands[start:].strip()
    return (*parts, last) if last else tuple(parts)


def straight(text: str, lines: dict[int, Line]) -> Iterator[list[Line]]:
    """Runs of instructions that no label and no branch divides."""
    run: list[Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = lines.get(number)
        if line is not None and not line.is_branch:
            run.append(line)
        elif line is not None or _LABEL.match(raw) or raw.strip() in "{}":
            yield run
            run = []
    yield run
