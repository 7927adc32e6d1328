"""A list of NVFP4 GEMMs of any sizes for sm_100a, in one go: the kernel of kernels/sm100_grouped.py, whose groups have
matrices of their own, at addresses that a table in global memory holds.

Copies need a tensor map for each matrix, and a map holds an address and sizes. A kernel of one CTA a problem makes them
first, from maps that fit no matrix but are right in all else (PTX: tensormap.replace), and leaves them in global
memory, where the load warps of the kernel behind it find them.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float64, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from blockscale.kernels.parts import group_operands, storage, tma
from blockscale.kernels.parts.epilogue import DTYPES
from blockscale.kernels.parts.geometry import STEP_K
from blockscale.kernels.parts.grid import Memory
from blockscale.kernels.parts.group_epilogue import ListedResults
from blockscale.kernels.parts.group_operands import MAP_BYTES
from blockscale.kernels.parts.groups import ADDRESSES, COLUMNS, SIZES, Problems
from blockscale.kernels.sm100_grouped import WARP, WARPS, Context, Sm100GroupedGemm

MAPS = 4  # of a problem: of the kernel's a and b, scales of a, scales of b


@dataclass(frozen=True)
class ListContext(Context):
    """As `Context`; `operands` are those of the problem that a tile is of."""

    def operands(self, memory: Any, work: Any) -> Any:
        first = memory.maps + Int64(work.place.group) * (MAPS * MAP_BYTES)
        return [operand.of(first + i * MAP_BYTES) for i, operand in enumerate(memory.operands)]


class Sm100ListGemm(Sm100GroupedGemm):
    """The kernel of one configuration; see `Sm100GroupedGemm` for its arguments, of which form is "list"."""

    @property
    def bias_dtype(self):
        return DTYPES[self.epilogue.bias or "fp32"]

    def __repr__(self):
        """Also in the kernel's name."""
        return super().__repr__().replace("Grouped", "List")

    @cute.jit
    def __call__(
        self, table: cute.Pointer, maps: cute.Pointer, factor: Float64, experts: Int32, ctas: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches out = act(unit_a x unit_b x alpha x factor x a @ b^T + bias) for every problem of a list.

        Args:
            table: (experts, 16) int64: addresses of a, b, sfa, sfb, out, unit_a, unit_b, alpha and bias, then m, n, k,
                ld_out, three of no use; each as `Sm100GroupedGemm` takes it for one matrix. m, n and k are at least 1.
            maps: (experts, 512) bytes that the launch overwrites, aligned to 128.
            factor: one more, by value. experts: problems, 1 to 512.
            ctas: so many are launched, but for a pair at least.
        """
        g = self.geometry
        none = Int32(1)
        anything = (maps, maps)
        size = cute.assume(Int32(STEP_K), STEP_K)
        patterns = group_operands.maps(g, anything, anything, (none, none), (none, none), size, (none, none))
        # A plain launch, which waits for the list before it: that one may still read the maps that this one overwrites.
        self.describe(patterns, table, maps).launch(grid=[experts, 1, 1], block=[WARP, 1, 1], stream=stream)
        self.multiply(patterns, table, maps, factor, experts).launch(
            grid=self.grid(ctas),
            block=[WARP * WARPS, 1, 1],
            cluster=self.cluster,
            smem=g.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def describe(
        self,
        patterns: tuple[cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo],
        table: cute.Pointer,
        maps: cute.Pointer,
    ):
        """A CTA writes the maps of a problem."""

        @cute.struct
        class Smem:
            maps: cute.struct.Align[cute.struct.MemRange[Uint8, MAPS * MAP_BYTES], MAP_BYTES]

        smem = SmemAllocator().allocate(Smem).maps.data_ptr()
        problem = cute.arch.block_idx()[0]
        row = table + Int64(problem) * COLUMNS
        k = cute.assume(Int32((row + SIZES["k"]).load()), STEP_K)
        sides = ("b", "a") if self.swap else ("a", "b")
        sizes = {"a": Int32((row + SIZES["m"]).load()), "b": Int32((row + SIZES["n"]).load())}
        codes = [tma.code_tensor(_pointer(row, side), sizes[side], k, Int32(1)) for side in sides]
        scales = [tma.scale_tensor(_pointer(row, f"sf{side}"), sizes[side], k, Int32(1)) for side in sides]
        for i, pattern in enumerate(patterns):
            cpasync.copy_tensormap(pattern.atom, smem + i * MAP_BYTES)
        cute.arch.sync_warp()
        for i, tensor in enumerate((*codes, *scales)):
            cpasync.update_tma_descriptor(patterns[i].atom, tensor, smem + i * MAP_BYTES)
        cute.arch.sync_warp()
        own = maps + Int64(problem) * (MAPS * MAP_BYTES)
        for i in range(MAPS):
            cpasync.cp_fence_tma_desc_release(own + i * MAP_BYTES, smem + i * MAP_BYTES)

    @cute.kernel
    def multiply(
        self,
        patterns: tuple[cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo],
        table: cute.Pointer,
        maps: cute.Pointer,
        factor: Float64,
        experts: Int32,
    ):
        g = self.geometry
        smem = group_operands.shared_memory(g)
        cluster, parts = self.here(smem)
        none = Int32(0)
        output = self.epilogue.output(_output(table, self.epilogue.dtype), none, none, Int64(0))
        self.run(
            ListContext(
                warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
                geometry=g,
                cut=self.cut,
                cluster=cluster,
                ab=group_operands.operand_ring(g, smem, cluster),
                acc=storage.sum_ring(g, smem, cluster),
                groups=Problems(self.order, smem, experts, none, none, none, none, self.gated),
                parts=parts,
                smem=smem,
                tmem=None,
                memory=Memory(
                    self.pdl,
                    [],
                    operands=group_operands.operands(g, smem, patterns, self.policies),
                    maps=maps,
                    groups=table,
                    result=ListedResults(table, output, factor, self.bias_dtype),
                    scales=None,
                    unit=None,
                ),
            )
        )


def _pointer(row: cute.Pointer, name: str) -> cute.Pointer:
    address = (row + ADDRESSES[name]).load()
    return cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=16)


def _output(table: cute.Pointer, dtype: Any) -> cute.Pointer:
    """A pointer to the results' type, in whose place each problem has its own."""
    return cute.make_ptr(dtype, table.toint(), cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
