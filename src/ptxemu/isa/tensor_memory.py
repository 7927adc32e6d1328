"""PTX 9.7.16.7-9 'Tensor Memory Allocation', 'Load/Store Instructions': a warp's part of tensor memory, and the fences.

Stores to tensor memory complete in order, at wait::st at the latest; loads are carried out when issued.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.machine.lanes import LANES, bools, first
from ptxemu.machine.memory import RANK_SHIFT
from ptxemu.machine.signal import Wait
from ptxemu.machine.tmem import QUARTER, Fragment, fragment, split

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.warp import Warp

__all__ = ["GROUP", "participants"]

GROUP = "cta_group::1 cta_group::2"


def participants(w: Warp, group: str) -> list[Cta]:
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


# Allocation


@warp(
    "tcgen05.alloc.group.sync.aligned{.space}.b32 [to], columns", {"columns": "u32"}, group=GROUP, space="shared::cta"
)
def alloc(w: Warp, m: int, to: Value, columns: Value, *, group: str, space: str | None) -> Generator[Wait, None, None]:
    """PTX 'tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit'.  Writes the address to shared memory;
    waits for room, and with cta_group::2 for the peer CTA."""
    ctas, memory = participants(w, group), w.cta.tmem
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
    ctas, memory = participants(w, group), w.cta.tmem
    address, columns = _uniform(address, m, "the address"), _uniform(columns, m, "columns")
    if w.grid.watch is not None and memory.allocations.get(address) == columns:
        w.grid.watch.tensor_freed(w, address, columns)
    if len(ctas) == 1:
        memory.release(address, columns)
        return
    yield ctas[0].tmem.pair.ask(w.cta.rank & 1, memory, "dealloc", columns, address)


@warp("tcgen05.relinquish_alloc_permit.group.sync.aligned", group=GROUP)
def relinquish_alloc_permit(w: Warp, m: int, *, group: str) -> None:
    """PTX 'tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit'.  No allocation of the CTA may follow."""
    participants(w, group)
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


def _block(w: Warp, m: int, address: Value, part: Fragment, write: bool) -> Words:
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
    if w.grid.watch is not None:
        cells = quarter, column + part.used
        w.grid.watch.tensor(w.cta, cells, (1 << part.lanes // 2) - 1 << lane % QUARTER // 2, write, not write)
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
    with w.queue.acts(w.piped("tcgen05.st")):  # a watcher takes it as written from now on
        _block(w, m, at, part, write=True)
    w.grid.counters.moved["tensor memory, tcgen05.st"] += _nbytes(part, packed)

    def write() -> None:
        block = _block(w, m, at, part, write=True)
        if packed:
            part.store(block, table & np.uint32(0xFFFF))
            part.store(block[:, 1:], table >> np.uint32(16))
        else:
            part.store(block, table)

    w.queue.submit(write, "tcgen05.st", stream=("tcgen05.st", w))


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
