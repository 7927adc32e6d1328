"""The sm_120a and sm_121a backend (RTX PRO 6000, RTX 50, DGX Spark): `kernels/sm120.py`, on silicon or emulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.backends import gpu
from blockscale.backends.gpu import Call
from blockscale.launch import emulated
from blockscale.problem import Target, target_named, target_of_capability
from blockscale.tensor import NVFP4Tensor

TARGET = target_named("sm_120a")
TARGETS = (TARGET, target_named("sm_121a"))


def why_not() -> str | None:
    """None if a GPU of either architecture is here, or an emulator of it is active; otherwise the reason."""
    return gpu.why_not(*TARGETS)


def prepare(
    a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out: NVFP4Tensor | Tensor, **options: Any
) -> Callable[[], Call | None]:
    """As `gpu.prepare`, for the architecture that the operands' device has."""
    return gpu.prepare(a, b, out, target=_target(out.device), **options)


def _target(device: torch.device) -> Target:
    active = emulated.active()
    if device.type == "cuda":
        here = target_of_capability(torch.cuda.get_device_capability(device))
    else:
        here = None if active is None else active.target
    return next((target for target in TARGETS if here is not None and target.arch == here.arch), TARGET)
