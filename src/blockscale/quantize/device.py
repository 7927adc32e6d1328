"""Quantising by a GPU's kernel, or the software GPU's: tensors in, launches, tensors out.

Nothing is waited for and no value is looked at: a dynamic global scale goes from the first kernel to the second on the
device, so that a call can be captured in a CUDA graph.
"""

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
from blockscale.formats.layouts import ATOMS, GROUPED, K_ALIGN, LINEAR, ROW_ALIGN, round_up
from blockscale.launch import cuda, emulated
from blockscale.plan import Function, Launcher
from blockscale.problem import SWIGLU, Target, compiled_for, target_of_capability
from blockscale.quantize.methods import METHODS

KERNEL = "blockscale.kernels.quantise"
ROWS, BLOCKS = 8, 32  # of rows and of blocks along k that a CTA takes at a time
WAVES = 4  # times that a launch fills the GPU with CTAs, where there is as much to do
MOST_ROWS = 2**31  # kernels count them in 32 bits
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """What decides a kernel's code: the arguments of `kernels.quantise.Quantise`."""

    stage: str
    dtype: str
    method: str
    layout: str
    dynamic: bool
    before: str | None
    weight: str | None
    vectors: bool

    def __str__(self) -> str:
        named = {"dynamic": self.dynamic, "vectors": self.vectors}
        parts = [self.stage, self.dtype, self.method, self.layout, self.before, self.weight]
        return "quantize " + ", ".join([part for part in parts if part] + [name for name, on in named.items() if on])

    @property
    def ctas(self) -> int:
        """Of a multiprocessor at a time: as many as registers allow without memory taking their place."""
        if self.method != "rtn" or self.before is not None:
            return 2 if self.method != "rtn" else 3
        if self.stage == "amax":
            return 6
        return 5 if self.dtype != "fp32" and self.layout == ATOMS else 4

    @functools.cached_property
    def entry(self) -> Entry:
        pointers = {
            "x": Pointer(self.dtype),
            "weight": Pointer(self.weight or "fp32"),
            "groups": Pointer("int32"),
            "unit": Pointer("fp32"),
            "codes": Pointer("uint8", 16),
            "scales": Pointer("uint8", 16),
            "out_unit": Pointer("fp32"),
        }
        return Entry(
            pointers,
            dict.fromkeys(("eps", "constant"), "fp64")
            | dict.fromkeys(("matrices", "m", "k"), "int32")
            | dict.fromkeys(("ld", "ld_matrix"), "int64")
            | dict.fromkeys(("experts", "tiles", "splits"), "int32"),
        )


@dataclass(frozen=True)
class Rows:
    """(matrices, m, width) of `tensor`, rows `ld` and matrices `ld_matrix` elements apart, each row dense."""

    tensor: Tensor
    matrices: int
    m: int
    ld: int
    ld_matrix: int

    @staticmethod
    def of(x: Tensor) -> Rows:
        """Of (..., M, width). A copy where elements of a row have gaps, or matrices are not evenly apart."""
        *batch, m, width = x.shape
        matrices = math.prod(batch)
        dense = x if x.stride(-1) == 1 or width == 1 else x.contiguous()
        rows = dense.reshape(matrices, m, width)
        by_matrix, by_row, _ = rows.stride()
        return Rows(rows, matrices, m, by_row if m > 1 else width, by_matrix if matrices > 1 else m * width)

    def as_one_matrix(self) -> Rows:
        """The same rows as few tiles, where all of them are evenly apart; otherwise matrices stay."""
        by_row = self.ld if self.m > 1 else self.ld_matrix
        if self.matrices == 1 or self.ld_matrix != self.m * by_row:
            return self
        rows = self.matrices * self.m
        return Rows(self.tensor, 1, rows, by_row, rows * by_row)

    @property
    def bytes(self) -> int:
        """From the first to the last one."""
        elements = (self.matrices - 1) * self.ld_matrix + (self.m - 1) * self.ld + self.tensor.shape[-1]
        return elements * self.tensor.element_size()

    def in_vectors(self, k: int) -> bool:
        """Whether rows, and the parts of k of them, begin at multiples of 16 bytes."""
        size = self.tensor.element_size()
        lengths = self.tensor.data_ptr(), k * size, self.ld * size, self.ld_matrix * size
        return not any(length % 16 for length in lengths)


