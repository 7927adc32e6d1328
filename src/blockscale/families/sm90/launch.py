"""What the sm_90a kernels take, in order, and what a plan fills in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockscale.config import Config
from blockscale.entry import Entry, Pointer
from blockscale.families.sm90 import prefill
from blockscale.families.sm90.constraints import GROUP
from blockscale.formats import fragment
from blockscale.formats.fragment import ROWS
from blockscale.formats.layouts import FRAGMENT, LINEAR, blocks
from blockscale.problem import OUT_BYTES, Problem, Target
from blockscale.tensor import NVFP4Tensor

KERNEL = "blockscale.kernels.hopper"
ACTIVATION = "bf16"
# The instructions of `kernels.parts.weights`, which nothing but a weight is read by.
_LOADS_WEIGHTS = re.compile(
    r"(@!?%?\w+\s+)?(ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4\.b32|cp\.async\.cg\.shared\.global\.L2::256B)\s"
)
_ASKS_L2 = "cp.async.bulk.prefetch.L2.global "  # what is there does not become the program's by it
LAYOUTS: Mapping[str, str] = {"a": LINEAR, "b": FRAGMENT}
ENTRY = Entry(
    pointers={
        "a": Pointer("problem.a", 16),
        "b": Pointer("uint8", 16),
        "out": Pointer("problem.out_dtype"),
        "bias": Pointer("problem.bias"),
        "unit": Pointer("fp32"),
        "alpha": Pointer("fp32"),
    },
    values={
        "factor": "fp64",
        "m": "int32",
        "n": "int32",
        "k": "int32",
        "ld_a": "int64",
        "ld_out": "int64",
    },
)


def kernel(problem: Problem, target: Target, config: Config) -> Any:
    """The kernel, to be traced with `ENTRY`. Imports the compiler."""
    from blockscale.kernels import hopper

    narrow: Any = hopper.Sm90WarpGemm  # of modules without types
    wide: Any = hopper.Sm90GroupGemm
    tokens, rows = config.tile
    of = {"a_dtype": problem.a, "out_dtype": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    early = {"pdl": config.pdl, "ahead": config.ahead, "prefetch": config.prefetch}
    rings = {"depth": config.stages, "buffers": config.buffers, **early}
    if prefill.serves(config):
        return prefill.kernel(config, **of)
    if config.wgmma:
        groups = {"row_groups": rows // (GROUP * ROWS), "k_groups": config.k_warps, "split": config.split}
        return wide(tokens, **groups, **rings, **of)
    return narrow(tokens, row_warps=rows // ROWS, k_warps=config.k_warps, chunk=config.chunk, **rings, **of)


def premature(config: Config, early: list[str]) -> list[str]:
    """Of the instructions on global memory that come before the wait, those that may not: with `ahead` all that do not
    load weights, otherwise all but those that ask L2 for something."""
    if prefill.serves(config):
        return prefill.premature(config, early)
    loads = [x for x in early if not x.startswith(_ASKS_L2)]
    return [x for x in loads if not (config.ahead and _LOADS_WEIGHTS.match(x))]


def tensors(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: NVFP4Tensor | Tensor,
    alpha: Tensor,
    bias: Tensor,
    unused: Tensor,
) -> list[Tensor]:
    """What stands behind each pointer."""
    assert isinstance(a, Tensor)  # or `unsupported` has refused it
    assert isinstance(out, Tensor)
    return [a, b.codes, out, bias, b.global_scale, alpha]


def sizes(problem: Problem, ld_out: int) -> dict[str, int]:
    """Bytes behind each pointer that a kernel may touch."""
    tiles, units, unit = fragment.shape((), problem.n, blocks(problem.k))
    rows = problem.batch * problem.m
    return {
        "a": OUT_BYTES[problem.a] * rows * problem.k,
        "b": tiles * units * unit,
        "out": ((rows - 1) * ld_out + problem.n) * OUT_BYTES[problem.out_dtype],
        "bias": 4 if problem.bias is None else problem.n * OUT_BYTES[problem.bias],
        "unit": 4,
        "alpha": 4,
    }


def values(problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
    """The values, but for the factor, which is the call's. Matrices of `a` are rows of one: they share the weight."""
    return {
        "m": problem.batch * problem.m,
        "n": problem.n,
        "k": problem.k,
        "ld_a": problem.k,
        "ld_out": ld_out,
    }
