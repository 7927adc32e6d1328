"""The sm_120a and sm_121a family (RTX PRO 6000, RTX 50, DGX Spark): what there is to know of `kernels/sm120.py`."""

from blockscale.families.sm120.choice import choose
from blockscale.families.sm120.constraints import CALL_FIELDS, CODE_FIELDS, unfit, unsupported
from blockscale.families.sm120.launch import (
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
