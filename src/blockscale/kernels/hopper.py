"""The kernels of Hopper (sm_90a): warps multiply few rows of activations, warpgroups more, and many in larger tiles."""

from blockscale.kernels.sm90 import Sm90WarpGemm
from blockscale.kernels.sm90_prefill import Sm90PrefillGemm
from blockscale.kernels.sm90_wide import Sm90GroupGemm

__all__ = ["Sm90GroupGemm", "Sm90PrefillGemm", "Sm90WarpGemm"]
