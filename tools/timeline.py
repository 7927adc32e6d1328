"""Draws a trace of ptxemu: `python tools/timeline.py TRACE.json PICTURE.svg`; needs matplotlib.

docs/pictures/gemm.svg is one CTA's two tiles of this project's sm_100a kernel:

    with blockscale.emulated("sm_100a", schedule="fifo", sms=1) as gpu:
        blockscale.gemm(a, b, config=Config(tile=(128, 128), stages=4, accumulators=2))  # M, N, K = 128, 256, 2048
    gpu.report.trace("TRACE.json")
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Event = dict[str, Any]

STYLE = {"svg.hashsalt": "timeline", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
RUNS, WAITS = "#3b6ea8", "#d9dee5"
COLOURS = {"load": "#e0952f", "tcgen05.mma": "#2f8f5b", "tcgen05.cp": "#94c973", "tcgen05.commit": "#c0392b"}
OTHER = "#8e6bb0"
LEGEND = {
    "warp runs": RUNS,
    "warp waits": WAITS,
    "TMA load in flight": COLOURS["load"],
    "tcgen05.cp": COLOURS["tcgen05.cp"],
    "tcgen05.mma": COLOURS["tcgen05.mma"],
    "tcgen05.commit": COLOURS["tcgen05.commit"],
}


def colour(name: str) -> str:
    """Of an asynchronous operation."""
    return next((c for word, c in COLOURS.items() if word in name), OTHER)


def tracks(events: list[Event], process: int = 1) -> list[tuple[str, list[Event]]]:
    """The named tracks of a CTA with their slices, in the trace's order."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == process]
    return [(name, [e for e in slices if e["tid"] == tid]) for tid, name in sorted(names.items())]


def draw(events: list[Event], path: Path) -> None:
    """A row a warp: where it runs and where it waits; below, for each unit, a narrower row for each of its operations
    that are in flight at a time."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    rows = tracks(events)
    units = [name if name.startswith("warp ") else name.rstrip(" 0123456789") for name, _ in rows]
    top, labels = 0.0, []
    for unit, (_, slices) in zip(units, rows, strict=True):
        warp = unit.startswith("warp ")
        height = 1.0 if units.count(unit) == 1 else 0.45
        bars: dict[str, list[tuple[float, float]]] = {}
        for event in sorted(slices, key=lambda e: -e["dur"]):
            fill = (WAITS if event["name"].startswith("wait: ") else RUNS) if warp else colour(event["name"])
            bars.setdefault(fill, []).append((event["ts"], event["dur"]))
        for fill, spans in bars.items():
            edge = {"edgecolor": "none"} if warp else {"edgecolor": "white", "linewidth": 0.3}
            axes.broken_barh(spans, (top + 0.06, height - 0.12), facecolor=fill, **edge)
        labels.append((unit, top, top + height))
        top += height
    places: dict[str, tuple[float, float]] = {}
    for unit, low, high in labels:
        places[unit] = (min(places.get(unit, (low, high))[0], low), high)
    axes.set_yticks([(low + high) / 2 for low, high in places.values()], list(places))
    axes.set_ylim(top, 0)
    axes.set_xlabel("turns of the scheduler and completions of operations: order, not duration")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.margins(x=0.005)
    handles = [Rectangle((0, 0), 1, 1, color=fill) for fill in LEGEND.values()]
    figure.legend(handles, LEGEND, loc="outside upper center", ncols=len(LEGEND), frameon=False, handlelength=1)
    figure.set_size_inches(9.6, 1.0 + 0.22 * top)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def main() -> None:
    trace, picture = map(Path, sys.argv[1:3])
    with mpl.rc_context(STYLE):
        draw(json.loads(trace.read_text())["traceEvents"], picture)


if __name__ == "__main__":
    main()
