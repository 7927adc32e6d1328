"""The forms of a grouped product: each of their arguments checked, as `Grouped`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale import arguments
from blockscale.formats.layouts import ATOMS, GROUPED, LINEAR
from blockscale.problem import GATED
from blockscale.tensor import NVFP4Tensor, check_group_sizes

ACTIVATIONS = (*arguments.ACTIVATIONS, *GATED)
Result = Tensor | NVFP4Tensor


@dataclass(frozen=True, eq=False)
class Grouped:
    """One product a group, its arguments checked.

    Attributes:
        form: "contiguous": a (T, K) sorted by group; "masked": a (E, max_m, K), of which the first rows count.
        b: (E, N, K). out: (T, N) or (E, max_m, N), with half the columns where the activation is gated.
        table: int (E,) on the operands' device: sizes of groups, or with `ends` where each one ends; of the masked form
            the rows that count. Only the CPU's values were looked at.
        alpha: a float, or fp32 () or (E,). bias: (N,) or (E, N), or None.
    """

    form: str
    a: NVFP4Tensor | Tensor
    b: NVFP4Tensor
    out: Result
    table: Tensor
    ends: bool
    alpha: float | Tensor
    bias: Tensor | None

    @property
    def groups(self) -> int:
        return self.b.shape[0]

    @property
    def sizes(self) -> Tensor:
        """int32 (E,): rows of each group, computed where the table is."""
        return sizes_of(self.table, self.ends)


def sizes_of(table: Tensor, ends: bool) -> Tensor:
    """int32 (E,): rows of each group, computed where the table is."""
    return (torch.diff(table, prepend=table.new_zeros(1)) if ends else table).to(torch.int32)


def contiguous(
    a: Any,
    b: Any,
    tables: tuple[Tensor | None, Tensor | None],
    alpha: Any,
    bias: Any,
    activation: str | None,
    out: Any,
    out_dtype: torch.dtype,
) -> Grouped:
    """a (T, K) sorted by group; `tables` are group_sizes and group_offsets."""
    _check_operands(a, b, a_ndim=2, form="contiguous")
    group_sizes, group_offsets = tables
    if group_sizes is not None and group_offsets is not None:
        raise ValueError("group_offsets: given together with group_sizes; expected one of the two")
    table, ends = table_of(a, b.shape[0], group_sizes, group_offsets)
    result = _output(out, (a.shape[0], columns(b, activation)), out_dtype, a.device, (LINEAR, ATOMS, GROUPED))
    if isinstance(result, NVFP4Tensor) and result.group_sizes is not None and len(result.group_sizes) != len(table):
        raise ValueError(f"out: {len(result.group_sizes)} groups, but b has {len(table)}")
    factors = check_alphas(alpha, len(table), a.device), check_biases(bias, b, a.device)
    return Grouped("contiguous", a, b, result, table, ends, *factors)


def table_of(
    a: NVFP4Tensor | Tensor, groups: int, group_sizes: Tensor | None, group_offsets: Tensor | None
) -> tuple[Tensor, bool]:
    """(table of the contiguous form, whether it holds ends); on the CPU its values are checked too."""
    rows, device = a.shape[0], a.device
    own = a.group_sizes if isinstance(a, NVFP4Tensor) else None
    if group_offsets is not None:
        table, ends = _ends(group_offsets, groups, rows, device), True
    else:
        given = own if group_sizes is None else group_sizes
        if given is None:
            raise ValueError("group_sizes: missing; the contiguous form needs group_sizes or group_offsets")
        table, ends = given, False
        check_group_sizes(table, rows, device)
        if len(table) != groups:
            raise ValueError(f"group_sizes: {len(table)} groups, but b has {groups}")
    if own is not None and table is not own:
        made_with = "but a's layout '128x4-grouped' was made with"
        if len(own) != groups:
            raise ValueError(f"group_sizes: {groups} groups, {made_with} {len(own)}")
        if own.is_cpu and not torch.equal(own, sizes_of(table, ends)):
            raise ValueError(f"group_sizes: {sizes_of(table, ends).tolist()}, {made_with} {own.tolist()}")
    return table, ends


def masked(
    a: Any,
    b: Any,
    masked_m: Tensor,
    alpha: Any,
    bias: Any,
    activation: str | None,
    out: Any,
    out_dtype: torch.dtype,
) -> Grouped:
    """a (E, max_m, K), the first masked_m[e] rows of each group. A new result is 0 beyond them."""
    _check_operands(a, b, a_ndim=3, form="masked")
    groups, most, _ = a.shape
    if groups != b.shape[0]:
        raise ValueError(f"b: {b.shape[0]} groups, but a has {groups}")
    check_mask(masked_m, groups, most, a.device)
    result = _output(out, (groups, most, columns(b, activation)), out_dtype, a.device, (LINEAR, ATOMS))
    if out is None:
        result = torch.zeros(result.shape, dtype=out_dtype, device=a.device)
    factors = check_alphas(alpha, groups, a.device), check_biases(bias, b, a.device)
    return Grouped("masked", a, b, result, masked_m, False, *factors)


def check_mask(masked_m: Tensor, groups: int, most: int, device: torch.device) -> None:
    if not isinstance(masked_m, Tensor) or masked_m.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"masked_m: {arguments.kind(masked_m)}, expected an int32 tensor")
    if masked_m.shape != (groups,) or masked_m.device != device:
        raise ValueError(
            f"masked_m: shape {tuple(masked_m.shape)} on {masked_m.device}, expected ({groups},) on {device}"
        )
    if masked_m.is_cpu:
        for e, count in enumerate(masked_m.tolist()):
            if not 0 <= count <= most:
                raise ValueError(f"masked_m: {count} at {e}, expected 0 to {most}, the rows of a group in a")


Operands = tuple[Any, NVFP4Tensor, Result]


def separate(
    a: Any, b: Any, activation: str | None, out: Any, out_dtype: torch.dtype
) -> tuple[list[Operands], list[Any]]:
    """The list form: products of any shapes, each (a, b, out), and their results."""
    if not isinstance(a, (list, tuple)) or not isinstance(b, (list, tuple)):
        raise TypeError(f"a, b: {arguments.kind(a)} and {arguments.kind(b)}, expected two lists or two single operands")
    if len(a) != len(b):
        raise ValueError(f"b: {len(b)} operands, but a has {len(a)}")
    if out is not None and (not isinstance(out, (list, tuple)) or len(out) != len(a)):
        raise ValueError(f"out: {arguments.kind(out)}, expected a list of {len(a)} tensors")
    operands: list[Operands] = []
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        arguments.check_pair(left, right, f"a[{i}]", f"b[{i}]")
        if left.ndim != 2 or right.ndim != 2:
            raise ValueError(
                f"a[{i}], b[{i}]: shapes {tuple(left.shape)} and {tuple(right.shape)}, expected 2 dimensions each"
            )
        given = None if out is None else out[i]
        shape = (left.shape[0], columns(right, activation, f"b[{i}]"))
        target = _output(given, shape, out_dtype, right.device, (LINEAR, ATOMS), f"out[{i}]")
        operands.append((left, right, target))
    return operands, [target for _, _, target in operands]


def per_group(name: str, value: Any, groups: int, inner: int) -> list[Any]:
    """A value for each group: one shared by all, or row e of a tensor with one more dimension."""
    if not isinstance(value, Tensor) or value.ndim <= inner:
        return [value] * groups
    if value.ndim != inner + 1 or len(value) != groups:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, expected a leading dimension of {groups} groups")
    return list(value.unbind(0))


def columns(b: NVFP4Tensor, activation: str | None, name: str = "b") -> int:
    """Columns of the result: the rows of a weight, or half of them where gate and up are one weight."""
    n = b.shape[-2]
    if activation not in GATED:
        return n
    if n % 2:
        raise ValueError(f"{name}: {n} rows, expected an even number beside {activation!r}: as many of gate as of up")
    return n // 2


def check_activation(activation: str | None) -> str | None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


def check_alphas(alpha: Any, groups: int, device: torch.device) -> float | Tensor:
    """A finite float, or the tensor that was given: fp32 () or (E,); its values are looked at on the CPU alone."""
    if not isinstance(alpha, Tensor) or alpha.ndim == 0:
        return arguments.check_alpha(alpha, device)
    if alpha.shape != (groups,):
        raise ValueError(f"alpha: shape {tuple(alpha.shape)}, expected () or ({groups},), one a group")
    finite = not alpha.is_cpu or bool(alpha.isfinite().all())
    for value in alpha[:1] if finite else alpha:
        arguments.check_alpha(value, device)
    return alpha


def check_biases(bias: Any, b: NVFP4Tensor, device: torch.device) -> Tensor | None:
    """None, or (N,) or (E, N)."""
    groups, n, _ = b.shape
    if not isinstance(bias, Tensor) or bias.ndim != 2:
        return arguments.check_bias(bias, n, device)
    if bias.shape != (groups, n):
        raise ValueError(f"bias: shape {tuple(bias.shape)}, expected ({n},) or ({groups}, {n})")
    arguments.check_bias(bias.new_empty(n), n, device)  # dtype and device
    arguments.check_plain("bias", bias)
    return bias


def _output(
    out: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layouts: tuple[str, ...],
    name: str = "out",
) -> Result:
    if isinstance(out, NVFP4Tensor):
        return arguments.quantised_output(out, shape, dtype, device, layouts)
    return arguments.output(name, out, shape, dtype, device)


def _check_operands(a: Any, b: Any, *, a_ndim: int, form: str) -> None:
    arguments.check_pair(a, b)
    if a.ndim != a_ndim or b.ndim != 3:
        raise ValueError(
            f"a, b: shapes {tuple(a.shape)} and {tuple(b.shape)}, expected {a_ndim} and 3 dimensions "
            f"for the {form} form"
        )


def _ends(offsets: Tensor, groups: int, rows: int, device: torch.device) -> Tensor:
    """(E,): where each group ends."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"group_offsets: {arguments.kind(offsets)}, expected an int32 tensor")
    if offsets.ndim != 1 or len(offsets) not in (groups, groups + 1) or offsets.device != device:
        raise ValueError(
            f"group_offsets: shape {tuple(offsets.shape)} on {offsets.device}, "
            f"expected ({groups + 1},) or ({groups},) on {device}"
        )
    whole = len(offsets) == groups + 1
    if offsets.is_cpu:
        bounds = offsets.tolist() if whole else [0, *offsets.tolist()]
        if bounds[0] != 0 or bounds[-1] != rows or any(later < sooner for sooner, later in itertools.pairwise(bounds)):
            raise ValueError(
                f"group_offsets: {offsets.tolist()}, expected to rise from 0 to the number of rows, {rows}"
            )
    return offsets[1:] if whole else offsets
