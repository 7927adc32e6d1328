"""Configurations that others measured on a B300 for four sizes, in the names of `Config`.

Source: GEMM3 v0.1.0, CuTe DSL kernels for B300, its table of shapes and its kernel guide; fp16 results, power limit
1100 W. Timings are theirs, of their kernels: nothing was measured with this one. What differs here: the order at 8192
(theirs splits rows of blocks into two groups of slots, ours gives each slot a row, see `order.owned`), and what theirs
asks for by name and ours always does (no loads beyond the last k, descriptors made before data are waited for).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.config import Config
from blockscale.problem import Problem, Target

FEWEST_SMS = 144  # nine clusters of 16 CTAs, for which the orders were made
RETIRED = 8  # tiles at the end of a sweep in which rows of a are no longer worth keeping


@dataclass(frozen=True)
class Preset:
    """A configuration, how long GEMM3's kernel took by its authors, and why each part of it is as it is."""

    config: Config
    microseconds: float
    reasons: tuple[str, ...]


_SHARED = Config((256, 256), mma_k=96, accumulators=2, release="preload", fallback_cluster=(2, 1), raster="n")
_KEPT = replace(_SHARED, l2_a="evict_last", l2_sfa="evict_last", l2_out="evict_first")

PRESETS: dict[tuple[int, int, int], Preset] = {
    (4096, 4096, 4096): Preset(
        replace(_SHARED, cluster=(4, 2), group=2, prefetch=3, pace=300),
        22.05,
        (
            "clusters of 4x2: rows of a are fetched once for two tiles, rows of b for two (published)",
            "bands of 2 along n: the rows of a in flight are needed again at once (published)",
            "L2 is asked for the first 768 of k while barriers are set up: a tile has but 6 times 768 (published)",
            "stores paced by 300 ns: the loads of the next tile come first (published)",
        ),
    ),
    (8192, 8192, 8192): Preset(
        replace(_KEPT, cluster=(8, 2), ownership="lines", pace=550, persist_mb=48),
        119.15,
        (
            "clusters of 8x2: rows of a are fetched once for two tiles, rows of b for four (published)",
            "eight slots keep to a row of blocks each, the ninth does their ends: 15 or 14 blocks a slot (derived)",
            "a and its scales, 36 MiB, stay in L2, 48 MiB of it set aside; b passes by, results go first (published)",
            "stores paced by 550 ns: the loads of the next tile come first (published)",
        ),
    ),
    (16384, 16384, 16384): Preset(
        replace(_KEPT, cluster=(8, 2), group=4, first="b", drop=RETIRED, pace=1210, persist_mb=40),
        960.30,
        (
            "clusters of 8x2: rows of a are fetched once for two tiles, rows of b for four (published)",
            "bands of 4 along n: 4096 rows of a, 36 MiB with scales, stay in L2, 40 MiB of it set aside (published)",
            "b, which passes by, is loaded first; a stays no longer than 8 tiles before the end (published)",
            "stores paced by 1210 ns: the loads of the next tile come first (published)",
        ),
    ),
    (32768, 32768, 32768): Preset(
        replace(
            _KEPT, cluster=(4, 4), group=4, read=64, drop=RETIRED, persist_mb=48, unroll=2, fixed=(32768, 32768, 32768)
        ),
        8210.53,
        (
            "clusters of 4x4: rows of a are fetched once for four tiles, rows of b for two (published)",
            "bands of 4 along n: 2048 rows of a, 36 MiB with scales (72 with 8x2), stay, 48 MiB set aside (published)",
            "a stays no longer than 8 tiles before the end of a sweep (published)",
            "whole lines of 128 bytes are stored at a time, without pauses (published)",
            "sizes are compiled in, and the loops of loads are unrolled by 2 (published)",
        ),
    ),
}


def preset(problem: Problem, target: Target) -> Preset | None:
    """The row for a problem, if there is one for its size, one matrix of 16-bit results, and a whole GPU."""
    plain = problem.batch == 1 and problem.out_dtype in ("fp16", "bf16") and not problem.invariant
    return PRESETS.get((problem.m, problem.n, problem.k)) if plain and target.sms >= FEWEST_SMS else None
