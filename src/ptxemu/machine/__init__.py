"""The parts of the machine: memories, barriers, asynchronous units, warps, CTAs, clusters, grids."""
