"""What is swept of the sm_120a kernel."""

from __future__ import annotations

from sweep import DTYPES, GPU_MODE, GPU_MODE_GEMV, HINTS, PRODUCT, Row, Shape, Sweep

from blockscale.families.sm120.constraints import tile_count
from blockscale.problem import NVFP4, target_named


def seconds(row: Row, shape: Shape) -> float:
    """Every warp multiplies whole stages of k, and every block of its tile, also beside the matrix."""
    tiles = tile_count(row.problem(shape), row.config) * max(shape.batch_a, shape.batch_b, 1)
    tiles //= row.problem(shape).batch
    sums = row.config.tile[0] * row.config.tile[1]
    storing = {"gelu": 30e-6, "silu": 8e-6}.get(str(row.activation), 4e-6)
    multiplying = 5e-6 * (1 + shape.k // (row.config.chunk or 128))
    return tiles * (0.03 + sums * (storing + multiplying)) * (2 if row.out_dtype == NVFP4 else 1)


SWEEP = Sweep(
    target=target_named("rtx5090"),
    count=53,
    seconds=seconds,
    config={
        "tile": tuple((rows, columns) for rows in (64, 128) for columns in (8, 16, 32, 64, 128, 256)),
        "chunk": (None, 128, 256),
        "stages": (None, 1, 2, 3),
        "accumulators": (1, 2),
        "schedule": ("static", "clc"),
        "raster": ("m", "n"),
        "group": (1, 2, 3),
        "swap": (False, True),
        "pdl": (False, True),
        "l2_a": HINTS,
        "l2_b": HINTS,
        "l2_scales": HINTS,
        "l2_out": HINTS,
        "ctas": (None, 1, 3),
        "persist_mb": (0, 8),
    },
    never=frozenset({("tile", "accumulators"), ("schedule", "ctas")}),  # no room for the sums; as many as tiles
    product={**PRODUCT, "out_dtype": tuple(DTYPES)},
    competition=(*GPU_MODE, *GPU_MODE_GEMV),
)
