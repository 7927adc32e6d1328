"""A launch's timeline as the JSON that Perfetto and Chrome read ("Trace Event Format").

A process a CTA; in it a track a warp, with its life (named by its role) and its waits, and tracks of the asynchronous
units that work for the CTA.  Operations of a unit that overlap get tracks of their own; a flow leads from the warp that
issued an operation to it.  Times are ticks: turns of the scheduler and completions of asynchronous operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ptxemu.machine.span import Span

__all__ = ["UNITS", "events", "unit"]

Event = dict[str, Any]
Describe = Callable[[int], dict[str, Any]]  # of a PTX line: what a reader wants to know

# The unit that carries out an operation, by how its name begins or ends.
_BEGINNINGS = (
    ("tcgen05.st", "tensor memory store"),
    ("tcgen05", "tensor core"),
    ("cp.reduce.async.bulk", "TMA store"),
    ("clusterlaunchcontrol", "launch control"),
    ("st.async", "remote store"),
    ("red.async", "remote store"),
)
UNITS = (
    "TMA load",
    "tensor core",
    "tensor memory store",
    "TMA store",
    "bulk copy",
    "cp.async",
    "remote store",
    "launch control",
)
_WARPS = 32  # tracks of warps, and again for lanes of theirs that wait apart
_FIRST_UNIT, _TRACKS = 10_000, 10_000  # of the first unit, and from one to the next


def unit(what: str) -> str:
    """The unit that carries out an operation of this name."""
    for beginning, name in _BEGINNINGS:
        if what.startswith(beginning):
            return name
    if not what.startswith("cp.async.bulk"):
        return "cp.async"
    ending = what.removesuffix(" (reading its source)")
    return {"load": "TMA load", "store": "TMA store"}.get(ending.rpartition(" ")[2], "bulk copy")


def events(
    lives: Sequence[Span],
    waits: Sequence[Span],
    operations: Sequence[Span],
    describe: Describe,
    roles: dict[int, str],
) -> list[Event]:
    """The trace's events.  roles: by the index of a warp in its CTA."""
    describe = functools.cache(describe)
    ctas = sorted({span.cta for span in (*lives, *operations)}, key=lambda cta: cta[::-1])
    pids = {cta: number + 1 for number, cta in enumerate(ctas)}
    found: list[Event] = []
    names: dict[tuple[int, int], str] = {}  # of the tracks
    for (cta, warp), mine in _grouped([*lives, *waits], lambda span: (span.cta, span.warp)):
        for row, span in _rows(mine, nested=True):
            tid = warp + _WARPS * row
            names[pids[cta], tid] = f"warp {warp}: {roles[warp]}" + (", other lanes" if row else "")
            name = f"wait: {describe(span.line)['ptx']}" if span.line else roles[warp]
            found.append(_slice(pids[cta], tid, name, span, describe))
    for (cta, name), mine in _grouped(operations, lambda span: (span.cta, unit(span.what))):
        for row, span in _rows(mine, nested=False):
            tid = _FIRST_UNIT + _TRACKS * UNITS.index(name) + row
            names[pids[cta], tid] = name + (f" {row + 1}" if row else "")
            found.append(_slice(pids[cta], tid, span.what, span, describe))
            found += _flow(len(found), (pids[cta], span.warp, span.issued), (pids[cta], tid, span.start))
    return [*_metadata(pids, names), *found]


def _grouped(spans: Iterable[Span], key: Callable[[Span], Any]) -> Iterator[tuple[Any, list[Span]]]:
    groups: dict[Any, list[Span]] = {}
    for span in spans:
        groups.setdefault(key(span), []).append(span)
    yield from sorted(groups.items())


def _rows(spans: list[Span], *, nested: bool) -> Iterator[tuple[int, Span]]:
    """Spans with the row each goes to, so that those of a row lie beside each other, or inside where `nested`."""
    rows: list[list[int]] = []  # the ends of what is open at the latest beginning, the innermost last
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for ends in rows:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (i for i, ends in enumerate(rows) if not ends or (nested and span.end <= ends[-1]))
        number = next(free, len(rows))
        rows += [[]] if number == len(rows) else []
        rows[number].append(max(span.end, span.start + 1))
        yield number, span


def _slice(pid: int, tid: int, name: str, span: Span, describe: Describe) -> Event:
    arguments = {"issued by": f"warp {span.warp}", "issued": span.issued} if span.what else {}
    if span.line:
        arguments |= describe(span.line)
    times = {"ts": span.start, "dur": max(span.end - span.start, 1)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": arguments}


def _flow(number: int, source: tuple[int, int, int], target: tuple[int, int, int]) -> list[Event]:
    """An arrow from a place (process, track, time) to another."""
    common = {"cat": "issue", "name": "issue", "id": number}
    places = [{"pid": pid, "tid": tid, "ts": ts} for pid, tid, ts in (source, target)]
    return [{"ph": "s", **common, **places[0]}, {"ph": "f", "bp": "e", **common, **places[1]}]


def _metadata(pids: dict[tuple[int, int, int], int], names: dict[tuple[int, int], str]) -> Iterator[Event]:
    """The names of processes and tracks, and their order."""
    for cta, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"CTA {cta}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (pid, tid), name in sorted(names.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
