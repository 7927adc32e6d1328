"""Parts of k: CTAs, or pairs, of a cluster that share the tiles of grouped products, each with its own range of k.

Both have sums of the whole tile. One finishes the first half of its columns and the other one the rest: each hands over
what the other finishes, once a tile, by storing it in that one's shared memory (PTX: mapa, st.shared::cluster). Two
numbers are added, so that the order in which CTAs come does not matter.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from blockscale.kernels.parts import tensorcore
from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.exchange import wait
from blockscale.kernels.parts.geometry import CTA_ROWS
from blockscale.kernels.parts.group_epilogue import GroupEpilogue, GroupTile
from blockscale.kernels.parts.group_geometry import GroupGeometry
from blockscale.kernels.parts.group_order import GRANULE
from blockscale.kernels.parts.staging import WARPS

VECTOR = 4  # sums that a thread stores at a time
COLUMN_BYTES = CTA_ROWS * 4  # of a column's sums


@dataclass(frozen=True)
class PartCluster(Cluster):
    """All CTAs along x; those of a pair side by side, of the first part, then of the second. Parts share no operand."""

    @staticmethod
    def here(geometry: GroupGeometry) -> "PartCluster":
        x, _, _ = cute.arch.block_in_cluster_idx()
        return PartCluster(geometry.ctas * geometry.split, 1, x, 0, geometry.ctas)

    @property
    def senders(self) -> Int32 | None:
        return self.own_pair if self.ctas == 2 else None

    @property
    def part(self) -> Int32:
        return self.x // self.ctas

    @property
    def other(self) -> Int32:
        """Rank of the CTA that has the same rows in the other part."""
        return self.x ^ self.ctas


@dataclass(frozen=True)
class Parts:
    """What an epilogue's thread exchanges with that of the other part that has the same row.

    barrier                                              counts
    given, the other CTA's sums are here                 1 arrival of each of its warps
    taken, the other CTA has used this one's             the same

    Args:
        barriers: address of the two. buffer: address of the thread's first vector. cluster: a `PartCluster`.
    """

    barriers: Int32
    buffer: Int32
    cluster: PartCluster

    @staticmethod
    def here(g: GroupGeometry, smem: Any, cluster: PartCluster) -> "Parts":
        thread, _, _ = cute.arch.thread_idx()
        barriers, buffer = smem.parts.data_ptr().toint(), smem.sums.data_ptr().toint()
        return Parts(Int32(barriers), Int32(buffer) + thread * (VECTOR * 4), cluster)

    @staticmethod
    def initialise(smem: Any) -> None:
        """By one thread of each CTA, before the CTAs of the cluster meet."""
        for i in range(2):
            cute.arch.mbarrier_init(smem.parts.data_ptr() + i, WARPS)

    def shares(self, columns: Int32) -> tuple[tuple[Int32, Int32], tuple[Int32, Int32]]:
        """(first, end) of the columns that this part finishes, and of the other one's."""
        middle = (columns // GRANULE + 1) // 2 * GRANULE
        second = self.cluster.part != 0
        own = cutlass.select_(second, middle, Int32(0)), cutlass.select_(second, columns, middle)
        return own, (cutlass.select_(second, Int32(0), middle), cutlass.select_(second, middle, columns))

    @cute.jit
    def give(self, address, share, turn):
        """Sums of a share of tensor memory's columns at `address` to the other part; then its own are here."""
        first, end = share
        wait(self.barriers + 8, turn ^ 1)
        place = _there(self.buffer, self.cluster.other)
        for i in cutlass.range((end - first) // GRANULE, unroll=1):
            sums = tensorcore.load(address + first + i * GRANULE, GRANULE)
            for j in cutlass.range_constexpr(0, GRANULE, VECTOR):
                _store(place + (i * GRANULE + j) * COLUMN_BYTES, sums[j : j + VECTOR])
        self._tell(0)
        wait(self.barriers, turn)

    def sums(self, column: Int32) -> list[Float32]:
        """The other part's, of GRANULE columns from this one of the share on."""
        place = self.buffer + column * COLUMN_BYTES
        return [x for j in range(0, GRANULE, VECTOR) for x in _load(place + j * COLUMN_BYTES)]

    def taken(self) -> None:
        """The warp has used what the other part gave."""
        self._tell(8)

    @cute.jit
    def _tell(self, barrier):
        """An arrival at this barrier in the other CTA, of what all lanes of the warp did before."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                read_only_args=[_there(self.barriers + barrier, self.cluster.other)],
            )


class PartEpilogue(GroupEpilogue):
    """As `GroupEpilogue`, of a kernel whose tiles are shared by two parts."""

    @cute.jit
    def leave(self, c, tile, address, columns, turn):
        """Columns of a tile, GRANULE at a time."""
        own, others = c.parts.shares(columns)
        c.parts.give(address, others, turn)
        first, end = own
        tile = PartTile.of(tile.by(GRANULE), c.parts, first)
        for i in cutlass.range((end - first) // GRANULE, unroll=1):
            tile.through(address, first + i * GRANULE, 0)
        c.parts.taken()


@dataclass(frozen=True)
class PartTile(GroupTile):
    """As `GroupTile`; what the other part gave of the columns from `first` on is added to sums."""

    parts: Parts
    first: Int32

    @staticmethod
    def of(tile: GroupTile, parts: Parts, first: Int32) -> "PartTile":
        return PartTile(tile.way, tile.target, tile.column, tile.bias, tile.other, parts, first)

    def read(self, address: Int32, column: Int32) -> tuple[list[Float32], list[Float32] | None]:
        sums, bias = super().read(address, column)
        return [x + y for x, y in zip(sums, self.parts.sums(column - self.first), strict=True)], bias


def _there(address: Int32, rank: Int32) -> Int32:
    """An address of this CTA's shared memory in that of the CTA of this rank."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def _store(address: Int32, sums: list[Float32]) -> None:
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *sums]
    )


def _load(address: Int32) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[address],
    )
