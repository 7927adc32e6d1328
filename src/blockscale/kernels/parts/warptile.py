"""The sizes of an sm_120a tile: how warps share it, which rows and columns meet in which lane, what a stage takes.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.

The instruction multiplies 16 rows by 8 columns over k = 64. It takes a word of scales, four blocks of 16, of each row
from two lanes of every quad, the first or the last two, and of each column from one lane of every quad. Spans of 32
rows or columns are octets of 8: a block of 16 rows is two of them. docs/sm120.md derives the maps below from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, STEP_K

ROWS = 16  # of an instruction
COLUMNS = 8
SPAN = 32  # columns whose scales lie in one word of an atom's rows: a warp takes so many at a time
GROUP_WARPS = 4
WARPS = 8  # that multiply: together, or as two groups in turn
TILE_ROWS = (64, 128)
TILE_COLUMNS = (8, 16, 32, 64, 128, 256)
TILE_K = (128, 256)  # elements of k in a stage: 64 or 128 bytes of codes a row, which is also the swizzle
MOST_SUMS = 128  # fp32 that a thread keeps
HEADER_BYTES = 1024  # barriers and answers, padded to the alignment of what follows
ALIGNMENT = 1024
SUM_BYTES = 4


@dataclass(frozen=True)
class WarpTile:
    """A tile of rows x columns outputs. Nothing is checked here: whether it can be built is for `supports` to say.

    Args:
        tile: (rows, columns) of a CTA; one of `TILE_ROWS`, and of `TILE_COLUMNS`.
        stages: slots of the ring of operands in shared memory; None means as many as fit.
        groups: 1: all warps share a tile. 2: two groups of four warps have a tile each and multiply in turn.
        tile_k: elements of k in a stage, one of `TILE_K`.
        smem: bytes of dynamic shared memory that a CTA may have.
        split: CTAs of a cluster that share a tile, each with a part of k.
    """

    tile: tuple[int, int]
    stages: int | None
    groups: int
    tile_k: int
    smem: int
    split: int = 1

    @property
    def rows(self) -> int:
        return self.tile[0]

    @property
    def columns(self) -> int:
        return self.tile[1]

    # How the warps of a group share a tile.

    @property
    def warps(self) -> tuple[int, int]:
        """Of a group, along rows and along columns: those that together load the fewest rows and columns."""
        most = WARPS // self.groups
        across = [n for n in (1, 2, 4, 8) if n <= max(1, self.columns // SPAN)]
        down = [m for m in (1, 2, 4, 8) if m <= self.rows // ROWS]
        shapes = [(m, n) for m in down for n in across if m * n <= most]
        whole = max(m * n for m, n in shapes)
        fitting = [(m, n) for m, n in shapes if m * n == whole]
        return min(fitting, key=lambda w: (self.rows // w[0] + self.columns // w[1], w[0]))

    @property
    def group_warps(self) -> int:
        return self.warps[0] * self.warps[1]

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.groups * self.group_warps

    @property
    def row_blocks(self) -> int:
        """Blocks of 16 rows of a warp: of warp row u those with number u, u + warps[0], ...; two are a span."""
        return self.rows // ROWS // self.warps[0]

    @property
    def spans(self) -> int:
        """Spans of columns of a warp: of warp column v those with number v, v + warps[1], ..."""
        return max(1, self.columns // SPAN // self.warps[1])

    @property
    def per_span(self) -> int:
        """Instructions side by side in a span."""
        return min(self.columns, SPAN) // COLUMNS

    @property
    def sums(self) -> int:
        """fp32 that a thread keeps."""
        return 4 * self.row_blocks * self.spans * self.per_span

    def first_sum(self, x: int, y: int, j: int) -> int:
        """The place among a thread's sums of the four of instruction `j` of block x of rows and span y."""
        return 4 * ((x * self.spans + y) * self.per_span + j)

    # Bytes of a stage.

    @property
    def steps(self) -> int:
        """Instructions along k in a stage."""
        return self.tile_k // STEP_K

    @property
    def code_bytes(self) -> int:
        """Of a row."""
        return self.tile_k // 2

    @property
    def a_bytes(self) -> int:
        return self.rows * self.code_bytes

    @property
    def b_bytes(self) -> int:
        return self.columns * self.code_bytes

    @property
    def atoms_n(self) -> int:
        """Scale atoms of B that a tile touches: narrow tiles lie within one."""
        return max(1, self.columns // ATOM_ROWS)

    @property
    def sfa_bytes(self) -> int:
        return self.steps * ATOM_BYTES

    @property
    def sfb_bytes(self) -> int:
        return self.steps * ATOM_BYTES * self.atoms_n

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.sfa_bytes + self.sfb_bytes

    @property
    def step_bytes_read(self) -> int:
        """Bytes of shared memory that a warp reads for a step: codes, and atoms of which it needs a part."""
        rows, columns = self.rows // self.warps[0], self.columns // self.warps[1]
        return (rows + columns) * STEP_K // 2 + 2 * ATOM_BYTES

    @property
    def parts_bytes(self) -> int:
        """For the sums of a tile that other CTAs add."""
        return self.rows * self.columns * SUM_BYTES if self.split > 1 else 0

    @property
    def most_stages(self) -> int:
        """As many as fit; less than 1 where not even one does."""
        return (self.smem - HEADER_BYTES - self.parts_bytes) // self.stage_bytes

    @property
    def slots(self) -> int:
        return self.most_stages if self.stages is None else self.stages

    @property
    def smem_bytes(self) -> int:
        used = HEADER_BYTES + self.parts_bytes + self.slots * self.stage_bytes
        return -(-used // ALIGNMENT) * ALIGNMENT


# Which lane has what, for lanes 4g + t.


def place(octet: Any, c: Any, octets: int) -> Any:
    """The row or column, of 8 x `octets` of a span, that is number `c` of 8 of an instruction's `octet`.

    Lane 4g + t has sums of columns 2t and 2t + 1 of each instruction. By this map those of all instructions of a span
    lie side by side, 2 x octets of them from 2 x octets x t on. And the 8 of an octet are 8 different ones modulo 8, as
    are the four octets' numbers 2i and 2i + 1: neither codes nor scales are loaded with bank conflicts.
    """
    pair = c // 2
    return 2 * octets * pair + 2 * (octet ^ turn(pair, octets)) + c % 2


def turn(t: Any, octets: int) -> Any:
    """In lane t of a quad, instruction j has pair j ^ turn of the lane's 2 x octets columns."""
    return t * octets // 4


def scale_place(octet: Any, g: Any, octets: int) -> Any:
    """The row of an atom of scales that lane 4g + octet loads: 16 bytes, of that row and those 32, 64 and 96 on.

    Where a span has fewer than four octets, the other lanes load what nobody needs, from other banks.
    """
    beside = octet // octets
    return 8 * octets * beside + (place(octet % octets, g, octets) ^ (2 * octets * beside))
