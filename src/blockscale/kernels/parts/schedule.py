"""Which output tiles a CTA computes, and in which order."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, cute
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values

from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.geometry import Shape
from blockscale.kernels.parts.order import owned_tile, tile
from blockscale.kernels.parts.ring import Ring, Slot

RESPONSE_BYTES = 16  # of a request to launch control
RESPONSE_SLOTS = 2


class Work:
    """A CTA's place in a grid of one CTA for each tile of a CTA, whether there is one, and what tells the next."""

    def __init__(self, x: Int32, y: Int32, valid: Boolean, slot: Slot | None = None, warps: int = 1) -> None:
        self.x, self.y, self.valid, self.slot, self.warps = x, y, valid, slot, warps

    # A dynamic loop carries them.
    def __extract_mlir_values__(self) -> list[Any]:
        slot = [] if self.slot is None else extract_mlir_values(self.slot)
        return [self.x.ir_value(), self.y.ir_value(), self.valid.ir_value(), *slot]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Work":
        slot = None if self.slot is None else new_from_mlir_values(self.slot, values[3:])
        return Work(Int32(values[0]), Int32(values[1]), Boolean(values[2]), slot, self.warps)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch of matrices, cut into blocks of one tile for each CTA of a cluster of `shape`.

    Which tile a place in the grid stands for, `order.tile` says. Where a launch mixes two shapes of cluster, `shape` is
    the larger one, and several clusters share a block. Blocks may reach beyond m and n.

    The static schedule: with as many CTAs as tiles each computes one; with fewer, a CTA goes on to its next tile, as
    many blocks on as are in flight, without starting anew.

    Args:
        m, n: blocks along the dimensions of the result. batch: matrices.
        shape: CTAs of a block along m and n, powers of two.
    """

    m: Int32
    n: Int32
    batch: Int32
    raster: str
    group: int
    shape: Shape

    @property
    def rings(self) -> tuple[Ring, ...]:
        return ()

    @property
    def count(self) -> Int32:
        """Of blocks."""
        return self.m * self.n * self.batch

    def first(self, warps: int = 1) -> Work:
        """What a role of so many warps begins with."""
        x, y, _ = cute.arch.block_idx()
        return Work(x, y, Boolean(True), None, warps)

    def after(self, work: Work) -> Work:
        x = work.x + cute.arch.grid_dim()[0]
        return Work(x, work.y, x < self.count * self.shape[0], None, work.warps)

    def more(self, work: Work) -> Boolean:
        """Whether there may be another one after this."""
        return self.after(work).valid

    def at(self, work: Work) -> tuple[Int32, Int32, Int32]:
        """(row of CTAs, column of tiles, matrix)"""
        x, y, m, n = map(Uint32, (work.x, work.y, self.m, self.n))  # divisions are shorter than those of Int32
        return tuple(map(Int32, tile(x, y, (m, n), self.shape, self.raster, self.group, cutlass.min)))


@dataclass(frozen=True)
class OwnedTiles(Tiles):
    """The static schedule, where clusters keep to lines along `raster`, see `order.owned`; `group` is of no use."""

    def at(self, work: Work) -> tuple[Int32, Int32, Int32]:
        x, y, m, n, batch = map(Uint32, (work.x, work.y, self.m, self.n, self.batch))
        slots = Uint32(cute.arch.grid_dim()[0] // self.shape[0])
        found = owned_tile(x, y, (m, n), batch, slots, self.shape, self.raster, cutlass.min, _select)
        return tuple(map(Int32, found))


@dataclass(frozen=True)
class RequestedTiles(Tiles):
    """The dynamic schedule: the grid has a CTA for each tile, and a cluster that is done with one asks for the tile of
    a cluster that has not started, which then never does (PTX: clusterlaunchcontrol).

    One warp of the cluster requests; the answer comes to a slot of `answers` in each of its CTAs, where all roles read
    it.
    """

    cluster: Cluster
    ring: Ring
    answers: cute.Pointer

    @property
    def rings(self) -> tuple[Ring, ...]:
        return (self.ring,)

    def first(self, warps: int = 1) -> Work:
        x, y, _ = cute.arch.block_idx()
        return Work(x, y, Boolean(True), self.ring.consumer(), warps)

    def after(self, work: Work) -> Work:
        self.ring.wait_full(work.slot)
        x, y, _, valid = cute.arch.clc_response(self.answer(work.slot))
        cute.arch.fence_view_async_shared()  # the read before the next answer, which comes by the async proxy
        self.ring.arrive_empty(work.slot, range(work.warps))
        return Work(x + self.cluster.x, y + self.cluster.y, valid != 0, work.slot.next(), work.warps)

    def more(self, work: Work) -> Boolean:
        return Boolean(True)  # not known before it is asked for

    def answer(self, slot: Slot) -> cute.Pointer:
        return self.answers + slot.index

    def request(self, slot: Slot) -> None:
        """Asks for one more tile, for all CTAs of the cluster."""
        self.ring.wait_empty(slot)
        alone = self.cluster.alone
        if alone:
            self.ring.expect_copies(slot)
        else:
            self.ring.expect_copies_in(slot, Int32(self.cluster.size))
        barrier = self.ring.copy_barrier(slot, RESPONSE_BYTES)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(barrier, self.answer(slot), multicast=not alone)


def _select(condition: Boolean, value: Uint32, otherwise: Uint32) -> Uint32:
    return Uint32(cutlass.select_(condition, value, otherwise))
