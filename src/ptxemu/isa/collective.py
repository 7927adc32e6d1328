"""PTX instructions by which the lanes of a warp exchange values: shfl, vote, match, redux, elect, activemask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.isa.engine import Value, warp
from ptxemu.isa.lift import whole
from ptxemu.isa.types import is_signed
from ptxemu.machine.lanes import FULL, LANES, bools, first, pack
from ptxemu.machine.warp import Warp

_LANE = np.arange(LANES)
SHFL = {"d": "b32", "a": "b32", "b": "b32", "c": "b32"}
MATCH = {"d": "b32", "a": "type"}


@warp("shfl.sync.mode.b32 d, a, b, c, membermask", SHFL, mode="up down bfly idx", converge="membermask")
def shfl(w: Warp, m: int, a: Value, b: Value, c: Value, membermask: Value, *, mode: str) -> Value:
    """PTX 'shfl.sync'.  d = a of another lane."""
    return _shfl(m, a, b, c, mode)[0]


@warp("shfl.sync.mode.b32 d|p, a, b, c, membermask", SHFL, mode="up down bfly idx", converge="membermask")
def shfl_inside(w: Warp, m: int, a: Value, b: Value, c: Value, membermask: Value, *, mode: str) -> tuple[Value, int]:
    """PTX 'shfl.sync'.  p: whether that lane is in the segment."""
    return _shfl(m, a, b, c, mode)


def _shfl(m: int, a: Value, b: Value, c: Value, mode: str) -> tuple[Value, int]:
    if mode == "idx" and whole(b, c) and not c >> 8 & 31:
        source = b & 31
        inside = source <= c & 31
        if whole(a):
            return a, FULL if inside else 0
        return (int(a[source]), FULL) if inside else (a, 0)
    b, c = (x if whole(x) else x.astype(np.int64) for x in (b, c))
    amount, segment, clamp = b & 31, c >> 8 & 31, c & 31
    low = _LANE & segment
    limit = low | (clamp & ~segment)
    source = {
        "up": _LANE - amount,
        "down": _LANE + amount,
        "bfly": _LANE ^ amount,
        "idx": low | (amount & ~segment),
    }[mode]
    inside = source >= limit if mode == "up" else source <= limit
    source = np.where(inside, source, _LANE)
    return (a if whole(a) else a[source]), pack(np.broadcast_to(inside, LANES))


@warp(
    "vote.sync.mode.pred d, a, membermask",
    {"d": "pred", "a": "pred"},
    mode="all any uni",
    converge="membermask",
)
def vote(w: Warp, m: int, a: int, membermask: Value, *, mode: str) -> int:
    """PTX 'vote.sync'."""
    holds = {"all": a & m == m, "any": a & m != 0, "uni": a & m in (0, m)}[mode]
    return FULL if holds else 0


@warp("vote.sync.ballot.b32 d, a, membermask", {"d": "b32", "a": "pred"}, converge="membermask")
def ballot(w: Warp, m: int, a: int, membermask: Value) -> int:
    """PTX 'vote.sync'.  The lanes whose predicate holds."""
    return a & m & w.members(membermask, m)


@warp("match.any.sync.type d, a, membermask", MATCH, type="b32 b64", converge="membermask")
def match_any(w: Warp, m: int, a: Value, membermask: Value) -> Value:
    """PTX 'match.sync'.  The lanes with the same value."""
    if whole(a):
        return m
    return np.array([pack(a == a[lane]) & m for lane in range(LANES)], np.uint32)


@warp("match.all.sync.type d|p, a, membermask", MATCH, type="b32 b64", converge="membermask")
def match_all(w: Warp, m: int, a: Value, membermask: Value) -> tuple[int, int]:
    """PTX 'match.sync'.  Whether all have the same value."""
    same = whole(a) or pack(a == a[first(m)]) & m == m
    return (m, FULL) if same else (0, 0)


@warp("activemask.b32 d", "b32")
def activemask(w: Warp, m: int) -> int:
    """PTX 'activemask'."""
    return m


@warp("elect.sync d|p, membermask", {"d": "b32"}, converge="membermask")
def elect(w: Warp, m: int, membermask: Value) -> tuple[int, int]:
    """PTX 'elect.sync'.  The lowest lane leads."""
    leader = first(m)
    return leader, (FULL if m == 1 << leader else 1 << leader)


_REDUCE: dict[str, Callable[[Any], Any]] = {
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
    "add": np.add.reduce,
    "min": np.min,
    "max": np.max,
}


@warp("redux.sync.op.type d, a, membermask", {"a": "type"}, op="add min max", type="u32 s32", converge="membermask")
@warp("redux.sync.op.type d, a, membermask", {"a": "type"}, op="and or xor", type="b32", converge="membermask")
def redux(w: Warp, m: int, a: Value, membermask: Value, *, op: str, type: str) -> int:
    """PTX 'redux.sync'."""
    values = _members(a, m).view(np.int32 if is_signed(type) else np.uint32)
    return int(_REDUCE[op](values)) & 0xFFFFFFFF


@warp("redux.sync.op{.abs}{.NaN}.f32 d, a, membermask", {"d": "f32", "a": "f32"}, op="min max", converge="membermask")
def redux_float(w: Warp, m: int, a: Value, membermask: Value, *, op: str, abs: bool, NaN: bool) -> int:
    """PTX 'redux.sync'."""
    values = _members(a, m).view(np.float32)
    values = np.abs(values) if abs else values
    if np.isnan(values).all() or (NaN and np.isnan(values).any()):
        return 0x7FFFFFFF
    found = (np.fmin if op == "min" else np.fmax).reduce(values)
    return int(np.float32(found).view(np.uint32))


def _members(a: Value, m: int) -> Value:
    """The values of the lanes of the mask."""
    if whole(a):
        return np.full(m.bit_count(), a, np.uint32)
    return a[bools(m)]
