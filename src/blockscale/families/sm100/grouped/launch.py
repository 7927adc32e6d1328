"""What the sm_100a kernel for grouped products takes, in order, and what a plan fills in.

The entry is that of a single product with, at the end of the pointers, the table that says where groups begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockscale.config import Config
from blockscale.entry import Entry, Pointer
from blockscale.families.sm100.grouped.constraints import CODE_FIELDS, most_ctas, scale_rows
from blockscale.families.sm100.launch import ACTIVATION, premature, tensors
from blockscale.families.sm100.launch import ENTRY as SINGLE
from blockscale.formats.layouts import ATOMS, GROUPED, ROW_ALIGN, blocks, round_up
from blockscale.problem import NVFP4, OUT_BYTES, GroupedProblem, Problem, Target

__all__ = ["ACTIVATION", "ENTRY", "KERNEL", "LAYOUTS", "kernel", "premature", "sizes", "tensors", "values"]

KERNEL = "blockscale.kernels.sm100_grouped"
# Of the contiguous form; in the masked one the matrices of "a" and "out" are in ATOMS.
LAYOUTS: Mapping[str, str] = {"a": GROUPED, "b": ATOMS, "out": GROUPED}
ENTRY = Entry(
    pointers={**SINGLE.pointers, "groups": Pointer("int32")},
    values={
        "factor": "fp64",
        "m": "int32",
        "n": "int32",
        "k": "int32",
        "ld_out": "int64",
        "experts": "int32",
        "alphas": "int32",
        "biases": "int32",
        "ends": "int32",
        "ctas": "int32",
    },
)


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import sm100_grouped

    assert isinstance(problem, GroupedProblem)
    build: Any = sm100_grouped.Sm100GroupedGemm  # of modules without types
    code = {name: getattr(config, name) for name in CODE_FIELDS}
    epilogue = {"out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    return build(**code, **epilogue, form=problem.form, smem=target.smem)


def sizes(problem: Problem, ld_out: int) -> dict[str, int]:
    """Bytes behind each pointer that a kernel may touch."""
    assert isinstance(problem, GroupedProblem)
    depth, across = blocks(problem.k), blocks(problem.columns)
    rows = problem.m * (problem.groups if problem.form == "masked" else 1)
    padded = scale_rows(problem)
    quantised = problem.out_dtype == NVFP4
    return {
        "a": rows * 8 * depth,
        "b": problem.groups * problem.n * 8 * depth,
        "sfa": padded * depth,
        "sfb": problem.groups * round_up(problem.n, ROW_ALIGN) * depth,
        "out": rows * ld_out if quantised else ((rows - 1) * ld_out + problem.columns) * OUT_BYTES[problem.out_dtype],
        "unit_a": 4,
        "unit_b": 4,
        "alpha": 4 * problem.alphas,
        "bias": 4 if problem.bias is None else problem.biases * problem.n * OUT_BYTES[problem.bias],
        "sf_out": padded * across if quantised else 0,
        "unit_out": 4,
        "groups": 4 * problem.groups,
    }


def values(problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
    """The values, but for the factor, which is the call's. How many tiles there are, the device alone knows."""
    assert isinstance(problem, GroupedProblem)
    return {
        "m": problem.m,
        "n": problem.n,
        "k": 16 * blocks(problem.k),
        "ld_out": ld_out,
        "experts": problem.groups,
        "alphas": problem.alphas,
        "biases": problem.biases,
        "ends": int(problem.ends),
        "ctas": most_ctas(problem, target, config),
    }
