"""PTX 9.7.16 'TensorCore 5th Generation Family Instructions': tensor memory and the MMAs that live on it.

Order: what one thread issues (mma, cp, commit) completes first in, first out, which is a little more than the manual
promises and what published kernels rely on.  Stores to tensor memory complete in order too, at wait::st at the latest;
loads are carried out when issued.  Instructions that all active lanes issue with the same operands are issued once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.isa.bulk import multicast_addresses
from ptxemu.isa.engine import Value, thread, warp
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.machine import tensorcore as tc
from ptxemu.machine.descriptors import InvalidDescriptor, MmaDescriptor, SharedMatrix
from ptxemu.machine.lanes import LANES, bools, first
from ptxemu.machine.memory import RANK_SHIFT
from ptxemu.machine.signal import Wait
from ptxemu.machine.tmem import COLUMNS, QUARTER, Fragment, fragment, split

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

Bytes = npt.NDArray[np.uint8]

GROUP = "cta_group::1 cta_group::2"
COLLECTOR = "collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"


def _ctas(w: Warp, group: str) -> list[Cta]:
    """The CTAs that take part: the warp's own, or its pair, the even one first.

    Raises MemoryFault: the cluster has no peer CTA, or the kernel used the other cta_group before.
    """
    size = int(group[-1])
    used = w.cta.tmem.group = w.cta.tmem.group or size
    if used != size:
        raise MemoryFault(f"tcgen05 with .{group} after cta_group::{used}: a kernel may use one of them")
    if size == 1:
        return [w.cta]
    even = w.cta.rank & ~1
    if even + 1 >= len(w.cluster.ctas):
        raise MemoryFault(f"tcgen05 with .{group}: CTA {w.cta.rank} of the cluster has no peer")
    return w.cluster.ctas[even : even + 2]


def _units(w: Warp, group: str) -> list[tc.CtaUnits]:
    watch = w.grid.watch
    touches = [None if watch is None else functools.partial(watch.tensor, cta) for cta in _ctas(w, group)]
    return [tc.CtaUnits(_reader(w, cta), cta.tmem, touch) for cta, touch in zip(_ctas(w, group), touches, strict=True)]


def _reader(w: Warp, cta: Cta) -> tc.SharedReader:
    def read(address: int, size: int, granules: npt.NDArray[np.int64]) -> Bytes:
        start = cta.rank << RANK_SHIFT | address
        return w.shared.view(start, size, proxy="tensor", touched=(granules.reshape(-1), 0xFFFF))

    return read


def _stream(w: Warp, m: int) -> Hashable:
    """What a thread issues completes in order."""
    return ("tcgen05", w, first(m))


# Allocation


@warp(
    "tcgen05.alloc.group.sync.aligned{.space}.b32 [to], columns", {"columns": "u32"}, group=GROUP, space="shared::cta"
)
def alloc(w: Warp, m: int, to: Value, columns: Value, *, group: str, space: str | None) -> Generator[Wait, None, None]:
    """PTX 'tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit'.  Writes the address to shared memory;
    waits for room, and with cta_group::2 for the peer CTA."""
    ctas, memory = _ctas(w, group), w.cta.tmem
    what = f"tcgen05.alloc.{group} of {columns} columns"
    columns = _uniform(columns, m, "columns")
    memory.check_request(columns)
    if len(ctas) == 2:
        pair = ctas[0].tmem.pair
        yield pair.ask(w.cta.rank & 1, memory, "alloc", columns)
        address = pair.address
    else:
        while (place := memory.place(columns)) is None:
            yield Wait(memory, lambda: memory.place(columns) is not None, lambda: f"{what} (waits for room)")
        memory.take(address := place, columns)
    memory.lines[address] = w.line
    target, at = w.space(space or "", _uniform(to, m, "the destination"), m)
    if target is not w.shared or at >> RANK_SHIFT != w.cta.rank:
        raise MemoryFault(f"tcgen05.alloc writes to the CTA's own shared memory, not to {at:#x}")
    with target.uncounted():  # the allocator writes, not the warp
        target.store(at, [address], 4, m)


@warp("tcgen05.dealloc.group.sync.aligned.b32 address, columns", {"address": "u32", "columns": "u32"}, group=GROUP)
def dealloc(w: Warp, m: int, address: Value, columns: Value, *, group: str) -> Generator[Wait, None, None]:
    """PTX 'tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit'.  With cta_group::2 waits for the peer."""
    ctas, memory = _ctas(w, group), w.cta.tmem
    address, columns = _uniform(address, m, "the address"), _uniform(columns, m, "columns")
    if w.grid.watch is not None:
        w.grid.watch.tensor_freed(w, address, columns)
    if len(ctas) == 1:
        memory.release(address, columns)
        return
    yield ctas[0].tmem.pair.ask(w.cta.rank & 1, memory, "dealloc", columns, address)


@warp("tcgen05.relinquish_alloc_permit.group.sync.aligned", group=GROUP)
def relinquish_alloc_permit(w: Warp, m: int, *, group: str) -> None:
    """PTX 'tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit'.  No allocation of the CTA may follow."""
    _ctas(w, group)
    w.cta.tmem.relinquish()


def _uniform(value: Value, m: int, what: str) -> int:
    """The one value of all lanes."""
    if type(value) is int:
        return value
    found = int(value[first(m)])
    if len(set(value.tolist())) > 1 and not (value == found)[bools(m)].all():
        raise MemoryFault(f"the threads of a warp give different values of {what} to a tcgen05 instruction")
    return found


# Registers and tensor memory

NUM = "x1 x2 x4 x8 x16 x32 x64 x128"
SHAPES = "16x64b 16x128b 16x256b 32x32b"
Words = npt.NDArray[np.uint32]


def _block(w: Warp, m: int, address: Value, part: Fragment, write: bool, watched: bool = True) -> Words:
    """The block of tensor memory that a warp's load or store touches; it has to lie in the warp's quarter."""
    at = _uniform(address, m, "the address")
    lane, column = split(at)
    quarter = w.index % 4
    if lane // QUARTER != quarter or (lane + part.lanes - 1) // QUARTER != quarter:
        raise MemoryFault(
            f"tensor memory address {at:#x}: warp {w.index} reaches lanes {QUARTER * quarter} to "
            f"{QUARTER * quarter + QUARTER - 1}, not {lane} to {lane + part.lanes - 1}"
        )
    block = w.cta.tmem.block(at, part.lanes, part.columns)
    if watched and w.grid.watch is not None:
        cells = quarter * COLUMNS + column + part.used
        w.grid.watch.tensor(w.cta, cells, (1 << part.lanes // 2) - 1 << lane % QUARTER // 2, write)
    return block


def _nbytes(part: Fragment, packed: bool) -> int:
    """Bytes of tensor memory: a packed register is the halves of two words."""
    return 4 * LANES * part.registers * (2 if packed else 1)


def _load(w: Warp, m: int, address: Value, part: Fragment, packed: bool) -> Words:
    """(registers, 32)."""
    with w.queue.acts(w.loading()):
        block = _block(w, m, address, part, write=False)
    w.grid.counters.moved["tensor memory, tcgen05.ld"] += _nbytes(part, packed)
    if not packed:
        return part.load(block)
    low, high = part.load(block), part.load(block[:, 1:])
    return np.asarray((low & np.uint32(0xFFFF)) | high << np.uint32(16))


@warp("tcgen05.ld.sync.aligned.shape.num.b32 <r>, [address]", shape=SHAPES, num=NUM)
def load(w: Warp, m: int, address: Value, *, shape: str, num: str, parts: int) -> list[Value]:
    """PTX 'tcgen05.ld'.  Lanes and columns of the warp's quarter to the registers of its threads."""
    return list(_load(w, m, address, _fragment(shape, num, parts), False))


