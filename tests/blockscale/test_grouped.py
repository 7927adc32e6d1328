"""Grouped products equal a loop of single ones, bit for bit, and no group sees another's data."""

import dataclasses

import pytest
import torch
from grouped_products import check, sorted_rows, weights
from operands import same_bits, same_tensor

import blockscale as bs
from blockscale import reference

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


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("inner", [96, 160, 7])  # 2 x 160 rows are padded to 384: the gate ends at 160 and not at 192
def test_a_gated_activation_splits_at_the_logical_size(activation, inner):
    sizes = [3, 0, 130]
    a, b = sorted_rows(sizes, K), weights(3, 2 * inner, K)
    alpha, bias = torch.tensor([1e-6, 1.0, 3e-6]), torch.randn(3, 2 * inner)
    y = bs.grouped_gemm(a, b, alpha=alpha, bias=bias, activation=activation, out_dtype=torch.float32)
    assert y.shape == (133, inner)
    check(y, a, b, sizes, alpha=alpha, bias=bias, activation=activation, c=reference.CPU_TOLERANCE)
    gate_1_up_2 = torch.cat((torch.ones(inner, K), torch.full((inner, K), 2.0)))
    ones = bs.quantize(torch.full((2, K), 0.5))
    simple = bs.grouped_gemm([ones], [bs.quantize(gate_1_up_2)], activation=activation, out_dtype=torch.float32)[0]
    act = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}[activation]
    expected = (act(torch.tensor(K / 2.0).double()) * K).float()
    torch.testing.assert_close(simple, expected.expand(2, inner), rtol=1e-5, atol=0)


