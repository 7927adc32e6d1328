"""What is wrong with two accesses, or with one, in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxemu.watch.agents import Agent, Sync, Together
from ptxemu.watch.clocks import ORDER, split
from ptxemu.watch.roles import role_of
from ptxemu.watch.shadow import FENCED, GRANULE, WRITE, Past, Trouble

if TYPE_CHECKING:
    from ptxemu.machine.cluster import Cluster
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.grid import Grid
    from ptxemu.machine.memory import Region
    from ptxemu.machine.warp import Warp
    from ptxemu.watch.findings import Findings
    from ptxemu.watch.prerequisite import Hit

__all__ = ["Place", "Rules", "Site"]

COLUMNS = 512
_WAIT_GROUP = ": wgmma.wait_group has to come first"
_CTA, _CLUSTER, _GPU = 1, 2, 3  # scopes of strong accesses; 0 is a weak one


@dataclass(frozen=True)
class Site:
    """Where accesses come from: PTX line, warp (`rank` of its CTA in the cluster, `warp` in the CTA) and proxy.

    scope: of a strong access, else 0.  late: its CTA had let dependent grids start.
    """

    line: int
    rank: int
    warp: int
    proxy: str
    scope: int
    write: bool
    late: bool = False


@dataclass(frozen=True)
class Place:
    """The memory that is accessed: a region, or the tensor memory of a CTA."""

    region: Region | None = None
    cta: Cta | None = None

    def address(self, cell: int) -> int:
        if self.region is None:
            return cell // COLUMNS * 32 << 16 | cell % COLUMNS
        return max(self.region.base, (self.region.base & -GRANULE) + cell * GRANULE)

    @property
    def name(self) -> str:
        if self.region is not None:
            return str(self.region)
        assert self.cta is not None
        held = ", ".join(f"{size} columns at {at:#x}" for at, size in self.cta.tmem.allocations.items())
        return f"tensor memory of CTA {self.cta.index} (allocated: {held or 'nothing'})"

    @property
    def async_space(self) -> str:
        """The state space that a proxy fence names."""
        assert self.region is not None
        return "shared" if self.region.owner is not None else "global"


class Rules:
    """Turns conflicts into findings.  sites: by id, which ends in the two bits that `Shadow` looks at."""

    def __init__(self, findings: Findings, strict: bool) -> None:
        self.findings = findings
        self.strict = strict
        self.grid: Grid
        self.sites: list[Site] = []
        self._ids: dict[tuple[int, int, int, str, int, bool, bool, bool], int] = {}
        self._clusters: list[tuple[tuple[int, int, int], tuple[int, int, int]]] = []  # origin and shape, by serial
        self._running: dict[int, Cluster] = {}

    def add_cluster(self, cluster: Cluster) -> int:
        """Its serial number."""
        serial = len(self._clusters)
        self._clusters.append((cluster.origin, cluster.shape))
        self._running[serial] = cluster
        return serial

    def ended(self, cluster: Cluster) -> None:
        self._running.pop(cluster.chains.serial, None)

    def site(self, line: int, warp: Warp, proxy: str, scope: int, write: bool, fenced: bool, late: bool = False) -> int:
        key = line, warp.cta.rank, warp.index, proxy, scope, write, late, fenced
        found = self._ids.get(key)
        if found is None:
            found = len(self.sites) << 2 | (WRITE if write else 0) | (FENCED if fenced else 0)
            self._ids[key] = found
            self.sites.append(Site(*key[:7]))
        return found

    # Findings

    def report(self, agent: Agent, line: int, site: int, place: Place, troubles: list[Trouble]) -> None:
        """What is wrong with an access of the agent at the line; of accesses from one place, the lowest cell counts."""
        troubles = sorted(troubles, key=lambda trouble: trouble.cell)
        if unwritten := next((trouble for trouble in troubles if trouble.unwritten), None):
            self.uninitialised(agent, line, place, unwritten.cell)
        seen: dict[int, tuple[Past, int]] = {}
        for trouble in troubles:
            for past in trouble.conflicts:
                seen.setdefault(past.site, (past, trouble.cell))
        for past, cell in seen.values():
            self._conflict(agent, line, self.sites[site >> 2], place, past, cell)

    def _conflict(self, agent: Agent, line: int, mine: Site, place: Place, past: Past, cell: int) -> None:
        """An access comes after one that it is not ordered with, or cannot see."""
        other = self.sites[past.site >> 2]
        chain, index, serial = past.chain, past.at, agent.clock.chains.serial
        if place.region is not None and place.region.owner is None:
            serial, chain = split(chain)
        if self.in_scope(min(mine.scope, other.scope), agent, serial, other.rank):
            return
        kind, message = self._judge(agent, mine, other, serial, chain, index, place)
        name, role = self._party(serial, other)
        words = self.findings.party(other.line, name, role, _access(other))
        address = place.address(cell)
        self.findings.add(
            kind, message, line=line, warp=agent.warp, address=address, allocation=place.name, other=words,
            other_line=other.line,
        )  # fmt: skip

    def _judge(
        self, agent: Agent, mine: Site, other: Site, serial: int, chain: int, index: int, place: Place
    ) -> tuple[str, str]:
        """Kind and message."""
        me, them = _access(mine), _access(other)
        if other.proxy == "mbarrier":
            return "access to a live mbarrier", f"{me} touches the bytes of an mbarrier; mbarrier.inval comes first"
        own = serial == agent.clock.chains.serial
        stream = agent.clock.chains.kinds[chain] if own and chain < len(agent.clock.chains.kinds) else ""
        known = agent.clock.known
        ordered = own and chain < known.shape[1] and known[ORDER, chain] >= index
        if ordered and place.region is None:
            fences = "tcgen05.fence::before_thread_sync, a synchronisation and tcgen05.fence::after_thread_sync"
            return "missing tcgen05.fence", f"{me} needs {fences} between it and {them} by another thread"
        if ordered and mine.proxy == "tensormap":
            return "missing fence.proxy.tensormap", (
                f"{me} comes after {them}, but no fence.proxy.tensormap::generic lies between them"
            )
        if ordered:
            space = place.async_space
            return "missing fence.proxy.async", (
                f"{me} comes after {them}, but no fence.proxy.async for {space} memory lies between them: the async "
                "proxy may not see it"
            )
        if stream.startswith("tcgen05.") and self._waited_for(serial, other, chain, index):
            return "race", f"{me} is not ordered after {them}"
        if stream == "tcgen05.ld":
            return "missing tcgen05.wait::ld", f"{me} overtakes {them} that no tcgen05.wait::ld waited for"
        if stream == "tcgen05.st":
            return "missing tcgen05.wait::st", f"{me} may come before {them} that no tcgen05.wait::st waited for"
        if own and isinstance(agent, Together) and index > agent.began.get(chain, index):
            return "missing wgmma.wait_group", f"{them} overwrites what a wgmma still reads{_WAIT_GROUP}"
        if stream == "wgmma" and not self._waited_for(serial, other, chain, index):
            return "missing wgmma.wait_group", f"{me} overwrites what a wgmma still reads{_WAIT_GROUP}"
        if stream == "bulk source":
            return "bulk store source reused", (
                f"{me} overwrites what a bulk store still reads: cp.async.bulk.wait_group.read has to come first"
            )
        return "race", f"{me} is not ordered after {them}"

    def _waited_for(self, serial: int, other: Site, chain: int, index: int) -> bool:
        """Whether the warp that issued the other access knows it to be complete: then no wait is missing."""
        cluster = self._running.get(serial)
        agent = cluster.ctas[other.rank].warps[other.warp].agent if cluster is not None else None
        return agent is None or agent.clock.lookup()(ORDER, chain) >= index

    def in_scope(self, scope: int, agent: Agent, serial: int, rank: int) -> bool:
        """Whether a scope around the agent includes a CTA of a cluster; with the smaller one of two accesses, PTX
        'Morally strong operations': both strong, and each in the other's scope."""
        if scope >= _GPU:
            return True
        same_cluster = serial == agent.clock.chains.serial
        return same_cluster and (scope == _CLUSTER or (scope == _CTA and rank == agent.warp.cta.rank))

    def _party(self, serial: int, site: Site) -> tuple[str, str]:
        """Name and role of the warp at a site; a role only while its cluster runs."""
        origin, shape = self._clusters[serial]
        rank = site.rank
        x, y, z = rank % shape[0], rank // shape[0] % shape[1], rank // shape[0] // shape[1]
        index = origin[0] + x, origin[1] + y, origin[2] + z
        cluster = self._running.get(serial)
        role = role_of(cluster.ctas[rank].warps[site.warp]) if cluster is not None else ""
        return f"warp {site.warp} of CTA {index}", role

    def too_early(self, agent: Agent, line: int, place: Place, write: bool, hit: Hit) -> None:
        """An access to what the grid before accesses, by one that does not know that grid to be complete."""
        word = "write" if write else "read"
        message = f"the grid before may still run: griddepcontrol.wait has to come before this {word}"
        if hit.site.late and hit.site.write:
            message += "; that grid stores here after griddepcontrol.launch_dependents, which may be missed"
        name, _ = hit.rules._party(hit.serial, hit.site)
        kernel = hit.rules.grid.program.name
        other = hit.rules.findings.party(hit.site.line, name, "", f"{_access(hit.site)} of {kernel}")
        self.findings.add(
            f"{word} before griddepcontrol.wait", message, line=line, warp=agent.warp, address=hit.address,
            allocation=place.name, other=other, other_line=hit.site.line,
        )  # fmt: skip

    def before_wait(self, agent: Agent, line: int, place: Place, cell: int) -> None:
        """Strict: a read that does not meet what the grid before did, as far as is known."""
        self.findings.add(
            "global read before griddepcontrol.wait",
            "a dependent launch reads global memory before it waits for the grid before",
            line=line, warp=agent.warp, address=place.address(cell), allocation=place.name,
        )  # fmt: skip

    def uninitialised(self, agent: Agent, line: int, place: Place, cell: int) -> None:
        self.findings.add(
            "uninitialised read",
            "reads what nothing has written since the memory was there",
            line=line,
            warp=agent.warp,
            address=place.address(cell),
            allocation=place.name,
        )

    def undefined_register(self, agent: Agent, line: int) -> None:
        self.findings.add(
            "uninitialised register", "reads a register that nothing has written", line=line, warp=agent.warp
        )

    def two_inits(self, agent: Agent, line: int, before: int) -> None:
        """An mbarrier is initialised twice, by threads that are not ordered."""
        self.findings.add(
            "race",
            "initialises a barrier that another thread initialises, too, without an order between them",
            line=line,
            warp=agent.warp,
            other=f"line {before}: `{self.findings.place(before)[0]}`",
            other_line=before,
        )

    def init_not_visible(self, sync: Sync, agent: Agent, async_proxy: bool) -> None:
        """An mbarrier is used though its initialisation may not be visible yet."""
        line = agent.line or self.grid.program.ptx_line(sys._getframe())
        user = "the async proxy" if async_proxy else "this warp"
        self.findings.add(
            "mbarrier.init not visible",
            f"{user} uses a barrier whose mbarrier.init it may not see: fence.mbarrier_init.release.cluster (or, for "
            "the async proxy, fence.proxy.async) and a synchronisation have to come between",
            line=line,
            warp=agent.warp,
            other=f"line {sync.init_line}: `{self.findings.place(sync.init_line)[0]}`",
            other_line=sync.init_line,
        )  # fmt: skip


def _access(site: Site) -> str:
    verb = "write" if site.write else "read"
    return {
        "generic": "a store" if site.write else "a load",
        "async": f"an asynchronous {verb}",
        "tensor": f"a tensor-core {verb}",
        "mbarrier": "initialised",
        "free": "the deallocation",
    }.get(site.proxy, f"a {verb} through the {site.proxy} proxy")
