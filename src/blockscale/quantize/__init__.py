"""From floating point to NVFP4: one rule for the bits, several methods to choose the block scales."""

from blockscale.quantize.methods import METHODS
from blockscale.quantize.quantizer import global_scale_for, quantize

__all__ = ["METHODS", "global_scale_for", "quantize"]
