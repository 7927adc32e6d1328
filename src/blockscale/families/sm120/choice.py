"""Which configuration for which problem: an ordered list of reasons.

"published" marks a rule that its authors found by measuring kernels of this design; "derived" marks what is counted
here: waves, bytes, products. Nothing was measured with this kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm120.constraints import geometry, tile_count, tiles, unfit
from blockscale.kernels.parts.geometry import STEP_K
from blockscale.kernels.parts.warptile import SPAN, TILE_COLUMNS, TILE_K, TILE_ROWS
from blockscale.problem import Problem, Target

MOST_SWAPPED = 64  # rows of a product whose operands are exchanged
FEW_WAVES = 4  # from when on tiles are taken on request
FEWEST_STAGES = 3  # of long ones, or short ones are taken
# What a multiprocessor does in a cycle, from published peaks: products of FP4, bytes from L2 and from shared memory.
PRODUCTS, LOADED, READ = 2048, 32, 128


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    reasons = []
    view = _Kernel(problem, target)
    for decide in (_swap, _tile, _groups, _stages, _schedule, _order, _launch):
        found = decide(view)
        if isinstance(found, Reason):
            return found
        view, why = found
        reasons.append(why)
    refused = unfit(problem, target, view.config)
    return Choice(view.config, tuple(reasons)) if refused is None else refused


@dataclass(frozen=True)
class _Kernel:
    """A product as the kernel sees it, and what is chosen of its configuration so far."""

    problem: Problem
    target: Target
    config: Config = field(default_factory=Config)

    @property
    def columns(self) -> int:
        return self.problem.m if self.config.swap else self.problem.n

    def with_(self, **fields: object) -> _Kernel:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type] # fields of Config

    @property
    def count(self) -> int:
        return tile_count(self.problem, self.config)

    @property
    def waves(self) -> int:
        """Tiles that the busiest CTA computes, one after the other."""
        return -(-self.count // self.target.sms)

    @property
    def cycles(self) -> int:
        """What stands for the time of the busiest CTA: multiplying, loading or reading, which hide one another."""
        sizes = geometry(self.config, self.target)
        loading = sizes.stage_bytes / sizes.tile_k / LOADED
        reading = sizes.group_warps * sizes.step_bytes_read / STEP_K / READ
        multiplying = sizes.rows * sizes.columns / PRODUCTS
        return round(self.waves * self.problem.k * max(multiplying, loading, reading))


_Step = tuple[_Kernel, str]


def _swap(view: _Kernel) -> _Step:
    """Tiles have 64 rows or more, whatever they hold, but as few as 8 columns."""
    m, n = view.problem.m, view.problem.n
    if view.problem.invariant:
        return view, "operands as they are: nothing may depend on m"
    if m > MOST_SWAPPED:
        return view, f"operands as they are: m = {m} is more than {MOST_SWAPPED} (derived)"
    if n < m:
        return view, f"operands as they are: n = {n} is less than m = {m} (derived)"
    return view.with_(swap=True), f"operands exchanged: m = {m} columns, so that every weight is loaded once (derived)"


def _candidates(view: _Kernel) -> Iterator[_Kernel]:
    least = next((size for size in TILE_COLUMNS if size >= view.columns), TILE_COLUMNS[-1])
    for rows in TILE_ROWS:
        for columns in TILE_COLUMNS:
            if columns == least or (SPAN <= columns < least):
                yield view.with_(tile=(rows, columns))


def _tile(view: _Kernel) -> _Step | Reason:
    found, refused = [], Reason("config", "there is none")
    for tile in _candidates(view):
        reason = unfit(view.problem, view.target, tile.config)
        if reason is None:
            found.append(tile)
        else:
            refused = reason
    if not found:
        return refused
    best = min(found, key=lambda v: (v.cycles, -v.config.tile[0] * v.config.tile[1]))
    counted = ", ".join(f"{v.config.tile[0]}x{v.config.tile[1]} {v.cycles:,}" for v in found)
    waves = f"{best.waves} wave{'s' * (best.waves != 1)}"
    why = (
        f"tiles of {best.config.tile[0]}x{best.config.tile[1]}: {best.count} for {view.target.sms} CTAs are {waves}; "
        f"the fewest cycles of multiplying, loading or reading ({counted}; derived)"
    )
    return best, why


def _groups(view: _Kernel) -> _Step:
    if view.waves == 1:
        return view, "all warps share a tile: a CTA has one, whose results nothing could hide (derived)"
    two = view.with_(accumulators=2)
    if unfit(view.problem, view.target, two.config) is not None:
        return view, "all warps share a tile: half of them have no room for its sums (derived)"
    return two, f"two groups of warps: of {view.waves} tiles one is stored while the next is multiplied (derived)"


def _stages(view: _Kernel) -> _Step:
    long = view.with_(chunk=TILE_K[1])
    fit = geometry(long.config, view.target).most_stages
    if fit >= FEWEST_STAGES and view.problem.k >= TILE_K[1]:
        return long, f"stages of {TILE_K[1]} elements of k: {fit} fit, and half the barriers are waited for (derived)"
    return view, f"stages of {TILE_K[0]} elements of k: no {FEWEST_STAGES} of {TILE_K[1]} fit, or k is short (derived)"


def _schedule(view: _Kernel) -> _Step:
    if view.waves < FEW_WAVES:
        return view, f"static schedule: {view.waves} waves, fewer than {FEW_WAVES} (published)"
    return view.with_(schedule="clc"), f"tiles on request: {view.waves} waves, {FEW_WAVES} or more (published)"


def _order(view: _Kernel) -> _Step:
    """What the tiles in flight touch of the operands is what L2 has to hold."""
    rows, columns = view.config.tile
    row = view.problem.k * 9 // 16  # bytes of codes and scales
    down, across = tiles(view.problem, view.config)
    whole = (down * rows + across * columns) * row
    flight = min(view.count, view.target.sms)
    if whole <= view.target.l2 or view.count <= flight:
        raster = "m" if columns >= rows or across == 1 else "n"
        why = "both operands fit L2" if whole <= view.target.l2 else "all tiles are in flight"
        return view.with_(raster=raster), f"line after line along {raster}: {why} (derived)"
    group = max(1, min(across, round(math.sqrt(flight * rows / columns))))
    touched = (-(-flight // group) * rows + group * columns) * row
    why = (
        f"bands of {group}: operands are {whole / 2**20:.0f} MiB and L2 {view.target.l2 / 2**20:.0f}; {flight} tiles "
        f"in flight, {group} abreast, touch {touched / 2**20:.1f} MiB (published)"
    )
    return view.with_(raster="m", group=group), why


def _launch(view: _Kernel) -> _Step:
    return view.with_(pdl=True), "dependent launch: the start overlaps the end of the kernel before (published)"