@warp("tcgen05.ld.sync.aligned.shape.x1.b32 r, [address]", shape="16x64b 32x32b")
def load_one(w: Warp, m: int, address: Value, *, shape: str) -> Value:
    """PTX 'tcgen05.ld'.  One register a thread."""
    return _load(w, m, address, fragment(shape, 1), False)[0]


@warp("tcgen05.ld.sync.aligned.32x32b.num.pack::16b.b32 <r>, [address]", num=NUM)
def load_packed(w: Warp, m: int, address: Value, *, num: str, parts: int) -> list[Value]:
    """PTX 'tcgen05.ld'.  With .pack::16b: the low halves of two adjacent columns to a register."""
    return list(_load(w, m, address, _fragment("32x32b", num, parts, halves=True), True))


@warp("tcgen05.ld.sync.aligned.16x32bx2.num.b32 <r>, [address], offset", num=NUM)
def load_split(w: Warp, m: int, address: Value, offset: Value, *, num: str, parts: int) -> list[Value]:
    """PTX 'tcgen05.ld'.  Threads 16 to 31 read the same lanes as 0 to 15, `offset` columns further."""
    return list(_load(w, m, address, _fragment("16x32bx2", num, parts, offset), False))


def _fragment(shape: str, num: str, parts: int, offset: int = 0, halves: bool = False) -> Fragment:
    part = fragment(shape, int(num[1:]), offset, halves)
    if part.registers != parts:
        raise MemoryFault(f"tcgen05 shape {shape}.{num} takes {part.registers} registers, not {parts}")
    return part


