"""Checks of the arguments of products. Each raises TypeError or ValueError naming the argument, what came and what is
allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockscale.formats.layouts import ATOMS, GROUPED, LINEAR
from blockscale.tensor import FLOAT_DTYPES, LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE, NVFP4Tensor, as_float

ACTIVATIONS = (None, "relu", "gelu", "silu")
NVFP4_DTYPE = torch.float4_e2m1fn_x2
_PACKED_DTYPES = (torch.uint8, NVFP4_DTYPE)


def kind(x: Any) -> str:
    return f"{x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__


def operand(
    name: str, x: NVFP4Tensor | Tensor, scales: Tensor | None, k: int | None, layout: str
) -> NVFP4Tensor | Tensor:
    """An operand as given, or the raw form wrapped."""
    if not isinstance(layout, str) or layout not in (LINEAR, ATOMS):
        hint = "; use NVFP4Tensor.from_parts" if layout == GROUPED else ""
        raise ValueError(f"sf_layout: {layout!r}, expected 'linear' or '128x4'{hint}")
    if scales is None:
        if not isinstance(x, NVFP4Tensor) and isinstance(x, Tensor) and x.dtype in _PACKED_DTYPES:
            raise ValueError(f"{name}_sf: missing; {name} holds packed codes ({x.dtype})")
        return x
    if not isinstance(x, Tensor) or x.dtype not in _PACKED_DTYPES:
        raise TypeError(
            f"{name}: {kind(x)}, expected packed codes (uint8 or float4_e2m1fn_x2), since {name}_sf is given"
        )
    if not isinstance(scales, Tensor):
        raise TypeError(f"{name}_sf: {kind(scales)}, expected a float8_e4m3fn tensor")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
        raise TypeError(f"k: {kind(k)}, expected an integer")
    if x.ndim < 2:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected at least 2 dimensions (..., rows, K/2)")
    size = (*x.shape[:-1], 2 * x.shape[-1] if k is None else k)
    try:
        return NVFP4Tensor.from_parts(x, scales, shape=size, layout=layout)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} (raw): {error}") from error


def check_pair(a: Any, b: Any, a_name: str = "a", b_name: str = "b") -> NVFP4Tensor:
    """That `a` and `b` are operands of one product, batch dimensions apart. Returns `b`."""
    if not isinstance(b, NVFP4Tensor):
        raise TypeError(f"{b_name}: {kind(b)}, expected an NVFP4Tensor, or packed codes with {b_name}_sf")
    if not isinstance(a, NVFP4Tensor):
        if not isinstance(a, Tensor):
            raise TypeError(f"{a_name}: {kind(a)}, expected an NVFP4Tensor or a floating tensor")
        if a.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{a_name}: dtype {a.dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
        check_plain(a_name, a)
    if a.ndim < 2:
        raise ValueError(f"{a_name}: shape {tuple(a.shape)}, expected at least 2 dimensions (..., M, K)")
    if a.device != b.device:
        raise ValueError(f"{a_name}: on {a.device}, but {b_name} is on {b.device}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"{a_name}: K = {a.shape[-1]}, but {b_name} has K = {b.shape[-1]}")
    return b


def check_plain(name: str, x: Tensor) -> None:
    """That `x` is dense, and that no gradient would be lost."""
    if x.layout != torch.strided:
        raise TypeError(f"{name}: layout {x.layout}, expected a dense tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires grad; expected one that does not, or a call under torch.no_grad()")


def batch_shape(a: NVFP4Tensor | Tensor, b: NVFP4Tensor) -> torch.Size:
    try:
        return torch.Size(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # torch's own loads sympy, 30 MiB
    except ValueError:
        raise ValueError(
            f"a: batch dimensions {tuple(a.shape[:-2])} do not broadcast with b's {tuple(b.shape[:-2])}"
        ) from None


def check_alpha(alpha: Any, device: torch.device) -> float | Tensor:
    """A finite float; or the tensor that was given, whose value is looked at on the CPU alone: a GPU would wait."""
    if alpha is None:
        return 1.0
    if isinstance(alpha, Tensor):
        if alpha.dtype != torch.float32 or alpha.shape != () or alpha.device != device:
            raise ValueError(
                f"alpha: {alpha.dtype} tensor of shape {tuple(alpha.shape)} on {alpha.device}, "
                f"expected fp32 of shape () on {device}"
            )
        check_plain("alpha", alpha)
        if device.type != "cpu":
            return alpha
    elif isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise TypeError(f"alpha: {kind(alpha)}, expected a float or an fp32 tensor of shape ()")
    value = float(alpha) if isinstance(alpha, Tensor) else as_float(alpha)
    if not math.isfinite(value):
        raise ValueError(f"alpha: {value}, expected a finite number")
    return alpha if isinstance(alpha, Tensor) else value


def check_bias(bias: Tensor | None, n: int, device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in FLOAT_DTYPES:
        raise TypeError(f"bias: {kind(bias)}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if bias.shape != (n,) or bias.device != device:
        raise ValueError(f"bias: shape {tuple(bias.shape)} on {bias.device}, expected ({n},) on {device}")
    check_plain("bias", bias)
    return bias


def check_activation(activation: str | None) -> str | None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


def check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        hint = ", or an NVFP4Tensor as out, see NVFP4Tensor.zeros" if dtype == NVFP4_DTYPE else ""
        raise TypeError(f"out_dtype: {dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}{hint}")


def quantised_output(
    out: NVFP4Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layouts: tuple[str, ...] = (LINEAR, ATOMS),
) -> NVFP4Tensor:
    """`out`, checked: what the result is quantised into, with the global scale that it has."""
    if dtype not in (torch.bfloat16, NVFP4_DTYPE):
        raise TypeError(f"out_dtype: {dtype}, but out is an NVFP4Tensor; expected {NVFP4_DTYPE} or the default")
    if out.shape != shape or out.device != device:
        raise ValueError(f"out: shape {tuple(out.shape)} on {out.device}, expected {tuple(shape)} on {device}")
    if out.layout not in layouts:
        raise ValueError(f"out: layout {out.layout!r}, expected {' or '.join(map(repr, layouts))}")
    for part in (out.codes, out.scales):
        if type(part) is not Tensor or not part.is_contiguous():
            raise ValueError("out: its codes or scales have gaps; expected contiguous ones, as NVFP4Tensor.zeros makes")
    if device.type == "cpu" and not SMALLEST_GLOBAL_SCALE <= float(out.global_scale) <= LARGEST_GLOBAL_SCALE:
        raise ValueError(f"out: global scale {float(out.global_scale)}, expected 2^-126 to {LARGEST_GLOBAL_SCALE:.4g}")
    return out


def output(name: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out`, checked, or a new tensor. Whether it overlaps an input is for `check_overlap`."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, Tensor) or out.dtype != dtype:
        raise TypeError(f"{name}: {kind(out)}, expected a tensor of out_dtype, {dtype}")
    check_plain(name, out)
    if out.shape != shape or out.device != device:
        raise ValueError(f"{name}: shape {tuple(out.shape)} on {out.device}, expected {tuple(shape)} on {device}")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: made in inference mode, and can be written only there")
    if _may_overlap_itself(out):
        raise ValueError(f"{name}: strides {out.stride()} make elements share memory")
    return out


def check_overlap(outputs: Mapping[str, Tensor | NVFP4Tensor], inputs: dict[str, Any]) -> None:
    """That no output shares memory with an input or with another output; a global scale is an input."""
    outs = {name: [t] if isinstance(t, Tensor) else [t.codes, t.scales] for name, t in outputs.items()}
    units = {f"{name}.global_scale": t.global_scale for name, t in outputs.items() if isinstance(t, NVFP4Tensor)}
    inputs = inputs | units
    pieces = [(name, t, True) for name, parts in outs.items() for t in parts]
    pieces += [(name, t, False) for name, value in inputs.items() for t in _parts(value)]
    ranges = sorted(
        (*_address_range(t), i) for i, (_, t, _) in enumerate(pieces) if t.numel() and t.device.type != "meta"
    )
    open_ranges: list[tuple[int, int, int]] = []
    for start, stop, i in ranges:
        open_ranges = [earlier for earlier in open_ranges if earlier[1] > start]
        for _, _, j in open_ranges:
            (name, x, written), (other, y, other_written) = pieces[i], pieces[j]
            if (written or other_written) and _share_memory(x, y):
                raise ValueError(f"{name}: overlaps {other}" if written else f"{other}: overlaps {name}")
        open_ranges.append((start, stop, i))


def _parts(value: Any) -> list[Tensor]:
    if isinstance(value, NVFP4Tensor):
        return [value.codes, value.scales, value.global_scale]
    if isinstance(value, (list, tuple)):
        return [part for element in value for part in _parts(element)]
    return [value] if isinstance(value, Tensor) else []


def _address_range(x: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + span * x.element_size()


class _Memory:
    """A tensor's addresses as numpy sees them; nothing is ever read through it."""

    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{x.element_size()}",
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(stride * x.element_size() for stride in x.stride()),
        }


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one device have a byte in common; true where that is too hard to tell."""
    if x.device != y.device:
        return False
    work: Any = 10_000  # numpy's stubs know -1 and 0 alone
    try:
        return np.shares_memory(np.asarray(_Memory(x)), np.asarray(_Memory(y)), max_work=work)
    except np.exceptions.TooHardError:
        return True


def _may_overlap_itself(x: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((t, s) for t, s in zip(x.stride(), x.shape, strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
