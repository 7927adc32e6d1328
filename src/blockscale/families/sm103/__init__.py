"""The sm_103a family (B300, GB300): `kernels/sm103.py` with K = 96 instructions, `kernels/sm100.py` with K = 64."""

from blockscale.families.sm103.choice import choose
from blockscale.families.sm103.constraints import CALL_FIELDS, CODE_FIELDS, unfit, unsupported
from blockscale.families.sm103.launch import (
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
