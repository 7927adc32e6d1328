"""NVFP4 GEMM for sm_103a with K = 96 instructions."""

from blockscale.kernels.sm100 import Sm100Gemm


class Sm103Gemm(Sm100Gemm):
    """The kernel of one configuration that `supports` passes."""
