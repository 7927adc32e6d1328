"""Products of Hopper whose activations are NVFP4: expanded to bf16, which is exact, then multiplied by the kernels that
take such activations. The first kernel multiplies both global scales and alpha too; the second one reads weights while
the first one runs, which waits for everything ahead of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockscale import arguments, expansion, heuristics
from blockscale.backends import gpu
from blockscale.config import Config
from blockscale.expansion import Factors
from blockscale.formats.layouts import LINEAR
from blockscale.plan import Launcher
from blockscale.problem import Target
from blockscale.tensor import NVFP4Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """As `gpu.Call`, for activations in NVFP4: `product` is the call of the second kernel."""

    launcher: Launcher
    product: gpu.Call

    def __call__(
        self, a: NVFP4Tensor, b: NVFP4Tensor, out: Tensor | None, alpha: float | Tensor | None, bias: Tensor | None
    ) -> gpu.Result:
        x, weight, factors = operands(self.launcher, a, b, alpha)
        expansion.expand(self.launcher, a, x, factors=factors)
        return self.product(x, weight, out, factors.total[1], bias)


def prepare(
    a: NVFP4Tensor,
    b: NVFP4Tensor,
    out: Tensor,
    *,
    target: Target,
    alpha: float | Tensor = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
    config: Config | None = None,
) -> Callable[[], Call | None]:
    """As `gpu.prepare`, for a weight that the kernels of `target` take. Raises: likewise."""
    launcher = gpu.launcher(target, out.device)
    left = a if a.layout in expansion.LAYOUTS else a.with_layout(LINEAR)
    gpu.check_dense("a", left)
    x, weight, factors = operands(launcher, left, b, alpha)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "invariant": invariant}
    if config is None and out.numel():
        problem, _ = gpu.problem_of(x, weight, out, **options)
        chosen = heuristics.choose(problem, launcher.target).config
        config = replace(chosen, ahead=chosen.pdl)
    options["config"] = config
    multiply = gpu.prepare(x, weight, out, target=target, alpha=factors.total[1], **options)

    def launch() -> Call | None:
        expansion.expand(launcher, left, x, factors=factors)
        product = multiply()
        return None if product is None or left is not a else Call(launcher, product)

    return launch


def operands(
    launcher: Launcher, a: NVFP4Tensor, b: NVFP4Tensor, alpha: float | Tensor | None
) -> tuple[Tensor, NVFP4Tensor, Factors]:
    """What the second kernel is given: activations and a weight whose global scale is one of two factors, the other one
    being its alpha; the first kernel fills all three in."""
    x = torch.empty(*a.shape[:-1], expansion.width(a.shape[-1]), dtype=torch.bfloat16, device=a.device)
    total = torch.empty(2, dtype=torch.float32, device=a.device)
    if total.is_cpu:
        total.fill_(1.0)  # there they are looked at beforehand
    checked = arguments.check_alpha(alpha, a.device)
    factor, tensor = (1.0, checked) if isinstance(checked, Tensor) else (checked, launcher.one)
    factors = Factors(a.global_scale, b.global_scale, tensor, factor, total)
    return x, replace(b, global_scale=total[0]), factors
