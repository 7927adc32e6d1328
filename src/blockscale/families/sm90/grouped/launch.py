"""What the sm_90a kernel for grouped products takes, in order, and what a plan fills in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockscale.config import Config
from blockscale.entry import Entry, Pointer
from blockscale.families.sm90.constraints import GROUP
from blockscale.families.sm90.grouped.choice import FINISHERS, ctas, most_blocks
from blockscale.families.sm90.launch import ACTIVATION, LAYOUTS, premature, tensors
from blockscale.families.sm90.launch import ENTRY as SINGLE
from blockscale.formats import fragment
from blockscale.formats.fragment import ROWS
from blockscale.formats.layouts import blocks
from blockscale.problem import OUT_BYTES, GroupedProblem, Problem, Target

__all__ = [
    "ACTIVATION",
    "CALL_FIELDS",
    "CODE_FIELDS",
    "ENTRY",
    "KERNEL",
    "LAYOUTS",
    "kernel",
    "premature",
    "sizes",
    "tensors",
    "values",
]

KERNEL = "blockscale.kernels.hopper_groups"
CODE_FIELDS: tuple[str, ...] = ("tile", "stages", "accumulators", "pdl", "wgmma", "k_warps", "chunk", "buffers")
CALL_FIELDS: tuple[str, ...] = ("ctas",)
_MORE: Mapping[str, str] = dict.fromkeys(("experts", "alphas", "biases", "ends", "blocks"), "int32")
ENTRY = Entry(pointers={**SINGLE.pointers, "groups": Pointer("int32")}, values={**SINGLE.values, **_MORE})


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import hopper_groups

    assert isinstance(problem, GroupedProblem)
    build: Any = hopper_groups.Sm90GroupedGemm  # of modules without types
    wide: Any = hopper_groups.Sm90ExpertGemm
    tokens, rows = config.tile
    of = {"a_dtype": problem.a, "out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    rings = {"depth": config.stages, "buffers": config.buffers, "pdl": config.pdl, "form": problem.form}
    if config.wgmma:
        groups = {"row_groups": rows // (GROUP * ROWS), "k_groups": config.k_warps, "kept": config.accumulators}
        return wide(tokens, finishers=FINISHERS, **groups, **rings, **of)
    return build(tokens, row_warps=rows // ROWS, k_warps=config.k_warps, chunk=config.chunk, **rings, **of)


def sizes(problem: Problem, ld_out: int) -> dict[str, int]:
    """Bytes behind each pointer that a kernel may touch."""
    assert isinstance(problem, GroupedProblem)
    tiles, units, unit = fragment.shape((), problem.n, blocks(problem.k))
    rows = problem.m * (problem.groups if problem.form == "masked" else 1)
    return {
        "a": OUT_BYTES[problem.a] * rows * problem.k,
        "b": problem.groups * tiles * units * unit,
        "out": ((rows - 1) * ld_out + problem.n) * OUT_BYTES[problem.out_dtype],
        "bias": 4 if problem.bias is None else problem.biases * problem.n * OUT_BYTES[problem.bias],
        "unit": 4,
        "alpha": 4 * problem.alphas,
        "groups": 4 * problem.groups,
    }


def values(problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
    """The values, but for the factor, which is the call's."""
    assert isinstance(problem, GroupedProblem)
    return {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "ld_a": problem.k,
        "ld_out": ld_out,
        "experts": problem.groups,
        "alphas": problem.alphas,
        "biases": problem.biases,
        "ends": int(problem.ends),
        "blocks": ctas(problem, target, config) if config.wgmma else most_blocks(problem, config),
    }
