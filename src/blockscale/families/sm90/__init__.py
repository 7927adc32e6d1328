"""The sm_90a family (H100, H200): constraints, choice and entry of `kernels/sm90.py`, for weights in fragment order."""

from blockscale.families.sm90 import grouped
from blockscale.families.sm90.choice import choose
from blockscale.families.sm90.constraints import CALL_FIELDS, CODE_FIELDS, unfit, unsupported
from blockscale.families.sm90.launch import (
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
    "grouped",
    "kernel",
    "premature",
    "sizes",
    "tensors",
    "unfit",
    "unsupported",
    "values",
]
