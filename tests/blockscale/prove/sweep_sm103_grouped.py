"""What is swept of the kernels for grouped products on B300: those of B200, compiled for sm_103a, by fewer values."""

from __future__ import annotations

from dataclasses import replace

from sweep_sm100_grouped import SWEEP as SM100

from blockscale.problem import target_named

SWEEP = replace(
    SM100,
    target=target_named("b300"),
    count=25,
    config={
        **SM100.config,
        "tile": ((128, 64), (128, 256), (256, 128), (256, 384)),
        "stages": (None,),
        "l2_a": (None,),
        "l2_b": (None,),
        "l2_scales": (None,),
        "read": (32,),
        "ctas": (None, 3),
    },
    product={
        **SM100.product,
        "groups": (3, 8, 60),
        "spread": ("random", "single", "around"),
        "bias": (None, "fp32", "fp16"),
        "activation": (None, "gelu", "swiglu"),
        "alpha": ("float", "tensor"),
    },
    never=frozenset(
        {
            ("tile", "accumulators"),
            ("tile", "activation"),
            ("swap", "split"),
            ("swap", "out_dtype"),
            ("pdl", "form"),
            ("split", "out_dtype"),
            ("split", "activation"),
            ("form", "out_dtype"),
            ("form", "activation"),
        }
    ),
    competition=SM100.competition[8:14],  # the largest lists and all benchmarks, none of them whole
    seed=4,
    sample=100,
)
