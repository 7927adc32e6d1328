"""PTX 'Warp-level matrix load, store and transpose': ldmatrix, stmatrix, movmatrix.

A matrix has 8 rows of 8 elements of 16 bits.  Thread 4r + c holds elements 2c and 2c + 1 of row r in one register.  Of
8-bit elements a row has 16, a register four; a matrix of 16 rows takes two registers, or is stored from one as 16 x 8
transposed.  The manual has the latter two in figures alone: they are as CUTLASS's copy traits give them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ptxemu.isa.engine import Modifiers, Value, warp
from ptxemu.isa.lift import whole
from ptxemu.machine.lanes import LANES
from ptxemu.machine.warp import Warp

SHARED = "shared shared::cta"
NUM = "x1 x2 x4"


def _transposed(fragment: Value) -> Value:
    """The fragment of the transposed matrix."""
    return np.ascontiguousarray(fragment.view(np.uint16).reshape(8, 8).T).view(np.uint32).reshape(LANES)


def _load(w: Warp, ss: str | None, a: Value, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """Rows of 16 bytes, one at the address of each of the first lanes: (rows, 4)."""
    mask = (1 << rows) - 1
    space, address = w.space(ss or "", a, mask)
    words = np.empty((LANES, 4), np.uint32)
    for column, word in enumerate(space.load(address, 4, 4, mask)):
        words[:, column] = word
    return words[:rows]


def _store(w: Warp, ss: str | None, a: Value, words: np.ndarray[tuple[int, int], np.dtype[np.uint32]]) -> None:
    """The reverse of `_load`."""
    rows = len(words)
    mask = (1 << rows) - 1
    space, address = w.space(ss or "", a, mask)
    padded = np.zeros((4, LANES), np.uint32)
    padded[:, :rows] = words.T
    space.store(address, list(padded), 4, mask)


def _whole(register: Value) -> Value:
    return np.full(LANES, register, np.uint32) if whole(register) else register


@warp("ldmatrix.sync.aligned.m8n8.num{.trans}{.ss}.b16 <r>, [a]", "b32", num=NUM, ss=SHARED)
def ldmatrix(w: Warp, m: int, a: Value, *, num: str, trans: bool, ss: str | None) -> list[Value]:
    """PTX 'Warp-level matrix load instruction: ldmatrix'.  Lane 8i + r gives the address of row r of matrix i."""
    fragments = list(_load(w, ss, a, 8 * int(num[1:])).reshape(-1, LANES))
    return [_transposed(f) for f in fragments] if trans else fragments


@warp("stmatrix.sync.aligned.m8n8.num{.trans}{.ss}.b16 [a], <r>", "b32", num=NUM, ss=SHARED)
def stmatrix(w: Warp, m: int, a: Value, r: tuple[Value, ...], *, num: str, trans: bool, ss: str | None) -> None:
    """PTX 'Warp-level matrix store instruction: stmatrix'.  Lane 8i + r gives the address of row r of matrix i."""
    fragments = [_transposed(_whole(f)) if trans else _whole(f) for f in r]
    _store(w, ss, a, np.concatenate(fragments).reshape(-1, 4))


SOURCES = {"b4x16_p64": 4, "b6x16_p32": 6}  # bits of an element; the rest of the row's 16 bytes is padding


def _expanded(rows: Value, source: str) -> Value:
    """Rows of 16 packed elements, the first in the lowest bits, with each in the low bits of a byte: (rows, 16)."""
    bits = SOURCES[source]
    packed = np.ascontiguousarray(rows).view(np.uint8)[:, : 2 * bits]
    each = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(rows), 16, bits)
    return np.packbits(each, axis=2, bitorder="little").reshape(len(rows), 16)


def _count_8(modifiers: Modifiers) -> Mapping[str, int]:
    """The registers of matrices of 8 x 16 bytes: one each."""
    return {"r": int(str(modifiers["num"])[1:])}


def _count_16(modifiers: Modifiers) -> Mapping[str, int]:
    """The registers of matrices of 16 x 16 bytes: two each."""
    return {"r": 2 * int(str(modifiers["num"])[1:])}


@warp(
    "ldmatrix.sync.aligned.m8n16.num{.ss}.b8x16.source <r>, [a]",
    "b32",
    _count_8,
    num=NUM,
    ss=SHARED,
    source=" ".join(SOURCES),
)
def ldmatrix_expanding(w: Warp, m: int, a: Value, *, num: str, ss: str | None, source: str) -> list[Value]:
    """PTX 'Warp-level matrix load instruction: ldmatrix'.  4- or 6-bit elements, each to the low bits of a byte."""
    expanded = _expanded(_load(w, ss, a, 8 * int(num[1:])), source)
    return list(expanded.view(np.uint32).reshape(-1, LANES))


@warp("ldmatrix.sync.aligned.m16n16.num.trans{.ss}.b8 <r>, [a]", "b32", _count_16, num="x1 x2", ss=SHARED)
def ldmatrix_bytes(w: Warp, m: int, a: Value, *, num: str, ss: str | None) -> list[Value]:
    """PTX 'Warp-level matrix load instruction: ldmatrix'.  Lane 16i + r gives the address of row r of matrix i."""
    return _by_columns(_load(w, ss, a, 16 * int(num[1:])).view(np.uint8))


@warp(
    "ldmatrix.sync.aligned.m16n16.num.trans{.ss}.b8x16.source <r>, [a]",
    "b32",
    _count_16,
    num="x1 x2",
    ss=SHARED,
    source=" ".join(SOURCES),
)
def ldmatrix_bytes_expanding(w: Warp, m: int, a: Value, *, num: str, ss: str | None, source: str) -> list[Value]:
    """PTX 'Warp-level matrix load instruction: ldmatrix'.  As above, of 4- or 6-bit elements."""
    return _by_columns(_expanded(_load(w, ss, a, 16 * int(num[1:])), source))


def _by_columns(rows: Value) -> list[Value]:
    """Matrices (16 each, 16) of bytes, transposed: lane 4g + t gets rows g and g + 8, columns 4t to 4t + 3."""
    transposed = np.ascontiguousarray(rows.reshape(-1, 16, 16).transpose(0, 2, 1))
    return list(transposed.view(np.uint32).reshape(-1, LANES))


@warp("stmatrix.sync.aligned.m16n8.num.trans{.ss}.b8 [a], <r>", "b32", _count_8, num=NUM, ss=SHARED)
def stmatrix_bytes(w: Warp, m: int, a: Value, r: tuple[Value, ...], *, num: str, ss: str | None) -> None:
    """PTX 'Warp-level matrix store instruction: stmatrix'.  16 x 8 bytes a register, transposed: lane 4g + t holds rows
    g and g + 8 of columns 2t and 2t + 1, and lane 8i + c gives the address of column c of matrix i."""
    words = np.concatenate([_whole(f) for f in r])
    halves = words.view(np.uint8).reshape(-1, 8, 4, 2, 2)  # matrix, g, t, upper or lower rows, column
    _store(w, ss, a, np.ascontiguousarray(halves.transpose(0, 2, 4, 3, 1)).reshape(-1, 16).view(np.uint32))


@warp("movmatrix.sync.aligned.m8n8.trans.b16 d, a", "b32")
def movmatrix(w: Warp, m: int, a: Value) -> Value:
    """PTX 'Warp-level matrix transpose instruction: movmatrix'."""
    return _transposed(_whole(a))
