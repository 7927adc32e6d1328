"""What the operators of `ops.py` run: the library's own functions, on real tensors, and the gradients of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockscale import api, calls, ops, threads
from blockscale.backends import gated
from blockscale.formats import layouts
from blockscale.problem import GATED
from blockscale.quantize import quantize
from blockscale.tensor import NVFP4Tensor

_STRIP = 1 << 24  # elements of a weight that a gradient dequantises at a time


def _kernel(operator: str) -> Callable[[Callable[[SimpleNamespace], Any]], None]:
    """Registers the kernel of an operator for every device, as a function of its named arguments."""

    def register(run: Callable[[SimpleNamespace], Any]) -> None:
        def kernel(*arguments: Any) -> Any:
            with ops.executing():
                return run(ops.named(operator, arguments))

        torch.library.impl(f"blockscale::{operator}", "default", kernel)

    return register


@_kernel("quantize")
def _(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    q = quantize(
        call.x,
        method=call.method,
        global_scale=call.multiplier if call.global_scale is None else call.global_scale,
        layout=call.layout,
        group_sizes=call.group_sizes,
        nonfinite=call.nonfinite,
        activation=call.activation,
        norm_weight=call.norm_weight,
        eps=call.eps,
    )
    return q.codes, q.scales.view(torch.uint8), q.global_scale


@_kernel("fake_quantize")
def _(call: SimpleNamespace) -> Tensor:
    return quantize(call.x, global_scale=call.global_scale, layout=layouts.LINEAR).dequantize()


@_kernel("dequantize")
def _(call: SimpleNamespace) -> Tensor:
    return _wrapped(call.t, call.t_scales, call.t_unit, call.t_groups, call.t_layout, call.k).dequantize(call.dtype)


@_kernel("gemm")
def _(call: SimpleNamespace) -> Tensor:
    return _gemm(call)


@_kernel("gemm_out")
def _(call: SimpleNamespace) -> None:
    _gemm(call, out=call.out)


@_kernel("grouped_gemm")
def _(call: SimpleNamespace) -> Any:
    return _grouped_gemm(call)


@_kernel("grouped_gemm_out")
def _(call: SimpleNamespace) -> None:
    _grouped_gemm(call, out=call.out)


def _gemm(call: SimpleNamespace, **more: Any) -> Tensor:
    a, b = _pair(call)
    return api.gemm(a, b, **_epilogue(call), invariant=call.invariant, **more)


def _grouped_gemm(call: SimpleNamespace, **more: Any) -> Any:
    a, b = _pair(call)
    groups = {"group_sizes": call.group_sizes, "group_offsets": call.group_offsets, "masked_m": call.masked_m}
    return api.grouped_gemm(a, b, **groups, **_epilogue(call), **more)


def _epilogue(call: SimpleNamespace) -> dict[str, Any]:
    return {
        "alpha": _alpha(call),
        "bias": call.bias,
        "activation": call.activation,
        "out_dtype": call.out_dtype,
        "backend": call.backend,
        "config": calls.decode(call.config),
    }


@_kernel("gemm_backward")
def _(call: SimpleNamespace) -> tuple[Tensor, ...]:
    a, b = _pair(call)
    with threads.exact_arithmetic():
        found = _gradients(call.grad, a, b, _alpha(call), call.bias, call)
    return _as_asked(found, call)


@_kernel("grouped_gemm_backward")
def _(call: SimpleNamespace) -> tuple[Tensor, ...]:
    a, b = _pair(call)
    a, b = (x.with_layout(layouts.LINEAR) if isinstance(x, NVFP4Tensor) else x for x in (a, b))
    alpha = _alpha(call)
    of_a, of_alpha, of_bias = (
        torch.zeros(t.shape, dtype=torch.float32, device=t.device) if need else None
        for t, need in zip((call.a, call.alpha, call.bias), call.needs, strict=True)
    )
    with threads.exact_arithmetic():
        for e, rows in enumerate(_rows_of_groups(call)):
            one_alpha = alpha[e] if isinstance(alpha, Tensor) and alpha.ndim else alpha
            one_bias = call.bias[e] if call.bias is not None and call.bias.ndim == 2 else call.bias
            mine = _gradients(call.grad[rows], a[rows], b[e], one_alpha, one_bias, call)
            if of_a is not None and mine[0] is not None:
                of_a[rows] = mine[0]
            for total, part, inner in ((of_alpha, mine[1], 0), (of_bias, mine[2], 1)):
                if total is not None and part is not None:
                    (total[e] if total.ndim > inner else total).add_(part)
    return _as_asked((of_a, of_alpha, of_bias), call)


DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, z: torch.where(z > 0, grad, 0.0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}
"""(gradient of act(z), z) -> gradient of z."""


def _gradients(
    grad: Tensor, a: Any, b: NVFP4Tensor, alpha: float | Tensor, bias: Tensor | None, call: SimpleNamespace
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of act(alpha x a @ b^T + bias): gradients of `a`, alpha and bias in fp32, for those that `call.needs` names."""
    product = partial(api.gemm, a, b, out_dtype=torch.float32, backend=call.backend)
    grad = grad.float()
    if call.activation in GATED:
        gate, up = product(alpha=alpha, bias=bias).chunk(2, dim=-1)
        act = GATED[call.activation]
        grad = torch.cat((DERIVATIVES[act](grad * up, gate), grad * gated.ACTIVATIONS[act](gate)), dim=-1)
    elif call.activation is not None:
        grad = DERIVATIVES[call.activation](grad, product(alpha=alpha, bias=bias))
    of_a = (_times_weight(grad, b) * alpha).sum_to_size(a.shape) if call.needs[0] else None
    of_alpha = (grad * product()).sum() if call.needs[1] else None
    of_bias = grad.sum_to_size(grad.shape[-1:]) if call.needs[2] else None
    return of_a, of_alpha, of_bias


