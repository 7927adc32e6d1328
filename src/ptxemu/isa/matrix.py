"""PTX 'Warp-level matrix load, store and transpose': ldmatrix, stmatrix, movmatrix.

A matrix has 8 rows of 8 elements of 16 bits.  Thread 4r + c holds elements 2c and 2c + 1 of row r in one register.
"""

from __future__ import annotations

import numpy as np

from ptxemu.isa.engine import Value, warp
from ptxemu.isa.lift import whole
from ptxemu.machine.lanes import LANES
from ptxemu.machine.warp import Warp

SHARED = "shared shared::cta"
NUM = "x1 x2 x4"


def _transposed(fragment: Value) -> Value:
    """The fragment of the transposed matrix."""
    return np.ascontiguousarray(fragment.view(np.uint16).reshape(8, 8).T).view(np.uint32).reshape(LANES)


def _rows(num: str) -> int:
    """The mask of the lanes that give a row's address: eight a matrix."""
    return (1 << 8 * int(num[1:])) - 1


@warp("ldmatrix.sync.aligned.m8n8.num{.trans}{.ss}.b16 <r>, [a]", "b32", num=NUM, ss=SHARED)
def ldmatrix(w: Warp, m: int, a: Value, *, num: str, trans: bool, ss: str | None) -> list[Value]:
    """PTX 'Warp-level matrix load instruction: ldmatrix'.  Lane 8i + r gives the address of row r of matrix i."""
    mask = _rows(num)
    space, address = w.space(ss or "", a, mask)
    words = np.empty((LANES, 4), np.uint32)
    for column, word in enumerate(space.load(address, 4, 4, mask)):
        words[:, column] = word
    fragments = [words[8 * i : 8 * i + 8].reshape(LANES) for i in range(int(num[1:]))]
    return [_transposed(f) for f in fragments] if trans else fragments


@warp("stmatrix.sync.aligned.m8n8.num{.trans}{.ss}.b16 [a], <r>", "b32", num=NUM, ss=SHARED)
def stmatrix(w: Warp, m: int, a: Value, r: tuple[Value, ...], *, num: str, trans: bool, ss: str | None) -> None:
    """PTX 'Warp-level matrix store instruction: stmatrix'.  Lane 8i + r gives the address of row r of matrix i."""
    mask = _rows(num)
    space, address = w.space(ss or "", a, mask)
    words = np.zeros((LANES, 4), np.uint32)
    for i, register in enumerate(r):
        fragment = np.full(LANES, register, np.uint32) if whole(register) else register
        words[8 * i : 8 * i + 8] = (_transposed(fragment) if trans else fragment).reshape(8, 4)
    space.store(address, list(np.ascontiguousarray(words.T)), 4, mask)


@warp("movmatrix.sync.aligned.m8n8.trans.b16 d, a", "b32")
def movmatrix(w: Warp, m: int, a: Value) -> Value:
    """PTX 'Warp-level matrix transpose instruction: movmatrix'."""
    return _transposed(np.full(LANES, a, np.uint32) if whole(a) else a)
