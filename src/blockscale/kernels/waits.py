"""Whether a kernel that may start early waits for the grids before it, read off its PTX (PTX: griddepcontrol).

A launch with programmatic stream serialization promises that no thread touches global memory before it has executed
`griddepcontrol.wait`. The compiler does not know of the promise, so what it made is checked: along every path from the
entry to an instruction that reads or writes global memory there has to be a wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

Scope = tuple[int, ...]  # which braces a statement is within, from the outermost inwards

WAIT = "griddepcontrol.wait"
ENDS = ("ret", "exit", "trap")
ANYWHERE = ("ld", "ldu", "st", "atom", "red")  # global memory unless they name another: generic addresses
ELSEWHERE = {"shared", "param", "const", "local"}
NAMED = ("cp", "tensormap", "discard", "applypriority")  # global memory if they name it
ALWAYS = ("multimem", "tex", "tld4", "suld", "sust", "sured", "wmma", "call")  # what is called is not looked into

_IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|^[ \t]*\.(?:loc|file)[ \t][^\n]*', re.DOTALL | re.MULTILINE)
_PART = re.compile(
    r"(?P<space>\s+)|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)|(?P<open>\{)|(?P<close>\})"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)"  # braces within one are those of operands
)
_INSTRUCTION = re.compile(r"(?P<guard>@!?\s*[\w%$]+\s+)?(?P<opcode>[\w.:]*)\s*(?P<operands>.*?)\s*;", re.DOTALL)


class _Statement(NamedTuple):
    line: int
    scope: Scope
    text: str
    guarded: bool
    opcode: str
    operands: str

    @property
    def touches_global(self) -> bool:
        name, *rest = self.opcode.split(".")
        words = {word.split("::")[0] for word in rest}
        if name in ANYWHERE:
            return not words & ELSEWHERE
        return name in ALWAYS or (name in NAMED and "global" in words)


@dataclass(frozen=True)
class _Body:
    """A kernel's statements; a label stands for the index of the one that it precedes, and belongs to its braces."""

    statements: list[_Statement]
    labels: dict[tuple[Scope, str], int]

    def target(self, branch: _Statement) -> int:
        for depth in range(len(branch.scope), 0, -1):
            place = self.labels.get((branch.scope[:depth], branch.operands))
            if place is not None:
                return place
        raise ValueError(f"line {branch.line}: {branch.text}: there is no such label")


def before_the_wait(ptx: str) -> list[str]:
    """The instructions on global memory that a thread can reach without having waited, in the order of the text.

    An instruction that names no state space has a generic address, which may be one of global memory, so it counts. A
    wait under a predicate is none.

    Args:
        ptx: a module of one kernel, or the text of the kernel.

    Raises:
        ValueError: a branch through a table, or to a label that is not there; text that is no PTX.
    """
    body = _parse(ptx)
    reached: set[int] = set()
    pending, early = [0], set()
    while pending:
        at = pending.pop()
        while at < len(body.statements) and at not in reached:
            reached.add(at)
            statement = body.statements[at]
            name = statement.opcode.split(".")[0]
            if name == "brx":
                raise ValueError(f"line {statement.line}: {statement.text}: branches through tables are not followed")
            if statement.touches_global:
                early.add(at)
            if name == "bra":
                pending.append(body.target(statement))
            if not statement.guarded and (statement.opcode == WAIT or name in (*ENDS, "bra")):
                break
            at += 1
    return [body.statements[at].text for at in sorted(early)]


def _parse(ptx: str) -> _Body:
    text = _IGNORED.sub(lambda found: "\n" * found[0].count("\n"), ptx)
    at = text.find("{", max(0, text.find(".entry")))
    if at < 0:
        raise ValueError("there is no kernel in this text")
    body = _Body([], {})
    scope: Scope = ()
    braces = 0
    line = 1 + text.count("\n", 0, at)
    while True:
        found = _PART.match(text, at)
        if found is None:
            raise ValueError(f"line {line}: {text[at : at + 80]!r}: no statement of PTX")
        if found["open"]:
            scope, braces = (*scope, braces), braces + 1
        elif found["close"]:
            scope = scope[:-1]
            if not scope:
                return body
        elif found["label"]:
            body.labels[scope, found["label"]] = len(body.statements)
        elif found["statement"]:
            body.statements.append(_statement(line, scope, found["statement"]))
        line += found[0].count("\n")
        at = found.end()


def _statement(line: int, scope: Scope, text: str) -> _Statement:
    found = _INSTRUCTION.fullmatch(text)
    if found is None:
        raise ValueError(f"line {line}: {text!r}: no statement of PTX")
    return _Statement(line, scope, text, found["guard"] is not None, found["opcode"], found["operands"])
