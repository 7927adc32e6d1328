"""What the sm_120a kernel takes: the same as that for sm_100a."""

from __future__ import annotations

from typing import Any

from blockscale.config import Config
from blockscale.families.sm100.launch import ACTIVATION, ENTRY, LAYOUTS, premature, sizes, tensors
from blockscale.families.sm120.constraints import CODE_FIELDS, tile_count
from blockscale.formats.layouts import blocks
from blockscale.problem import Problem, Target

__all__ = ["ACTIVATION", "ENTRY", "KERNEL", "LAYOUTS", "kernel", "premature", "sizes", "tensors", "values"]

KERNEL = "blockscale.kernels.sm120"


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import sm120

    build: Any = sm120.Sm120Gemm  # of modules without types
    code = {name: getattr(config, name) for name in CODE_FIELDS}
    epilogue = {"out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    return build(**code, **epilogue, smem=target.smem)


def values(problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
    """The values, but for the factor, which is the call's."""
    return {
        "m": problem.m,
        "n": problem.n,
        "k": 16 * blocks(problem.k),
        "ld_out": ld_out,
        "batch": problem.batch,
        "batch_a": problem.batch_a,
        "batch_b": problem.batch_b,
        "ctas": min(config.split * tile_count(problem, config), config.ctas or target.sms),
    }
