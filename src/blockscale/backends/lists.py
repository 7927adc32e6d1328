"""Products of any shapes in one go, where a GPU family has a kernel for lists: a table on the device says where each
one's operands are, and how large.

Table and tensor maps are made anew for each launch, in its stream's order, so that launches on several streams do not
meet and a captured graph has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockscale import arguments, plan
from blockscale.backends import gpu
from blockscale.config import Config
from blockscale.formats.layouts import ATOMS, ROW_ALIGN, blocks, round_up
from blockscale.heuristics import Unsupported
from blockscale.plan import Plan
from blockscale.problem import NVFP4, GroupedProblem, Target
from blockscale.tensor import KERNEL_ALIGN, NVFP4Tensor

COLUMNS = 16  # of a product's row in the table
OUT = 4  # the result's among its addresses, behind codes and scales
Addresses = tuple[int, ...]
"""Of a product's codes and scales of a and b, a and b in turn; of its result, the global scales, alpha, bias."""
MAP_BYTES = 512  # of a product's tensor maps


class Product(NamedTuple):
    """One of a list, its arguments checked: a (M, K), b (N, K), out (M, N)."""

    a: NVFP4Tensor | Tensor
    b: NVFP4Tensor
    out: gpu.Result
    alpha: float | Tensor
    bias: Tensor | None


class Place(NamedTuple):
    """What a product's row of the table has beside addresses.

    Attributes:
        number: of the product in its list.
        sizes: m, n, k of storage, elements between rows of the result. nbytes: what a kernel may touch at each address.
    """

    number: int
    sizes: tuple[int, int, int, int]
    nbytes: tuple[int, ...]

    def windows(self, row: Addresses) -> Iterator[tuple[int, int]]:
        """(address, bytes) of what a kernel may touch."""
        return zip(row, self.nbytes, strict=True)


@dataclass(frozen=True, eq=False)
class ListCall:
    """A plan, called with lists of operands and results whose properties fit it; values are not looked at, but for an
    alpha's on the CPU.

    Attributes:
        places: of those products that have a result. shapes: of the results of all.
    """

    plan: Plan
    places: tuple[Place, ...]
    shapes: tuple[torch.Size, ...]
    out_dtype: torch.dtype
    device: torch.device

    def __call__(
        self,
        a: Sequence[NVFP4Tensor],
        b: Sequence[NVFP4Tensor],
        out: Sequence[Tensor] | None,
        alpha: float | Tensor | None,
        bias: Tensor | None,
    ) -> list[Tensor] | None:
        """Checks what depends on addresses and values, and launches; makes the results if `out` is None. None where an
        operand is not aligned, and nothing was launched.

        Raises:
            ValueError: a result overlaps an operand or another result, or alpha is not finite.
        """
        several = isinstance(alpha, Tensor)
        for value in alpha.reshape(-1).tolist() if isinstance(alpha, Tensor) and alpha.is_cpu else ():
            arguments.check_alpha(value, self.device)
        factor = 1.0 if alpha is None or several else float(arguments.check_alpha(alpha, self.device))
        one = self.plan.launcher.one
        outs = list(out or (torch.empty(shape, dtype=self.out_dtype, device=self.device) for shape in self.shapes))
        alphas, biases = _addresses(alpha, 0, len(outs), one), _addresses(bias, 1, len(outs), one)
        rows = [
            addresses_of(a[i], b[i], outs[i], alphas[i], biases[i]) for i in (place.number for place in self.places)
        ]
        if not are_aligned(rows):
            return None
        if out is not None and self._may_overlap(rows):
            inputs = {"a": a, "b": b, "alpha": alpha, "bias": bias}
            arguments.check_overlap({f"out[{i}]": part for i, part in enumerate(outs)}, inputs)
        self.launch(rows, factor)
        return outs

    def launch(self, rows: Sequence[Addresses], factor: float) -> None:
        """With the addresses of each place; makes its table and tensor maps."""
        whole = [(*row, *place.sizes) for row, place in zip(rows, self.places, strict=True)]
        table = _table(whole, self.device)
        maps = torch.empty(MAP_BYTES * len(rows) + 128, dtype=torch.uint8, device=self.device)
        windows = [window for row, place in zip(rows, self.places, strict=True) for window in place.windows(row)]
        self.plan.run([table.data_ptr(), round_up(maps.data_ptr(), 128)], factor, windows)

    def _may_overlap(self, rows: Sequence[Addresses]) -> bool:
        """Whether a result's first to last byte meets those of anything else."""
        spans = []
        for row, place in zip(rows, self.places, strict=True):
            spans += [(at, at + nbytes, i == OUT) for i, (at, nbytes) in enumerate(place.windows(row))]
        end = end_of_results = 0
        for start, stop, written in sorted(spans):
            if start < (end if written else end_of_results):
                return True
            end, end_of_results = max(end, stop), max(end_of_results, stop if written else 0)
        return False


