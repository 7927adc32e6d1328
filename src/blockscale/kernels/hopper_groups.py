"""The kernels of Hopper (sm_90a) for grouped products: warps multiply one or two rows of a group, warpgroups more."""

from blockscale.kernels.sm90_experts import Sm90ExpertGemm
from blockscale.kernels.sm90_grouped import Sm90GroupedGemm

__all__ = ["Sm90ExpertGemm", "Sm90GroupedGemm"]
