"""Runs the grouped sm_100a kernel itself on the emulator, on raw bytes, and says where its result is wrong.

Operands are those of `emulated_kernel`: each group's rows of a have scales in atoms of their own, and those of missing
rows are NaN; the output is NaN before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cutlass import Float32, Float64, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from emulated_kernel import BIASES, DTYPES, GUARD, NAN, Operand, _stored, aligned, operand

import ptxemu
from blockscale.kernels.sm100_grouped import Sm100GroupedGemm
from blockscale.kernels.sm100_list import Sm100ListGemm
from ptxemu.host import installed


@functools.cache
def compiled(tile: tuple[int, int], options: str = "", **config: Any) -> Any:
    """The kernel's host function, to be called inside `ptxemu.host.installed`."""
    kernel = Sm100GroupedGemm(tile, **config)

    def pointer(dtype: Any, align: int | None = None) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)

    codes, units = (pointer(Uint8, 16),) * 4, (pointer(Float32),) * 3
    beside = pointer(BIASES[kernel.epilogue.bias or "fp32"]), pointer(Uint8, 16), pointer(Float32), pointer(Int32)
    values = Float64(0), *(Int32(0),) * 3, Int64(0), *(Int32(0),) * 5
    arguments = (*codes, pointer(kernel.epilogue.dtype), *units, *beside, *values, make_fake_stream())
    with installed(ptxemu.Device("sm_100a"), []):
        return cute.compile(kernel, *arguments, options=f"--gpu-arch sm_100a --enable-tvm-ffi {options}")


