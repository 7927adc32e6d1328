"""The arguments of a kernel's host function, by name and in order: what a plan fills in, what the compiler traces, and
what every kernel's `__call__` takes, the stream last."""

from __future__ import annotations

# Addresses of the elements of that type; "result" is the dtype of `out`. Codes and scales are aligned to 16 bytes.
POINTERS = {
    "a": "uint8",
    "b": "uint8",
    "sfa": "uint8",
    "sfb": "uint8",
    "out": "result",
    "unit_a": "fp32",
    "unit_b": "fp32",
    "alpha": "fp32",
}
VALUES = {
    "factor": "fp64",
    "m": "int32",
    "n": "int32",
    "k": "int32",
    "ld_out": "int64",
    "batch": "int32",
    "batch_a": "int32",
    "batch_b": "int32",
    "ctas": "int32",
}
ARGUMENTS = (*POINTERS, *VALUES, "stream")
OUT = list(POINTERS).index("out")
INPUTS = tuple(i for i in range(len(POINTERS)) if i != OUT)
