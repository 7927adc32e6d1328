"""PTX 9.7.9.25.3 'Non-bulk copy': cp.async, whose groups and completion are a thread's own.

One operation of the queue carries what all active lanes of a warp ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import LaunchError, MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.isa.operands import each
from ptxemu.machine.lanes import bools, lanes
from ptxemu.machine.mbarrier import Mbarrier
from ptxemu.machine.queue import Operation
from ptxemu.machine.signal import Wait

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

PREFETCH = "L2::64B L2::128B L2::256B"
Issued = list[tuple[int, Operation]]  # the lanes that issued it, the operation


class Groups:
    """A warp's cp.async operations: `open` are not committed, `groups` are, `flying` may still be on the way."""

    def __init__(self) -> None:
        self.open: Issued = []
        self.groups: list[tuple[int, list[Operation]]] = []
        self.flying: Issued = []

    def add(self, m: int, operation: Operation) -> None:
        self.flying = [(mask, op) for mask, op in self.flying if not op.done]
        self.open.append((m, operation))
        self.flying.append((m, operation))

    def commit(self, m: int) -> None:
        # Only the oldest may be forgotten: `older` counts from the newest, and groups may complete out of order.
        while self.groups and all(op.done for op in self.groups[0][1]):
            del self.groups[0]
        self.groups.append((m, [op for mask, op in self.open if mask & m]))
        self.open = [(mask & ~m, op) for mask, op in self.open if mask & ~m]

    def older(self, m: int, keep: int) -> list[Operation]:
        """The unfinished operations of each lane's groups but its newest `keep`."""
        found: dict[Operation, None] = {}
        for lane in lanes(m):
            mine = [ops for mask, ops in self.groups if mask >> lane & 1]
            for ops in mine[: len(mine) - keep] if keep < len(mine) else []:
                found |= dict.fromkeys(op for op in ops if not op.done)
        return list(found)


def _groups(w: Warp) -> Groups:
    groups: Groups = w.state.setdefault("cp.async", Groups())
    return groups


TYPES = {"size": "u32", "source_size": "u32"}
IGNORE = {"size": "u32", "ignore": "pred"}
SPACE = "shared shared::cta"


def _taken(m: int, size: Value, ignore: int) -> Value:
    """The source sizes of the lanes, of which those of the predicate `ignore` read nothing."""
    if not ignore & m:
        return size
    return 0 if ignore & m == m else np.where(bools(ignore), 0, size).astype(np.uint32)


@warp("cp.async.ca.space.global{.prefetch} [dst], [src], size{, source_size}", TYPES, space=SPACE, prefetch=PREFETCH)
def copy_ca(w: Warp, m: int, dst: Value, src: Value, size: Value, source_size: Value = None) -> None:
    """PTX 'cp.async'.  4, 8 or 16 bytes from global to shared memory; past source_size they are zeros."""
    _copy(w, m, dst, src, size, source_size, (4, 8, 16))


@warp("cp.async.cg.space.global{.prefetch} [dst], [src], size{, source_size}", TYPES, space=SPACE, prefetch=PREFETCH)
def copy_cg(w: Warp, m: int, dst: Value, src: Value, size: Value, source_size: Value = None) -> None:
    """PTX 'cp.async'.  As with .ca, 16 bytes, past the L1 cache."""
    _copy(w, m, dst, src, size, source_size, (16,))


@warp(
    "cp.async.cache.space.global.L2::cache_hint{.prefetch} [dst], [src], size{, source_size}, policy",
    TYPES | {"policy": "b64"},
    cache="ca cg",
    space=SPACE,
    prefetch=PREFETCH,
)
def copy_with_policy(
    w: Warp, m: int, dst: Value, src: Value, size: Value, source_size: Value, policy: Value, *, cache: str
) -> None:
    """PTX 'cp.async'.  With a cache policy, which changes nothing here."""
    _copy(w, m, dst, src, size, source_size, (4, 8, 16) if cache == "ca" else (16,))


@warp("cp.async.ca.space.global{.prefetch} [dst], [src], size, ignore", IGNORE, space=SPACE, prefetch=PREFETCH)
@warp(
    "cp.async.ca.space.global.L2::cache_hint{.prefetch} [dst], [src], size, ignore, policy",
    IGNORE,
    space=SPACE,
    prefetch=PREFETCH,
)
def copy_ca_unless(w: Warp, m: int, dst: Value, src: Value, size: Value, ignore: int) -> None:
    """PTX 'cp.async'.  Zeros where the predicate ignore-src holds."""
    _copy(w, m, dst, src, size, _taken(m, size, ignore), (4, 8, 16))


