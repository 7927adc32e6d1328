"""Grouped products equal a loop of single ones, bit for bit, and no group sees another's data."""

import pytest
import torch
from operands import same_bits

import blockscale as bs

K, N = 80, 40
SPLITS = [[128, 128], [1, 255], [127, 1, 129], [0, 5, 0, 3, 0], [16], [144], [500, 0, 1500], [0, 0, 0], [7, 0, 0, 0, 1]]


def _weights(groups, n=N, k=K):
    return bs.quantize(torch.randn(groups, n, k))


def _loop(x, b, sizes, **arguments):
    rows, parts = 0, []
    linear = x.with_layout("linear") if isinstance(x, bs.NVFP4Tensor) else x
    for e, size in enumerate(sizes):
        parts.append(bs.gemm(linear[rows : rows + size], b[e], **arguments))
        rows += size
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("form", ["linear", "128x4", "128x4-grouped", "bf16"])
def test_contiguous_equals_a_loop(sizes, form):
    x, b = torch.randn(sum(sizes), K), _weights(len(sizes))
    counts = torch.tensor(sizes, dtype=torch.int32)
    if form == "bf16":
        a = x.bfloat16()
    else:
        a = bs.quantize(x, layout=form, group_sizes=counts if form == "128x4-grouped" else None)
    expected = _loop(a, b, sizes, out_dtype=torch.float32)
    y = bs.grouped_gemm(a, b, group_sizes=counts, out_dtype=torch.float32)
    assert y.shape == (sum(sizes), N)
    assert same_bits(y, expected)
    ends = counts.cumsum(0, dtype=torch.int32)
    for offsets in (ends, torch.nn.functional.pad(ends, (1, 0))):
        assert same_bits(bs.grouped_gemm(a, b, group_offsets=offsets, out_dtype=torch.float32), expected)
    if form == "128x4-grouped":
        assert same_bits(bs.grouped_gemm(a, b, out_dtype=torch.float32), expected)


def test_epilogue_for_each_group():
    sizes = [3, 0, 5]
    a, b = bs.quantize(torch.randn(8, K), layout="linear"), _weights(3)
    alpha, bias = torch.tensor([0.5, 2.0, -1.0]), torch.randn(3, N)
    y = bs.grouped_gemm(a, b, group_sizes=torch.tensor(sizes), alpha=alpha, bias=bias, activation="silu")
    for e, rows in ((0, slice(0, 3)), (2, slice(3, 8))):
        assert same_bits(y[rows], bs.gemm(a[rows], b[e], alpha=alpha[e], bias=bias[e], activation="silu"))
    shared = bs.grouped_gemm(a, b, group_sizes=torch.tensor(sizes), alpha=0.5, bias=bias[0])
    assert same_bits(shared[3:], bs.gemm(a[3:], b[2], alpha=0.5, bias=bias[0]))


@pytest.mark.parametrize("counts", [[2, 3, 0, 0, 1], [0, 0, 0, 0, 5], [0, 0, 0, 0, 0], [5, 5, 5, 5, 5]])
def test_masked_reads_and_writes_within_the_mask_only(counts):
    x, b = torch.randn(5, 5, K), _weights(5)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    clean = bs.grouped_gemm(x, b, masked_m=masked_m)
    for e, count in enumerate(counts):
        assert same_bits(clean[e, :count], bs.gemm(x[e, :count], b[e]))
        assert not clean[e, count:].any()
        x[e, count:] = float("nan")
    out = torch.full((5, 5, N), 7.0, dtype=torch.bfloat16)
    assert bs.grouped_gemm(x, b, masked_m=masked_m, out=out) is out
    for e, count in enumerate(counts):
        assert same_bits(out[e, :count], clean[e, :count])
        assert (out[e, count:] == 7).all()


def test_masked_with_quantised_activations():
    a, b = bs.quantize(torch.randn(3, 130, K)), _weights(3)
    y = bs.grouped_gemm(a, b, masked_m=torch.tensor([130, 0, 7]))
    assert same_bits(y[0], bs.gemm(a[0], b[0]))
    assert same_bits(y[2, :7], bs.gemm(a[2, :7], b[2]))


