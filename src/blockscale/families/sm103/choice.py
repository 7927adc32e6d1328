"""Which configuration for which problem: an ordered list of reasons.

"published" marks what its authors found by measuring kernels of this design on a B300 (see presets.py) or a B200;
"derived" marks what is counted here: rounds, bytes, padding. Nothing was measured with this kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from blockscale.config import Choice, Config, Reason
from blockscale.families import sm100
from blockscale.families.sm103.constraints import cluster_count, cluster_shape, unfit
from blockscale.families.sm103.presets import RETIRED, preset
from blockscale.kernels.parts.geometry import CTA_ROWS
from blockscale.problem import Problem, Target

WIDEST = 256  # columns of a K = 96 instruction at its full rate
GAIN = 1.5  # K = 96 instructions of 256 columns multiply so many times as fast as those with K = 64
MOST_PADDING = 1.25  # times the rows of 128 that a pair may round up to
PAIR = (2, 1)
FEW, MANY = 4, 8  # rounds from which on clusters of 8, and of 16 CTAs were published
MOST_ROUNDS = 9 / 8  # times those of pairs that a wider cluster may take
BAND = 36 * 2**20  # bytes of a and its scales that were published to stay in L2 while b passes by
STRIPES = (4, 2, 1)  # blocks across a band
LONG_K = 8192  # from when on results leave with a hint for L2
PACE, PACED_K, UNPACED_K = 55, 768, 32768  # nanoseconds for so many k; from where on stores are not paced
STARTING_K = 3  # slots of 256 k that L2 is asked for ahead


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    known = preset(problem, target)
    if known is not None and unfit(problem, target, known.config) is None:
        size = f"{problem.m} x {problem.n} x {problem.k}"
        theirs = f"GEMM3's authors published {known.microseconds} us of theirs on a B300; this one was timed nowhere"
        published = f"preset: modelled on GEMM3's for {size}; {theirs}"
        return Choice(known.config, (f"{published} (published)", *known.reasons))
    with_k64 = sm100.choose(problem, target)
    found = _instruction(problem, target, with_k64)
    if isinstance(found, str):
        return with_k64 if isinstance(with_k64, Reason) else Choice(with_k64.config, (found, *with_k64.reasons))
    view, why = found
    reasons = [why]
    for decide in (_accumulators, _cluster, _order, _keep, _store, _launch):
        view, why = decide(view)
        reasons.append(why)
    return Choice(view.config, tuple(reasons))


@dataclass(frozen=True)
class _Kernel:
    """A product, and what is chosen of its configuration so far."""

    problem: Problem
    target: Target
    config: Config

    def with_(self, **fields: object) -> _Kernel:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type] # fields of Config

    @property
    def fits(self) -> bool:
        return unfit(self.problem, self.target, self.config) is None

    @property
    def slots(self) -> int:
        """Blocks in flight: what the GPU has room for of the smaller clusters, in CTAs of the larger ones."""
        return max(1, self.target.sms // math.prod(cluster_shape(self.config)))

    @property
    def blocks(self) -> int:
        return self.problem.batch * math.prod(cluster_count(self.problem, self.config))

    @property
    def rounds(self) -> int:
        """Blocks that the busiest cluster computes, one after the other."""
        return -(-self.blocks // self.slots)

    @property
    def fetched(self) -> int:
        """Rows of operands that the busiest CTA brings from L2, for itself and by multicast for others."""
        width, height = cluster_shape(self.config)
        return self.rounds * (CTA_ROWS // height + self.config.tile[1] // width)

    def band(self, stripes: int) -> int:
        """Bytes of a and its scales in a band of so many blocks."""
        return min(self.problem.m, stripes * CTA_ROWS * cluster_shape(self.config)[0]) * self.problem.k * 9 // 16


_Step = tuple[_Kernel, str]


def _instruction(problem: Problem, target: Target, other: Choice | Reason) -> _Step | str:
    """The tile with K = 96, or why K = 64 is better."""
    if isinstance(other, Choice) and other.config.swap:
        return f"K = 64: exchanged operands have {problem.m} columns, and K = 96 pays with {WIDEST} (published)"
    if problem.n < WIDEST:
        return f"K = 64: {problem.n} columns, and K = 96 pays with {WIDEST} (published)"
    plain = Config((CTA_ROWS, WIDEST), mma_k=96)
    views = [_Kernel(problem, target, plain)]
    if _padded(problem.m, 2 * CTA_ROWS) <= MOST_PADDING * _padded(problem.m, CTA_ROWS):
        views.append(views[0].with_(tile=(2 * CTA_ROWS, WIDEST)))
    views = [view for view in views if view.fits]
    if not views:
        return f"K = 64: {unfit(problem, target, plain)}"
    view = min(views, key=lambda v: (v.fetched, v.rounds))
    rows, columns = view.config.tile
    needed = view.rounds * columns / GAIN
    if isinstance(other, Choice):
        with_k64 = _Kernel(problem, target, other.config)
        beside = with_k64.rounds * other.config.tile[1]
        sums = f"{_count(view.rounds, 'round')} of {columns} columns / {GAIN} beside {with_k64.rounds} of "
        sums += f"{other.config.tile[1]}"
        if beside < needed:
            return f"K = 64: K = 96 would take the busiest tensor core longer, {sums} (derived)"
        return view, f"K = 96, tiles of {rows}x{columns}: the busiest tensor core takes no longer, {sums} (derived)"
    return view, f"K = 96, tiles of {rows}x{columns}: {other}"


def _accumulators(view: _Kernel) -> _Step:
    if view.rounds == 1:
        return view, "one accumulator: a CTA does one tile at most, so that there is nothing to overlap (derived)"
    does = f"two accumulators: a CTA does {view.rounds} tiles, and storing one overlaps the next"
    two = view.with_(accumulators=2, release="preload")
    if two.fits:
        return two, f"{does}; the columns that they share are read first and free before any is converted (published)"
    return view.with_(accumulators=2), f"{does} (derived)"


def _cluster(view: _Kernel) -> _Step:
    """As wide as was published for so many rounds, if the busiest CTA brings less and has hardly more to do."""
    if view.config.tile[0] == CTA_ROWS:
        return view, "no clusters: tiles of 128 rows (derived)"
    limit = 16 if view.rounds >= MANY else 8 if view.rounds >= FEW else 4
    limit = min(limit, view.target.sms)
    shapes = [shape for shape in ((4, 1), (4, 2), (8, 2), (4, 4)) if math.prod(shape) <= limit]
    if view.with_(cluster=(8, 2)).band(STRIPES[0]) <= BAND:
        shapes = [shape for shape in shapes if shape != (4, 4)]  # narrower bands are not needed
    else:
        shapes = [shape for shape in shapes if shape != (8, 2)]
    wider = [view.with_(cluster=shape, fallback_cluster=PAIR) for shape in shapes]
    wider = [v for v in wider if v.fits and v.rounds <= MOST_ROUNDS * view.rounds and v.fetched < view.fetched]
    if not wider:
        return (
            view,
            f"pairs alone: wider clusters bring no less, or do more than {MOST_ROUNDS:g} times as much (derived)",
        )
    best = min(wider, key=lambda v: v.fetched)
    width, height = cluster_shape(best.config)
    brings = f"the busiest CTA brings {best.fetched:,} rows of operands in {_count(best.rounds, 'round')}"
    return best, (
        f"clusters of {width}x{height}, or pairs where these do not fit: {brings}, with pairs {view.fetched:,} in "
        f"{view.rounds} (derived; up to {limit} CTAs published for so many rounds)"
    )


def _order(view: _Kernel) -> _Step:
    """What the blocks in flight keep of a while b passes by."""
    rounds, down = view.rounds, cluster_count(view.problem, view.config)[0]
    if rounds < FEW or math.prod(cluster_shape(view.config)) <= 4:
        return view, f"line after line along m: {_count(rounds, 'round')} (published)"
    kept = view.band(down)
    if rounds >= MANY and view.problem.batch == 1 and down <= view.slots and kept <= BAND:
        does = f"{view.slots} slots keep to {_count(down, 'row')} of blocks, and share the ends"
        why = f"{does}; a and its scales, {kept / 2**20:.1f} MiB, are kept while b passes by"
        return view.with_(raster="n", ownership="lines"), f"{why} (derived)"
    most = STRIPES if rounds >= MANY else STRIPES[1:]
    group = next((stripes for stripes in most if view.band(stripes) <= BAND), 1)
    why = f"bands of {group} along n: {view.band(group) / 2**20:.1f} MiB of a and scales are kept while b passes by"
    return view.with_(raster="n", group=group), f"{why}, {BAND // 2**20} at most (published)"


def _keep(view: _Kernel) -> _Step:
    """What L2 is told of a."""
    lines = view.config.ownership == "lines"
    if view.rounds < MANY or view.config.raster != "n":
        return view, "L2 decides for itself what it keeps (published)"
    told = view.with_(l2_a="evict_last", l2_sfa="evict_last")
    if lines:
        return told, "L2 is asked to keep a and its scales (published)"
    dropped = told.with_(drop=RETIRED, first="b")
    return dropped, f"L2 is asked to keep a, but for the last {RETIRED} tiles of a sweep; b is loaded first (published)"


def _store(view: _Kernel) -> _Step:
    """From registers, since stages leave no shared memory for results."""
    problem, pace = view.problem, 0
    if view.rounds > 1 and problem.k < UNPACED_K:
        pace = PACE * -(-problem.k // PACED_K)
    told = view.with_(pace=pace, l2_out="evict_first" if problem.k >= LONG_K else None)
    hinted = told if told.fits else view.with_(pace=pace)
    goes = ", told to leave L2 first" if hinted.config.l2_out else ""
    paced = f", pausing {pace} ns between pieces" if pace else ""
    return hinted, f"results stored from registers{goes}{paced} (published)"


def _launch(view: _Kernel) -> _Step:
    overlaps = "dependent launch: the start overlaps the end of the kernel before (published)"
    if view.rounds <= FEW:
        ahead = view.with_(pdl=True, prefetch=STARTING_K)
        return ahead, f"{overlaps}; L2 is asked ahead for the first {256 * STARTING_K} of k: few rounds (published)"
    return view.with_(pdl=True), overlaps


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
