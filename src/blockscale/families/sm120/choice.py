"""Which configuration for which problem: an ordered list of reasons.

"published" marks what is known of these GPUs from those who measured kernels like this one on an RTX PRO 6000: tiles of
128 x 128 leave much of a second wave idle at 2048^3, and persistent kernels, fed by TMA, by requests for tiles or by a
static grid, do well. "derived" marks what is counted here: waves, cycles and bytes at published peaks. Nothing was
measured with this kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm120.constraints import geometry, tile_count, tiles, unfit
from blockscale.kernels.parts.geometry import STEP_K
from blockscale.kernels.parts.warptile import TILE_COLUMNS, TILE_K, TILE_ROWS
from blockscale.problem import NVFP4, OUT_BYTES, Problem, Target

MOST_SWAPPED = 64  # rows of a product whose operands are exchanged
FEW_WAVES = 4  # from when on tiles are taken on request
FEWEST_STAGES = 2  # of long ones, or short ones are taken: one is filled while the other is multiplied
MOST_PADDING = 1 / 16  # of k, for long stages
SPLITS = (2, 4, 8)
MOST_LEVELLED = 8  # waves: of more the last one is no eighth of the time
# What a multiprocessor does in a cycle: products of FP4 and bytes from shared memory, by published peaks; bytes from L2
# and to it, as on earlier GPUs. What a tile costs whose CTAs add their sums, beside the bytes of these: a guess.
PRODUCTS, READ, LOADED = 2048, 128, 32
MEETING = 1000
TOLERANCE = 1 / 16  # between numbers of cycles that count as the same
MORE_BYTES = 1 / 20  # between numbers of bytes likewise
FEW_ROWS = 16  # of a product whose weights are nearly all that is loaded
# Bytes of DRAM in a cycle, from published bandwidths and clocks.
DRAM = {"rtxpro6000": 685, "rtx5090": 744, "rtx5080": 367, "gb10": 113}


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    reasons = []
    view = _Kernel(problem, target)
    for decide in (_swap, _tile, _groups, _split, _stages, _schedule, _order, _launch):
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

    def with_(self, **fields: object) -> _Kernel:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type] # fields of Config

    @property
    def fits(self) -> bool:
        return unfit(self.problem, self.target, self.config) is None

    @property
    def count(self) -> int:
        return tile_count(self.problem, self.config)

    @property
    def in_flight(self) -> int:
        """Tiles that the GPU has room for at a time."""
        return max(1, self.target.sms // self.config.split)

    @property
    def waves(self) -> int:
        """Tiles that the busiest CTA computes, one after the other."""
        return -(-self.count // self.in_flight)

    @property
    def k(self) -> int:
        """Of a tile, that a CTA multiplies: whole stages."""
        stage = self.config.chunk or TILE_K[0]
        return -(-self.problem.k // (stage * self.config.split)) * stage

    @property
    def loaded(self) -> int:
        """Bytes that all CTAs load."""
        sizes = geometry(self.config, self.target)
        return self.count * self.config.split * self.k // sizes.tile_k * sizes.stage_bytes

    @property
    def operands(self) -> int:
        """Their bytes, codes and scales."""
        p = self.problem
        return (p.batch_a * p.m + p.batch_b * p.n) * p.k * 9 // 16

    @property
    def busiest(self) -> int:
        """Cycles of the busiest CTA. Multiplying, loading and reading hide one another; storing is hidden where another
        group multiplies meanwhile, but for that of the last tile."""
        sizes = geometry(self.config, self.target)
        loading = sizes.stage_bytes / sizes.tile_k / LOADED
        reading = sizes.group_warps * sizes.step_bytes_read / STEP_K / READ
        multiplying = sizes.rows * sizes.columns / PRODUCTS
        main = self.k * max(multiplying, loading, reading)
        sums = sizes.rows * sizes.columns
        storing = sums * OUT_BYTES.get(self.problem.out_dtype, 1) / LOADED
        meeting = MEETING + 4 * sums / LOADED if self.config.split > 1 else 0.0
        if self.config.accumulators == 2:
            return round(self.waves * (max(main, storing) + meeting) + storing)
        return round(self.waves * (main + storing + meeting))

    @property
    def cycles(self) -> int:
        """What stands for the time: those of the busiest CTA, or of DRAM for what has to cross it once."""
        p = self.problem
        moved = self.operands + p.batch * p.m * p.n * OUT_BYTES.get(p.out_dtype, 1)
        return max(self.busiest, moved // DRAM.get(self.target.name, 4 * self.target.sms))


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
    swapped = view.with_(swap=True, tile=(TILE_ROWS[0], next(c for c in TILE_COLUMNS if c >= m)))
    refused = unfit(view.problem, view.target, swapped.config)
    if refused is not None:
        return view, f"operands as they are: no kernel does it with them exchanged, {refused} (derived)"
    return view.with_(swap=True), f"operands exchanged: m = {m} columns, so that every weight is loaded once (derived)"


def _candidates(view: _Kernel) -> Iterator[_Kernel]:
    """Every tile; several groups and a split of k where there is something to hide or to level out."""
    columns = view.problem.m if view.config.swap else view.problem.n
    if view.problem.out_dtype == NVFP4:
        columns = max(columns, STEP_K)  # as many are written
    widest = next((size for size in TILE_COLUMNS if size >= columns), TILE_COLUMNS[-1])
    for rows in TILE_ROWS:
        for width in (size for size in TILE_COLUMNS if size <= widest):
            whole = view.with_(tile=(rows, width))
            yield whole
            if whole.waves > 1:
                yield whole.with_(accumulators=2)
            for split in SPLITS if whole.waves <= MOST_LEVELLED else ():
                if split * TILE_K[0] <= view.problem.k:
                    yield whole.with_(split=split)


def _tile(view: _Kernel) -> _Step | Reason:
    """Tile, groups and split together, of those that take about the fewest cycles."""
    found, refused = [], Reason("config", "there is none")
    for candidate in _candidates(view):
        reason = unfit(view.problem, view.target, candidate.config)
        if reason is None:
            found.append((candidate.cycles, candidate))
        elif reason.argument == "config.tile":  # rather than that a larger one has no room for its sums
            refused = reason
    if not found:
        return refused
    fewest = min(cycles for cycles, _ in found)
    best = _best([v for cycles, v in found if cycles <= fewest * (1 + TOLERANCE)])
    by_tile: dict[tuple[int, int], int] = {}
    for cycles, candidate in found:
        by_tile[candidate.config.tile] = min(cycles, by_tile.get(candidate.config.tile, cycles))
    counted = ", ".join(f"{rows}x{width} {cycles:,}" for (rows, width), cycles in by_tile.items())
    rows, width = best.config.tile
    room = f"{best.in_flight} CTAs" if best.config.split == 1 else f"{best.in_flight} clusters of {best.config.split}"
    why = (
        f"tiles of {rows}x{width}: {best.count} for {room} are {_count(best.waves, 'wave')}; {best.cycles:,} cycles "
        f"of the busiest CTA or of DRAM, and of those with about as few about the fewest bytes ({counted}; derived)"
    )
    return best, why


def _best(found: list[_Kernel]) -> _Kernel:
    """Of few rows that with about as few bytes as there are, of others that which splits k the least and then loads
    about the fewest; of several the one with the fewest cycles."""
    if found[0].config.swap and found[0].problem.m <= FEW_ROWS:
        least = min(v.loaded for v in found)
        within = [v for v in found if v.loaded <= max(least, v.operands * (1 + MORE_BYTES))]
        return min(within, key=lambda v: (v.config.split, v.busiest, v.loaded, v.config.accumulators))
    split = min(v.config.split for v in found)
    plain = [v for v in found if v.config.split == split]
    least = min(v.loaded for v in plain)
    within = [v for v in plain if v.loaded <= least * (1 + MORE_BYTES)]
    return min(within, key=lambda v: (v.busiest, v.loaded, v.config.accumulators))


def _groups(view: _Kernel) -> _Step:
    if view.config.accumulators == 2:
        why = f"two groups of warps: of {view.waves} tiles one is stored while the next is multiplied (derived)"
        return view, why
    if view.waves == 1:
        return view, "all warps share a tile: a CTA has one, whose results nothing could hide (derived)"
    return view, "all warps share a tile: two groups would have no room for its sums, or hide no cycle (derived)"


def _split(view: _Kernel) -> _Step:
    whole = view.with_(split=1)
    if view.config.split == 1:
        return (
            view,
            f"k as a whole: {_count(view.waves, 'wave')} of {view.in_flight} tiles, and no sums to add (derived)",
        )
    why = (
        f"k in {view.config.split} parts, added in order: {whole.count} tiles alone would keep {whole.target.sms} "
        f"multiprocessors for {whole.busiest:,} cycles, so {view.busiest:,} (derived)"
    )
    return view, why


def _stages(view: _Kernel) -> _Step:
    short, long = TILE_K
    longer = view.with_(chunk=long)
    fit = geometry(longer.config, view.target).most_stages
    if fit < FEWEST_STAGES or not longer.fits:
        return view, f"stages of {short} elements of k: {fit} of {long} would fit, not {FEWEST_STAGES} (derived)"
    if longer.k - view.k > MOST_PADDING * view.k:
        return view, f"stages of {short} elements of k: those of {long} would pad {view.k} to {longer.k} (derived)"
    return longer, f"stages of {long} elements of k: {fit} fit, and less is done beside multiplying (derived)"


def _schedule(view: _Kernel) -> _Step:
    asking = view.with_(schedule="clc")
    if view.config.split > 1:
        return view, "static schedule: the CTAs of a cluster share their tiles (derived)"
    if view.waves < FEW_WAVES or not asking.fits:
        return view, f"static schedule: {_count(view.waves, 'wave')}, fewer than {FEW_WAVES} (derived)"
    return asking, f"tiles on request: {view.waves} waves; a CTA that is late takes fewer of them (published)"


def _order(view: _Kernel) -> _Step:
    """What the tiles in flight touch of the operands is what L2 has to hold."""
    rows, columns = view.config.tile
    row = view.problem.k * 9 // 16  # bytes of codes and scales
    down, across = tiles(view.problem, view.config)
    whole = (down * rows + across * columns) * row
    flight = min(view.count, view.in_flight)
    if whole > view.target.l2 and view.count > flight:
        ideal = round(math.sqrt(flight * rows / columns))
        for group in range(min(ideal, across, flight), 1, -1):
            touched = (-(-flight // group) * rows + group * columns) * row
            if touched <= view.target.l2:
                why = (
                    f"bands of {group}: both operands are {whole / 2**20:.0f} MiB and L2 {view.target.l2 / 2**20:.0f}; "
                    f"{flight} tiles in flight, {group} abreast, touch {touched / 2**20:.1f} MiB (derived)"
                )
                return view.with_(raster="m", group=group), why

    def touched_rows(raster: str) -> int:
        first, second, near, far = (down, across, rows, columns) if raster == "m" else (across, down, columns, rows)
        return min(first, flight) * near + min(second, -(-flight // first)) * far

    raster = min("mn", key=touched_rows)
    fits = "both operands fit L2" if whole <= view.target.l2 else "no band fits L2"
    what = f"{_count(flight, 'tile')} in flight touch {touched_rows('m')} rows of operands along m"
    return view.with_(
        raster=raster
    ), f"line after line along {raster}: {fits}; {what}, {touched_rows('n')} along n (derived)"


def _launch(view: _Kernel) -> _Step:
    return view.with_(pdl=True), "dependent launch: the start overlaps the end of the kernel before (published)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