@dataclass(frozen=True)
class Groups:
    """A grouped product: rows of each group, which are one operand each, and a matrix of weights for each.

    max_m: rows of a group's matrix in the masked form, None for the contiguous form. spare: rows beyond all groups.
    """

    sizes: tuple[int, ...]
    tokens: tuple[Operand, ...]
    weights: Operand
    max_m: int | None = None
    spare: int = 0

    @property
    def m(self) -> int:
        return sum(self.sizes) + self.spare if self.max_m is None else self.max_m

    @property
    def rows(self) -> int:
        return self.m if self.max_m is None else self.m * len(self.sizes)

    def first(self, group: int) -> int:
        return sum(self.sizes[:group]) if self.max_m is None else group * self.max_m

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of a."""
        depth = self.weights.codes.shape[2]
        codes = np.full((self.rows, depth // 2), 0x77, np.uint8)
        atoms = _grouped_rows(self.m, len(self.sizes)) if self.max_m is None else -(-self.m // 128) * len(self.sizes)
        scales = np.full((atoms, 128 * depth // 16), NAN, np.uint8)
        atom = 0
        for group, (size, operand_) in enumerate(zip(self.sizes, self.tokens, strict=True)):
            packed, own = operand_.memory()
            if self.max_m is not None:
                atom = group * -(-self.m // 128)
            codes[self.first(group) : self.first(group) + size] = packed.reshape(-1, depth // 2)[:size]
            own = own.reshape(-1, 128 * depth // 16)[: -(-size // 128)]
            scales[atom : atom + len(own)] = own
            atom += len(own)
        return _stored(codes), _stored(scales)


def _grouped_rows(rows: int, groups: int) -> int:
    """Atoms of rows that the 128x4-grouped layout has room for."""
    return rows if rows <= groups else groups + (rows - groups) // 128


def grouped(
    sizes: Sequence[int], n: int, k: int, *, seed: int = 0, positive: bool = False, max_m: int | None = None,
    spare: int = 0,
) -> Groups:  # fmt: skip
    """Random operands, see `emulated_kernel.operand`."""
    tokens = tuple(operand(max(size, 1), k, seed=seed + 1 + i, positive=positive) for i, size in enumerate(sizes))
    weights = operand(n, k, batch=len(sizes), seed=seed, positive=positive)
    return Groups(tuple(sizes), tokens, weights, max_m, spare)


@dataclass(frozen=True)
class Call:
    """What a launch is given besides operands."""

    units: tuple[float, float] = (0.5, 2.0)
    alphas: tuple[float, ...] = (2.0**-8,)
    factor: float = 3.0
    ld: int | None = None
    offset: int = 0  # elements that the output is off an aligned address
    ctas: int = 5
    schedule: tuple[str, int] = ("lazy", 0)
    given: tuple[int, ...] | None = None  # the numbers in global memory, instead of the sizes
    ends: bool = False

    def alpha(self, group: int) -> float:
        own = self.alphas[group % len(self.alphas)]
        units = np.array([*self.units, own], np.float32).astype(np.float64)
        return float(np.prod(units)) * self.factor


@dataclass
class Result:
    rows: np.ndarray  # (rows, n) of the output's dtype
    around: np.ndarray  # bytes that had to stay 0xFF
    report: Any = field(repr=False)


def run(
    function: Any,
    groups: Groups,
    call: Call = Call(),
    out_dtype: str = "bf16",
    bias: np.ndarray | None = None,
    gated: bool = False,
) -> Result:
    dtype = np.dtype(DTYPES[out_dtype])
    n = groups.weights.rows // (2 if gated else 1)
    ld = n if call.ld is None else call.ld
    used, start = groups.rows * ld * dtype.itemsize, call.offset * dtype.itemsize
    out = aligned(start + used + GUARD, 0xFF)
    report = launch(function, groups, call, out, start, ld, bias)
    rows = out[start : start + used].view(dtype).reshape(groups.rows, ld)
    gaps = np.ascontiguousarray(rows[:, n:]).reshape(-1).view(np.uint8)
    return Result(rows[:, :n], np.concatenate((out[:start], gaps, out[start + used :])), report)


def launch(
    function: Any,
    groups: Groups,
    call: Call,
    out: np.ndarray,
    start: int,
    ld: int,
    bias: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    unit: float = 1.0,
) -> Any:
    """The report. The output begins `start` bytes into `out`."""
    given = groups.sizes if call.given is None else call.given
    if call.ends and call.given is None:
        given = tuple(np.cumsum(groups.sizes))
    memory = [*groups.memory(), *groups.weights.memory(), out]
    memory += [_stored(np.array([*call.units, unit, *call.alphas], np.float32))]
    memory += [_stored(np.zeros(1, np.float32) if bias is None else bias), aligned(16) if scales is None else scales]
    memory += [_stored(np.array(given, np.int32))]
    at = [array.ctypes.data for array in memory]
    schedule, seed = call.schedule
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks="strict")  # findings are errors
    biases = 1 if bias is None or bias.ndim == 1 else len(bias)
    with installed(device, memory) as emulator:
        emulator.call(
            function, at[0], at[2], at[1], at[3], at[4] + start, at[5], at[5] + 4, at[5] + 12, at[6], at[7], at[5] + 8,
            at[8], call.factor, groups.m, groups.weights.rows, groups.weights.codes.shape[2], ld, len(groups.sizes),
            len(call.alphas), biases, int(call.ends), call.ctas, 0,
        )  # fmt: skip
    return emulator.reports[0]


def exactly(groups: Groups, call: Call, group: int, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A group's rows before any activation, in float64, and how far sums may be from them."""
    left, right = groups.tokens[group].values()[0][: groups.sizes[group]], groups.weights.values()[group].T
    alpha, k = call.alpha(group), groups.weights.codes.shape[2]
    exact, slack = left @ right * alpha, abs(left) @ abs(right) * abs(alpha) * (4 + k / 1024) * 2.0**-20
    if bias is None:
        return exact, slack
    own = (bias if bias.ndim == 1 else bias[group]).astype(np.float64)
    return exact + own, slack + abs(own) * 2.0**-24


