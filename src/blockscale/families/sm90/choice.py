"""Which configuration for which product, and from how many rows on torch's matmul is faster.

What was measured are `PRESETS`: for so many rows of activations and so many rows of a tile the kernel, its warps and
its rings. Which of these tiles a weight gets is derived: that with which the multiprocessors are done soonest, when
all tiles take as long as their share of the weight. The date and the GPU stand with the numbers, records are in
benchmarks/records, what lost in docs/notes/hopper.md.
"""

from __future__ import annotations

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
    (4, 7, 2, 1792, 14_336),
    (6, 4, 2, 2048),
    (6, 5, 1, 1920, 14_337),
    (7, 4, 1, 2048),
)
GROUPS = ((1, 4, 2, 8, 1), (1, 4, 2, 8, 2), (1, 3, 2, 9, 2), (2, 2, 2, 6, 2))
PRESETS = (
    *(_warps(tokens, *how) for tokens in (1, 2) for how in WARPS),
    *(_groups(tokens, *how) for tokens in (8, 16, 24, 32, 48, 64) for how in GROUPS),
    *(_groups(tokens, 2, 3, 2, 6, 1) for tokens in (8, 16, 24, 32)),
)
INVARIANT = 16  # rows of activations of a tile, whatever M
CTA_COST = 65_536  # weights that are read in the time that a CTA takes to begin and to end with 16 rows
CROWDED = 32  # rows of activations from which, as with more than a wave, fewer warps do better
EXPAND_FROM = 4096  # rows from which expanding the weight and torch's matmul are faster


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    rows = INVARIANT if problem.invariant else problem.m * problem.batch
    if rows >= prefill.LEAST:
        many = prefill.choose(problem, target)
        return Choice(many.config, (*_expanded(problem), *many.reasons))
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
        *_expanded(problem),
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
        "pdl: a CTA is there when the work ahead in the stream ends; it touches nothing before that",
    )
    return Choice(config, reasons)


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return (*(preset.config for preset in PRESETS), *prefill.PRESETS)


def _expanded(problem: Problem) -> tuple[str, ...]:
    """That `gemm` does without a configuration, if it does."""
    if problem.invariant or problem.m * problem.batch < EXPAND_FROM:
        return ()
    return (
        f"gemm takes it only where it is asked to (config): from {EXPAND_FROM} rows on it expands the weight, for "
        "torch's matmul",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ctas(config: Config, problem: Problem) -> int:
    tokens, rows = config.tile
    return -(-problem.n // rows) * -(-problem.m * problem.batch // tokens) * config.split


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """CTAs that the busiest multiprocessor runs, one after the other."""
    return -(-_ctas(config, problem) // target.sms)


def _order(preset: Preset, problem: Problem, target: Target) -> tuple[float, ...]:
    """What is least for the best: the cost; of equals the tile, the warps and the k that it was measured with."""
    config = preset.config
    crowded = _waves(config, problem, target) > 1 or config.tile[0] >= CROWDED
    tile = 64 if problem.k <= 4096 else 128
    warps = abs(config.k_warps - (3 if crowded else 4)) if config.wgmma else 0
    return _cost(config, problem, target), abs(config.tile[1] - tile), warps, -preset.k


def _cost(config: Config, problem: Problem, target: Target) -> float:
    """Weights that the busiest multiprocessor reads, and those that it could read while its CTAs begin and end."""
    ends = CTA_COST * (0.5 + config.tile[0] / 32)
    return _waves(config, problem, target) * (config.tile[1] * problem.k / config.split + ends)
