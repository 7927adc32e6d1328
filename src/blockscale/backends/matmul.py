"""Products of Hopper by a matrix product of others: weights are expanded to bf16 or fp16, a strip of rows at a time,
which is exact, and go through cuBLAS. Where there is no GPU, torch does both, in fp32.

cuBLAS sums in one chain along k from about 1,000 rows on, and of positive numbers that loses `LOSS`, more than the
result contract allows: so k is cut into parts, whose sums are added in fp32, unless a strip is asked for.

Global scales and alpha are multiplied on the device, while the first strip is expanded, and cuBLAS takes their product
from there; it adds a bias and rounds once. What it does not do (a 16-bit result of another dtype than activations or
bias have, another activation than relu, parts of k in 16 bits) is done in fp32 first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from blockscale import arguments, expansion
from blockscale.backends import gpu
from blockscale.expansion import Factors
from blockscale.formats.layouts import BLOCK, FRAGMENT, K_ALIGN, LINEAR, round_up
from blockscale.launch import cublas, cuda, emulated
from blockscale.plan import Launcher
from blockscale.problem import Target
from blockscale.tensor import NVFP4Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], object]] = {  # in place
    "relu": torch.relu_,
    "gelu": lambda y: y.copy_(torch.nn.functional.gelu(y)),
    "silu": lambda y: torch.nn.functional.silu(y, inplace=True),
}
LOSS = {torch.bfloat16: 5.6, torch.float16: 7.0}  # of cuBLAS's sums of positive numbers over 1,024 k, in units of 2^-20
STRIP = 1 << 26  # elements of a weight that are expanded at a time
ROWS = 4096  # of sums that are not yet what is asked for


@dataclass(frozen=True)
class _Product:
    """What the products of all matrices share.

    Attributes:
        launcher: None where torch does everything. one: fp32 () 1.0 on the device.
        strip: rows of a weight at a time, summed in one chain along k; 0: as the contract takes it.
    """

    launcher: Launcher | None
    one: Tensor
    factors: Factors
    bias: Tensor | None
    activation: str | None
    strip: int

    def ends_in(self, out: Tensor, dtype: torch.dtype) -> bool:
        """Whether cuBLAS, given numbers of `dtype`, writes there what is right, but for a relu."""
        exact = self.bias is None or self.bias.dtype == out.dtype or out.dtype == torch.float32
        return exact and out.dtype in (dtype, torch.float32) and self.activation in (None, "relu")

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, parts: list[slice], columns: slice) -> None:
        """out = act(total x @ weight^T + bias), these columns of it; k part by part."""
        if self.bias is not None:
            out.copy_(self.bias[columns])
        added = None if self.bias is None else self.one
        for part in parts:
            _multiply(x[:, part], weight[:, part], out, self.factors.total, added)
            added = self.one
        if self.activation is not None:
            ACTIVATIONS[self.activation](out)


def product(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Tensor,
    *,
    target: Target,
    alpha: float | Tensor = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    strip: int = 0,
) -> None:
    """out = act(alpha x a @ b^T + bias); the caller has checked the arguments. `strip` as of `Config.expand`.

    Raises:
        TypeError, ValueError: operands that were put together by hand are not dense. CompilerMissing, CompileError: the
            kernel that expands has to be compiled and cannot be. RuntimeError: cuBLAS is not there or refuses.
    """
    launcher = cuda.launcher(target, out.device) if out.is_cuda else emulated.active()
    layouts = expansion.LAYOUTS if launcher is not None else (LINEAR,)
    weight = b if b.layout in layouts else b.with_layout(LINEAR)
    gpu.check_dense("b", weight)
    one = b.global_scale.new_ones(()) if launcher is None else launcher.one
    checked = arguments.check_alpha(alpha, out.device)
    factor, tensor = (1.0, checked) if isinstance(checked, Tensor) else (checked, one)
    unit = a.global_scale if isinstance(a, NVFP4Tensor) else one
    factors = Factors(unit, b.global_scale, tensor, factor, _pair(out.device), folded=True)
    x = expand(launcher, a) if isinstance(a, NVFP4Tensor) else a
    shared = _Product(launcher, one, factors, bias, activation, strip)
    for rows, matrix, result in _matrices(x, weight, out):
        _by_strips(shared, rows, matrix, result)


def _pair(device: torch.device) -> Tensor:
    """Two fp32 numbers, whatever the caller's default dtype."""
    return torch.empty(2, dtype=torch.float32, device=device)


def _matrices(x: Tensor, weight: NVFP4Tensor, out: Tensor) -> Iterator[tuple[Tensor, NVFP4Tensor, Tensor]]:
    """Products of two matrices, as few as do it: rows of activations, the weight and rows of the result."""
    batch = out.shape[:-2]
    if math.prod(weight.shape[:-2]) == 1:
        rows = x.expand(*batch, -1, -1).reshape(-1, x.shape[-1])
        if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
            rows = rows.contiguous()
        if gpu.rows_apart(out) is not None:
            yield rows, _matrix(weight, 0), out.view(-1, out.shape[-1])
            return
        result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        yield rows, _matrix(weight, 0), result.view(-1, out.shape[-1])
        out.copy_(result)
        return
    numbers = np.broadcast_to(np.arange(math.prod(weight.shape[:-2])).reshape(weight.shape[:-2]), batch)
    wide = x.expand(*batch, -1, -1)
    for at in itertools.product(*map(range, batch)):
        yield from _matrices(wide[at], _matrix(weight, int(numbers[at])), out[at])


