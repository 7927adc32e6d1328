"""Where silicon and the manual disagree, and what is done here; each entry names the programs that show it.

Read off an NVIDIA H200 (driver 580.159.04).  Unless an entry says otherwise the emulator follows silicon on every chip:
for the others nothing else is known, and a kernel that keeps the rule runs on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERRATA", "Erratum"]


@dataclass(frozen=True)
class Erratum:
    """section: of the PTX manual.  programs: the beginning of the names of those in tests/both that show it."""

    section: str
    manual: str
    silicon: str
    programs: str


ERRATA: dict[str, Erratum] = {}
