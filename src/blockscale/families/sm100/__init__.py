"""The sm_100a family (B200): constraints, choice and entry of `kernels/sm100.py`."""

from blockscale.families.sm100 import grouped, listed
from blockscale.families.sm100.choice import choose
from blockscale.families.sm100.constraints import CALL_FIELDS, CODE_FIELDS, unfit, unsupported
from blockscale.families.sm100.launch import (
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
    "listed",
    "premature",
    "sizes",
    "tensors",
    "unfit",
    "unsupported",
    "values",
]
