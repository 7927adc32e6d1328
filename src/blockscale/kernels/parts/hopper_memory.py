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
ALONE = 114 * 1024  # more than half of a multiprocessor's: no two CTAs share one while another has none


def sum_bytes(tokens: int) -> int:
    """Of a warp's sums."""
    return round_up(tokens, 8) * PITCH * 4


def of_warps(tokens: int, warps: int, chunk: int, buffers: int) -> tuple[int, int]:
    """Where activations begin, behind the sums of `warps`, and the bytes of all."""
    activations = round_up(WARPS_HEAD + warps * sum_bytes(tokens), 128)
    return activations, activations + buffers * tokens * (chunk + SKEW) * 2


def warp_bytes(tokens: int, depth: int, split: int = 1) -> int:
    """A warp's own where warpgroups multiply: weights, and later its sums, unless other CTAs of a cluster send some."""
    own = 0 if split > 1 else sum_bytes(tokens)
    return round_up(max((depth + 1) * UNIT_BYTES, own), 128)


def group_sums(tokens: int, warps: int, split: int) -> int:
    """A CTA's sums, where they have a place of their own."""
    return warps * sum_bytes(tokens) if split > 1 else 0


def of_groups(tokens: int, warps: int, depth: int, buffers: int, split: int = 1) -> int:
    """The bytes of all: what is the warps' own, sums of a cluster, then activations; `ALONE` at least."""
    own = warps * warp_bytes(tokens, depth, split) + group_sums(tokens, warps, split)
    return max(round_up(GROUPS_HEAD + own, 1024) + buffers * tokens * DEPTH * 2, ALONE)


VECTOR_BYTES = 16
SPARE = 160  # registers of a thread for sums: of the tensor core, and others


def kept_sums(tokens: int) -> int:
    """Of other sums than the tensor core's, how many a thread has in registers."""
    return min(tokens // 2, SPARE - tokens // 2)


def tile_bytes(tokens: int, warps: int, split: int) -> int:
    """Of a tile's sums that are not in registers, or of its results, 16 bits at a time."""
    results = 0 if split > 1 else tokens * warps * ROWS * 2
    return max((tokens // 2 - kept_sums(tokens)) * warps * 32 * 4, results)


def exchange_bytes(tokens: int, warps: int, split: int) -> int:
    """Of the sums that a CTA gets from another one with which it shares k."""
    return tokens // 2 * warps * ROWS * 4 if split > 1 else 0


def of_prefill(tokens: int, warps: int, split: int, buffers: int, depth: int) -> int:
    """The bytes of all: what is a tile's, then boxes of activations, weights, and sums of another CTA. Where there are
    such, results take the place of the first in the end."""
    boxes = buffers * tokens * (DEPTH // 2) * 2
    held = tile_bytes(tokens, warps, split) + boxes + depth * warps * UNIT_BYTES
    return GROUPS_HEAD + round_up(held + exchange_bytes(tokens, warps, split), 1024)
