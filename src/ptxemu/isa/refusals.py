"""Which instructions need a feature that not every chip has.

Source: the "Target ISA Notes" of each instruction in the PTX ISA manual.  "TMA multicast" says more than it does: the
manual only advises against `.multicast::cluster` on sm_120, whose hardware has none.  Some features show in an operand,
so that who decodes it asks for them: "K = 96" in tcgen05's instruction descriptor, packed types in a tensor map.
"""

from __future__ import annotations

import functools
import re

from ptxemu.errors import UnknownInstruction
from ptxemu.machine.chip import CHIPS, Chip, features
from ptxemu.text.module import Instruction

__all__ = ["NEEDS", "check", "needed"]

_SMALL = "e2m1|e2m3|e3m2|ue8m0|s2f6"
_EIGHT = "(e4m3|e5m2)x2"

# feature, a narrower one first: what the opcode looks like, followed by a comma for each operand but the first
NEEDS = {
    "wgmma": r"wgmma\..*",
    "tcgen05": r"tcgen05\..*",
    "CTA pairs": r"cp\.async\.bulk\..*\.cta_group::.*",
    "TMA multicast": r"cp\.async\.bulk\..*\.multicast::cluster.*",
    "multicast launch control": r"clusterlaunchcontrol\..*\.multicast::cluster::all.*",
    "launch control": r"clusterlaunchcontrol\..*",
    "setmaxnreg": r"setmaxnreg\..*",
    "swizzle atoms": r"tensormap\.replace\..*\.swizzle_atomicity\..*",
    "tensormap.replace": r"tensormap\.replace\..*",
    "narrow floats": rf"cvt\..*({_SMALL}|scaled::n2|bf16x2\.{_EIGHT}|{_EIGHT}\.bf16x2).*",
    "8-bit matrices": r"(ld|st)matrix\..*\.(m16n16|m8n16|m16n8)\..*",
    "256-bit accesses": r"(ld|st)(\.\S*)?\.(v8\.\w32|v4\.\w64),*",
    "L2 eviction priorities": r"(ld|st)\..*\.L2::evict_.*",
    "packed f32": r"\w+\..*\.f32x2,*",
    "three-input min and max": r"(min|max)\..*f32,{3}",
    "saturating tf32": r"cvt\.r[nz]\.(relu\.)?satfinite\..*tf32\.f32,*",
    "byte masks": r"cp\.async\.bulk\..*\.cp_mask,*",
    "f32 redux": r"redux\..*\.f32,*",
    "mma of narrow floats": rf"mma\.sync\..*(kind::mx|block_scale|{_SMALL}).*",
    "kind::f8f6f4": r"mma\.sync\..*\.kind::f8f6f4\..*",
}
_PATTERNS = {feature: re.compile(pattern) for feature, pattern in NEEDS.items()}


@functools.lru_cache(maxsize=4096)
def needed(opcode: str, operands: int) -> tuple[str, ...]:
    """The features that an instruction needs."""
    text = opcode + "," * (operands - 1)
    return tuple(feature for feature, pattern in _PATTERNS.items() if pattern.fullmatch(text))


def check(instruction: Instruction, chip: Chip, target: str) -> None:
    """Raises UnknownInstruction, with line, text and feature, for what the chip or the `.target` does not have.

    target: sm_90 for instance, which lacks some of what the chip sm_90a has.
    """
    for feature in needed(instruction.opcode, len(instruction.operands)):
        without = chip.name if feature not in chip.has else f"PTX for {target}"
        if feature not in chip.has & features(target):
            others = ", ".join(name for name, other in CHIPS.items() if feature in other.has)
            raise UnknownInstruction(
                f"line {instruction.line}: {without} does not have `{instruction.text}`: {feature} (on {others} only)"
            )
