"""Which configuration for which problem: an ordered list of reasons.

None of these GPUs has been measured, so no reason rests on a measurement. Each is derived by counting, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.config import CHOICES, Config, candidates, geometry, supports, tile_count
from blockscale.kernels.parts.geometry import TILE_K
from blockscale.problem import OUT_BYTES, TARGETS, Problem, Target


class Unsupported(ValueError):
    """A problem or configuration that a GPU's kernels do not do; the message is the `Reason`."""


@dataclass(frozen=True)
class Choice:
    """A configuration and, in the order in which they were applied, the reasons for it."""

    config: Config
    reasons: tuple[str, ...]


def choose(problem: Problem, target: Target) -> Choice:
    """The configuration for `problem` on `target`.

    Raises:
        Unsupported: there is none.
    """
    asked, reasons = problem, []
    if problem.invariant:
        asked = replace(problem, m=1, batch=1, batch_a=1, batch_b=1)
        target = next((whole for whole in TARGETS if whole.arch == target.arch), target)
        reasons.append(
            "invariant: chosen as for one row on a whole GPU, so that a row's result depends on nothing else"
        )
    found = list(candidates(asked, target))
    if not found:
        raise Unsupported(str(supports(asked, target, CHOICES[-1])))
    config = min(found, key=lambda c: (_bytes(c, asked, target), -c.tile[1], c.accumulators))
    reasons += [_why_tile(config, found, asked, target), _why_accumulators(config, found, asked, target)]
    config, why = _raster(config, asked, target)
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


def check(problem: Problem, target: Target, config: Config) -> None:
    """Raises Unsupported, with the reason, unless `supports` passes."""
    reason = supports(problem, target, config)
    if reason is not None:
        raise Unsupported(str(reason))
