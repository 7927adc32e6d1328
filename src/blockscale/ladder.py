"""Six steps from a first NVFP4 kernel for B200 to a fast one, as configurations of the one that there is.

Each differs from the one before by what its comment says; docs/ladder.md walks them. Kernels of these designs were
published with measurements on a B200, from 0.64 to 1.04 of cuBLAS at 8192 x 8192 x 8192 (bf16 results); these
configurations have not been timed there.
"""

from __future__ import annotations

from dataclasses import replace

from blockscale.config import Config

EVERY_TILE = 65535  # CTAs: one a tile, as far as a launch of this kernel goes

# A CTA a tile. TMA, tensor memory and three roles; results leave row by row through shared memory.
V1 = Config((128, 256), stages=3, store="tma_rows", read=64, store_slots=1, ctas=EVERY_TILE)
# Pairs of CTAs: an instruction multiplies for two, each holds half of B, and stages are smaller, so that five fit, and
# a second buffer for each warp of the epilogue.
V2 = replace(V1, tile=(256, 256), stages=5, store_slots=2)
# Persistent: as many CTAs as the GPU has room for, each does tile after tile in one pipeline that never drains.
V3 = replace(V2, ctas=None)
# Through swizzled shared memory, and the accumulator is free once its last columns are read, before these are stored.
V4 = replace(V3, store="tma", read=128, release="early")
# Tiles on request, and in bands that L2 can hold.
V5 = replace(V4, schedule="clc", group=16)
# Dependent launch: the start of a kernel overlaps the end of the one before.
V6 = replace(V5, pdl=True)

STEPS = (V1, V2, V3, V4, V5, V6)
