"""The kernels that get faults: how each is launched, on what data, and what it has to compute.

A case makes a `Setup` once: PTX texts, which are to be changed, and `run`, which launches them (parsed) on a device and
says what is wrong in the result.  Data are distinct everywhere, so that whatever comes from a wrong place shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ptxemu
from ptxemu import TensorMap
from ptxemu.text import Module

Array = npt.NDArray[Any]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setup:
    """texts: by the name under which they are reported.  run(modules, device): launches them on fresh data, the same
    every time, and returns what is wrong with the numbers, or None."""

    texts: dict[str, str]
    run: Callable[[Sequence[Module], ptxemu.Device], str | None]

    @property
    def digest(self) -> str:
        """Of the texts."""
        return hashlib.sha256("".join(self.texts.values()).encode()).hexdigest()[:12]


def _text(name: str) -> str:
    return (HERE / f"{name}.ptx").read_text()


def aligned(array: Array) -> Array:
    """A copy at a 128-byte boundary."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def difference(actual: Array, expected: Array) -> str | None:
    """The first element that differs; bit patterns are compared."""
    bad = np.argwhere(actual != expected)
    if not bad.size:
        return None
    first = tuple(int(i) for i in bad[0])
    return f"{len(bad)} of {actual.size} elements differ, first {first}: {actual[first]}, expected {expected[first]}"


def _words(seed: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def pipeline() -> Setup:
    """Eight bands of three steps on two CTAs: the ring of three stages goes round four times."""
    bands, steps = 8, 3
    a, b = (aligned(_words(seed, (32 * bands, 32 * steps))) for seed in (1, 2))
    expected = np.ones((32 * bands, 32), np.uint32)
    for step in range(steps):
        columns = slice(32 * step, 32 * step + 32)
        expected = expected * np.uint32(5) + a[:, columns] * np.uint32(3) + b[:, columns]

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        out = aligned(np.zeros((32 * bands, 32), np.uint32))
        maps = [_tiles(array) for array in (a, b, out)]
        with registered(device, a, b, out):
            device.launch(modules[0], grid=(2,), block=(160,), args=[*maps, bands, steps])
        return difference(out, expected)

    return Setup({"pipeline": _text("pipeline")}, run)


def _tiles(array: Array) -> TensorMap:
    rows, columns = array.shape
    return TensorMap(array.ctypes.data, "u32", (columns, rows), (4 * columns,), (32, 32))


def cluster() -> Setup:
    """A cluster of three CTAs that pass blocks on for five rounds."""
    rounds = 5
    given = aligned(_words(3, (3, rounds, 128, 4)))
    result = np.ones((3, 128, 4), np.uint32)
    threads = np.arange(128)
    for rank in range(3):
        for i in range(rounds):
            sent = given[rank - 1, i][threads ^ 32] * np.uint32(3)
            result[rank] = result[rank] * np.uint32(7) + sent + given[rank, i] * np.uint32(5)
            result[rank, :, 0] += (1000 * i + threads % 32).astype(np.uint32)
    expected = result + np.roll(result, -1, axis=0) * np.uint32(11)

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        out = aligned(np.zeros_like(expected))
        with registered(device, given, out):
            device.launch(modules[0], grid=(3,), block=(128,), args=[*_addresses(given, out), rounds])
        return difference(out, expected)

    return Setup({"cluster": _text("cluster")}, run)


def dependent() -> Setup:
    """A producer and twice the consumer, each launched as a dependent of the grid before."""
    ctas = 3
    x = aligned(_words(4, (ctas, 256)))
    first = x * np.uint32(3) + np.uint32(1)
    second = first * np.uint32(7) + np.roll(first, -1, axis=0) + np.uint32(1)
    third = second * np.uint32(7) + np.roll(second, -1, axis=0) + np.uint32(1)

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        outs = [aligned(np.zeros_like(x)) for _ in range(3)]
        producer, consumer = modules
        with registered(device, x, *outs):
            device.launch(producer, grid=(ctas,), block=(128,), args=_addresses(x, outs[0]))
            device.launch(consumer, grid=(ctas,), block=(160,), args=_addresses(*outs[:2]), pdl=True)
            device.launch(consumer, grid=(ctas,), block=(160,), args=_addresses(*outs[1:]), pdl=True)
        return difference(np.stack(outs), np.stack([first, second, third]))

    return Setup({name: _text(name) for name in ("producer", "consumer")}, run)


def tensor() -> Setup:
    """Five rounds of an MMA on small integers, which f16 and f32 hold exactly."""
    rounds = 5
    random = np.random.default_rng(5)
    a = random.integers(-8, 9, (rounds, 128, 16))
    b = random.integers(-8, 9, (rounds, 32, 16))
    c = aligned(random.integers(-999, 1000, (rounds, 128, 32)).astype(np.float32))
    expected = (a @ b.transpose(0, 2, 1) + c).astype(np.float32)
    images = [aligned(_core_matrices(x)) for x in (a, b)]

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        d = aligned(np.zeros_like(c))
        arrays = [*images, c, d]
        with registered(device, *arrays):
            device.launch(modules[0], grid=(1,), block=(192,), args=[*_addresses(*arrays), rounds])
        return difference(d, expected)

    return Setup({"tensor": _text("tensor")}, run)


def _core_matrices(values: Array) -> Array:
    """(rounds, rows, 16) as f16 in core matrices of 8 rows by 8 elements, those of one row side by side."""
    rounds, rows, _ = values.shape
    parts = values.astype(np.float16).reshape(rounds, rows // 8, 8, 2, 8).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(parts)


def _addresses(*arrays: Array) -> list[int]:
    return [array.ctypes.data for array in arrays]


class registered:
    """Inside, the arrays are global memory."""

    def __init__(self, device: ptxemu.Device, *arrays: Array) -> None:
        self.device = device
        self.arrays = arrays

    def __enter__(self) -> None:
        self.regions = [self.device.register(array, f"array {i}") for i, array in enumerate(self.arrays)]

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            self.device.memory.unregister(region)


OWN = {"pipeline": pipeline, "cluster": cluster, "dependent": dependent, "tensor": tensor}
