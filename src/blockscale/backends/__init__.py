"""One file for each kind of device. A backend says why it cannot run here, or None, and multiplies checked operands."""

from __future__ import annotations

from types import ModuleType

import torch

from blockscale.backends import cpu

_BUILT: dict[str, ModuleType] = {"cpu": cpu}
NAMES = ("cpu", "sm90", "sm100", "sm103", "sm120")


def available_backends() -> dict[str, str | None]:
    """Every backend by name: None if it can run here, otherwise the reason why it cannot."""
    return {name: _BUILT[name].why_not() if name in _BUILT else f"this version has no {name} kernels" for name in NAMES}


def pick(name: str | None, device: torch.device) -> ModuleType:
    """The backend called `name`, or the one for operands on `device`; ValueError with the reason if none can run."""
    if name is None:
        if device.type != "cpu":
            raise ValueError(f"backend: none for operands on {device}; this version multiplies on the CPU")
        name = "cpu"
    if name not in NAMES:
        raise ValueError(f"backend: {name!r}, expected None or one of {', '.join(map(repr, NAMES))}")
    reason = available_backends()[name]
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot run here: {reason}")
    if device.type != "cpu":
        raise ValueError(f"backend: {name!r} needs operands on the CPU, not on {device}")
    return _BUILT[name]
