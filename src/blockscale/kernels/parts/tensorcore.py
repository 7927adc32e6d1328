"""The tensor core of sm_100a and its memory: instructions, and the descriptors that they take (PTX: tcgen05)."""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives as ptx

from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_COLUMNS, ATOM_ROWS, STEP_K, STEPS, Geometry
from blockscale.kernels.parts.ring import GROUPS

UNIT = 16  # bytes: matrix descriptors count in these
STEP_UNITS = STEP_K // 2 // UNIT  # from one step of k to the next in a row of codes
ATOM_UNITS = ATOM_BYTES // UNIT
LOAD_COLUMNS = 32  # of a load: several are under way before the wait
LANES = 32  # of tensor memory that a warp may load: as many as it has threads

E2M1 = 1
SWIZZLE_128B = 2


def instruction_descriptor(m: int, n: int) -> int:
    """m x n x 64, E2M1 by E2M1, both K-major, UE4M3 scales (PTX: instruction descriptor for .kind::mxf4nvf4)."""
    return E2M1 << 7 | E2M1 << 10 | n // 8 << 17 | m // 128 << 27


def code_descriptor(codes: cute.Pointer) -> Any:
    """K-major rows of 128 bytes, swizzled; groups of 8 rows are 1024 bytes apart (PTX: matrix descriptor)."""
    return ptx.Tcgen05SmemDesc.build(codes.toint(), stride_byte_offset=1024, layout=SWIZZLE_128B)


def scale_descriptor(scales: cute.Pointer) -> Any:
    """Rows of 16 bytes, not swizzled; groups of 8 rows are 128 bytes apart (PTX: matrix descriptor)."""
    return ptx.Tcgen05SmemDesc.build(scales.toint(), stride_byte_offset=128)


def tmem(address: Int32) -> Any:
    """The pointer for an address in tensor memory, lane << 16 | column."""
    return ptx.TmemAddr(address).as_ptr(Float32)