def test_list_of_any_shapes():
    shapes = [(3, 40, 80), (130, 7, 48), (0, 5, 16), (1, 1, 1)]
    a = [bs.quantize(torch.randn(m, k)) for m, _, k in shapes]
    a[1] = torch.randn(130, 48)
    b = [bs.quantize(torch.randn(n, k)) for _, n, k in shapes]
    y = bs.grouped_gemm(a, b, alpha=torch.arange(1.0, 5.0))
    assert isinstance(y, list)
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        assert same_bits(y[i], bs.gemm(left, right, alpha=i + 1.0))
    out = [torch.empty_like(part) for part in y]
    assert all(x is z for x, z in zip(bs.grouped_gemm(a, b, alpha=torch.arange(1.0, 5.0), out=out), out, strict=True))
    assert all(same_bits(x, z) for x, z in zip(out, y, strict=True))
    assert bs.grouped_gemm([], []) == []


def test_changing_one_group_leaves_the_others_alone():
    sizes = torch.tensor([4, 4])
    x, b = torch.randn(8, K), _weights(2)
    before = bs.grouped_gemm(x, b, group_sizes=sizes)
    for byte in (0x38, 0x40, 0x7E):
        scales = b.with_layout("linear").scales.clone()
        scales.view(torch.uint8)[0] = byte
        changed = bs.NVFP4Tensor.from_parts(b.codes, scales, b.global_scale, shape=b.shape, layout="linear")
        assert same_bits(bs.grouped_gemm(x, changed, group_sizes=sizes)[4:], before[4:])
    poisoned = x.clone()
    poisoned[:4] = float("nan")
    assert same_bits(bs.grouped_gemm(poisoned, b, group_sizes=sizes)[4:], before[4:])


def test_every_row_is_written():
    sizes = torch.tensor([0, 5, 0, 3, 0], dtype=torch.int32)
    out = torch.full((8, N), float("nan"), dtype=torch.bfloat16)
    bs.grouped_gemm(torch.randn(8, K), _weights(5), group_sizes=sizes, out=out)
    assert torch.isfinite(out).all()
    empty = bs.grouped_gemm(torch.empty(0, K), _weights(5), group_sizes=torch.zeros(5, dtype=torch.int32))
    assert empty.shape == (0, N)


