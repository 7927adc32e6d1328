"""How a product is done: `Config`. Whether it can be done so is for `families.supports` to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """Everything about a kernel that may be chosen. A GPU family has some of the fields; the others stay as they are.

    Attributes:
        tile: (rows, columns) of the result that are computed at a time: by a CTA, or 256 rows by a pair of CTAs.
        stages: slots of the ring of operand tiles in shared memory, None means as many as fit; on Hopper units of
            16 x 128 weights that a warp has in flight.
        accumulators: tiles of sums in tensor memory (for groups on Hopper in shared memory); with 2 the epilogue of one
            tile overlaps the next.
        cluster: CTAs of a cluster along m and n, which fetch operands for one another; None for the fewest.
        fallback_cluster: a smaller shape that a launch may use where `cluster` does not fit; None for none.
        schedule: "static" (of n CTAs each takes every n-th tile) or "clc" (it asks the hardware for its next one).
        raster: the dimension along which consecutive tiles lie, "m" or "n".
        group: width of the bands, in tiles across `raster`, that tiles are walked in; 1 for line after line.
        ownership: with the static schedule, whose a tile is: "turns" (of n CTAs each takes every n-th of this order) or
            "lines" (clusters keep to lines along `raster`, and so to rows of an operand).
        swap: the kernel multiplies b by a^T and stores the result transposed: its rows are the columns of the result.
        pdl: the kernel may start before the one ahead of it in the stream has ended (programmatic dependent launch).
        prefetch: k tiles of its first tile that a CTA asks L2 for before it loads any; on Hopper units of weights that
            a warp asks L2 for before the kernel ahead in the stream has ended.
        l2_a, l2_b, l2_scales, l2_out: what L2 is told about operands and result: None, "evict_first" or "evict_last".
        store: how results leave: "direct" from registers; "tma" by way of shared memory, swizzled; "tma_rows" likewise,
            row after row, as a first version would.
        read: the most columns of tensor memory that a thread reads before it waits for them.
        release: when an accumulator is free: "late", once it is stored, "early", once it is read, or "preload", once it
            is read, of which nothing is converted before.
        store_slots: buffers of a warp for what leaves by way of shared memory.
        ahead: with pdl, weights are read before that: for weights that no kernel before it in an unbroken chain of
            overlapped launches writes, nor the one ahead of that chain.
        wgmma: whether warpgroups multiply (PTX: wgmma) instead of warps (PTX: mma.sync).
        mma_k: k of a tensor-core instruction, 64, or with K = 96 instructions 96.
        l2_sfa, l2_sfb: with K = 96 instructions what L2 is told about scales of a and of b, instead of l2_scales.
        drop: how many tiles before the end of a sweep along n rows of a begin to be loaded as "evict_first".
        first: the operand that is loaded first, "a" or "b".
        pace: nanoseconds for which the epilogue is asked to pause between pieces of a tile, so that stores are spread.
        unroll: copies of a load loop's body in the code.
        fixed: the one (m, n, k) that the kernel is compiled for; None for any.
        k_warps: warps of a CTA, or warpgroups, that share rows of a weight and split k; their sums are added in order.
        order: in which groups of a grouped product come: "given", or "longest", those of the most rows first.
        split: CTAs of a cluster, or pairs of them, that share a tile and split k; their sums are added in order.
        chunk: k of a chunk of activations in shared memory. buffers: chunks that there is room for.
        expand: on Hopper, rows of a weight that are expanded at a time, for cuBLAS to multiply by in one chain along k,
            which loses more than the result contract allows; 0: kernels of this library multiply.
        ctas: the most CTAs of a launch; each takes tiles in turn. None means one a multiprocessor; on Hopper,
            for more than 64 rows, one a tile.
        persist_mb: MiB of L2 that this configuration was measured with in `persisting_l2`; 0 for none.

    Raises:
        TypeError: a field of another type. Whether a kernel can be built is for `families.supports` to say.
    """

    tile: tuple[int, int] = (128, 128)
    stages: int | None = None
    accumulators: int = 1
    cluster: tuple[int, int] | None = None
    fallback_cluster: tuple[int, int] | None = None
    schedule: str = "static"
    raster: str = "m"
    group: int = 1
    ownership: str = "turns"
    swap: bool = False
    pdl: bool = False
    prefetch: int = 0
    l2_a: str | None = None
    l2_b: str | None = None
    l2_scales: str | None = None
    l2_out: str | None = None
    store: str = "direct"
    read: int = 32
    release: str = "late"
    store_slots: int = 2
    mma_k: int = 64
    l2_sfa: str | None = None
    l2_sfb: str | None = None
    drop: int = 0
    first: str = "a"
    pace: int = 0
    unroll: int = 1
    fixed: tuple[int, int, int] | None = None
    ahead: bool = False
    wgmma: bool = False
    order: str = "given"
    k_warps: int = 1
    split: int = 1
    chunk: int | None = None
    buffers: int | None = None
    expand: int = 0
    ctas: int | None = None
    persist_mb: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(field.type).removesuffix(" | None")
            if not (_IS[kind](value) or (value is None and kind != field.type)):
                raise TypeError(f"{field.name}: {value!r}, expected {_CALLED[kind]}")

    def __str__(self) -> str:
        given = (f for f in fields(self) if f.name != "tile" and getattr(self, f.name) != f.default)
        return ", ".join([f"tile {_text(self.tile)}", *(f"{f.name} {_text(getattr(self, f.name))}" for f in given)])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_integers(value: Any, count: int) -> bool:
    return isinstance(value, tuple) and len(value) == count and all(map(_is_integer, value))


_IS: dict[str, Callable[[Any], bool]] = {
    "int": _is_integer,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "tuple[int, int]": lambda value: _are_integers(value, 2),
    "tuple[int, int, int]": lambda value: _are_integers(value, 3),
}
_CALLED = {
    "int": "an integer",
    "str": "a string",
    "bool": "a bool",
    "tuple[int, int]": "a tuple of two integers",
    "tuple[int, int, int]": "a tuple of three integers",
}


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Reason:
    """Why something cannot be done: the argument or field at fault, and what is wrong with it."""

    argument: str
    message: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.message}"


@dataclass(frozen=True)
class Choice:
    """A configuration and, in the order in which they were applied, the reasons for it."""

    config: Config
    reasons: tuple[str, ...]
