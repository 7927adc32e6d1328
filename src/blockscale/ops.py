"""The library's functions as operators of torch, `torch.ops.blockscale.gemm` and others: their schemas, the shapes of
their results, for tracing, and their gradients.

An operator takes plain tensors and tags: a graph holds no objects. Scales come as bytes (uint8), since much of torch
does not know float8. Its kernels are in `op_kernels.py`. The public functions come here when something in torch has to
see the call (`must_trace`, `needs_gradient`) and otherwise call the same code directly, since torch's dispatcher costs
more than the call of a small product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockscale.formats import fragment, layouts
from blockscale.formats.layouts import ATOMS, FRAGMENT, GROUPED, K_ALIGN, ROW_ALIGN, blocks, round_up
from blockscale.problem import GATED

_OPERAND = "Tensor {0}, Tensor? {0}_scales, Tensor? {0}_unit, Tensor? {0}_groups, str {0}_layout"
_PAIR = f"{_OPERAND.format('a')}, {_OPERAND.format('b')}, SymInt k"
_EPILOGUE = "Tensor? alpha, float factor, Tensor? bias, str? activation"
_GROUPS = "Tensor? group_sizes, Tensor? group_offsets, Tensor? masked_m"
_HOW = "ScalarType out_dtype, str? config, str? backend, bool invariant"
_OUT = "Tensor(a!) out"

SCHEMAS = {
    "quantize": "(Tensor x, str method, Tensor? global_scale, float? multiplier, str layout, Tensor? group_sizes, "
    "str nonfinite, str? activation, Tensor? norm_weight, float eps) "
    "-> (Tensor codes, Tensor scales, Tensor global_scale)",
    "fake_quantize": "(Tensor x, Tensor? global_scale) -> Tensor",
    "dequantize": f"({_OPERAND.format('t')}, SymInt k, ScalarType dtype) -> Tensor",
    "gemm": f"({_PAIR}, {_EPILOGUE}, {_HOW}) -> Tensor",
    "gemm_out": f"({_PAIR}, {_EPILOGUE}, {_HOW}, {_OUT}) -> ()",
    "gemm_backward": f"(Tensor grad, {_PAIR}, {_EPILOGUE}, str? backend, bool[] needs) "
    "-> (Tensor grad_a, Tensor grad_alpha, Tensor grad_bias)",
    "grouped_gemm": f"({_PAIR}, {_GROUPS}, {_EPILOGUE}, {_HOW}) -> Tensor",
    "grouped_gemm_out": f"({_PAIR}, {_GROUPS}, {_EPILOGUE}, {_HOW}, {_OUT}) -> ()",
    "grouped_gemm_backward": f"(Tensor grad, {_PAIR}, {_GROUPS}, {_EPILOGUE}, str? backend, bool[] needs) "
    "-> (Tensor grad_a, Tensor grad_alpha, Tensor grad_bias)",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"blockscale::{_name}", _schema)
NAMES = {
    name: [argument.name for argument in getattr(torch.ops.blockscale, name).default._schema.arguments]
    for name in SCHEMAS
}


class Operand(NamedTuple):
    """An operand's part of a schema: codes with `scales` (uint8) and `unit`, the global scale, None where alpha carries
    it; or values without. In layout "fragment", whose codes do not show the number of rows, `scales` (rows, 0) do."""

    data: Tensor
    scales: Tensor | None
    unit: Tensor | None
    groups: Tensor | None
    layout: str


def outer_sizes(codes: Tensor, scales: Tensor | None, layout: str) -> Sequence[int]:
    """All logical sizes (..., M) of an operand but K."""
    if layout != FRAGMENT:
        return codes.shape[:-1]
    assert scales is not None
    return (*codes.shape[:-3], scales.shape[0])


class Epilogue(NamedTuple):
    """The epilogue's part of a schema; the factor is `alpha` if that is a tensor, otherwise `factor`."""

    alpha: Tensor | None
    factor: float
    bias: Tensor | None
    activation: str | None


def epilogue(alpha: Any, bias: Tensor | None, activation: str | None) -> Epilogue:
    if isinstance(alpha, Tensor):
        return Epilogue(alpha, 1.0, bias, activation)
    return Epilogue(None, 1.0 if alpha is None else alpha, bias, activation)


