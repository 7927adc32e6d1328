"""NVIDIA's own sm_100 kernels (nvidia-cutlass-operators) as test cases: compiled and called by their own host code.

A case knows how to compile its kernel, to make operands for a problem size, and what the exact result is in float64.
`CASES` is the list whose PTX has to decode.  `STUCK` are those among them that cannot end on any GPU: with tiles of 256
columns the kernel's two accumulators overlap, one lane a warp releases them, and the barrier expects all 32.  The
package does not offer these tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import ml_dtypes
import numpy as np
from cutlass import cute
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    sm100_dense_blockscaled_static_persistent_impl as blockscaled,
)
from cutlass.operators.providers.cutedsl.gemm.implementations import sm100_mixed_input_impl as mixed
from cutlass.operators.providers.cutedsl.gemm.implementations import sm100_persistent_impl as dense
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    sm100_persistent_preferred_cluster_impl as preferred,
)
from cutlass.tensor_utils import LayoutEnum

NUMPY = {
    "Float4E2M1FN": ml_dtypes.float4_e2m1fn,
    "Float8E4M3FN": ml_dtypes.float8_e4m3fn,
    "Float8E5M2": ml_dtypes.float8_e5m2,
    "Float8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "BFloat16": ml_dtypes.bfloat16,
    "Float16": np.float16,
    "Float32": np.float32,
    "Int4": ml_dtypes.int4,
    "Int8": np.int8,
    "Uint8": np.uint8,
}
ALIGN = 128


@dataclass(frozen=True)
class Problem:
    m: int
    n: int
    k: int
    batch: int = 1


@dataclass
class Operands:
    """What a call takes: `memory` are the arrays in the order of the pointers, the output last; `exact` (batch, m, n)
    and `magnitude`, the sum of the products' absolute values."""

    memory: list[np.ndarray]
    exact: np.ndarray
    magnitude: np.ndarray

    @property
    def output(self) -> np.ndarray:
        return self.memory[-1]


@dataclass(frozen=True)
class BlockScaled:
    """D = (A * SFA) @ (B * SFB)^T by the dense block-scaled kernel; `clusters` is what its persistent grid may have."""

    a: str = "Float4E2M1FN"
    b: str = "Float4E2M1FN"
    scale: str = "Float8E4M3FN"
    vector: int = 16
    out: str = "BFloat16"
    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int] = (1, 1)
    clusters: int = 1

    @property
    def k_step(self) -> int:
        """What k has to be a multiple of: operands that TMA unpacks come in rows of 128 elements."""
        return 32 if self.a == self.b else 128

    def __str__(self) -> str:
        return f"{self.a}x{self.b}-{self.scale}-{self.out}-{_shape(self.tile)}-c{_shape(self.cluster)}-{self.clusters}"

    def compile(self, options: str = "") -> Any:
        kernel = blockscaled.PersistentDenseBlockScaledGemmKernel(self.vector, self.tile, self.cluster)
        major = (OperandMajorMode.K, OperandMajorMode.K, LayoutEnum.ROW_MAJOR)
        size = (cutlass.Int32(0),) * 4
        pointers = [_pointer(kind, 0, align) for kind, align in self._pointers()]
        return cute.compile(
            kernel, *pointers, major, size, self.clusters, make_fake_stream(), lambda x: x, options=options
        )

    def call(self, function: Any, problem: Problem, operands: Operands, *, tvm_ffi: bool = False) -> None:
        size = (problem.m, problem.n, problem.k, problem.batch)
        a, b, sfa, sfb, out = operands.memory
        function(*_arguments(self._pointers(), [a, b, sfa, sfb, out], tvm_ffi), size, _stream(tvm_ffi))

    def _pointers(self) -> list[tuple[str, int]]:
        return [(self.a, 16), (self.b, 16), (self.scale, 32), (self.scale, 32), (self.out, 16)]

    def operands(self, problem: Problem, seed: int) -> Operands:
        random = np.random.default_rng(seed)
        p = problem
        a, packed_a = _elements(random, self.a, (p.batch, p.m, p.k))
        b, packed_b = _elements(random, self.b, (p.batch, p.n, p.k))
        sfa, stored_sfa = _scales(random, self.scale, (p.batch, p.m, p.k), self.vector)
        sfb, stored_sfb = _scales(random, self.scale, (p.batch, p.n, p.k), self.vector)
        left, right = a * sfa, (b * sfb).transpose(0, 2, 1)
        memory = [packed_a, packed_b, stored_sfa, stored_sfb, _output(p, self.out)]
        return Operands(memory, left @ right, abs(left) @ abs(right))


