"""Which configuration for which grouped problem: an ordered list of reasons.

The host knows how many rows there are and how many groups, not how they are split: rules go by the mean. "published"
marks a rule that its authors found by measuring kernels of this design on B200s, "modelled" one from a timing model of
the four shapes of GPU MODE's competition, and "derived" what is counted here. Nothing was measured with this kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm100.grouped.constraints import HALVES, geometry_of, unfit
from blockscale.kernels.parts.geometry import CTA_ROWS
from blockscale.problem import GATED, NVFP4, GroupedProblem, Problem, Target

MOST_SWAPPED = 384  # rows a group, on average, up to which weights are the kernel's rows
MOST_RANKED = 128  # groups that are put in order: the work grows with the square of their number
CAPS = (32, 64, 128, 192, 256, 384)
ROOM = 2  # times the mean rows of a group that a tile has columns for
PAIR = 256
LONG = 1024  # k from which on a part of it is worth the exchange of sums


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    assert isinstance(problem, GroupedProblem)
    view, reasons = _View(problem, target), []
    steps = [_swap, _rows, _columns, _split, _accumulators, _order]
    if problem.form != "list":
        steps.append(_launch)
    for decide in steps:
        view, why = decide(view)
        reasons.append(why)
    refused = unfit(problem, target, view.config)
    return Choice(view.config, tuple(reasons)) if refused is None else refused


@dataclass(frozen=True)
class _View:
    """A grouped product, and what is chosen of its configuration so far."""

    problem: GroupedProblem
    target: Target
    config: Config = field(default_factory=Config)

    @property
    def mean(self) -> int:
        """Rows of a group: the mean in the contiguous form, else the most."""
        together = self.problem.form == "contiguous"
        return -(-self.problem.m // self.problem.groups) if together else self.problem.m

    @property
    def gated(self) -> bool:
        return self.problem.activation in GATED

    def with_(self, **fields: object) -> _View:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type] # fields of Config


_Step = tuple[_View, str]


def _swap(view: _View) -> _Step:
    if view.problem.out_dtype == NVFP4:
        return view, "rows of a are the kernel's rows: blocks of an NVFP4 result run along its columns (derived)"
    if view.problem.form == "masked":
        why = "weights are the kernel's rows (swap): a group may have few of its rows (derived)"
        return view.with_(swap=True), why
    if view.mean > MOST_SWAPPED:
        return view, f"rows of a are the kernel's rows: {view.mean} a group fill tiles of 128 (derived)"
    why = "weights are the kernel's rows (swap), so that an instruction is as wide as a group"
    return view.with_(swap=True), f"{why}, with {view.mean} rows on average (modelled)"


def _rows(view: _View) -> _Step:
    """A pair of CTAs where there are enough of its rows, few of which are padding."""
    rows = view.problem.columns if view.config.swap else view.mean
    waste = -(-rows // PAIR) * PAIR - -(-rows // 128) * 128
    if rows >= PAIR and waste * 8 <= rows:
        view = view.with_(tile=(PAIR, view.config.tile[1]))
        return view, f"pairs of CTAs with {PAIR} rows: {rows} fill them (modelled)"
    return view, f"one CTA a tile: {rows} rows do not fill pairs (derived)"


def _columns(view: _View) -> _Step:
    rows = view.config.tile[0]
    if not view.config.swap:
        return view.with_(tile=(rows, HALVES)), f"{HALVES} columns of weights: fewest bytes an operation (derived)"
    together = view.problem.form == "contiguous"
    wanted = ROOM * view.mean if together else view.mean
    fit = [columns for columns in CAPS if unfit(view.problem, view.target, _tile(view, columns)) is None]
    columns = next((columns for columns in fit if columns >= wanted), fit[-1])
    what = f"{ROOM} times the mean of a group" if together else "all that a group can have"
    return view.with_(tile=(rows, columns)), f"up to {columns} rows of a group a tile: {what} is {wanted} (modelled)"


def _tile(view: _View, columns: int) -> Config:
    return view.with_(tile=(view.config.tile[0], columns)).config


def _split(view: _View) -> _Step:
    """Two parts of k where tiles are too few for the multiprocessors."""
    problem, (rows, columns) = view.problem, view.config.tile
    tiles = problem.groups * -(-problem.columns // rows) * -(-view.mean // columns)
    busy = tiles * (rows // CTA_ROWS)
    about = f"about {tiles} tiles for {view.target.sms} multiprocessors"
    if not view.config.swap or 2 * busy > view.target.sms or problem.k < LONG:
        return view, f"k whole: {about}, k = {problem.k}, swap {view.config.swap} (modelled)"
    parts = view.with_(split=2)
    if unfit(problem, view.target, parts.config) is not None:
        return view, f"k whole: its parts have no room for their sums, or a gate ({about}) (derived)"
    return parts, f"two parts of k, added in order: {about} (modelled)"


def _accumulators(view: _View) -> _Step:
    two = view.with_(accumulators=2)
    sets = geometry_of(view.problem, view.target, two.config).scale_slots_that_fit
    if sets >= 2:
        return two, f"two accumulators: beside them {sets} sets of scales fit tensor memory (published)"
    return view, "one accumulator: two and two sets of scales do not fit tensor memory (derived)"


def _order(view: _View) -> _Step:
    raster = "n" if view.config.swap else "m"
    view = view.with_(raster=raster)
    if view.problem.groups > MOST_RANKED:
        return view, f"groups as given: {view.problem.groups} are too many to be put in order (derived)"
    return view.with_(order="longest"), "groups of the most rows first, so that the last round is short (modelled)"


def _launch(view: _View) -> _Step:
    return view.with_(pdl=True), "dependent launch: the start overlaps the end of the kernel before (published)"
