"""Programs that run on the emulator and on a Hopper GPU, by family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from comparison import (
    arithmetic,
    atomics,
    barriers,
    clusters,
    convert,
    copies,
    launches,
    tensor_copies,
    tensor_cores,
    tensor_maps,
    warps,
)
from comparison.program import Program


def singles() -> Iterator[Program]:
    """All f32 conversions: 2^24 samples, of which a family would be too large."""
    for part in range(convert.PARTS):
        yield from convert.singles(part)


# Every program of a family; programs of the first two are lane-wise (Program.group).
FAMILIES: dict[str, Callable[[], Iterator[Program]]] = {
    "convert": convert.programs,
    "arithmetic": arithmetic.programs,
    "tensor copies": tensor_copies.programs,
    "tensor maps": tensor_maps.programs,
    "copies": copies.programs,
    "barriers": barriers.programs,
    "clusters": clusters.programs,
    "atomics": atomics.programs,
    "warps": warps.programs,
    "launches": launches.programs,
    "tensor cores": tensor_cores.programs,
}
