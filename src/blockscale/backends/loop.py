"""Grouped products as a loop over single ones: for backends without kernels for them. The host reads the sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from blockscale.backends import gated
from blockscale.config import Config
from blockscale.formats.layouts import FRAGMENT, GROUPED, LINEAR, scale_offsets
from blockscale.grouped import Grouped
from blockscale.quantize.quantizer import quantize_into
from blockscale.tensor import NVFP4Tensor


def prepare(
    single: gated.Prepare, product: Grouped, *, activation: str | None = None, config: Config | None = None
) -> Callable[[], None]:
    """Every group by `single`, a backend's `prepare`, checked and planned but for the launches."""
    out, one = product.out, gated.of(single)
    y = torch.empty(out.shape, dtype=torch.float32, device=out.device) if isinstance(out, NVFP4Tensor) else out
    launches = [
        one(a, weight, rows, alpha=alpha, bias=bias, activation=activation, config=config)
        for a, weight, rows, alpha, bias in _groups(product, y)
    ]

    def launch() -> None:
        for each in launches:
            each()
        if y is not out:
            store(y, product)

    return launch


def _groups(product: Grouped, y: Tensor) -> Iterator[tuple[Any, NVFP4Tensor, Tensor, Any, Tensor | None]]:
    """Operands, rows of the result, alpha and bias of each group."""
    a = product.a.with_layout(LINEAR) if isinstance(product.a, NVFP4Tensor) else product.a
    alpha, bias = product.alpha, product.bias
    start = 0
    for e, size in enumerate(product.sizes.tolist()):
        if product.form == "masked":
            left, rows = a[e][:size], y[e, :size]
        else:
            left, rows = a[start : start + size], y[start : start + size]
            start += size
        factor = alpha[e] if isinstance(alpha, Tensor) and alpha.ndim else alpha
        yield left, _matrix(product.b, e), rows, factor, bias[e] if bias is not None and bias.ndim == 2 else bias


def _matrix(b: NVFP4Tensor, e: int) -> NVFP4Tensor:
    """Matrix `e`, in the layout that it has and where it lies."""
    scales = b.scales if b.layout == FRAGMENT else b.scales[e]
    return NVFP4Tensor(b.codes[e], scales, b.global_scale, b.layout, b.shape[1:])


def store(y: Tensor, product: Grouped) -> None:
    """Rounds or quantises `y`, fp32, into the result; in the masked form rows beyond the mask stay as they are. No size
    is read."""
    out, inside = product.out, _inside(product)
    if isinstance(out, Tensor):
        out.copy_(y if inside is None else torch.where(inside, y.to(out.dtype), out))
        return
    made = NVFP4Tensor.zeros(out.shape, global_scale=out.global_scale, layout=LINEAR, device=out.device)
    quantize_into(y if inside is None else torch.where(inside, y, 0.0), made)
    if inside is not None:
        before = out.linear_scales().view(torch.uint8)
        made.codes.copy_(torch.where(inside, made.codes, out.codes))
        made.scales.view(torch.uint8).copy_(torch.where(inside, made.scales.view(torch.uint8), before))
    take_over(made, out, product.sizes)


def _inside(product: Grouped) -> Tensor | None:
    """(E, max_m, 1): which rows are within the mask; None in the contiguous form, where all are."""
    if product.form != "masked":
        return None
    place = torch.arange(product.out.shape[1], dtype=torch.int32, device=product.out.device)
    return (place < product.sizes.unsqueeze(1)).unsqueeze(-1)


def take_over(made: NVFP4Tensor, out: NVFP4Tensor, sizes: Tensor) -> None:
    """Copies a result into `out`; one of layout "128x4-grouped" belongs to groups of these sizes from then on."""
    grouped = made.with_layout(out.layout, sizes if out.layout == GROUPED else None)
    out.codes.copy_(grouped.codes)
    out.scales.view(torch.uint8).copy_(grouped.scales.view(torch.uint8))
    belong_to(out, sizes)


def belong_to(out: NVFP4Tensor, sizes: Tensor) -> None:
    """Says in `out`, if its layout knows groups, that they have these sizes."""
    if out.layout == GROUPED:
        assert out.group_sizes is not None
        assert out.scale_offsets is not None
        out.scale_offsets.copy_(scale_offsets(sizes))
        if out.group_sizes.data_ptr() != sizes.data_ptr():
            out.group_sizes.copy_(sizes)
