"""Which configuration for which product, and from how many rows on torch's matmul is faster.

Rows of `PRESETS` were measured; the date and the GPU stand with them, the record in benchmarks/records.
"""

from __future__ import annotations

from typing import NamedTuple

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90.constraints import unbuildable, unfit
from blockscale.problem import Problem, Target


class Preset(NamedTuple):
    """For products of at most `m` rows, and weights of at least `n` rows."""

    m: int
    n: int
    config: Config


MEASURED = "H200"
PRESETS = (
    Preset(1, 0, Config((1, 64), stages=4, k_warps=4, chunk=2048, buffers=2)),
    Preset(2, 0, Config((2, 64), stages=4, k_warps=4, chunk=2048, buffers=2)),
    Preset(4, 0, Config((4, 64), stages=4, k_warps=4, chunk=2048, buffers=2)),
    Preset(8, 0, Config((8, 64), stages=4, k_warps=4, chunk=2048, buffers=2)),
    Preset(16, 0, Config((16, 64), stages=2, k_warps=4, chunk=1024, buffers=3)),
    Preset(32, 0, Config((32, 64), stages=2, k_warps=4, chunk=1024, buffers=2)),
    Preset(2**31, 0, Config((64, 64), stages=1, k_warps=4, chunk=512, buffers=2)),
)
INVARIANT = Config((16, 64), stages=2, k_warps=4, chunk=1024, buffers=3)
EXPAND_FROM = 4096  # rows from which expanding the weight and torch's matmul are faster


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    if problem.invariant:
        config, why = INVARIANT, "the one configuration of invariant products"
    else:
        rows = problem.m * problem.batch
        preset = next(preset for preset in PRESETS if rows <= preset.m and problem.n >= preset.n)
        config, why = preset.config, f"the first preset for {rows} rows and n = {problem.n} ({MEASURED})"
    return unbuildable(config, target) or unfit(problem, target, config) or Choice(config, (why,))


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return tuple(dict.fromkeys(preset.config for preset in PRESETS))
