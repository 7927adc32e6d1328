"""The quantiser: tiles that stay in cache, every step an elementwise fp32 operation, so that the bits of a block depend
on nothing but its 16 values and the global scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockscale import ops, threads
from blockscale.formats import e2m1, e4m3, layouts
from blockscale.formats.layouts import BLOCK, FRAGMENT, GROUPED, K_ALIGN, LINEAR, round_up
from blockscale.plan import Launcher
from blockscale.problem import SWIGLU
from blockscale.quantize import before, device
from blockscale.quantize.methods import METHODS, Method
from blockscale.tensor import (
    FLOAT_DTYPES,
    LARGEST_GLOBAL_SCALE,
    SMALLEST_GLOBAL_SCALE,
    NVFP4Tensor,
    as_global_scale,
    check_group_sizes,
    check_layout,
)

_NONFINITE = ("error", "saturate")
_TILE = 1 << 18  # elements; a thread works in four buffers of this size, 4 bytes an element
_F32_MAGNITUDE = 0x7FFFFFFF
_LARGEST = torch.finfo(torch.float32).max


def quantize(
    x: Tensor,
    *,
    method: str = "rtn",
    global_scale: float | Tensor | None = None,
    layout: str = "128x4",
    group_sizes: Tensor | None = None,
    nonfinite: str = "error",
    seed: int | None = None,
    activation: str | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> NVFP4Tensor:
    """Quantise `x` to NVFP4; the result carries no gradient, also where `x` requires one. A block's bits depend on its
    values and the global scale alone, not on the batch around it, the strides, the number of threads or the device.

    On a GPU, or inside `emulated`, a kernel does it, without waiting for the GPU. A GPU's values are not looked at:
    neither those of `global_scale` and `group_sizes` nor, under nonfinite="error", those of `x`, which then count as
    under "saturate". Codes of rows that no group has are not written there, and hold anything.

    Args:
        x: (..., M, K), fp32, bf16 or fp16, on the CPU or a GPU with kernels, any strides; copied where elements of a
            row have gaps or matrices are not evenly apart. M >= 0, K >= 1.
        method: "rtn" (round to nearest), "four_over_six" (each block scaled to 6 or to 4, by squared error) or "mse"
            (nearest E4M3 scale or one of its neighbours, by squared error).
        global_scale: a positive multiplier of at least 2^-126 (float or fp32 tensor of one element). By default
            amax(x) / 2688, or amax(x) / 1536 for "four_over_six". Values beyond 2688 x global_scale saturate.
        layout: of the scales: "linear", "128x4", "128x4-grouped" or "fragment".
        group_sizes: int32 (E,) summing to M, for "128x4-grouped" and a 2-D `x`.
        nonfinite: "error" refuses NaN and infinity; "saturate" takes NaN as 0 and ±infinity as the largest magnitude
            that the global scale can hold; neither counts in amax(x).
        seed: reserved for stochastic methods, of which there is none; must be None.
        activation: "swiglu": `x` is (..., M, 2 K), and silu of its first half times its second is quantised.
        norm_weight: (K,), fp32, bf16 or fp16, on the device of `x`: that of an RMS norm which rows go through first,
            with `eps`. Both are computed in fp32 and not rounded to the dtype of `x` (docs/format.md); one at a time.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is allowed; for NaN or infinity its coordinate.

    Source: docs/format.md. Every division is IEEE fp32, round to nearest even; no reciprocals, no flush to zero.
    """
    _check_arguments(x, method, layout, nonfinite, seed)
    _check_before(x, activation, norm_weight, eps)
    groups = _groups_for(x, layout, group_sizes)
    if ops.must_trace(x, global_scale, groups, norm_weight):
        given = (global_scale, None) if isinstance(global_scale, Tensor) else (None, global_scale)
        how = layout, groups, nonfinite, activation, norm_weight, eps
        codes, scales, unit = torch.ops.blockscale.quantize(x.detach(), method, *given, *how)
        offsets = None if groups is None else layouts.scale_offsets(groups)
        shape = x.shape if activation is None else torch.Size((*x.shape[:-1], x.shape[-1] // 2))
        return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), unit, layout, shape, groups, offsets)
    with threads.exact_arithmetic():
        launcher = device.launcher_for(x.device)
        if launcher is not None:
            of_kernel: dict[str, Any] = {"method": method, "groups": groups, "activation": activation}
            of_kernel |= {"norm_weight": norm_weight, "eps": eps}
            return _by_kernel(launcher, x.detach(), global_scale, layout, nonfinite, of_kernel)
        x = before.apply(x.detach(), activation, norm_weight, eps)
        # One copy where rows of a batch do not lie in a regular grid; a matrix never needs it.
        rows = x.detach() if x.ndim == 2 else x.detach().reshape(-1, x.shape[-1])
        unit = _global_scale(global_scale, _finite_amax(rows, x.shape, nonfinite), method)
        k = x.shape[-1]
        codes = torch.empty(len(rows), round_up(k, K_ALIGN) // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(len(rows), layouts.blocks(k), dtype=torch.float8_e4m3fn, device=x.device)
        limit = None
        if nonfinite == "saturate":
            limit = min(float(e2m1.MAX * (e4m3.MAX * unit)), _LARGEST)
        _fill(rows, codes, scales, METHODS[method], unit, limit)
        batch = x.shape[:-1]
        codes, scales = codes.view(*batch, codes.shape[-1]), scales.view(*batch, scales.shape[-1])
        return NVFP4Tensor(codes, scales, unit, LINEAR, x.shape).with_layout(layout, groups)


def _by_kernel(
    launcher: Launcher,
    x: Tensor,
    global_scale: float | Tensor | None,
    layout: str,
    nonfinite: str,
    options: dict[str, Any],
) -> NVFP4Tensor:
    """`quantize` by kernels, with `options` of `device.quantise`."""
    activation, groups = options["activation"], options["groups"]
    if x.device.type == "cpu" and nonfinite == "error":
        values = before.apply(x, activation, options["norm_weight"], options["eps"])
        _finite_amax(values.reshape(-1, values.shape[-1]), values.shape, nonfinite)
    given = None if global_scale is None else _global_scale_for_kernel(global_scale, x.device)
    written = LINEAR if layout == FRAGMENT else layout
    codes, scales, unit = device.quantise(launcher, x, given, layout=written, **options)
    offsets = None if groups is None else layouts.scale_offsets(groups)
    shape = x.shape if activation is None else torch.Size((*x.shape[:-1], x.shape[-1] // 2))
    made = NVFP4Tensor(codes, scales, unit, written, shape, groups, offsets)
    return made.with_layout(layout) if layout == FRAGMENT else made


def quantize_into(x: Tensor, out: NVFP4Tensor) -> None:
    """Quantise `x`, fp32 (..., M, K), into codes and scales of `out`, padding included, as `quantize` does with method
    "rtn", the global scale of `out` and nonfinite="saturate". On any device; on a GPU nothing waits for it.

    The caller is within `exact_arithmetic`.
    """
    rows = x.reshape(-1, x.shape[-1])
    linear = out.layout == LINEAR
    shape = (*x.shape[:-1], layouts.blocks(x.shape[-1]))
    scales = out.scales if linear else torch.empty(shape, dtype=out.scales.dtype, device=x.device)
    flat = scales.view(-1, shape[-1])
    # The largest number saturates to the same codes as what the global scale can hold, which only its device knows.
    _fill(rows, out.codes.view(-1, out.codes.shape[-1]), flat, METHODS["rtn"], out.global_scale, _LARGEST)
    if not linear:
        out.scales.view(torch.uint8).copy_(layouts.swizzle(scales).view(torch.uint8).view(out.scales.shape))


def _fill(x: Tensor, codes: Tensor, scales: Tensor, method: Method, unit: Tensor, limit: float | None) -> None:
    """Write codes (M, K_pad/2) and scales (M, K_pad/16) of `x` (M, K), both whole.

    Infinities count as `limit`, and NaN as 0; None says that every value is finite.
    """
    pieces = _pieces(x)
    share = max(1, -(-len(pieces) // (4 * torch.get_num_threads())))  # some more shares than threads, for an even load

    def fill(mine: list[tuple[slice, slice]]) -> None:
        tile = _Tile(method, unit, limit)
        for rows, k in mine:
            of_codes, of_scales = (slice(k.start // n, round_up(k.stop, K_ALIGN) // n) for n in (2, BLOCK))
            tile.quantize(x[rows, k], codes[rows, of_codes], scales[rows, of_scales])

    if x.device.type == "cpu":
        threads.map_each(fill, [pieces[i : i + share] for i in range(0, len(pieces), share)])
    else:
        fill(pieces)  # another thread would not be on the caller's stream


def _pieces(x: Tensor) -> list[tuple[slice, slice]]:
    """`x` (M, K) cut into pieces of at most _TILE elements of padded storage: (rows, k), k from a multiple of 64."""
    m, k = x.shape
    columns = min(_TILE, round_up(k, K_ALIGN))
    rows = _TILE // columns
    return [
        (slice(r, min(m, r + rows)), slice(c, min(k, c + columns)))
        for r in range(0, m, rows)
        for c in range(0, k, columns)
    ]


class _Tile:
    """Buffers for one tile of rows, and the steps over them."""

    def __init__(self, method: Method, unit: Tensor, limit: float | None) -> None:
        self.method, self.unit, self.limit = method, unit, limit
        self.x = torch.empty(_TILE, dtype=torch.float32, device=unit.device)
        self.quotient, self.p, self.scratch = torch.empty(3, _TILE, dtype=torch.int32, device=unit.device).unbind(0)

    def quantize(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """x (R, k) -> codes (R, columns/2) and scales (R, columns/16), both written whole; columns is k padded."""
        columns = 2 * codes.shape[-1]
        values = self.x[: len(x) * columns]
        padded = values.view(len(x), columns)
        padded[:, : x.shape[1]].copy_(x)
        padded[:, x.shape[1] :] = 0
        if self.limit is not None:
            torch.nan_to_num_(values, nan=0.0, posinf=self.limit, neginf=-self.limit)
        magnitudes = torch.bitwise_and(values.view(torch.int32), _F32_MAGNITUDE, out=self.scratch[: len(values)])
        block_amax = magnitudes.view(-1, BLOCK).amax(dim=1).view(torch.float32)
        candidates = self.method.candidates(block_amax, self.unit)
        best = candidates[0] if len(candidates) == 1 else self._best(values, candidates)
        pairs = self._encode(values, best).view(torch.int64)  # codes in bits 0-3 and 32-35
        codes.copy_((pairs | (pairs >> 28)).view(codes.shape))  # the low byte: bits 0-3 and 4-7
        scales.copy_(best.view(scales.shape))

    def _encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """int32 codes of `values` under one E4M3 scale a block; valid until the next call."""
        size = len(values)
        d = (e4m3.decode(scales) * self.unit).unsqueeze(1)
        quotient = self.quotient[:size]
        torch.div(values.view(-1, BLOCK), d, out=quotient.view(torch.float32).view(-1, BLOCK))
        e2m1.encode_bits(quotient, self.p[:size], self.scratch[:size])
        zero = scales.view(torch.uint8) == 0
        if zero.is_cuda or bool(zero.any()):
            quotient.view(-1, BLOCK).masked_fill_(zero.unsqueeze(1), 0)
        return quotient

    def _best(self, values: Tensor, candidates: list[Tensor]) -> Tensor:
        """Of the candidates the scale with the least squared error, block by block; the first on ties."""
        best = candidates[0].view(torch.uint8)
        least = self._squared_error(values, candidates[0])
        for scales in candidates[1:]:
            error = self._squared_error(values, scales)
            better = error < least
            best = torch.where(better, scales.view(torch.uint8), best)
            least = torch.where(better, error, least)
        return best.view(torch.float8_e4m3fn)

    def _squared_error(self, values: Tensor, scales: Tensor) -> Tensor:
        """fp64 (blocks,), summed in one fixed order, so that the choice does not depend on how a sum is vectorised."""
        d = (e4m3.decode(scales) * self.unit).unsqueeze(1)
        restored = e2m1.decode(self._encode(values, scales)).view(-1, BLOCK) * d
        error = (values.view(-1, BLOCK).double() - restored).square_()
        for half in (8, 4, 2, 1):
            error = error[:, :half] + error[:, half:]
        return error.squeeze(1)


def _finite_amax(rows: Tensor, shape: torch.Size, nonfinite: str) -> Tensor:
    """fp32 (): the largest finite magnitude of `rows` (M, K), 0 when there is none.

    Raises ValueError for what `nonfinite` refuses, with its coordinate in `shape`.
    """
    pieces = _pieces(rows)
    largest = torch.zeros(len(pieces) + 1, dtype=torch.float32, device=rows.device)

    def measure(i: int) -> None:
        piece = rows[pieces[i]]
        largest[i] = torch.stack(torch.aminmax(piece)).abs().amax()
        if not torch.isfinite(largest[i]) and nonfinite == "saturate":
            largest[i] = torch.nan_to_num(piece, nan=0.0, posinf=0.0, neginf=0.0).abs().amax()

    threads.map_each(measure, range(len(pieces)))
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):
        raise ValueError(_first_nonfinite(rows, shape))
    return largest.amax()


def _first_nonfinite(rows: Tensor, shape: torch.Size) -> str:
    """The message for the first NaN or infinity in row-major order."""
    step = max(1, _TILE // rows.shape[1])
    for r in range(0, len(rows), step):
        bad = (~torch.isfinite(rows[r : r + step])).nonzero()
        if len(bad):
            row, column = r + int(bad[0, 0]), int(bad[0, 1])
            where = (*(int(i) for i in np.unravel_index(row, shape[:-1])), column)
            return f"x: {float(rows[row, column])} at {where}; allowed are finite values, or nonfinite='saturate'"
    raise AssertionError("no non-finite value found")


def global_scale_for(amax: Tensor, method: str = "rtn") -> Tensor:
    """fp32 (): the global scale that `quantize` gives to data whose largest magnitude is `amax`, fp32 ()."""
    with threads.exact_arithmetic():
        scale = (amax / METHODS[method].divisor).clamp_(min=SMALLEST_GLOBAL_SCALE)
        return torch.where(amax == 0, torch.ones_like(amax), scale)


def _global_scale(given: float | Tensor | None, amax: Tensor, method: str) -> Tensor:
    if given is None:
        return global_scale_for(amax, method)
    unit = as_global_scale(given, amax.device)
    if unit.device.type == "cpu":
        _check_global_scale(unit)
    return unit.clone()


def _global_scale_for_kernel(given: float | Tensor, device: torch.device) -> Tensor | float:
    """The memory of a tensor that is given, whose value is looked at on the CPU alone, or a number."""
    unit = as_global_scale(given, device if isinstance(given, Tensor) else torch.device("cpu"))
    if unit.device.type == "cpu":
        _check_global_scale(unit)
    return unit if isinstance(given, Tensor) else float(unit)


def _check_global_scale(unit: Tensor) -> None:
    if not SMALLEST_GLOBAL_SCALE <= float(unit) <= LARGEST_GLOBAL_SCALE:
        raise ValueError(
            f"global_scale: {float(unit)}, expected a multiplier from 2^-126 to {LARGEST_GLOBAL_SCALE:.4g}"
        )


def _check_before(x: Tensor, activation: str | None, norm_weight: Tensor | None, eps: float) -> None:
    if activation is not None:
        if activation != SWIGLU:
            raise ValueError(f"activation: {activation!r}, expected None or {SWIGLU!r}")
        if norm_weight is not None:
            raise ValueError(f"norm_weight: given, but it does not go with activation={activation!r}")
        if x.shape[-1] % 2:
            raise ValueError(f"x: last dimension {x.shape[-1]}, expected 2 K for activation={activation!r}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: {type(eps).__name__}, expected a float")
    if not 0 <= eps <= 1:
        raise ValueError(f"eps: {eps}, expected 0 to 1")
    if norm_weight is None:
        return
    if not isinstance(norm_weight, Tensor) or norm_weight.dtype not in FLOAT_DTYPES:
        got = f"dtype {norm_weight.dtype}" if isinstance(norm_weight, Tensor) else type(norm_weight).__name__
        raise TypeError(f"norm_weight: {got}, expected a tensor of {', '.join(map(str, FLOAT_DTYPES))}")
    if norm_weight.shape != x.shape[-1:] or norm_weight.device != x.device:
        found = f"shape {tuple(norm_weight.shape)} on {norm_weight.device}"
        raise ValueError(f"norm_weight: {found}, expected ({x.shape[-1]},) on {x.device}")


def _check_arguments(x: Tensor, method: str, layout: str, nonfinite: str, seed: int | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: {type(x).__name__}, expected a torch.Tensor")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x: dtype {x.dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if x.ndim < 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected at least 2 dimensions (..., M, K)")
    if x.shape[-1] < 1:
        raise ValueError(f"x: K = {x.shape[-1]}, expected at least 1")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x: on {x.device}; this version quantises on the CPU and on CUDA GPUs")
    if x.layout != torch.strided:
        raise TypeError(f"x: layout {x.layout}, expected a dense tensor")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method: {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    if nonfinite not in _NONFINITE:
        raise ValueError(f"nonfinite: {nonfinite!r}, expected one of {', '.join(map(repr, _NONFINITE))}")
    if seed is not None:
        raise ValueError(f"seed: {seed!r}, expected None: {method!r} is not stochastic")
    check_layout(layout)


def _groups_for(x: Tensor, layout: str, group_sizes: Tensor | None) -> Tensor | None:
    if group_sizes is None and layout != GROUPED:
        return None
    if group_sizes is None or layout != GROUPED:
        raise ValueError(f"group_sizes: go with layout={GROUPED!r} and only with it; layout is {layout!r}")
    if x.ndim != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected 2 dimensions for layout {GROUPED!r}")
    return check_group_sizes(group_sizes, x.shape[0], x.device)
