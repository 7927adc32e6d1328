"""The chips that can be had: what a CTA may use, which PTX runs there, and what not all of them have."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHIPS", "Chip", "features"]


@dataclass(frozen=True)
class Chip:
    """A GPU.

    shared_bytes: a CTA's shared memory, static and dynamic.  sms: multiprocessors of a product with it.
    family: the chip whose family-specific PTX (`sm_100f`) runs here too.
    has: of the features that not every chip has (`isa/refusals.py` lists the instructions of each), those of this one.
    """

    name: str
    shared_bytes: int
    sms: int
    family: int
    has: frozenset[str]

    @property
    def number(self) -> int:
        """Compute capability: 100 for sm_100a."""
        return int(self.name.removeprefix("sm_").rstrip("af"))

    def runs(self, target: str) -> bool:
        """Whether PTX with this `.target` runs here.  Source: PTX ISA, "PTX Module Directives: .target".

        PTX for a plain target runs there and on newer chips, with the suffix `f` on that chip and newer ones of its
        family, with `a` on that chip alone.
        """
        number = target.removeprefix("sm_")
        if number.endswith("f") and number[:-1].isdigit():
            return FIRST_FAMILY <= self.family <= int(number[:-1]) <= self.number
        return target == self.name or (number.isdigit() and int(number) <= self.number)


FIRST_FAMILY = 100  # older chips have no `f`
SPECIFIC = frozenset({"setmaxnreg", "tensormap.replace"})  # every chip has them, PTX for a plain target has not
PLAIN = frozenset(  # what PTX for plain sm_100 and later has
    {
        "TMA multicast",
        "launch control",
        "256-bit accesses",
        "L2 eviction priorities",
        "packed f32",
        "three-input min and max",
        "saturating tf32",
        "byte masks",
    }
)
BLACKWELL = (PLAIN - {"TMA multicast"} | SPECIFIC) | {
    "narrow floats",
    "8-bit matrices",
    "multicast launch control",
    "swizzle atoms",
    "kind::f8f6f4",
}
DATACENTER = BLACKWELL | {"tcgen05", "CTA pairs", "TMA multicast", "f32 redux"}
WORKSTATION = BLACKWELL | {"mma of narrow floats"}

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_90a", 232_448, 132, 90, SPECIFIC | {"wgmma", "TMA multicast"}),
        Chip("sm_100a", 232_448, 148, 100, DATACENTER),
        Chip("sm_103a", 232_448, 148, 100, DATACENTER | {"K = 96"}),
        Chip("sm_120a", 101_376, 188, 120, WORKSTATION),
        Chip("sm_121a", 101_376, 48, 120, WORKSTATION),
    )
}


def features(target: str) -> frozenset[str]:
    """Of the features that not every chip has, those that PTX with a `.target` may use.

    With `a` it has its chip's, with `f` what all chips of the family have from that one on, with a plain target what
    all later chips have; "sm_90" for instance has no wgmma and no setmaxnreg.
    Source: PTX ISA, "Target ISA Notes" of the instructions; plain targets as ptxas 13.0 takes them.
    """
    if target in CHIPS:
        return CHIPS[target].has
    number = target.removeprefix("sm_")
    if number.endswith("f"):
        return frozenset.intersection(*(chip.has for chip in CHIPS.values() if chip.runs(target)))
    if not number.isdigit() or int(number) < 90:
        return frozenset()
    return PLAIN if int(number) >= FIRST_FAMILY else frozenset({"TMA multicast"})
