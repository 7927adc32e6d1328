"""How a tile of a group is cut: what of the operands a CTA brings for it, and what the tensor core multiplies."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from blockscale.kernels.parts import group_order
from blockscale.kernels.parts.geometry import ATOM_ROWS, CTA_ROWS, TILE_K
from blockscale.kernels.parts.group_geometry import GroupGeometry
from blockscale.kernels.parts.group_operands import Run
from blockscale.kernels.parts.groups import Place


@dataclass(frozen=True)
class Work:
    """A tile: where it is, how many of its columns are multiplied, and how many of the result's these make; which part
    of k, of `split`. Parts have equally many k tiles, if need be some beyond k, where operands are zero."""

    place: Place
    width: Int32
    columns: Int32
    part: int | Int32
    split: int

    @property
    def k_tiles(self) -> Int32:
        """Of the part."""
        own = TILE_K * self.split
        return (self.place.k + (own - 1)) // own

    def k_tile(self, index: Int32) -> Int32:
        """The number in all of k of the part's `index`-th."""
        return index if self.split == 1 else self.part * self.k_tiles + index


@dataclass(frozen=True)
class Cut:
    """Of a kernel.

    Args:
        swap: the rows of tiles are weights, columns of the result, and their columns rows of a group.
        gated: each column of the result takes two weights, half of a matrix apart: two panels with `swap`, else the two
            halves of a tile's columns.
        granule: columns are multiplied by so many at a time.
    """

    geometry: GroupGeometry
    swap: bool
    gated: bool
    granule: int

    @property
    def halves(self) -> bool:
        """Whether the two halves of a tile's columns are for the same columns of the result."""
        return self.gated and not self.swap

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result, or of its transpose, that a tile is for."""
        rows, columns = self.geometry.tile
        return rows, columns // 2 if self.halves else columns

    def work(self, place: Place, part: int | Int32) -> Work:
        """What is to be done at `place` for a part of k."""
        columns = self.tile[1]
        left = (place.rows if self.swap else place.n) - place.column * columns
        own = group_order.width(left, columns, self.granule, cutlass.min)
        return Work(place, Int32(self.geometry.tile_n) if self.halves else own, own, part, self.geometry.split)

    def shares(self, work: Work) -> list[Int32]:
        """Of each part of the tile (`GroupGeometry.parts`) the columns that are multiplied."""
        parts = self.geometry.parts
        if len(parts) == 1:
            return [work.width]
        return [cutlass.max(cutlass.min(work.width - first, Int32(own)), Int32(0)) for first, own in parts]

    def shift(self, work: Work) -> Int32:
        """Rows of the columns' first atom of scales that lie before the tile."""
        return work.place.column * self.tile[1] % ATOM_ROWS

    def atoms(self, work: Work) -> Int32:
        """Atoms of rows that the tile's columns touch."""
        return (self.shift(work) + work.width + (ATOM_ROWS - 1)) // ATOM_ROWS

    def runs(self, work: Work, half: Any) -> tuple[list[Run], list[Run], list[Run], list[Run]]:
        """What a CTA, the first or second of a pair, brings of a, b, scales of a, scales of b."""
        g, place, n = self.geometry, work.place, work.place.n
        row, column = place.row * g.ctas + half, place.column * self.tile[1]
        if self.swap:
            panels = [Run(row * CTA_ROWS + p * n, place.matrix, 1, p) for p in range(g.panels)]
            scales = [Run(row + p * n // ATOM_ROWS, place.matrix, 1, p) for p in range(g.panels)]
            start, atom, matrix = place.first + column, place.atom + column // ATOM_ROWS, Int32(0)
        else:
            panels = [Run(place.first + row * CTA_ROWS, Int32(0), 1, 0)]
            scales = [Run(place.atom + row, Int32(0), 1, 0)]
            start, atom, matrix = column, column // ATOM_ROWS, place.matrix
        if self.halves:
            return (panels, self._halves(start, n, matrix, half), scales, self._atom_halves(atom, n, matrix))
        return panels, self._parts(work, start, matrix, half), scales, [Run(atom, matrix, self.atoms(work), 0)]

    def _parts(self, work: Work, start: Int32, matrix: Int32, half: Any) -> list[Run]:
        """A CTA of a pair has half of each part's columns."""
        g, runs = self.geometry, []
        for (first, _), share in zip(g.parts, self.shares(work), strict=True):
            own = share // g.ctas
            count = (own + (g.piece - 1)) // g.piece
            runs.append(Run(start + first + half * own, matrix, count, first // g.ctas // g.piece))
        return runs

    def _halves(self, start: Int32, n: Int32, matrix: Int32, half: Any) -> list[Run]:
        """Both halves of the columns' codes, or in a pair one in each CTA."""
        g = self.geometry
        count = self.tile[1] // g.piece
        if g.pair:
            return [Run(start + half * n, matrix, count, 0)]
        return [Run(start + p * n, matrix, count, p * count) for p in range(2)]

    def _atom_halves(self, atom: Int32, n: Int32, matrix: Int32) -> list[Run]:
        count = self.tile[1] // ATOM_ROWS
        return [Run(atom + p * n // ATOM_ROWS, matrix, count, p * count) for p in range(2)]
