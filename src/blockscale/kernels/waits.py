"""Whether a kernel that may start early waits for the grids before it, read off its PTX (PTX: griddepcontrol).

A launch with programmatic stream serialization promises that no thread touches global memory before it has executed
`griddepcontrol.wait`. The compiler does not know of the promise, so what it made is checked: along every path from the
entry to an instruction that reads or writes global memory there has to be a wait.
"""

from __future__ import annotations

import re

WAIT = "griddepcontrol.wait"
_GLOBAL = re.compile(r"^(@!?%?\w+\s+)?(ld|st|atom|red|multimem|cp)\b\S*\.global\b")
_BRANCH = re.compile(r"^(@!?%?\w+\s+)?bra(?:\.uni)?\s+(\$\w+)")
_END = re.compile(r"^(ret|exit|trap)\b")
_LABEL = re.compile(r"^(\$\w+):")


def before_the_wait(ptx: str) -> list[str]:
    """The instructions on global memory that a thread can reach without having waited, in the order of the text.

    Args:
        ptx: of one kernel, with labels and branches as NVVM writes them. Labels within inline assembly do not count:
            such a block is taken to be passed through.

    Raises:
        ValueError: a branch through a table, or to a label that is not there.
    """
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    start = next(i for i, line in enumerate(lines) if line == "{")
    places = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    reached: set[int] = set()
    pending, early = [start], set()
    while pending:
        at = pending.pop()
        while at < len(lines) and at not in reached:
            reached.add(at)
            line = lines[at]
            if line.startswith("brx.idx"):
                raise ValueError(f"line {at + 1}: {line}: branches through tables are not followed")
            if WAIT in line or _END.match(line):
                break
            if _GLOBAL.match(line):
                early.add(at)
            branch = _BRANCH.match(line)
            if branch:
                if branch[2] not in places:
                    raise ValueError(f"line {at + 1}: {line}: there is no such label")
                pending.append(places[branch[2]])
                if branch[1] is None:
                    break
            at += 1
    return [lines[at] for at in sorted(early)]
