"""The public products as operators of torch, for whoever traces or differentiates a call.

Here only what an operator cannot take is checked; its kernel, which calls the public function, checks the rest.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from blockscale import arguments, ops
from blockscale.config import Config
from blockscale.formats import packing
from blockscale.formats.layouts import LINEAR
from blockscale.tensor import NVFP4Tensor

Part = tuple[ops.Operand, int]
"""An operand and its K."""

_FIELDS = tuple(field.name for field in fields(Config))


class Options(Protocol):
    """What a call says besides its operands, checked."""

    activation: str | None
    out_dtype: torch.dtype
    config: Config | None
    backend: str | None
    invariant: bool


def needed(a: Any, b: Any, alpha: Any, bias: Any, out: Any) -> bool:
    """Whether a grouped product has to go through an operator; operands may be lists."""
    flat = [y for x in (a, b, alpha, bias, out) for y in (x if isinstance(x, (list, tuple)) else (x,))]
    tensors = [x.codes if isinstance(x, NVFP4Tensor) else x for x in flat]
    outputs = out if isinstance(out, (list, tuple)) else (out,)
    return ops.must_trace(*tensors) or ops.needs_gradient(*(x for x in tensors if not any(x is y for y in outputs)))


def gemm(
    a: tuple[Any, Tensor | None],
    b: tuple[Any, Tensor | None],
    k: int | None,
    layout: str,
    options: Options,
    alpha: float | Tensor | None,
    bias: Tensor | None,
    out: Tensor | NVFP4Tensor | None,
) -> Tensor:
    """`blockscale.gemm` of operands that are each (values or codes, scales of the raw form)."""
    if isinstance(out, NVFP4Tensor):
        raise ValueError(
            "out: an NVFP4Tensor, which a call that is traced or differentiated cannot write; expected None"
        )
    parts = _part("a", *a, k, layout), _part("b", *b, k, layout, weight=True)
    return _call("gemm", parts, (), options, alpha, bias, out)


def grouped_gemm(
    a: Any, b: Any, groups: tuple[Tensor | None, ...], options: Options, alpha: Any, bias: Any, out: Any
) -> Tensor | list[Tensor]:
    """`blockscale.grouped_gemm`; `groups` are group_sizes, group_offsets and masked_m. Lists become single products."""
    if any(isinstance(x, NVFP4Tensor) for x in (out if isinstance(out, (list, tuple)) else (out,))):
        raise ValueError(
            "out: an NVFP4Tensor, which a call that is traced or differentiated cannot write; expected None"
        )
    if not isinstance(a, (list, tuple)) and not isinstance(b, (list, tuple)):
        return _call("grouped_gemm", (_part("a", a), _part("b", b, weight=True)), groups, options, alpha, bias, out)
    if not isinstance(a, (list, tuple)) or not isinstance(b, (list, tuple)) or len(a) != len(b):
        raise ValueError(f"a, b: {arguments.kind(a)} and {arguments.kind(b)}, expected two lists of one length")
    if any(given is not None for given in groups):
        raise ValueError("group_sizes, group_offsets, masked_m: they do not go with the list form; expected None")
    if options.activation not in arguments.ACTIVATIONS:
        raise ValueError(
            f"activation: {options.activation!r}, which the list form of a call that is traced or differentiated does "
            "not have; expected it in the contiguous or masked form"
        )
    parts = [(_part(f"a[{i}]", x), _part(f"b[{i}]", y, weight=True)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    each = zip(
        parts,
        alpha if isinstance(alpha, Tensor) and alpha.ndim else [alpha] * len(a),
        bias if isinstance(bias, Tensor) and bias.ndim > 1 else [bias] * len(a),
        [None] * len(a) if out is None else out,
        strict=True,
    )
    return [_call("gemm", pair, (), options, *rest) for pair, *rest in each]


def encode(config: Config | None) -> str | None:
    """A configuration as an operator takes it, written in a way that Dynamo can follow."""
    return None if config is None else ";".join([f"{name}={getattr(config, name)!r}" for name in _FIELDS])


def decode(text: str | None) -> Config | None:
    """The configuration that `encode` gave."""
    if text is None:
        return None
    given = (field.partition("=") for field in text.split(";"))
    return Config(**{name: ast.literal_eval(value) for name, _, value in given})


def _part(
    name: str,
    x: Any,
    scales: Tensor | None = None,
    k: int | None = None,
    layout: str = LINEAR,
    *,
    weight: bool = False,
) -> Part:
    if isinstance(x, NVFP4Tensor):
        if scales is not None or k is not None:
            raise ValueError(f"{name}_sf, k: given, but they go with raw operands only; {name} is an NVFP4Tensor")
        return x.operand(), x.shape[-1]
    if not isinstance(x, Tensor) or (weight and scales is None):
        raise TypeError(f"{name}: {arguments.kind(x)}, expected an NVFP4Tensor, or packed codes with {name}_sf")
    if scales is None:
        return ops.Operand(x, None, None, None, LINEAR), x.shape[-1]
    raw = ops.Operand(packing.as_bytes(x), scales.view(torch.uint8), None, None, layout)
    return raw, 2 * x.shape[-1] if k is None else k


def _call(
    name: str,
    parts: tuple[Part, Part],
    groups: tuple[Tensor | None, ...],
    options: Options,
    alpha: float | Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    (a, a_k), (b, k) = parts
    if a_k != k:
        raise ValueError(f"a: K = {a_k}, but b has K = {k}")
    how = options.out_dtype, encode(options.config), options.backend, options.invariant
    call = (*a, *b, k, *groups, *ops.epilogue(alpha, bias, options.activation), *how)
    if out is None:
        result: Tensor = getattr(torch.ops.blockscale, name)(*call)
        return result
    if ops.needs_gradient(a.data, alpha, bias, out):
        raise ValueError("out: given, but an operand requires grad; expected None, or a call under torch.no_grad()")
    getattr(torch.ops.blockscale, f"{name}_out")(*call, out)
    return out
