"""What a CTA holds while it runs: shared memory, the rings in it, and where operands and tiles come to."""

from typing import Any

from cutlass import Int16, Int32, Int64, Int128, Uint8, cute
from cutlass.memory import SmemAllocator

from blockscale.kernels.parts import tma
from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.geometry import Geometry
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.schedule import RESPONSE_BYTES, RESPONSE_SLOTS, OwnedTiles, RequestedTiles, Tiles
from blockscale.kernels.parts.staging import WARPS
from blockscale.kernels.parts.tma import Operand, OperandInTurn


def shared_memory(g: Geometry, requests: bool) -> Any:
    """Barriers, the address of tensor memory, the epilogue's boxes, slots of operands; with `requests` their answers.

    Raises:
        AssertionError: `Geometry` counts otherwise.
    """

    @cute.struct
    class Smem:
        ab_full: cute.struct.MemRange[Int64, g.slots]
        ab_empty: cute.struct.MemRange[Int64, g.slots]
        if g.SCALE_RING:
            sf_full: cute.struct.MemRange[Int64, g.scale_stages]
            sf_empty: cute.struct.MemRange[Int64, g.scale_stages]
        acc_full: cute.struct.MemRange[Int64, g.accumulator_slots]
        acc_empty: cute.struct.MemRange[Int64, g.accumulator_slots]
        tmem: Int32
        if requests:
            answer_full: cute.struct.MemRange[Int64, RESPONSE_SLOTS]
            answer_empty: cute.struct.MemRange[Int64, RESPONSE_SLOTS]
            answers: cute.struct.Align[cute.struct.MemRange[Int128, RESPONSE_SLOTS], RESPONSE_BYTES]
        if g.staging:
            out: cute.struct.Align[cute.struct.MemRange[Uint8, g.staging], 1024]
        a: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.a_bytes], 1024]
        b: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.b_bytes], 1024]
        sfa: cute.struct.Align[cute.struct.MemRange[Int16, g.scale_stages * g.sfa_bytes // 2], 1024]
        sfb: cute.struct.Align[cute.struct.MemRange[Int16, g.scale_stages * g.sfb_bytes // 2], 1024]

    if Smem.size_in_bytes() != g.smem_used:
        raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {g.smem_used}")
    return SmemAllocator().allocate(Smem)


def operand_ring(g: Geometry, smem: Any, cluster: Cluster) -> Ring:
    """Slots of k tiles, from the load to the mma warp. In a pair the first CTA's barriers count for both."""
    return Ring(
        "ab",
        smem.ab_full.data_ptr(),
        smem.ab_empty.data_ptr(),
        g.slots,
        fills=1,
        empties=1,
        copied=g.stage_bytes * g.ctas,
        total=cluster.receivers,
        group=g.ctas,
        empty_mask=None if cluster.alone else cluster.senders,
    )


def scale_ring(g: Geometry, smem: Any, cluster: Cluster) -> Ring | None:
    """Slots of scales, where they have a ring of their own: the same."""
    if not g.SCALE_RING:
        return None
    return Ring(
        "sf",
        smem.sf_full.data_ptr(),
        smem.sf_empty.data_ptr(),
        g.scale_stages,
        fills=1,
        empties=1,
        copied=g.scale_bytes * g.ctas,
        total=cluster.receivers,
        group=g.ctas,
        empty_mask=None if cluster.alone else cluster.senders,
    )


def sum_ring(g: Geometry, smem: Any, cluster: Cluster) -> Ring:
    """Accumulators, from the mma to the epilogue's warps: of both CTAs of a pair, which report to the first."""
    return Ring(
        "acc",
        smem.acc_full.data_ptr(),
        smem.acc_empty.data_ptr(),
        g.accumulator_slots,
        fills=1,
        empties=WARPS,
        total=WARPS * g.ctas,
        group=g.ctas,
        full_mask=cluster.own_pair if g.pair else None,
        home=cluster.leader_rank,
    )


def answer_ring(g: Geometry, smem: Any, cluster: Cluster) -> Ring:
    """Answers to requests for tiles: read by every CTA's load and epilogue warps, by the mma warp of those that issue,
    and by the warp that requests, which is the first CTA's; all report to it."""
    everywhere = WARPS + (2 if g.SCALE_RING else 1)
    return Ring(
        "answers",
        smem.answer_full.data_ptr(),
        smem.answer_empty.data_ptr(),
        RESPONSE_SLOTS,
        fills=1,
        empties=everywhere + 2,
        copied=RESPONSE_BYTES,
        total=cluster.size * everywhere + cluster.size // g.ctas + 1,
        home=None if cluster.alone else Int32(0),
    )


def operands(g: Geometry, smem: Any, cluster: Cluster, maps: Any, policies: Any) -> tuple[Operand, ...]:
    """a, b, scales of a, scales of b."""
    box_a, box_b, box_sfa, box_sfb = tma.boxes(g)
    a, b = tma.code_layout(box_a, g.slots * g.a_boxes), tma.code_layout(box_b, g.slots * g.b_boxes)
    slots_a, slots_b = (x.get_tensor(y.outer, swizzle=y.inner) for x, y in ((smem.a, a), (smem.b, b)))
    slots_sfa = smem.sfa.get_tensor(tma.scale_layout(box_sfa, g.scale_stages * g.sfa_boxes))
    slots_sfb = smem.sfb.get_tensor(tma.scale_layout(box_sfb, g.scale_stages * g.sfb_boxes))
    of_scales = OperandInTurn if g.SCALE_RING else Operand
    *of_codes, policy_sfa, policy_sfb = policies
    return (
        Operand(maps[0], box_a, slots_a, g.a_boxes, tma.ROWS, cluster.with_same_x, of_codes[0]),
        Operand(maps[1], box_b, slots_b, g.b_boxes, tma.ROWS, cluster.with_same_half, of_codes[1]),
        of_scales(maps[2], box_sfa, slots_sfa, g.sfa_boxes, tma.STEP, cluster.with_same_x, policy_sfa),
        of_scales(maps[3], box_sfb, slots_sfb, g.sfb_boxes, tma.STEP, cluster.with_same_y, policy_sfb),
    )


def tiles(
    g: Geometry, smem: Any, cluster: Cluster, order: tuple[Any, ...], requests: bool, lines: bool = False
) -> Tiles:
    """Of `order`, the first arguments of `Tiles`, by the static or the dynamic schedule; `lines`: see `OwnedTiles`."""
    if not requests:
        return OwnedTiles(*order) if lines else Tiles(*order)
    return RequestedTiles(*order, cluster, answer_ring(g, smem, cluster), smem.answers.data_ptr())