def must_trace(*values: Any) -> bool:
    """Whether a call must become a node of somebody's graph: under torch.compile, torch.export or a dispatch mode, or
    with a tensor that is not just a tensor (fake, functional, distributed). Never inside of an operator."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.compiler.is_dynamo_compiling() or not _executing.operators
    for x in values:
        if type(x) not in _PLAIN and isinstance(x, Tensor):
            return not _executing.operators
    return False


_PLAIN = frozenset((Tensor, torch.nn.Parameter, float, type(None)))


class _Executing(threading.local):
    operators = 0  # that this thread is in


_executing = _Executing()


@contextmanager
def executing() -> Iterator[None]:
    """Around a kernel: the public functions that it calls do the work themselves, and without gradients."""
    _executing.operators += 1
    try:
        with torch.no_grad():
            yield
    finally:
        _executing.operators -= 1


def needs_gradient(*values: Any) -> bool:
    """Whether autograd has to see a call."""
    if torch.is_grad_enabled():
        for x in values:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def scale_shape(shape: Sequence[int], layout: str, groups: int | None) -> tuple[int, ...]:
    """The shape of the scales of a tensor (..., M, K); dimensions may be symbolic."""
    *batch, rows, k = shape
    if layout == FRAGMENT:
        return (0,)
    if layout == ATOMS:
        rows = round_up(rows, ROW_ALIGN)
    elif layout == GROUPED:
        assert groups is not None
        rows = layouts.grouped_rows(rows, groups)
    return (*batch, rows, blocks(k))


def named(operator: str, arguments: Sequence[Any]) -> SimpleNamespace:
    """Positional arguments of an operator by their names in its schema."""
    return SimpleNamespace(**dict(zip(NAMES[operator], arguments, strict=True)))


def _fake(operator: str) -> Callable[[Callable[[SimpleNamespace], Any]], None]:
    """Registers what an operator returns when nothing is computed, as a function of its named arguments."""

    def register(shapes: Callable[[SimpleNamespace], Any]) -> None:
        torch.library.register_fake(f"blockscale::{operator}", lambda *args: shapes(named(operator, args)))

    return register


@_fake("quantize")
def _(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    x, groups = call.x, None if call.group_sizes is None else call.group_sizes.shape[0]
    *batch, rows, k = x.shape
    k = k if call.activation is None else k // 2
    packed = call.layout == FRAGMENT
    codes = fragment.shape(batch, rows, blocks(k)) if packed else (*batch, rows, round_up(k, K_ALIGN) // 2)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scale_shape((*batch, rows, k), call.layout, groups), dtype=torch.uint8),
        x.new_empty((), dtype=torch.float32),
    )


@_fake("fake_quantize")
def _(call: SimpleNamespace) -> Tensor:
    return torch.empty(call.x.shape, dtype=torch.float32, device=call.x.device)


@_fake("dequantize")
def _(call: SimpleNamespace) -> Tensor:
    rows = outer_sizes(call.t, call.t_scales, call.t_layout)
    return torch.empty((*rows, call.k), dtype=call.dtype, device=call.t.device)


@_fake("gemm")
def _(call: SimpleNamespace) -> Tensor:
    _check_sizes(call)
    (*batch_a, m), (*batch_b, n) = _outer_sizes(call)
    shape = (*torch.broadcast_shapes(batch_a, batch_b), m, n)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=call.out_dtype, device=call.a.device)


@_fake("grouped_gemm")
def _(call: SimpleNamespace) -> Tensor:
    _check_sizes(call)
    rows, (*_, n) = _outer_sizes(call)
    shape = (*rows, n // 2 if call.activation in GATED else n)
    return torch.empty(shape, dtype=call.out_dtype, device=call.a.device)


def _outer_sizes(call: SimpleNamespace) -> tuple[Sequence[int], Sequence[int]]:
    """Of both operands."""
    return (
        outer_sizes(call.a, call.a_scales, call.a_layout),
        outer_sizes(call.b, call.b_scales, call.b_layout),
    )


def _check_sizes(call: SimpleNamespace) -> None:
    if call.a_scales is None and call.a.shape[-1] != call.k:
        raise ValueError(f"a: K = {call.a.shape[-1]}, but b has K = {call.k}")
    n = _outer_sizes(call)[1][-1]
    if call.bias is not None and call.bias.shape[-1] != n:
        raise ValueError(f"bias: shape {tuple(call.bias.shape)}, but b has N = {n}")


def _gradient_shapes(call: SimpleNamespace) -> tuple[Tensor, ...]:
    none = call.grad.new_empty((0,), dtype=torch.float32)
    given = zip((call.a, call.alpha, call.bias), call.needs, strict=True)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) if need else none for t, need in given)


for _name in ("gemm", "grouped_gemm"):
    _fake(f"{_name}_out")(lambda call: None)
    _fake(f"{_name}_backward")(_gradient_shapes)


def _register_gradients(operator: str) -> None:
    """Gradients of the floating operand, alpha and bias. Weights are frozen; what is needed again is computed again."""
    backward_operator = getattr(torch.ops.blockscale, f"{operator}_backward").default
    names = NAMES[operator]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        given = dict(zip(names, inputs, strict=True))
        ctx.tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(given[name] for name in ctx.tensors))
        ctx.others = {name: value for name, value in given.items() if name not in ctx.tensors}

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = dict(zip(names, ctx.needs_input_grad, strict=True))
        needs = [wanted[name] for name in ("a", "alpha", "bias")]
        call = {**ctx.others, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)), "grad": grad, "needs": needs}
        parts = backward_operator(*(call[name] for name in NAMES[f"{operator}_backward"]))
        found = {name: part for name, part, need in zip(("a", "alpha", "bias"), parts, needs, strict=True) if need}
        return tuple(found.get(name) for name in names)

    torch.library.register_autograd(f"blockscale::{operator}", backward, setup_context=save)


def _refuse_gradients(operator: str) -> None:
    """A gradient of a gradient would be silently zero otherwise."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(f"blockscale::{operator} has no gradient: there are no gradients of gradients")

    torch.library.register_autograd(f"blockscale::{operator}", backward)


for _name in ("gemm", "grouped_gemm"):
    _register_gradients(_name)
    _refuse_gradients(f"{_name}_backward")


def _register_straight_through() -> None:
    """The gradient of `fake_quantize`: that of the identity (Bengio et al., 2013)."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None

    torch.library.register_autograd("blockscale::fake_quantize", backward, setup_context=save)


_register_straight_through()
