"""Grouped products on sm_90a (H100, H200), for few rows a group: constraints, choice and entry of
`kernels/sm90_experts.py` and, for more groups than that has room for, `kernels/sm90_grouped.py`; weights in fragment
order."""

from blockscale.families.sm90.grouped.choice import choose, unfit, unsupported
from blockscale.families.sm90.grouped.launch import (
    ACTIVATION,
    CALL_FIELDS,
    CODE_FIELDS,
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
