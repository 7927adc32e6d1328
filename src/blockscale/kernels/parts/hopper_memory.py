"""How Hopper's kernels lay shared memory out.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

from blockscale.formats.fragment import DEPTH, ROWS, UNIT_BYTES
from blockscale.formats.layouts import round_up

PITCH = ROWS + 4  # fp32 from one token's sums to the next, so that a warp's stores meet no bank twice
SKEW = 8  # elements between rows of activations beyond their own: 16 bytes
WARPS_HEAD = 512  # bytes of barriers, then alpha, where warps multiply
GROUPS_HEAD = 1024  # where warpgroups do


def sum_bytes(tokens: int) -> int:
    """Of a warp's sums."""
    return round_up(tokens, 8) * PITCH * 4


def of_warps(tokens: int, warps: int, chunk: int, buffers: int) -> tuple[int, int]:
    """Where activations begin, behind the sums of `warps`, and the bytes of all."""
    activations = round_up(WARPS_HEAD + warps * sum_bytes(tokens), 128)
    return activations, activations + buffers * tokens * (chunk + SKEW) * 2


def warp_bytes(tokens: int, depth: int) -> int:
    """A warp's own where warpgroups multiply: weights, later sums."""
    return round_up(max((depth + 1) * UNIT_BYTES, sum_bytes(tokens)), 128)


def of_groups(tokens: int, warps: int, depth: int, buffers: int) -> int:
    """The bytes of all: what is the warps' own, then activations."""
    return round_up(GROUPS_HEAD + warps * warp_bytes(tokens, depth), 1024) + buffers * tokens * DEPTH * 2
