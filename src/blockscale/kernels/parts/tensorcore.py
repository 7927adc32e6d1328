"""Tensor-core instructions for NVFP4 on sm_100a, and the descriptors that they take (PTX: tcgen05)."""

from cutlass import Float32, cute
from cutlass.experimental import primitives as ptx

from blockscale.kernels.parts.geometry import ATOM_BYTES, STEP_K

# Descriptors count in units of 16 bytes; so much further is the next step of k, and the next scale atom.
UNIT = 16
STEP = STEP_K // 2 // UNIT
ATOM = ATOM_BYTES // UNIT

_ONE_CTA = ptx.CTAGroup.CTA_1
_E2M1 = 1
_SWIZZLE_128B = 2


def instruction(m, n):
    """The instruction descriptor: E2M1 times E2M1 with UE4M3 scales, both K-major, k = 64 (PTX: for .kind::mxf4nvf4)."""
    return _E2M1 << 7 | _E2M1 << 10 | n // 8 << 17 | m // 128 << 27


def codes(pointer):
    """The matrix descriptor of codes: K-major, rows of 128 bytes swizzled, groups of 8 rows 1024 bytes apart."""
    return ptx.Tcgen05SmemDesc.build(pointer.toint(), stride_byte_offset=1024, layout=_SWIZZLE_128B)


def scales(pointer):
    """The matrix descriptor of scale atoms: rows of 16 bytes, not swizzled, groups of 8 rows 128 bytes apart."""
    return ptx.Tcgen05SmemDesc.build(pointer.toint(), stride_byte_offset=128)


def tmem(address):
    """A pointer to tensor memory from an address, lane << 16 | column."""
    return ptx.TmemAddr(address).as_ptr(Float32)


def copy_atom(address, descriptor):
    """Copies a scale atom to four columns, once into each of the four groups of 32 lanes."""
    ptx.tcgen05_cp("shape_32x128b", tmem(address), descriptor, group=_ONE_CTA, multicast="warpx4")


def multiply(acc, a, b, sfa, sfb, instruction, accumulate):
    """acc (+)= (a x sfa) @ (b x sfb)^T over 64 elements of k; a and b are descriptors, the others columns."""
    ptx.tcgen05_mma_block_scale(
        "mxf4nvf4",
        _ONE_CTA,
        tmem(acc),
        a,
        b,
        instruction,
        accumulate,
        tmem(sfa),
        tmem(sfb),
        scale_vec_size=ptx.Tcgen05MMAScaleVecSize.BLOCK16,
    )


def load_columns(address, count):
    """The warp's 32 lanes of `count` columns, fp32: a lane of tensor memory a thread. The load is over on return."""
    values = ptx.tcgen05_ld("32x32b", tmem(address), num=count)
    ptx.tcgen05_wait("load")
    return cute.TensorSSA(values, count, Float32)


def before_sync():
    """This thread's tensor-memory accesses come before what follows the next synchronisation, elsewhere."""
    ptx.tcgen05_fence("before_thread_sync")


def after_sync():
    """This thread's tensor-memory accesses from here on come after what went before the last synchronisation."""
    ptx.tcgen05_fence("after_thread_sync")


def allocate(smem, columns):
    """By one whole warp: the address goes to `smem`; nothing more is allocated later."""
    ptx.tcgen05_alloc(smem, columns, group=_ONE_CTA)
    ptx.tcgen05_relinquish_alloc_permit(group=_ONE_CTA)


def free(address, columns):
    """By the same warp."""
    ptx.tcgen05_dealloc(tmem(address), columns, group=_ONE_CTA)
