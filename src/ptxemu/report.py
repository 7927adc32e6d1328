"""What a launch leaves: findings, counters and a trace."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path

from ptxemu.machine.grid import Grid

__all__ = ["Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """Something wrong that did not stop the launch.

    kind: a short name; message: a sentence; line: of the PTX; warp: who did it; address: where, if it is about memory;
    other: the other party, for what takes two.
    """

    kind: str
    message: str
    line: int = 0
    warp: str = ""
    address: int | None = None
    other: str = ""

    def __str__(self) -> str:
        where = f" at line {self.line}" if self.line else ""
        return f"{self.kind}{where}: {self.message}" + (f" ({self.warp})" if self.warp else "")


@dataclass
class Report:
    """The outcome of `Device.launch`.

    findings: in the order in which they were found.
    counters: "warp_instructions", "asynchronous_operations", "clusters", "ctas", "warps", "seconds" (of this process,
    not of a device), and "instructions": a count by opcode.
    """

    kernel: str
    findings: list[Finding] = field(default_factory=list)
    counters: dict[str, int | float | dict[str, int]] = field(default_factory=dict)
    events: list[dict[str, object]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, grid: Grid, seconds: float) -> Report:
        """The report on a grid that has ended."""
        program = grid.program
        opcodes: collections.Counter[str] = collections.Counter()
        for block in program.blocks:
            times = grid.counts[block.index]
            for opcode in block.opcodes:
                opcodes[opcode] += times
        counters: dict[str, int | float | dict[str, int]] = {
            "warp_instructions": opcodes.total(),
            "asynchronous_operations": grid.queue.completed,
            "clusters": grid.ended,
            "ctas": grid.ended_ctas,
            "warps": grid.ended_warps,
            "seconds": seconds,
            "instructions": {opcode: n for opcode, n in opcodes.most_common() if n},
        }
        return cls(program.name, list(grid.findings), counters, _events(grid))

    def trace(self, path: str | Path) -> None:
        """Writes a timeline in the JSON that Perfetto reads.

        A track a warp has its waits, one a kind of asynchronous operation its time in flight.  Times are turns of the
        scheduler, not seconds.
        """
        Path(path).write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns"}))

    def __str__(self) -> str:
        head = f"{self.kernel}: {self.counters.get('warp_instructions', 0)} warp instructions"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def _events(grid: Grid) -> list[dict[str, object]]:
    """The waits of warps and the asynchronous operations as trace events."""
    program = grid.program
    events: list[dict[str, object]] = []
    for process, spans in (("warps", grid.waits), ("asynchronous units", grid.queue.log)):
        for track, line, start, end in spans:
            text = program.lines[line - 1].strip() if 0 < line <= len(program.lines) else track
            name = f"wait: {text}" if process == "warps" else text
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": process,
                    "tid": track,
                    "ts": start,
                    "dur": max(end - start, 1),
                    "args": {"line": line},
                }
            )
    return events
