"""Which output tiles a CTA computes, and in which order."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

RASTERS = ("m", "n")


@dataclass(frozen=True)
class Tiles:
    """All tiles of a batch of matrices, numbered along `raster` first; CTA i takes tiles i, i + CTAs, i + 2 CTAs, ...

    With as many CTAs as tiles each computes one; with fewer, CTAs go on to another tile without a new launch.
    """

    m: Int32
    n: Int32
    batch: Int32
    raster: str

    @property
    def count(self):
        return self.m * self.n * self.batch

    def first(self):
        return cute.arch.block_idx()[0]

    def has(self, tile):
        return tile < self.count

    def after(self, tile):
        return tile + cute.arch.grid_dim()[0]

    def at(self, tile):
        """(row of tiles, column of tiles, matrix)"""
        inner, outer = (self.m, self.n) if self.raster == "m" else (self.n, self.m)
        line, x = tile // inner, tile % inner
        matrix, y = line // outer, line % outer
        return (x, y, matrix) if cutlass.const_expr(self.raster == "m") else (y, x, matrix)
