"""What a launch for groups of given sizes does, counted: work, bytes of weights, tiles of a multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockscale.config import Config
from blockscale.families.sm100.grouped.constraints import tile_shape
from blockscale.kernels.parts.geometry import CTA_ROWS, STEP_K
from blockscale.kernels.parts.group_order import GRANULE, counts, width
from blockscale.problem import GATED, NVFP4, GroupedProblem


@dataclass(frozen=True)
class Counts:
    """Of one launch.

    Attributes:
        work: rows x columns that instructions multiply, over those of the groups.
        weights: bytes of codes and scales of weights that copies bring, over those of the groups that have rows.
        tiles, most: tiles of all single CTAs, pairs or clusters of parts, and of the one that has most. ideal: the
            mean, if all multiprocessors had as many.
    """

    work: float
    weights: float
    tiles: int
    most: int
    ideal: float


def count(problem: GroupedProblem, config: Config, sizes: Sequence[int], sms: int) -> Counts:
    """Of a launch on `sms` multiprocessors for groups that have so many rows.

    Raises:
        ValueError: no group has any rows.
    """
    some = [size for size in sizes if size]
    if not some:
        raise ValueError(f"sizes: {list(sizes)}, expected rows in one group at least")
    shape, gated = tile_shape(problem, config), problem.activation in GATED
    granule = STEP_K if problem.out_dtype == NVFP4 else GRANULE
    folds = config.tile[1] // shape[1] if gated and not config.swap else 2 if gated else 1
    work = weights = tiles = 0
    for size in some:
        down, across = counts(size, problem.columns, shape, config.swap)
        columns = size if config.swap else problem.columns
        widths = sum(width(columns - i * shape[1], shape[1], granule, min) for i in range(across))
        work += down * shape[0] * widths * folds
        weights += (across if config.swap else down) * problem.n
        tiles += down * across
    in_flight = min((config.ctas or sms), sms) // (config.tile[0] // CTA_ROWS * config.split)
    useful = sum(some) * problem.n
    return Counts(work / useful, weights / (len(some) * problem.n), tiles, -(-tiles // in_flight), tiles / in_flight)
