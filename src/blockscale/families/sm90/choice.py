"""Which configuration for which product.

What was measured are `PRESETS`: for so many rows of activations and so many rows of a tile the kernel, its warps and
its rings. Which of these tiles a weight gets is derived: that with which the multiprocessors are done soonest, when
all tiles take as long as their share of the weight. The date and the GPU stand with the numbers, records are in
benchmarks/records, what lost in docs/notes/hopper.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90 import prefill
from blockscale.families.sm90.constraints import GROUP, unfit
from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.problem import Problem, Target


class Preset(NamedTuple):
    """For at most `rows` rows of activations, and K from `k` on."""

    rows: int
    config: Config
    k: int = 1


MEASURED = "H200, 2026-11-30"
PREFETCH = 2  # units of a warp that L2 is asked for before the kernel ahead has ended


def _warps(tokens: int, tiles: int, k_warps: int, stages: int, chunk: int, k: int = 1) -> Preset:
    """Warps multiply: tiles of `tiles` times 16 rows."""
    how = Config((tokens, ROWS * tiles), pdl=True, prefetch=PREFETCH, stages=stages, k_warps=k_warps)
    return Preset(tokens, replace(how, chunk=chunk, buffers=4), k)


def _groups(tokens: int, groups: int, k_groups: int, split: int, stages: int, buffers: int, k: int = 1) -> Preset:
    """Warpgroups multiply: tiles of `groups` times 64 rows."""
    how = Config((tokens, GROUP * ROWS * groups), pdl=True, prefetch=PREFETCH, wgmma=True, k_warps=k_groups)
    return Preset(tokens, replace(how, split=split, stages=stages, buffers=buffers), k)


# By warps: (tiles of 16 rows, warps along k, units in flight, k of a chunk of activations, from which K on).
WARPS = (
    (1, 16, 1, 2048),
    (2, 8, 1, 2048),
    (2, 14, 1, 1792, 14_336),
    (3, 8, 1, 2048),
    (3, 5, 2, 2560, 5120),
    (3, 8, 1, 2048, 8192),
    (4, 4, 2, 2048),
    (4, 7, 2, 1792, 5120),
    (4, 4, 2, 2048, 8192),
    (4, 7, 2, 1792, 11_008),
    (6, 4, 2, 2048),
    (7, 4, 1, 2048),
    (14, 2, 2, 1536),
)
# By warpgroups, up to 16, 32 and 64 rows of activations: (groups of 64 rows, warpgroups along k, CTAs along k, units in
# flight, slots of activations, from which K on).
FEW = (
    (1, 4, 1, 2, 12),
    (2, 2, 2, 2, 12, 7168),
    (1, 3, 2, 2, 12),
    (1, 3, 1, 2, 12),
    (2, 2, 1, 2, 12),
    (3, 1, 2, 2, 12),
    (3, 1, 1, 2, 12),
    (4, 1, 1, 2, 12),
)
SOME = (
    (1, 4, 1, 1, 12),
    (1, 3, 2, 2, 9),
    (1, 3, 1, 2, 12),
    (2, 2, 1, 2, 12),
    (3, 1, 2, 2, 12),
    (3, 1, 1, 2, 8),
    (4, 1, 1, 2, 8),
)
MANY = (
    (1, 3, 1, 2, 9),
    (2, 2, 2, 1, 6, 7168),
    (1, 2, 2, 3, 8),
    (1, 3, 2, 1, 6),
    (2, 2, 1, 1, 8),
    (3, 1, 2, 2, 6),
    (3, 1, 1, 2, 6),
    (4, 1, 1, 1, 6),
)
GROUPS = {8: FEW, 16: FEW, 24: SOME, 32: SOME, 48: MANY, 64: MANY}
PRESETS = (
    *(_warps(tokens, *how) for tokens in (1, 2) for how in WARPS),
    *(_groups(tokens, *how) for tokens, all_of_them in GROUPS.items() for how in all_of_them),
)
INVARIANT = 16  # rows of activations of a tile, whatever M
CTA_COST = 131_072  # weights that are read in the time that a CTA takes to begin and to end with 16 rows


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    rows = INVARIANT if problem.invariant else problem.m * problem.batch
    if rows >= prefill.LEAST:
        return prefill.choose(problem, target)
    most = max(p.rows for p in PRESETS)
    tokens = next((p.rows for p in PRESETS if rows <= p.rows), most)
    found = [p for p in PRESETS if p.rows == tokens and problem.k >= p.k]
    fit = [p for p in found if unfit(problem, target, p.config) is None]
    if not fit:
        return unfit(problem, target, found[-1].config) or Reason("config", "none")
    config = min(fit, key=lambda p: _order(p, problem, target)).config
    ctas, waves = _ctas(config, problem), _waves(config, problem, target)
    by = "wgmma" if config.wgmma else "mma.sync"
    along_k = _count(config.k_warps, "warpgroup" if config.wgmma else "warp")
    reasons = (
        f"tiles of {_count(tokens, 'row')} of activations, by {by}: "
        + (
            "those of invariant products"
            if problem.invariant
            else f"the fewest that hold {rows}, or the most there are"
        )
        + f" ({MEASURED})",
        f"tiles of {config.tile[1]} rows of the weight, k among {_count(config.split, 'CTA')}: {_count(ctas, 'CTA')} "
        f"for {target.sms} multiprocessors, {_count(waves, 'wave')}: done soonest (derived)",
        f"{along_k} along k, {_count(config.stages or 0, 'unit')} of weights in flight, "
        f"{_count(config.buffers or 0, 'chunk')} of {config.chunk or DEPTH} activations ({MEASURED})",
        "pdl: a CTA is there when the work ahead in the stream ends; before that it touches nothing, but asks L2 for "
        f"{config.prefetch} units of weights a warp",
    )
    return Choice(config, reasons)


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return (*dict.fromkeys(preset.config for preset in PRESETS), *prefill.PRESETS)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ctas(config: Config, problem: Problem) -> int:
    tokens, rows = config.tile
    return -(-problem.n // rows) * -(-problem.m * problem.batch // tokens) * config.split


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """CTAs that the busiest multiprocessor runs, one after the other."""
    return -(-_ctas(config, problem) // target.sms)


def _order(preset: Preset, problem: Problem, target: Target) -> tuple[float, ...]:
    """What is least for the best: the cost; of equals the k that it was measured with, then the order of presets."""
    return _cost(preset.config, problem, target), -preset.k


def _cost(config: Config, problem: Problem, target: Target) -> float:
    """Weights that the busiest multiprocessor reads, and those that it could read while its CTAs begin and end."""
    ends = CTA_COST * (0.75 + config.tile[0] / 64)
    return _waves(config, problem, target) * (config.tile[1] * problem.k / config.split + ends)
