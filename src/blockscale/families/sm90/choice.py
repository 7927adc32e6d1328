"""Which configuration for which product, and from how many rows on torch's matmul is faster.

What was measured are `PRESETS`: for so many rows of activations and so many rows of a tile the kernel, its warps and
its rings. Which of these tiles a weight gets is derived: that with which the multiprocessors are done soonest, when
all tiles take as long as their share of the weight. The date and the GPU stand with the numbers, records are in
benchmarks/records, what lost in docs/notes/hopper.md.
"""

from __future__ import annotations

from typing import NamedTuple

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90.constraints import GROUP, unbuildable, unfit
from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.problem import Problem, Target


class Preset(NamedTuple):
    """For at most `rows` rows of activations, and K from `k` on."""

    rows: int
    config: Config
    k: int = 1


def _warps(tokens: int, tiles: int, k_warps: int, stages: int, chunk: int, k: int = 1) -> Preset:
    """Warps multiply: tiles of `tiles` times 16 rows."""
    tile = tokens, ROWS * tiles
    return Preset(tokens, Config(tile, stages=stages, pdl=True, k_warps=k_warps, chunk=chunk, buffers=4), k)


def _groups(tokens: int, groups: int, k_groups: int, stages: int, buffers: int, split: int) -> Preset:
    """Warpgroups multiply: tiles of `groups` times 64 rows."""
    tile = tokens, GROUP * ROWS * groups
    config = Config(tile, stages=stages, pdl=True, wgmma=True, k_warps=k_groups, split=split, buffers=buffers)
    return Preset(tokens, config)


MEASURED = "H200, 2026-11-30"
WARPS = (
    (1, 16, 1, 2048),
    (2, 8, 1, 2048),
    (2, 14, 1, 1792, 8192),
    (3, 8, 1, 2048),
    (4, 4, 2, 2048),
    (6, 4, 1, 2048),
    (7, 2, 2, 2048),
    (14, 2, 2, 2048),
)
GROUPS = tuple((*how, split) for how in ((1, 4, 2, 8), (2, 2, 2, 6), (4, 1, 2, 6)) for split in (1, 2))
PRESETS = (
    *(_warps(tokens, *how) for tokens in (1, 2) for how in WARPS),
    *(_groups(tokens, *how) for tokens in (8, 16, 24, 32, 48, 64) for how in GROUPS),
)
FAVOURED = 128  # rows of a tile, of those that are done at the same time
INVARIANT = 16  # rows of activations of a tile, whatever M
CTA_COST = 65_536  # weights that are read in the time that a CTA takes to begin and to end, 1.5 us
EXPAND_FROM = 4096  # rows from which expanding the weight and torch's matmul are faster


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    rows = INVARIANT if problem.invariant else problem.m * problem.batch
    tokens = next((p.rows for p in PRESETS if rows <= p.rows), PRESETS[-1].rows)
    found = [p for p in PRESETS if p.rows == tokens and problem.k >= p.k]
    config = min(found, key=lambda p: (_cost(p.config, problem, target), abs(p.config.tile[1] - FAVOURED), -p.k)).config
    ctas, waves = _ctas(config, problem), _waves(config, problem, target)
    by = "wgmma" if config.wgmma else "mma.sync"
    reasons = (
        f"tiles of {tokens} rows of activations, by {by}: "
        + (
            "those of invariant products"
            if problem.invariant
            else f"the fewest that hold {rows}, or the most there are"
        )
        + f" ({MEASURED})",
        f"tiles of {config.tile[1]} rows of the weight, k among {config.split} CTAs: {ctas} CTAs for {target.sms} "
        f"multiprocessors are {waves} wave{'s' * (waves != 1)}, done soonest (derived)",
        f"{config.k_warps} {'warpgroups' if config.wgmma else 'warps'} along k, {config.stages} units of weights in "
        f"flight, {config.buffers} chunks of {config.chunk or DEPTH} activations ({MEASURED})",
        "pdl: a CTA is there when the work ahead in the stream ends; it touches nothing before that",
    )
    return unbuildable(config, target) or unfit(problem, target, config) or Choice(config, reasons)


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return tuple(preset.config for preset in PRESETS)


def _ctas(config: Config, problem: Problem) -> int:
    """CTAs of one tile of rows of activations."""
    return -(-problem.n // config.tile[1]) * config.split


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """CTAs that the busiest multiprocessor runs, one after the other."""
    return -(-_ctas(config, problem) // target.sms)


def _cost(config: Config, problem: Problem, target: Target) -> float:
    """Weights that the busiest multiprocessor reads, and those that it could read while its CTAs begin and end."""
    return _waves(config, problem, target) * (config.tile[1] * problem.k / config.split + CTA_COST)
