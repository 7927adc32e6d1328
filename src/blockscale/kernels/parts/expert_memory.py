"""How Hopper's kernel for groups lays shared memory out.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

from blockscale.formats.fragment import DEPTH, UNIT_BYTES
from blockscale.formats.layouts import round_up
from blockscale.kernels.parts.hopper_memory import GROUPS_HEAD, sum_bytes

MOST_GROUPS = 512  # of a launch
MOST_BLOCKS = 1024  # of their rows
ENTRY_BYTES = 16  # of the table of blocks
PAIR = 2  # units that are asked for at a time, 256 k


def of_experts(tokens: int, warps: int, depth: int, buffers: int, kept: int) -> int:
    """The bytes of all: barriers, the table, weights, sums, activations."""
    own = warps * (PAIR * (depth + 1) * UNIT_BYTES + kept * sum_bytes(tokens))
    return round_up(GROUPS_HEAD + MOST_BLOCKS * ENTRY_BYTES + own, 1024) + buffers * tokens * PAIR * DEPTH * 2
