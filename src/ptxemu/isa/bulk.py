"""PTX 9.7.9.25.4-6 'Bulk copy', 'Tensor copy' and their completion; 9.7.9.26 'tensormap.replace'.

A load is one operation of the queue for each CTA that it writes: read global memory, write shared memory, count the
bytes at the mbarrier.  A store or reduction is two, source read and destination written, so that wait_group.read can
tell them apart.  Operations that all active lanes issue with the same operands are issued once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import LaunchError, MemoryFault
from ptxemu.isa.bulk_groups import Store, groups_of
from ptxemu.isa.engine import Value, thread, warp
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.isa.sync import fence
from ptxemu.machine import tma
from ptxemu.machine.lanes import lanes
from ptxemu.machine.memory import RANK_SHIFT, Order, Touched, strength
from ptxemu.machine.swizzle import B128_ATOM32
from ptxemu.machine.tensormap import SIZE, InvalidTensorMap, TensorMap, replace_field

if TYPE_CHECKING:
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

__all__ = ["multicast_addresses"]

Bytes = npt.NDArray[np.uint8]
OFFSET_MASK = (1 << RANK_SHIFT) - 1


def _orders(*modifiers: str) -> str:
    """Every choice and order of some of the modifiers: compilers do not agree with the manual on their order."""
    found = [".".join(p) for n in range(1, len(modifiers) + 1) for p in itertools.permutations(modifiers, n)]
    return " ".join(found)


LAST_UNPACKED = 12  # the element types of tensormap.replace from here on are packed
HINT, MULTICAST = "L2::cache_hint", "multicast::cluster"
GROUPS = ("cta_group::1", "cta_group::2")
TENSOR_EXTRAS = " ".join(dict.fromkeys(" ".join(_orders(MULTICAST, HINT, group) for group in GROUPS).split()))
BULK_EXTRAS = _orders(MULTICAST, HINT)
DIMENSIONS = "1d 2d 3d 4d 5d"
SHARED = "shared::cta shared::cluster"
REDUCTION = strength("relaxed", "gpu")  # the order that each operation of a reduction in global memory has


def _submit_store(
    w: Warp, m: int, what: str, source: int, size: int, read: Callable[[Bytes], Bytes], write: Callable[[Bytes], object]
) -> None:
    """read: from the `size` bytes at shared `source` to what `write` takes."""
    held: list[Bytes] = []
    reader, target = w.grouped("bulk source", m), w.grouped("bulk store", m)
    with w.queue.acts(reader):  # a watcher takes the source as read from now on
        view = w.shared.view(source, size, proxy="async")
    reading = w.queue.submit(lambda: held.append(read(view)), f"{what} (reading its source)")
    writing = w.queue.submit(lambda: void(write(held.pop())), what, after=[reading], agent=target)
    groups_of(w).add(Store(m, reading, writing))


def _count(w: Warp, what: str, in_global: int, in_shared: int) -> None:
    """Counts the bytes at both ends of a copy: a multicast is read once and written in every CTA."""
    moved = w.grid.counters.moved
    moved[f"{what}, global memory"] += in_global
    moved[f"{what}, shared memory"] += in_shared


def void(_: object) -> None:
    """Drops a value."""


# Addresses


def _shared(w: Warp, address: int, what: str, alignment: int = 16) -> int:
    """A shared address, of any CTA of the cluster, from a shared or generic one."""
    space, found = w.space("" if address >> 32 else "shared", address, 1)
    if space is not w.shared or found % alignment:
        raise MemoryFault(f"{what}: shared address {address:#x} has to be a multiple of {alignment}")
    return int(found)


def _own(w: Warp, address: int, what: str) -> int:
    if address >> RANK_SHIFT != w.cta.rank:
        raise MemoryFault(f"{what}: shared address {address:#x} is not in the CTA's own shared memory")
    return address


def multicast_addresses(w: Warp, address: int, mask: int | None) -> list[int]:
    """`address`, or with a mask of CTA ranks the same offset in each of those CTAs.

    Raises MemoryFault: no CTA, or one that the cluster does not have.
    """
    if mask is None:
        return [address]
    mask &= 0xFFFF
    if not mask or mask >> len(w.cluster.ctas):
        raise MemoryFault(f"multicast to CTA mask {mask:#x} in a cluster of {len(w.cluster.ctas)} CTAs")
    return [rank << RANK_SHIFT | address & OFFSET_MASK for rank in lanes(mask)]


def _barriers(w: Warp, destinations: list[int], bar: int, multicast: bool, pair: bool) -> list[Mbarrier]:
    """The mbarrier that each copy signals.

    It lies in the CTA that the copy writes; with cta_group::2 it may lie in that CTA's peer instead, which a multicast
    takes from the rank of `bar`.
    """
    bar = _shared(w, bar, "mbarrier of a bulk copy", 8)
    found = []
    for destination in destinations:
        rank = destination >> RANK_SHIFT
        at = bar
        if multicast:
            target = (rank & ~1) | (bar >> RANK_SHIFT & 1) if pair else rank
            at = target << RANK_SHIFT | bar & OFFSET_MASK
        elif bar >> RANK_SHIFT != rank and not (pair and bar >> RANK_SHIFT == rank ^ 1):
            raise MemoryFault(f"bulk copy to CTA {rank} with an mbarrier in CTA {bar >> RANK_SHIFT}")
        found.append(barrier_at(w, at, "shared::cluster"))
    return found


def _extras(extras: str | None, first: int | None, second: int | None) -> tuple[int | None, bool, bool]:
    """CTA mask, whether cta_group::2, from the modifiers and the operands after the mbarrier; checks their number."""
    found = (extras or "").split(".")
    multicast = MULTICAST in found
    wanted = multicast + (HINT in found)
    if wanted != (first is not None) + (second is not None):
        raise LaunchError(f"bulk copy with .{extras}: {wanted} operands are needed after the mbarrier")
    return (first if multicast else None), multicast, "cta_group::2" in found


# Tensor copies


def _map(w: Warp, address: int) -> TensorMap:
    space, found = w.space("", address, 1)
    if found % 64:
        raise InvalidTensorMap(f"tensor map at {address:#x}: 64-byte alignment is needed")
    decoded = TensorMap.decode(space.view(found, 64, proxy="tensormap").tobytes())
    if (decoded.type.packed or decoded.swizzle is B128_ATOM32) and "narrow floats" not in w.grid.chip.has:
        raise InvalidTensorMap(
            f"{w.grid.chip.name} has no packed types and no 128-byte swizzle of 32-byte atoms: the map's are "
            f"{decoded.dtype} and {decoded.swizzle.name}"
        )
    return decoded


def _signed(coords: Any) -> tuple[int, ...]:
    values = coords if isinstance(coords, tuple | list) else (coords,)
    return tuple((c & 0xFFFFFFFF) - ((c & 0x80000000) << 1) for c in values)


def _window(w: Warp, order: Order | None = None) -> tma.GlobalWindow:
    def window(address: int, size: int, write: bool, touched: Touched) -> Bytes:
        return w.memory.view(address, size, write=write, proxy="async", touched=touched, order=order)

    return window


def _tensor(w: Warp, map: int, coords: Any, dim: str, store: bool) -> tuple[TensorMap, tuple[int, ...]]:
    m, at = _map(w, map), _signed(coords)
    if m.rank != int(dim[0]):
        raise InvalidTensorMap(f"a .{dim} copy with a tensor map of rank {m.rank}")
    tma.check_coordinates(m, at, store)
    tma.check_first_coordinate(m, at)
    return m, at


@thread(
    "cp.async.bulk.tensor.dim.dst.global{.tile}.mbarrier::complete_tx::bytes{.extras} "
    "[to], [map, coords], [bar]{, first}{, second}",
    dim=DIMENSIONS,
    dst=SHARED,
    extras=TENSOR_EXTRAS,
)
def tensor_load(
    w: Warp,
    m: int,
    to: int,
    map: int,
    coords: Value,
    bar: int,
    first: int | None = None,
    second: int | None = None,
    *,
    dim: str,
    dst: str,
    extras: str | None,
) -> None:
    """PTX 'cp.async.bulk.tensor'.  A box from global to shared memory, to each CTA of the mask with .multicast.

    first, second: CTA mask (with .multicast::cluster) and cache policy (with .L2::cache_hint), in this order.
    """
    mask, multicast, pair = _extras(extras, first, second)
    tensor, at = _tensor(w, map, coords, dim, store=False)
    to = _shared(w, to, "cp.async.bulk.tensor")
    if dst == "shared::cta":
        _own(w, to, "cp.async.bulk.tensor to shared::cta")
    tma.check_shared(tensor, to)
    destinations = multicast_addresses(w, to, mask)
    _count(w, "TMA load", tma.inside_bytes(tensor, at), tensor.box_bytes * len(destinations))
    box: list[Bytes] = []  # read once, by the copy that lands first
    for address, barrier in zip(destinations, _barriers(w, destinations, bar, multicast, pair), strict=True):
        land = functools.partial(_land, w, tensor, at, box, address, barrier)
        w.queue.submit(land, f"cp.async.bulk.tensor.{dim} load", agent=w.copying(barrier))


def _land(w: Warp, tensor: TensorMap, at: tuple[int, ...], box: list[Bytes], address: int, barrier: Mbarrier) -> None:
    if not box:
        box.append(tma.read_box(tensor, at, _window(w)))
    window = w.shared.view(address, tensor.box_bytes, write=True, proxy="async")
    tma.place(tensor, box[0], window, address)
    barrier.complete_tx(tensor.transaction_bytes)


@thread(
    "cp.async.bulk.tensor.dim.global.shared::cta{.tile}.bulk_group{.L2::cache_hint} [map, coords], [at]{, policy}",
    dim=DIMENSIONS,
)
def tensor_store(w: Warp, m: int, map: int, coords: Value, at: int, *, dim: str) -> None:
    """PTX 'cp.async.bulk.tensor'.  A box from shared to global memory; what lies outside the tensor is dropped."""
    _tensor_out(w, m, map, coords, at, dim, lambda tensor, to, box: tma.write_box(tensor, to, box, _window(w)))


@thread(
    "cp.reduce.async.bulk.tensor.dim.global.shared::cta.op{.tile}.bulk_group{.L2::cache_hint} "
    "[map, coords], [at]{, policy}",
    dim=DIMENSIONS,
    op=" ".join(tma.REDUCTIONS),
)
def tensor_reduce(w: Warp, m: int, map: int, coords: Value, at: int, *, dim: str, op: str) -> None:
    """PTX 'cp.reduce.async.bulk.tensor'.  Combines a box into global memory, element by element."""
    _tensor_out(
        w, m, map, coords, at, dim, lambda tensor, to, box: tma.reduce_box(tensor, to, box, op, _window(w, REDUCTION))
    )


def _tensor_out(
    w: Warp,
    m: int,
    map: int,
    coords: Value,
    at: int,
    dim: str,
    write: Callable[[TensorMap, tuple[int, ...], Bytes], object],
) -> None:
    tensor, to = _tensor(w, map, coords, dim, store=True)
    source = _own(w, _shared(w, at, "cp.async.bulk.tensor"), "cp.async.bulk.tensor from shared::cta")
    tma.check_shared(tensor, source)
    _count(w, "TMA store", tma.inside_bytes(tensor, to, write=True), tensor.box_bytes)

    _submit_store(
        w,
        m,
        f"cp.async.bulk.tensor.{dim} store",
        source,
        tensor.box_bytes,
        lambda view: tma.collect(tensor, view, source),
        lambda box: write(tensor, to, box),
    )


@thread("cp.async.bulk.prefetch.tensor.dim.L2.global{.tile}{.L2::cache_hint} [map, coords]{, policy}", dim=DIMENSIONS)
def tensor_prefetch(w: Warp, m: int, map: int, coords: Value, *, dim: str) -> None:
    """PTX 'cp.async.bulk.prefetch.tensor'.  Caches are not modelled: only the map and the coordinates are checked."""
    _tensor(w, map, coords, dim, store=False)


# Bulk copies of contiguous bytes


def _check_size(address: int, size: int, what: str) -> None:
    if size % 16 or address % 16:
        raise MemoryFault(f"{what} of {size} bytes at {address:#x}: both have to be multiples of 16")


@thread(
    "cp.async.bulk.dst.global.mbarrier::complete_tx::bytes{.extras} [to], [at], size, [bar]{, first}{, second}",
    dst=SHARED,
    extras=BULK_EXTRAS,
)
def bulk_load(
    w: Warp,
    m: int,
    to: int,
    at: int,
    size: int,
    bar: int,
    first: int | None = None,
    second: int | None = None,
    *,
    dst: str,
    extras: str | None,
) -> None:
    """PTX 'cp.async.bulk'.  Bytes from global to shared memory, to each CTA of the mask with .multicast."""
    mask, multicast, _ = _extras(extras, first, second)
    _check_size(at, size, "cp.async.bulk")
    to = _shared(w, to, "cp.async.bulk")
    if dst == "shared::cta":
        _own(w, to, "cp.async.bulk to shared::cta")
    destinations = multicast_addresses(w, to, mask)
    _count(w, "TMA load", size, size * len(destinations))
    for address, barrier in zip(destinations, _barriers(w, destinations, bar, multicast, False), strict=True):

        def move(address: int = address, barrier: Mbarrier = barrier) -> None:
            data = w.memory.view(at, size, proxy="async")
            w.shared.view(address, size, write=True, proxy="async")[:] = data
            barrier.complete_tx(size)

        w.queue.submit(move, "cp.async.bulk load", agent=w.copying(barrier))


@thread("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [at], size, [bar]")
def bulk_to_cluster(w: Warp, m: int, to: int, at: int, size: int, bar: int) -> None:
    """PTX 'cp.async.bulk'.  Bytes from the CTA's shared memory to that of a CTA of the cluster."""
    _between_ctas(w, to, at, size, bar, "cp.async.bulk", lambda old, new: new)


