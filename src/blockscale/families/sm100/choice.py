"""Which configuration for which problem: an ordered list of reasons.

No B200 has been measured here, so no reason rests on a measurement. Each is derived by counting, and says so.
"""

from __future__ import annotations

from dataclasses import replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm100.constraints import geometry, tile_count, unbuildable, unfit
from blockscale.kernels.parts.geometry import TILE_K, TILE_M
from blockscale.problem import OUT_BYTES, Problem, Target

# What is chosen from; every width that the tensor cores have can be asked for.
CHOICES = tuple(Config((TILE_M, columns), accumulators=sums) for columns in (64, 128, 192, 256) for sums in (2, 1))


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    found, refused = [], Reason("config", "none")
    for config in CHOICES:
        reason = unbuildable(config, target) or unfit(problem, target, config)
        if reason is None:
            found.append(config)
        else:
            refused = reason
    if not found:
        return refused
    config = min(found, key=lambda c: (_bytes(c, problem, target), -c.tile[1], c.accumulators))
    reasons = (_why_tile(config, found, problem, target), _why_accumulators(config, found, problem, target))
    config, why = _raster(config, problem, target)
    return Choice(config, (*reasons, why))


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """Tiles that the busiest CTA computes, one after the other."""
    return -(-tile_count(problem, config) // target.sms)


def _bytes(config: Config, problem: Problem, target: Target) -> int:
    """What stands for the time of the busiest CTA: the bytes that it loads, and those whose storing nothing overlaps.

    This takes multiplying to hide behind loading, and a byte to cost the same in either direction. With one accumulator
    the next tile waits until a tile is stored, with two only the storing of the last tile is left alone.
    """
    waves = _waves(config, problem, target)
    loaded = waves * -(-problem.k // TILE_K) * geometry(config, target).stage_bytes
    stored = config.tile[0] * config.tile[1] * OUT_BYTES[problem.out_dtype]
    return loaded + stored * (1 if config.accumulators == 2 else waves)


def _name(config: Config) -> str:
    return f"{config.tile[0]}x{config.tile[1]}" + (" x 2" if config.accumulators == 2 else "")


def _why_tile(config: Config, found: list[Config], problem: Problem, target: Target) -> str:
    tiles, waves = tile_count(problem, config), _waves(config, problem, target)
    counted = ", ".join(f"{_name(c)} {_bytes(c, problem, target):,}" for c in found)
    return (
        f"tiles of {_name(config)}: {tiles} for {target.sms} multiprocessors are {waves} wave{'s' * (waves != 1)}; "
        f"the fewest bytes that a CTA loads, or stores with nothing beside it ({counted}; derived, not measured)"
    )


def _why_accumulators(config: Config, found: list[Config], problem: Problem, target: Target) -> str:
    waves = _waves(config, problem, target)
    if config.accumulators == 2:
        return f"two accumulators: a CTA does {waves} tiles, and storing one overlaps the next (derived)"
    if waves == 1:
        return "one accumulator: a CTA does one tile at most, so that there is nothing to overlap (derived)"
    fits = replace(config, accumulators=2) in found
    why = "two save nothing" if fits else f"two of {config.tile[1]} columns do not fit, and narrower tiles load more"
    return f"one accumulator: a CTA does {waves} tiles, yet overlap is given up: {why} (derived)"


def _raster(config: Config, problem: Problem, target: Target) -> tuple[Config, str]:
    """The direction in which the tiles in flight touch the fewest rows of operands: what L2 has to hold."""
    height, width = config.tile
    down, across = -(-problem.m // height), -(-problem.n // width)
    in_flight = min(down * across, target.sms)

    def rows(raster: str) -> int:
        first, second = (down, across) if raster == "m" else (across, down)
        near, far = min(first, in_flight), min(second, -(-in_flight // first))
        return near * height + far * width if raster == "m" else near * width + far * height

    raster = min("mn", key=rows)
    touched = f"{rows('m')} rows of operands along m, {rows('n')} along n"
    why = f"raster along {raster}: {in_flight} tiles in flight touch {touched} (derived)"
    return replace(config, raster=raster), why
