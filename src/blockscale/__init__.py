"""NVFP4 matrix multiplication for every NVIDIA GPU that can hold the format, and for the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import blockscale.op_kernels
import blockscale.pytree  # noqa: F401 (torch gets to know operators and tensors)
from blockscale._version import __version__
from blockscale.api import config_for, dequantize, explain, gemm, grouped_gemm
from blockscale.backends import available_backends
from blockscale.config import Config
from blockscale.launch.cuda import persisting_l2
from blockscale.launch.emulated import emulated
from blockscale.quantize import quantize
from blockscale.tensor import NVFP4Tensor

if TYPE_CHECKING:
    from blockscale import ladder, nn
    from blockscale.checkpoints import load_checkpoint, save_checkpoint

__all__ = [
    "Config",
    "NVFP4Tensor",
    "__version__",
    "available_backends",
    "config_for",
    "dequantize",
    "emulated",
    "explain",
    "gemm",
    "grouped_gemm",
    "ladder",
    "load_checkpoint",
    "nn",
    "persisting_l2",
    "quantize",
    "save_checkpoint",
]

_CHECKPOINTS = ("load_checkpoint", "save_checkpoint")


def __getattr__(name: str) -> Any:
    """What not every program needs is imported when it is asked for: it would make a third of the import's time."""
    if name in ("ladder", "nn"):
        return import_module(f"blockscale.{name}")
    if name in _CHECKPOINTS:
        return getattr(import_module("blockscale.checkpoints"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
