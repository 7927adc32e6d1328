"""Which configuration for which problem: an ordered list of reasons.

No reason here rests on a measurement, since none of these GPUs has been measured; each follows from counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.config import Config, Reason, candidates, supports, tile_count, unsupported
from blockscale.problem import Problem, Target

# Columns' worth of time that a tile costs beside its arithmetic: the pipeline's filling and the epilogue's last store.
# Only a tie-breaker among tile widths; a guess until there is silicon to measure on.
TILE_OVERHEAD = 32


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
    asked = problem
    reasons: list[str] = []
    if problem.invariant:
        asked = replace(problem, m=1)
        reasons.append("invariant: chosen as for m = 1, so that a row's result does not depend on how many there are")
    found = list(candidates(asked, target))
    if not found:
        raise Unsupported(str(unsupported(problem, target) or Reason("n", f"{problem.n}: no tile serves it")))
    found = _least_time(found, asked, target, reasons)
    double = [c for c in found if c.accumulators == 2]
    if tile_count(asked, found[0]) > target.sms and double:
        found = double
        reasons.append("a CTA does several tiles: two accumulators, so that storing one tile overlaps the next")
    else:
        found = [c for c in found if c.accumulators == 1] or found
        reasons.append("one accumulator: " + ("two do not fit" if not double else "a CTA does one tile at most"))
    (config, *_) = found
    config, why = _raster(config, asked, target)
    reasons.append(why)
    return Choice(config, tuple(reasons))


def _least_time(found: list[Config], problem: Problem, target: Target, reasons: list[str]) -> list[Config]:
    """Those of the tile width with the least time: waves of CTAs x time of a tile; of equals the widest."""

    def waves(config: Config) -> int:
        return -(-tile_count(problem, config) // target.sms)

    def time(config: Config) -> tuple[int, int]:
        return waves(config) * (config.tile[1] + TILE_OVERHEAD), -config.tile[1]

    best = min(found, key=time)
    tiles = tile_count(problem, best)
    reasons.append(
        f"tiles of {best.tile[0]}x{best.tile[1]}: {tiles} for {target.sms} multiprocessors are {waves(best)} "
        f"wave{'s' * (waves(best) != 1)}, the least of waves x (columns + {TILE_OVERHEAD}) among "
        f"{', '.join(str(width) for width in sorted({c.tile[1] for c in found}))} columns"
    )
    return [c for c in found if c.tile[1] == best.tile[1]]


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
    why = f"raster along {raster}: {in_flight} tiles in flight touch {touched}"
    return replace(config, raster=raster), why


def check(problem: Problem, target: Target, config: Config) -> None:
    """Raises Unsupported, with the reason, unless `supports` passes."""
    reason = supports(problem, target, config)
    if reason is not None:
        raise Unsupported(str(reason))
