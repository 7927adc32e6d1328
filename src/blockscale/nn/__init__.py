"""Modules with NVFP4 weights, and models made of them."""

from blockscale.nn.checkpoint import load_into, named_weights
from blockscale.nn.grouped import Experts, GroupedLinear
from blockscale.nn.linear import Linear, pack
from blockscale.nn.model import LayerReport, ModelReport, quantize_model

__all__ = [
    "Experts",
    "GroupedLinear",
    "LayerReport",
    "Linear",
    "ModelReport",
    "load_into",
    "named_weights",
    "pack",
    "quantize_model",
]
