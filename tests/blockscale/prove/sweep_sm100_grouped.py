"""What is swept of the sm_100a kernels for grouped products, of one launch and of lists."""

from __future__ import annotations

from grouped_sweep import PRODUCT, GroupedSweep, Groups, Row, a_list, together
from sweep import HINTS

from blockscale.families.sm100.grouped.constraints import tile_shape
from blockscale.kernels.parts.geometry import STEP_K
from blockscale.kernels.parts.group_order import GRANULE, counts, width
from blockscale.problem import NVFP4, target_named

# The shapes on which GPU MODE's competition tests (gpu-mode/reference-kernels, nvfp4_group_gemm), a quarter of each
# size; those by which it measures, with parts of their rows, columns and k; of these the two of two groups, whole.
GPU_MODE = (
    a_list((96, 128), (128, 256), (256, 512), 4),
    a_list((256, 72), (512, 384), (256, 256), 4),
    a_list((128, 128), (128, 256), (512, 256), 4),
    a_list((80, 128, 256), (384, 256, 128), (256, 512, 256), 4),
    a_list((64, 72, 96), (128, 384, 512), (512, 512, 256), 4),
    a_list((64, 256, 128), (768, 128, 256), (512, 256, 512), 4),
    a_list((128, 128, 64), (256, 512, 512), (768, 256, 768), 4),
    a_list((128, 128, 128, 128), (128, 128, 128, 128), (512, 256, 512, 256), 4),
    a_list((40, 56, 384, 512), (512, 384, 256, 128), (256, 256, 256, 256), 4),
    a_list((512, 384, 256, 128), (256, 256, 256, 256), (512, 768, 512, 768), 4),
    together((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, (4, 16, 8)),
    together((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, (4, 16, 8)),
    together((192, 320), 3072, 4096, (4, 16, 8)),
    together((128, 384), 4096, 1536, (4, 16, 8)),
    a_list((192, 320), (3072, 3072), (4096, 4096), 1),
    a_list((128, 384), (4096, 4096), (1536, 1536), 1),
)


SUMS = {"gelu": 0.008, "geglu": 0.015, "silu": 0.003, "swiglu": 0.008}  # seconds that 128 sums take, or pairs of them


def seconds(row: Row, shape: Groups) -> float:
    """Every CTA of a pair computes, also beside the matrix, and makes a table of the groups."""
    rows, across = tile_shape(row.problem(shape), row.config)
    granule = STEP_K if row.out_dtype == NVFP4 else GRANULE
    total = 0.002 * len(shape.sizes)
    for e, size in enumerate(shape.sizes):
        n = shape.columns[e] if shape.columns else shape.n
        down, over = counts(size, n, (rows, across), row.config.swap)
        columns = sum(width((size if row.config.swap else n) - i * across, across, granule, min) for i in range(over))
        total += down * (columns * SUMS.get(str(row.activation), 0.001) + over * 0.02) * (rows // 128)
    return total * (2 if row.out_dtype == NVFP4 else 1)


SWEEP = GroupedSweep(
    target=target_named("b200"),
    count=89,
    seconds=seconds,  # type: ignore[arg-type] # of a row of this sweep
    config={
        "tile": (*((128, n) for n in (64, 32, 96, 160, 256, 384)), *((256, n) for n in (32, 96, 128, 256, 384))),
        "stages": (None, 1, 2, 3),
        "accumulators": (1, 2),
        "swap": (True, False),
        "order": ("given", "longest"),
        "raster": ("m", "n"),
        "pdl": (False, True),
        "split": (1, 2),
        "l2_a": HINTS,
        "l2_b": HINTS,
        "l2_scales": HINTS,
        "read": (32, 16, 64, 128),
        "ctas": (None, 1, 3),
    },
    product=PRODUCT,
    relaxed=("tile", "swap", "form"),
    never=frozenset(
        {
            ("tile", "accumulators"),  # no room for the sums
            ("tile", "out_dtype"),  # whole words of an NVFP4 result's scales
            ("tile", "activation"),  # sums of a gate beside the others
            ("swap", "split"),
            ("swap", "read"),
            ("swap", "out_dtype"),
            ("pdl", "form"),  # of lists: they read what the launch has written
            ("split", "read"),
            ("split", "out_dtype"),
            ("split", "activation"),
            ("read", "out_dtype"),
            ("read", "activation"),
            ("form", "groups"),  # a list of one is none
            ("form", "spread"),
            ("form", "out_dtype"),
            ("form", "activation"),
        }
    ),
    sms=4,
    competition=GPU_MODE,
    seed=3,
    sample=30,
)