@thread(
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.op.type [to], [at], size, [bar]",
    {"size": "u32"},
    op=" ".join(tma.REDUCTIONS),
    type="b32 u32 s32 b64 u64",
)
def bulk_reduce_to_cluster(w: Warp, m: int, to: int, at: int, size: int, bar: int, *, op: str, type: str) -> None:
    """PTX 'cp.reduce.async.bulk'.  Combines the CTA's shared memory into that of a CTA of the cluster."""
    combine = functools.partial(tma.combine, op, type)
    _between_ctas(w, to, at, size, bar, "cp.reduce.async.bulk", combine)


def _between_ctas(
    w: Warp, to: int, at: int, size: int, bar: int, what: str, combine: Callable[[Bytes, Bytes], Bytes]
) -> None:
    to, source = _shared(w, to, what), _own(w, _shared(w, at, what), what)
    _check_size(source, size, what)
    (barrier,) = _barriers(w, [to], bar, False, False)
    w.grid.counters.moved["bulk copy in the cluster"] += size
    held: list[Bytes] = []

    def read() -> None:
        held.append(w.shared.view(source, size, proxy="async").copy())

    def write() -> None:
        target = w.shared.view(to, size, write=True, proxy="async")
        target[:] = combine(target, held.pop())
        barrier.complete_tx(size)

    reading = w.queue.submit(read, f"{what} (reading its source)", agent=w.copying(barrier))
    w.queue.submit(write, what, after=[reading], agent=w.copying(barrier))


