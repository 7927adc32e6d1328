"""NVFP4 matrix multiplication for every NVIDIA GPU that can hold the format, and for the CPU."""

import blockscale.op_kernels  # noqa: F401 (the operators get their kernels)
from blockscale import nn
from blockscale._version import __version__
from blockscale.api import dequantize, gemm, grouped_gemm
from blockscale.backends import available_backends
from blockscale.checkpoints import load_checkpoint, save_checkpoint
from blockscale.quantize import quantize
from blockscale.tensor import NVFP4Tensor

__all__ = [
    "NVFP4Tensor",
    "__version__",
    "available_backends",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "load_checkpoint",
    "nn",
    "quantize",
    "save_checkpoint",
]
