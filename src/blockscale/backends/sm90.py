"""The sm_90a backend (H100, H200). Activations in fp16, bf16 or NVFP4 by one weight in layout "fragment": the kernels
of `kernels/hopper.py`, NVFP4 expanded before (`backends/expanded.py`). Everything else, and what is asked to
(`Config.expand`): weights are expanded on the device, exactly, and go through cuBLAS (`backends/matmul.py`); none is
kept expanded, so that saves memory and costs time.

What the result rests on: code x scale has six significand bits and lies between 2^-10 and 2688,
exact in bf16 and fp16, so products are exact and sums are fp32; global scales, alpha, bias and activation come after,
in fp32. Nothing looks at a value or copies from the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale.backends import expanded, gpu, groups, loop, matmul
from blockscale.config import Config
from blockscale.families.sm90.constraints import unexpandable
from blockscale.families.sm90.grouped.choice import MOST_ROWS
from blockscale.formats.layouts import FRAGMENT
from blockscale.grouped import Grouped
from blockscale.heuristics import Unsupported
from blockscale.launch import emulated
from blockscale.problem import target_named
from blockscale.quantize.quantizer import quantize_into
from blockscale.tensor import NVFP4Tensor

ROW_ELEMENTS = 8  # a kernel's rows of activations start at multiples of 16 bytes

TARGET = target_named("sm_90a")


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
) -> Callable[[], gpu.Call | expanded.Call | None]:
    """`gemm` with these arguments, to be called when all products of a call are prepared; what cannot be done is
    refused before that.

    Raises:
        ValueError: as `check`. What `gpu.prepare` raises.
    """
    if _by_kernel(a, b, out, options):
        if isinstance(a, NVFP4Tensor):
            assert isinstance(out, Tensor)
            return expanded.prepare(a, b, out, target=TARGET, **options)
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


def _by_kernel(a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out: Tensor | NVFP4Tensor, options: Mapping[str, Any]) -> bool:
    """Whether a kernel does the product: it can, unless cuBLAS is asked for."""
    kernels_take = isinstance(a, NVFP4Tensor) or a.dtype in (torch.float16, torch.bfloat16)
    if not kernels_take or b.layout != FRAGMENT or b.ndim > 2 or not isinstance(out, Tensor):
        return False
    config = options.get("config")
    return config is None or not config.expand


def check(a: NVFP4Tensor | Tensor, invariant: bool, config: Config | None = None) -> None:
    """What only kernels do.

    Raises:
        ValueError: invariant results or a configuration are asked for, or fp32 ones while torch multiplies fp32 in
            TF32.
    """
    kernels = "needs fp16, bf16 or NVFP4 activations and one weight in layout 'fragment'"
    if invariant:
        raise ValueError(f"invariant: True, but on sm90 that {kernels}; otherwise the order of summation depends on M")
    if config is not None and not config.expand:
        raise ValueError(f"config: {config}, expected None or one that expands: on sm90 any other {kernels}")
    if config is not None and (reason := unexpandable(config)) is not None:
        raise Unsupported(str(reason))
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
        gemm(a, b, y, alpha=alpha, bias=bias, activation=activation, config=config)
        quantize_into(y, out)
        return
    if out.numel():
        strip = 0 if config is None else config.expand
        matmul.product(a, b, out, target=TARGET, alpha=alpha, bias=bias, activation=activation, strip=strip)
