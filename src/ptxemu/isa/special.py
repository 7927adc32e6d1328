"""Special registers, after the manual's chapter of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.errors import UnknownInstruction
from ptxemu.machine.lanes import LANES
from ptxemu.machine.warp import Warp

__all__ = ["SPECIALS", "special"]

Reader = Callable[[Warp], Any]
_LANES = np.arange(LANES, dtype=np.uint32)


def _thread_index(w: Warp) -> list[Any]:
    """The three coordinates of each lane's thread; one int where all lanes have the same."""
    size_x, size_y, _ = w.grid.block
    linear = w.index * LANES + _LANES
    coordinates = (linear % size_x, linear // size_x % size_y, linear // (size_x * size_y))
    return [int(c[0]) if (c == c[0]).all() else c.astype(np.uint32) for c in coordinates]


def _cluster_of(w: Warp) -> tuple[int, int, int]:
    """The CTA's index in its cluster."""
    x, y, z = (c - o for c, o in zip(w.cta.index, w.cluster.origin, strict=True))
    return x, y, z


def _clusters(w: Warp) -> tuple[int, int, int]:
    x, y, z = (-(-g // c) for g, c in zip(w.grid.shape, w.cluster.shape, strict=True))
    return x, y, z


# Those that keep their value while the warp lives.
_FIXED: dict[str, Reader] = {
    "%laneid": lambda w: _LANES,
    "%warpid": lambda w: w.index,
    "%nwarpid": lambda w: 64,
    "%smid": lambda w: w.cta.rank,
    "%nsmid": lambda w: w.grid.sms,
    "%gridid": lambda w: 1,
    "%WARP_SZ": lambda w: LANES,
    "%lanemask_eq": lambda w: np.uint32(1) << _LANES,
    "%lanemask_lt": lambda w: (np.uint32(1) << _LANES) - np.uint32(1),
    "%lanemask_le": lambda w: ((np.uint64(2) << _LANES.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
    "%lanemask_ge": lambda w: ~((np.uint32(1) << _LANES) - np.uint32(1)),
    "%lanemask_gt": lambda w: ~((np.uint64(2) << _LANES.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: len(w.cluster.ctas),
    "%is_explicit_cluster": lambda w: 0xFFFFFFFF if w.grid.explicit_cluster else 0,
    "%dynamic_smem_size": lambda w: w.grid.dynamic_bytes,
    "%total_smem_size": lambda w: -(-w.grid.shared_bytes // 128) * 128,
    "%aggr_smem_size": lambda w: w.grid.shared_bytes + 1024,
    "%reserved_smem_offset_begin": lambda w: 0,
    "%reserved_smem_offset_end": lambda w: 0x400,
}
for _name, _read in {
    "tid": _thread_index,
    "ntid": lambda w: w.grid.block,
    "ctaid": lambda w: w.cta.index,
    "nctaid": lambda w: w.grid.shape,
    "clusterid": lambda w: w.cluster.index,
    "nclusterid": _clusters,
    "cluster_ctaid": _cluster_of,
    "cluster_nctaid": lambda w: w.cluster.shape,
}.items():
    for _i, _c in enumerate("xyz"):
        _FIXED[f"%{_name}.{_c}"] = lambda w, read=_read, i=_i: read(w)[i]  # type: ignore[misc]

# Clocks count the blocks that warps have run; they say nothing about time on a device.
_CLOCKS: dict[str, Reader] = {
    "%clock": lambda w: w.grid.clock() & 0xFFFFFFFF,
    "%clock_hi": lambda w: w.grid.clock() >> 32,
    "%clock64": lambda w: w.grid.clock(),
    "%globaltimer": lambda w: w.grid.clock(),
    "%globaltimer_lo": lambda w: w.grid.clock() & 0xFFFFFFFF,
    "%globaltimer_hi": lambda w: w.grid.clock() >> 32,
}

SPECIALS: dict[str, Reader] = {**_FIXED, **_CLOCKS}


def special(name: str, line: int) -> Reader:
    """The function that reads a special register.  Raises UnknownInstruction for one that is not modelled."""
    if name in _CLOCKS:
        return _CLOCKS[name]
    read = _FIXED.get(name)
    if read is None:
        raise UnknownInstruction(f"line {line}: the special register {name} is not modelled")

    def cached(w: Warp) -> Any:
        value = w.specials.get(name)
        if value is None:
            value = w.specials[name] = read(w)
        return value

    return cached
