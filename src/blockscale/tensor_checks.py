"""What the parts of an NVFP4Tensor and an index into it may be. Each check is one typed error naming the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockscale.formats import fragment, layouts
from blockscale.formats.layouts import BLOCK, FRAGMENT, K_ALIGN, LINEAR, ROW_ALIGN, round_up


def check_shape(codes: Tensor, shape: Sequence[int]) -> torch.Size:
    """`shape` as a torch.Size, if it can be the logical shape of `codes`."""
    size = _size(shape)
    if len(size) != codes.ndim or size[:-1] != codes.shape[:-1]:
        raise ValueError(f"shape: {tuple(size)} does not match codes of shape {tuple(codes.shape)}")
    k = size[-1]
    if k < 1:
        raise ValueError(f"shape: K = {k}, expected at least 1")
    allowed = sorted({(k + 1) // 2, round_up(k, K_ALIGN) // 2})
    if codes.shape[-1] not in allowed:
        raise ValueError(f"codes: {codes.shape[-1]} bytes a row, expected {' or '.join(map(str, allowed))} for K = {k}")
    return size


def _size(shape: Sequence[int]) -> torch.Size:
    if not isinstance(shape, (tuple, list)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"shape: {shape!r}, expected a sequence of integers")
    return torch.Size(shape)


def check_fragment(codes: Tensor, scales: Tensor, shape: Sequence[int] | None) -> torch.Size:
    """`shape` as a torch.Size, if `codes` can be its units."""
    if shape is None:
        raise ValueError(f"shape: missing; layout {FRAGMENT!r} needs it")
    size = _size(shape)
    if len(size) < 2 or min(size[:-1]) < 0 or size[-1] < 1:
        raise ValueError(f"shape: {tuple(size)}, expected (..., M, K) with K of at least 1")
    expected = fragment.shape(size[:-2], size[-2], layouts.blocks(size[-1]))
    if codes.dtype != torch.uint8 or codes.shape != expected:
        raise ValueError(
            f"codes: {codes.dtype} of shape {tuple(codes.shape)}, expected torch.uint8 of shape {expected} for layout "
            f"{FRAGMENT!r} and logical shape {tuple(size)}"
        )
    if scales.numel():
        raise ValueError(f"scales: shape {tuple(scales.shape)}, expected none beside units of layout {FRAGMENT!r}")
    return size


def check_scale_shape(scales: Tensor, layout: str, size: torch.Size, groups: Tensor | None) -> Tensor:
    if layout == FRAGMENT:
        return scales.reshape(0)
    *batch, rows, k = size
    columns = layouts.blocks(k)
    if layout == LINEAR:
        allowed = [torch.Size((*batch, rows, c)) for c in sorted({-(-k // BLOCK), columns})]
    else:
        padded = round_up(rows, ROW_ALIGN) if groups is None else layouts.grouped_rows(rows, len(groups))
        allowed = [torch.Size((*batch, padded, columns))]
    if scales.shape in allowed:
        return scales
    if layout != LINEAR and scales.ndim == 1 and scales.numel() == allowed[0].numel():
        return scales.reshape(allowed[0])
    raise ValueError(
        f"scales: shape {tuple(scales.shape)}, expected {' or '.join(str(tuple(s)) for s in allowed)} "
        f"for layout {layout!r} and logical shape {tuple(size)}"
    )


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    index = index if isinstance(index, tuple) else (index,)
    if index.count(Ellipsis) > 1 or len(index) - index.count(Ellipsis) > ndim:
        raise IndexError(f"index: {len(index)} entries for {ndim} dimensions")
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    fill = (slice(None),) * (ndim - (len(index) - index.count(Ellipsis)))
    full = (*index[:at], *fill, *index[at + 1 :])
    for entry in full[:-2]:
        if isinstance(entry, bool) or not isinstance(entry, (int, slice)):
            raise TypeError(f"index: {type(entry).__name__} in a batch dimension, expected an integer or a slice")
        if isinstance(entry, slice) and (entry.step or 1) < 1:
            raise ValueError(f"index: {entry!r} in a batch dimension, expected a step of at least 1")
    return full


def unit_slice(entry: Any, size: int, name: str) -> tuple[int, int]:
    if not isinstance(entry, slice) or entry.step not in (None, 1):
        raise TypeError(f"index: {entry!r} in dimension {name}, expected a slice of step 1")
    start, stop, _ = entry.indices(size)
    return start, max(start, stop)
