"""PTX 9.7.9.25.4 'Bulk copy': the groups in which a thread's bulk stores are, and waiting for them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxemu.isa.engine import Value, warp
from ptxemu.machine.lanes import LANES, first, lanes
from ptxemu.machine.queue import Operation
from ptxemu.machine.signal import Wait

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

__all__ = ["BulkGroups", "Store", "groups_of"]


@dataclass
class Store:
    """A store under way: its two steps, and the lanes that issued it.  group: the number of its group among those that
    its first lane has committed; 0: not yet committed."""

    mask: int
    read: Operation
    write: Operation
    group: int = 0


class BulkGroups:
    """A warp's bulk stores: `open` are not committed, each group is the mask of its threads and its stores.

    unwaited: stores that no wait_group has waited for, not even for their reading; commits: groups of each lane.
    """

    def __init__(self) -> None:
        self.unwaited: list[Store] = []
        self.commits = [0] * LANES
        self.open: list[Store] = []
        self.groups: list[tuple[int, list[Store]]] = []

    def commit(self, m: int) -> None:
        # Only from the front: `pending` counts places from the newest, and stores may complete in any order.
        while self.groups and all(s.write.done for s in self.groups[0][1]):
            del self.groups[0]
        for lane in lanes(m):
            self.commits[lane] += 1
        mine = [s for s in self.open if s.mask & m]
        for store in mine:
            store.group = self.commits[first(store.mask)]
        self.groups.append((m, mine))
        self.open = [s for s in self.open if not s.mask & m]

    def add(self, store: Store) -> None:
        self.open.append(store)
        self.unwaited.append(store)

    def waited(self, m: int, keep: int) -> None:
        """Lanes have waited for all but their newest `keep` groups."""
        self.unwaited = [
            s
            for s in self.unwaited
            if not s.group or not m >> first(s.mask) & 1 or s.group > self.commits[first(s.mask)] - keep
        ]

    def pending(self, m: int, keep: int, read: bool) -> list[Operation]:
        """What is unfinished of each lane's groups but its newest `keep`."""
        together = all(mask & m == m for mask, _ in self.groups)
        found: dict[Operation, None] = {}
        for lane in lanes(m & -m if together else m):
            mine = [stores for mask, stores in self.groups if mask >> lane & 1]
            for stores in mine[: max(len(mine) - keep, 0)]:
                steps = (s.read if read else s.write for s in stores)
                found |= dict.fromkeys(step for step in steps if not step.done)
        return list(found)


def groups_of(w: Warp) -> BulkGroups:
    """A warp's."""
    groups: BulkGroups = w.state.setdefault("cp.async.bulk", BulkGroups())
    return groups


@warp("cp.async.bulk.commit_group")
def commit_group(w: Warp, m: int) -> None:
    """PTX 'cp.async.bulk.commit_group'.  The thread's open stores become a group, which may be empty."""
    groups_of(w).commit(m)
    if w.agent is not None:
        w.agent.commit_groups(("bulk source", "bulk store"), m)


@warp("cp.async.bulk.wait_group{.read} count", {"count": "natural"})
def wait_group(w: Warp, m: int, count: Value, *, read: bool) -> Generator[Wait, None, None]:
    """PTX 'cp.async.bulk.wait_group'.  Until all but the newest `count` groups are complete, or only read."""
    groups = groups_of(w)
    groups.waited(m, count)
    for operation in groups.pending(m, count, read):
        yield operation.wait()
    if w.agent is not None:
        w.agent.groups_done(("bulk source",) if read else ("bulk source", "bulk store"), m, count)
