"""Which configuration for which product, and from how many rows on torch's matmul is faster.

What was measured are `PRESETS`: for so many rows of activations and so many rows of a tile the kernel, its warps and
its rings. Which of these tiles a weight gets is derived: that with which the multiprocessors are done soonest, when
all tiles take as long as their share of the weight. The date and the GPU stand with the numbers, records are in
benchmarks/records, what lost in docs/notes/hopper.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90.constraints import unbuildable, unfit
from blockscale.formats.fragment import ROWS
from blockscale.problem import Problem, Target


class Preset(NamedTuple):
    """For at most `rows` rows of activations; `splits` are those of k among CTAs that go with it."""

    rows: int
    config: Config
    splits: tuple[int, ...] = (1,)


def _warps(tokens: int, tiles: int, k_warps: int, stages: int, chunk: int, buffers: int) -> Preset:
    """Warps multiply: tiles of `tiles` times 16 rows."""
    tile = tokens, ROWS * tiles
    return Preset(tokens, Config(tile, stages=stages, k_warps=k_warps, chunk=chunk, buffers=buffers))


def _groups(tokens: int, groups: int, k_groups: int, stages: int, buffers: int) -> Preset:
    """Warpgroups multiply: tiles of `groups` times 64 rows."""
    tile = tokens, 64 * groups
    config = Config(tile, stages=stages, wgmma=True, k_warps=k_groups, chunk=128, buffers=buffers)
    return Preset(tokens, config, (1, 2, 4))


MEASURED = "H200, 2026-11-30"
PRESETS = (
    *(
        _warps(tokens, *warps)
        for tokens in (1, 2, 4, 8)
        for warps in ((1, 16, 1, 2048, 4), (2, 8, 1, 1024, 4), (3, 8, 1, 1024, 4), (4, 4, 2, 1024, 4))
    ),
    *(_warps(tokens, *warps) for tokens in (1, 2, 4, 8) for warps in ((6, 4, 1, 1024, 4), (7, 4, 1, 1024, 4))),
    *(_warps(tokens, 14, 2, 2, 1024, 4) for tokens in (1, 2, 4, 8)),
    *(_groups(tokens, *groups) for tokens in (16, 32, 64) for groups in ((1, 4, 2, 8), (2, 2, 2, 6))),
)
INVARIANT = _groups(16, 2, 2, 2, 6)  # one tile and no split, whatever N
CTA_COST = 65_536  # weights that are read in the time that a CTA takes to begin and to end, 1.5 us
EXPAND_FROM = 4096  # rows from which expanding the weight and torch's matmul are faster


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    rows = problem.m * problem.batch
    if problem.invariant:
        config, why = INVARIANT.config, f"{INVARIANT.config}: the one configuration of invariant products ({MEASURED})"
        return _checked(problem, target, config, (why,))
    tokens = next((p.rows for p in PRESETS if rows <= p.rows), PRESETS[-1].rows)
    found = [replace(p.config, split=split) for p in PRESETS if p.rows == tokens for split in p.splits]
    config = min(found, key=lambda c: (_cost(c, problem, target), -c.tile[1], c.split))
    ctas, waves = _ctas(config, problem), _waves(config, problem, target)
    by = "wgmma" if config.wgmma else "mma.sync"
    reasons = (
        f"tiles of {tokens} rows of activations: the fewest that hold {rows}, or the most there are; {by} ({MEASURED})",
        f"tiles of {config.tile[1]} rows of the weight, k among {config.split} CTAs: {ctas} CTAs for {target.sms} "
        f"multiprocessors are {waves} wave{'s' * (waves != 1)}, done soonest (derived)",
        f"{config.k_warps} {'warpgroups' if config.wgmma else 'warps'} along k, {config.stages} units of weights in "
        f"flight, {config.buffers} chunks of {config.chunk} activations ({MEASURED})",
    )
    return _checked(problem, target, config, reasons)


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return tuple(replace(p.config, split=split) for p in PRESETS for split in p.splits)


def _checked(problem: Problem, target: Target, config: Config, reasons: tuple[str, ...]) -> Choice | Reason:
    return unbuildable(config, target) or unfit(problem, target, config) or Choice(config, reasons)


def _ctas(config: Config, problem: Problem) -> int:
    """CTAs of one tile of rows of activations."""
    return -(-problem.n // config.tile[1]) * config.split


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """CTAs that the busiest multiprocessor runs, one after the other."""
    return -(-_ctas(config, problem) // target.sms)


def _cost(config: Config, problem: Problem, target: Target) -> float:
    """Weights that the busiest multiprocessor reads, and those that it could read while its CTAs begin and end."""
    return _waves(config, problem, target) * (config.tile[1] * problem.k / config.split + CTA_COST)
