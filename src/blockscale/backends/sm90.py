"""The sm_90a backend (H100, H200). Activations in fp16 or bf16 by one weight in layout "fragment": the kernels of
`kernels/sm90.py`. Everything else, and more rows than kernels are good for: operands are expanded on the device,
exactly, and go through torch's matmul; no weight is kept expanded, so that saves memory and costs time.

What the result rests on: code x scale has six significand bits and lies between 2^-10 and 2688,
exact in bf16 and fp16, so products are exact and sums are fp32; global scales, alpha, bias and activation come after,
in fp32. What torch's matmul loses of long sums, docs/hopper.md says. Nothing looks at a value or copies from the host,
so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale.backends import gpu, groups, loop
from blockscale.config import Config
from blockscale.families.sm90.grouped.choice import MOST_ROWS
from blockscale.formats.layouts import BLOCK, FRAGMENT, LINEAR
from blockscale.grouped import Grouped
from blockscale.launch import emulated
from blockscale.problem import target_named
from blockscale.quantize.quantizer import quantize_into
from blockscale.tensor import NVFP4Tensor

_STRIP = 1 << 25  # elements of a weight that are expanded at a time
ROW_ELEMENTS = 8  # a kernel's rows of activations start at multiples of 16 bytes

TARGET = target_named("sm_90a")
ACTIVATIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def why_not() -> str | None:
    """None if torch sees a GPU of compute capability 9.0, or an emulator of one is active."""
    active = emulated.active()
    if active is not None and active.target.arch == TARGET.arch:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if TARGET.capability in found:
        return None
    return f"needs a GPU of compute capability 9.0; here is {found[0][0]}.{found[0][1]}"


def prepare(
    a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out: Tensor | NVFP4Tensor, **options: Any
) -> Callable[[], gpu.Call | None]:
    """`gemm` with these arguments, to be called when all products of a call are prepared; what cannot be done is
    refused before that.

    Raises:
        ValueError: as `check`. What `gpu.prepare` raises.
    """
    if _by_kernel(a, b, out):
        assert isinstance(a, Tensor)
        missing = -a.shape[-1] % ROW_ELEMENTS
        if not missing:
            return gpu.prepare(a, b, out, target=TARGET, **options)
        padded = torch.nn.functional.pad(a, (0, missing))  # what is beyond k meets zeros in the units
        launch = gpu.prepare(padded, b, out, target=TARGET, **options)
        return lambda: _nothing(launch())  # its `Call` is for operands of the larger k
    check(a, options.get("invariant", False), options.get("config"))
    return partial(gemm, a, b, out, **options)


def prepare_grouped(product: Grouped, **options: Any) -> Callable[[], object]:
    """One launch of the kernel for groups where it can and they have few rows, or it is asked for; otherwise a loop
    over single products, and the host reads the sizes. Raises: as `prepare`."""
    a, b = product.a, product.b
    floating = isinstance(a, Tensor) and a.dtype in (torch.float16, torch.bfloat16)
    few = a.shape[-2] <= MOST_ROWS * (1 if product.form == "masked" else product.groups)
    if not floating or b.layout != FRAGMENT or not (few or options.get("config") is not None):
        return loop.prepare(prepare, product, **options)
    assert isinstance(a, Tensor)
    missing = -a.shape[-1] % ROW_ELEMENTS
    if not missing:
        return groups.prepare(product, target=TARGET, **options)
    padded = replace(product, a=torch.nn.functional.pad(a, (0, missing)))  # as in `prepare`
    launch = groups.prepare(padded, target=TARGET, **options)
    return lambda: _nothing(launch())


def _nothing(call: object) -> None:
    """None, whatever comes."""


def _by_kernel(a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out: Tensor | NVFP4Tensor) -> bool:
    """Whether a kernel does the product."""
    floating = isinstance(a, Tensor) and a.dtype in (torch.float16, torch.bfloat16)
    return floating and b.layout == FRAGMENT and b.ndim <= 2 and isinstance(out, Tensor)


def check(a: NVFP4Tensor | Tensor, invariant: bool, config: Config | None = None) -> None:
    """What torch's matmul is not asked for.

    Raises:
        ValueError: invariant results or a configuration are asked for, or fp32 ones while torch multiplies fp32 in
            TF32.
    """
    kernels = "needs fp16 or bf16 activations and one weight in layout 'fragment'"
    if invariant:
        raise ValueError(f"invariant: True, but on sm90 that {kernels}; otherwise the order of summation depends on M")
    if config is not None:
        raise ValueError(f"config: {config}, expected None: on sm90 a configuration {kernels}")
    fp32 = not isinstance(a, NVFP4Tensor) and a.dtype == torch.float32
    if fp32 and a.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        raise ValueError("a: float32, while torch.backends.cuda.matmul.allow_tf32 is set; the result would be TF32's")


def gemm(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Tensor | NVFP4Tensor,
    *,
    alpha: float | Tensor = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
    config: Config | None = None,
) -> None:
    """out = act(alpha x a @ b^T + bias), quantised if `out` is an NVFP4Tensor; the caller has checked the arguments.

    Raises:
        ValueError: as `check`.
    """
    check(a, invariant, config)
    if isinstance(out, NVFP4Tensor):
        y = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        gemm(a, b, y, alpha=alpha, bias=bias, activation=activation)
        quantize_into(y, out)
        return
    dtype = torch.bfloat16 if isinstance(a, NVFP4Tensor) else a.dtype
    if out.numel() == 0:
        return
    rows = expand(a, dtype) if isinstance(a, NVFP4Tensor) else a
    step = max(1, _STRIP // b.shape[-1])
    b = b.with_layout(LINEAR)
    codes, scales = b.codes, b.scales
    for start in range(0, b.shape[-2], step):
        strip = slice(start, start + step)
        weight = _values(codes[..., strip, :], scales[..., strip, :], dtype)[..., : b.shape[-1]]
        y = _product(rows, weight).mul_(b.global_scale)
        if isinstance(a, NVFP4Tensor):
            y.mul_(a.global_scale)
        y.mul_(alpha)
        if bias is not None:
            y.add_(bias[strip])
        out[..., strip] = y if activation is None else ACTIVATIONS[activation](y)


def expand(t: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """code x scale, (..., M, K) in `dtype`, exact."""
    t = t.with_layout(LINEAR)
    return _values(t.codes, t.scales, dtype)[..., : t.shape[-1]]


def _values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., R, K_pad) from packed codes and linear scales.

    E2M1's exponent and mantissa, put where bf16 has its own, make a number that is 2^126 too small: the difference
    between the two formats' exponent biases. That holds for E2M1's subnormal 0.5 too.
    """
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).to(torch.int16)
    bits = ((nibbles & 7) << 6) | ((nibbles & 8) << 12)
    values = bits.view(torch.bfloat16).float().mul_(2.0**126)
    values.view(*scales.shape, BLOCK).mul_(scales.float().unsqueeze(-1))
    return values.to(dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., M, K) @ weight (..., N, K)^T with fp32 sums, (..., M, N) fp32."""
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return x.float() @ weight.float().mT
    if math.prod(weight.shape[:-2]) == 1:
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[-2:]).T, out_dtype=torch.float32)
        batch = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])  # type: ignore[no-untyped-call]
        return y.view(*batch, x.shape[-2], weight.shape[-2])
    batch = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])  # type: ignore[no-untyped-call]
    left, right = (t.expand(*batch, -1, -1).flatten(0, -3) for t in (x, weight))
    return torch.bmm(left, right.mT, out_dtype=torch.float32).view(*batch, x.shape[-2], weight.shape[-2])
