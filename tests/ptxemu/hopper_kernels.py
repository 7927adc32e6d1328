"""NVIDIA's kernels for Hopper (nvidia-cutlass-operators) as test cases, in the manner of `nvidia_kernels`: that of TMA
and wgmma, and the older one of cp.async and mma.sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import nvidia_kernels as nv
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.operators.providers.cutedsl.gemm.implementations import sm80_tensorop_gemm_impl as older
from cutlass.operators.providers.cutedsl.gemm.implementations import sm90_static_persistent_impl as hopper

nv.NUMPY["Int32"] = nv.np.int32


@dataclass(frozen=True)
class Warpgroups:
    """D = A @ B^T by the persistent kernel of TMA and wgmma, or by the older one, which has one tile and no clusters.

    a_major, b_major: "k", or "m" and "n".  clusters: CTAs of the persistent grid, in clusters.
    """

    ab: str = "Float16"
    out: str = "Float16"
    accumulator: str = "Float32"
    tile: tuple[int, int] = (64, 64)
    cluster: tuple[int, int] = (1, 1)
    a_major: str = "k"
    b_major: str = "k"
    clusters: int = 2
    wgmma: bool = True
    k_step = 32

    def __str__(self) -> str:
        shape = f"{self.tile[0]}x{self.tile[1]}-c{self.cluster[0]}x{self.cluster[1]}"
        how = "" if self.wgmma else "-warps"
        return f"{self.ab}-{self.out}-{self.accumulator}-{shape}-{self.a_major}{self.b_major}{how}"

    def compile(self, options: str = "") -> Any:
        a, out, accumulator = (getattr(cutlass, name) for name in (self.ab, self.out, self.accumulator))
        if self.wgmma:
            kernel = hopper.Sm90StaticPersistentGemmKernel(accumulator, self.tile, self.cluster)
        else:
            kernel = older.Sm80TensorOpGemmKernel(a, a, out, accumulator)
        order_a = (2, 1, 0) if self.a_major == "k" else (2, 0, 1)
        order_b = (2, 0, 1) if self.b_major == "k" else (2, 1, 0)
        more = (self.clusters,) if self.wgmma else ()

        @cute.jit
        def launch(a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, size: tuple, stream: Any):
            m, n, k, batch = size
            m, n, k = cute.assume(m, 32), cute.assume(n, 32), cute.assume(k, 32)
            tensor_a = cute.make_tensor(a, cute.make_ordered_layout((batch, m, k), order=order_a))
            tensor_b = cute.make_tensor(b, cute.make_ordered_layout((batch, k, n), order=order_b))
            tensor_out = cute.make_tensor(out, cute.make_ordered_layout((batch, m, n), order=(2, 1, 0)))
            kernel(tensor_a, tensor_b, tensor_out, *more, stream)

        pointers = [nv._pointer(kind, 0, align) for kind, align in self._pointers()]
        return cute.compile(launch, *pointers, (cutlass.Int32(0),) * 4, make_fake_stream(), options=options)

    def call(self, function: Any, problem: nv.Problem, operands: nv.Operands, *, tvm_ffi: bool = False) -> None:
        size = (problem.m, problem.n, problem.k, problem.batch)
        function(*nv._arguments(self._pointers(), operands.memory, tvm_ffi), size, nv._stream(tvm_ffi))

    def _pointers(self) -> list[tuple[str, int]]:
        return [(self.ab, 16), (self.ab, 16), (self.out, 16)]

    def error(self, k: int) -> float:
        """How far the tensor cores' sum may be off, as a part of the sum of magnitudes; 0 where the usual bound holds.

        FP8 keeps 13 bits below the largest of 33 terms in each of its steps, an f16 accumulator 11 in all.
        """
        if self.ab.startswith("Float8"):
            return 34 * 2.0**-13 * -(-k // 32)
        return 2.0**-11 * -(-k // 16) if self.accumulator == "Float16" else 0.0

    def operands(self, problem: nv.Problem, seed: int) -> nv.Operands:
        random = nv.np.random.default_rng(seed)
        p = problem
        shape_a = (p.batch, p.m, p.k) if self.a_major == "k" else (p.batch, p.k, p.m)
        shape_b = (p.batch, p.n, p.k) if self.b_major == "k" else (p.batch, p.k, p.n)
        a, packed_a = nv._elements(random, self.ab, shape_a)
        b, packed_b = nv._elements(random, self.ab, shape_b)
        left = a if self.a_major == "k" else a.transpose(0, 2, 1)
        right = b.transpose(0, 2, 1) if self.b_major == "k" else b
        magnitude = abs(left) @ abs(right)
        usual = (4 + p.k / 1024) * 2.0**-20
        magnitude *= max(1.0, self.error(p.k) / usual)
        return nv.Operands([packed_a, packed_b, nv._output(p, self.out)], left @ right, magnitude)


CASES = (
    Warpgroups(),
    Warpgroups("BFloat16", "BFloat16", tile=(128, 256), cluster=(2, 1)),
    Warpgroups("Float8E4M3FN", "Float16", tile=(128, 128), cluster=(1, 2)),
    Warpgroups("Float8E5M2", "Float32", tile=(64, 256)),
    Warpgroups("Float16", "Float16", "Float16", tile=(64, 128), a_major="m", b_major="n"),
    Warpgroups("Int8", "Int32", "Int32", cluster=(2, 2)),
    Warpgroups("BFloat16", "BFloat16", wgmma=False),
)
