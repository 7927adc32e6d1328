"""A record of `blockscale bench` as a Markdown table: microseconds a product, and how far the best rival is behind.

python tools/bench_table.py benchmarks/records/hopper-table.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from blockscale.bench.record import Measured, from_json

RIVALS = ("humming", "cublas", "expand + cublas")
HEAD = ("N x K", "M", "ours", "humming", "cuBLAS bf16", "expand + cuBLAS", "reading alone", "best rival / ours")


def rows(measured: Sequence[Measured]) -> list[list[str]]:
    return [_row(one) for one in measured]


def _row(one: Measured) -> list[str]:
    ours = one.best([name for name in one.us if name.startswith("ours")])
    rival = one.best(RIVALS)
    assert ours is not None
    times = [f"{one.median(name):.1f}" if name in one.us else "-" for name in RIVALS]
    ahead = "-" if rival is None else f"{1 / one.behind(ours, rival):.2f}"
    return [f"{one.n} x {one.k}", str(one.m), f"{one.median(ours):.1f}", *times, f"{one.read_us:.1f}", ahead]


def markdown(measured: Sequence[Measured]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows(measured)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(markdown(from_json(json.loads(Path(sys.argv[1]).read_text()))))
