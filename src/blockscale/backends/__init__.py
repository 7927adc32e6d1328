"""One file for each kind of device. A backend says why it cannot run here, or None, and multiplies checked operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from blockscale.backends import cpu, loop, sm90, sm100, sm103, sm120
from blockscale.config import Config
from blockscale.launch import cuda, emulated
from blockscale.problem import Target, compiled_for, target_named, target_of_capability

_BUILT: dict[str, ModuleType] = {"cpu": cpu, "sm90": sm90, "sm100": sm100, "sm103": sm103, "sm120": sm120}
NAMES = tuple(_BUILT)


def available_backends() -> dict[str, str | None]:
    """Every backend by name: None if it can run here, otherwise the reason why it cannot."""
    return {name: _why_not(name) for name in NAMES}


def _why_not(name: str) -> str | None:
    reason: str | None = _BUILT[name].why_not()
    return reason


def pick(name: str | None, device: torch.device, config: Config | None = None) -> ModuleType:
    """The backend called `name`, or the one for operands on `device`; ValueError with the reason if none can run."""
    if name is None:
        name = _by_device(device)
    if name not in NAMES:
        raise ValueError(f"backend: {name!r}, expected None or one of {', '.join(map(repr, NAMES))}")
    reason = _why_not(name)
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot run here: {reason}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend: {name!r} needs operands on the CPU, not on {device}")
    if name == "cpu" and config is not None:
        raise ValueError(f"config: {config}, expected None: the CPU backend has no configurations")
    return _BUILT[name]


def for_groups(name: str | None, device: torch.device, config: Config | None = None) -> Callable[..., Any]:
    """`prepare_grouped` of the backend that `pick` gives, or of one without kernels for that a loop over its products.

    Raises: as `pick`.
    """
    backend = pick(name, device, config)
    own: Callable[..., Any] | None = getattr(backend, "prepare_grouped", None)
    return partial(loop.prepare, backend.prepare) if own is None else own


def _by_device(device: torch.device) -> str:
    """The name of the backend for operands on `device`."""
    target = _kind(device)
    return "cpu" if target is None else target.backend


def target_here(device: torch.device) -> Target | None:
    """The GPU that multiplies operands on `device`, with its own number of multiprocessors: the device itself, or the
    active emulator; None is the CPU backend.

    Raises:
        ValueError: there are no kernels for that device.
    """
    kind = _kind(device)
    return cuda.as_it_is(kind, device) if kind is not None and device.type == "cuda" else kind


def target_asked(gpu: str | None) -> Target:
    """The GPU of this name, a whole one; for None the emulated or the current one, as it is.

    Raises:
        TypeError, ValueError: no kernels are written for it, or there is none.
    """
    if gpu is not None:
        return target_named(gpu)
    if emulated.active() is not None:
        here = target_here(torch.device("cpu"))
    elif torch.cuda.is_available():
        here = target_here(torch.device("cuda", torch.cuda.current_device()))
    else:
        here = None
    if here is None:
        raise ValueError("gpu: None, but there is no GPU here; name one, such as 'b200'")
    return here


def _kind(device: torch.device) -> Target | None:
    """As `target_here`, without asking the device for more than its compute capability."""
    if device.type == "cpu":
        active = emulated.active()
        return None if active is None else active.target
    if device.type != "cuda":
        raise ValueError(f"backend: none for operands on {device}; this version multiplies on the CPU and on CUDA GPUs")
    capability = torch.cuda.get_device_capability(device)
    target = target_of_capability(capability)
    if target is None:
        raise ValueError(
            f"backend: none for {device}, {torch.cuda.get_device_name(device)} of compute capability "
            f"{capability[0]}.{capability[1]}; this version's kernels are compiled for {compiled_for()}"
        )
    return target
