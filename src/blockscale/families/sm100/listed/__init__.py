"""Lists of products of any sizes on sm_100a (B200): the entry of `kernels/sm100_list.py`; what that can be built as is
what the kernel for groups can, whose problem of form "list" has the largest m, n and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockscale.config import Config, Reason
from blockscale.entry import Entry, Pointer
from blockscale.families.sm100 import grouped
from blockscale.families.sm100.grouped.choice import choose
from blockscale.families.sm100.grouped.constraints import most_ctas, unfit
from blockscale.families.sm100.launch import ACTIVATION, premature, tensors
from blockscale.formats.layouts import ATOMS
from blockscale.problem import GATED, NVFP4, GroupedProblem, Problem, Target

__all__ = [
    "ACTIVATION",
    "CALL_FIELDS",
    "CODE_FIELDS",
    "ENTRY",
    "KERNEL",
    "LAYOUTS",
    "choose",
    "kernel",
    "premature",
    "sizes",
    "tensors",
    "unfit",
    "unsupported",
    "values",
]

CALL_FIELDS = grouped.CALL_FIELDS
# It reads what a kernel of the same launch wrote just before, so it does not start early.
CODE_FIELDS = tuple(name for name in grouped.CODE_FIELDS if name != "pdl")
KERNEL = "blockscale.kernels.sm100_list"
LAYOUTS: Mapping[str, str] = {"a": ATOMS, "b": ATOMS, "out": ATOMS}
ENTRY = Entry(
    pointers={"table": Pointer("int64", 8), "maps": Pointer("uint8", 128)},
    values={"factor": "fp64", "experts": "int32", "ctas": "int32"},
)
ROW_BYTES = 128  # of the table, a row a product
MAPS_BYTES = 512  # of a product's tensor maps


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    assert isinstance(problem, GroupedProblem)
    if problem.out_dtype == NVFP4:
        return Reason("out_dtype", f"{NVFP4}: the kernel for lists has no such results")
    if problem.activation in GATED:
        return Reason("activation", f"{problem.activation!r}: the kernel for lists has no gates")
    return grouped.unsupported(problem, target)


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import sm100_list

    build: Any = sm100_list.Sm100ListGemm  # of modules without types
    code = {name: getattr(config, name) for name in CODE_FIELDS}
    epilogue = {"out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    return build(**code, **epilogue, form="list", smem=target.smem)


def sizes(problem: Problem, ld_out: int) -> dict[str, int]:
    """Bytes behind each pointer that a kernel may touch."""
    assert isinstance(problem, GroupedProblem)
    return {"table": ROW_BYTES * problem.groups, "maps": MAPS_BYTES * problem.groups}


def values(problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
    """The values, but for the factor, which is the call's."""
    assert isinstance(problem, GroupedProblem)
    return {"experts": problem.groups, "ctas": most_ctas(problem, target, config)}
