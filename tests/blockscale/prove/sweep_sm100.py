"""What is swept of the sm_100a kernel."""

from __future__ import annotations

from sweep import HINTS, Row, Shape, Sweep

from blockscale.families.sm100.constraints import tile_count
from blockscale.problem import NVFP4, target_named


def seconds(row: Row, shape: Shape) -> float:
    """Every CTA of a cluster computes, also beside the matrix."""
    tiles = tile_count(row.problem(shape), row.config) * max(shape.batch_a, shape.batch_b, 1)
    tiles //= row.problem(shape).batch
    sums = {"gelu": 0.005, "silu": 0.001}.get(str(row.activation), 0.0006) * row.config.tile[1]
    return tiles * (sums + 0.01 * (1 + shape.k / 256)) * (2 if row.out_dtype == NVFP4 else 1)


SWEEP = Sweep(
    target=target_named("b200"),
    count=84,
    seconds=seconds,
    config={
        "tile": (*((128, n) for n in (8, 40, 64, 96, 128, 192, 256)), *((256, n) for n in (16, 48, 64, 128, 224, 256))),
        "stages": (None, 1, 2, 3),
        "accumulators": (1, 2),
        "cluster": (None, (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 4)),
        "fallback_cluster": (None, (2, 1), (1, 1), (1, 2)),
        "schedule": ("static", "clc"),
        "raster": ("m", "n"),
        "group": (1, 2, 3),
        "swap": (False, True),
        "pdl": (False, True),
        "prefetch": (0, 1, 5),
        "l2_a": HINTS,
        "l2_b": HINTS,
        "l2_scales": HINTS,
        "l2_out": HINTS,
        "store": ("direct", "tma", "tma_rows"),
        "read": (32, 8, 64, 128),
        "release": ("late", "early"),
        "store_slots": (2, 1),
        "ctas": (None, 1, 3),
        "persist_mb": (0, 8),
    },
    relaxed=("tile", "cluster", "store"),
    never=frozenset(
        {
            ("tile", "cluster"),  # pieces of b, pairs
            ("tile", "fallback_cluster"),
            ("tile", "out_dtype"),
            ("cluster", "fallback_cluster"),
            ("schedule", "ctas"),
            ("swap", "store"),
            ("swap", "out_dtype"),
            ("store", "out_dtype"),
            ("swap", "l2_out"),  # those without an effect
            ("l2_out", "out_dtype"),
            ("read", "out_dtype"),
            ("swap", "store_slots"),
            ("store_slots", "out_dtype"),
            ("store", "store_slots"),
        }
    ),
)
