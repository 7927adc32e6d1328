"""Clusters of one grid in several processes, where nothing that they do depends on each other.

Every process is a fork that runs its share of the clusters on its own copy of memory and hands back what it wrote.
Memory that a fork shares with its parent (files, shared memory of the system) is copied before a cluster runs.  The
shares stand only if they are clean: none had an error or a finding, and no byte of global memory that one wrote was
read or written by another.  Otherwise they are thrown away, with nothing changed, and the grid has to run in one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ptxemu.machine.grid import Grid
from ptxemu.machine.span import Span
from ptxemu.watch.footprint import Change, Footprint, Masks, conflict

__all__ = ["possible", "run"]

Columns = tuple[tuple[Any, ...], ...]  # spans, a field a column: pickled many times faster


@dataclass(frozen=True)
class _Share:
    """What a process hands back."""

    reads: Masks
    writes: Masks
    changes: dict[int, Change]
    sums: tuple[Any, ...]  # of counters
    counts: dict[int, list[int]]
    numbers: tuple[int, ...]
    spans: tuple[Columns, ...]


def possible(grid: Grid) -> bool:
    """Whether the grid's clusters can be divided.

    Not where nobody can wait for processes, since the system is told to forget them (SIGCHLD ignored).
    """
    return (
        sys.platform == "linux"
        and signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN
        and grid.program.independent
        and grid.prerequisite is None
        and len(grid.pending) > 1
        and not grid.findings.all()
    )


def run(grid: Grid, processes: int) -> bool:
    """Runs the grid to its end; False: it was not, and everything is as before."""
    count = min(processes, len(grid.pending))
    shares = _shares([functools.partial(_work, grid, part, count) for part in range(count)])
    whole = [share for share in shares if share is not None]
    if len(whole) < count or conflict([(share.reads, share.writes) for share in whole]):
        return False
    for share in whole:
        _merge(grid, share)
    grid.pending.clear()
    return True


def _shares(works: list[Callable[[], _Share | None]]) -> list[_Share | None]:
    """What processes of their own make of each; none where the system has no room for so many."""
    children: list[tuple[int, BinaryIO]] = []  # process, and where its share can be read
    done = False
    try:
        for work in works:
            children.append(_fork(work))  # noqa: PERF401 - one may fail
        shares = [_receive(source) for _, source in children]
        done = True
    except OSError:
        return []
    finally:
        for process, source in children:
            source.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else has waited for it
                if not done:
                    os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return shares


def _fork(work: Callable[[], _Share | None]) -> tuple[int, BinaryIO]:
    source, sink = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not touch
            process = os.fork()
    except BaseException:
        os.close(source)
        os.close(sink)
        raise
    if process:
        os.close(sink)
        return process, os.fdopen(source, "rb")
    try:
        os.close(source)
        with os.fdopen(sink, "wb") as file:
            pickle.dump(work(), file, protocol=5)
    finally:
        os._exit(0)  # nothing of the parent's is to be finished here


def _receive(source: BinaryIO) -> _Share | None:
    try:
        share: _Share | None = pickle.load(source)
    except (EOFError, pickle.UnpicklingError):  # the process died
        return None
    return share


def _work(grid: Grid, part: int, count: int) -> _Share | None:
    """In a child: every `count`th cluster; None where the share is not clean."""
    grid.pending = grid.pending[part::count]
    largest = max(int(np.prod(shape)) for _, shape in grid.pending)
    grid.free_sms = max(largest, grid.sms // count)
    footprint = grid.footprint = Footprint(grid.memory)
    try:
        _make_private(grid)
        with np.errstate(all="ignore"):
            grid.run()
    except Exception:
        return None
    if grid.findings.all():
        return None
    spans = tuple(tuple(zip(*spans, strict=True)) for spans in (grid.lives, grid.waits, grid.queue.log))
    numbers = grid.ended, grid.ended_ctas, grid.ended_warps, grid.queue.completed, grid.scheduler.turns
    sums = grid.counters.sums()
    return _Share(footprint.reads, footprint.writes, footprint.changes(), sums, grid.counts, numbers, spans)


def _make_private(grid: Grid) -> None:
    """In a child: copies the memory in which the parent would see what is written.

    Raises OSError where the system does not say which that is.
    """
    shared = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            places, permissions, _ = line.split(maxsplit=2)
            if permissions.endswith("s"):
                shared.append(tuple(int(place, 16) for place in places.split("-")))
    for region in grid.memory.regions:
        if any(start < region.end and region.base < end for start, end in shared):
            region.replace(region.data.copy())


def _merge(grid: Grid, share: _Share) -> None:
    for region in grid.memory.regions:
        if (change := share.changes.get(region.base)) is not None:
            change.apply(region)
    grid.counters.add(share.sums)
    for warp, counts in share.counts.items():
        grid.add_counts(warp, counts)
    ended, ctas, warps, completed, turns = share.numbers
    grid.ended += ended
    grid.ended_ctas += ctas
    grid.ended_warps += warps
    grid.queue.completed += completed
    grid.scheduler.turns += turns
    for spans, columns in zip((grid.lives, grid.waits, grid.queue.log), share.spans, strict=True):
        spans += map(Span, *columns) if columns else ()
