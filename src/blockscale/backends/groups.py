"""Grouped products by kernels of their own: operands in, plan out, one launch. The host never reads a size.

As for single products (gpu.py), `prepare` is the whole line but for the launch, and a `GroupedCall` its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockscale import families, grouped, plan
from blockscale.backends import gpu
from blockscale.backends.gated import multiply
from blockscale.backends.loop import belong_to, store, take_over
from blockscale.config import Config
from blockscale.formats.layouts import ATOMS, GROUPED
from blockscale.grouped import Grouped
from blockscale.problem import GATED, NVFP4, GroupedProblem, Target
from blockscale.tensor import NVFP4Tensor

Tables = tuple[Tensor | None, Tensor | None, Tensor | None]
"""group_sizes, group_offsets and masked_m of a call."""


def inputs(product: Grouped) -> dict[str, Any]:
    """What a result must not overlap, by the names of arguments."""
    return {"a": product.a, "b": product.b, "alpha": product.alpha, "bias": product.bias, "groups": product.table}


def prepare(
    product: Grouped, *, target: Target, activation: str | None = None, config: Config | None = None
) -> Callable[[], GroupedCall | None]:
    """One launch for all groups, checked and planned; the returned function does it. Scales in another layout than the
    kernel's, results of other strides than it writes, and tables of int64 are copied, by the device.

    Returns, raises: as `gpu.prepare`.
    """
    a, b, out = product.a, product.b, product.out
    device = gpu.launcher(target, out.device)
    problem = _problem(product, activation)
    beside = problem.activation in GATED or problem.out_dtype == NVFP4
    if beside and families.unsupported(problem, device.target) is not None:
        return _apart(product, activation, target=target, config=config)
    if math.prod(out.shape) == 0 or product.groups == 0:
        plan.configure(problem, device.target, config)
        return lambda: None
    ld_out = gpu.rows_apart(out)
    made = plan.plan(problem, device, config, problem.columns if ld_out is None else ld_out)
    layout = GROUPED if product.form == "contiguous" else ATOMS
    left = _left(product, layout)
    right = b.with_layout(made.family.LAYOUTS["b"])
    for name, operand in (("a", left), ("b", right)):
        if isinstance(operand, NVFP4Tensor):
            gpu.check_dense(name, operand)
    result = _writable(product, ld_out, layout)
    alpha = product.alpha.contiguous() if isinstance(product.alpha, Tensor) else product.alpha
    bias = None if product.bias is None else product.bias.contiguous()
    table = product.table.to(torch.int32).contiguous()
    call = GroupedCall(made, problem.out_dtype, out.shape, problem)
    pointers, factor, held = call.arguments(left, right, result, alpha, bias, table)

    def launch() -> GroupedCall | None:
        made.run(pointers, factor)
        if result is not out:
            _copy(result, product)
        elif isinstance(out, NVFP4Tensor):
            belong_to(out, product.sizes)
        del held[:]  # which had to live until here
        given = a, b, product.alpha, product.bias, out, product.table
        same = all(x is y for x, y in zip(given, (left, right, alpha, bias, result, table), strict=True))
        return call if same else None

    return launch


def _apart(
    product: Grouped, activation: str | None, *, target: Target, config: Config | None
) -> Callable[[], GroupedCall | None]:
    """Where the kernel cannot split a weight between gate and up, or quantise: its results in fp32, and the rest in
    operations of torch on the same device, which look at no size either. Rows of no group become 0."""
    gate = activation if activation in GATED else None
    shape = (*product.out.shape[:-1], product.b.shape[-2])
    y = torch.zeros(shape, dtype=torch.float32, device=product.out.device)
    within = None if gate else activation
    launch = prepare(replace(product, out=y), target=target, activation=within, config=config)

    def run() -> None:
        launch()
        if gate is None:
            store(y, product)
            return
        result = torch.empty(product.out.shape, dtype=torch.float32, device=product.out.device)
        multiply(y, gate, result)
        store(result, product)

    return run


def _problem(product: Grouped, activation: str | None) -> GroupedProblem:
    """Sizes of 0 count as 1, for what else there is to check."""
    a, b, out, groups = product.a, product.b, product.out, max(1, product.groups)
    of_a, of_out = (NVFP4 if isinstance(x, NVFP4Tensor) else gpu.DTYPE_NAMES[x.dtype] for x in (a, out))
    return GroupedProblem(
        m=max(1, a.shape[-2]),
        n=max(2 if activation in GATED else 1, b.shape[-2]),
        k=a.shape[-1],
        a=of_a,
        out_dtype=of_out,
        bias=None if product.bias is None else gpu.DTYPE_NAMES[product.bias.dtype],
        activation=activation,
        form=product.form,
        groups=groups,
        alphas=groups if isinstance(product.alpha, Tensor) and product.alpha.ndim else 1,
        biases=groups if product.bias is not None and product.bias.ndim == 2 else 1,
        ends=product.ends,
    )


@dataclass(frozen=True, eq=False)
class GroupedCall(gpu.Call):
    """A plan, called with operands, a result and a table of groups whose properties fit it; values are not looked at,
    but for those of a table on the CPU."""

    problem: GroupedProblem

    def __call__(  # type: ignore[override] # a grouped product has tables
        self,
        a: NVFP4Tensor | Tensor,
        b: NVFP4Tensor,
        out: gpu.Result | None,
        alpha: float | Tensor | None,
        bias: Tensor | None,
        tables: Tables,
    ) -> gpu.Result:
        """Checks what depends on addresses and values, and launches; makes the result if `out` is None.

        Raises:
            ValueError: an operand is not aligned, `out` overlaps one, alpha is not finite, or a table on the CPU is not
                one of groups.
        """
        group_sizes, group_offsets, masked_m = tables
        if masked_m is None:
            table, ends = grouped.table_of(a, self.problem.groups, group_sizes, group_offsets)
        else:
            table, ends = masked_m, False
            grouped.check_mask(masked_m, self.problem.groups, self.problem.m, b.device)
        if out is None:
            new = torch.empty if masked_m is None else torch.zeros
            out = new(self.shape, dtype=gpu.DTYPES[self.out_dtype], device=b.codes.device)
        pointers, factor, _held = self.arguments(a, b, out, alpha, bias, table)
        self.plan.run(pointers, factor)
        if isinstance(out, NVFP4Tensor):
            belong_to(out, grouped.sizes_of(table, ends))
        return out


def signature(
    a: Any, b: Any, out: Any, alpha: Any, bias: Any, tables: Tables, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """As `gpu.signature`, of a grouped product that is no list; None where every call has to be looked at anew."""
    own = (x.group_sizes if isinstance(x, NVFP4Tensor) else None for x in (a, out))  # a's may be the table
    kinds = tuple(gpu.kind_of(table) for table in (*tables, *own))
    if gpu.UNKNOWN in kinds:
        return None
    return gpu.signature(a, b, out, alpha, bias, ("grouped", kinds, *options))


def _left(product: Grouped, layout: str) -> NVFP4Tensor | Tensor:
    """`a` as a kernel reads it."""
    a = product.a
    if not isinstance(a, NVFP4Tensor):
        return a.contiguous()
    return a if a.layout == layout else a.with_layout(layout, product.sizes if layout == GROUPED else None)


def _writable(product: Grouped, ld_out: int | None, layout: str) -> gpu.Result:
    """The result, or what a kernel writes in its place: dense, and with scales in the kernel's layout."""
    out = product.out
    if isinstance(out, Tensor):
        return out if ld_out is not None else out.clone(memory_format=torch.contiguous_format)
    if out.layout == layout:
        return out
    if layout == ATOMS:  # with what lies beyond the mask
        return replace(out.with_layout(layout), codes=out.codes.clone())
    unit, sizes = out.global_scale, product.sizes
    return NVFP4Tensor.zeros(out.shape, global_scale=unit, layout=layout, group_sizes=sizes, device=out.device)


def _copy(result: gpu.Result, product: Grouped) -> None:
    if isinstance(product.out, Tensor):
        assert isinstance(result, Tensor)
        product.out.copy_(result)
    else:
        assert isinstance(result, NVFP4Tensor)
        take_over(result, product.out, product.sizes)
