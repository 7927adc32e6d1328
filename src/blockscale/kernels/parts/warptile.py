"""The sizes of an sm_120a tile: how warps share it, which rows and columns meet in which lane, what a stage takes.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.

The instruction multiplies 16 rows by 8 columns over k = 64. It takes a word of scales, four blocks of 16, of each row
from two lanes of every quad, the first or the last two, and of each column from one lane of every quad. Rows and
columns are dealt out in blocks of 16, two octets each; an atom of scales has, in 32 lines of 16 bytes, a word of four
spans of 32, the even blocks in the first 16 lines. docs/sm120.md derives the maps below from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blockscale.kernels.parts.geometry import ATOM_ROWS, STEP_K

BLOCK = 16  # rows of an instruction, and columns of two
OCTET = 8  # columns of an instruction
SPAN = 32  # rows whose scales lie in one word of an atom's lines
LINES = 32  # of an atom
MOST_BOX = 256  # rows that one copy brings (PTX: tensor maps)
LINE_BYTES = 16
SPANS = 4  # of an atom
GROUP_WARPS = 4
WARPS = 8  # that multiply: together, or as two groups in turn
TILE_ROWS = (64, 128, 256, 512)
TILE_COLUMNS = (8, 16, 32, 64, 128, 256)
TILE_K = (128, 256)  # elements of k in a stage: 64 or 128 bytes of codes a row, which is also the swizzle
MOST_SUMS = 128  # fp32 that a thread keeps
MOST_SUMS_BESIDE = 64  # beside which there are registers to spare
HEADER_BYTES = 1024  # barriers and answers, padded to the alignment of what follows
ALIGNMENT = 1024
SUM_BYTES = 4
SCALE_BYTES = 4  # of a word


@dataclass(frozen=True)
class Side:
    """The rows of a tile, or its columns: `size` of them, shared by `warps` warps.

    Several warps have the even or the odd blocks of neighbouring spans, a single one has both.

    whole: of four spans or more lanes load all four words of a line, not two. An instruction then has its scales always
    from the same lanes, which leaves the compiler more registers.
    """

    size: int
    warps: int
    whole: bool = False

    @property
    def octets(self) -> int:
        """Of a block."""
        return min(self.size, BLOCK) // OCTET

    @property
    def blocks(self) -> int:
        """Of a warp."""
        return max(1, self.size // BLOCK // self.warps)

    @property
    def parities(self) -> int:
        """Whether a warp has even and odd blocks."""
        return 2 if self.warps == 1 and self.size > BLOCK else 1

    @property
    def spans(self) -> int:
        """That a warp has blocks of."""
        return self.blocks // self.parities

    def start(self, warp: Any) -> Any:
        """The first of a warp's rows, in the tile."""
        return warp % 2 * BLOCK + warp // 2 * (self.spans * SPAN)

    def row(self, block: int) -> int:
        """The first row of the warp's block number `block`, from `start` on."""
        return block * (BLOCK if self.parities == 2 else SPAN)

    # Scales: each lane loads 8 bytes of a line, the words of two spans, for each parity and, of four spans or more, for
    # each atom; two lanes of a quad have one half of a line, two the other. Or all have the whole line.

    @property
    def atoms(self) -> int:
        """That a tile touches: narrow tiles lie within one."""
        return max(1, self.size // ATOM_ROWS)

    @property
    def lines(self) -> int:
        """Of each atom, that a stage has."""
        return min(self.size, LINES)

    @property
    def step_bytes(self) -> int:
        """Of an atom's scales in a stage, those of a step."""
        return self.lines * LINE_BYTES

    @property
    def words(self) -> int:
        """Of a line, that a lane loads: a tile of a single octet needs the first."""
        if self.size == OCTET:
            return 1
        return SPANS if self.whole and self.spans >= SPANS and self.parities == 1 else 2

    @property
    def loads(self) -> list[tuple[int, int]]:
        """(parity, atom) of each load of a warp, from its first ones on."""
        return [(parity, atom) for parity in range(self.parities) for atom in range(-(-self.spans // SPANS))]

    def first_span(self, warp: Any, tile: Any) -> Any:
        """That a warp of the `tile`-th tile has a block of, from the beginning of an atom."""
        within = tile % (ATOM_ROWS // self.size) * (self.size // SPAN) if SPAN <= self.size < ATOM_ROWS else 0
        return within + warp // 2 * self.spans

    def line(self, warp: Any, g: Any, t: Any) -> Any:
        """Of an atom, that lane 4g + t loads from in a warp's loads of parity 0.

        Where lanes load whole lines, lanes 2 and 3 load what nobody needs, from other banks.
        """
        line = (warp % 2 * BLOCK if self.warps > 1 else 0) + place(t % self.octets, g, self.octets)
        return line ^ t // 2 * (BLOCK | SPANS) if self.words == SPANS else line

    def half(self, t: Any, span: Any) -> Any:
        """Of a line, that lane t of a quad loads for a warp with this first span.

        Of four spans or more it takes both halves; of less the one that lanes 0 and 1 load, and again the other lanes
        load what nobody needs.
        """
        if self.words != 2:
            return 0
        return t // 2 if self.spans >= SPANS else t // 2 ^ span % SPANS // 2

    def word(self, block: int) -> tuple[int, int, int]:
        """(load, which of its words, which half of a quad's lanes) has the scales of a warp's block.

        A warp that has one of several spans has the word that `first_span` says instead.
        """
        parity, span = (block % 2, block // 2) if self.parities == 2 else (0, block)
        return parity * -(-self.spans // SPANS) + span // SPANS, span % self.words, span % SPANS // self.words


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

    @cached_property
    def warps(self) -> tuple[int, int]:
        """Of a group, along rows and along columns: those that together load the fewest rows and columns."""
        most = WARPS // self.groups
        across = [n for n in (1, 2, 4, 8) if n <= max(1, self.columns // BLOCK)]
        down = [m for m in (1, 2, 4, 8) if m <= self.rows // BLOCK]
        shapes = [(m, n) for m in down for n in across if m * n <= most]
        whole = max(m * n for m, n in shapes)
        fitting = [(m, n) for m, n in shapes if m * n == whole]
        return min(fitting, key=lambda w: (self.rows // w[0] + self.columns // w[1], w[0]))

    @cached_property
    def m(self) -> Side:
        return Side(self.rows, self.warps[0], whole=self.sums > MOST_SUMS_BESIDE)

    @cached_property
    def n(self) -> Side:
        return Side(self.columns, self.warps[1])

    @property
    def group_warps(self) -> int:
        return self.warps[0] * self.warps[1]

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.groups * self.group_warps

    @property
    def sums(self) -> int:
        """fp32 that a thread keeps."""
        return self.rows * self.columns // (32 * self.group_warps)

    def first_sum(self, x: int, y: int, octet: int) -> int:
        """The place among a thread's sums of the four of block x of rows by an octet of block y of columns."""
        return 4 * ((x * self.n.blocks + y) * self.n.octets + octet)

    # Bytes of a stage, and boxes that it comes in.

    @property
    def a_boxes(self) -> int:
        """Of codes of a."""
        return -(-self.rows // MOST_BOX)

    @property
    def b_boxes(self) -> int:
        return -(-self.columns // MOST_BOX)

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
    def sfa_bytes(self) -> int:
        return self.steps * self.m.step_bytes * self.m.atoms

    @property
    def sfb_bytes(self) -> int:
        return self.steps * self.n.step_bytes * self.n.atoms

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.sfa_bytes + self.sfb_bytes

    @property
    def step_bytes_read(self) -> int:
        """Bytes of shared memory that a warp reads for a step: codes, and each lane's words of scales."""
        rows, columns = self.rows // self.warps[0], self.columns // self.warps[1]
        words = sum(side.words * len(side.loads) for side in (self.m, self.n))
        return (rows + columns) * STEP_K // 2 + 32 * SCALE_BYTES * words

    @property
    def parts_bytes(self) -> int:
        """For the sums that CTAs add, of a block of rows of each warp at a time."""
        vectors = self.n.blocks * self.n.octets * self.group_warps * 32
        return vectors * 4 * SUM_BYTES if self.split > 1 else 0

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
    """The row or column of a block of 8 x `octets` that is number `c` of 8 of an instruction's `octet`.

    Lane 4g + t has sums of columns 2t and 2t + 1 of each instruction. By this map those of both octets lie side by
    side, 2 x octets of them from 2 x octets x t on. And the 8 of an octet are 8 different ones modulo 8, as are the
    first four of both octets and the last four: neither codes nor scales are loaded with bank conflicts.
    """
    pair = c // 2
    return 2 * octets * pair + 2 * (octet ^ turn(pair, octets)) + c % 2


def turn(t: Any, octets: int) -> Any:
    """In lane t of a quad, octet o has pair o ^ turn of the lane's 2 x octets columns."""
    return t * octets // 4