def _store(w: Warp, m: int, address: Value, values: Any, part: Fragment, packed: bool) -> None:
    table = np.empty((part.registers, LANES), np.uint32)
    for row, value in enumerate(values if isinstance(values, tuple | list) else [values]):
        table[row] = value
    at = _uniform(address, m, "the address")
    _block(w, m, at, part, write=True, watched=False)
    w.grid.counters.moved["tensor memory, tcgen05.st"] += _nbytes(part, packed)

    def write() -> None:
        block = _block(w, m, at, part, write=True)
        if packed:
            part.store(block, table & np.uint32(0xFFFF))
            part.store(block[:, 1:], table >> np.uint32(16))
        else:
            part.store(block, table)

    w.queue.submit(write, "tcgen05.st", stream=("tcgen05.st", w), agent=w.piped("tcgen05.st"))


@warp("tcgen05.st.sync.aligned.shape.num.b32 [address], <r>", shape=SHAPES, num=NUM)
def store(w: Warp, m: int, address: Value, r: Value, *, shape: str, num: str, parts: int) -> None:
    """PTX 'tcgen05.st'.  The inverse of tcgen05.ld."""
    _store(w, m, address, r, _fragment(shape, num, parts), False)


@warp("tcgen05.st.sync.aligned.shape.x1.b32 [address], r", {"r": "b32"}, shape="16x64b 32x32b")
def store_one(w: Warp, m: int, address: Value, r: Value, *, shape: str) -> None:
    """PTX 'tcgen05.st'.  One register a thread."""
    _store(w, m, address, r, fragment(shape, 1), False)


@warp("tcgen05.st.sync.aligned.32x32b.num.unpack::16b.b32 [address], <r>", num=NUM)
def store_unpacked(w: Warp, m: int, address: Value, r: Value, *, num: str, parts: int) -> None:
    """PTX 'tcgen05.st'.  With .unpack::16b: each half of a register to a column of its own."""
    _store(w, m, address, r, _fragment("32x32b", num, parts, halves=True), True)


@warp("tcgen05.st.sync.aligned.16x32bx2.num.b32 [address], offset, <r>", num=NUM)
def store_split(w: Warp, m: int, address: Value, offset: Value, r: Value, *, num: str, parts: int) -> None:
    """PTX 'tcgen05.st'.  Threads 16 to 31 write the same lanes as 0 to 15, `offset` columns further."""
    _store(w, m, address, r, _fragment("16x32bx2", num, parts, offset), False)


