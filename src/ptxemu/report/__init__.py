"""What a launch leaves: findings, counters and a trace."""

from __future__ import annotations

import collections
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ptxemu.machine.grid import Grid
from ptxemu.machine.program import Program
from ptxemu.machine.span import Span
from ptxemu.report import summary, trace
from ptxemu.watch.counters import Traffic
from ptxemu.watch.findings import Finding
from ptxemu.watch.roles import executed, role

__all__ = ["Finding", "Report"]


@dataclass
class Report:
    """The outcome of `Device.launch`.

    findings: in the order in which they were found.
    traffic: what each instruction asked of shared and global memory, with bank conflicts and wasted sectors, by line.
    counters: "warp_instructions", "asynchronous_operations", "clusters", "ctas", "warps", "seconds" (of this process,
    not of a device); "instructions": a count by opcode, "instructions_by_warp": the same by the warp's index in its
    CTA and its role; instructions count once a warp that issues them, also where their guard keeps every lane out.
    "bytes": moved, by path; "mma": by kind and shape; "shared" and "global": sums of `traffic`.
    """

    kernel: str
    findings: list[Finding] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    traffic: list[Traffic] = field(default_factory=list, repr=False)
    program: Program | None = field(default=None, repr=False)
    roles: dict[int, str] = field(default_factory=dict, repr=False)  # by the index of a warp in its CTA
    lives: list[Span] = field(default_factory=list, repr=False)  # of warps
    waits: list[Span] = field(default_factory=list, repr=False)
    operations: list[Span] = field(default_factory=list, repr=False)  # asynchronous ones

    @classmethod
    def of(cls, grid: Grid, seconds: float) -> Report:
        """The report on a grid that has ended."""
        program = grid.program
        roles = {warp: role(executed(program, counts)) for warp, counts in sorted(grid.counts.items())}
        by_warp = {f"warp {warp}: {roles[warp]}": _by_opcode(program, grid.counts[warp]) for warp in roles}
        opcodes = sum(by_warp.values(), collections.Counter[str]())
        traffic = grid.counters.traffic()
        counters = {
            "warp_instructions": opcodes.total(),
            "asynchronous_operations": grid.queue.completed,
            "clusters": grid.ended,
            "ctas": grid.ended_ctas,
            "warps": grid.ended_warps,
            "seconds": seconds,
            "instructions": dict(opcodes.most_common()),
            "instructions_by_warp": {name: dict(counts.most_common()) for name, counts in by_warp.items()},
            "bytes": dict(grid.counters.moved),
            "mma": dict(grid.counters.mmas),
            "shared": _sums("wavefronts", [t for t in traffic if t.space == "shared"]),
            "global": _sums("sectors", [t for t in traffic if t.space == "global"]),
        }
        spans = grid.lives, grid.waits, grid.queue.log
        return cls(program.name, grid.findings.all(), counters, traffic, program, roles, *spans)

    def describe(self, line: int) -> dict[str, Any]:
        """A PTX line: its number ("line"), its text ("ptx") and, where `.loc` says it, "source"."""
        if self.program is None or not 0 < line <= len(self.program.lines):
            return {"line": line, "ptx": ""}
        source = self.program.source_of(line)
        found = {"line": line, "ptx": self.program.lines[line - 1].strip()}
        return found | ({"source": f"{source[0]}:{source[1]}"} if source else {})

    def trace(self, path: str | Path) -> None:
        """Writes a timeline in the JSON that Perfetto (ui.perfetto.dev) reads: see `report.trace`."""
        found = trace.events(self.lives, self.waits, self.operations, self.describe, self.roles)
        Path(path).write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ns"}))

    def json(self) -> str:
        """Findings, counters and the traffic of each instruction as JSON."""
        traffic = [self.describe(t.line) | dataclasses.asdict(t) for t in self.traffic]
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        found = {"kernel": self.kernel, "findings": findings, "counters": self.counters, "traffic": traffic}
        return json.dumps(found, indent=1, default=int)

    def summary(self, file: IO[str] | None = None) -> None:
        """Prints findings and counters, with colours and tables where `rich` is installed; `file`: standard output."""
        summary.show(self, file)

    def __str__(self) -> str:
        head = f"{self.kernel}: {self.counters.get('warp_instructions', 0)} warp instructions"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def _by_opcode(program: Program, counts: list[int]) -> collections.Counter[str]:
    opcodes: collections.Counter[str] = collections.Counter()
    for block, times in zip(program.blocks, counts, strict=True):
        for opcode in block.opcodes if times else ():
            opcodes[opcode] += times
    return opcodes


def _sums(units: str, traffic: list[Traffic]) -> dict[str, int]:
    """Over all instructions that use one memory."""
    names = {"accesses": "accesses", "bytes": "nbytes", units: "units", f"ideal_{units}": "ideal"}
    return {name: sum(getattr(t, field) for t in traffic) for name, field in names.items()}
