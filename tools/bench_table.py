"""A record of `blockscale bench` as the Markdown table of docs/hopper.md: microseconds a product.

python tools/bench_table.py benchmarks/records/hopper-table.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from blockscale.bench.record import Measured, from_json
from blockscale.bench.rivals import AHEAD

RIVALS = ("humming", "cublas", "expand + cublas")
COLUMNS = ("ours", AHEAD, *RIVALS)
HEAD = ("N x K", "M", "ours", AHEAD, "humming", "cuBLAS bf16", "expand + cuBLAS", "reading alone", "best rival / ours")


def rows(measured: Sequence[Measured]) -> Iterator[list[str]]:
    """One a product; the weight is said once."""
    weight = ""
    for one in measured:
        before, weight = weight, f"{one.n} x {one.k}"
        rival = one.best(RIVALS)
        times = [f"{one.median(name):.1f}" if name in one.us else "-" for name in COLUMNS]
        ratio = "-" if rival is None else f"{1 / one.behind('ours', rival):.2f}"
        yield ["" if weight == before else weight, str(one.m), *times, f"{one.read_us:.1f}", ratio]


def markdown(measured: Sequence[Measured]) -> str:
    head, *products = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (HEAD, *rows(measured)))
    return "\n".join([head, "|---" * len(HEAD) + "|", *products])


if __name__ == "__main__":
    print(markdown(from_json(json.loads(Path(sys.argv[1]).read_text()))))
