"""The roofline plot of a record: how near a product comes to what memory and tensor cores allow."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockscale.bench.record import Measured, from_json

INSTALL = "pip install '.[plots]' in a clone of the repository"
STYLES = {
    "ours": ("#1b7f3b", "o"),
    "ours, ahead": ("#6cbf84", "o"),
    "humming": ("#7a4fb5", "s"),
    "cublas": ("#c2571a", "^"),
    "expand + cublas": ("#b8860b", "v"),
}
OTHER = ("#8a8a8a", "v")


def check_matplotlib() -> None:
    """Raises ValueError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot: matplotlib is not installed: {INSTALL}")


def draw(document: Mapping[str, Any], path: Path) -> None:
    """One panel a weight that was measured at three M or more, or at fewer if none was: TFLOP/s over M, log-log.

    The roof is the lower of two lines: the time to read the weight's bytes alone, and torch.matmul's rate, both of the
    same record.

    Raises:
        ValueError: matplotlib is not installed, or `document` is no record.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = _panels(from_json(document))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.9), sharey=True, squeeze=False)
    try:
        for axis, products in zip(axes[0], panels, strict=True):
            _panel(axis, products, document["ceilings"][f"{products[0].dtype}_tflop_per_s"])
        axes[0][0].set_ylabel("TFLOP/s")
        axes[0][-1].legend(fontsize=8, loc="lower right")
        figure.suptitle(f"{document['gpu']}, {products[0].dtype} activations x NVFP4 weights", fontsize=11)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        pyplot.close(figure)


def _panels(measured: Sequence[Measured]) -> list[list[Measured]]:
    """Products by weight, those of one weight by M; at most five weights."""
    weights: dict[tuple[int, int], list[Measured]] = {}
    for one in measured:
        weights.setdefault((one.n, one.k), []).append(one)
    panels = [sorted(products, key=lambda one: one.m) for products in weights.values()]
    return [products for products in panels if len(products) >= 3][:5] or panels[:5]


def _panel(axis: Any, products: Sequence[Measured], peak: float) -> None:
    rows = [one.m for one in products]
    roof = [min(_tflops(one, one.read_us), peak) for one in products]
    axis.plot(rows, roof, color="black", linewidth=1.2, label="reading the weight alone, or matmul's peak")
    for name in products[0].us:
        color, marker = STYLES.get(name, OTHER)
        speeds = [_tflops(one, one.median(name)) for one in products if name in one.us]
        axis.plot(rows[: len(speeds)], speeds, color=color, marker=marker, markersize=4, linewidth=1, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(rows, [str(m) for m in rows])
    axis.set_xlabel("M")
    axis.set_title(f"N = {products[0].n}, K = {products[0].k}", fontsize=9)
    axis.grid(True, which="major", alpha=0.3)


def _tflops(one: Measured, us: float) -> float:
    return 2 * one.m * one.n * one.k / us / 1e6
