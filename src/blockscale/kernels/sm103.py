"""NVFP4 GEMM for sm_103a with K = 96 instructions; what differs from the sm_100a kernel, whose docstring comes first.

sm_103a's tensor core does 1.5 times the products of sm_100a's, by instructions that take k = 96 instead of 64 in the
same time. 96 elements, 48 bytes, do not divide the 128 bytes of a swizzled row, nor six blocks of scales an atom of
four. All of it repeats after k = 768, of which eight instructions make use as follows:

    codes         slot 0 (k 0-255)            slot 1 (256-511)            slot 2 (512-767)
    instruction   0       1       2              3       4       5              6       7
    scales        slot 0 (0-191)     slot 1 (192-383)     slot 2 (384-575)     slot 3 (576-767)

Instructions 2 and 5 begin in one slot of codes and end in the next, whose address is in their descriptors. So slots of
codes keep their 256 k, slots of scales have 192 k, and each kind has a ring of its own:

    role      warps  does
    load      5      brings codes of a and b
    scales    6      brings scales of a and b
    schedule  7      as in the sm_100a kernel

    ring      slots         full                                       empty
    ab        stages        1 arrival (load) and the bytes of codes    1 commit (mma): its codes have been read
    sf        scale stages  1 arrival (scales) and those of scales     1 commit (mma): its scales have been used

For 256 x 256 and results that leave from registers there are 6 slots of codes, k = 1536, and 7 of scales, k = 1344.

The rest of k, less than 768, is multiplied by as many of the eight instructions as it takes, and copied by as many
boxes: ceil(k / 96), ceil(k / 256) of codes and ceil(k / 192) of scales. What a last instruction takes beyond k is zero,
since TMA fills boxes with zeros outside of a tensor; where it ends in a slot that was not loaded, its rows go on in the
slot that they begin in, with codes that are finite, and scales of zero. Operands in memory need no padding for it.

In a cluster, CTAs that need the same scales take turns: one fetches a whole slot for all of them. Codes are cut.

Tensor memory: a set of scale columns is 12 columns of a and 12 or 24 of b (PTX: tcgen05, scale factors of K = 96). Two
accumulators of 256 columns and two sets share 72 columns.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import cutlass
from cutlass import Int32, Int64, cute

from blockscale.kernels.parts import tensorcore, tma
from blockscale.kernels.parts.geometry import CTA_ROWS, STEP_K, TILE_K
from blockscale.kernels.parts.geometry96 import (
    CODE_SLOTS,
    SCALE_SLOTS,
    SCALES_K,
    STEP96_K,
    STEPS96,
    Geometry96,
)
from blockscale.kernels.parts.ring import Slot
from blockscale.kernels.parts.tensorcore96 import TensorCore96, begins
from blockscale.kernels.sm100 import EPILOGUE, LOAD, MMA, Sm100Gemm

LOAD_SCALES = 6
SCHEDULE = 7
CODES, SCALES = slice(2), slice(2, 4)  # of the four operands


@dataclass(frozen=True)
class Place:
    """Where the mma warp is.

    Args:
        codes, scales: in the rings.
        own: the set of scale columns that comes next.
        past: the last slots of scales, as many as there are sets: the first of them had this set before.
    """

    codes: Slot
    scales: Slot
    own: Int32
    past: tuple[Slot, ...]

    def after_scales(self) -> "Place":
        return Place(self.codes, self.scales.next(), self.own_after(1), (*self.past[1:], self.scales))

    def own_after(self, pairs: int) -> Int32:
        """The set of columns so many pairs of instructions later: they take turns, a power of two of them."""
        return self.own if pairs % len(self.past) == 0 else self.own + pairs & len(self.past) - 1


class Sm103Gemm(Sm100Gemm):
    """The kernel of one configuration that `supports` passes; calling it launches it, compiling needs no GPU.

    Args:
        ownership: "turns" or "lines": whose a tile is, see `OwnedTiles`.
        l2_sfa, l2_sfb: what L2 is told about scales of a and of b.
        drop: in so many of the last tiles along n, those beyond n counted too, a and its scales are "evict_first":
            they are hardly needed any more.
        first: "a" or "b", which of the two is fetched first.
        pace: see `Epilogue`. release: "preload" too.
        unroll: copies of the bodies of the loops that fetch.
        fixed: (m, n, k) that the code is for, None for any.
        others: see `Sm100Gemm`. stages: slots of 256 k of codes.
    """

    GEOMETRY = Geometry96
    WARPS = SCHEDULE + 1

    def __init__(
        self, tile, *, ownership="turns", l2_a=None, l2_b=None, l2_sfa=None, l2_sfb=None, drop=0, first="a", pace=0,
        unroll=1, fixed=None, **others,
    ):  # fmt: skip
        self.ownership, self.drop, self.b_first, self.pace, self.unroll = ownership, drop, first == "b", pace, unroll
        super().__init__(tile, **others)
        self.policies = tuple(tma.POLICIES[hint] for hint in (l2_a, l2_b, l2_sfa, l2_sfb))
        self.fixed = fixed and (fixed[0], fixed[1], -(-fixed[2] // STEP_K) * STEP_K)

    def __repr__(self):
        """Also in the kernel's name."""
        g = self.geometry
        return f"Sm103Gemm_{g.tile[0]}x{g.tile_n}_{g.slots}_{g.accumulators}_{self.raster}_{self.epilogue.out_dtype}"

    def sizes(self, size, blocks):
        if self.fixed is None:
            return size, blocks
        m, n, k = self.fixed
        if self.swap:
            m, n = n, m
        width, height = self.geometry.shape
        along = -(-m // (CTA_ROWS * width)), -(-n // (self.geometry.tile_n * height))
        return (Int32(m), Int32(n), Int32(k)), (Int32(along[0]), Int32(along[1]), blocks[2])

    @cute.jit
    def play(self, c):
        """Each warp its role."""
        if c.warp == LOAD:
            self.load(c)
        if c.warp == LOAD_SCALES:
            self.load_scales(c)
        if (c.warp == MMA) & c.cluster.leader:
            self.mma(c)
        if c.warp < EPILOGUE.stop:
            self.epilogue.run(c, EPILOGUE)
        if (c.warp == SCHEDULE) & c.cluster.first:
            self.schedule(c)

    @cute.jit
    def ask_ahead(self, c, operands):
        """Asks L2 for the codes of the first slots of this CTA's first tile, and for their scales."""
        if cutlass.const_expr(self.prefetch > 0):
            corners = self.corners(c, c.tiles.first())
            for of, most, slot_k in ((CODES, self.prefetch, TILE_K), (SCALES, -(-self.prefetch * 4 // 3), SCALES_K)):
                for i in cutlass.range(cutlass.min(cute.ceil_div(c.k, slot_k), most), unroll=1):
                    for operand, corner in zip(operands[of], corners(i)[of], strict=True):
                        operand.prefetch(corner, i)

    @cute.jit
    def load(self, c):
        """Fills slots of codes, for one tile after the other."""
        operands = c.memory.after_grids_before().operands
        if cutlass.const_expr(self.pdl):
            self.ask_ahead(c, operands)
        slot = self.fill(c, c.ab, operands, CODES, cute.ceil_div(c.k, TILE_K))
        c.memory.let_next_grid_start()
        c.ab.drain(slot)

    @cute.jit
    def load_scales(self, c):
        """Fills slots of scales, for one tile after the other."""
        operands = c.memory.after_grids_before().operands
        slot = self.fill(c, c.sf, operands, SCALES, cute.ceil_div(c.k, SCALES_K))
        c.sf.drain(slot)

    @cute.jit
    def fill(self, c, ring, operands, which, slots):
        """A ring, with so many slots a tile of two operands. Returns the place in the ring after them."""
        tiles, slot = c.tiles, ring.producer()
        order = (1, 0) if self.b_first else (0, 1)
        work = tiles.first()
        while work.valid:
            corners = self.corners(c, work)
            mine = self.with_hints(c, work, operands[which])
            for i in cutlass.range(slots, unroll=self.unroll):
                ring.wait_empty(slot)
                if c.cluster.leader:
                    ring.expect_copies(slot)
                corner = corners(i)[which]
                for one in cutlass.range_constexpr(2):
                    mine[order[one]].fetch(corner[order[one]], slot, ring, i)
                slot = slot.next()
            work = tiles.after(work)
        return slot

    def with_hints(self, c, work, operands):
        """The operands of a and b; L2 is told otherwise about that of a, where it is dropped."""
        of_a, of_b = operands
        if self.drop:
            _, column, _ = c.tiles.at(work)
            last = column >= c.tiles.n * c.geometry.shape[1] - self.drop
            policy = cutlass.select_(last, Int64(tma.POLICIES["evict_first"]), Int64(of_a.policy))
            of_a = replace(of_a, policy=policy)
        return of_a, of_b

    @cute.jit
    def mma(self, c):
        """Multiplies slot after slot into an accumulator, of both CTAs where there is a pair."""
        acc, tiles = c.acc, c.tiles
        core = TensorCore96.of(c.geometry, c.smem, c.tmem)
        at = self.beginning(c)
        steps = cute.ceil_div(c.k, STEP96_K)
        whole, rest = steps // STEPS96, steps % STEPS96
        slots = cute.ceil_div(c.k, TILE_K) - whole * CODE_SLOTS  # of codes, of the rest
        sums = acc.producer()
        work = tiles.first()
        while work.valid:
            _, column, _ = tiles.at(work)
            acc.wait_empty(sums)
            target = c.turn(sums), column
            for i in cutlass.range(whole, unroll=1):
                at = self.multiply(c, core, at, target, i > 0)
            if rest > 0:
                at = self.multiply_rest(c, core, at, target, whole > 0, rest, slots)
            acc.commit_full(sums)
            sums = sums.next()
            work = tiles.after(work)

    @cute.jit
    def multiply(self, c, core, at, target, accumulate):
        """All eight instructions of k = 768. Returns the place after them."""
        codes = self.slots_after(at)
        begin = self.descriptors(core, codes, None)
        own = at.own
        for pair in cutlass.range_constexpr(SCALE_SLOTS):
            ab = c.ab if cutlass.const_expr(pair <= 1) else c.ab.again()
            sf = c.sf if cutlass.const_expr(pair == 0) else c.sf.again()
            if cutlass.const_expr(pair < CODE_SLOTS):
                ab.wait_full(codes[pair])
            columns = self.wait_scales(c, at)
            with cute.arch.elect_one():
                core.copy_scales(at.scales.index, columns)
                for step in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
                    core.multiply(step, begin[begins(step)], columns, *target, accumulate if step == 0 else True)
            sf.commit_empty(at.scales)
            if cutlass.const_expr(pair > 0):
                ab.commit_empty(codes[pair - 1])
            at = at.after_scales()
        return replace(at, codes=codes[CODE_SLOTS], own=own)

    @cute.jit
    def multiply_rest(self, c, core, at, target, accumulate, rest, slots):
        """The first `rest` of the eight instructions, of so many slots of codes. Returns the place after them."""
        codes = self.slots_after(at)
        begin = self.descriptors(core, codes, slots)
        for pair in cutlass.range_constexpr(SCALE_SLOTS):
            if rest > 2 * pair:
                if slots > pair:
                    c.ab.wait_full(codes[pair])
                columns, step = self.wait_scales(c, at), 2 * pair
                with cute.arch.elect_one():
                    core.copy_scales(at.scales.index, columns)
                    core.multiply(step, begin[begins(step)], columns, *target, accumulate if step == 0 else True)
                    if rest > step + 1:
                        core.multiply(step + 1, begin[begins(step + 1)], columns, *target, True)
                c.sf.again().commit_empty(at.scales)
                at = at.after_scales()
                if cutlass.const_expr(pair > 0):
                    c.ab.again().commit_empty(codes[pair - 1])
                    at = replace(at, codes=codes[pair])
        if slots > (rest - 1) // 2:  # the last pair begins with a slot that none follows
            c.ab.again().commit_empty(at.codes)
            at = replace(at, codes=at.codes.next())
        return at

    def beginning(self, c):
        """The mma warp's first place; what had the sets of columns before, nothing, counts as multiplied."""
        past = [c.sf.behind(c.geometry.scale_slots)]
        for _ in range(c.geometry.scale_slots - 1):
            past.append(past[-1].next())
        return Place(c.ab.consumer(), c.sf.consumer(), Int32(0), tuple(past) if self.in_turn else (past[0],))

    @property
    def in_turn(self):
        """Whether slots of scales take turns to have a set of columns, instead of each having its own."""
        return self.geometry.scale_slots < self.geometry.scale_stages

    def slots_after(self, at):
        """The place in the ring of codes, and those after it that k = 768 takes."""
        codes = [at.codes]
        for _ in range(CODE_SLOTS):
            codes.append(codes[-1].next())
        return codes

    def descriptors(self, core, codes, slots):
        """Of three slots of a and b. Where rows would go on in none of the first `slots`, they do in their own."""
        found = []
        for i, (slot, following) in enumerate(pairwise(codes[:CODE_SLOTS])):
            own, after = slot.index, following.index
            found.append(core.codes(own, after if slots is None else cutlass.select_(slots > i + 1, after, own)))
        last = codes[CODE_SLOTS - 1].index  # in which rows end
        return [*found, core.codes(last, last)]

    def wait_scales(self, c, at):
        """Until scales are there, and what had their columns before has been multiplied. Returns their set."""
        if self.in_turn:
            c.sf.wait_empty(at.past[0])
        c.sf.wait_full(at.scales)
        tensorcore.after_sync()  # what read the scales that are overwritten, and the epilogue's loads
        return at.own if self.in_turn else at.scales.index
