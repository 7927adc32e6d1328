"""The one queue of asynchronous operations, and the schedules that decide when each completes."""

from __future__ import annotations

import bisect
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ptxemu.errors import Error, LaunchError
from ptxemu.machine.signal import Signal, Wait
from ptxemu.machine.span import Span

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp
    from ptxemu.watch.agents import Agent

__all__ = ["SCHEDULES", "Operation", "Queue"]

SCHEDULES = ("eager", "lazy", "fifo", "random")


class Operation:
    """One asynchronous operation: `action` is what its completion does to the machine, `warp` who issued it.

    agent: who it acts as, for a watcher.
    """

    __slots__ = (
        "action",
        "agent",
        "blockers",
        "done",
        "followers",
        "freed",
        "issued",
        "line",
        "serial",
        "signal",
        "warp",
        "what",
    )

    def __init__(self, action: Callable[[], None], what: str, serial: int, line: int, warp: Warp | None) -> None:
        self.action = action
        self.what = what
        self.serial = serial
        self.line = line
        self.warp = warp
        self.agent: Agent | None = None
        self.issued = self.freed = 0  # when it was issued, and when nothing held it back any more
        self.done = False
        self.blockers = 0
        self.followers: list[Operation] = []
        self.signal = Signal()

    def wait(self) -> Wait:
        """To yield from a blocking instruction: until the operation is complete."""
        return Wait(self.signal, lambda: self.done, lambda: self.what)


class Queue:
    """Asynchronous operations in flight.

    schedule: "eager" completes an operation as it is issued, if the order allows; "lazy" only when no warp can go on;
    "fifo" one in the order of issue at every turn of the scheduler; "random" any at random turns, by the seed.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise LaunchError(f"schedule={schedule!r}: one of {', '.join(SCHEDULES)}")
        self.schedule = schedule
        self.random = random.Random(f"queue {seed}")
        self.free: list[Operation] = []  # in the order of issue; nothing they wait for is outstanding
        self.held = 0  # operations that still wait for others
        self.streams: dict[Hashable, Operation] = {}  # the last operation of each ordered stream
        self.serial = 0
        self.completed = 0
        self.issuer: Warp | None = None  # the warp that runs
        self.acting: Agent | None = None  # for a watcher: who makes accesses now, that warp or an operation
        self.now: Callable[[], int] = lambda: 0  # the grid's
        self.log: list[Span] = []  # of what is complete
        self.locate: Callable[[FrameType | None], int] = lambda frame: 0  # the PTX line that a frame is at

    def submit(
        self,
        action: Callable[[], None],
        what: str,
        *,
        stream: Hashable = None,
        after: Iterable[Operation] = (),
        agent: Agent | None = None,
    ) -> Operation:
        """Issues an operation; `action` runs when it completes.

        what: for reports, such as "cp.async.bulk.tensor at line 12".
        stream: operations of one stream complete in the order of issue; None is unordered.
        after: operations that have to complete first.
        agent: who it acts as, for a watcher; None: its accesses are not looked at.
        """
        operation = Operation(action, what, self.serial, self.locate(sys._getframe(1)), self.issuer)
        self.serial += 1
        if agent is not None:
            operation.agent, agent.line = agent, operation.line
        operation.issued = operation.freed = self.now()
        before = [op for op in after if not op.done]
        if stream is not None:
            last = self.streams.get(stream)
            if last is not None and not last.done and last not in before:
                before.append(last)
            self.streams[stream] = operation
        for op in before:
            op.followers.append(operation)
        operation.blockers = len(before)
        if before:
            self.held += 1
        else:
            self.free.append(operation)
            if self.schedule == "eager":
                self.drain()
        return operation

    def last(self, stream: Hashable) -> Operation | None:
        """The newest operation of a stream if it is still in flight; all older ones complete before it."""
        operation = self.streams.get(stream)
        return None if operation is None or operation.done else operation

    def record(self, operation: Operation) -> None:
        """Puts an operation that ends now into the log."""
        if operation.warp is not None:
            cta, index = operation.warp.cta.index, operation.warp.index
            times = operation.freed, self.now(), operation.issued
            self.log.append(Span(cta, index, operation.what, operation.line, *times))

    def outstanding(self) -> Iterator[Operation]:
        """What is in flight."""
        found, pending = set(self.free), list(self.free)
        while pending:
            operation = pending.pop()
            yield operation
            new = [follower for follower in operation.followers if follower not in found]
            found.update(new)
            pending += new

    def __len__(self) -> int:
        return len(self.free) + self.held

    def turn(self) -> None:
        """Called by the scheduler between two warps."""
        if not self.free or self.schedule == "lazy":
            return
        if self.schedule == "fifo":
            self.complete(self.free.pop(0))
        elif self.schedule == "random":
            while self.free and self.random.random() < 0.4:
                self._complete_any()

    def stalled(self) -> bool:
        """Called when no warp can go on: completes one operation; False when there is none."""
        if not self.free:
            return False
        if self.schedule == "random":
            self._complete_any()
        else:
            self.complete(self.free.pop(0))
        return True

    def drain(self) -> None:
        """Completes everything that may complete, in the order of issue."""
        while self.free:
            self.complete(self.free.pop(0))

    def _complete_any(self) -> None:
        self.complete(self.free.pop(self.random.randrange(len(self.free))))

    @contextmanager
    def acts(self, agent: Agent | None) -> Iterator[None]:
        """What happens in it, `agent` does."""
        before, self.acting = self.acting, agent
        if agent is not None:
            agent.begin()
        try:
            yield
        finally:
            self.acting = before

    def complete(self, operation: Operation) -> None:
        """Does what the operation does, and frees those that wait for it."""
        try:
            with self.acts(operation.agent):
                operation.action()
        except Error as error:
            raise type(error)(f"{error}\n  in {operation.what} of line {operation.line}") from error
        operation.done = True
        self.completed += 1
        now = self.now()
        self.record(operation)
        for follower in operation.followers:
            follower.blockers -= 1
            if not follower.blockers:
                self.held -= 1
                follower.freed = now
                bisect.insort(self.free, follower, key=lambda op: op.serial)
        operation.followers = []
        operation.signal.changed()