@warp("tcgen05.wait::ld.sync.aligned")
def wait_load(w: Warp, m: int) -> None:
    """PTX 'tcgen05.wait'.  Loads are carried out when issued: nothing is left to wait for."""
    if w.agent is not None:
        w.agent.waited_for("tcgen05.ld")


@warp("tcgen05.wait::st.sync.aligned")
def wait_store(w: Warp, m: int) -> Generator[Wait, None, None]:
    """PTX 'tcgen05.wait'.  Until the warp's stores to tensor memory are complete."""
    last = w.queue.last(("tcgen05.st", w))
    if last is not None:
        yield last.wait()
    if w.agent is not None:
        w.agent.waited_for("tcgen05.st")


# What a single thread issues


def _issue(w: Warp, m: int, action: Callable[[], None], what: str, *, ordered: bool = True) -> None:
    """ordered: the manual has it among the pairs that complete in order (PTX 'Pipelined tcgen05 Instructions')."""
    w.queue.submit(action, what, stream=_stream(w, m), agent=w.piped("tcgen05", m, ordered=ordered))


MULTICASTS = {"32x128b": ("warpx4",), "64x128b": ("warpx2::02_13", "warpx2::01_23")}


@thread(
    "tcgen05.cp.group.shape{.multicast} [address], matrix",
    {"matrix": "b64"},
    group=GROUP,
    shape="128x256b 128x128b 64x128b 32x128b",
    multicast="warpx4 warpx2::02_13 warpx2::01_23",
)
def copy(w: Warp, m: int, address: int, matrix: int, *, group: str, shape: str, multicast: str | None) -> None:
    """PTX 'tcgen05.cp'.  Rows from shared to tensor memory, in each CTA of the group from its own."""
    allowed = MULTICASTS.get(shape, (None,))
    if multicast not in allowed:
        raise InvalidDescriptor(f"tcgen05.cp.{shape} with multicast {multicast}: allowed are {allowed}")
    SharedMatrix.decode(matrix)
    units = _units(w, group)
    w.grid.counters.moved["tensor memory, tcgen05.cp"] += tc.copied_bytes(shape) * len(units)
    action = functools.partial(tc.copy, shape, multicast or "", units, address, matrix)
    _issue(w, m, action, f"tcgen05.cp.{shape}", ordered=False)


@thread("tcgen05.shift.group.down [address]", group=GROUP)
@thread("tcgen05.shift.down.group [address]", group=GROUP)
def shift(w: Warp, m: int, address: int, *, group: str) -> None:
    """PTX 'tcgen05.shift'.  32-byte elements of a quarter move down by one row, all but the last."""
    _issue(w, m, functools.partial(tc.shift_down, _units(w, group), address), "tcgen05.shift")


def _mma(w: Warp, m: int, kind: str, group: str, idesc: int, op: tc.Mma) -> None:
    units = _units(w, group)
    kind = kind.removeprefix("kind::")
    found = MmaDescriptor.decode(kind, idesc, int(group[-1]))
    if not op.a_in_tmem:
        SharedMatrix.decode(op.a)
    SharedMatrix.decode(op.b)
    w.grid.counters.mma(kind, found.m, found.n, found.k, op.accumulate)
    _issue(w, m, functools.partial(tc.multiply, found, units, op), f"tcgen05.mma.{kind}")


def _predicate(p: int, m: int) -> bool:
    return bool(p >> first(m) & 1)


PLAIN_KINDS = "kind::f16 kind::tf32 kind::f8f6f4"
PLAIN_TYPES = {"a": "b64", "b": "b64", "idesc": "u32", "disabled": "u32"}


