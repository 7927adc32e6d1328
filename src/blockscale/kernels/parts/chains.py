"""How long the tensor core may add to the same sums.

It truncates what it adds, so that of a sum of positive numbers over 1,024 k it loses up to 5.6 x 2^-20
(benchmarks/records/hopper-errors.json), where the result contract allows (4 + K/1024) x 2^-20 in all. Parts of k are
added in fp32, rounded to nearest, and lose next to nothing: with four or more, the chains of each are short enough up
to K = 21,845; with fewer, sums go to others after so many units of 128 k.

Pure arithmetic, without the compiler.
"""

from __future__ import annotations

from blockscale.formats.fragment import DEPTH

CHAIN = {1: 6, 2: 8, 3: 8}  # units, by the parts that k is cut into
LOSS = 4.75  # of a sum over 1,024 k where k has four parts or more, in units of 2^-20


def longest(parts: int) -> int | None:
    """k after which sums go to others, or None where they never do."""
    return CHAIN[parts] * DEPTH if parts in CHAIN else None


def kept(parts: int, k: int) -> bool:
    """Whether the contract is kept by sums that never go to others."""
    return LOSS * k <= parts * (4096 + k)
