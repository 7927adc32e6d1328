"""Why mutants survive: rules that are tried in order, and what a survivor that none fits is called.

A rule's kind is "equivalent" (no run of the changed kernel can be told from one of the right kernel), "strict" (the
manual forbids it, published kernels do it: strict checks report it) or "missed" (a fault that the emulator does not
see).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Regular expressions that match the survivor's kernel, operator, instruction and change from their beginning.

    lines: of the text, first and last; None: any.
    """

    kind: str
    why: str
    kernel: str = ""
    operator: str = ""
    before: str = ""
    change: str = ""
    lines: tuple[int, int] | None = None

    def fits(self, kernel: str, survivor: dict[str, Any]) -> bool:
        given = (kernel, survivor["operator"], survivor["before"], survivor["change"])
        patterns = (self.kernel, self.operator, self.before, self.change)
        inside = self.lines is None or self.lines[0] <= survivor["line"] <= self.lines[1]
        return inside and all(re.match(pattern, text) for pattern, text in zip(patterns, given, strict=True))


UNEXPLAINED = Rule("missed", "not explained")
RULES: tuple[Rule, ...] = ()


def explain(kernel: str, survivor: dict[str, Any]) -> Rule:
    """The rule for a survivor of the record."""
    if not survivor["reached"]:
        return Rule("equivalent", "no thread gets there with this problem")
    for rule in RULES:
        if rule.fits(kernel, survivor):
            return rule
    if survivor["strict"]:
        return Rule("strict", f"strict checks: {survivor['strict']}")
    return UNEXPLAINED
