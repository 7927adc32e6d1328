"""The public functions: check every argument, then call a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale import arguments, backends, calls, families, grouped, heuristics, ops, threads
from blockscale.backends import gated, gpu, groups, lists
from blockscale.config import Config
from blockscale.tensor import NVFP4Tensor


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


def config_for(m: int, n: int, k: int, *, gpu: str | None = None, groups: int | None = None) -> Config:
    """The configuration that `gemm` would choose for (m, k) x (n, k) in NVFP4, with bf16 results; on Hopper the
    activation is bf16 and the weight in layout "fragment".

    Args:
        gpu: a GPU ("b200") or an architecture ("sm_100a"); None for the emulated or the current GPU.
        groups: that `grouped_gemm`, in the contiguous form, has m rows of, in all; None for a single product.

    Raises:
        TypeError, ValueError: a size or the GPU is not allowed, or no kernel does this product.
    """
    target = backends.target_asked(gpu)
    return heuristics.choose(families.usual(m, n, k, target, groups=groups), target).config


def explain(m: int, n: int, k: int, *, gpu: str | None = None, groups: int | None = None) -> str:
    """The choice of `config_for` and its reasons in order, as text. Arguments and errors as there."""
    target = backends.target_asked(gpu)
    choice = heuristics.choose(families.usual(m, n, k, target, groups=groups), target)
    among = "" if groups is None else f" in {groups} groups"
    head = f"{m} x {n} x {k}{among} on {target.name} ({target.arch}): {choice.config}"
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
    out: Tensor | NVFP4Tensor | list[Tensor] | None = None,
    config: Config | None = None,
    backend: str | None = None,
) -> Tensor | list[Tensor]:
    """One matrix product a group, equal bit for bit to a loop of `gemm` on the CPU, and on sm_100a as long as neither
    configuration cuts K into parts. Three forms:

    - contiguous: `a` (T, K) sorted by group, `b` (E, N, K), and `group_sizes` (E,), or `group_offsets`: (E + 1,) from 0
      to T, or (E,) the end of each group. An `a` of layout "128x4-grouped" brings its own group sizes. -> (T, N).
    - masked: `a` (E, max_m, K), `b` (E, N, K), `masked_m` (E,): group e has masked_m[e] rows. -> (E, max_m, N). Rows
      beyond the mask have no part in the result, where they are zero if it is new and untouched in a given `out`.
    - list: `a` and `b` lists of 2-D operands of any shapes. -> a list of (M_i, N_i).

    On a GPU whose kernels do grouped products the host never reads a size: one launch, one captured CUDA graph, serves
    whatever the sizes are then. Sizes that the host cannot see are taken within bounds: a group begins where the one
    before ends and has at least 0 rows and at most those that are left; what a result's rows of no group hold is not
    said. Nor can it see whether sizes are those that an `a` of layout "128x4-grouped" was made with: they have to be.

    Args:
        group_sizes, group_offsets, masked_m: int32 (or int64, which is copied) on the device of `a`.
        alpha: a finite float, or an fp32 tensor of shape () or (E,).
        bias: (N,) or (E, N) fp16, bf16 or fp32; in the list form every N_i is then the same.
        activation: as for `gemm`, or "swiglu" or "geglu": the first N / 2 rows of a weight are the gate's, the others
            those of what it multiplies, and the result, (..., N / 2), is silu(gate) x up or gelu(gate) x up.
        out_dtype, backend: as for `gemm`. config: one of the kernel for groups or lists; in the list form also one of
            the kernel for single products, which are then launched one by one.
        out: a tensor, or in the list form a list. Or an NVFP4Tensor as for `gemm`; one of layout "128x4-grouped", for
            the contiguous form, takes over the call's group sizes, by a few small operations of torch, and is ready to
            be multiplied by the next weight.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is allowed.
        RuntimeError: a kernel has to be compiled and cannot be, or CUDA refuses.
    """
    if calls.needed(a, b, alpha, bias, out):
        options = _Options(activation, out_dtype, config, backend, gated=True)
        return calls.grouped_gemm(a, b, (group_sizes, group_offsets, masked_m), options, alpha, bias, out)
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        _refuse("list", group_sizes=group_sizes, group_offsets=group_offsets, masked_m=masked_m)
        return _separate(a, b, _Options(activation, out_dtype, config, backend, gated=True), alpha, bias, out)
    tables = group_sizes, group_offsets, masked_m
    signature = groups.signature(a, b, out, alpha, bias, tables, (activation, out_dtype, config, backend))
    if signature is not None and (call := gpu.find(signature)) is not None:
        return call(a, b, out, alpha, bias, tables)  # type: ignore # the signature holds their types
    sums = torch.float32 if isinstance(out, NVFP4Tensor) else out_dtype
    options = _Options(activation, sums, config, backend, gated=True)
    given = alpha, bias, activation, out, out_dtype
    if masked_m is not None:
        _refuse("masked", group_sizes=group_sizes, group_offsets=group_offsets)
        product = grouped.masked(a, b, masked_m, *given)
    else:
        product = grouped.contiguous(a, b, (group_sizes, group_offsets), *given)
    if out is not None:
        arguments.check_overlap({"out": product.out}, groups.inputs(product))
    prepare = backends.for_groups(options.backend, product.b.device, options.config)
    with threads.exact_arithmetic():
        call = prepare(product, activation=options.activation, config=options.config)()
    if signature is not None and call is not None:
        gpu.remember(signature, call)
    return product.out  # type: ignore[return-value] # an NVFP4Tensor where `out` is one, and there alone


def _separate(a: Any, b: Any, options: _Options, alpha: Any, bias: Any, out: Any) -> list[Tensor]:
    """The list form: every shape is the host's, so what no kernel for lists does is launched one after another."""
    given = options.activation, options.out_dtype, options.config, options.backend
    signature = lists.signature(a, b, out, alpha, bias, given)
    if signature is not None and (call := gpu.find(signature)) is not None:
        known: list[Tensor] | None = call(a, b, out, alpha, bias)
        if known is not None:
            return known
    operands, result = grouped.separate(a, b, options.activation, out, options.out_dtype)
    if out is not None:
        outputs = {f"out[{i}]": part for i, part in enumerate(out)}
        arguments.check_overlap(outputs, {"a": a, "b": b, "alpha": alpha, "bias": bias})
    alphas = grouped.per_group("alpha", alpha, len(operands), 0)
    biases = grouped.per_group("bias", bias, len(operands), 1)
    made = options.run(
        [_Problem(*three, *beside) for three, *beside in zip(operands, alphas, biases, strict=True)],
        operands[0][1].device if operands else torch.device("cpu"),
    )
    if signature is not None and len(made) == 1 and isinstance(made[0], lists.ListCall):
        gpu.remember(signature, made[0])
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
        *,
        gated: bool = False,
    ) -> None:
        self.activation = (grouped if gated else arguments).check_activation(activation)
        arguments.check_out_dtype(out_dtype)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config: {arguments.kind(config)}, expected None or a Config")
        if not isinstance(invariant, bool):
            raise TypeError(f"invariant: {arguments.kind(invariant)}, expected a bool")
        self.backend, self.invariant, self.config, self.out_dtype = backend, invariant, config, out_dtype

    def run(self, problems: list[_Problem], device: torch.device) -> list[gpu.Call | lists.ListCall | None]:
        """Check what is left, then compute: nothing is written unless every problem passes."""
        backend = backends.pick(self.backend, device, self.config)
        prepare, together = gated.of(backend.prepare), getattr(backend, "prepare_list", None)
        calls = [
            (p, arguments.check_alpha(p.alpha, device), arguments.check_bias(p.bias, p.b.shape[-2], device))
            for p in problems
        ]
        with threads.exact_arithmetic():
            if len(problems) > 1 and together is not None:
                list_of = [lists.Product(p.a, p.b, p.out, alpha, bias) for p, alpha, bias in calls]
                launch = together(list_of, activation=self.activation, config=self.config)
                if launch is not None:
                    return [launch()]
            launches = [
                prepare(
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


def _refuse(form: str, **unwanted: Any) -> None:
    for name, value in unwanted.items():
        if value is not None:
            raise ValueError(f"{name}: given, but it does not go with the {form} form; expected None")
