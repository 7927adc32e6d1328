"""What the proof of a kernel for grouped products runs, beside what all proofs share (sweep.py): forms, numbers of
groups, and splits of rows among them are properties of a product, so that they meet every configuration.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sweep
import torch
from grouped_products import GATED, by_group, of_group, table
from operands import POISON, quantize_on_cpu, same_bits
from sweep import DTYPES, UNIT, Shape, Sweep

import blockscale as bs
from blockscale import families, heuristics, reference
from blockscale.config import Config
from blockscale.formats.layouts import ATOMS, GROUPED
from blockscale.problem import NVFP4, GroupedProblem

PRODUCT: dict[str, tuple[object, ...]] = {
    "form": ("contiguous", "masked", "list"),
    "groups": (3, 1, 5, 8, 60, 64, 256),
    "spread": ("random", "one", "single", "around"),
    "ends": (False, True),
    "out_dtype": (*DTYPES, NVFP4),
    "bias": (None, "fp32", "fp16", "bf16"),
    "activation": (None, "relu", "gelu", "silu", "swiglu", "geglu"),
    "alpha": ("none", "float", "tensor"),
    "each": (False, True),  # whether a bias, and an alpha that is a tensor, are one for each group
}
ROWS = 40  # of all groups, where they are split at random or all of one
AROUND = (129, 0, 1, 17)  # rows of the first groups, around atoms, boxes and widths
MANY = 60  # groups, of which fewer have rows
MOST_SINGLE = 12  # groups of one row
COLUMNS = (8, 72, 264, 1, 130, 40, 300, 16)  # of a result
GATED_COLUMNS = (128, 256)
DEPTHS = (80, 320, 208, 1, 272, 64, 16, 529, 640, 100)  # k
MOST_SECONDS = 1.5  # of the products of a row, about
Shapes = tuple[int, ...]


@dataclass(frozen=True)
class Groups(Shape):
    """Sizes of a grouped product, in all or the largest: m rows, n columns of the result, k.

    Attributes:
        sizes: rows of each group. columns, depths: of a list, n and k of each.
    """

    sizes: Shapes = ()
    columns: Shapes = ()
    depths: Shapes = ()

    def __str__(self) -> str:
        if self.columns:
            return " + ".join(f"{m}x{n}x{k}" for m, n, k in zip(self.sizes, self.columns, self.depths, strict=True))
        return f"{'+'.join(map(str, self.sizes))} by {self.n}x{self.k}"


@dataclass(frozen=True)
class Contest(Groups):
    """A shape of the competition as it is run. whole: as it is in the competition, and its choice is made for."""

    whole: Groups = Groups(1, 1, 1)


def a_list(m: Shapes, n: Shapes, k: Shapes, parts: int) -> Contest:
    """A list of products, with a part of each size."""
    return Contest(*_largest(m, n, k, parts), whole=Groups(*_largest(m, n, k, 1)))


def _largest(m: Shapes, n: Shapes, k: Shapes, parts: int) -> tuple[Any, ...]:
    """Fields of `Groups`."""
    part = [tuple(size // parts for size in sizes) for sizes in (m, n, k)]
    return *map(max, part), 0, 0, *part


def together(m: Shapes, n: int, k: int, parts: Shapes) -> Contest:
    """Groups with weights of one size, and parts of all sizes."""
    some = tuple(size // parts[0] for size in m)
    return Contest(sum(some), n // parts[1], k // parts[2], sizes=some, whole=Groups(sum(m), n, k, sizes=m))


def spread(kind: str, groups: int, number: int) -> Shapes:
    """Rows of each group, with empty ones wherever there are a few groups; which ones turns with `number`."""
    if kind == "one":
        return tuple(ROWS if e == number % groups else 0 for e in range(groups))
    if kind == "around":
        return tuple(AROUND[e] if e < len(AROUND) else 0 for e in range(groups))
    draw = random.Random(number)
    if kind == "single":
        some = draw.sample(range(groups), min(MOST_SINGLE, -(-groups * 2 // 3)))
        return tuple(int(e in some) for e in range(groups))
    to = [draw.randrange(groups) for _ in range(ROWS // 2 if groups >= MANY else ROWS)]
    return tuple(to.count(e) for e in range(groups))


@dataclass(frozen=True)
class Row(sweep.Row):
    """One configuration, and what its grouped products have."""

    form: str = "contiguous"
    groups: int = 3
    spread: str = "random"
    ends: bool = False
    each: bool = False

    def __str__(self) -> str:
        of = "ends" if self.ends else "sizes"
        return f"{super().__str__()}, each {self.each}; {self.form} {self.groups} {self.spread} {of}"

    @property
    def gate(self) -> str | None:
        return GATED.get(str(self.activation))

    def problem(self, shape: Shape) -> GroupedProblem:
        assert isinstance(shape, Groups)
        several = len(shape.sizes) if self.each and self.form != "list" else 1
        together = self.form == "contiguous"
        return GroupedProblem(
            sum(shape.sizes) if together else max(shape.sizes),
            shape.n * (2 if self.gate else 1),
            shape.k,
            out_dtype=self.out_dtype,
            bias=self.bias,
            activation=self.activation,
            form=self.form,
            groups=len([size for size in shape.sizes if size or self.form != "list"]),
            alphas=several if self.alpha == "tensor" else 1,
            biases=several if self.bias else 1,
            ends=self.ends and together,
        )

    def of(self, sizes: Shapes, n: int, k: int) -> Groups:
        """The products of groups; those of a list differ in columns, but beside a bias, and in k."""
        columns, depths = (n,) * len(sizes), (k,) * len(sizes)
        if self.form != "list":
            return Groups(sum(sizes), n, k, sizes=sizes)
        if not self.bias:
            columns = tuple(max(1, n - 17 * (e % 3)) for e in range(len(sizes)))
        depths = tuple(max(1, k - 48 * (e % 2)) for e in range(len(sizes)))
        return Groups(max(sizes), n, k, sizes=sizes, columns=columns, depths=depths)

    @property
    def least(self) -> Groups:
        return self.of(spread(self.spread, self.groups, 0), 128 if self.gate else 1, 64)

    @property
    def quick(self) -> bool:
        return self.out_dtype != NVFP4 and self.seconds(self.shapes(0)[-1]) < 0.3

    def does(self, shape: Shape) -> bool:
        assert isinstance(shape, Groups)
        if self.form == "list" and sum(size > 0 for size in shape.sizes) < 2:
            return False  # no list, and done by the kernel for one
        return super().does(shape)

    def shapes(self, number: int) -> list[Shape]:
        """Two products, or one if these take long; which ones turns with the row's number."""
        found: list[Shape] = []
        for i in range(2):
            sizes, k = spread(self.spread, self.groups, 2 * number + i), DEPTHS[(7 * number + i) % len(DEPTHS)]
            turned = sorted(GATED_COLUMNS if self.gate else COLUMNS, key=lambda n: n * (2 * number + i + 1) % 311)
            pool = [self.of(sizes, n, k) for n in turned]
            quick = [shape for shape in pool if self.seconds(shape) <= MOST_SECONDS / 2]
            found.append(quick[0] if quick else min(pool, key=self.seconds))
        return found if sum(map(self.seconds, found)) <= MOST_SECONDS else found[-1:]

    def multiply(self, shape: Shape, data: str, margin: int) -> torch.Tensor:
        """As `sweep.multiply`."""
        assert isinstance(shape, Groups)
        given = operands(shape, self.form, 2 if self.gate else 1, data)
        n = given.b[0].shape[0] if self.form == "list" else given.b.shape[-2]
        alpha, bias = self._alpha(len(shape.sizes), data), self._bias(len(shape.sizes), n)
        call: dict[str, Any] = {"alpha": alpha, "bias": bias, "activation": self.activation, "config": self.config}
        call |= given.tables(self.ends)
        dtype = DTYPES.get(self.out_dtype, torch.float32)
        wide = [torch.full((*size[:-1], size[-1] + margin), math.nan, dtype=dtype) for size in given.results]
        ys = [whole[..., : whole.shape[-1] - margin] for whole in wide]
        bs.grouped_gemm(given.a, given.b, out=ys if self.form == "list" else ys[0], out_dtype=dtype, **call)
        rows = given.rows(ys)
        for e, (y, product, magnitude) in enumerate(zip(rows, given.products, given.magnitudes, strict=True)):
            factor = 1.0 if alpha is None else float(of_group(alpha, e, 0))
            beside = None if bias is None else of_group(bias, e, 1)
            exact = data == "integers" and not self.gate
            self._judge(y, product * factor, magnitude * abs(factor), beside, given.depth(e), exact)
        touched = sum(y.numel() for y in rows)
        assert sum(int((~whole.isnan()).sum()) for whole in wide) == touched, (
            "rows of no group, or between, were written"
        )
        if self.out_dtype != NVFP4:
            return torch.cat([y.contiguous().view(torch.uint8).flatten() for y in rows])
        return self._quantised(given, ys[0].contiguous(), call)

    def _alpha(self, groups: int, data: str) -> float | torch.Tensor | None:
        alpha = sweep.alpha_of(self.alpha, data)
        if not isinstance(alpha, torch.Tensor) or not self.each:
            return alpha
        return alpha * torch.tensor([2.0 ** -(e % 5) for e in range(groups)])

    def _bias(self, groups: int, n: int) -> torch.Tensor | None:
        if not self.each:
            return sweep.bias_of(self.bias, n)
        bias = sweep.bias_of(self.bias, groups * n)
        return None if bias is None else bias.view(groups, n)

    def _judge(
        self,
        y: torch.Tensor,
        product: torch.Tensor,
        magnitude: torch.Tensor,
        bias: torch.Tensor | None,
        k: int,
        exact: bool,
    ) -> None:
        """Of one group; alpha is in `product` and `magnitude`."""
        if self.gate is None:
            sweep.judge(y, product, magnitude, None, bias, self.activation, k, exact=exact)
            return
        added = torch.zeros(()) if bias is None else bias.double()
        sums = product + added
        slack = reference.tensor_core_tolerance(k) * magnitude + 2.0**-24 * (added.abs() + sums.abs())
        (gate, up), (of_gate, of_up) = sums.chunk(2, -1), slack.chunk(2, -1)
        act = reference.activate(gate, self.gate)
        of_act = 1.13 * of_gate + 2.0**-22 * act.abs()  # the steepest an activation is, and its own rounding
        allowed = up.abs() * of_act + (act.abs() + of_act) * of_up
        info = torch.finfo(y.dtype)
        rounding = info.eps / 2 * ((act * up).abs() + allowed) + info.smallest_normal * info.eps / 2
        reference.check(y, act * up, allowed + rounding)

    def _quantised(self, given: Operands, y: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
        """The result in NVFP4 is, bit for bit, what quantising the fp32 result gives, and nothing else is written but
        padding of atoms, in the contiguous form."""
        shape = given.results[0]
        sizes = given.sizes if self.form == "contiguous" else None
        layout = ATOMS if sizes is None else GROUPED
        out = bs.NVFP4Tensor.zeros(shape, global_scale=UNIT, layout=layout, group_sizes=sizes)
        out.codes.fill_(0xFF)
        out.scales.view(torch.uint8).fill_(POISON)
        bs.grouped_gemm(given.a, given.b, out=out, **call)
        inside = given.inside(y)
        expected = quantize_on_cpu(torch.where(inside, y, 0.0), global_scale=UNIT, layout="linear")
        codes = torch.where(inside, expected.codes, 0xFF)
        assert same_bits(out.codes, codes), "codes are not those of quantising the fp32 result"
        scales = torch.where(inside, expected.scales.view(torch.uint8), POISON)
        got = out.with_layout("linear").scales.view(torch.uint8)
        assert same_bits(got, scales), "scales are not those of quantising the fp32 result"
        if sizes is not None:
            assert out.group_sizes is not None
            assert out.group_sizes.tolist() == sizes.tolist()
            padded, held = expected.with_layout(GROUPED, sizes).scales.view(torch.uint8), out.scales.view(torch.uint8)
            end = int(out.scale_offsets[-1])  # type: ignore[index] # there, in this layout
            assert same_bits(held[:end], padded[:end]), "padding of atoms is not zero"
            assert (held[end:] == POISON).all(), "scales of no group were written"
        return torch.cat((out.codes.flatten(), out.scales.view(torch.uint8).flatten()))


@dataclass(frozen=True, eq=False)
class GroupedSweep(Sweep):
    """What is swept of a kernel for grouped products, in every form."""

    @property
    def family(self) -> families.Family:
        return families.serving(GroupedProblem(1, 1, 1), self.target)

    def row(self, values: Mapping[str, object]) -> Row:
        rest = {name: value for name, value in values.items() if name in self.product}
        fields = {name: value for name, value in values.items() if name in self.config}
        return Row(self, Config(**fields), **rest)  # type: ignore[arg-type] # properties of a product

    def contest(self, shape: Shape) -> tuple[str, Row, Shape]:
        """Of a shape of the competition, which is a list where its groups differ in columns or k."""
        assert isinstance(shape, Contest)
        form = "list" if shape.whole.columns else "contiguous"
        row = Row(self, Config(), "fp16", form=form, groups=len(shape.sizes))
        row = replace(row, config=heuristics.choose(row.problem(shape.whole), self.target).config)
        return f"GPU MODE {shape.whole} as {shape}: {row}", row, shape


@dataclass(frozen=True, eq=False)
class Operands:
    """Of a grouped product, and its exact result.

    Attributes:
        a, b: operands, of a list lists. sizes: int32, rows of each group.
        results: shapes of the result, of a list of all. products, magnitudes: of each group, float64.
    """

    form: str
    a: Any
    b: Any
    sizes: torch.Tensor
    results: tuple[Shapes, ...]
    products: list[torch.Tensor]
    magnitudes: list[torch.Tensor]

    def tables(self, ends: bool) -> dict[str, torch.Tensor]:
        """The arguments of a call that say where groups are."""
        if self.form == "list":
            return {}
        if self.form == "masked":
            return {"masked_m": self.sizes}
        return {"group_offsets": self.sizes.cumsum(0, dtype=torch.int32)} if ends else {"group_sizes": self.sizes}

    def depth(self, e: int) -> int:
        """The k of a group."""
        return int((self.b[e] if self.form == "list" else self.b).shape[-1])

    def rows(self, ys: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of each group, of a result."""
        if self.form == "list":
            return ys
        if self.form == "contiguous":
            return list(ys[0].split(self.sizes.tolist()))
        return [ys[0][e, :size] for e, size in enumerate(self.sizes.tolist())]

    def inside(self, y: torch.Tensor) -> torch.Tensor:
        """Which rows of a result are of a group, (..., 1)."""
        if self.form == "contiguous":
            return torch.ones(len(y), 1, dtype=torch.bool)
        return (torch.arange(y.shape[1]) < self.sizes.unsqueeze(1)).unsqueeze(-1)


@functools.lru_cache(maxsize=8)
def operands(shape: Groups, form: str, folds: int, data: str) -> Operands:
    """Scales of rows that are only padding, and rows beyond a mask, hold NaN; `folds`: rows of b for a column."""
    sizes, seed = list(shape.sizes), 7 * sum(shape.sizes) + 5 * shape.n + 3 * shape.k
    a: Any
    b: Any
    if form == "list":
        a = [_rows(m, k, data, seed + e) for e, (m, k) in enumerate(zip(sizes, shape.depths, strict=True))]
        b = [_rows(n, k, data, seed - e) for e, (n, k) in enumerate(zip(shape.columns, shape.depths, strict=True))]
        lefts, rights = [reference.values(x) for x in a], [reference.values(x) for x in b]
        results = tuple(zip(sizes, shape.columns, strict=True))
    else:
        b = sweep.operand(folds * shape.n, shape.k, len(sizes), data, seed - 1)
        rights = list(reference.values(b))
        if form == "contiguous":
            a = by_group(sweep.operand(sum(sizes), shape.k, 0, data, seed).with_layout("linear"), sizes)
            lefts, results = list(reference.values(a).split(sizes)), ((sum(sizes), shape.n),)
        else:
            a = sweep.operand(max(sizes), shape.k, len(sizes), data, seed)
            lefts = [rows[:size] for rows, size in zip(reference.values(a), sizes, strict=True)]
            a, results = beyond_masks(a, sizes), ((len(sizes), max(sizes), shape.n),)
    products = [x @ y.mT for x, y in zip(lefts, rights, strict=True)]
    magnitudes = [x.abs() @ y.abs().mT for x, y in zip(lefts, rights, strict=True)]
    return Operands(form, a, b, table(sizes), results, products, magnitudes)


def _rows(rows: int, k: int, data: str, seed: int) -> bs.NVFP4Tensor:
    return sweep.operand(rows, k, 0, data, seed) if rows else bs.NVFP4Tensor.zeros((0, k), global_scale=1.0)


def beyond_masks(a: bs.NVFP4Tensor, sizes: list[int]) -> bs.NVFP4Tensor:
    """The same with NaN in the scales, and the largest codes, of rows beyond masks."""
    whole = bs.NVFP4Tensor(
        a.codes, a.scales, a.global_scale, a.layout, torch.Size((*a.shape[:-1], 2 * a.codes.shape[-1]))
    )
    at = torch.from_numpy(reference.scale_index(whole))  # with the padding of k
    codes, scales = a.codes.clone(), a.scales.view(torch.uint8).clone()
    for e, size in enumerate(sizes):
        codes[e, size:] = 0x77
        scales[e].view(-1)[at[size:].flatten()] = POISON
    return bs.NVFP4Tensor.from_parts(
        codes, scales.view(torch.float8_e4m3fn), a.global_scale, shape=a.shape, check_values=False
    )