def mistakes(result: Result, groups: Groups, call: Call, bias: np.ndarray | None = None) -> str | None:
    """None when the result keeps the contract and nothing beside it was written; otherwise what is wrong first."""
    if (result.around != 0xFF).any():
        return f"byte {np.argmax(result.around != 0xFF)} beside the output was written"
    own = np.zeros(groups.rows, bool)
    for group, size in enumerate(groups.sizes):
        rows = slice(groups.first(group), groups.first(group) + size)
        own[rows] = True
        exact, slack = exactly(groups, call, group, bias)
        with np.errstate(over="ignore"):
            low, high = ((exact + s * slack).astype(result.rows.dtype).astype(np.float64) for s in (-1, 1))
        actual = result.rows[rows].astype(np.float64)
        bad = np.argwhere(~((low <= actual) & (actual <= high)))
        if bad.size:
            first = tuple(int(i) for i in bad[0])
            return f"group {group}: {len(bad)} wrong, first {first}: {actual[first]}, exactly {exact[first]}"
    if (np.ascontiguousarray(result.rows[~own]).view(np.uint8) != 0xFF).any():
        return "a row of no group was written"
    return None


@functools.cache
def compiled_list(tile: tuple[int, int], **config: Any) -> Any:
    """As `compiled`, for a list of problems."""
    at = make_ptr(Int64, 0, cute.AddressSpace.gmem, assumed_align=8)
    maps = make_ptr(Uint8, 0, cute.AddressSpace.gmem, assumed_align=128)
    with installed(ptxemu.Device("sm_100a"), []):
        arguments = at, maps, Float64(0), Int32(0), Int32(0), make_fake_stream()
        return cute.compile(Sm100ListGemm(tile, **config), *arguments, options="--gpu-arch sm_100a --enable-tvm-ffi")


@dataclass(frozen=True)
class Product:
    """One of a list; `ld` columns between rows of the result."""

    a: Operand
    b: Operand
    ld: int
    alpha: float


def products(shapes: Sequence[tuple[int, int, int]], gap: int = 0) -> list[Product]:
    """Of random operands, m x n x k."""
    return [
        Product(operand(m, k, seed=2 * i), operand(n, k, seed=2 * i + 1), n + gap, 2.0 ** -(i + 3))
        for i, (m, n, k) in enumerate(shapes)
    ]


def run_list(
    function: Any, list_: Sequence[Product], call: Call = Call(), out_dtype: str = "bf16", bias: Any = None
) -> tuple[list[Result], Any]:
    """A result for each product, and the reports."""
    dtype = np.dtype(DTYPES[out_dtype])
    outs = [aligned(p.a.rows * p.ld * dtype.itemsize + GUARD, 0xFF) for p in list_]
    table, memory = np.zeros((len(list_), 16), np.int64), [*outs]
    for i, (product, out) in enumerate(zip(list_, outs, strict=True)):
        (a, sfa), (b, sfb) = product.a.memory(), product.b.memory()
        factors = _stored(np.array([*call.units, product.alpha], np.float32))
        added = _stored(np.zeros(1, np.float32) if bias is None else bias[i])
        arrays = [a, b, sfa, sfb, out, factors, factors, factors, added]
        table[i, :9] = [array.ctypes.data for array in arrays]
        table[i, 6:8] += 4, 8
        table[i, 9:13] = product.a.rows, product.b.rows, product.a.codes.shape[2], product.ld
        memory += arrays
    stored, maps = _stored(table), aligned(512 * len(list_))
    schedule, seed = call.schedule
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks="strict")  # findings are errors
    with installed(device, [*memory, stored, maps]) as emulator:
        emulator.call(function, stored.ctypes.data, maps.ctypes.data, call.factor, len(list_), call.ctas, 0)
    results = []
    for product, out in zip(list_, outs, strict=True):
        rows = out[:-GUARD].view(dtype).reshape(product.a.rows, product.ld)
        gaps = np.ascontiguousarray(rows[:, product.b.rows :]).reshape(-1).view(np.uint8)
        results.append(Result(rows[:, : product.b.rows], np.concatenate((gaps, out[-GUARD:])), emulator.reports[-1]))
    return results, emulator.reports


def mistakes_in_list(results: Sequence[Result], list_: Sequence[Product], call: Call, bias: Any = None) -> str | None:
    """As `mistakes`, of the first product that has any."""
    for i, (result, product) in enumerate(zip(results, list_, strict=True)):
        one = Groups((product.a.rows,), (product.a,), product.b)
        own = mistakes(result, one, replace(call, alphas=(product.alpha,)), None if bias is None else bias[i])
        if own is not None:
            return f"product {i}: {own}"
    return None
