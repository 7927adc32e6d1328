"""What a family's kernels take (`Entry`): the arguments of a host function by name and in order, the stream last.

A plan fills them in, the compiler traces their types, and a kernel's `__call__` has them under these names. Pointers
whose names begin like an operand's (`a`, `sfa`, `b`, `sfb`, `out`, `sf_out`) have one matrix after another behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

OUTPUTS = ("out", "sf_out")


class Pointer(NamedTuple):
    """An address of elements of a type: "uint8", "fp32", or a dtype of the problem: "problem.a", "problem.bias" or
    "problem.out_dtype". NVFP4 stands for its codes, and where there is no bias, it is fp32.

    It is a multiple of `align` bytes; 0 stands for the size of an element.
    """

    type: str
    align: int = 0


@dataclass(frozen=True)
class Entry:
    """A table of arguments.

    Attributes:
        pointers: name -> `Pointer`.
        values: name -> type: "int32", "int64" or "fp64". The first one is the factor, of the call and not of the plan.
    """

    pointers: Mapping[str, Pointer]
    values: Mapping[str, str]

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        return (*self.pointers, *self.values, "stream")

    def table(self) -> list[list[str | int]]:
        """Names and types as JSON has them."""
        pointers: list[list[str | int]] = [[name, *pointer] for name, pointer in self.pointers.items()]
        return pointers + [[name, kind] for name, kind in self.values.items()]

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Which pointers are written to."""
        return tuple(i for i, name in enumerate(self.pointers) if name in OUTPUTS)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Which pointers are read."""
        return tuple(i for i, name in enumerate(self.pointers) if name not in OUTPUTS)


def alignments(entry: Entry, out: int) -> tuple[tuple[int, int], ...]:
    """(index, bytes that it is a multiple of) of the pointers where that needs a look; `out` is that of the result: the
    size of an element, or what codes take. A tensor of any other kind lies on multiples of its elements' size."""
    return tuple(
        (i, pointer.align or out)
        for i, (name, pointer) in enumerate(entry.pointers.items())
        if pointer.align or name in OUTPUTS
    )
