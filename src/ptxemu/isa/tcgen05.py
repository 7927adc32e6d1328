"""PTX 9.7.16 'TensorCore 5th Generation Family Instructions': MMAs, copies to tensor memory and their completion.

Order: what one thread issues (mma, cp, commit) completes first in, first out, which is a little more than the manual
promises and what published kernels rely on.  Instructions that all active lanes issue with the same operands are issued
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.isa.bulk import multicast_addresses
from ptxemu.isa.engine import Value, thread
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.isa.tensor_memory import GROUP, participants
from ptxemu.machine import tensorcore as tc
from ptxemu.machine.descriptors import InvalidDescriptor, MmaDescriptor, SharedMatrix
from ptxemu.machine.lanes import first
from ptxemu.machine.memory import RANK_SHIFT

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

Bytes = npt.NDArray[np.uint8]

COLLECTOR = "collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"


def _units(w: Warp, group: str) -> list[tc.CtaUnits]:
    watch = w.grid.watch
    touches = [None if watch is None else functools.partial(watch.tensor, cta) for cta in participants(w, group)]
    return [
        tc.CtaUnits(_reader(w, cta), cta.tmem, touch)
        for cta, touch in zip(participants(w, group), touches, strict=True)
    ]


def _reader(w: Warp, cta: Cta) -> tc.SharedReader:
    def read(address: int, size: int, granules: npt.NDArray[np.int64]) -> Bytes:
        start = cta.rank << RANK_SHIFT | address
        return w.shared.view(start, size, proxy="tensor", touched=(granules.reshape(-1), 0xFFFF))

    return read


def _stream(w: Warp, m: int) -> Hashable:
    """What a thread issues completes in order."""
    return ("tcgen05", w, first(m))


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
    if found.k == 96 and "K = 96" not in w.grid.chip.has:
        raise InvalidDescriptor(
            f"instruction descriptor {idesc:#010x}: K = 96 is on sm_103a only, not {w.grid.chip.name}"
        )
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
    participants(w, group)
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
