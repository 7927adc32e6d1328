"""Why mutants survive: rules that are tried in order, a kernel's own before the general ones.

A rule's kind is "equivalent" (nobody can tell the changed kernel from the right one when both run this problem),
"strict" (the manual forbids it, published kernels do it: strict checks report it) or "missed" (a fault that the
emulator does not see).  A kernel's own rules name places in its PTX, so they hold for that text alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Regular expressions that match a survivor's operator, instruction and change from their beginning.

    lines: of the text, first and last; None: any.
    """

    why: str
    operator: str
    before: str
    change: str = ""
    lines: tuple[int, int] | None = None
    kind: str = "equivalent"

    def fits(self, survivor: dict[str, Any]) -> bool:
        given = (survivor["operator"], survivor["before"], survivor["change"])
        patterns = (self.operator, self.before, self.change)
        inside = self.lines is None or self.lines[0] <= survivor["line"] <= self.lines[1]
        return inside and all(re.match(pattern, text) for pattern, text in zip(patterns, given, strict=True))


@dataclass(frozen=True)
class Judged:
    """What was judged of one kernel.  ptx: `Setup.digest` of its texts.

    last_waits: first and last lines of places where a role waits for the last time before it ends, with nothing after
    that needs it.  A test checks that nothing shows without any of the waits there.
    """

    ptx: str
    rules: tuple[Rule, ...]
    last_waits: tuple[tuple[int, int], ...] = ()

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        return (*self.rules, *(_at_the_end(LAST, lines) for lines in self.last_waits))


LAST = "a role's last waits: nothing comes after them; without all of them at once nothing shows either"


def _at_the_end(why: str, lines: tuple[int, int]) -> Rule:
    """For a wait there, its parity, its stage and its barrier."""
    return Rule(
        why,
        "drop_wait|flip_parity|change_stage|change_barrier|change_predicate",
        r"mbarrier\.try_wait|xor\.b32|setp\.eq\.b32|shl\.b32|add\.s32|@P1 bra",
        lines=lines,
    )


