"""Code x scale as bf16 or fp16, by a GPU's kernel or the software GPU's: operands of cuBLAS, and of kernels that
multiply by such activations. Nothing is waited for and no value is looked at."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockscale import plan, store
from blockscale.entry import Entry, Pointer
from blockscale.formats import layouts
from blockscale.formats.fragment import ROWS
from blockscale.formats.layouts import ATOMS, FRAGMENT, LINEAR, ROW_ALIGN, round_up
from blockscale.plan import Function, Launcher
from blockscale.problem import Target
from blockscale.tensor import NVFP4Tensor

KERNEL = "blockscale.kernels.dequantise"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LAYOUTS = (LINEAR, ATOMS, FRAGMENT)
MOST_MATRICES = 65_535  # of a grid's third dimension
VECTOR = 8  # numbers that a row is padded to a multiple of
FEW = 1 << 21  # numbers up to which more CTAs of less work are sooner done (H200, 2026-11-30)


@dataclass(frozen=True)
class Variant:
    """What decides a kernel's code: the arguments of `kernels.dequantise.Dequantise`."""

    layout: str
    dtype: str
    depth: int
    factors: str | None

    def __str__(self) -> str:
        return f"expand {self.layout}, {self.dtype}, {self.depth}" + (
            f", factors {self.factors}" if self.factors else ""
        )


@dataclass(frozen=True)
class Factors:
    """Two global scales and alpha, fp32 () on the device, and a number; and where their product goes.

    Attributes:
        total: fp32 (2,), two numbers whose product it is. If it is `folded`, it is the first one alone, and the second
            is 0; a power of two may be in what is expanded: see `kernels.dequantise`.
    """

    unit: Tensor
    other: Tensor
    alpha: Tensor
    factor: float
    total: Tensor
    folded: bool = False


ENTRY = Entry(
    {
        "codes": Pointer("uint8", 16),
        "scales": Pointer("uint8"),
        "out": Pointer("uint8", 16),
        "unit": Pointer("fp32"),
        "other": Pointer("fp32"),
        "alpha": Pointer("fp32"),
        "total": Pointer("fp32"),
    },
    {"factor": "fp64"} | dict.fromkeys(("matrices", "rows", "blocks", "width"), "int32"),
)


def width(k: int) -> int:
    """Numbers between rows of a result with K = `k`; those beyond k are zeros."""
    return round_up(k, VECTOR)


def expand(
    launcher: Launcher, t: NVFP4Tensor, out: Tensor, rows: slice | None = None, factors: Factors | None = None
) -> None:
    """out = code x scale of `t`, or of the `rows` of one matrix; and the product of `factors`.

    Args:
        t: in layout "linear", "128x4" or "fragment", codes and scales dense.
        out: bf16 or fp16 (..., M, width(K)), contiguous, aligned to 16 bytes.
        rows: begins at a multiple of `strip_rows` of the layout.

    Raises:
        ValueError: there are more than 65,535 matrices, not in layout "linear".
        CompilerMissing, CompileError: the kernel has to be compiled and cannot be.
    """
    if t.codes.data_ptr() % ENTRY.pointers["codes"].align:
        t = replace(t, codes=t.codes.clone())
    *batch, m, k = t.shape
    matrices, blocks = math.prod(batch), layouts.blocks(k)
    before = 0, 0
    if rows is not None:
        m = rows.stop - rows.start
        of_row = t.codes.stride(-3) // ROWS if t.layout == FRAGMENT else t.codes.stride(-2)
        before = rows.start * of_row, 0 if t.layout == FRAGMENT else rows.start * blocks
    codes, scales = t.codes.view(-1)[before[0] :], t.scales.view(-1)[before[1] :]
    if t.layout == LINEAR:
        matrices, m = 1, matrices * m
    if not out.numel():
        return
    one, given = launcher.one, factors
    around = (one, one, one, one) if given is None else (given.unit, given.other, given.alpha, given.total)
    behind = codes, scales if scales.numel() else one, out, *around
    pointers = [x.data_ptr() for x in behind]
    sizes = [x.numel() * x.element_size() for x in behind]
    way = None if given is None else "folded" if given.folded else "beside"
    variant = Variant(t.layout, DTYPES[out.dtype], _depth(t.layout, matrices * m * out.shape[-1]), way)
    if matrices > MOST_MATRICES:
        raise ValueError(f"shape: {tuple(t.shape)}, {matrices} matrices, expected at most {MOST_MATRICES}")
    values = 1.0 if given is None else given.factor, matrices, m, blocks, out.shape[-1]
    launcher.launch(_function(launcher, variant), pointers, sizes, values)


def _depth(layout: str, numbers: int) -> int:
    return 1 if layout != FRAGMENT and numbers <= FEW else 2


def strip_rows(layout: str) -> int:
    """Rows of whose multiples parts of a matrix may begin."""
    return {LINEAR: 1, ATOMS: ROW_ALIGN, FRAGMENT: ROWS}[layout]


_functions: dict[tuple[type, str, Variant], Function] = {}


def _function(launcher: Launcher, variant: Variant) -> Function:
    """The loaded kernel: a dictionary look-up from the second time on."""
    known = type(launcher), launcher.target.arch, variant
    if known not in _functions:
        target = launcher.target
        _functions[known] = plan.loaded(launcher, origin(target, variant), functools.partial(build, target, variant))
    return _functions[known]


def variants() -> list[Variant]:
    """The kernels that products take, in every layout: for weights in both dtypes, for activations in bf16."""
    weights = itertools.product(LAYOUTS, DTYPES.values(), ("folded",))
    activations = itertools.product(LAYOUTS, ("bf16",), (None, "beside"))
    return [
        Variant(layout, dtype, depth, way)
        for layout, dtype, way in (*weights, *activations)
        for depth in ((2,) if layout == FRAGMENT else (1, 2))
    ]


def artefact(target: Target, variant: Variant, kept: store.Store) -> store.Artefact:
    """The compiled kernel, from a store, or put there: for a machine without the compiler.

    Raises:
        CompilerMissing, CompileError: it has to be compiled and cannot be.
    """
    return plan.stored(origin(target, variant), functools.partial(build, target, variant), kept)


def origin(target: Target, variant: Variant) -> dict[str, Any]:
    """What decides the kernel's code, for the store."""
    return store.origin_of(target, KERNEL, ENTRY, dequantiser=asdict(variant))


def build(target: Target, variant: Variant) -> Mapping[str, bytes]:
    """The parts of its artefact.

    Raises:
        CompileError: the compiler refuses.
    """
    from blockscale.compile import compile_entry
    from blockscale.kernels.dequantise import Dequantise

    kernel: Any = Dequantise
    return compile_entry(kernel(**asdict(variant)), ENTRY, target.arch, str(variant))
