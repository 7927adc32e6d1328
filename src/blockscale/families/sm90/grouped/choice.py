"""What the sm_90a kernels for grouped products do, and which configuration a product gets."""

from __future__ import annotations

import math
from dataclasses import replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90 import constraints
from blockscale.families.sm90.constraints import MOST_TOKEN_TILES, TOKENS
from blockscale.formats.fragment import ROWS
from blockscale.kernels.parts.expert_memory import MOST_BLOCKS, MOST_GROUPS, of_experts
from blockscale.problem import GATED, GroupedProblem, Problem, Target

MEASURED = "H200, 2026-11-30"
CUTS = ((4, 4), (8, 2))  # (warps along k, tiles of 16 rows of a weight) of a CTA; the second for long k
MOST_WARPS = 32  # of a CTA
FINISHERS = 2  # warps of a CTA that finish results, where warpgroups multiply
MOST_TOKENS = 32  # of a tile: wider sums were seen copied before the tensor core had done with them
MOST_ROWS_IN_ALL = 2**31 - 1024
TILE_COST = 10  # rows of a weight that are read in the time that a tile takes beside its own
MOST_ROWS = 64  # of a group, on average, that a kernel is asked for: it reads a weight for every 32 of them


def _groups(tokens: int, groups: int, k_groups: int, depth: int, buffers: int, kept: int) -> Config:
    """Warpgroups for so many times 64 rows of a weight, and along k."""
    tile = tokens, constraints.GROUP * ROWS * groups
    rings = {"stages": depth, "buffers": buffers, "accumulators": kept}
    return Config(tile, pdl=True, wgmma=True, k_warps=k_groups, **rings)  # type: ignore[arg-type] # integers


EXPERTS = {
    8: ((4, 1, 2, 4, 2), (2, 2, 2, 8, 2), (1, 4, 2, 16, 2)),
    16: ((4, 1, 2, 4, 2), (2, 2, 2, 6, 2), (1, 4, 1, 8, 2)),
    32: ((4, 1, 1, 4, 1), (2, 2, 1, 4, 1)),
}
"""By the most rows of activations of a tile what else a configuration has."""
PRESETS = tuple(_groups(tokens, *how) for tokens, ways in EXPERTS.items() for how in ways)


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.activation in GATED:
        return Reason("activation", f"{problem.activation!r}: the {target.backend} kernels have no gates")
    return constraints.unsupported(problem, target)


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    assert isinstance(problem, GroupedProblem)
    if config.wgmma:
        dense = replace(config, ctas=None)  # of which the kernels for single products have none
        return constraints.unbuildable(dense, target) or _unfit_experts(problem, target, config)
    for name, expected in (("accumulators", 1), ("ctas", None)):
        if getattr(config, name) != expected:
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected {expected} without wgmma")
    reason, blocks = constraints.unfit(problem, target, config), most_blocks(problem, config)
    if reason is None and blocks > MOST_TOKEN_TILES:
        return Reason("config.tile", f"up to {blocks} tiles of {config.tile[0]} rows, at most {MOST_TOKEN_TILES}")
    return reason


def _unfit_experts(problem: GroupedProblem, target: Target, config: Config) -> Reason | None:
    """Of the kernel whose warpgroups multiply."""
    if problem.groups > MOST_GROUPS:
        return Reason("groups", f"{problem.groups}, at most {MOST_GROUPS} with wgmma")
    if config.tile[0] > MOST_TOKENS:
        return Reason("config.tile", f"{config.tile[0]} rows, at most {MOST_TOKENS}")
    if config.split != 1:
        return Reason("config.split", f"{config.split}, expected 1")
    for name, value in (("accumulators", config.accumulators), ("ctas", config.ctas)):
        if value is not None and value < 1:
            return Reason(f"config.{name}", f"{value}, expected at least 1")
    blocks, warps = most_blocks(problem, config), constraints.warps(config) + config.k_warps + FINISHERS
    if blocks > MOST_BLOCKS:
        return Reason("config.tile", f"up to {blocks} tiles of {config.tile[0]} rows, at most {MOST_BLOCKS}")
    if warps > MOST_WARPS:
        return Reason("config.k_warps", f"{config.k_warps}: {warps} warps in all, at most {MOST_WARPS}")
    needed = smem(config)
    if needed > target.smem:
        return Reason("config.buffers", f"{config.buffers}: {needed:,} bytes of shared memory, at most {target.smem:,}")
    rows = problem.m * (problem.groups if problem.form == "masked" else 1)
    if rows > MOST_ROWS_IN_ALL:
        return Reason("m", f"{rows} rows in all, at most {MOST_ROWS_IN_ALL}")
    return None