def _times_weight(grad: Tensor, b: NVFP4Tensor) -> Tensor:
    """grad (..., M, N) @ dequant(b) (..., N, K), fp32, by strips of rows of `b`."""
    n, k = b.shape[-2:]
    step = max(1, _STRIP // k)
    b = b.with_layout(layouts.LINEAR)
    total = grad[..., :step] @ b[..., :step, :].dequantize()
    for start in range(step, n, step):
        rows = slice(start, start + step)
        total += grad[..., rows] @ b[..., rows, :].dequantize()
    return total


def _as_asked(found: tuple[Tensor | None, ...], call: SimpleNamespace) -> tuple[Tensor, ...]:
    """Gradients in the dtypes of what they belong to; an empty tensor stands for one that nobody needs."""
    none = call.grad.new_empty((0,), dtype=torch.float32)
    given = (call.a, call.alpha, call.bias)
    return tuple(
        none.clone() if part is None else part.to(t.dtype).contiguous() for part, t in zip(found, given, strict=True)
    )


def _rows_of_groups(call: SimpleNamespace) -> Iterator[Any]:
    """For each group, the index of its rows in `a`."""
    if call.masked_m is not None:
        for e, count in enumerate(call.masked_m.tolist()):
            yield e, slice(0, count)
        return
    if call.group_offsets is not None:
        ends = call.group_offsets.tolist()[-call.b.shape[0] :]
    else:
        sizes = call.a_groups if call.group_sizes is None else call.group_sizes
        ends = sizes.cumsum(0).tolist()
    for start, stop in zip([0, *ends], ends, strict=False):
        yield slice(start, stop)


def _pair(call: SimpleNamespace) -> tuple[Any, Any]:
    a: Any = call.a
    if call.a_scales is not None:
        a = _wrapped(call.a, call.a_scales, call.a_unit, call.a_groups, call.a_layout, call.k)
    return a, _wrapped(call.b, call.b_scales, call.b_unit, call.b_groups, call.b_layout, call.k)


def _wrapped(codes: Tensor, scales: Tensor, unit: Any, groups: Any, layout: str, k: int) -> NVFP4Tensor:
    shape = torch.Size((*ops.outer_sizes(codes, scales, layout), k))
    scales = scales.view(torch.float8_e4m3fn)
    if layout == layouts.FRAGMENT:
        scales = scales.view(0)
    if unit is None:  # the raw form; alpha carries the global scales
        return NVFP4Tensor.from_parts(codes, scales, shape=shape, layout=layout)
    offsets = None if groups is None else layouts.scale_offsets(groups)
    return NVFP4Tensor(codes, scales, unit, layout, shape, groups, offsets)


def _alpha(call: SimpleNamespace) -> Any:
    return call.factor if call.alpha is None else call.alpha
