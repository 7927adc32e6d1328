"""A grid: its clusters, started in a seeded order as far as the multiprocessors go, and how it ends."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from ptxemu.errors import Deadlock, Error
from ptxemu.machine.cluster import Cluster
from ptxemu.machine.dependent import Release
from ptxemu.machine.mbarrier import Mbarrier
from ptxemu.machine.queue import Operation, Queue
from ptxemu.machine.scheduler import Scheduler

if TYPE_CHECKING:
    from ptxemu.machine.chip import Chip
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.memory import GlobalMemory, Region
    from ptxemu.machine.program import Program
    from ptxemu.machine.span import Span
    from ptxemu.machine.warp import Group, Warp
    from ptxemu.watch.counters import Counters
    from ptxemu.watch.findings import Findings
    from ptxemu.watch.footprint import Footprint
    from ptxemu.watch.watcher import Watcher

__all__ = ["Grid", "Shape"]

Shape = tuple[int, int, int]


class Grid:
    """One launch.

    shape: in CTAs; block: in threads; cluster: in CTAs (the preferred shape) and `fallback` the one that clusters have
    where the preferred does not fit; shared_bytes: a CTA, static and dynamic; sms: CTAs that run at a time.
    """

    def __init__(
        self,
        program: Program,
        chip: Chip,
        memory: GlobalMemory,
        queue: Queue,
        parameters: Region,
        shape: Shape,
        block: Shape,
        cluster: Shape,
        *,
        fallback: Shape,
        explicit_cluster: bool,
        shared_bytes: int,
        dynamic_bytes: int,
        sms: int,
        seed: int,
        variables: dict[str, Region],
        counters: Counters,
        findings: Findings,
        prerequisite: Operation | None = None,
        watch: Watcher | None = None,
        at_exit: Callable[[Cta, Warp], None] | None = None,
    ) -> None:
        self.program = program
        self.chip = chip
        self.memory = memory
        self.queue = queue
        self.parameters = parameters
        self.shape: Shape = shape
        self.block: Shape = block
        self.globals = variables
        self.explicit_cluster: bool = explicit_cluster
        self.threads = block[0] * block[1] * block[2]
        self.shared_bytes: int = shared_bytes
        self.dynamic_bytes: int = dynamic_bytes
        self.sms: int = sms
        self.watch = watch
        self.footprint: Footprint | None = None  # of a share of the grid
        self.counters = counters
        self.at_exit = at_exit  # called with a CTA that ends and its last warp
        self.prerequisite = prerequisite  # the grid before, if this one started early
        self.release = Release(memory, shape[0] * shape[1] * shape[2])
        self.free_sms = sms
        self.effects = 0
        self.running: list[Cluster] = []
        self.findings = findings
        self.counts: dict[int, list[int]] = {}  # how often each block ran, by the index of a warp that ended in its CTA
        self.ended = self.ended_ctas = self.ended_warps = 0
        self.waits: list[Span] = []
        self.lives: list[Span] = []  # of the warps that have ended
        self.random = random.Random(f"grid {seed}")
        self.scheduler = Scheduler(queue, seed, self.progress, self.parked)
        self.pending = self._places(cluster, fallback)
        self.random.shuffle(self.pending)  # no order of starting is promised

    def _places(self, preferred: Shape, fallback: Shape) -> list[tuple[Shape, Shape]]:
        """Every cluster's first CTA and shape.  Both shapes may coexist: a seeded half of those that fit is split."""
        places = []
        steps = [range(0, size, step) for size, step in zip(self.shape, preferred, strict=True)]
        for origin in ((x, y, z) for z in steps[2] for y in steps[1] for x in steps[0]):
            fits = all(o + p <= s for o, p, s in zip(origin, preferred, self.shape, strict=True))
            if fits and (preferred == fallback or self.random.random() < 0.5):
                places.append((origin, preferred))
                continue
            ends = [min(o + p, s) for o, p, s in zip(origin, preferred, self.shape, strict=True)]
            inner = [range(o, e, f) for o, e, f in zip(origin, ends, fallback, strict=True)]
            places += [((x, y, z), fallback) for z in inner[2] for y in inner[1] for x in inner[0]]
        return places

    def start(self) -> None:
        """Starts clusters while multiprocessors are free."""
        while self.pending:
            origin, shape = self.pending[-1]
            size = shape[0] * shape[1] * shape[2]
            if size > self.free_sms:
                return
            self.pending.pop()
            self.free_sms -= size
            self.running.append(Cluster(self, origin, shape))

    def cancel(self, shape: Shape) -> Shape | None:
        """PTX 'clusterlaunchcontrol': takes back a cluster of this shape, the asking one's, that has not started, and
        returns its first CTA's index; None when there is none.  A larger one that has not started is split."""
        self.effects += 1
        found = next((i for i in reversed(range(len(self.pending))) if self.pending[i][1] == shape), None)
        if found is None:
            found = next((i for i in reversed(range(len(self.pending))) if _holds(self.pending[i][1], shape)), None)
            if found is None:
                return None
            self.pending[found : found + 1] = _split(*self.pending[found], shape)
        first, _ = self.pending.pop(found)
        self.release.without(first, shape[0] * shape[1] * shape[2])
        return first

    def cluster_ended(self, cluster: Cluster) -> None:
        self.effects += 1
        self.running.remove(cluster)
        self.free_sms += len(cluster.ctas)
        self.ended += 1
        if self.watch is not None:
            self.watch.cluster_ended(cluster)
        self.ended_ctas += len(cluster.ctas)
        for cta in cluster.ctas:
            self.release.without(cta)
            self.ended_warps += len(cta.warps)
            for warp in cta.warps:
                self.add_counts(warp.index, warp.counts)
        self.start()

    def add_counts(self, warp: int, counts: list[int]) -> None:
        """How often each block ran in warps of an index."""
        before = self.counts.get(warp)
        self.counts[warp] = counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]

    def interrupted(self) -> None:
        """Takes what an error keeps from ending into the counts and the timeline."""
        for warp in (w for cluster in self.running for cta in cluster.ctas for w in cta.warps):
            self.add_counts(warp.index, warp.counts)
            if warp.alive:
                self.lives.append(warp.life())
                self.waits += [group.waited() for group in warp.groups if group.wait is not None]
        for operation in self.queue.outstanding():
            self.queue.record(operation)

    def progress(self) -> int:
        """Grows with every effect that another warp could be waiting for."""
        shared = sum(c.shared.writes + c.barrier.generation for c in self.running)
        return self.effects + self.memory.writes + shared + self.queue.completed

    def parked(self) -> list[Group]:
        """The groups whose wait may end before what they wait for has come."""
        warps = (warp for cluster in self.running for cta in cluster.ctas for warp in cta.warps)
        return [g for warp in warps for g in warp.groups if g.wait is not None and g.wait.may_expire]

    def now(self) -> int:
        """For traces: turns of the scheduler and completions of asynchronous operations so far."""
        return self.scheduler.turns + self.queue.completed

    def clock(self) -> int:
        """A count that grows while warps run, and leaps when none gets on.  It is no time of a device."""
        return self.scheduler.clock()

    def run(self) -> None:
        """Runs the grid to its end.

        Raises Deadlock when it has none; an error of an instruction is raised with its line and warp added.
        """
        self.queue.locate = self.program.ptx_line
        self.queue.now = self.now
        self.memory.tally = self.counters.global_
        if self.watch is not None:
            self.watch.attach(self)
        if self.footprint is not None:
            self.footprint.attach()
        try:
            with _without_collector():
                self.start()
                self.scheduler.run()
        except Error as error:
            where = self._where(error.__traceback__)
            raise (type(error)(f"{error}\n  at {where}") if where else error) from error
        except Exception as error:  # of numpy or Python, at something that no check foresaw
            where = self._where(error.__traceback__)
            raise Error(f"{type(error).__name__}: {error}" + (f"\n  at {where}" if where else "")) from error
        finally:
            self.memory.tally = None
            self.memory.watch = None
            if self.prerequisite is not None and not self.prerequisite.done:
                self.prerequisite.action()  # an error here leaves the grid before as it was
        if self.running:
            raise Deadlock(self.stuck())

    def _where(self, trace: TracebackType | None) -> str:
        """The PTX line and the warp of an error that an instruction raised; empty for one of an asynchronous unit."""
        found = ""
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename == self.program.filename:
                line = self.program.generated_lines[trace.tb_lineno - 1]
                found = f"{self.program.describe(line)}, {self.findings.who(trace.tb_frame.f_locals['w'])}"
            elif code is Queue.complete.__code__:
                return ""
            trace = trace.tb_next
        return found

    def stuck(self) -> str:
        """Every warp that has not ended, with its line and what it waits for."""
        lines = []
        for cluster in self.running:
            for warp in (w for cta in cluster.ctas for w in cta.warps if w.alive):
                for group in warp.groups:
                    if group.wait is not None:
                        why = f"waits for {group.wait.what()}"
                        if isinstance(group.wait.signal, Mbarrier) and (wrong := group.wait.signal.mismatch()):
                            why += f"\n    {wrong}"
                    elif group.needs & warp.alive & ~group.mask:
                        why = f"waits for lanes {group.needs & warp.alive & ~group.mask:#010x} to join"
                    else:
                        why = "spins"
                    where = self.program.describe(group.block.lines[0] if group.block.lines else 0)
                    lines.append(f"  {self.findings.who(warp)}, lanes {group.mask:#010x}, {where}\n    {why}")
        waiting = f"{len(self.queue)} asynchronous operations are outstanding, none of which can complete"
        return "\n".join([f"{self.program.name}: no warp can go on ({waiting})", *lines])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector would go through every live object of the process again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _holds(larger: Shape, smaller: Shape) -> bool:
    """Whether clusters of one shape fill one of the other."""
    return all(a % b == 0 for a, b in zip(larger, smaller, strict=True))


def _split(origin: Shape, shape: Shape, into: Shape) -> list[tuple[Shape, Shape]]:
    """A cluster's place as places of smaller clusters."""
    x, y, z = (range(o, o + s, i) for o, s, i in zip(origin, shape, into, strict=True))
    return [((a, b, c), into) for c in z for b in y for a in x]
