"""What runs on both machines: PTX text, arrays and launches, all made from seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu import TensorMap
from ptxemu.machine import swizzle as sw

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
SWIZZLES = {"none": sw.NONE, "32B": sw.B32, "64B": sw.B64, "128B": sw.B128}


@dataclass(frozen=True)
class Map:
    """A parameter that is a tensor map over one of the program's arrays, whose address only the launch knows."""

    array: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: str = "none"
    nan_fill: bool = False
    l2_promotion: int = 0

    def at(self, address: int) -> TensorMap:
        return TensorMap(
            address,
            self.dtype,
            self.dims,
            self.strides,
            self.box,
            self.steps,
            SWIZZLES[self.swizzle],
            self.nan_fill,
            self.l2_promotion,
        )


@dataclass(frozen=True)
class Launch:
    """args: the name of an array, a Map, or a number of the parameter's type."""

    args: tuple[Any, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] | None = None
    kernel: str = "k"
    shared: int = 0
    pdl: bool = False


@dataclass(frozen=True)
class Program:
    """A name, the text, the arrays as a function that makes them, and launches one after the other.

    inputs: arrays that no launch may change.  group: of a program that lanewise.py made, its instructions.
    """

    name: str
    ptx: str
    arrays: Callable[[], Arrays]
    launches: tuple[Launch, ...]
    inputs: frozenset[str] = frozenset()
    group: Group | None = None


@dataclass(frozen=True)
class Group:
    """Instructions with operands `d, a, b, c` of the same widths in bits; a result of 1 bit is a predicate."""

    instructions: tuple[str, ...]
    result: int
    sources: tuple[int, ...]


def digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:20]


def digests(program: Program, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Of the arrays that a program writes."""
    return {name: digest(array) for name, array in arrays.items() if name not in program.inputs}


def random_bytes(seed: int, size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def first_difference(want: Array, got: Array) -> str:
    """Where two arrays of one shape differ first, in words for a person; empty where they do not."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{want.dtype} {want.shape} against {got.dtype} {got.shape}"
    bits = np.dtype(f"u{want.dtype.itemsize}")
    left, right = (np.ascontiguousarray(x).view(bits).reshape(-1) for x in (want, got))
    places = np.flatnonzero(left != right)
    if not places.size:
        return ""
    at = int(places[0])
    return f"{places.size} of {left.size} differ, first [{at}]: {int(left[at]):#x} against {int(right[at]):#x}"
