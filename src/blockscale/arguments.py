"""Checks of the arguments of products. Each raises TypeError or ValueError naming the argument, what came and what is
allowed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blockscale.formats.layouts import GROUPED
from blockscale.tensor import NVFP4Tensor, check_layout

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, "relu", "gelu", "silu")
_PACKED_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)


def kind(x: Any) -> str:
    return f"{x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__


def operand(
    name: str, x: NVFP4Tensor | Tensor, scales: Tensor | None, k: int | None, layout: str
) -> NVFP4Tensor | Tensor:
    """An operand as given, or the raw form wrapped."""
    if scales is None:
        if not isinstance(x, NVFP4Tensor) and isinstance(x, Tensor) and x.dtype in _PACKED_DTYPES:
            raise ValueError(f"{name}_sf: missing; {name} holds packed codes ({x.dtype})")
        return x
    if not isinstance(x, Tensor) or x.dtype not in _PACKED_DTYPES:
        raise TypeError(
            f"{name}: {kind(x)}, expected packed codes (uint8 or float4_e2m1fn_x2), since {name}_sf is given"
        )
    check_layout(layout, "sf_layout")
    if layout == GROUPED:
        raise ValueError(f"sf_layout: {layout!r}, expected 'linear' or '128x4'; use NVFP4Tensor.from_parts")
    if x.ndim < 2:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected at least 2 dimensions (..., rows, K/2)")
    size = (*x.shape[:-1], 2 * x.shape[-1] if k is None else k)
    try:
        return NVFP4Tensor.from_parts(x, scales, shape=size, layout=layout)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} (raw): {error}") from error


def check_pair(a: NVFP4Tensor | Tensor, b: NVFP4Tensor) -> None:
    if not isinstance(a, NVFP4Tensor):
        if not isinstance(a, Tensor):
            raise TypeError(f"a: {kind(a)}, expected an NVFP4Tensor or a floating tensor")
        if a.dtype not in FLOAT_DTYPES:
            raise TypeError(f"a: dtype {a.dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
        if a.requires_grad and torch.is_grad_enabled():
            raise ValueError("a: requires grad, but gemm has no backward yet; call it under torch.no_grad()")
    if a.ndim < 2:
        raise ValueError(f"a: shape {tuple(a.shape)}, expected at least 2 dimensions (..., M, K)")
    if a.device != b.device:
        raise ValueError(f"a: on {a.device}, but b is on {b.device}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a: K = {a.shape[-1]}, but b has K = {b.shape[-1]}")


def batch_shape(a: NVFP4Tensor | Tensor, b: NVFP4Tensor) -> torch.Size:
    try:
        return torch.Size(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ValueError(
            f"a: batch dimensions {tuple(a.shape[:-2])} do not broadcast with b's {tuple(b.shape[:-2])}"
        ) from None


def check_alpha(alpha: float | Tensor | None, device: torch.device) -> float:
    if alpha is None:
        return 1.0
    if isinstance(alpha, Tensor):
        if alpha.dtype != torch.float32 or alpha.shape != () or alpha.device != device:
            raise ValueError(
                f"alpha: {alpha.dtype} tensor of shape {tuple(alpha.shape)} on {alpha.device}, "
                f"expected fp32 of shape () on {device}"
            )
    elif isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha: {kind(alpha)}, expected a float or an fp32 tensor of shape ()")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha: {float(alpha)}, expected a finite number")
    return float(alpha)


def check_bias(bias: Tensor | None, n: int, device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in FLOAT_DTYPES:
        raise TypeError(f"bias: {kind(bias)}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if bias.shape != (n,) or bias.device != device:
        raise ValueError(f"bias: shape {tuple(bias.shape)} on {bias.device}, expected ({n},) on {device}")
    return bias


def check_activation(activation: str | None) -> str | None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


def output(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, inputs: dict[str, Any]
) -> Tensor:
    """`out`, checked, or a new tensor."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"out_dtype: {dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, Tensor) or out.dtype != dtype:
        raise TypeError(f"out: {kind(out)}, expected a tensor of out_dtype, {dtype}")
    if out.shape != shape or out.device != device:
        raise ValueError(f"out: shape {tuple(out.shape)} on {out.device}, expected {tuple(shape)} on {device}")
    if _overlaps_itself(out):
        raise ValueError(f"out: strides {out.stride()} make elements share memory")
    for name, value in inputs.items():
        if any(overlap(out, part) for part in _parts(value)):
            raise ValueError(f"out: overlaps {name}")
    return out


def _parts(value: Any) -> list[Tensor]:
    if isinstance(value, NVFP4Tensor):
        return [value.codes, value.scales, value.global_scale]
    if isinstance(value, list):
        return [part for element in value for part in _parts(element)]
    return [value] if isinstance(value, Tensor) else []


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    (x0, x1), (y0, y1) = _address_range(x), _address_range(y)
    return x0 < y1 and y0 < x1


def _address_range(x: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + span * x.element_size()


def _overlaps_itself(x: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((t, s) for t, s in zip(x.stride(), x.shape, strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
