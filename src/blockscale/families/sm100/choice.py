"""Which configuration for which problem: an ordered list of reasons.

"published" marks a rule that its authors found by measuring kernels of this design on B200s; "derived" marks what is
counted here: waves, bytes, padding. Nothing was measured with this kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm100.constraints import cluster_count, cluster_shape, geometry, unfit
from blockscale.kernels.parts.geometry import CTA_ROWS, TILE_K
from blockscale.problem import NVFP4, OUT_BYTES, Problem, Target

WIDEST = 256
WIDTHS = (64, 128, 192, WIDEST)  # where several tiles lie side by side
MOST_SWAPPED = 128  # rows of a product whose operands are exchanged
MOST_PADDING = 1.25  # times the rows of 128 that a pair may round up to
FEW_WAVES, LONG_K = 4, 16384  # from when on tiles are taken on request


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    reasons = []
    view = _Kernel(problem, target, swap=False)
    for decide in (_swap, _tile, _accumulators, _store, _schedule, _order, _launch):
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
    swap: bool
    config: Config = field(default_factory=Config)

    @property
    def rows(self) -> int:
        return self.problem.n if self.swap else self.problem.m

    @property
    def columns(self) -> int:
        return self.problem.m if self.swap else self.problem.n

    def with_(self, **fields: object) -> _Kernel:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type] # fields of Config

    @property
    def in_flight(self) -> int:
        """Clusters that the GPU has room for."""
        width, height = cluster_shape(self.config)
        return max(1, self.target.sms // (width * height))

    @property
    def clusters(self) -> int:
        return self.problem.batch * math.prod(cluster_count(self.problem, self.config))

    @property
    def waves(self) -> int:
        """Tiles that the busiest CTA computes, one after the other."""
        return -(-self.clusters // self.in_flight)

    @property
    def bytes(self) -> int:
        """What stands for the time of the busiest CTA: the bytes that it loads, and those whose storing nothing
        overlaps.

        This takes multiplying to hide behind loading, and a byte to cost the same in either direction. With one
        accumulator the next tile waits until a tile is stored; with two that overlap, until the shared columns are.
        """
        sizes = geometry(self.config, self.target, self.problem.out_dtype)
        loaded = self.waves * -(-self.problem.k // TILE_K) * sizes.stage_bytes
        stored = CTA_ROWS * sizes.tile_n * OUT_BYTES.get(self.problem.out_dtype, 1)
        waiting = sizes.overlap / sizes.tile_n if self.config.accumulators == 2 else 1
        return loaded + round(stored * (1 + (self.waves - 1) * waiting))


_Step = tuple[_Kernel, str]


def _swap(view: _Kernel) -> _Step:
    """The tensor core multiplies 128 rows, whatever they hold, but as few as 8 columns."""
    m, n = view.problem.m, view.problem.n
    as_they_are = _padded(m, CTA_ROWS) * _padded(n, 8)
    exchanged = _padded(n, CTA_ROWS) * _padded(m, 8)
    if view.problem.invariant:
        return view, "operands as they are: nothing may depend on m"
    if m > MOST_SWAPPED:
        return view, f"operands as they are: m = {m} is more than {MOST_SWAPPED} (published)"
    if view.problem.out_dtype == NVFP4:
        return view, "operands as they are: NVFP4 results have their blocks along the rows"
    if exchanged >= as_they_are:
        sums = f"{exchanged:,} beside {as_they_are:,}"
        return view, f"operands as they are: exchanged they would make no fewer sums, {sums} (published)"
    why = f"operands exchanged: m = {m} as columns makes {exchanged:,} sums to multiply instead of {as_they_are:,}"
    return replace(view, swap=True, config=replace(view.config, swap=True)), f"{why} (published)"


def _tiles(view: _Kernel) -> Iterator[_Kernel]:
    """Every tile there is to choose from, each with one accumulator and with two."""
    one = _padded(view.columns, 32 if view.problem.out_dtype == NVFP4 else 8)
    for rows in (CTA_ROWS, 2 * CTA_ROWS):
        if rows > CTA_ROWS and _padded(view.rows, rows) > MOST_PADDING * _padded(view.rows, CTA_ROWS):
            continue
        exact = _padded(one, 16) if rows > CTA_ROWS else one
        for columns in sorted({exact, *WIDTHS} if exact <= WIDEST else WIDTHS):
            if columns <= exact:
                for accumulators in (1, 2):
                    yield view.with_(tile=(rows, columns), accumulators=accumulators)


def _tile(view: _Kernel) -> _Step | Reason:
    found, refused = [], Reason("config", "there is none")
    for tile in _tiles(view):
        reason = unfit(view.problem, view.target, tile.config)
        if reason is None:
            found.append(tile)
        else:
            refused = reason
    if not found:
        return refused
    best = min(found, key=lambda v: (v.bytes, -v.config.tile[0], -v.config.tile[1], v.config.accumulators))
    counted = ", ".join(f"{v.config.tile[0]}x{v.config.tile[1]} {v.bytes:,}" for v in _best_of_each(found))
    rows, columns = best.config.tile
    pair = rows > CTA_ROWS
    room = f"{_count(best.in_flight, 'pair')} of CTAs" if pair else _count(best.in_flight, "CTA")
    why = (
        f"tiles of {rows}x{columns}: {best.clusters} for {room} make {_count(best.waves, 'wave')}; the fewest bytes "
        f"that a CTA loads, or stores with nothing beside it ({counted}; derived)"
    )
    return best, why


def _best_of_each(found: list[_Kernel]) -> list[_Kernel]:
    """One a tile, with the better number of accumulators."""
    best: dict[tuple[int, int], _Kernel] = {}
    for view in found:
        known = best.setdefault(view.config.tile, view)
        if view.bytes < known.bytes:
            best[view.config.tile] = view
    return list(best.values())


def _accumulators(view: _Kernel) -> _Step:
    if view.config.accumulators == 2:
        sizes = geometry(view.config, view.target)
        shared = f"; they share {sizes.overlap} of their {sizes.tile_n} columns, read first" if sizes.overlap else ""
        does = f"two accumulators: a CTA does {_count(view.waves, 'tile')}"
        return view, f"{does}, and storing one overlaps the next{shared} (derived)"
    if view.waves == 1:
        return view, "one accumulator: a CTA does one tile at most, so that there is nothing to overlap (derived)"
    return view, f"one accumulator: a CTA does {view.waves} tiles, yet two save nothing (derived)"


def _store(view: _Kernel) -> _Step:
    """By TMA where it takes no stage away: stores without bank conflicts, in rows of whole 128-byte lines."""
    problem = view.problem
    staged = view.with_(store="tma", release="early")
    early = view.with_(release="early")
    if view.swap:
        return early, "results stored from registers: a swapped result leaves column by column"
    if problem.out_dtype == NVFP4:
        return early, "results stored from registers: NVFP4 leaves in whole vectors of codes"
    if problem.n * OUT_BYTES[problem.out_dtype] % 16:
        return early, "results stored from registers: rows are no multiples of 16 bytes, as TMA has them"
    before, after = (geometry(v.config, view.target, problem.out_dtype).most_stages for v in (view, staged))
    if after < before:
        return early, f"results stored from registers: staging them would leave {after} stages of {before} (derived)"
    why = "results stored by TMA, accumulators free once read: no bank conflicts (published), and no stage the less"
    return staged, f"{why} ({after}; derived)"


def _schedule(view: _Kernel) -> _Step:
    clusters, room = view.clusters, view.in_flight
    if clusters <= room:
        counted = f"{_count(clusters, 'tile')} for {_count(room, 'cluster')}"
        return view, f"static schedule: {counted}, nothing to hand out (published)"
    asking = view.with_(schedule="clc")
    if clusters >= FEW_WAVES * room:
        why = f"tiles on request: {clusters} for {room} clusters are {FEW_WAVES} full waves or more (published)"
        return asking, why
    if view.problem.k >= LONG_K:
        return asking, f"tiles on request: few waves, but k is {LONG_K} or more (published)"
    return view, f"static schedule: fewer than {FEW_WAVES} full waves, and k is less than {LONG_K} (published)"


def _order(view: _Kernel) -> _Step:
    """Raster and group: what the tiles in flight touch of the operands is what L2 has to hold."""
    height, width = CTA_ROWS * cluster_shape(view.config)[0], view.config.tile[1] * cluster_shape(view.config)[1]
    row = view.problem.k * 9 // 16  # bytes of codes and scales
    whole = (view.rows + view.columns) * row
    down, across = cluster_count(view.problem, view.config)
    flight = min(view.clusters, view.in_flight)
    if whole > view.target.l2 and view.clusters > flight:
        ideal = round(math.sqrt(flight * height / width))
        for group in range(min(ideal, across, flight), 1, -1):
            touched = (-(-flight // group) * height + group * width) * row
            if touched <= view.target.l2:
                why = (
                    f"bands of {group}: both operands are {whole / 2**20:.0f} MiB and L2 {view.target.l2 / 2**20:.0f}; "
                    f"{_count(flight, 'tile')} in flight, {group} abreast, touch {touched / 2**20:.1f} MiB (published)"
                )
                return view.with_(raster="m", group=group), why

    def rows(raster: str) -> int:
        first, second = (down, across) if raster == "m" else (across, down)
        near, far = min(first, flight), min(second, -(-flight // first))
        return near * height + far * width if raster == "m" else near * width + far * height

    raster = min("mn", key=rows)
    fits = "both operands fit L2" if whole <= view.target.l2 else "no band fits L2"
    touched_rows = f"{rows('m')} rows of operands along m, {rows('n')} along n"
    line = f"line after line along {raster}: {fits} (published)"
    why = f"{line}, and what is in flight, {_count(flight, 'tile')}, touches {touched_rows} (derived)"
    return view.with_(raster=raster), why


def _launch(view: _Kernel) -> _Step:
    return view.with_(pdl=True), "dependent launch: the start overlaps the end of the kernel before (published)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