def _matrix(t: NVFP4Tensor, number: int) -> NVFP4Tensor:
    """One of a batch, without a copy."""
    kept = 3 if t.layout == FRAGMENT else 2
    codes = t.codes.view(-1, *t.codes.shape[-kept:])[number]
    scales = t.scales if t.layout == FRAGMENT else t.scales.view(-1, *t.scales.shape[-2:])[number]
    return replace(t, codes=codes, scales=scales, shape=t.shape[-2:])


def _by_strips(product: _Product, x: Tensor, weight: NVFP4Tensor, out: Tensor) -> None:
    n, k = weight.shape
    aligned = expansion.strip_rows(weight.layout)
    step = min(round_up(n, aligned), round_up(product.strip or max(1, STRIP // k), aligned))
    dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
    numbers = torch.empty(step, expansion.width(k), dtype=dtype, device=x.device)
    parts = [slice(0, x.shape[-1])] if product.strip else _parts(x.shape[-1], x.dtype)
    direct = product.ends_in(out, dtype) and (len(parts) == 1 or out.dtype == torch.float32)
    block = len(x) if direct else ROWS
    sums = None if direct else torch.empty(min(len(x), block), step, dtype=torch.float32, device=x.device)
    for start in range(0, n, step):
        strip = slice(start, min(start + step, n))
        columns = numbers[: strip.stop - strip.start]
        _expand(product.launcher, weight, columns, strip, product.factors)
        for first in range(0, len(x), block):
            rows = x[first : first + block]
            target = out[first : first + block, strip]
            result = target if sums is None else sums[: len(rows), : len(columns)]
            product.multiply(rows, columns, result, parts, strip)
            if sums is not None:
                target.copy_(result)


def _parts(k: int, dtype: torch.dtype) -> list[slice]:
    """k cut into parts whose sums keep the contract."""
    count = math.ceil(LOSS.get(dtype, 0.0) * k / (4096 + k)) or 1
    step = round_up(-(-k // count), K_ALIGN)
    return [slice(start, min(start + step, k)) for start in range(0, k, step)]


def _multiply(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, one: Tensor | None) -> None:
    """out = total x @ weight^T, and with a `one` of fp32 what is in `out` is added."""
    if out.is_cuda and x.dtype != torch.float32:
        cublas.multiply(x, weight, out, total[0], total[1] if one is None else one)
        return
    y = (x.float() @ weight.float().T).mul_(total[0])
    out.copy_(y if one is None else y.add_(out))


def expand(launcher: Launcher | None, t: NVFP4Tensor) -> Tensor:
    """code x scale as bf16, (..., M, width(K)), exact."""
    t = t if t.layout in expansion.LAYOUTS else t.with_layout(LINEAR)
    gpu.check_dense("a", t)
    out = torch.empty(*t.shape[:-1], expansion.width(t.shape[-1]), dtype=torch.bfloat16, device=t.device)
    if launcher is None:
        _fill(out, values(t, out.dtype))
    else:
        expansion.expand(launcher, t, out)
    return out


def _expand(launcher: Launcher | None, weight: NVFP4Tensor, out: Tensor, strip: slice, factors: Factors) -> None:
    """As `expansion.expand`, which is for kernels."""
    if launcher is not None:
        expansion.expand(launcher, weight, out, strip, factors)
        return
    size = torch.Size((len(out), weight.shape[-1]))
    part = replace(weight, codes=weight.codes[strip], scales=weight.scales[strip], shape=size)
    _fill(out, values(part, out.dtype))
    units = factors.unit.double() * factors.other.double()
    factors.total.copy_(torch.stack((units * factors.alpha.double() * factors.factor, torch.zeros_like(units))))


def _fill(out: Tensor, numbers: Tensor) -> None:
    """Zeros beyond K."""
    k = numbers.shape[-1]
    out[..., :k] = numbers
    out[..., k:] = 0


def values(t: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """code x scale, (..., M, K) in `dtype`, by torch.

    E2M1's exponent and mantissa, put where bf16 has its own, make a number that is 2^126 too small: the difference
    between the two formats' exponent biases. That holds for E2M1's subnormal 0.5 too.
    """
    t = t.with_layout(LINEAR)
    nibbles = torch.stack((t.codes & 0xF, t.codes >> 4), dim=-1).flatten(-2).to(torch.int16)
    bits = ((nibbles & 7) << 6) | ((nibbles & 8) << 12)
    found = bits.view(torch.bfloat16).float().mul_(2.0**126)
    found.view(*t.scales.shape, BLOCK).mul_(t.scales.float().unsqueeze(-1))
    return found.to(dtype)[..., : t.shape[-1]]
