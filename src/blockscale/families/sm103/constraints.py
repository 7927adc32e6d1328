"""What the sm_103a kernels can be built as, and what they then can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blockscale.config import Config, Reason
from blockscale.families import sm100
from blockscale.families.sm100 import constraints as k64
from blockscale.families.sm100.constraints import CALL_FIELDS, HINTS, cluster_count, cluster_shape, tile_count
from blockscale.kernels.parts.geometry import Geometry
from blockscale.kernels.parts.geometry96 import FEWEST_STAGES, Geometry96
from blockscale.kernels.parts.staging import staging_bytes
from blockscale.problem import Problem, Target

__all__ = [
    "CALL_FIELDS",
    "CODE_FIELDS",
    "cluster_count",
    "cluster_shape",
    "geometry",
    "tile_count",
    "unfit",
    "unsupported",
]

K64, K96 = 64, 96
OWN_FIELDS = ("ownership", "l2_sfa", "l2_sfb", "drop", "first", "pace", "unroll", "fixed")  # with K = 96 alone
CODE_FIELDS: tuple[str, ...] = (*sm100.CODE_FIELDS, "mma_k", *OWN_FIELDS)
SIDES = (1, 2, 4, 8)  # of a cluster, in CTAs
MOST_CLUSTER = 16  # CTAs; more than 8 have to be asked for (CUDA: non-portable cluster size)

ALLOWED: dict[str, Sequence[Any]] = {
    **{name: values for name, values in k64.ALLOWED.items() if name != "l2_scales"},
    "release": (*k64.ALLOWED["release"], "preload"),
    "ownership": ("turns", "lines"),
    "l2_sfa": HINTS,
    "l2_sfb": HINTS,
    "first": ("a", "b"),
}
RANGES = {**k64.RANGES, "pace": range(10**6 + 1), "drop": range(2**16), "unroll": range(1, 5)}


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    return k64.unsupported(problem, target)


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    if config.mma_k not in (K64, K96):
        return Reason("config.mma_k", f"{config.mma_k}, expected {K64} or {K96}")
    if config.mma_k == K64:
        return next(_with_k96_alone(config), None) or k64.unfit(problem, target, config)
    return next(_reasons(problem, target, config), None)


def _with_k96_alone(config: Config) -> Iterator[Reason]:
    for name in OWN_FIELDS:
        if getattr(config, name) != getattr(Config, name):
            yield Reason(f"config.{name}", f"{getattr(config, name)!r}, expected {getattr(Config, name)!r} with K = 64")


def _reasons(problem: Problem, target: Target, config: Config) -> Iterator[Reason]:
    """Each presumes that those before it do not hold."""
    yield from k64.values(config, ALLOWED, RANGES)
    if config.l2_scales is not None:
        yield Reason("config.l2_scales", f"{config.l2_scales!r}, expected None with K = 96: see l2_sfa and l2_sfb")
    yield from k64.cluster(config, SIDES, MOST_CLUSTER)
    yield from k64.epilogue(problem, config)
    sizes = geometry(config, target, problem.out_dtype)
    yield from k64.memory(target, config, sizes, FEWEST_STAGES)
    yield from k64.tiles(problem, config, sizes)
    yield from _order(problem, config)


def _order(problem: Problem, config: Config) -> Iterator[Reason]:
    if config.ownership == "lines":
        for name, plain in (("schedule", "static"), ("group", 1), ("drop", 0)):
            if getattr(config, name) != plain:
                given = f"{getattr(config, name)!r}, expected {plain!r}"
                yield Reason(f"config.{name}", f"{given} beside ownership 'lines'")
    if config.drop and (config.l2_a is None or config.l2_sfa is None):
        yield Reason("config.drop", f"{config.drop}, expected 0 unless L2 is told what to do with l2_a and l2_sfa")
    sizes = (problem.m, problem.n, problem.k)
    if config.fixed is not None and config.fixed != sizes:
        yield Reason("config.fixed", f"{config.fixed}, expected None or {sizes}, the sizes of the product")


def geometry(config: Config, target: Target, out_dtype: str = "bf16") -> Geometry:
    """The sizes of `config`'s tiles and stages on `target`; of use once its tile and cluster are known to be right."""
    if config.mma_k == K64:
        return k64.geometry(config, target, out_dtype)
    staging = staging_bytes(config.store, config.store_slots, config.tile[1], config.read, out_dtype)
    return Geometry96(config.tile, config.stages, config.accumulators, target.smem, staging, config.cluster)
