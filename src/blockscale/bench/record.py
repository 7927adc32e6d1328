"""What a measurement leaves: numbers with their circumstances, and who lost."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import blockscale
from blockscale.bench import timing

TIED = 1.03  # a candidate is behind when its time is more than this many times a rival's
AGAIN = 5  # measurements of a product before one counts as lost
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Measured:
    """One product: for every candidate the median microseconds of each measurement, and their quartiles.

    Attributes:
        dtype: of the activation and the result, "bf16" or "fp16".
        us: medians by candidate, one a measurement. quartiles: of all rounds together.
        read_us: to read the weight's bytes once and do nothing else.
        skipped: candidates that were not measured, and why.
    """

    m: int
    n: int
    k: int
    dtype: str
    nbytes: int
    us: Mapping[str, Sequence[float]]
    quartiles: Mapping[str, tuple[float, float]]
    read_us: float
    skipped: Mapping[str, str]

    def median(self, name: str) -> float:
        return statistics.median(self.us[name])

    def best(self, names: Sequence[str]) -> str | None:
        """The fastest of those among `names` that were measured."""
        return min((name for name in self.us if name in names), key=self.median, default=None)

    def behind(self, name: str, rival: str) -> float:
        """The median over measurements of the time of `name` over that of `rival`: above 1 is slower."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.us[name], self.us[rival], strict=True))


def lost(measured: Measured, rivals: Sequence[str]) -> bool:
    """Whether the library's own choice is more than 3% behind the best of `rivals`."""
    theirs = measured.best(rivals)
    return theirs is not None and measured.behind("ours", theirs) > TIED


def circumstances(device: torch.device, rounds: int) -> dict[str, Any]:
    """Date, GPU, driver, versions and protocol."""
    names = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "humming-kernels", "numpy")
    properties = torch.cuda.get_device_properties(device)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {"blockscale": blockscale.__version__} | {name: _version(name) for name in names},
        "protocol": {
            "cold_bytes": timing.COLD_BYTES,
            "launches_of_a_replay": timing.LEAST_LAUNCHES,
            "rounds": rounds,
            "a_loss_is_measured": AGAIN,
            "reductions_of_cublas_in_16_bits": False,  # see `run.measure`
        },
    }


def driver() -> str | None:
    """The NVIDIA driver's version."""
    try:
        found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return found[1] if found else None


def as_json(measured: Sequence[Measured], ceilings: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    return {**of, "ceilings": dict(ceilings), "products": [asdict(one) for one in measured]}


def from_json(document: Mapping[str, Any]) -> list[Measured]:
    """The products of a record.

    Raises:
        ValueError: it is none.
    """
    try:
        return [Measured(**one) for one in document["products"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a record of `blockscale bench`: {error}") from None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