def test_nothing_is_written_when_any_group_is_refused():
    out = [torch.full((2, 3), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    a, b = [torch.randn(2, 32), torch.randn(2, 48)], [bs.quantize(torch.randn(3, 32)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"a\[1\]: K = 48, but b\[1\] has K = 32"):
        bs.grouped_gemm(a, b, out=out)
    assert all((part == 7).all() for part in out)


SIZES = torch.tensor([3, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({}, ValueError, "group_sizes: missing"),
        ({"group_sizes": SIZES, "group_offsets": SIZES}, ValueError, "group_offsets: given together"),
        ({"group_sizes": torch.tensor([3, 4])}, ValueError, "group_sizes: sum 7, expected the number of rows, 8"),
        ({"group_sizes": torch.tensor([9, -1])}, ValueError, "group_sizes: -1 at 1"),
        ({"group_sizes": torch.tensor([8])}, ValueError, "group_sizes: 1 groups, but b has 2"),
        ({"group_sizes": [3, 5]}, TypeError, "group_sizes: list"),
        ({"group_sizes": torch.tensor([3.0, 5.0])}, TypeError, "group_sizes: torch.float32"),
        ({"group_offsets": torch.tensor([0, 5, 7])}, ValueError, "expected to rise from 0 to the number of rows, 8"),
        ({"group_offsets": torch.tensor([0, 9, 8])}, ValueError, "group_offsets"),
        ({"group_offsets": torch.tensor([1, 5, 8])}, ValueError, "group_offsets"),
        ({"group_offsets": torch.tensor([8])}, ValueError, r"group_offsets: shape \(1,\)"),
        (
            {"group_sizes": SIZES, "masked_m": SIZES},
            ValueError,
            "group_sizes: given, but it does not go with the masked form",
        ),
        ({"masked_m": SIZES}, ValueError, "expected 3 and 3 dimensions for the masked form"),
        (
            {"a": torch.randn(2, 4, K), "masked_m": torch.tensor([4, 5])},
            ValueError,
            "masked_m: 5 at 1, expected 0 to 4",
        ),
        ({"a": torch.randn(3, 4, K), "masked_m": torch.tensor([4, 4, 4])}, ValueError, "b: 2 groups, but a has 3"),
        ({"a": torch.randn(2, 4, K), "masked_m": torch.tensor([1.0, 1.0])}, TypeError, "masked_m"),
        ({"a": torch.randn(2, 4, K), "masked_m": torch.tensor([1])}, ValueError, r"masked_m: shape \(1,\)"),
        ({"a": [torch.randn(2, K)]}, TypeError, "a, b: list and NVFP4Tensor, expected two lists"),
        ({"a": [], "b": [1]}, ValueError, "b: 1 operands, but a has 0"),
        ({"a": [torch.randn(2, K)], "b": [torch.randn(2, K)]}, TypeError, r"b\[0\]: torch.float32 tensor"),
        ({"group_sizes": SIZES, "alpha": torch.ones(3)}, ValueError, "alpha: shape"),
        ({"group_sizes": SIZES, "bias": torch.ones(3, N)}, ValueError, "bias: shape"),
        ({"group_sizes": SIZES, "a": torch.randn(8, K + 1)}, ValueError, "K = 81, but b has K = 80"),
        ({"group_sizes": SIZES, "out": torch.empty(8, N)}, TypeError, "out: torch.float32"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        bs.grouped_gemm(**{"a": torch.randn(8, K), "b": _weights(2), **change})


def test_group_sizes_must_match_those_of_the_layout():
    a = bs.quantize(torch.randn(8, K), layout="128x4-grouped", group_sizes=torch.tensor([3, 5]))
    with pytest.raises(ValueError, match=r"group_sizes: \[4, 4\], but a's layout .* was made with \[3, 5\]"):
        bs.grouped_gemm(a, _weights(2), group_sizes=torch.tensor([4, 4]))


def test_bias_that_an_earlier_group_would_overwrite_is_refused():
    memory = torch.randn(5, N)
    with pytest.raises(ValueError, match="out: overlaps bias"):
        bs.grouped_gemm(
            torch.randn(4, K), _weights(2), group_sizes=torch.tensor([2, 2]), bias=memory[:2], out=memory[1:],
            out_dtype=torch.float32,
        )  # fmt: skip


def test_outputs_may_be_columns_of_one_buffer():
    x, b = torch.randn(4, K), [bs.quantize(torch.randn(N, K)) for _ in range(2)]
    memory = torch.zeros(4, 2 * N, dtype=torch.bfloat16)
    bs.grouped_gemm([x, x], b, out=[memory[:, :N], memory[:, N:]])
    assert same_bits(memory[:, :N], bs.gemm(x, b[0]))
    assert same_bits(memory[:, N:], bs.gemm(x, b[1]))


@pytest.mark.parametrize(
    "bad", [{"activation": "tanh"}, {"out_dtype": 3}, {"config": 1}, {"backend": "tpu"}, {"backend": "sm90"}]
)
def test_arguments_are_checked_without_any_group(bad):
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        bs.grouped_gemm([], [], **bad)


def test_sizes_that_wrap_around_are_refused():
    sizes = torch.tensor([2**62] * 4 + [8])
    with pytest.raises(ValueError, match="group_sizes: sum 18446744073709551624, expected the number of rows, 8"):
        bs.grouped_gemm(torch.randn(8, K), _weights(5), group_sizes=sizes)


def test_overlapping_outputs_are_refused():
    memory = torch.zeros(3, N, dtype=torch.bfloat16)
    a, b = [torch.randn(2, K)] * 2, [bs.quantize(torch.randn(N, K))] * 2
    with pytest.raises(ValueError, match=r"out\[1\]: overlaps out\[0\]"):
        bs.grouped_gemm(a, b, out=[memory[:2], memory[1:]])
