"""What is swept of the sm_103a kernel with K = 96; with K = 64 it is the sm_100a kernel."""

from __future__ import annotations

from sweep import BATCHES, HINTS, LARGE, SMALL, Row, Shape, Sweep
from sweep_sm100 import SWEEP as SM100

from blockscale.families.sm103.constraints import tile_count
from blockscale.problem import NVFP4, target_named

KEEPING = ("evict_last", None, "evict_first")  # what may be dropped


def seconds(row: Row, shape: Shape) -> float:
    """Every CTA of a cluster computes, also beside the matrix."""
    tiles = tile_count(row.problem(shape), row.config) * max(shape.batch_a, shape.batch_b, 1)
    tiles //= row.problem(shape).batch
    sums = {"gelu": 0.005, "silu": 0.001}.get(str(row.activation), 0.0006) * row.config.tile[1]
    return tiles * (sums + 0.01 * (1 + shape.k / 256)) * (2 if row.out_dtype == NVFP4 else 1)


SWEEP = Sweep(
    target=target_named("b300"),
    count=80,
    seconds=seconds,
    config={
        "tile": (*((128, n) for n in (8, 40, 64, 96, 192, 256)), *((256, n) for n in (16, 64, 160, 224, 256))),
        "stages": (None, 2, 3),
        "accumulators": (1, 2),
        "cluster": (None, (1, 2), (2, 1), (2, 2), (4, 2), (8, 2), (4, 4)),
        "fallback_cluster": (None, (2, 1), (1, 1)),
        "schedule": ("static", "clc"),
        "raster": ("m", "n"),
        "group": (1, 2, 3),
        "swap": (False, True),
        "pdl": (False, True),
        "prefetch": (0, 3),
        "l2_a": KEEPING,
        "l2_b": HINTS,
        "l2_scales": (None,),
        "l2_out": HINTS,
        "store": ("direct", "tma", "tma_rows"),
        "read": (32, 8, 64, 128),
        "release": ("late", "early", "preload"),
        "store_slots": (2, 1),
        "ctas": (None, 1, 3),
        "persist_mb": (0, 8),
        "mma_k": (96,),
        "ownership": ("turns", "lines"),
        "l2_sfa": KEEPING,
        "l2_sfb": HINTS,
        "drop": (0, 1, 3),
        "first": ("a", "b"),
        "pace": (0, 20),
        "unroll": (1, 2),
        "fixed": (None,),
    },
    relaxed=("tile", "cluster", "store"),
    never=SM100.never
    | {
        ("schedule", "ownership"),
        ("group", "ownership"),
        ("ownership", "drop"),
        ("l2_a", "drop"),
        ("l2_sfa", "drop"),
    },
    shapes={
        "large": (*LARGE, Shape(530, 300, 576), Shape(300, 530, 768), Shape(257, 40, 640)),
        "small": (*SMALL, Shape(33, 40, 512), Shape(130, 7, 1280), Shape(17, 64, 2240), Shape(5, 130, 704)),
        "batches": (*BATCHES, Shape(33, 24, 850, 2, 0)),
    },
    sms=16,
)