@thread(
    "tcgen05.mma.group.kind{.collector} [d], a, b, idesc, <disabled>, p{, scale}",
    PLAIN_TYPES,
    group=GROUP,
    kind=PLAIN_KINDS,
    collector=COLLECTOR,
)
def mma(
    w: Warp,
    m: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    disabled: Value,
    p: int,
    scale: int | None = None,
    *,
    group: str,
    kind: str,
) -> None:
    """PTX 'tcgen05.mma'.  D = A B + D, or A B where p is false; lanes of the mask `disabled` are not written;
    D is first divided by 2^scale."""
    _mma(w, m, kind, group, idesc, _plain(m, d, a, b, p, disabled, scale, group, False))


@thread(
    "tcgen05.mma.group.kind{.collector} [d], a, b, idesc, p{, scale}",
    {"a": "b64", "b": "b64", "idesc": "u32"},
    group=GROUP,
    kind=PLAIN_KINDS,
    collector=COLLECTOR,
)
def mma_all_lanes(
    w: Warp, m: int, d: int, a: int, b: int, idesc: int, p: int, scale: int | None = None, *, group: str, kind: str
) -> None:
    """PTX 'tcgen05.mma'.  As above, with every lane written."""
    _mma(w, m, kind, group, idesc, _plain(m, d, a, b, p, (), scale, group, False))


@thread(
    "tcgen05.mma.group.kind{.collector} [d], [a], b, idesc, <disabled>, p{, scale}",
    {"b": "b64", "idesc": "u32", "disabled": "u32"},
    group=GROUP,
    kind=PLAIN_KINDS,
    collector=COLLECTOR,
)
def mma_a_in_tmem(
    w: Warp,
    m: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    disabled: Value,
    p: int,
    scale: int | None = None,
    *,
    group: str,
    kind: str,
) -> None:
    """PTX 'tcgen05.mma'.  With A in tensor memory."""
    _mma(w, m, kind, group, idesc, _plain(m, d, a, b, p, disabled, scale, group, True))


@thread(
    "tcgen05.mma.group.kind{.collector} [d], [a], b, idesc, p{, scale}",
    {"b": "b64", "idesc": "u32"},
    group=GROUP,
    kind=PLAIN_KINDS,
    collector=COLLECTOR,
)
def mma_a_in_tmem_all_lanes(
    w: Warp, m: int, d: int, a: int, b: int, idesc: int, p: int, scale: int | None = None, *, group: str, kind: str
) -> None:
    """PTX 'tcgen05.mma'.  With A in tensor memory and every lane written."""
    _mma(w, m, kind, group, idesc, _plain(m, d, a, b, p, (), scale, group, True))


def _plain(
    m: int, d: int, a: int, b: int, p: int, disabled: Any, scale: int | None, group: str, in_tmem: bool
) -> tc.Mma:
    words = 4 * int(group[-1])
    if disabled and len(disabled) != words:
        raise InvalidDescriptor(f"tcgen05.mma.{group}: {len(disabled)} words of disabled lanes, {words} are needed")
    if scale is not None and not 0 <= scale <= 15:
        raise InvalidDescriptor(f"tcgen05.mma: scale-input-d is {scale}, 0 to 15 are allowed")
    mask = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(disabled))
    return tc.Mma(d, a, b, _predicate(p, m), a_in_tmem=in_tmem, disabled=mask, scale_d=scale or 0)


SCALED_KINDS = "kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4"
SCALE_SIZES = "scale_vec::1X scale_vec::2X scale_vec::4X block16 block32"
# The k elements of a scale, by kind and by what the instruction says.
BLOCKS: dict[str, dict[str | None, int]] = {
    "kind::mxf8f6f4": {None: 32, "scale_vec::1X": 32, "block32": 32},
    "kind::mxf4": {None: 32, "scale_vec::2X": 32, "block32": 32},
    "kind::mxf4nvf4": {"scale_vec::2X": 32, "block32": 32, "scale_vec::4X": 16, "block16": 16},
}


