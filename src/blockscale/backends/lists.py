"""Products of any shapes in one go, where a GPU family has a kernel for lists: a table on the device says where each
one's operands are, and how large.

Table and tensor maps are made anew for each launch, in its stream's order, so that launches on several streams do not
meet and a captured graph has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockscale import plan
from blockscale.backends import gpu
from blockscale.config import Config
from blockscale.formats.layouts import ATOMS, ROW_ALIGN, blocks, round_up
from blockscale.heuristics import Unsupported
from blockscale.plan import Launcher
from blockscale.problem import NVFP4, OUT_BYTES, GroupedProblem, Target
from blockscale.tensor import KERNEL_ALIGN, NVFP4Tensor

COLUMNS = 16  # of a product's row in the table
MAP_BYTES = 512  # of a product's tensor maps


class Product(NamedTuple):
    """One of a list, its arguments checked: a (M, K), b (N, K), out (M, N)."""

    a: NVFP4Tensor | Tensor
    b: NVFP4Tensor
    out: gpu.Result
    alpha: float | Tensor
    bias: Tensor | None


def prepare(
    products: Sequence[Product], *, target: Target, activation: str | None = None, config: Config | None = None
) -> Callable[[], None] | None:
    """One launch for all, checked and planned; the returned function does it. None where the kernel for lists does not
    do these, and each has to be launched by itself.

    Raises:
        CompilerMissing, CompileError: the kernel has to be compiled and cannot be.
    """
    some = [p for p in products if p.out.shape.numel()]
    if len(some) < 2 or not _alike(some):
        return None
    device = gpu.launcher(target, some[0].out.device)
    problem = _problem(some, activation)
    try:
        made = plan.plan(problem, device, config, problem.columns)
    except Unsupported:
        return None
    rows, held, windows = [], [], []
    for p in some:
        row, kept, touched = _row(p, device)
        rows.append(row)
        held.append(kept)
        windows += touched
    factor = next((p.alpha for p in some if isinstance(p.alpha, float)), 1.0)
    if any(address % KERNEL_ALIGN for row in rows for address in row[:4]):
        return None  # operands that are not aligned are copied, or refused, one by one

    def launch() -> None:
        table = _table(rows, some[0].out.device)
        maps = torch.empty(MAP_BYTES * len(rows) + 128, dtype=torch.uint8, device=table.device)
        at = round_up(maps.data_ptr(), 128)
        made.run([table.data_ptr(), at], factor, windows)
        del held[:]  # which had to live until here

    return launch


def _alike(products: Sequence[Product]) -> bool:
    """Whether one kernel could do them all, its layouts and dtypes being of one kind."""
    kinds = {(p.out.dtype, None if p.bias is None else p.bias.dtype) for p in products if isinstance(p.out, Tensor)}
    factors = {p.alpha if isinstance(p.alpha, float) else None for p in products}
    return (
        len(kinds) == len(factors) == 1
        and all(isinstance(p.a, NVFP4Tensor) and isinstance(p.out, Tensor) for p in products)
        and all(_writable(p.out) for p in products)
        and all(p.bias is None or p.bias.is_contiguous() for p in products)
    )


def _writable(out: Any) -> bool:
    return gpu.rows_apart(out) is not None and out.data_ptr() % out.element_size() == 0


def _problem(products: Sequence[Product], activation: str | None) -> GroupedProblem:
    first = products[0]
    assert isinstance(first.out, Tensor)
    return GroupedProblem(
        m=max(p.a.shape[0] for p in products),
        n=max(p.b.shape[0] for p in products),
        k=max(p.b.shape[1] for p in products),
        a=NVFP4,
        out_dtype=gpu.DTYPE_NAMES[first.out.dtype],
        bias=None if first.bias is None else gpu.DTYPE_NAMES[first.bias.dtype],
        activation=activation,
        form="list",
        groups=len(products),
    )


def _row(p: Product, device: Launcher) -> tuple[tuple[int, ...], list[Tensor], list[tuple[int, int]]]:
    """A product's row of the table, what its addresses are of, and what a kernel may touch: (address, bytes)."""
    assert isinstance(p.a, NVFP4Tensor)
    assert isinstance(p.out, Tensor)
    a, b = p.a.with_layout(ATOMS), p.b.with_layout(ATOMS)
    for name, operand in (("a", a), ("b", b)):
        gpu.check_dense(name, operand)
    (m, k), n, ld_out = a.shape, b.shape[0], gpu.rows_apart(p.out) or p.out.shape[1]
    alpha = p.alpha if isinstance(p.alpha, Tensor) else device.one
    bias = device.one if p.bias is None else p.bias
    held = [a.codes, b.codes, a.scales, b.scales, p.out, a.global_scale, b.global_scale, alpha, bias]
    depth = blocks(k)
    out_bytes = ((m - 1) * ld_out + p.out.shape[1]) * OUT_BYTES[gpu.DTYPE_NAMES[p.out.dtype]]
    sizes = [8 * m * depth, 8 * n * depth, round_up(m, ROW_ALIGN) * depth, round_up(n, ROW_ALIGN) * depth, out_bytes]
    sizes += [4, 4, 4, 4 if p.bias is None else n * p.bias.element_size()]
    addresses = [t.data_ptr() for t in held]
    row = (*addresses, m, n, 16 * depth, ld_out)
    return row, held, list(zip(addresses, sizes, strict=True))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """(products x COLUMNS,) int64 on `device`. On a GPU its numbers travel as arguments of small kernels: nothing is
    copied from the host, so nothing waits, and a captured graph has a table of its own."""
    numbers = [number for row in rows for number in (*row, *(0 for _ in range(COLUMNS - len(row))))]
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(list(table.unbind()), numbers)
    return table
