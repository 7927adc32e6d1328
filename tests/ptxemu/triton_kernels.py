"""Triton kernels as test cases, compiled for Hopper on a machine without a GPU."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import ptxemu
from ptxemu import TensorMap
from ptxemu.machine import swizzle

Array = np.ndarray[Any, Any]
NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "i8": np.int8,
}


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    deep = tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for at in range(0, k, K):
        along = at + deep
        left = tl.load(a + rows[:, None] * k + along[None, :], (rows[:, None] < m) & (along[None, :] < k), 0.0)
        right = tl.load(b + along[:, None] * n + columns[None, :], (along[:, None] < k) & (columns[None, :] < n), 0.0)
        if SCALE != 1:  # computed in registers, from which the tensor cores then take A
            left = left.to(right.dtype) * SCALE
        total = tl.dot(left, right, total)
    place = c + rows[:, None] * n + columns[None, :]
    tl.store(place, total.to(c.dtype.element_ty), (rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def matmul_maps(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Tensor maps that the kernel makes."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N, K])
    out = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M, N])
    total = tl.zeros((M, N), tl.float32)
    for at in range(0, k, K):
        rows, columns = tl.program_id(0) * M, tl.program_id(1) * N
        total = tl.dot(left.load([rows, at]), right.load([columns, at]).T, total)
    out.store([tl.program_id(0) * M, tl.program_id(1) * N], total.to(tl.float16))


@triton.jit
def matmul_given_maps(left, right, out, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Tensor maps that the host made."""
    total = tl.zeros((M, N), tl.float32)
    for at in range(0, k, K):
        rows, columns = tl.program_id(0) * M, tl.program_id(1) * N
        total = tl.dot(left.load([rows, at]), right.load([columns, at]).T, total)
    out.store([tl.program_id(0) * M, tl.program_id(1) * N], total.to(tl.float16))


@triton.jit
def softmax(x, y, stride, n, WIDTH: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.load(x + row * stride + i, i < n, -float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * stride + i, powers / tl.sum(powers, 0), i < n)


@functools.cache
def compiled(function: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...], warps: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = ASTSource(function, dict(signature), dict(constants))
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3})


@dataclass(frozen=True)
class Matmul:
    """C = A @ B of one of the kernels above.

    error: allowed, as a part of the sum of magnitudes.  findings: their kinds, in the code that Triton makes of it.
    """

    function: Any = matmul
    a: str = "fp16"
    b: str = "fp16"
    out: str = "fp16"
    tile: tuple[int, int, int] = (128, 128, 64)
    warps: int = 4
    scale: int = 1
    error: float = 2.0**-17
    shape: tuple[int, int, int] = (152, 136, 136)
    findings: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.function.__name__}-{self.a}-{self.b}-{self.out}-{self.warps}-{self.scale}"

    def kernel(self) -> Any:
        types = {"a": f"*{self.a}", "b": f"*{self.b}", "c": f"*{self.out}"} | dict.fromkeys("mnk", "i32")
        constants = dict(zip("MNK", self.tile, strict=True))
        if self.function is matmul:
            constants["SCALE"] = self.scale
        if self.function is matmul_given_maps:
            m, n, k = self.tile
            boxes = {"left": (m, k), "right": (n, k), "out": (m, n)}
            types = {name: f"tensordesc<fp16[{rows},{columns}]>" for name, (rows, columns) in boxes.items()}
            types["k"] = "i32"
        types |= dict.fromkeys(constants, "constexpr")
        return compiled(self.function, tuple(types.items()), tuple(constants.items()), self.warps)

    def run(self, device: ptxemu.Device) -> None:
        kernel, (m, n, k) = self.kernel(), self.shape
        random = np.random.default_rng(m + n + k)
        a = _filled(random, self.a, (m, k))
        b = _filled(random, self.b, (k, n) if self.function is matmul else (n, k))
        c = _aligned((m, n), NUMPY[self.out])
        grid = (-(-m // self.tile[0]), -(-n // self.tile[1]), 1)
        scratch = _aligned((max(16, kernel.metadata.global_scratch_size * grid[0] * grid[1]),), np.uint8)
        args: list[Any] = [a, b, c, m, n, k]
        if self.function is matmul_given_maps:
            args = [part for array in (a, b, c) for part in (_map(array), *array.shape, array.shape[1], 1)] + [k]
        regions = [device.register(array) for array in (a, b, c)] if self.function is matmul_given_maps else []
        report = device.launch(
            kernel.asm["ptx"],
            grid=grid,
            block=(32 * self.warps,),
            shared=kernel.metadata.shared,
            args=[*args, scratch, 0],
        )
        for region in regions:
            device.memory.unregister(region)
        left, right = a.astype(np.float64) * self.scale, b.astype(np.float64)
        right = right if self.function is matmul else right.T
        allowed = self.error * (abs(left) @ abs(right)) + 2.0**-11 * abs(left @ right) * (self.out == "fp16")
        assert {finding.kind for finding in report.findings} == self.findings
        assert (abs(c.astype(np.float64) - left @ right) <= allowed).all()


def _map(array: Array) -> TensorMap:
    rows, columns = array.shape
    return TensorMap(
        address=array.ctypes.data,
        dtype="f16",
        dims=(columns, rows),
        strides=(2 * columns,),
        box=(64, 128),
        element_strides=(1, 1),
        swizzle=swizzle.B128,
    )


def _filled(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    array = _aligned(shape, NUMPY[kind])
    array[...] = random.integers(-9, 10, shape) if kind == "i8" else random.standard_normal(shape)
    return array


def _aligned(shape: tuple[int, ...], kind: Any) -> Array:
    """Zeros at a 256-byte boundary."""
    nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes].view(kind).reshape(shape)


CASES = (
    Matmul(),
    Matmul(a="bf16", b="bf16", out="fp32", tile=(128, 256, 64), warps=8),
    Matmul(a="i8", b="bf16", out="fp32", tile=(64, 64, 64), scale=2, shape=(72, 64, 128)),
    Matmul(a="fp8e4nv", b="fp8e4nv", out="fp32", tile=(64, 64, 64), error=2.0**-7, shape=(64, 72, 128)),
    Matmul(a="fp32", b="fp32", out="fp32", tile=(64, 64, 32), error=2.0**-9, shape=(72, 64, 64)),
    Matmul(matmul_maps),
    # Where the maps come from the host, no fence follows mbarrier.init before the first copy uses the barrier.
    Matmul(matmul_given_maps, findings=frozenset({"mbarrier.init not visible"})),
)
