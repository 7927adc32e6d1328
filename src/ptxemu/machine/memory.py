"""Address spaces: host memory registered as global memory, a cluster's shared memory, and each warp's local memory.

Every access of a warp goes through `Space.load`, `store` or `update`, and every access of an asynchronous unit through
`Space.view`; all of them report to `Space.watch` when there is one.  An access outside an allocation, or one that is
not aligned to its size, raises MemoryFault.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import LaunchError, MemoryFault
from ptxemu.machine.lanes import FULL, LANES, bools, first, lanes

if TYPE_CHECKING:
    from ptxemu.watch.shadow import Shadow

__all__ = [
    "LOCAL_WINDOW",
    "SHARED_BASE",
    "SHARED_WINDOW",
    "GlobalMemory",
    "LocalMemory",
    "Order",
    "Region",
    "SharedWindow",
    "Space",
    "Tally",
    "Touched",
    "Watch",
    "strength",
]

SHARED_BASE = 0x400  # where a CTA's own shared memory starts in the shared window; the system keeps what is below
RANK_SHIFT = 24  # the bits of a shared address from here up are the CTA's rank in its cluster
# Generic addresses of the shared and local windows: outside what a host process can map, low 32 bits unchanged.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
WINDOW_MASK = (1 << 32) - 1
GRANULE = 16  # bytes of which a watcher remembers accesses together

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LANE_INDEX = np.arange(LANES)


@dataclass(frozen=True)
class Order:
    """How strong a load, store or atomic is.  scope: 1 the CTA, 2 the cluster, 3 the device and beyond.

    A relaxed one neither acquires nor releases by itself, but as part of a pattern with a fence.
    """

    scope: int
    acquires: bool
    releases: bool


@functools.lru_cache(maxsize=64)
def strength(sem: str | None, scope: str | None) -> Order | None:
    """Of the modifiers of ld, st, atom and red (PTX 'Operation types'); None: a weak access."""
    if sem in (None, "weak"):
        return None
    level = {"cta": 1, "cluster": 2}.get(scope or "", 3)
    return Order(level, sem in ("acquire", "acq_rel"), sem in ("release", "acq_rel"))


# Of bytes that a unit reaches: the 16-byte granules that it touches, counted from the first, and a mask of the bytes of
# each (an int: the same for all).
Touched = tuple[NDArray[Any], Any]


class Watch(Protocol):
    """Sees every access."""

    def view(
        self,
        space: Space,
        region: Region,
        address: int,
        nbytes: int,
        write: bool,
        proxy: str,
        touched: Touched | None,
        order: Order | None,
    ) -> None: ...

    def lanes(
        self, space: Space, address: Any, nbytes: int, mask: int, write: bool, order: Order | None, atomic: bool = False
    ) -> None: ...


class Tally(Protocol):
    """Counts the accesses of warps; kind: "load", "store" or "atomic"."""

    def __call__(self, address: Any, nbytes: int, mask: int, kind: str) -> None: ...


class Region:
    """`data`, uint8 (size,), at addresses base..base+size-1.  owner: the CTA of shared memory."""

    __slots__ = ("_views", "base", "data", "end", "name", "owner", "shadow", "written")

    def __init__(self, name: str, base: int, data: NDArray[np.uint8], owner: object = None) -> None:
        self.name = name
        self.base = base
        self.data = data
        self.end = base + data.size
        self.owner = owner
        self._views: dict[int, NDArray[Any]] = {}
        self.shadow: Shadow | None = None  # what a watcher remembers of it
        self.written: NDArray[np.uint16] | None = None  # bytes of each granule that were written; None: all

    def items(self, nbytes: int) -> NDArray[Any]:
        """The data as words of `nbytes` bytes, from the base; a rest at the end is cut off.

        They are unsigned numbers, or where there are none so long numpy's void: one item is what it moves fastest.
        """
        view = self._views.get(nbytes)
        if view is None:
            kind = UNSIGNED.get(nbytes) or np.dtype((np.void, nbytes))
            view = self.data[: self.data.size // nbytes * nbytes].view(kind)
            self._views[nbytes] = view
        return view

    def replace(self, data: NDArray[np.uint8]) -> None:
        """Other memory for the same addresses, which may be written as before."""
        data.flags.writeable = self.data.flags.writeable
        self.data = data
        self._views.clear()

    def __str__(self) -> str:
        return f"{self.name} ({self.data.size} bytes at {self.base:#x})"


class Space:
    """An address space made of regions."""

    name = "memory"

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.tally: Tally | None = None
        self.writes = 0  # how the scheduler tells a spinning warp from one that makes progress

    def find(self, low: int, high: int) -> Region:
        """The region that holds bytes low..high-1; raises MemoryFault."""
        raise NotImplementedError

    def view(
        self,
        address: int,
        nbytes: int,
        *,
        write: bool = False,
        proxy: str = "generic",
        touched: Touched | None = None,
        order: Order | None = None,
    ) -> NDArray[np.uint8]:
        """Bytes address..address+nbytes-1, to read or to write in place, all or what is `touched` of them."""
        region = self.find(address, address + nbytes)
        if self.watch is not None:
            self.watch.view(self, region, address, nbytes, write, proxy, touched, order)
        if write:
            self.writes += 1
            if not region.data.flags.writeable:
                raise self.read_only(region, address)
        start = address - region.base
        return region.data[start : start + nbytes]

    def load(self, address: Any, width: int, count: int, mask: int, order: Order | None = None) -> list[Any]:
        """`count` words of `width` bytes from each lane's address: for each word an int when the address is one,
        else an array (32,) of the unsigned type of that width, with any value in lanes outside the mask."""
        nbytes = width * count
        if self.watch is not None:
            self.watch.lanes(self, address, nbytes, mask, False, order)
        if self.tally is not None:
            self.tally(address, nbytes, mask, "load")
        if type(address) is int:
            return self._load_one(address, width, count)
        if mask != FULL:
            address = np.where(bools(mask), address, address[first(mask)])
        region, places = self._places(address, nbytes)
        if places is None:
            return self._load_slow(address, width, count, mask)
        items = region.items(nbytes)[places]
        if count == 1:
            return [items]
        return list(np.ascontiguousarray(items.view(UNSIGNED[width]).reshape(-1, count).T))

    def store(self, address: Any, values: Sequence[Any], width: int, mask: int, order: Order | None = None) -> None:
        """Writes `values`, each an int or an array (32,), as consecutive words of `width` bytes at each lane's address.
        Where lanes write to the same place the highest one wins."""
        count = len(values)
        nbytes = width * count
        self.writes += 1
        if self.watch is not None:
            self.watch.lanes(self, address, nbytes, mask, True, order)
        if self.tally is not None:
            self.tally(address, nbytes, mask, "store")
        if type(address) is int:
            return self._store_one(address, values, width, mask.bit_length() - 1)
        if mask != FULL:
            keep = bools(mask)
            address = address[keep]
            values = [value if type(value) is int else value[keep] for value in values]
        region, places = self._places(address, nbytes)
        if places is None:
            return self._store_slow(address, values, width)
        items = region.items(nbytes)
        if not items.flags.writeable:
            raise self.read_only(region, int(address[0]))
        items[places] = values[0] if count == 1 else _interleaved(values, width, address.size).view(items.dtype)[:, 0]

    def _load_one(self, address: int, width: int, count: int) -> list[Any]:
        nbytes = width * count
        region = self.find(address, address + nbytes)
        if address % nbytes:
            raise self.misaligned(address, nbytes)
        start = address - region.base
        if start % width:  # host memory may start anywhere
            words: list[Any] = region.data[start : start + nbytes].view(UNSIGNED[width]).tolist()
        else:
            words = region.items(width)[start // width : start // width + count].tolist()
        return words

    def _store_one(self, address: int, values: Sequence[Any], width: int, lane: int) -> None:
        nbytes = width * len(values)
        region = self.find(address, address + nbytes)
        if address % nbytes:
            raise self.misaligned(address, nbytes)
        start = address - region.base
        data = np.array([v if type(v) is int else int(v[lane]) for v in values], UNSIGNED[width])
        try:
            region.data[start : start + nbytes] = data.view(np.uint8)
        except ValueError:
            raise self.read_only(region, address) from None

    def update(
        self, address: Any, width: int, mask: int, change: Callable[[int, int], int | None], order: Order | None = None
    ) -> list[int]:
        """An atomic on one word a lane, lane by lane: stores `change(lane, old)`, or nothing where that is None.
        Returns the 32 old values."""
        old = [0] * LANES
        if self.tally is not None:
            self.tally(address, width, mask, "atomic")
        written = 0
        for lane in lanes(mask):
            at = address if type(address) is int else int(address[lane])
            old[lane] = self._load_one(at, width, 1)[0]
            if (new := change(lane, old[lane])) is not None:
                self._store_one(at, [new], width, lane)
                written |= 1 << lane
        self.writes += bool(written)
        if self.watch is not None:
            if mask & ~written:
                self.watch.lanes(self, address, width, mask & ~written, False, order)
            if written:
                self.watch.lanes(self, address, width, written, True, order, atomic=True)
        return old

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Accesses in it are not tallied."""
        tally, self.tally = self.tally, None
        try:
            yield
        finally:
            self.tally = tally

    def _places(self, address: NDArray[Any], nbytes: int) -> tuple[Region, NDArray[np.intp] | None]:
        """The region of the first lane, and the place of each lane's access in its items; None: go lane by lane."""
        start = address.item(0)
        region = self.find(start, start + nbytes)
        places = _places(address.tobytes(), address.dtype, region.base, region.data.size, nbytes)
        if places is None:
            for lane, at in enumerate(address.tolist()):
                if at % nbytes:
                    raise self.misaligned(at, nbytes, lane)
        return region, places

    def _load_slow(self, address: NDArray[Any], width: int, count: int, mask: int) -> list[Any]:
        """Lane by lane."""
        table = np.zeros((count, LANES), UNSIGNED[width])
        for lane in lanes(mask):
            table[:, lane] = self._load_one(int(address[lane]), width, count)
        return list(table)

    def _store_slow(self, address: NDArray[Any], values: Sequence[Any], width: int) -> None:
        """Lane by lane."""
        for lane, at in enumerate(address.tolist()):
            self._store_one(at, values, width, lane)

    def read_only(self, region: Region, address: int) -> MemoryFault:
        return MemoryFault(f"{self.name} address {address:#x} is written to, but {region} is read-only")

    def misaligned(self, address: int, nbytes: int, lane: int | None = None) -> MemoryFault:
        who = "" if lane is None else f"lane {lane}: "
        try:
            where = f" in {self.find(address, address + 1)}"
        except MemoryFault:
            where = ""
        message = f"{self.name} address {address:#x}{where} is not aligned to the {nbytes} bytes of the access"
        return MemoryFault(who + message)