def smem(config: Config) -> int:
    """Bytes of shared memory of the kernel whose warpgroups multiply."""
    assert config.stages is not None
    assert config.buffers is not None
    warps = constraints.warps(config)
    return of_experts(config.tile[0], warps, config.stages, config.buffers, config.accumulators)


def ctas(problem: GroupedProblem, target: Target, config: Config) -> int:
    """Of a launch: one a multiprocessor, and no more than there can be tiles."""
    return min(config.ctas or target.sms, most_blocks(problem, config) * -(-problem.n // config.tile[1]))


def most_blocks(problem: GroupedProblem, config: Config) -> int:
    """Of tokens, as many as there can be, whatever the sizes of groups."""
    tokens = config.tile[0]
    if problem.form == "masked":
        return problem.groups * -(-problem.m // tokens)
    groups = min(problem.groups, problem.m)
    return groups + (problem.m - groups) // tokens


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    assert isinstance(problem, GroupedProblem)
    groups = problem.groups if problem.form == "masked" else min(problem.groups, problem.m)
    mean = problem.m if problem.form == "masked" else problem.m / groups
    tokens = next((rows for rows in EXPERTS if mean <= rows), max(EXPERTS))
    blocks = groups * math.ceil(mean / tokens)
    fit = [p for p in PRESETS if p.tile[0] == tokens and unfit(problem, target, p) is None]
    if fit:
        config = min(fit, key=lambda p: _rows_read(problem, target, p, blocks))
        reasons = (
            f"blocks of {tokens} rows of activations: the fewest that hold {mean:.3g}, or the most there are "
            f"({MEASURED})",
            f"tiles of {config.tile[1]} rows of a weight: the busiest of {target.sms} multiprocessors is done soonest "
            f"if there are {blocks} blocks ({MEASURED})",
        )
        return Choice(config, reasons)
    for config in _warps(math.ceil(mean)):
        refused = unfit(problem, target, config)
        if refused is None:
            why = f"warps, in {config.k_warps} parts of k: more groups or blocks than warpgroups' table has (derived)"
            return Choice(config, (why,))
    assert refused is not None
    return refused


def _rows_read(problem: Problem, target: Target, config: Config, blocks: int) -> tuple[int, int]:
    """Of weights, by the busiest multiprocessor, with what else a tile costs; and of equals the largest tile first."""
    rows = config.tile[1]
    return -(-blocks * -(-problem.n // rows) // target.sms) * (rows + TILE_COST), -rows


def candidates() -> tuple[Config, ...]:
    """Those that a measurement compares."""
    return (*PRESETS, *_warps(1), *_warps(16))


def _warps(mean: int) -> tuple[Config, ...]:
    """By warps, for what warpgroups do not do."""
    tokens = next((rows for rows in TOKENS[False] if rows >= mean), TOKENS[False][-1])
    buffers = 4 if tokens <= 4 else 2
    return tuple(
        Config((tokens, ROWS * tiles), stages=2, pdl=True, k_warps=k_warps, chunk=256 * k_warps, buffers=buffers)
        for k_warps, tiles in CUTS
    )
