"""The software GPU: launches kernels of PTX text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu import parallel
from ptxemu.arguments import Arguments, aligned, integer
from ptxemu.errors import Error, LaunchError
from ptxemu.isa.generate import generate
from ptxemu.machine.chip import CHIPS, Chip
from ptxemu.machine.dependent import Rest
from ptxemu.machine.grid import Grid, Shape
from ptxemu.machine.memory import SHARED_BASE, GlobalMemory, Region
from ptxemu.machine.program import Program
from ptxemu.machine.queue import SCHEDULES, Queue
from ptxemu.report import Report
from ptxemu.stream import Stream
from ptxemu.text import Module, parse
from ptxemu.text.module import Symbol, Variable
from ptxemu.watch import protocol
from ptxemu.watch.counters import Counters
from ptxemu.watch.findings import Findings
from ptxemu.watch.prerequisite import GridBefore
from ptxemu.watch.watcher import Watcher

__all__ = ["Device", "FindingError"]

CHECKS = ("all", "strict", "none")
MAX_CLUSTER = 16
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_LOCAL_LIMIT = 512 << 10


NO_WAIT = (
    "the kernel may start while the grid before, which issues griddepcontrol.launch_dependents, still runs, and has no "
    "griddepcontrol.wait"
)


class FindingError(LaunchError):
    """Raised after a launch with findings, unless they are collected; `report` has them."""

    report: Report

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class _Loaded:
    """A module on a device: its variables in global memory and its decoded kernels."""

    def __init__(self, module: Module, chip: Chip, memory: GlobalMemory) -> None:
        self.module = module
        self.chip = chip
        self.programs: dict[str, Program] = {}
        self.globals: dict[str, Region] = {}
        for variable in module.variables:
            if variable.external and variable.space != "shared":
                raise LaunchError(f".extern .{variable.space} {variable.name}: nothing defines it")
            if variable.space in ("global", "const") and variable.size:
                data = _zeros(variable)
                if variable.data:
                    data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
                self.globals[variable.name] = memory.register(f"{variable.space} variable {variable.name}", data)
        for variable in module.variables:
            for offset, symbol in variable.relocations:
                self._relocate(self.globals[variable.name], offset, symbol)

    def _relocate(self, region: Region, offset: int, symbol: Symbol) -> None:
        target = self.globals.get(symbol.name)
        if target is None:
            raise LaunchError(f"{region.name}: the address of {symbol.name} is not known")
        region.data[offset : offset + 8] = np.array([target.base + symbol.offset], np.uint64).view(np.uint8)

    def program(self, kernel: str) -> Program:
        if kernel not in self.programs:
            if not self.chip.runs(self.module.target):
                raise LaunchError(f"{kernel} is for {self.module.target}; the device is {self.chip.name}")
            self.programs[kernel] = generate(self.module, kernel, self.chip)
        return self.programs[kernel]


class Device:
    """A software GPU.

    target: a chip of CHIPS, "sm_100a" for instance.  schedule: when asynchronous operations complete: "eager", "lazy"
    (as late as the rules allow), "fifo" or "random".  seed: of all orders that nothing promises; the same seed gives
    the same run.  checks: "all", "strict" or "none".  on_finding: "raise" or "collect".
    sms: CTAs that run at a time; by default the chip's multiprocessors.
    processes: that share a launch's clusters where these do not depend on each other (Linux); result and findings are
    those of one.  With max_turns, which counts the turns of one, a launch stays in one process.
    max_turns: of the scheduler, after which a launch is given up with TurnLimit; None: none.

    Raises LaunchError for any other value.
    """

    def __init__(
        self,
        target: str = "sm_100a",
        *,
        schedule: str = "lazy",
        seed: int = 0,
        checks: str = "all",
        on_finding: str = "raise",
        sms: int | None = None,
        max_turns: int | None = None,
        processes: int = 1,
    ) -> None:
        _one_of("target", target, tuple(CHIPS))
        _one_of("schedule", schedule, SCHEDULES)
        _one_of("checks", checks, CHECKS)
        _one_of("on_finding", on_finding, ("raise", "collect"))
        self.chip = CHIPS[target]
        sms, seed = integer("sms", self.chip.sms if sms is None else sms), integer("seed", seed)
        if sms < 1:
            raise LaunchError(f"sms={sms}: at least 1")
        processes = integer("processes", processes)
        if processes < 1:
            raise LaunchError(f"processes={processes}: at least 1")
        if max_turns is not None and integer("max_turns", max_turns) < 1:
            raise LaunchError(f"max_turns={max_turns}: at least 1, or None")
        self.target = target
        self.schedule = schedule
        self.seed = seed
        self.checks = checks
        self.on_finding = on_finding
        self.sms = sms
        self.max_turns = max_turns
        self.processes = processes
        self.memory = GlobalMemory()
        self._modules: dict[str, _Loaded] = {}
        self._rest: Rest | None = None  # of the last launch, for a dependent one
        self._before: GridBefore | None = None  # what it did to memory

    def register(self, array: NDArray[Any], name: str = "host memory", *, initialised: bool = True) -> Region:
        """Makes a C-contiguous array global memory at its own address, until `memory.unregister`.

        initialised=False: reading what no kernel has written is a finding.
        """
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise LaunchError(f"{name}: {_kind(array)}; allowed is a numpy array of numbers")
        if not array.flags.c_contiguous:
            raise LaunchError(f"{name}: an array of strides {array.strides} is not contiguous")
        return self.memory.register(name, array.reshape(-1).view(np.uint8), initialised=initialised)

    def stream(self) -> Stream:
        """Launches that follow each other, each as early as it may: `with device.stream() as stream: ...`."""
        return Stream(self)

    def launch(
        self,
        ptx: str | Module,
        kernel: str | None = None,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        cluster: Sequence[int] | None = None,
        shared: int = 0,
        args: Sequence[Any] = (),
        pdl: bool = False,
        preferred_cluster: Sequence[int] | None = None,
    ) -> Report:
        """Runs a kernel to its end.

        ptx: the text, or a parsed module.  kernel: its name; None where the module has one.
        grid: in CTAs, block: in threads, cluster: in CTAs, each up to three numbers; preferred_cluster: a larger shape
        that some clusters may get instead.  shared: bytes of dynamic shared memory.
        args: in the order of the parameters: int, float, bytes (the raw parameter), a numpy array (becomes global
        memory, passed as its address, written back), `Uninitialised` of an array, or `TensorMap` (its address may be
        that of an array in `args`).
        pdl: the kernel may start before the one before it has ended, which shows in memory that stays registered.

        Raises ParseError, UnknownInstruction, LaunchError, MemoryFault, Deadlock, TurnLimit.  One that ends a launch
        which had begun has its report up to there, as `report`.
        """
        shared = integer("shared", shared)
        loaded = self._load(ptx)
        program = loaded.program(_kernel(loaded.module, kernel))
        shapes = _Shapes(program, grid, block, cluster, preferred_cluster)
        if shapes.cluster_size > self.sms:
            raise LaunchError(f"cluster={shapes.preferred}: the device has {self.sms} multiprocessors")
        rest, self._rest = (self._rest if pdl else None), None
        before, self._before = (self._before if pdl else None), None
        with Arguments(program, args, self.memory) as arguments:
            running = self._grid(loaded, program, shapes, shared, arguments.region, rest, before)
            report = self._run(running)
        if self.checks == "none":
            report.findings.clear()
        if report.findings and self.on_finding == "raise":
            raise FindingError(report)
        return report

    def _grid(
        self,
        loaded: _Loaded,
        program: Program,
        shapes: _Shapes,
        shared: int,
        parameters: Region,
        rest: Rest | None,
        before: GridBefore | None,
    ) -> Grid:
        """The grid that is to run.  rest, before: of the launch that a dependent one overlaps."""
        shared_bytes = self._shared_bytes(program, shared)
        queue = Queue(self.schedule, self.seed)
        findings = Findings(program)
        if rest is not None and not _has(program, "griddepcontrol.wait"):
            findings.add("no griddepcontrol.wait", NO_WAIT)
        return Grid(
            program,
            self.chip,
            self.memory,
            queue,
            parameters,
            shapes.grid,
            shapes.block,
            shapes.preferred,
            fallback=shapes.cluster,
            explicit_cluster=shapes.explicit,
            shared_bytes=shared_bytes,
            dynamic_bytes=shared,
            sms=self.sms,
            seed=self.seed,
            variables=loaded.globals,
            counters=Counters(program.ptx_line, (parameters.base, parameters.end)),
            findings=findings,
            watch=None if self.checks == "none" else Watcher(findings, self.checks == "strict", before),
            at_exit=None if self.checks == "none" else protocol.cta_ended,
            prerequisite=rest.begin(self.memory, queue) if rest is not None else None,
        )

    def _run(self, grid: Grid) -> Report:
        start = time.perf_counter()
        divide = self.processes > 1 and self.max_turns is None and parallel.possible(grid)
        if divide and parallel.run(grid, self.processes):
            return Report.of(grid, time.perf_counter() - start)
        if self.max_turns is not None:
            grid.scheduler.limit = self.max_turns
        try:
            with np.errstate(all="ignore"):
                grid.run()
        except Error as error:
            grid.interrupted()
            error.report = Report.of(grid, time.perf_counter() - start)
            raise
        self._rest = grid.release.rest()
        if self._rest is not None and grid.watch is not None:
            watch = grid.watch
            self._before = GridBefore(watch.rules, watch.before if watch.released_early else None)
        return Report.of(grid, time.perf_counter() - start)

    def _load(self, ptx: str | Module) -> _Loaded:
        if not isinstance(ptx, str | Module):
            raise LaunchError(f"ptx is {_kind(ptx)}; allowed are str and Module")
        key = ptx if isinstance(ptx, str) else f"module {id(ptx)}"
        loaded = self._modules.get(key)
        if loaded is None:
            loaded = _Loaded(parse(ptx) if isinstance(ptx, str) else ptx, self.chip, self.memory)
            self._modules[key] = loaded
        return loaded

    def _shared_bytes(self, program: Program, dynamic: int) -> int:
        """A CTA's shared memory: static variables first, then, aligned as its declaration asks, the dynamic part."""
        start = SHARED_BASE + program.shared_size
        if dynamic:
            start = -(-start // program.dynamic_align) * program.dynamic_align
        if program.local_size > _LOCAL_LIMIT:
            raise LaunchError(
                f"{program.name} has {program.local_size} local bytes a thread, allowed are {_LOCAL_LIMIT}"
            )
        total, most = start - SHARED_BASE + dynamic, self.chip.shared_bytes
        if dynamic < 0 or total > most:
            raise LaunchError(f"shared={dynamic}: with {program.shared_size} static bytes, allowed are {most}")
        return total


def _has(program: Program, opcode: str) -> bool:
    return any(opcode in block.opcodes for block in program.blocks)


def _zeros(variable: Variable) -> NDArray[np.uint8]:
    try:
        data = aligned(variable.size)
    except MemoryError:
        raise LaunchError(f"{variable.name}: there is no room for its {variable.size} bytes") from None
    data[:] = 0
    return data


def _kind(value: object) -> str:
    dtype = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    return f"a {type(value).__name__}{dtype}"


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise LaunchError(f"{name}={value!r}: one of {', '.join(allowed)}")


def _kernel(module: Module, kernel: str | None) -> str:
    names = list(module.entries)
    if kernel is None and len(names) == 1:
        return names[0]
    if kernel is None or kernel not in names:
        raise LaunchError(f"kernel={kernel!r}: the module has {', '.join(names) or 'none'}")
    return kernel


def _shape(name: str, given: Sequence[int], limits: Sequence[int]) -> Shape:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes):
        raise LaunchError(f"{name}={given!r}: a sequence of up to three numbers, such as (4, 1, 1)")
    values = tuple(integer(f"{name}[{i}]", v) for i, v in enumerate(given)) + (1,) * (3 - len(given))
    if len(values) != 3 or any(not 1 <= v <= limit for v, limit in zip(values, limits, strict=True)):
        raise LaunchError(f"{name}={tuple(given)}: three numbers from 1 to {tuple(limits)}")
    return values[0], values[1], values[2]


