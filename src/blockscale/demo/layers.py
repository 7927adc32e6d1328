"""What quantising costs a weight matrix: bytes before and after, and signal-to-noise ratio per quantiser."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import blockscale
from blockscale import NVFP4Tensor
from blockscale.formats.layouts import BLOCK
from blockscale.quantize import METHODS

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
CHUNK = 1 << 22  # elements compared in float64 at a time


@dataclass(frozen=True)
class Layer:
    """One weight matrix (N, K); `snr_db` is None for a method that reproduces it exactly."""

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    snr_db: Mapping[str, float | None]


@dataclass(frozen=True)
class Skipped:
    """A tensor that was not quantised."""

    name: str
    reason: str


def quantise(weight: Tensor) -> dict[str, NVFP4Tensor]:
    """`weight` (N, K) by every method."""
    return {method: blockscale.quantize(weight, method=method) for method in METHODS}


def measure(name: str, weight: Tensor, quantised: Mapping[str, NVFP4Tensor]) -> Layer:
    """Compares `weight` (N, K) with what became of it; every method stores the same number of bytes."""
    stored = next(iter(quantised.values()))
    n, k = weight.shape
    return Layer(
        name=name,
        shape=(n, k),
        bytes_before=weight.nbytes,
        bytes_after=stored.nbytes,
        snr_db={method: snr_db(weight, q.dequantize()) for method, q in quantised.items()},
    )


def snr_db(exact: Tensor, approximate: Tensor) -> float | None:
    """10 log10(sum of exact**2 / sum of (exact - approximate)**2), in float64; None when the two are equal."""
    signal = noise = 0.0
    chunks = (torch.split(t.flatten(), CHUNK) for t in (exact, approximate))
    for x, y in zip(*chunks, strict=True):
        signal += x.double().square().sum().item()
        noise += (x.double() - y.double()).square().sum().item()
    return 10 * math.log10(signal / noise) if noise else None


class WeightFile:
    """The user's own safetensors file, read one tensor at a time. A context manager.

    Raises:
        ValueError: there is no such file, or it is not in safetensors format.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"cannot read {path}: no file of that name")
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error

    def __enter__(self) -> "WeightFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def __len__(self) -> int:
        return len(self._file.keys())

    def __iter__(self) -> Iterator[Layer | Skipped]:
        for name in self._file.keys():  # noqa: SIM118 (not a mapping)
            reason = self._unfit(name)
            yield Skipped(name, reason) if reason else self._measure(name)

    def _unfit(self, name: str) -> str | None:
        header = self._file.get_slice(name)
        shape, dtype = header.get_shape(), header.get_dtype()
        if dtype not in FLOAT_DTYPES:
            return f"dtype {dtype} is none of {', '.join(FLOAT_DTYPES)}"
        if len(shape) != 2:
            return f"{len(shape)}-D, not 2-D"
        if shape[0] == 0:
            return "it has no rows"
        if shape[1] < BLOCK:
            return f"K = {shape[1]} is less than a block of {BLOCK}"
        return None

    def _measure(self, name: str) -> Layer | Skipped:
        weight = self._file.get_tensor(name)
        try:
            # The quantiser takes no float64; the comparison is with the tensor as stored all the same.
            return measure(name, weight, quantise(weight.float() if weight.dtype == torch.float64 else weight))
        except ValueError as error:  # not finite, or too large
            return Skipped(name, str(error))
