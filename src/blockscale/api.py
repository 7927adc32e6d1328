"""The public functions: check every argument, then call a backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale import arguments, backends, calls, families, heuristics, ops, threads
from blockscale.backends import gpu
from blockscale.config import Config
from blockscale.tensor import NVFP4Tensor, check_group_sizes


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `t`, (..., M, K): fl32(code x fl32(scale x global_scale)), rounded to `dtype`."""
    if not isinstance(t, NVFP4Tensor):
        raise TypeError(f"t: {type(t).__name__}, expected an NVFP4Tensor")
    return t.dequantize(dtype)


def gemm(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor | Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    *,
    k: int | None = None,
    sf_layout: str = "128x4",
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | NVFP4Tensor | None = None,
    config: Config | None = None,
    backend: str | None = None,
    invariant: bool = False,
) -> Tensor:
    """act(alpha x dequant(a) @ dequant(b)^T + bias), (..., M, N); batch dimensions broadcast.

    Args:
        a: NVFP4Tensor (..., M, K), or an fp16, bf16 or fp32 tensor (weight-only).
        b: NVFP4Tensor (..., N, K): the weight, one row an output feature.
        a_sf, b_sf: the raw form. With them `a` and `b` are packed codes, uint8 or float4_e2m1fn_x2 (..., M, K/2), and
            these their float8_e4m3fn scales in `sf_layout`; `alpha` then carries the product of both global scales.
            No copy is made where K is a multiple of 64 and the bytes are contiguous and aligned to 16.
        k: logical K of the raw form; by default twice the bytes of a row.
        sf_layout: "128x4" or "linear".
        alpha: a finite float, or an fp32 tensor of shape ().
        bias: (N,) fp16, bf16 or fp32, added in fp32 after alpha.
        activation: None, "relu", "gelu" (the exact form, with erf) or "silu".
        out_dtype: fp16, bf16 or fp32.
        out: where to write, of shape (..., M, N) and dtype `out_dtype`, apart from every input; it is returned. An
            NVFP4Tensor (see `NVFP4Tensor.zeros`) gets the bits of `quantize(y, global_scale=out.global_scale,
            nonfinite="saturate")`, y being the fp32 result; leave `out_dtype` out then, or say float4_e2m1fn_x2.
        config: how a GPU's kernel is to do it, see `config_for`; None to let the heuristics choose. None on the CPU.
        backend: None to choose by the operands' device, or a name from `available_backends()`.
        invariant: a row's bits do not depend on the other rows (slower).

    Returns:
        The result, within the contract: |y - exact| <= rounding of out_dtype + c x sum_k |a||b| x |alpha|, with
        c = 2^-20 on the CPU and (4 + K/1024) x 2^-20 on tensor cores. A bias adds 2^-24 x (|bias| + |exact|), and an
        activation multiplies all but the rounding by its largest slope, 1.13 at most: its own error is one of its
        argument, beside which a result in the tail of gelu or silu may be small, or come out as 0.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is allowed.
        RuntimeError: a kernel has to be compiled and cannot be, or CUDA refuses.
    """
    if ops.must_trace(_codes(a), _codes(b), alpha, bias, _codes(out)) or ops.needs_gradient(a, alpha, bias):
        options = _Options(activation, out_dtype, config, backend, invariant)
        return calls.gemm((a, a_sf), (b, b_sf), k, sf_layout, options, alpha, bias, out)
    signature = None
    if a_sf is None and b_sf is None and type(invariant) is bool:
        options_given = k, sf_layout, activation, out_dtype, config, backend, invariant
        signature = gpu.signature(a, b, out, alpha, bias, options_given)
        if signature is not None and (call := gpu.find(signature)) is not None:
            return call(a, b, out, alpha, bias)  # type: ignore # the signature holds their types
    left = arguments.operand("a", a, a_sf, k, sf_layout)
    right = arguments.check_pair(left, arguments.operand("b", b, b_sf, k, sf_layout))
    if k is not None and a_sf is None and b_sf is None:
        raise ValueError(f"k: {k}, but it goes with raw operands only; an NVFP4Tensor carries its shape")
    shape = (*arguments.batch_shape(left, right), left.shape[-2], right.shape[-2])
    target: Tensor | NVFP4Tensor
    if isinstance(out, NVFP4Tensor):
        options = _Options(activation, torch.float32, config, backend, invariant)
        target = arguments.quantised_output(out, shape, out_dtype, right.device)
    else:
        options = _Options(activation, out_dtype, config, backend, invariant)
        target = arguments.output("out", out, shape, out_dtype, right.device)
    if out is not None:
        inputs = {"a": a, "b": b, "a_sf": a_sf, "b_sf": b_sf, "alpha": alpha, "bias": bias}
        arguments.check_overlap({"out": out}, inputs)
    (call,) = options.run([_Problem(left, right, target, alpha, bias)], right.device)
    if signature is not None and call is not None:
        gpu.remember(signature, call)
    return target  # type: ignore[return-value] # an NVFP4Tensor where `out` is one, and there alone


