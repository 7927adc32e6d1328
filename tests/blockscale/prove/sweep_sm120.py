"""What is swept of the sm_120a kernel."""

from __future__ import annotations

from sweep import BATCHES, GPU_MODE, GPU_MODE_GEMV, HINTS, SMALL, Row, Shape, Sweep

from blockscale.families.sm120.constraints import tile_count
from blockscale.problem import NVFP4, target_named


def seconds(row: Row, shape: Shape) -> float:
    """Every warp multiplies whole stages of k, and every block of its tile, also beside the matrix."""
    tiles = tile_count(row.problem(shape), row.config) * max(shape.batch_a, shape.batch_b, 1)
    tiles //= row.problem(shape).batch
    sums = row.config.tile[0] * row.config.tile[1]
    storing = {"gelu": 30e-6, "silu": 8e-6}.get(str(row.activation), 4e-6)
    stage = row.config.chunk or 128
    multiplying = 5e-6 * -(-shape.k // stage) * stage / 128
    return tiles * (0.06 + sums * (storing + multiplying)) * (2 if row.out_dtype == NVFP4 else 1)


# Sizes around tiles of at most 128 x 256, several of them, and more of the smaller ones than there are multiprocessors.
LARGE = (
    *(Shape(200, 140, 80), Shape(140, 270, 272), Shape(300, 130, 48), Shape(129, 257, 17), Shape(70, 200, 528)),
    *(Shape(270, 8, 272), Shape(140, 7, 600), Shape(260, 40, 80), Shape(150, 33, 300), Shape(130, 16, 528)),
    *(Shape(8, 270, 272), Shape(5, 140, 600), Shape(40, 260, 80), Shape(33, 150, 300), Shape(16, 130, 528)),
)

SWEEP = Sweep(
    target=target_named("rtx5090"),
    count=70,
    seconds=seconds,
    sms=4,
    shapes={"large": LARGE, "small": SMALL, "batches": BATCHES},
    config={
        "tile": (
            *((rows, columns) for rows in (64, 128) for columns in (8, 16, 32, 64, 128, 256)),
            *((256, 8), (256, 128), (512, 16), (512, 64)),
        ),
        "split": (1, 2, 4),
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
        "ctas": (None, 1, 3),
        "persist_mb": (0, 8),
    },
    never=frozenset(
        {
            ("tile", "accumulators"),  # no room for the sums
            ("tile", "stages"),
            ("split", "schedule"),
            ("split", "accumulators"),
            ("schedule", "ctas"),  # as many as tiles
            ("tile", "out_dtype"),  # whole blocks and atoms of an NVFP4 result
            ("swap", "out_dtype"),
        }
    ),
    seed=8,
    competition=(*GPU_MODE, *GPU_MODE_GEMV),
)