@warp("cp.async.cg.space.global{.prefetch} [dst], [src], size, ignore", IGNORE, space=SPACE, prefetch=PREFETCH)
@warp(
    "cp.async.cg.space.global.L2::cache_hint{.prefetch} [dst], [src], size, ignore, policy",
    IGNORE,
    space=SPACE,
    prefetch=PREFETCH,
)
def copy_cg_unless(w: Warp, m: int, dst: Value, src: Value, size: Value, ignore: int) -> None:
    """PTX 'cp.async'.  As with .ca, 16 bytes."""
    _copy(w, m, dst, src, size, _taken(m, size, ignore), (16,))


def _copy(w: Warp, m: int, dst: Value, src: Value, size: int, source_size: Value, allowed: tuple[int, ...]) -> None:
    if size not in allowed:
        raise LaunchError(f"cp.async of {size} bytes; allowed: {', '.join(map(str, allowed))}")
    wanted = list(each(w, m, dst, src, size if source_size is None else source_size))
    for _, to, origin, count in wanted:
        if to % size or origin % size:
            raise MemoryFault(f"cp.async of {size} bytes from {origin:#x} to {to:#x}: not aligned to its size")
        if count > size:
            raise MemoryFault(f"cp.async of {size} bytes with a source size of {count}")

    w.grid.counters.moved["cp.async"] += sum(group.bit_count() * count for group, _, _, count in wanted)

    def move() -> None:
        for _, to, origin, count in wanted:
            target = w.shared.view(to, size, write=True)
            target[count:] = 0
            if count:
                target[:count] = w.memory.view(origin, count)

    full = sum(group for group, _, _, count in wanted if count == size)

    def move_together() -> None:
        with w.memory.uncounted(), w.shared.uncounted():
            if full:
                w.shared.store(dst, w.memory.load(src, 4, size // 4, full), 4, full)
            if empty := m & ~full:
                w.shared.store(dst, [0] * (size // 4), 4, empty)

    all_or_nothing = all(count in (0, size) for _, _, _, count in wanted) and int not in (type(dst), type(src))
    action = move_together if all_or_nothing else move
    _groups(w).add(m, w.queue.submit(action, "cp.async", agent=w.grouped("cp.async", 1)))


@warp("cp.async.commit_group")
def commit_group(w: Warp, m: int) -> None:
    """PTX 'cp.async.commit_group'.  The thread's open copies become a group, which may be empty."""
    _groups(w).commit(m)
    if w.agent is not None:
        w.agent.commit_groups(("cp.async",), 1)


@warp("cp.async.wait_group count", {"count": "natural"})
def wait_group(w: Warp, m: int, count: Value) -> Generator[Wait, None, None]:
    """PTX 'cp.async.wait_group / cp.async.wait_all'.  Until all but the newest `count` groups are complete."""
    for operation in _groups(w).older(m, count):
        yield operation.wait()
    if w.agent is not None:
        w.agent.groups_done(("cp.async",), 1, count)


@warp("cp.async.wait_all")
def wait_all(w: Warp, m: int) -> Generator[Wait, None, None]:
    """PTX 'cp.async.wait_group / cp.async.wait_all'.  Until all the thread's copies are complete."""
    commit_group(w, m)
    yield from wait_group(w, m, 0)


@warp("cp.async.mbarrier.arrive{.noinc}{.space}.b64 [addr]", space="shared shared::cta")
def mbarrier_arrive(w: Warp, m: int, addr: Value, *, noinc: bool, space: str | None) -> None:
    """PTX 'cp.async.mbarrier.arrive'.  Arrives once the thread's copies so far are complete; without .noinc the
    phase expects one arrival more for it."""
    flying = _groups(w).flying
    for group, at in each(w, m, addr):
        barrier = barrier_at(w, at, space, remote=False)
        count = group.bit_count()
        if not noinc:
            barrier.pending += count
        before = [operation for mask, operation in flying if mask & group]
        action = functools.partial(_arrive, barrier, count)
        w.queue.submit(action, "cp.async.mbarrier.arrive", after=before, agent=w.after_all("cp.async"))


def _arrive(barrier: Mbarrier, count: int) -> None:
    barrier.arrive(count)