class _Shapes:
    """A launch's shapes, checked against each other and against what the kernel declares."""

    def __init__(
        self,
        program: Program,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int] | None,
        preferred: Sequence[int] | None,
    ) -> None:
        declared = program.directives.get(".reqnctapercluster")
        self.explicit = cluster is not None or declared is not None
        self.grid = _shape("grid", grid, _GRID_LIMITS)
        self.block = _shape("block", block, _BLOCK_LIMITS)
        self.cluster = _shape("cluster", cluster or declared or (1, 1, 1), (MAX_CLUSTER,) * 3)
        self.preferred = _shape("preferred_cluster", preferred or self.cluster, (MAX_CLUSTER,) * 3)
        self.cluster_size = math.prod(self.preferred)
        if math.prod(self.block) > 1024:
            raise LaunchError(f"block={self.block}: {math.prod(self.block)} threads, allowed are 1024")
        if math.prod(self.cluster) > MAX_CLUSTER or self.cluster_size > MAX_CLUSTER:
            raise LaunchError(f"cluster={self.cluster}, preferred_cluster={self.preferred}: up to {MAX_CLUSTER} CTAs")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise LaunchError(f"grid={self.grid} is not a multiple of cluster={self.cluster}")
        if (
            any(p % c for p, c in zip(self.preferred, self.cluster, strict=True))
            or self.preferred[2] != self.cluster[2]
        ):
            raise LaunchError(f"preferred_cluster={self.preferred} is no multiple of cluster={self.cluster} with its z")
        if declared and cluster is not None and tuple(declared) + (1,) * (3 - len(declared)) != self.cluster:
            raise LaunchError(f"cluster={self.cluster}: the kernel requires {declared}")
        required, most = program.directives.get(".reqntid"), program.directives.get(".maxntid")
        if required and tuple(required) + (1,) * (3 - len(required)) != self.block:
            raise LaunchError(f"block={self.block}: the kernel requires {required}")
        if most and math.prod(self.block) > math.prod(most):
            raise LaunchError(f"block={self.block}: the kernel allows {math.prod(most)} threads")