def config_for(m: int, n: int, k: int, *, gpu: str | None = None) -> Config:
    """The configuration that `gemm` would choose for (m, k) x (n, k) in NVFP4, with bf16 results; on Hopper the
    activation is bf16 and the weight in layout "fragment", and from 4,096 rows on `gemm` takes a configuration only
    where it is given one, and expands the weight otherwise.

    Args:
        gpu: a GPU ("b200") or an architecture ("sm_100a"); None for the emulated or the current GPU.

    Raises:
        TypeError, ValueError: a size or the GPU is not allowed, or no kernel does this product.
    """
    target = backends.target_asked(gpu)
    return heuristics.choose(families.usual(m, n, k, target), target).config


def explain(m: int, n: int, k: int, *, gpu: str | None = None) -> str:
    """The choice of `config_for` and its reasons in order, as text. Arguments and errors as there."""
    target = backends.target_asked(gpu)
    choice = heuristics.choose(families.usual(m, n, k, target), target)
    head = f"{m} x {n} x {k} on {target.name} ({target.arch}): {choice.config}"
    return "\n".join([head, *(f"{i}. {reason}" for i, reason in enumerate(choice.reasons, 1))])


def grouped_gemm(
    a: NVFP4Tensor | Tensor | list[NVFP4Tensor | Tensor],
    b: NVFP4Tensor | list[NVFP4Tensor],
    *,
    group_sizes: Tensor | None = None,
    group_offsets: Tensor | None = None,
    masked_m: Tensor | None = None,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | list[Tensor] | None = None,
    config: Config | None = None,
    backend: str | None = None,
) -> Tensor | list[Tensor]:
    """One matrix product a group, equal bit for bit to a loop of `gemm`. Three forms:

    - contiguous: `a` (T, K) sorted by group, `b` (E, N, K), and `group_sizes` (E,), or `group_offsets`: (E + 1,) from 0
      to T, or (E,) the end of each group. An `a` of layout "128x4-grouped" brings its own group sizes. -> (T, N).
    - masked: `a` (E, max_m, K), `b` (E, N, K), `masked_m` (E,): group e has masked_m[e] rows. -> (E, max_m, N). Rows
      beyond the mask are never read; they are zero in a new result and untouched in a given `out`.
    - list: `a` and `b` lists of 2-D operands of any shapes. -> a list of (M_i, N_i).

    Args:
        group_sizes, group_offsets, masked_m: int32 (or int64) on the device of `a`.
        alpha: a finite float, or an fp32 tensor of shape () or (E,).
        bias: (N,) or (E, N) fp16, bf16 or fp32; in the list form every N_i is then the same.
        activation, out_dtype, config, backend: as for `gemm`. `out`: a tensor, or in the list form a list.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is allowed.
    """
    options = _Options(activation, out_dtype, config, backend)
    result: Tensor | list[Tensor]
    if calls.needed(a, b, alpha, bias, out):
        return calls.grouped_gemm(a, b, (group_sizes, group_offsets, masked_m), options, alpha, bias, out)
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        _refuse("list", group_sizes=group_sizes, group_offsets=group_offsets, masked_m=masked_m)
        operands, result = _list_form(a, b, out, out_dtype)
    elif masked_m is not None:
        _refuse("masked", group_sizes=group_sizes, group_offsets=group_offsets)
        operands, result = _masked_form(a, b, masked_m, out, out_dtype)
    else:
        operands, result = _contiguous_form(a, b, group_sizes, group_offsets, out, out_dtype)
    if out is not None:
        outputs = {f"out[{i}]": part for i, part in enumerate(out)} if isinstance(out, (list, tuple)) else {"out": out}
        arguments.check_overlap(outputs, {"a": a, "b": b, "alpha": alpha, "bias": bias})
    alphas = _per_group("alpha", alpha, len(operands), 0)
    biases = _per_group("bias", bias, len(operands), 1)
    problems = [
        _Problem(*three, group_alpha, group_bias)
        for three, group_alpha, group_bias in zip(operands, alphas, biases, strict=True)
    ]
    options.run(problems, operands[0][1].device if operands else torch.device("cpu"))
    return result