def prepare(
    products: Sequence[Product], *, target: Target, activation: str | None = None, config: Config | None = None
) -> Callable[[], ListCall | None] | None:
    """One launch for all, checked and planned; the returned function does it. None where the kernel for lists does not
    do these, and each has to be launched by itself.

    Returns:
        A function that launches. It returns a `ListCall` that does the same for lists of the same properties, or None
        where there was a copy.

    Raises:
        CompilerMissing, CompileError: the kernel has to be compiled and cannot be.
    """
    some = [(i, p) for i, p in enumerate(products) if p.out.shape.numel()]
    if len(some) < 2 or not _alike([p for _, p in some]):
        return None
    first = some[0][1].out
    assert isinstance(first, Tensor)
    device = gpu.launcher(target, first.device)
    problem = _problem([p for _, p in some], activation)
    try:
        made = plan.plan(problem, device, config, problem.columns)
    except Unsupported:
        return None
    held, rows, places = [], [], []
    for i, p in some:
        operands = _operands(p)
        alpha = p.alpha if isinstance(p.alpha, Tensor) else device.one
        bias = device.one if p.bias is None else p.bias
        held.append((operands, alpha, bias))
        rows.append(addresses_of(*operands, p.out, alpha.data_ptr(), bias.data_ptr()))
        places.append(_place(i, p))
    if not are_aligned(rows):
        return None  # operands that are not aligned are copied, or refused, one by one
    factor = next((p.alpha for _, p in some if isinstance(p.alpha, float)), 1.0)
    call = ListCall(made, tuple(places), tuple(p.out.shape for p in products), first.dtype, first.device)

    def launch() -> ListCall | None:
        call.launch(rows, factor)
        same = all(a is p.a and b is p.b for ((a, b), _, _), (_, p) in zip(held, some, strict=True))
        del held[:]  # which had to live until here
        return call if same else None

    return launch


def signature(a: Any, b: Any, out: Any, alpha: Any, bias: Any, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """As `gpu.signature`, of a list of products."""
    lists = [a, b] if out is None else [a, b, out]
    if not all(isinstance(x, (list, tuple)) for x in lists) or any(type(x) is not NVFP4Tensor for x in b):
        return None
    kinds = [tuple(map(gpu.kind_of, x)) for x in lists]
    beside = gpu.kind_of(bias), gpu.factor_kind(alpha)
    if gpu.UNKNOWN in beside or any(gpu.UNKNOWN in own for own in kinds):
        return None
    return "list", *kinds, beside, torch.is_inference_mode_enabled(), options


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


def _operands(p: Product) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """As the kernel reads them."""
    assert isinstance(p.a, NVFP4Tensor)
    a, b = p.a.with_layout(ATOMS), p.b.with_layout(ATOMS)
    for name, operand in (("a", a), ("b", b)):
        gpu.check_dense(name, operand)
    return a, b


def _place(number: int, p: Product) -> Place:
    assert isinstance(p.out, Tensor)
    (m, k), n, ld_out = p.a.shape, p.b.shape[0], gpu.rows_apart(p.out) or p.out.shape[1]
    depth = blocks(k)
    out_bytes = ((m - 1) * ld_out + p.out.shape[1]) * p.out.element_size()
    nbytes = [8 * m * depth, 8 * n * depth, round_up(m, ROW_ALIGN) * depth, round_up(n, ROW_ALIGN) * depth, out_bytes]
    nbytes += [4, 4, 4, 4 if p.bias is None else n * p.bias.element_size()]
    return Place(number, (m, n, 16 * depth, ld_out), tuple(nbytes))


def addresses_of(a: NVFP4Tensor, b: NVFP4Tensor, out: Any, alpha: int, bias: int) -> Addresses:
    """In the order of the table; `alpha` and `bias` are addresses."""
    held = a.codes, b.codes, a.scales, b.scales, out, a.global_scale, b.global_scale
    return *(t.data_ptr() for t in held), alpha, bias


def are_aligned(rows: Sequence[Addresses]) -> bool:
    """Whether codes and scales lie where the kernel can read them."""
    return not any(address % KERNEL_ALIGN for row in rows for address in row[:OUT])


def _addresses(value: float | Tensor | None, inner: int, count: int, one: Tensor) -> list[int]:
    """Of each product's alpha or bias: parts of a tensor of more than `inner` dimensions, or what all share."""
    if not isinstance(value, Tensor):
        return [one.data_ptr()] * count
    step = value.stride(0) * value.element_size() if value.ndim > inner else 0
    return [value.data_ptr() + i * step for i in range(count)]


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """(products x COLUMNS,) int64 on `device`. On a GPU its numbers travel as arguments of small kernels: nothing is
    copied from the host, so nothing waits, and a captured graph has a table of its own."""
    numbers = [number for row in rows for number in (*row, *(0 for _ in range(COLUMNS - len(row))))]
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(list(table.unbind()), numbers)
    return table
