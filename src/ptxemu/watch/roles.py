"""What a warp is there for, told from what it has executed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.program import Program
    from ptxemu.machine.warp import Warp

__all__ = ["OTHER", "executed", "role", "role_of"]

OTHER = "compute"
_LOADS = ("cp.async.bulk.tensor.shared::cluster.global", "cp.async.bulk.tensor.shared::cta.global")
_BULK_LOADS = ("cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cta.global")
_STORES = ("cp.async.bulk.tensor.global.shared::cta", "cp.async.bulk.global.shared::cta")
_REDUCTIONS = ("cp.reduce.async.bulk.tensor.global.shared::cta", "cp.reduce.async.bulk.global.shared::cta")
# Role and the opcodes (as `isa.names.short` gives them) of which one makes it, the most telling first.
_ROLES: tuple[tuple[str, frozenset[str]], ...] = (
    ("MMA", frozenset({"tcgen05.mma", "wgmma.mma_async"})),
    ("TMA load", frozenset({*_LOADS, *_BULK_LOADS})),
    ("epilogue", frozenset({"tcgen05.ld"})),
    ("scheduler", frozenset({"clusterlaunchcontrol.try_cancel"})),
    ("scale copy", frozenset({"tcgen05.cp"})),
    ("transform", frozenset({"tcgen05.st"})),
    ("TMA store", frozenset({*_STORES, *_REDUCTIONS})),
    ("cp.async load", frozenset({"cp.async"})),
)
_BESIDE = {"MMA": {"scale copy"}, "epilogue": {"TMA store", "transform"}}  # what goes without saying in a role


def role(opcodes: Iterable[str]) -> str:
    """The role of a warp that executed these: "MMA", "TMA load", "epilogue", ..., several joined with " + ", or
    OTHER where nothing tells."""
    have = set(opcodes)
    found = [name for name, telling in _ROLES if telling & have]
    implied = {other for name in found for other in _BESIDE.get(name, ())}
    return " + ".join(name for name in found if name not in implied) or OTHER


def executed(program: Program, counts: Iterable[int]) -> set[str]:
    """The opcodes of the blocks that ran; `counts` of each block, in their order."""
    return {opcode for block, times in zip(program.blocks, counts, strict=True) if times for opcode in block.opcodes}


def role_of(warp: Warp) -> str:
    """The role of a warp, as far as it has shown it."""
    return role(executed(warp.grid.program, warp.counts))
