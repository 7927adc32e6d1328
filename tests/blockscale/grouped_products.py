"""Operands of grouped products, and the contract of their results, for all tests of them."""

from dataclasses import replace

import torch
from operands import POISON, every_code_and_scale

import blockscale as bs
from blockscale import reference

GATED = {"swiglu": "silu", "geglu": "gelu"}


def table(sizes):
    return torch.tensor(sizes, dtype=torch.int32)


def weights(groups, n, k, seed=100):
    """(E, N, K) with every code and scale, distinct from group to group."""
    each = [every_code_and_scale(n, k, seed=seed + e) for e in range(groups)]
    codes, scales = (torch.stack([getattr(t, part).view(torch.uint8) for t in each]) for part in ("codes", "scales"))
    return bs.NVFP4Tensor(
        codes, scales.view(torch.float8_e4m3fn), each[0].global_scale, "128x4", torch.Size((groups, n, k))
    )


def sorted_rows(sizes, k, seed=0):
    """(T, K) in layout "128x4-grouped"; scales of rows that do not exist are NaN."""
    return by_group(every_code_and_scale(sum(sizes), k, layout="linear", seed=seed), sizes)


def by_group(t, sizes):
    """Rows of layout "linear" in "128x4-grouped", alike."""
    t = t.with_layout("128x4-grouped", table(sizes))
    ones = replace(t, scales=torch.ones(sum(sizes), t.scales.shape[1]).to(torch.float8_e4m3fn), layout="linear")
    own = ones.with_layout("128x4-grouped", table(sizes)).scales.view(torch.uint8) != 0
    scales = torch.where(own, t.scales.view(torch.uint8), POISON).view(torch.float8_e4m3fn)
    return replace(t, scales=scales)


def rows_of(a, sizes, e):
    """Rows of group `e` as an operand of their own."""
    start = sum(sizes[:e])
    return a.with_layout("linear")[start : start + sizes[e]]


def matrix(b, e):
    return bs.NVFP4Tensor(b.codes[e], b.scales[e], b.global_scale, b.layout, b.shape[1:])


def of_group(value, e, inner):
    return value[e] if isinstance(value, torch.Tensor) and value.ndim > inner else value


def check_group(y, a, b, *, alpha=None, bias=None, activation=None, c=None):
    """That `y`, rows of one group, keeps the contract."""
    c = reference.tensor_core_tolerance(a.shape[-1]) if c is None else c
    given = {"alpha": alpha, "bias": bias}
    if activation not in GATED:
        exact = reference.gemm(a, b, **given, activation=activation)
        reference.check(y, exact, reference.tolerance(a, b, exact, **given, out_dtype=y.dtype, c=c))
        return
    z = reference.gemm(a, b, **given)
    slack = reference.tolerance(a, b, z, **given, out_dtype=torch.float32, c=c)
    (gate, up), (of_gate, of_up) = z.chunk(2, -1), slack.chunk(2, -1)
    act = reference.activate(gate, GATED[activation])
    exact = act * up
    allowed = up.abs() * 1.13 * of_gate + (act.abs() + 1.13 * of_gate) * of_up + 2.0**-22 * exact.abs()
    info = torch.finfo(y.dtype)
    reference.check(y, exact, allowed + info.eps / 2 * (exact.abs() + allowed) + info.smallest_normal * info.eps / 2)


def check(y, a, b, sizes, *, alpha=None, bias=None, activation=None, c=None):
    """That `y` (T, N) keeps the contract in every group."""
    start = 0
    for e, size in enumerate(sizes):
        beside = {"alpha": of_group(alpha, e, 0), "bias": of_group(bias, e, 1)}
        if size:
            mine = rows_of(a, sizes, e)
            check_group(y[start : start + size], mine, matrix(b, e), **beside, activation=activation, c=c)
        start += size
    assert start == len(y)
