"""How long the tensor core may add to the same sums.

It truncates what it adds, so that of a sum of positive numbers over 1,024 k it loses up to 5.6 x 2^-20 in bf16
(benchmarks/records/hopper-errors.json) and 6.8 x 2^-20 in fp16, where the result contract allows (4 + K/1024) x 2^-20
in all. Sums of parts of k are added in fp32, rounded to nearest, and lose next to nothing. Few parts go to other sums
after so many units (where a chain is all of a short k, its worst single sums count: hence 512 k); with four or more,
chains are short enough up to some K.

Pure arithmetic, without the compiler.
"""

from __future__ import annotations

from blockscale.formats.fragment import DEPTH

CHAIN = {1: 4, 2: 6, 3: 8}  # units of 128 k, by the parts that k is cut into
LOSS = {"bf16": 4.75, "fp16": 6.25}  # of a sum over 1,024 k where k has four parts or more, in units of 2^-20

LEAST = 768  # k from which one part keeps the contract: of fewer terms single sums lose up to 5 x 2^-20 in fp16


def longest(parts: int) -> int | None:
    """k after which sums go to others, or None where they never do."""
    return CHAIN[parts] * DEPTH if parts in CHAIN else None


def kept(parts: int, k: int, a: str) -> bool:
    """Whether the contract is kept, with activations of type `a`, by sums that never go to others."""
    return LOSS[a] * k <= parts * (4096 + k)
