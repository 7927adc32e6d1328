"""What a launch leaves: findings, counters and a trace."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path

from ptxemu.machine.grid import Grid

__all__ = ["Finding", "Report"]


Span = tuple[str, str, int, int, int]  # process, track, PTX line, turns of beginning and end


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
    spans: list[Span] = field(default_factory=list, repr=False)
    lines: list[str] = field(default_factory=list, repr=False)  # of the PTX

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
        spans = [("warps", *span) for span in grid.waits] + [("asynchronous units", *span) for span in grid.queue.log]
        findings = [Finding(kind, message, warp=warp) for kind, message, warp in grid.findings]
        return cls(program.name, findings, counters, spans, program.lines)

    def trace(self, path: str | Path) -> None:
        """Writes a timeline in the JSON that Perfetto reads.

        A track a warp has its waits, one a kind of asynchronous operation its time in flight.  Times are turns of the
        scheduler, not seconds.
        """
        Path(path).write_text(json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ns"}))

    def _events(self) -> list[dict[str, object]]:
        """The spans as trace events."""
        events: list[dict[str, object]] = []
        for process, track, line, start, end in self.spans:
            text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else track
            events.append(
                {
                    "ph": "X",
                    "name": f"wait: {text}" if process == "warps" else text,
                    "pid": process,
                    "tid": track,
                    "ts": start,
                    "dur": max(end - start, 1),
                    "args": {"line": line},
                }
            )
        return events

    def __str__(self) -> str:
        head = f"{self.kernel}: {self.counters.get('warp_instructions', 0)} warp instructions"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])
