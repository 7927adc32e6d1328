"""cuBLAS's product with factors that lie on the device, which torch has no call for: the host need not know them.

The handle is torch's own, with the current stream and torch's workspace. Source: cuBLAS documentation, cublasGemmEx.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_TRANSPOSED, _PLAIN = 1, 0  # cublasOperation_t
_ON_HOST, _ON_DEVICE = 0, 1  # cublasPointerMode_t
_DEFAULT_MATH, _SUMS_IN_FP32_TO_THE_END = 0, 16  # cublasMath_t
_SUMS_IN_FP32 = 68  # cublasComputeType_t
_ANY_ALGORITHM = -1


def multiply(x: Tensor, weight: Tensor, out: Tensor, alpha: Tensor, beta: Tensor) -> None:
    """out = alpha x @ weight^T + beta out, sums in fp32, rounded once. With a beta of 0 `out` is not read.

    Args:
        x: (M, K), weight: (N, K), both bf16 or both fp16. out: (M, N), of their dtype or fp32. Rows are dense.
        alpha, beta: fp32 () on the device.

    Raises:
        RuntimeError: cuBLAS is not there or refuses.
    """
    (m, k), n = x.shape, weight.shape[0]
    cublas = _library()
    with torch.cuda.device(out.device):
        handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        cublas.cublasSetPointerMode_v2(handle, _ON_DEVICE)
        cublas.cublasSetMathMode(handle, _SUMS_IN_FP32_TO_THE_END)
        try:  # cuBLAS counts along columns: the transposed product
            status = cublas.cublasGemmEx(
                *(handle, _TRANSPOSED, _PLAIN, n, m, k, alpha.data_ptr()),
                *(weight.data_ptr(), _TYPES[weight.dtype], weight.stride(0)),
                *(x.data_ptr(), _TYPES[x.dtype], x.stride(0), beta.data_ptr()),
                *(out.data_ptr(), _TYPES[out.dtype], out.stride(0), _SUMS_IN_FP32, _ANY_ALGORITHM),
            )
        finally:
            cublas.cublasSetPointerMode_v2(handle, _ON_HOST)
            cublas.cublasSetMathMode(handle, _DEFAULT_MATH)
    if status:
        raise RuntimeError(f"cublasGemmEx: status {status} for M, N, K = {m}, {n}, {k}")


@functools.cache
def _library() -> ctypes.CDLL:
    """The one that torch uses.

    Raises:
        RuntimeError: there is none.
    """
    if torch.version.cuda is None:
        raise RuntimeError("this torch is built without CUDA")
    try:
        cublas = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        raise RuntimeError(f"cuBLAS cannot be loaded: {error}") from None
    address, number = ctypes.c_void_p, ctypes.c_int
    cublas.cublasSetPointerMode_v2.argtypes = cublas.cublasSetMathMode.argtypes = [address, number]
    cublas.cublasGemmEx.argtypes = [
        *(address, number, number, number, number, number, address),
        *(address, number, number) * 2,
        *(address, address, number, number, number, number),
    ]
    return cublas