UNEXPLAINED = Rule("not explained", "", "", kind="missed")
GENERAL = (
    Rule(
        "a named barrier is a number: all threads that meet there use the other one alike, and nobody else does",
        "change_barrier",
        r"bar(rier)?\.sync",
    ),
    Rule(
        "a phase stays open until its arrival, so bytes may come before they are announced",
        "swap",
        r"mbarrier\.arrive\.expect_tx",
        r"after `cp\.async\.bulk",
    ),
    Rule(
        "the proxy fence may come after the barrier, in the thread that issues the copy",
        "swap",
        r"fence\.proxy\.async",
        r"after `bar\.sync",
    ),
    Rule(
        "the permit matters to other CTAs of the multiprocessor alone: none of this CTA allocates afterwards",
        "drop_permit",
        r"tcgen05\.relinquish_alloc_permit",
    ),
)
OWN_BARRIER = Rule(
    "threads of the CTA alone signal this barrier: the block's barrier is enough for them",
    "swap",
    r"mbarrier\.init",
    r"after `fence\.mbarrier_init",
)
LEADING = Rule(
    "the leading offset is not used: K-major with a swizzle, or rows of 16 bytes",
    "change_descriptor",
    r"tcgen05\.(mma|cp)",
    "[AB]: leading offset",
)
TWICE = Rule("the kernel has this fence twice, one after the other", "drop_fence", r"fence\.mbarrier_init")
ALLOC = "alloc is synchronous, and whoever uses tensor memory has its address from a load that comes after it"
JUDGED = {
    "pipeline": Judged(
        "a06606f5ba80",
        (
            OWN_BARRIER,
            Rule(
                "the threads that write the buffer and the store that reads it take the other one alike",
                "change_stage",
                r"shl\.b32 staged, staging",
            ),
        ),
    ),
    "cluster": Judged(
        "3684c6b1ebd2",
        (
            Rule(
                "barrier.cluster.arrive releases what came before, unless it is relaxed",
                "drop_fence|swap",
                r"fence\.mbarrier_init|mbarrier\.init",
            ),
            Rule(
                "both barriers of a stage become those of the other one, in every CTA",
                "change_stage",
                "shl.b32 slot, stage, 3",
            ),
            Rule(
                "a copy to the CTA's own memory needs nothing of the other CTAs",
                "swap",
                r"barrier\.cluster\.wait",
                r"after `cp\.async\.cg",
            ),
        ),
    ),
    "dependent": Judged(
        "348a913d07a4",
        (
            Rule(
                "griddepcontrol.wait waits for the whole grid, also for what it writes after launch_dependents",
                "swap",
                r"st\.global",
                r"after `griddepcontrol\.launch_dependents",
            ),
            Rule(
                "letting dependents start is no order for the reads of this grid",
                "swap",
                r"griddepcontrol\.launch_dependents",
                r"after `ld\.global",
            ),
            Rule(
                "an arrival at a barrier of its own touches nothing of the grid before",
                "swap",
                r"griddepcontrol\.wait",
                r"after `mbarrier\.arrive\.expect_tx",
            ),
            Rule(
                "a dependent waits for this grid, and this grid's threads for the one before",
                "swap",
                r"griddepcontrol\.wait",
                r"after `griddepcontrol\.launch_dependents",
            ),
        ),
    ),
    "tensor": Judged(
        "c564abfdfe55",
        (
            OWN_BARRIER,
            Rule("warps 4 and 5 change their roles", "change_predicate", "@p bra LOAD"),
            Rule(
                "reads of global memory, which neither the fence nor the copy concerns",
                "swap",
                r"fence\.proxy\.async",
                r"after `ld\.global",
            ),
            Rule(ALLOC, "drop_fence|swap", r"tcgen05\.fence|bar\.sync", lines=(57, 59)),
            Rule(
                "wait::ld has completed the reads before this fence, and dealloc, the only one to come, is synchronous",
                "drop_fence|swap",
                r"tcgen05\.fence",
                lines=(205, 216),
            ),
            Rule(
                "registers of tcgen05.ld may be used before the wait, which still comes before the release",
                "swap",
                r"tcgen05\.wait::ld",
                r"after `st\.global",
            ),
        ),
    ),
    "nvidia-1cta": Judged(
        "6edf073679fd",
        (
            LEADING,
            Rule(
                "the barrier after the last tile has ordered the reads of tensor memory already",
                "drop_barrier",
                r"bar\.sync 1, 128",
                lines=(1045, 1045),
            ),
            Rule(
                "lanes that give the same operands issue a tensor copy once",
                "change_predicate",
                "@%p(27|29|31|33) bra",
            ),
            Rule("which warp warms the cache of tensor maps does not matter", "change_predicate", "@%p3 bra"),
            Rule("any warp may give the permit back", "change_predicate", "@%p90 bra", lines=(1042, 1042)),
        ),
        ((315, 433), (748, 770)),
    ),
    "nvidia-multicast": Judged(
        "e89b29d2853a",
        (
            LEADING,
            TWICE,
            _at_the_end("stages are freed in order: the waits for later ones cover this one", (423, 533)),
        ),
        ((830, 849),),
    ),
    "nvidia-clc": Judged(
        "1f7de78e950b",
        (
            LEADING,
            TWICE,
            Rule(
                "the same threads have just met at the barrier before, and nothing lies between",
                "drop_barrier",
                r"bar\.sync 1, 128",
                lines=(1130, 1130),
            ),
            Rule(
                "the warp that read the answer is the one that asks next: the fence still lies between",
                "swap",
                r"fence\.proxy\.async",
                r"after `mbarrier\.arrive",
                lines=(516, 516),
            ),
            Rule(
                "stages are freed in order: once the next one is free, this one is; where the ring wraps round no tile "
                "of this problem begins",
                "change_stage",
                r"shl\.b32 %r125, %r510, 3",
                "of the next stage",
            ),
        ),
        ((327, 466), (538, 547), (973, 992)),
    ),
    "blockscale-sm100": Judged(
        "6386025b81bd",
        (
            LEADING,
            Rule(ALLOC, "drop_fence|swap", r"tcgen05\.fence|bar\.sync", lines=(107, 109)),
            _at_the_end("accumulators are released in order: the next wait covers this one", (464, 477)),
            Rule(
                "only a CTA without tiles keeps this value, and there is none in this problem",
                "flip_parity",
                r"mov\.b32 %r298, 1",
                "starts",
                lines=(126, 126),
            ),
            Rule(
                "of the operations that the fence orders none follows: dealloc is synchronous",
                "drop_fence|swap",
                r"tcgen05\.fence::after",
                lines=(496, 496),
            ),
            Rule(
                "the loads from tensor memory and their wait are the whole warp's: no lane is behind",
                "drop_barrier|swap",
                r"bar\.warp\.sync|tcgen05\.fence::before",
                lines=(851, 852),
            ),
        ),
        ((241, 290),),
    ),
}


def explain(kernel: str, ptx: str, survivor: dict[str, Any]) -> Rule:
    """The rule for a survivor of the record.  ptx: the digest of the kernel that it is of."""
    if not survivor["reached"]:
        return Rule("no thread gets there with this problem", "", "")
    judged = JUDGED.get(kernel)
    own = judged.all_rules if judged is not None and judged.ptx == ptx else ()
    for rule in (*own, *GENERAL):
        if rule.fits(survivor):
            return rule
    if survivor["strict"]:
        return Rule(f"strict checks see it: {survivor['strict'].partition(' at ')[0]}", "", "", kind="strict")
    return UNEXPLAINED
