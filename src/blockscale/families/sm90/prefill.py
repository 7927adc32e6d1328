"""Many rows of activations: what `kernels/sm90_prefill.py` can be built as, and which of that a product gets.

`PRESETS` were measured; which of them is best for a product is derived: that with which the multiprocessors are done
soonest, by a model of a tile's time that was fitted to measured ones (docs/notes/hopper.md).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from blockscale.config import Choice, Config, Reason
from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.kernels.parts import hopper_memory
from blockscale.problem import Problem, Target

LEAST = 65  # rows of activations from which these kernels multiply
TOKENS = range(96, 257, 32)  # rows of a that a CTA can take
TILE_ROWS = (64, 128)
GROUP = 4  # warps of a warpgroup
BUFFERS = range(2, 17)
MOST_TOKEN_TILES = 65_535  # of a grid's second dimension
MOST_GROUP = 1024
STAGES = range(1, 9)
CLUSTERS = (None, (1, 2))
SMS = 132  # of the GPU that was measured
_COPIES_WEIGHTS = re.compile(r"(@!?%?\w+\s+)?cp\.async\.bulk\.shared::cluster\.global\.mbarrier\S*\s")
MEASURED = "H200, 2026-11-30"


def _split(tokens: int, rows: int, buffers: int, stages: int) -> Config:
    """Two CTAs share k."""
    return Config((tokens, rows), stages=stages, pdl=True, wgmma=True, split=2, buffers=buffers)


def _once(tokens: int, buffers: int, stages: int) -> Config:
    """A tile a CTA."""
    return Config((tokens, 128), stages=stages, pdl=True, wgmma=True, buffers=buffers)


def _turns(tokens: int, buffers: int, stages: int) -> Config:
    """Clusters take tiles in turn, two CTAs of each fetch activations for one another."""
    return replace(_once(tokens, buffers, stages), cluster=(1, 2), ctas=SMS, group=8)


PRESETS = (
    _split(96, 128, 10, 5),
    _split(128, 64, 10, 6),
    _split(128, 128, 8, 5),
    _split(160, 128, 6, 4),
    _split(192, 128, 4, 4),
    *(how(*rings) for how in (_once, _turns) for rings in ((128, 8, 5), (192, 5, 4), (256, 3, 3))),
)
# Times, of which only the ratios matter; that of a unit of k by a row of activations and 128 of the weight is 1.
TILE, TURNS, ONCE = 800, 100, 60  # of a tile's ends; of taking turns, a launch; of a tile that takes none
ROW, LEAST_ROWS = 12, 76  # a tile takes the time of more rows of activations, and of so many of the weight at least


def serves(config: Config) -> bool:
    """Whether a configuration of the family is one of these."""
    return config.wgmma and config.tile[0] >= min(TOKENS)


def unbuildable(config: Config, target: Target) -> Reason | None:
    """Why there can be no such kernel, for any problem, or None."""
    tokens, rows = config.tile
    fixed = (("prefetch", 0), ("k_warps", 1), ("chunk", None))
    for name, only in fixed:
        if getattr(config, name) != only:
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected {only} with tiles of {tokens} rows")
    allowed = (("split", (1, 2)), ("cluster", CLUSTERS), ("buffers", BUFFERS), ("stages", STAGES))
    for name, values in allowed:
        if getattr(config, name) not in values:
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected one of {', '.join(map(str, values))}")
    if tokens not in TOKENS:
        return Reason("config.tile", f"{tokens} rows, expected one of {', '.join(map(str, TOKENS))}")
    if rows not in TILE_ROWS:
        return Reason("config.tile", f"{rows} columns, expected one of {', '.join(map(str, TILE_ROWS))}")
    for name in ("cluster", "ctas"):
        if config.split > 1 and getattr(config, name) is not None:
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected None where CTAs share k")
    for name, least in (("group", 1), ("ctas", 1 if config.cluster is None else 2)):
        value = getattr(config, name)
        if value is not None and value < least:
            return Reason(f"config.{name}", f"{value}, expected at least {least}")
    if config.ahead and not config.pdl:
        return Reason("config.ahead", "True, expected False without pdl")
    if config.group > MOST_GROUP:
        return Reason("config.group", f"{config.group}, expected at most {MOST_GROUP}")
    needed = smem(config)
    if needed > target.smem:
        return Reason("config.buffers", f"{config.buffers}: {needed:,} bytes of shared memory, at most {target.smem:,}")
    return None


def unfit(problem: Problem, config: Config) -> Reason | None:
    """Why a kernel does not do `problem`; None where it does. Chains end in time for any K."""
    tiles = -(-problem.m * problem.batch // config.tile[0])
    if config.ctas is None and tiles > MOST_TOKEN_TILES:
        return Reason("config.tile", f"{tiles} of {config.tile[0]} rows, at most {MOST_TOKEN_TILES} without turns")
    return None


def smem(config: Config) -> int:
    """Bytes of shared memory."""
    tokens, rows = config.tile
    assert config.buffers is not None
    assert config.stages is not None
    return hopper_memory.of_prefill(tokens, rows // ROWS, config.split, config.buffers, config.stages)


def kernel(config: Config, **of: str | None) -> Any:
    """The kernel, of these types and this bias and activation. Imports the compiler."""
    from blockscale.kernels import hopper

    build: Any = hopper.Sm90PrefillGemm  # of modules without types
    (tokens, rows), (_, share) = config.tile, config.cluster or (1, 1)
    shape = {"row_groups": rows // (GROUP * ROWS), "share": share, "split": config.split}
    rings = {"buffers": config.buffers, "depth": config.stages}
    turns = {"most": config.ctas, "group": config.group, "pdl": config.pdl, "ahead": config.ahead}
    return build(tokens, **shape, **rings, **turns, **of)


def premature(config: Config, early: list[str]) -> list[str]:
    """As `launch.premature`: weights come by copies of their own kind."""
    return [x for x in early if not (config.ahead and _COPIES_WEIGHTS.match(x))]


def choose(problem: Problem, target: Target) -> Choice:
    """The configuration for a problem of many rows."""
    config = min(PRESETS, key=lambda preset: _cost(preset, problem, target))
    if config.ctas is not None:
        config = replace(config, ctas=target.sms - target.sms % 2)
    (tokens, rows), ctas, waves = config.tile, _ctas(config, problem), _waves(config, problem, target)
    together = "a CTA each"
    if config.split > 1:
        together = f"k between {config.split} CTAs"
    elif config.cluster is not None:
        together = "2 CTAs fetch activations for one another and take tiles in turn"
    reasons = (
        f"tiles of {tokens} rows of activations by {rows} of the weight, {together}: {ctas} CTAs for {target.sms} "
        f"multiprocessors, {waves} wave{'s' * (waves != 1)}: done soonest (derived)",
        f"{config.buffers} boxes of {tokens} x {DEPTH // 2} activations and {config.stages} units of {DEPTH} weights a "
        f"warp in flight ({MEASURED})",
        "pdl: a CTA is there when the work ahead in the stream ends; it touches nothing before that",
    )
    return Choice(config, reasons)


def _ctas(config: Config, problem: Problem) -> int:
    tokens, rows = config.tile
    blocks = -(-problem.n // rows)
    if config.cluster is not None:
        blocks += blocks % 2
    return blocks * -(-problem.m * problem.batch // tokens) * config.split


def _waves(config: Config, problem: Problem, target: Target) -> int:
    """CTAs that the busiest multiprocessor runs, one after the other."""
    return -(-_ctas(config, problem) // target.sms)


def _cost(config: Config, problem: Problem, target: Target) -> float:
    """The time of the busiest multiprocessor."""
    tokens, rows = config.tile
    units = -(-problem.k // (DEPTH * config.split))
    tile = units * (tokens + ROW) * max(rows, LEAST_ROWS) / 128 + TILE
    waves = _waves(config, problem, target)
    return waves * tile + TURNS if config.ctas is not None else waves * (tile + ONCE)