@dataclass(frozen=True)
class TensorCore:
    """What is done with a slot of operands: its scales go to tensor memory, then it is multiplied.

    Copies and products are asynchronous, and yet no wait stands between them: those that one thread issues run in the
    order of issue where a product follows a copy, or a product to the same sums (PTX: pipelined tcgen05 instructions),
    and one elected thread of the warp, always the same, issues all of them. No such order holds for a copy after the
    product that read what it overwrites: the slot's barriers order these, with a fence (`after_sync`) behind the wait.

    Descriptors are those of the first slot; another one is a fixed number of units further on.
    """

    geometry: Geometry
    a: Any
    b: Any
    sfa: Any
    sfb: Any
    tmem: Int32  # the first column of the accumulators; those of the scales follow

    @staticmethod
    def of(geometry: Geometry, smem: Any, tmem: Int32) -> "TensorCore":
        """Operands in `smem`, and tensor memory from address `tmem` on."""
        return TensorCore(
            geometry,
            code_descriptor(smem.a.data_ptr()),
            code_descriptor(smem.b.data_ptr()),
            scale_descriptor(smem.sfa.data_ptr()),
            scale_descriptor(smem.sfb.data_ptr()),
            tmem,
        )

    def scale_columns(self, scales: Int32) -> tuple[Int32, Int32]:
        """Where a set of scales of a and of b is in tensor memory, step by step."""
        columns = self.tmem + self.geometry.accumulator_columns + scales * self.geometry.scale_columns
        return columns, columns + self.geometry.sfa_columns

    def copy_scales(self, slot: Int32, scales: Int32) -> None:
        """The slot's scales to the columns of set `scales`. `multiply` need not wait.

        A copy an atom: to four columns, once into each of the four groups of 32 lanes.
        """
        g = self.geometry
        columns_a, columns_b = self.scale_columns(scales)
        sfa, sfb = self.sfa + slot * (g.sfa_bytes // UNIT), self.sfb + slot * (g.sfb_bytes // UNIT)
        steps = STEPS // g.sfb_boxes  # of a box, in which each atom of rows has its steps one after the other
        with cute.arch.elect_one():
            for step in range(STEPS):
                self._copy_atom(columns_a + step * ATOM_COLUMNS, sfa + step * ATOM_UNITS)
                for atom in range(g.atoms_n):
                    box = step // steps
                    source = sfb + ((box * g.atoms_n + atom) * steps + step % steps) * ATOM_UNITS
                    self._copy_atom(columns_b + (step * g.atoms_n + atom) * ATOM_COLUMNS, source)

    def _copy_atom(self, column: Int32, descriptor: Any) -> None:
        ptx.tcgen05_cp("shape_32x128b", tmem(column), descriptor, group=GROUPS[self.geometry.ctas], multicast="warpx4")

    def multiply(self, slot: Int32, scales: Int32, sums: Int32, tile: Int32, accumulate: Boolean) -> None:
        """The accumulator of number `sums` (+)= (a x scales) @ (b x scales)^T of the slot, for the `tile`-th tile of b.

        Runs after `copy_scales` of the same slot by the order of issue; see the class.
        """
        g = self.geometry
        columns_a, columns_b = self.scale_columns(scales)
        a, b = self.a + slot * (g.a_bytes // UNIT), self.b + slot * (g.b_bytes // UNIT)
        if g.tile_n % 32 == 0:  # otherwise there is only one tile, which begins with an atom
            columns_b += tile * g.tile_n % ATOM_ROWS // 32
        with cute.arch.elect_one():
            for step in range(STEPS):
                ptx.tcgen05_mma_block_scale(
                    "mxf4nvf4",
                    GROUPS[g.ctas],
                    tmem(self.tmem + sums * g.accumulator_stride),
                    a + step * STEP_UNITS,
                    b + step * STEP_UNITS,
                    instruction_descriptor(*g.tile),
                    accumulate if step == 0 else True,
                    tmem(columns_a + step * ATOM_COLUMNS),
                    tmem(columns_b + step * g.atoms_n * ATOM_COLUMNS),
                    scale_vec_size=ptx.Tcgen05MMAScaleVecSize.BLOCK16,
                )


def load(address: Int32, columns: int) -> list[Float32]:
    """A warp's lanes of fp32 columns: thread i gets lane i of those at `address`. The loads are over on return.

    Loads and wait are one statement: between two, the compiler would put moves of registers that are still to come.
    """
    text, first = "", 0
    while first < columns:
        count = min(1 << (columns - first).bit_length() - 1, LOAD_COLUMNS)
        registers = ", ".join(f"{{$w{first + i}}}" for i in range(count))
        text += f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [{{$r0}} + {first}];\n"
        first += count
    return cute.arch.inline_ptx(
        text + "tcgen05.wait::ld.sync.aligned;", write_only_types=[Float32] * columns, read_only_args=[address]
    )


def before_sync() -> None:
    """Orders this thread's uses of tensor memory so far before what follows a synchronisation in other threads."""
    ptx.tcgen05_fence("before_thread_sync")


def after_sync() -> None:
    """Orders this thread's uses of tensor memory from here on after what came before a synchronisation elsewhere."""
    ptx.tcgen05_fence("after_thread_sync")


def allocate(address: cute.Pointer, columns: int, ctas: int) -> None:
    """By a whole warp, once: the address of the columns goes to shared memory; other CTAs may allocate after that.

    With a pair of `ctas` by the same warp of both, which get the same columns.
    """
    ptx.tcgen05_alloc(address, columns, group=GROUPS[ctas])
    ptx.tcgen05_relinquish_alloc_permit(group=GROUPS[ctas])


def free(address: Int32, columns: int, ctas: int) -> None:
    """By the warps that allocated."""
    ptx.tcgen05_dealloc(tmem(address), columns, group=GROUPS[ctas])
