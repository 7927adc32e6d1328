"""NVFP4 matrix multiplication for every NVIDIA GPU that can hold the format, and for the CPU."""

import blockscale.op_kernels  # noqa: F401 (the operators get their kernels)
from blockscale import nn
from blockscale._version import __version__
from blockscale.api import config_for, dequantize, explain, gemm, grouped_gemm
from blockscale.backends import available_backends
from blockscale.checkpoints import load_checkpoint, save_checkpoint
from blockscale.config import Config
from blockscale.launch.cuda import persisting_l2
from blockscale.launch.emulated import emulated
from blockscale.quantize import quantize
from blockscale.tensor import NVFP4Tensor

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
    "load_checkpoint",
    "nn",
    "persisting_l2",
    "quantize",
    "save_checkpoint",
]