def test_gated_results_are_those_of_two_products():
    sizes = [3, 0, 5]
    a, b = bs.quantize(torch.randn(8, K), layout="linear"), _weights(3)
    y = bs.grouped_gemm(a, b, group_sizes=torch.tensor(sizes), activation="swiglu", out_dtype=torch.float32)
    z = _loop(a, b, sizes, out_dtype=torch.float32).double()
    assert same_bits(y, (torch.nn.functional.silu(z[:, : N // 2]) * z[:, N // 2 :]).float())


@pytest.mark.parametrize("layout", ["linear", "128x4", "128x4-grouped"])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_results_in_nvfp4_have_the_quantisers_bits(layout, activation):
    sizes = [3, 0, 130, 1]
    a, b = sorted_rows(sizes, K), weights(4, N, K)
    options = {"alpha": 1e-3, "activation": activation}
    y = bs.grouped_gemm(a, b, **options, out_dtype=torch.float32)
    groups = torch.tensor([134, 0, 0, 0]) if layout == "128x4-grouped" else None  # those of an earlier call
    out = bs.NVFP4Tensor.zeros(y.shape, global_scale=0.25, layout=layout, group_sizes=groups)
    assert bs.grouped_gemm(a, b, **options, out=out) is out
    expected = bs.quantize(y, global_scale=0.25, layout="linear", nonfinite="saturate")
    assert same_tensor(out.with_layout("linear"), expected)
    if layout == "128x4-grouped":
        assert out.group_sizes.tolist() == sizes
        assert same_tensor(out, expected.with_layout(layout, torch.tensor(sizes)))
        assert out.scale_offsets.tolist() == [0, 128, 128, 384, 512]
        second = weights(4, 6, y.shape[1], seed=7)
        y2 = bs.grouped_gemm(out, second, out_dtype=torch.float32)
        check(y2, expected, second, sizes, c=reference.CPU_TOLERANCE)


def test_masked_results_in_nvfp4_leave_other_rows_alone():
    a, b = bs.quantize(torch.randn(3, 5, K)), _weights(3)
    before = bs.quantize(torch.randn(3, 5, N), layout="linear")
    out = before.with_layout("128x4")
    out = dataclasses.replace(out, codes=out.codes.clone(), scales=out.scales.clone())
    masked_m = torch.tensor([5, 0, 2])
    bs.grouped_gemm(a, b, masked_m=masked_m, out=out)
    y = bs.grouped_gemm(a, b, masked_m=masked_m, out_dtype=torch.float32)
    expected = bs.quantize(y, global_scale=out.global_scale, layout="linear", nonfinite="saturate")
    for e, count in enumerate(masked_m.tolist()):
        for part in ("codes", "scales"):
            got, wanted, old = (getattr(t.with_layout("linear"), part)[e] for t in (out, expected, before))
            assert same_bits(got[:count], wanted[:count])
            assert same_bits(got[count:], old[count:])


@pytest.mark.parametrize("experts", [1, 3, 60, 256, 512])
def test_any_number_of_experts(experts):
    random = torch.Generator().manual_seed(experts)
    sizes = torch.bincount(torch.randint(0, experts, (2 * experts,), generator=random), minlength=experts)
    a, b = bs.quantize(torch.randn(2 * experts, 32)), bs.quantize(torch.randn(experts, 5, 32))
    y = bs.grouped_gemm(a, b, group_sizes=sizes, out_dtype=torch.float32)
    assert same_bits(y, _loop(a, b, sizes.tolist(), out_dtype=torch.float32))


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gradients_through_a_gate(activation):
    sizes = torch.tensor([2, 0, 3])
    b = bs.quantize(torch.randn(3, 6, 32))
    x, bias = torch.randn(5, 32, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    alpha = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    y = bs.grouped_gemm(x, b, group_sizes=sizes, alpha=alpha, bias=bias, activation=activation, out_dtype=torch.float32)
    expert = torch.tensor([0, 0, 2, 2, 2])
    z = (x.double().unsqueeze(1) @ reference.dequantize(b)[expert].mT).squeeze(1)
    gate, up = (z * alpha.double()[expert, None] + bias.double()[expert]).chunk(2, -1)
    exact = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}[activation](gate) * up
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.randn(5, 3)
    found = torch.autograd.grad(y, (x, alpha, bias), grad)
    for mine, theirs in zip(found, torch.autograd.grad(exact, (x, alpha, bias), grad.double()), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "swiglu", "b": _weights(2, n=5)}, ValueError, "b: 5 rows, expected an even number beside"),
        ({"activation": "glu"}, ValueError, "activation: 'glu', expected one of None, .* 'swiglu', 'geglu'"),
        ({"group_offsets": torch.tensor([0, 6, 4]), "group_sizes": None}, ValueError, "expected to rise from 0"),
        ({"out": bs.NVFP4Tensor.zeros((8, N + 1), global_scale=1.0)}, ValueError, "out: shape"),
        ({"out": bs.NVFP4Tensor.zeros((8, N), global_scale=1.0), "out_dtype": torch.float16}, TypeError, "out_dtype"),
    ],
)
def test_bad_arguments_of_gates_and_results(change, error, message):
    with pytest.raises(error, match=message):
        bs.grouped_gemm(**{"a": torch.randn(8, K), "b": _weights(2), "group_sizes": SIZES, **change})


def test_activations_with_a_gate_are_those_of_grouped_products():
    with pytest.raises(ValueError, match="activation: 'swiglu', expected one of None, 'relu', 'gelu', 'silu'"):
        bs.gemm(torch.randn(2, K), _weights(1)[0], activation="swiglu")


class _Doubled(torch.nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_experts_take_a_gate_for_what_it_is():
    """One that is another function, or that somebody listens to, is called."""
    gate_up = bs.nn.GroupedLinear.from_weights(torch.randn(2, 64, 32) / 6)
    down = bs.nn.GroupedLinear.from_weights(torch.randn(2, 32, 32) / 6)
    rows, sizes, heard = torch.randn(5, 32), torch.tensor([2, 3]), []
    plain = bs.nn.Experts(gate_up, down, torch.nn.SiLU()).products(rows, sizes)
    doubled = bs.nn.Experts(gate_up, down, _Doubled()).products(rows, sizes)
    torch.testing.assert_close(doubled, 2 * plain)
    act = torch.nn.SiLU()
    act.register_forward_hook(lambda *_: heard.append(1))
    torch.testing.assert_close(bs.nn.Experts(gate_up, down, act).products(rows, sizes), plain)
    assert heard == [1]
