"""Why mutants survive: rules that are tried in order, a kernel's own before the general ones.

A rule's kind is "equivalent" (nobody can tell the changed kernel from the right one), "strict" (the
manual forbids it, published kernels do it: strict checks report it) or "missed" (a fault that the emulator does not
see).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Regular expressions that match the survivor's kernel, operator, instruction and change from their beginning.

    lines: of the text, first and last; None: any.
    """

    kind: str
    why: str
    kernel: str = ""
    operator: str = ""
    before: str = ""
    change: str = ""
    lines: tuple[int, int] | None = None

    def fits(self, kernel: str, survivor: dict[str, Any]) -> bool:
        given = (kernel, survivor["operator"], survivor["before"], survivor["change"])
        patterns = (self.kernel, self.operator, self.before, self.change)
        inside = self.lines is None or self.lines[0] <= survivor["line"] <= self.lines[1]
        return inside and all(re.match(pattern, text) for pattern, text in zip(patterns, given, strict=True))


UNEXPLAINED = Rule("missed", "not explained")
SAME = "equivalent"

# What holds for every kernel.
GENERAL = (
    Rule(SAME, "a named barrier is a number: all threads that meet there use the other one alike, and nobody else does",
         operator="change_barrier", before=r"bar(rier)?\.sync"),
    Rule(SAME, "a phase stays open until its arrival, so bytes may come before they are announced",
         operator="swap", before=r"mbarrier\.arrive\.expect_tx", change=r"after `cp\.async\.bulk"),
    Rule(SAME, "the proxy fence may come after the barrier, in the thread that issues the copy",
         operator="swap", before=r"fence\.proxy\.async", change=r"after `bar\.sync"),
    Rule(SAME, "the permit matters to other CTAs of the multiprocessor alone: none of this CTA allocates afterwards",
         operator="drop_permit"),
    Rule(SAME, "the leading offset is not used: K-major with a swizzle, or rows of 16 bytes",
         kernel=r"nvidia|blockscale", operator="change_descriptor", change=r"[AB]: leading offset"),
)  # fmt: skip
PIPELINE = (
    Rule(SAME, "the threads that write the buffer and the store that reads it take the other one alike",
         operator="change_stage", before=r"shl\.b32 staged, staging"),
    Rule(SAME, "threads of the CTA alone signal this barrier: the block's barrier is enough for them",
         operator="swap", before=r"mbarrier\.init", change=r"after `fence\.mbarrier_init"),
)  # fmt: skip
CLUSTER = (
    Rule(SAME, "barrier.cluster.arrive releases what came before, unless it is relaxed",
         operator="drop_fence|swap", before=r"fence\.mbarrier_init|mbarrier\.init"),
    Rule(SAME, "both barriers of a stage become those of the other one, in every CTA",
         operator="change_stage", before=r"shl\.b32 slot, stage, 3"),
    Rule(SAME, "a copy to the CTA's own memory needs nothing of the other CTAs",
         operator="swap", before=r"barrier\.cluster\.wait", change=r"after `cp\.async\.cg"),
)  # fmt: skip
DEPENDENT = (
    Rule(SAME, "griddepcontrol.wait waits for the whole grid before, also for what it writes after launch_dependents",
         operator="swap", before=r"st\.global", change=r"after `griddepcontrol\.launch_dependents"),
    Rule(SAME, "letting dependents start is no order for the reads of this grid",
         operator="swap", before=r"griddepcontrol\.launch_dependents", change=r"after `ld\.global"),
    Rule(SAME, "an arrival at a barrier of its own touches nothing of the grid before",
         operator="swap", before=r"griddepcontrol\.wait", change=r"after `mbarrier\.arrive\.expect_tx"),
    Rule(SAME, "a dependent waits for this grid, and this grid's other threads for the one before",
         operator="swap", before=r"griddepcontrol\.wait", change=r"after `griddepcontrol\.launch_dependents"),
)  # fmt: skip
TENSOR = (
    Rule(SAME, "warps 4 and 5 change their roles",
         operator="change_predicate", before=r"@p bra LOAD"),
    Rule(SAME, "threads of the CTA alone signal this barrier: the block's barrier is enough for them",
         operator="swap", before=r"mbarrier\.init", change=r"after `fence\.mbarrier_init"),
    Rule(SAME, "reads of global memory, which neither the fence nor the copy concerns",
         operator="swap", before=r"fence\.proxy\.async", change=r"after `ld\.global"),
    Rule(SAME, "alloc is synchronous, and whoever uses tensor memory has its address from a load that comes after it",
         operator="drop_fence|swap", lines=(57, 59)),
    Rule(SAME, "wait::ld has completed the reads before this fence, and dealloc, the only one to come, is synchronous",
         operator="drop_fence|swap", before=r"tcgen05\.fence", lines=(205, 216)),
    Rule(SAME, "registers of tcgen05.ld may be used before the wait, which still comes before the release",
         operator="swap", before=r"tcgen05\.wait::ld", change=r"after `st\.global"),
)  # fmt: skip
LAST = "a role's last waits: nothing comes after them; without all of them at once nothing shows either"
NVIDIA_1CTA = (
    Rule(SAME, LAST, lines=(315, 433)),
    Rule(SAME, LAST, lines=(748, 770)),
    Rule(SAME, "the barrier after the last tile has ordered the reads of tensor memory already",
         operator="drop_barrier", lines=(1045, 1045)),
    Rule(SAME, "lanes that give the same operands issue a tensor copy once",
         operator="change_predicate", before=r"@%p(27|29|31|33) bra"),
    Rule(SAME, "which warp warms the cache of tensor maps does not matter",
         operator="change_predicate", before=r"@%p3 bra"),
    Rule(SAME, "any warp may give the permit back",
         operator="change_predicate", before=r"@%p90 bra", lines=(1042, 1042)),
)  # fmt: skip
NVIDIA_MULTICAST = (
    Rule(SAME, "stages are freed in order: the waits for later ones cover this one",
         lines=(423, 533)),
    Rule(SAME, LAST, lines=(830, 849)),
)  # fmt: skip
NVIDIA_CLC = (
    Rule(SAME, LAST, lines=(327, 466)),
    Rule(SAME, LAST, lines=(538, 547)),
    Rule(SAME, LAST, lines=(973, 992)),
)  # fmt: skip
BLOCKSCALE = (
    Rule(SAME, "alloc is synchronous, and whoever uses tensor memory has its address from a load that comes after it",
         operator="drop_fence|swap", lines=(107, 109)),
    Rule(SAME, LAST, lines=(241, 290)),
    Rule(SAME, "accumulators are released in order: the next wait covers this one",
         lines=(464, 477)),
    Rule(SAME, "of the operations that the fence orders none follows: dealloc is synchronous",
         operator="drop_fence|swap", before=r"tcgen05\.fence::after", lines=(496, 496)),
    Rule(SAME, "the loads from tensor memory and their wait are the whole warp's: no lane is behind",
         operator="drop_barrier|swap", lines=(877, 878)),
)  # fmt: skip
RULES: dict[str, tuple[Rule, ...]] = {
    "pipeline": PIPELINE,
    "cluster": CLUSTER,
    "dependent": DEPENDENT,
    "tensor": TENSOR,
    "nvidia-1cta": NVIDIA_1CTA,
    "nvidia-multicast": NVIDIA_MULTICAST,
    "nvidia-clc": NVIDIA_CLC,
    "blockscale-sm100": BLOCKSCALE,
}


def explain(kernel: str, survivor: dict[str, Any]) -> Rule:
    """The rule for a survivor of the record."""
    if not survivor["reached"]:
        return Rule("equivalent", "no thread gets there with this problem")
    for rule in (*RULES.get(kernel, ()), *GENERAL):
        if rule.fits(kernel, survivor):
            return rule
    if survivor["strict"]:
        return Rule("strict", f"strict checks: {survivor['strict']}")
    return UNEXPLAINED