@thread(
    "tcgen05.mma.group.kind.block_scale{.size}{.collector} [d], a, b, idesc, [scale_a], [scale_b], p",
    {"a": "b64", "b": "b64", "idesc": "u32"},
    group=GROUP,
    kind=SCALED_KINDS,
    size=SCALE_SIZES,
    collector=COLLECTOR,
)
def mma_scaled(
    w: Warp,
    m: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    scale_a: int,
    scale_b: int,
    p: int,
    *,
    group: str,
    kind: str,
    size: str | None,
) -> None:
    """PTX 'tcgen05.mma'.  D = (A scaleA) (B scaleB) + D, or without D where p is false."""
    _mma_scaled(w, m, tc.Mma(d, a, b, _predicate(p, m), False, scale_a, scale_b), idesc, group, kind, size)


@thread(
    "tcgen05.mma.group.kind.block_scale{.size}{.collector} [d], [a], b, idesc, [scale_a], [scale_b], p",
    {"b": "b64", "idesc": "u32"},
    group=GROUP,
    kind=SCALED_KINDS,
    size=SCALE_SIZES,
    collector=COLLECTOR,
)
def mma_scaled_a_in_tmem(
    w: Warp,
    m: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    scale_a: int,
    scale_b: int,
    p: int,
    *,
    group: str,
    kind: str,
    size: str | None,
) -> None:
    """PTX 'tcgen05.mma'.  Block-scaled, with A in tensor memory."""
    _mma_scaled(w, m, tc.Mma(d, a, b, _predicate(p, m), True, scale_a, scale_b), idesc, group, kind, size)


def _mma_scaled(w: Warp, m: int, op: tc.Mma, idesc: int, group: str, kind: str, size: str | None) -> None:
    block = BLOCKS[kind].get(size)
    if block is None:
        raise InvalidDescriptor(f"tcgen05.mma.{kind} with scale size {size}: allowed are {list(BLOCKS[kind])}")
    _mma(w, m, kind, group, idesc, replace(op, block=block))


@thread(
    "tcgen05.commit.group.mbarrier::arrive::one{.space}{.multicast::cluster}.b64 [bar]{, mask}",
    {"mask": "b16"},
    group=GROUP,
    space="shared::cluster",
)
def commit(w: Warp, m: int, bar: int, mask: int | None = None, *, group: str, space: str | None) -> None:
    """PTX 'tcgen05.commit'.  Arrives at the mbarrier, or at those of the CTAs of the mask, once everything that the
    thread issued before is complete; at once when nothing is under way."""
    _ctas(w, group)
    found, address = w.space(space or "", bar, m)
    if found is not w.shared:
        raise MemoryFault(f"tcgen05.commit: mbarrier address {bar:#x} is not in shared memory")
    barriers = [barrier_at(w, at, "shared::cluster") for at in multicast_addresses(w, address, mask)]
    agent = w.after_all("tcgen05", m)
    if w.queue.last(_stream(w, m)) is None:
        with w.queue.acts(agent):
            _arrive(barriers)
    else:
        action = functools.partial(_arrive, barriers)
        w.queue.submit(action, "tcgen05.commit", stream=_stream(w, m), agent=agent)


def _arrive(barriers: list[Mbarrier]) -> None:
    for barrier in barriers:
        barrier.arrive()


@warp("tcgen05.fence::before_thread_sync")
def fence_before(w: Warp, m: int) -> None:
    """PTX 'tcgen05.fence'.  Orders tcgen05 operations before a synchronisation of threads; values do not change."""
    if w.agent is not None:
        w.agent.before_thread_sync()


@warp("tcgen05.fence::after_thread_sync")
def fence_after(w: Warp, m: int) -> None:
    """PTX 'tcgen05.fence'.  Orders tcgen05 operations after a synchronisation of threads."""
    if w.agent is not None:
        w.agent.after_thread_sync()