def _codes(x: Any) -> Any:
    return x.codes if isinstance(x, NVFP4Tensor) else x


@dataclass(frozen=True)
class _Problem:
    """One product; operands and target have been checked."""

    a: NVFP4Tensor | Tensor
    b: NVFP4Tensor
    out: Tensor | NVFP4Tensor
    alpha: float | Tensor | None
    bias: Tensor | None


class _Options:
    """What all products of a call share."""

    def __init__(
        self,
        activation: str | None,
        out_dtype: torch.dtype,
        config: Config | None,
        backend: str | None,
        invariant: bool = False,
    ) -> None:
        self.activation = arguments.check_activation(activation)
        arguments.check_out_dtype(out_dtype)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config: {arguments.kind(config)}, expected None or a Config")
        if not isinstance(invariant, bool):
            raise TypeError(f"invariant: {arguments.kind(invariant)}, expected a bool")
        self.backend, self.invariant, self.config, self.out_dtype = backend, invariant, config, out_dtype

    def run(self, problems: list[_Problem], device: torch.device) -> list[gpu.Call | None]:
        """Check what is left, then compute: nothing is written unless every problem passes."""
        backend = backends.pick(self.backend, device, self.config)
        calls = [
            (p, arguments.check_alpha(p.alpha, device), arguments.check_bias(p.bias, p.b.shape[-2], device))
            for p in problems
        ]
        with threads.exact_arithmetic():
            launches = [
                backend.prepare(
                    p.a,
                    p.b,
                    p.out,
                    alpha=alpha,
                    bias=bias,
                    activation=self.activation,
                    invariant=self.invariant,
                    config=self.config,
                )
                for p, alpha, bias in calls
            ]
            return [launch() for launch in launches]


_Operands = tuple[Any, Any, Tensor]


def _contiguous_form(
    a: Any, b: Any, group_sizes: Tensor | None, group_offsets: Tensor | None, out: Any, out_dtype: torch.dtype
) -> tuple[list[_Operands], Tensor]:
    _check_grouped_operands(a, b, a_ndim=2, form="contiguous")
    rows, groups, n = a.shape[0], b.shape[0], b.shape[1]
    if group_sizes is not None and group_offsets is not None:
        raise ValueError("group_offsets: given together with group_sizes; expected one of the two")
    if group_offsets is not None:
        group_sizes = _sizes_from_offsets(group_offsets, groups, rows, a.device)
    own = a.group_sizes if isinstance(a, NVFP4Tensor) else None
    if group_sizes is None:
        if own is None:
            raise ValueError("group_sizes: missing; the contiguous form needs group_sizes or group_offsets")
        group_sizes = own
    sizes = check_group_sizes(group_sizes, rows, a.device)
    if len(sizes) != groups:
        raise ValueError(f"group_sizes: {len(sizes)} groups, but b has {groups}")
    if own is not None and not torch.equal(own, sizes):
        raise ValueError(f"group_sizes: {sizes.tolist()}, but a's layout '128x4-grouped' was made with {own.tolist()}")
    result = arguments.output("out", out, (rows, n), out_dtype, a.device)
    a, b = _sliceable(a), _sliceable(b)
    operands: list[_Operands] = []
    start = 0
    for e, size in enumerate(sizes.tolist()):
        operands.append((a[start : start + size], b[e], result[start : start + size]))
        start += size
    return operands, result


