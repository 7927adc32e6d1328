"""PTX 'st.async' and 'red.async': words for the shared memory of another CTA, which an mbarrier there counts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ptxemu.errors import MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.isa.memory import combine
from ptxemu.isa.operands import each
from ptxemu.isa.types import bits_of
from ptxemu.machine.lanes import first
from ptxemu.machine.memory import RANK_SHIFT, strength

if TYPE_CHECKING:
    from collections.abc import Callable

    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

RELAXED = strength("relaxed", "cluster")

ST_ASYNC = "st.async{.order}{.ss}.mbarrier::complete_tx::bytes"
STORES = {
    "order": "weak cluster",
    "ss": "shared::cluster",
    "type": "b32 b64 b128 u32 u64 s32 s64 f32 f64",
}


@warp(f"{ST_ASYNC}.vec.type [a], <b>, [mbar]", vec="v2 v4", **STORES)
@warp(f"{ST_ASYNC}.type [a], b, [mbar]", **STORES)
def st_async(w: Warp, m: int, a: Value, b: Value, mbar: Value, *, ss: str | None, vec: str = "", type: str) -> None:
    """PTX 'st.async'.  Each thread's words, at a later time, and their bytes to the mbarrier of the same CTA."""
    values: list[Any] = list(b) if vec else [b]
    if type == "b128":
        values = [half for pair in values for half in pair]
    width = 8 if type == "b128" else bits_of(type) // 8
    address = w.space(ss or "", a, m)[1]

    def store(mask: int) -> None:
        with w.shared.uncounted():  # no wavefronts of this warp
            w.shared.store(address, values, width, mask, RELAXED)

    _submit(w, m, a, mbar, ss, width * len(values), store, "st.async")


@warp(
    "red.async.relaxed.cluster{.ss}.mbarrier::complete_tx::bytes.op.type [a], b, [mbar]",
    ss="shared::cluster",
    op="inc dec min max and or xor add",
    type="b32 u32 s32 u64",
)
def red_async(w: Warp, m: int, a: Value, b: Value, mbar: Value, *, ss: str | None, op: str, type: str) -> None:
    """PTX 'red.async'.  Combines each thread's word into memory, atomically, at a later time."""
    width = bits_of(type) // 8
    address = w.space(ss or "", a, m)[1]

    def reduce(mask: int) -> None:
        def change(lane: int, old: int) -> int:
            return combine(op, type, old, w.lane(b, lane)) & (1 << 8 * width) - 1

        with w.shared.uncounted():
            w.shared.update(address, width, mask, change, RELAXED)

    _submit(w, m, a, mbar, ss, width, reduce, "red.async")


def _submit(
    w: Warp, m: int, a: Value, mbar: Value, ss: str | None, nbytes: int, move: Callable[[int], None], what: str
) -> None:
    """One operation for each mbarrier that lanes name: `move` of these lanes, then their bytes."""
    lanes: dict[Mbarrier, int] = {}
    for group, to, signal in each(w, m, a, mbar):
        barrier = barrier_at(w, signal, ss)
        if w.space(ss or "", to, 1 << first(group))[1] >> RANK_SHIFT != (signal & 0xFFFFFFFF) >> RANK_SHIFT:
            raise MemoryFault(f"{what} to {to:#x} with the mbarrier at {signal:#x} of another CTA")
        lanes[barrier] = lanes.get(barrier, 0) | group
    w.grid.counters.moved["remote store"] += nbytes * m.bit_count()

    def finish(barrier: Mbarrier, mask: int) -> None:
        move(mask)
        barrier.complete_tx(nbytes * mask.bit_count(), async_proxy=False)

    for barrier, mask in lanes.items():
        w.queue.submit(functools.partial(finish, barrier, mask), what, agent=w.copying(barrier))
