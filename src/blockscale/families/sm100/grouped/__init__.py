"""Grouped products on sm_100a (B200): constraints, choice and entry of `kernels/sm100_grouped.py`."""

from blockscale.families.sm100.grouped.choice import choose
from blockscale.families.sm100.grouped.constraints import CALL_FIELDS, CODE_FIELDS, unfit, unsupported
from blockscale.families.sm100.grouped.launch import (
    ACTIVATION,
    ENTRY,
    KERNEL,
    LAYOUTS,
    kernel,
    premature,
    sizes,
    tensors,
    values,
)

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