def _masked_form(a: Any, b: Any, masked_m: Tensor, out: Any, out_dtype: torch.dtype) -> tuple[list[_Operands], Tensor]:
    _check_grouped_operands(a, b, a_ndim=3, form="masked")
    groups, most, _ = a.shape
    if groups != b.shape[0]:
        raise ValueError(f"b: {b.shape[0]} groups, but a has {groups}")
    if not isinstance(masked_m, Tensor) or masked_m.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"masked_m: {arguments.kind(masked_m)}, expected an int32 tensor")
    if masked_m.shape != (groups,) or masked_m.device != a.device:
        raise ValueError(
            f"masked_m: shape {tuple(masked_m.shape)} on {masked_m.device}, expected ({groups},) on {a.device}"
        )
    counts = masked_m.tolist()
    for e, count in enumerate(counts):
        if not 0 <= count <= most:
            raise ValueError(f"masked_m: {count} at {e}, expected 0 to {most}, the rows of a group in a")
    result = arguments.output("out", out, (groups, most, b.shape[1]), out_dtype, a.device)
    if out is None:
        for e, count in enumerate(counts):
            result[e, count:] = 0
    a, b = _sliceable(a), _sliceable(b)
    return [(a[e][:count], b[e], result[e, :count]) for e, count in enumerate(counts)], result


def _list_form(a: Any, b: Any, out: Any, out_dtype: torch.dtype) -> tuple[list[_Operands], list[Tensor]]:
    if not isinstance(a, (list, tuple)) or not isinstance(b, (list, tuple)):
        raise TypeError(f"a, b: {arguments.kind(a)} and {arguments.kind(b)}, expected two lists or two single operands")
    if len(a) != len(b):
        raise ValueError(f"b: {len(b)} operands, but a has {len(a)}")
    if out is not None and (not isinstance(out, (list, tuple)) or len(out) != len(a)):
        raise ValueError(f"out: {arguments.kind(out)}, expected a list of {len(a)} tensors")
    operands: list[_Operands] = []
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        arguments.check_pair(left, right, f"a[{i}]", f"b[{i}]")
        if left.ndim != 2 or right.ndim != 2:
            raise ValueError(
                f"a[{i}], b[{i}]: shapes {tuple(left.shape)} and {tuple(right.shape)}, expected 2 dimensions each"
            )
        given = None if out is None else out[i]
        shape = (left.shape[0], right.shape[0])
        operands.append((left, right, arguments.output(f"out[{i}]", given, shape, out_dtype, right.device)))
    return operands, [target for _, _, target in operands]


def _check_grouped_operands(a: Any, b: Any, *, a_ndim: int, form: str) -> None:
    arguments.check_pair(a, b)
    if a.ndim != a_ndim or b.ndim != 3:
        raise ValueError(
            f"a, b: shapes {tuple(a.shape)} and {tuple(b.shape)}, expected {a_ndim} and 3 dimensions "
            f"for the {form} form"
        )


def _sizes_from_offsets(offsets: Tensor, groups: int, rows: int, device: torch.device) -> Tensor:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"group_offsets: {arguments.kind(offsets)}, expected an int32 tensor")
    if offsets.ndim != 1 or len(offsets) not in (groups, groups + 1) or offsets.device != device:
        raise ValueError(
            f"group_offsets: shape {tuple(offsets.shape)} on {offsets.device}, "
            f"expected ({groups + 1},) or ({groups},) on {device}"
        )
    bounds = offsets.tolist() if len(offsets) == groups + 1 else [0, *offsets.tolist()]
    if bounds[0] != 0 or bounds[-1] != rows or any(later < sooner for sooner, later in itertools.pairwise(bounds)):
        raise ValueError(f"group_offsets: {offsets.tolist()}, expected to rise from 0 to the number of rows, {rows}")
    return torch.tensor(bounds, dtype=torch.int32, device=device).diff()


def _per_group(name: str, value: Any, groups: int, inner: int) -> list[Any]:
    """A value for each group: one shared by all, or row e of a tensor with one more dimension."""
    if not isinstance(value, Tensor) or value.ndim <= inner:
        return [value] * groups
    if value.ndim != inner + 1 or len(value) != groups:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, expected a leading dimension of {groups} groups")
    return list(value.unbind(0))


def _sliceable(x: NVFP4Tensor | Tensor) -> NVFP4Tensor | Tensor:
    return x.with_layout("linear") if isinstance(x, NVFP4Tensor) else x


def _refuse(form: str, **unwanted: Any) -> None:
    for name, value in unwanted.items():
        if value is not None:
            raise ValueError(f"{name}: given, but it does not go with the {form} form; expected None")
