"""What the sm_100a kernel takes, in order, and what a plan fills in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockscale.config import Config
from blockscale.entry import Entry, Pointer
from blockscale.families.sm100.constraints import CODE_FIELDS, tile_count
from blockscale.formats.layouts import ATOMS, ROW_ALIGN, blocks, round_up
from blockscale.problem import NVFP4, OUT_BYTES, Problem, Target
from blockscale.tensor import NVFP4Tensor

KERNEL = "blockscale.kernels.sm100"
ACTIVATION = "nvfp4"
LAYOUTS: Mapping[str, str] = {"a": ATOMS, "b": ATOMS, "out": ATOMS}
ENTRY = Entry(
    pointers={
        "a": Pointer("uint8", 16),
        "b": Pointer("uint8", 16),
        "sfa": Pointer("uint8", 16),
        "sfb": Pointer("uint8", 16),
        "out": Pointer("problem.out_dtype"),
        "unit_a": Pointer("fp32"),
        "unit_b": Pointer("fp32"),
        "alpha": Pointer("fp32"),
        "bias": Pointer("problem.bias"),
        "sf_out": Pointer("uint8", 16),
        "unit_out": Pointer("fp32"),
    },
    values={
        "factor": "fp64",
        "m": "int32",
        "n": "int32",
        "k": "int32",
        "ld_out": "int64",
        "batch": "int32",
        "batch_a": "int32",
        "batch_b": "int32",
        "ctas": "int32",
    },
)


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import sm100

    build: Any = sm100.Sm100Gemm  # of modules without types
    code = {name: getattr(config, name) for name in CODE_FIELDS}
    epilogue = {"out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    return build(**code, **epilogue, smem=target.smem)


def premature(config: Config, early: list[str]) -> list[str]:
    """Of the instructions on global memory that come before the wait, those that may not: all."""
    return early


def tensors(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: NVFP4Tensor | Tensor,
    alpha: Tensor,
    bias: Tensor,
    unused: Tensor,
) -> list[Tensor]:
    """What stands behind each pointer."""
    assert isinstance(a, NVFP4Tensor)  # or `unsupported` has refused it
    inputs = a.codes, b.codes, a.scales, b.scales
    factors = a.global_scale, b.global_scale, alpha, bias
    if isinstance(out, NVFP4Tensor):
        return [*inputs, out.codes, *factors, out.scales, out.global_scale]
    return [*inputs, out, *factors, unused, unused]


def sizes(problem: Problem, ld_out: int) -> dict[str, int]:
    """Bytes behind each pointer that a kernel may touch."""
    columns = blocks(problem.k)

    def codes(rows: int, batch: int) -> int:
        return batch * rows * 8 * columns

    def scales(rows: int, batch: int) -> int:
        return batch * round_up(rows, ROW_ALIGN) * columns

    rows = problem.batch * problem.m
    quantised = problem.out_dtype == NVFP4
    return {
        "a": codes(problem.m, problem.batch_a),
        "b": codes(problem.n, problem.batch_b),
        "sfa": scales(problem.m, problem.batch_a),
        "sfb": scales(problem.n, problem.batch_b),
        "out": rows * ld_out if quantised else ((rows - 1) * ld_out + problem.n) * OUT_BYTES[problem.out_dtype],
        "unit_a": 4,
        "unit_b": 4,
        "alpha": 4,
        "bias": 4 if problem.bias is None else problem.n * OUT_BYTES[problem.bias],
        "sf_out": problem.batch * round_up(problem.m, ROW_ALIGN) * blocks(problem.n) if quantised else 0,
        "unit_out": 4,
    }


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
        "ctas": min(tile_count(problem, config), config.ctas or target.sms),
    }
