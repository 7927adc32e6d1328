"""What the sm_103a kernels take, which is what the sm_100a kernel takes, and which of them a configuration asks for."""

from __future__ import annotations

from typing import Any

from blockscale.config import Config
from blockscale.families.sm100 import launch as sm100
from blockscale.families.sm100.launch import ACTIVATION, ENTRY, LAYOUTS, premature, sizes, tensors, values
from blockscale.families.sm103.constraints import CODE_FIELDS, K96
from blockscale.problem import Problem, Target

__all__ = ["ACTIVATION", "ENTRY", "KERNEL", "LAYOUTS", "kernel", "premature", "sizes", "tensors", "values"]

KERNEL = "blockscale.kernels.sm103"


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    if config.mma_k != K96:
        return sm100.kernel(problem, target, config)
    from blockscale.kernels import sm103

    build: Any = sm103.Sm103Gemm  # of modules without types
    code = {name: getattr(config, name) for name in CODE_FIELDS if name not in ("mma_k", "l2_scales")}
    epilogue = {"out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    return build(**code, **epilogue, smem=target.smem)
