"""Which output tiles a CTA computes, and in which order."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch of matrices, numbered along `raster` ("m" or "n") first; CTA i takes i, i + CTAs, ...

    With as many CTAs as tiles each computes one; with fewer, a CTA goes on to its next tile without starting anew.
    """

    m: Int32
    n: Int32
    batch: Int32
    raster: str

    @property
    def count(self) -> Int32:
        return self.m * self.n * self.batch

    def first(self) -> Int32:
        return cute.arch.block_idx()[0]

    def has(self, tile: Int32) -> Boolean:
        return tile < self.count

    def after(self, tile: Int32) -> Int32:
        return tile + cute.arch.grid_dim()[0]

    def at(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """(row of tiles, column of tiles, matrix)"""
        inner, outer = (self.m, self.n) if self.raster == "m" else (self.n, self.m)
        line, x = tile // inner, tile % inner
        matrix, y = line // outer, line % outer
        return (x, y, matrix) if cutlass.const_expr(self.raster == "m") else (y, x, matrix)