@thread("cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint} [to], [at], size{, policy}")
def bulk_store(w: Warp, m: int, to: int, at: int, size: int) -> None:
    """PTX 'cp.async.bulk'.  Bytes from shared to global memory."""
    _to_global(w, m, to, at, size, "cp.async.bulk store", lambda old, new: new)


@thread(
    "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.cp_mask [to], [at], size{, policy}, bytes",
    {"bytes": "b16"},
)
def bulk_store_masked(w: Warp, m: int, to: int, at: int, size: int, bytes: int) -> None:
    """PTX 'cp.async.bulk'.  With .cp_mask: of each 16 bytes, those whose bit is set in the mask."""
    keep = np.array([bytes >> i & 1 for i in range(16)], bool)
    repeated = np.tile(keep, size // 16)
    _to_global(w, m, to, at, size, "cp.async.bulk store", lambda old, new: np.where(repeated, new, old))


@thread(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.op{.noftz}.type [to], [at], size{, policy}",
    {"size": "u32"},
    op=" ".join(tma.REDUCTIONS),
    type="f16 bf16 b32 u32 s32 b64 u64 s64 f32 f64",
)
def bulk_reduce(w: Warp, m: int, to: int, at: int, size: int, *, op: str, type: str) -> None:
    """PTX 'cp.reduce.async.bulk'.  Combines shared memory into global memory; f16 and bf16 keep subnormals."""
    _to_global(w, m, to, at, size, "cp.reduce.async.bulk", functools.partial(tma.combine, op, type), REDUCTION)


def _to_global(
    w: Warp,
    m: int,
    to: int,
    at: int,
    size: int,
    what: str,
    combine: Callable[[Bytes, Bytes], Bytes],
    order: Order | None = None,
) -> None:
    source = _own(w, _shared(w, at, what), what)
    _check_size(to, size, what)
    _count(w, "TMA store", size, size)

    def write(data: Bytes) -> None:
        target = w.memory.view(to, size, write=True, proxy="async", order=order)
        target[:] = combine(target, data)

    _submit_store(w, m, what, source, size, np.array, write)


@thread("cp.async.bulk.prefetch.L2.global{.L2::cache_hint} [at], size{, policy}")
def bulk_prefetch(w: Warp, m: int, at: int, size: int) -> None:
    """PTX 'cp.async.bulk.prefetch'.  Caches are not modelled: only the address is checked."""
    _check_size(at, size, "cp.async.bulk.prefetch")
    w.memory.find(at, at + size)


# Tensor maps


@thread("prefetch{.space}.tensormap [map]", space="param const")
def prefetch_map(w: Warp, m: int, map: int) -> None:
    """PTX 'prefetch, prefetchu'.  Of a tensor map: nothing happens."""


MAP_SPACES = "global shared::cta"


@thread(
    "tensormap.replace.tile.field{.space}.b1024.type [at], value",
    {"value": "type"},
    field="global_address rank elemtype interleave_layout swizzle_mode swizzle_atomicity fill_mode",
    space=MAP_SPACES,
    type="b32 b64",
)
def replace_map_field(w: Warp, m: int, at: int, value: int, *, field: str, space: str | None) -> None:
    """PTX 'tensormap.replace'.  Changes a field of the map at `at`."""
    _replace(w, at, field, 0, value, space)


@thread(
    "tensormap.replace.tile.field{.space}.b1024.type [at], ordinal, value",
    {"ordinal": "u32", "value": "type"},
    field="box_dim global_dim global_stride element_stride",
    space=MAP_SPACES,
    type="b32 b64",
)
def replace_map_dimension(w: Warp, m: int, at: int, ordinal: int, value: int, *, field: str, space: str | None) -> None:
    """PTX 'tensormap.replace'.  Changes a field of one dimension of the map at `at`."""
    _replace(w, at, field, ordinal, value, space)


def _replace(w: Warp, at: int, field: str, ordinal: int, value: int, space: str | None) -> None:
    memory, address = w.space(space or "", at, 1)
    if address % SIZE:
        raise InvalidTensorMap(f"tensormap.replace at {at:#x}: {SIZE}-byte alignment is needed")
    if field == "elemtype" and value > LAST_UNPACKED and "narrow floats" not in w.grid.chip.has:
        raise InvalidTensorMap(f"tensormap.replace.elemtype {value}: {w.grid.chip.name} has types 0 to {LAST_UNPACKED}")
    view = memory.view(address, SIZE, write=True)
    raw = bytearray(view.tobytes())
    replace_field(raw, field, value, ordinal)
    view[:] = np.frombuffer(raw, np.uint8)


@warp(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.scope.sync.aligned [to], [origin], size",
    scope="cta cluster gpu sys",
)
def copy_map(w: Warp, m: int, to: Value, origin: Value, size: Value, *, scope: str) -> None:
    """PTX 'tensormap.cp_fenceproxy'.  A map goes from shared to global memory, and a release follows."""
    if size != SIZE:
        raise LaunchError(f"tensormap.cp_fenceproxy of {size} bytes; allowed: {SIZE}")
    if type(to) is not int or type(origin) is not int or to % SIZE or origin % SIZE:
        raise InvalidTensorMap(f"tensormap.cp_fenceproxy: one pair of addresses, aligned to {SIZE} bytes, is needed")
    found = w.shared.view(w.space("shared::cta", origin & 0xFFFFFFFF, m)[1], SIZE)
    w.memory.view(to, SIZE, write=True)[:] = found
    fence(w, m, scope=scope)