@functools.lru_cache(maxsize=4096)
def _places(address: bytes, kind: np.dtype[Any], base: int, size: int, nbytes: int) -> NDArray[np.intp] | None:
    """Where lanes access a region, in items of `nbytes`; None unless all are aligned, inside, and items of the region.

    Kept, as a kernel comes back to the same addresses again and again.
    """
    offset = np.frombuffer(address, kind) - kind.type(base)  # below the base: wraps around, to a large one
    if base % nbytes or int(np.bitwise_or.reduce(offset)) % nbytes or int(offset.max()) > size - nbytes:
        return None
    return np.asarray(offset // kind.type(nbytes), np.intp)


def _interleaved(values: Sequence[Any], width: int, lanes: int) -> NDArray[Any]:
    """Values, each an int or an array (lanes,), to (lanes, values)."""
    if int not in map(type, values):
        return np.ascontiguousarray(np.array(values, UNSIGNED[width]).T)
    table = np.empty((lanes, len(values)), UNSIGNED[width])
    for column, value in enumerate(values):
        table[:, column] = value
    return table


class GlobalMemory(Space):
    """Host memory, as far as it is registered."""

    name = "global"

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []  # by base
        self._bases: list[int] = []
        self._recent: Region | None = None

    def register(self, name: str, data: NDArray[np.uint8], *, initialised: bool = True) -> Region:
        """Makes host memory accessible at its own address.  Overlaps with registered memory raise LaunchError.

        initialised=False: a watcher reports reads of what no kernel has written.
        """
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise LaunchError(f"{name}: global memory is a contiguous uint8 array, not {data.dtype} {data.shape}")
        base = data.ctypes.data
        region = Region(name, base, data)
        if not initialised:
            region.written = np.zeros((base % GRANULE + data.size + GRANULE - 1) // GRANULE, np.uint16)
        index = bisect.bisect_right(self._bases, base)
        for other in self.regions[max(index - 1, 0) : index + 1]:
            if base < other.end and other.base < region.end:
                raise LaunchError(f"{region} overlaps {other}")
        self.regions.insert(index, region)
        self._bases.insert(index, base)
        return region

    def unregister(self, region: Region) -> None:
        index = self.regions.index(region)
        del self.regions[index], self._bases[index]
        self._recent = None

    def find(self, low: int, high: int) -> Region:
        region = self._recent
        if region is not None and region.base <= low and high <= region.end:
            return region
        index = bisect.bisect_right(self._bases, low) - 1
        if index >= 0 and high <= self.regions[index].end:
            self._recent = self.regions[index]
            return self.regions[index]
        raise self._outside(low, high)

    def _outside(self, low: int, high: int) -> MemoryFault:
        message = f"global address {low:#x}, {high - low} bytes, is in no allocation"
        if self.regions:
            near = min(self.regions, key=lambda r: max(r.base - low, high - r.end, 0))
            where = f"{low - near.end} bytes past its end" if low >= near.end else f"{near.base - low} before its start"
            if near.base <= low < near.end:
                where = f"{high - near.end} bytes too long"
            message += f"; the nearest is {near}: {where}"
        return MemoryFault(message)


class SharedWindow(Space):
    """The shared memories of a cluster's CTAs: rank r at r << 24 | 0x400 and up."""

    name = "shared"

    def __init__(self, regions: list[Region]) -> None:
        super().__init__()
        self.regions = regions

    def find(self, low: int, high: int) -> Region:
        rank = low >> RANK_SHIFT
        if rank < len(self.regions):
            region = self.regions[rank]
            if region.base <= low and high <= region.end:
                return region
            raise MemoryFault(f"shared address {low:#x}, {high - low} bytes, is outside {region}")
        raise MemoryFault(f"shared address {low:#x} names CTA {rank} of a cluster of {len(self.regions)}")


class LocalMemory(Space):
    """A warp's local memory: each lane has its own `size` bytes, at the same addresses from 0 up."""

    name = "local"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = (size + 15) // 16 * 16
        self.region = Region("local memory", 0, np.full(LANES * self.size, 0xFF, np.uint8))

    def find(self, low: int, high: int) -> Region:
        return self.region

    def _spread(self, address: Any, nbytes: int, mask: int) -> NDArray[np.uint64]:
        """Lane addresses to offsets in the one array of all lanes."""
        flat = np.full(LANES, address, np.int64) if type(address) is int else address.astype(np.int64)
        flat = np.where(bools(mask), flat, flat[first(mask)])
        if int(flat.max()) + nbytes > self.size:
            raise MemoryFault(
                f"local address {int(flat.max()):#x}, {nbytes} bytes, is outside {self.size} bytes a thread"
            )
        spread = (flat + _LANE_INDEX * self.size).astype(np.uint64)
        return spread

    def load(self, address: Any, width: int, count: int, mask: int, order: Order | None = None) -> list[Any]:
        return super().load(self._spread(address, width * count, mask), width, count, mask, order)

    def store(self, address: Any, values: Sequence[Any], width: int, mask: int, order: Order | None = None) -> None:
        super().store(self._spread(address, width * len(values), mask), values, width, mask, order)