def launcher_for(device: torch.device) -> Launcher | None:
    """What launches for tensors on `device`; None is the CPU without an emulator around the caller.

    Raises:
        ValueError: there are no kernels for that device.
    """
    if device.type == "cpu":
        return emulated.active()
    if device.type != "cuda":
        raise ValueError(f"x: on {device}; this version quantises on the CPU and on CUDA GPUs")
    capability = torch.cuda.get_device_capability(device)
    target = target_of_capability(capability)
    if target is None:
        found = ".".join(map(str, capability))
        raise ValueError(f"x: on {device} of compute capability {found}; kernels are compiled for {compiled_for()}")
    return cuda.launcher(target, device)


def quantise(
    launcher: Launcher,
    x: Tensor,
    unit: Tensor | float | None,
    *,
    method: str,
    layout: str,
    groups: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scale of `x`, (..., M, K) or with a gate (..., M, 2 K); the arguments are checked.

    Args:
        unit: a number or fp32 () on the device of `x`, or None for that of the tensor itself.
        layout: "linear", "128x4" or "128x4-grouped", with int32 `groups`.

    Raises:
        CompilerMissing, CompileError: a kernel has to be compiled and cannot be. ValueError: there are too many rows.
    """
    *batch, m, width = x.shape
    if math.prod(batch) * m >= MOST_ROWS:
        raise ValueError(f"x: {math.prod(batch) * m} rows, expected fewer than 2^31")
    k = width // 2 if activation == SWIGLU else width
    columns = layouts.blocks(k)
    scale_rows = {LINEAR: m, ATOMS: round_up(m, ROW_ALIGN)}.get(layout)
    if scale_rows is None:
        assert groups is not None
        scale_rows = layouts.grouped_rows(m, len(groups))
    codes = torch.empty(*batch, m, round_up(k, K_ALIGN) // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*batch, scale_rows, columns, dtype=torch.uint8, device=x.device)
    amax = None if unit is not None else torch.zeros((), dtype=torch.float32, device=x.device)
    out_unit = torch.empty((), dtype=torch.float32, device=x.device)
    if not x.numel():
        out_unit.copy_(unit) if isinstance(unit, Tensor) else out_unit.fill_(1.0 if unit is None else unit)
    else:
        rows = Rows.of(x)
        flat = rows.as_one_matrix()
        rows = flat if layout == LINEAR else rows
        weight = None if norm_weight is None else norm_weight.detach().contiguous()
        # Of what is in memory the scale is a quotient, or a multiple: a number needs no kernel of its own to get there.
        given = unit if isinstance(unit, Tensor) else launcher.one
        constant = METHODS[method].divisor if unit is None else 1.0 if isinstance(unit, Tensor) else unit
        call = _Call(launcher, k, rows, weight, groups, eps, constant)
        vectors = rows.in_vectors(k) and (weight is None or Rows.of(weight.view(1, -1)).in_vectors(k))
        before = activation if weight is None else "rms_norm"
        of_weight = None if weight is None else DTYPES[weight.dtype]
        code = Variant("codes", DTYPES[x.dtype], method, layout, amax is not None, before, of_weight, vectors)
        if amax is not None:
            first = replace(code, stage="amax", method="rtn", layout=LINEAR, dynamic=False)
            replace(call, rows=flat).run(first, -(-flat.m // ROWS), unit=amax)
        # Padding rows are written too.
        tiles = -(-(rows.m if layout == LINEAR else scale_rows) // ROWS)
        call.run(code, tiles, unit=given if amax is None else amax, codes=codes, scales=scales, out_unit=out_unit)
    return codes, scales.view(torch.float8_e4m3fn), out_unit


@dataclass(frozen=True)
class _Call:
    """What both stages are called with."""

    launcher: Launcher
    k: int
    rows: Rows
    weight: Tensor | None
    groups: Tensor | None
    eps: float
    constant: float

    def run(self, variant: Variant, tiles: int, *, unit: Tensor, **outputs: Tensor) -> None:
        """Launch a kernel; `unit` is the global scale or the largest magnitude. It has the outputs that are given."""
        rows, launcher = self.rows, self.launcher
        chunks = -(-layouts.blocks(self.k) // BLOCKS)
        wanted = round(WAVES * variant.ctas * launcher.target.sms / (rows.matrices * tiles))
        splits = 1 if variant.before == "rms_norm" else max(1, min(chunks, wanted))
        experts = 0 if variant.layout != GROUPED or self.groups is None else len(self.groups)
        given = {"x": rows.tensor, "weight": self.weight, "groups": self.groups, "unit": unit, **outputs}
        behind = [given.get(name) for name in variant.entry.pointers]
        pointers = [launcher.one.data_ptr() if t is None else t.data_ptr() for t in behind]
        sizes = [4 if t is None else t.numel() * t.element_size() for t in behind]
        sizes[0] = rows.bytes
        values = {
            "eps": self.eps,
            "constant": self.constant,
            "matrices": rows.matrices,
            "m": rows.m,
            "k": self.k,
            "ld": rows.ld,
            "ld_matrix": rows.ld_matrix,
            "experts": experts,
            "tiles": tiles,
            "splits": splits,
        }
        launcher.launch(_function(launcher, variant), pointers, sizes, [values[name] for name in variant.entry.values])


_functions: dict[tuple[type, str, Variant], Function] = {}


def _function(launcher: Launcher, variant: Variant) -> Function:
    """The loaded kernel: a dictionary look-up from the second time on."""
    known = type(launcher), launcher.target.arch, variant
    if known not in _functions:
        target = launcher.target
        _functions[known] = plan.loaded(launcher, origin(target, variant), functools.partial(build, target, variant))
    return _functions[known]


def variants(dtype: str, method: str, before: str | None) -> list[Variant]:
    """The kernels of `quantize` for an `x` of `dtype` in every layout, with any global scale and alignment; `before`:
    None, "swiglu", or "rms_norm" with a weight of the same dtype or fp32."""
    weights = dict.fromkeys((dtype, "fp32")) if before == "rms_norm" else (None,)
    found = []
    for weight, vectors in itertools.product(weights, (True, False)):
        found.append(Variant("amax", dtype, "rtn", LINEAR, False, before, weight, vectors))
        for layout, dynamic in itertools.product((LINEAR, ATOMS, GROUPED), (True, False)):
            found.append(Variant("codes", dtype, method, layout, dynamic, before, weight, vectors))
    return found


def artefact(target: Target, variant: Variant, kept: store.Store) -> store.Artefact:
    """The compiled kernel, from a store, or put there: for a machine without the compiler.

    Raises:
        CompilerMissing, CompileError: it has to be compiled and cannot be.
    """
    return plan.stored(origin(target, variant), functools.partial(build, target, variant), kept)


def origin(target: Target, variant: Variant) -> dict[str, Any]:
    """What decides the kernel's code, for the store."""
    return store.origin_of(target, KERNEL, variant.entry, quantiser=asdict(variant) | {"ctas": variant.ctas})


def build(target: Target, variant: Variant) -> Mapping[str, bytes]:
    """The parts of its artefact.

    Raises:
        CompileError: the compiler refuses.
    """
    from blockscale.compile import compile_entry
    from blockscale.kernels.quantise import Quantise

    kernel = Quantise(**asdict(variant), ctas=variant.ctas)  # type: ignore[no-untyped-call]
    return compile_entry(kernel, variant.entry, target.arch, str(variant))