@dataclass(frozen=True)
class MixedInput:
    """D = (convert(A) * scale) @ B by the mixed-input kernel: A (m, k) narrow integers, B (n, k) 16 bit; `group` values
    of A along k share a scale, 0 is none."""

    a: str = "Int8"
    b: str = "BFloat16"
    out: str = "BFloat16"
    two_ctas: bool = False
    tile: tuple[int, int, int] = (128, 128, 64)
    cluster: tuple[int, int] = (1, 1)
    group: int = 0
    clusters: int = 1

    @property
    def k_step(self) -> int:
        return self.group or 32

    def __str__(self) -> str:
        pair = "2cta" if self.two_ctas else "1cta"
        return f"{self.a}x{self.b}-{self.out}-{pair}-{_shape(self.tile)}-c{_shape(self.cluster)}-g{self.group}"

    def compile(self, options: str = "") -> Any:
        kernel = mixed.MixedInputGemmKernel(
            1 if self.group else 0,
            self.group,
            cutlass.Float32,
            self.two_ctas,
            self.tile,
            self.cluster,
            True,
            False,
            getattr(cutlass, self.a),
        )
        group, clusters = self.group, self.clusters

        @cute.jit
        def launch(a: cute.Pointer, scale: cute.Pointer, b: cute.Pointer, out: cute.Pointer, size: tuple, stream: Any):
            m, n, k, batch = size
            k = cute.assume(k, 32)
            n = cute.assume(n, 32)
            tensor_a = cute.make_tensor(a, cute.make_ordered_layout((batch, m, k), order=(2, 1, 0)))
            tensor_b = cute.make_tensor(b, cute.make_ordered_layout((batch, k, n), order=(2, 0, 1)))
            tensor_out = cute.make_tensor(out, cute.make_ordered_layout((batch, m, n), order=(2, 1, 0)))
            tensor_scale = None
            if cutlass.const_expr(group > 0):
                rows = cute.assume(m, 32)
                layout = cute.make_ordered_layout((batch, rows, k // group), order=(2, 0, 1))
                tensor_scale = cute.make_tensor(scale, layout)
            kernel(tensor_a, tensor_scale, tensor_b, tensor_out, clusters, stream)

        pointers = [_pointer(kind, 0, align) for kind, align in self._pointers()]
        return cute.compile(launch, *pointers, (cutlass.Int32(0),) * 4, make_fake_stream(), options=options)

    def call(self, function: Any, problem: Problem, operands: Operands, *, tvm_ffi: bool = False) -> None:
        size = (problem.m, problem.n, problem.k, problem.batch)
        function(*_arguments(self._pointers(), operands.memory, tvm_ffi), size, _stream(tvm_ffi))

    def _pointers(self) -> list[tuple[str, int]]:
        return [(self.a, 16), (self.b, 16), (self.b, 16), (self.out, 16)]

    def operands(self, problem: Problem, seed: int) -> Operands:
        random = np.random.default_rng(seed)
        p = problem
        a, packed_a = _elements(random, self.a, (p.batch, p.m, p.k))
        b, packed_b = _elements(random, self.b, (p.batch, p.n, p.k))
        left, stored = a, _aligned(ALIGN)
        if self.group:
            # Powers of two, so that scaling is exact in the 16-bit format that the kernel converts to.
            scale = 2.0 ** random.integers(-2, 3, (p.batch, p.k // self.group, p.m))
            stored = _store(scale.astype(NUMPY[self.b]).view(np.uint8))
            left = a * scale.transpose(0, 2, 1).repeat(self.group, axis=2)
        right = b.transpose(0, 2, 1)
        return Operands([packed_a, stored, packed_b, _output(p, self.out)], left @ right, abs(left) @ abs(right))


@dataclass(frozen=True)
class Dense:
    """D = A @ B^T by the dense kernel, tiles handed out by the grid or by cluster launch control (`dynamic`).

    preferred: the shape of the clusters where it fits, those of `cluster` fill the rest.
    """

    ab: str = "Float16"
    out: str = "Float16"
    two_ctas: bool = False
    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int] = (1, 1)
    dynamic: bool = True
    clusters: int = 1
    preferred: tuple[int, int] | None = None
    k_step = 32

    def __str__(self) -> str:
        pair = "2cta" if self.two_ctas else "1cta"
        how = "clc" if self.dynamic else "static"
        larger = f"-p{_shape(self.preferred)}" if self.preferred else ""
        return f"{self.ab}-{self.out}-{pair}-{_shape(self.tile)}-c{_shape(self.cluster)}-{how}{larger}"

    def compile(self, options: str = "") -> Any:
        kinds = dense.PersistentTileSchedulerType
        kind = kinds.CLC if self.dynamic else kinds.STATIC_PERSISTENT
        shape = (cutlass.Float32, self.two_ctas, self.tile)
        if self.preferred:
            kernel = preferred.PersistentDenseGemmPreferredClusterKernel(
                *shape, self.preferred, self.cluster, True, kind, lambda x: x
            )
        else:
            kernel = dense.PersistentDenseGemmKernel(*shape, self.cluster, True, kind, lambda x: x)
        clusters = None if self.dynamic else self.clusters
        two_shapes = self.preferred is not None

        @cute.jit
        def launch(a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, size: tuple, stream: Any):
            m, n, k, batch = size
            k = cute.assume(k, 32)
            n = cute.assume(n, 32)
            tensor_a = cute.make_tensor(a, cute.make_ordered_layout((batch, m, k), order=(2, 1, 0)))
            tensor_b = cute.make_tensor(b, cute.make_ordered_layout((batch, k, n), order=(2, 0, 1)))
            tensor_out = cute.make_tensor(out, cute.make_ordered_layout((batch, m, n), order=(2, 1, 0)))
            if cutlass.const_expr(two_shapes):
                kernel(tensor_a, tensor_b, tensor_out, clusters, clusters, stream)
            else:
                kernel(tensor_a, tensor_b, tensor_out, stream, clusters)

        pointers = [_pointer(kind, 0, align) for kind, align in self._pointers()]
        return cute.compile(launch, *pointers, (cutlass.Int32(0),) * 4, make_fake_stream(), options=options)

    def call(self, function: Any, problem: Problem, operands: Operands, *, tvm_ffi: bool = False) -> None:
        size = (problem.m, problem.n, problem.k, problem.batch)
        function(*_arguments(self._pointers(), operands.memory, tvm_ffi), size, _stream(tvm_ffi))

    def _pointers(self) -> list[tuple[str, int]]:
        return [(self.ab, 16), (self.ab, 16), (self.out, 16)]

    def operands(self, problem: Problem, seed: int) -> Operands:
        random = np.random.default_rng(seed)
        p = problem
        a, packed_a = _elements(random, self.ab, (p.batch, p.m, p.k))
        b, packed_b = _elements(random, self.ab, (p.batch, p.n, p.k))
        right = b.transpose(0, 2, 1)
        return Operands([packed_a, packed_b, _output(p, self.out)], a @ right, abs(a) @ abs(right))


Case = BlockScaled | MixedInput | Dense

CASES: tuple[Case, ...] = (
    BlockScaled(),
    BlockScaled(tile=(128, 64)),
    BlockScaled(tile=(128, 256)),
    BlockScaled(tile=(128, 192), cluster=(1, 2)),
    BlockScaled(cluster=(2, 2), out="Float32"),
    BlockScaled(scale="Float8E8M0FNU", out="Float16"),
    BlockScaled(tile=(256, 256), cluster=(2, 1)),
    BlockScaled(tile=(256, 64), cluster=(2, 2)),
    BlockScaled(tile=(256, 192), cluster=(2, 1), out="Float8E4M3FN"),
    BlockScaled(tile=(256, 128), cluster=(4, 2), out="Float16"),
    BlockScaled(tile=(256, 128), cluster=(2, 4), out="Float8E5M2"),
    BlockScaled(scale="Float8E8M0FNU", vector=32, tile=(256, 128), cluster=(2, 1)),
    BlockScaled("Float8E4M3FN", "Float8E4M3FN", "Float8E8M0FNU", 32, tile=(256, 128), cluster=(2, 1)),
    BlockScaled("Float8E5M2", "Float8E5M2", "Float8E8M0FNU", 32),
    BlockScaled("Float4E2M1FN", "Float8E4M3FN", "Float8E8M0FNU", 32),
    BlockScaled("Float8E4M3FN", "Float4E2M1FN", "Float8E8M0FNU", 32, tile=(256, 128), cluster=(2, 1)),
    MixedInput(),
    MixedInput("Uint8", "Float16", "Float16", True, (256, 128, 64), (2, 1)),
    MixedInput("Int4", group=128, tile=(128, 128, 128)),
    MixedInput("Int4", group=128, two_ctas=True, tile=(256, 128, 128), cluster=(2, 1)),
    Dense(),
    Dense("BFloat16", "Float32", True, (256, 128), (2, 1)),
    Dense("Float8E4M3FN", "BFloat16", tile=(64, 64), dynamic=False),
    Dense(two_ctas=True, tile=(128, 256), cluster=(2, 2), dynamic=False),
    Dense(two_ctas=True, tile=(256, 64), cluster=(2, 1), preferred=(4, 2)),
    Dense(tile=(128, 64), cluster=(1, 1), preferred=(2, 2), dynamic=False, clusters=8),
)
STUCK = tuple(case for case in CASES if isinstance(case, BlockScaled) and case.tile[1] == 256)


@functools.cache
def compiled(case: Case, options: str = "") -> Any:
    """The case's function, compiled once; to be called inside `ptxemu.host.installed`."""
    return case.compile(options)


def mistakes(case: Case, operands: Operands, problem: Problem) -> str | None:
    """None when every element lies between the roundings of the exact value minus and plus the allowed error."""
    p = problem
    dtype = np.dtype(NUMPY[case.out])
    actual = operands.output.view(dtype).reshape(p.batch, p.m, p.n).astype(np.float64)
    slack = operands.magnitude * (4 + p.k / 1024) * 2.0**-20
    low, high = (_round(operands.exact + sign * slack, dtype) for sign in (-1, 1))
    bad = np.argwhere(~((low <= actual) & (actual <= high)))
    if not bad.size:
        return None
    first = tuple(int(i) for i in bad[0])
    return f"{len(bad)} of {actual.size} are wrong, first {first}: {actual[first]}, exactly {operands.exact[first]}"


def _round(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == ml_dtypes.float8_e4m3fn:
        values = values.clip(-448, 448)
    if dtype == ml_dtypes.float8_e5m2:
        values = values.clip(-57344, 57344)
    return values.astype(dtype).astype(np.float64)


def _elements(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random elements: their values and their bytes as stored, the last dimension contiguous."""
    dtype = NUMPY[kind]
    if kind in ("Int8", "Uint8"):
        values = random.integers(-9, 10, shape) if kind == "Int8" else random.integers(0, 256, shape)
        return values.astype(np.float64), _store(values.astype(dtype).view(np.uint8))
    if kind in ("Float4E2M1FN", "Int4"):
        codes = random.integers(0, 16, shape, dtype=np.uint8)
        signed = (codes ^ 8).astype(np.int8) - 8
        values = signed if kind == "Int4" else codes.view(dtype)
        return values.astype(np.float64), _store(codes[..., ::2] | codes[..., 1::2] << 4)
    values = (random.standard_normal(shape) * 2).astype(dtype)
    return values.astype(np.float64), _store(values.view(np.uint8))


def _scales(
    random: np.random.Generator, kind: str, shape: tuple[int, int, int], vector: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random scales: the factor of each element, and the bytes as stored, in atoms of 128 rows x 4 blocks.

    Rows and blocks beyond the matrix are stored too, as 1.
    """
    batch, rows, k = shape
    blocks = -(-k // vector)
    padded = np.ones((batch, -(-rows // 128) * 128, -(-blocks // 4) * 4))
    padded[:, :rows, :blocks] = 2.0 ** random.integers(-3, 4, (batch, rows, blocks))
    if kind == "Float8E4M3FN":
        padded[:, :rows, :blocks] *= random.integers(8, 16, (batch, rows, blocks)) / 8
    stored = padded.astype(NUMPY[kind])
    atoms = stored.reshape(batch, -1, 4, 32, padded.shape[2] // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    factors = padded[:, :rows, :blocks].repeat(vector, axis=2)[:, :, :k]
    return factors, _store(np.ascontiguousarray(atoms).view(np.uint8))


def _output(problem: Problem, kind: str) -> np.ndarray:
    """Filled with NaN."""
    out = _aligned(problem.batch * problem.m * problem.n * np.dtype(NUMPY[kind]).itemsize)
    out[:] = 0xFF
    return out


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def _store(data: np.ndarray) -> np.ndarray:
    stored = _aligned(data.size)
    stored[:] = data.reshape(-1)
    return stored


def _pointer(kind: str, address: int, align: int) -> Any:
    return make_ptr(getattr(cutlass, kind), address, cutlass.AddressSpace.gmem, assumed_align=align)


def _arguments(pointers: list[tuple[str, int]], memory: list[np.ndarray], tvm_ffi: bool) -> list[Any]:
    if tvm_ffi:
        return [array.ctypes.data for array in memory]
    return [_pointer(kind, x.ctypes.data, align) for (kind, align), x in zip(pointers, memory, strict=True)]


def _stream(tvm_ffi: bool) -> Any:
    import cuda.bindings.driver as driver

    return 0 if tvm_ffi else driver.CUstream(0)


def _shape(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))
