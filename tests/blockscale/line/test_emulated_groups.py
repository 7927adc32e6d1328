"""`grouped_gemm` by its own kernel on the software GPU: the contract in every form, the same bits in every order of
completion, and no group that sees another's data."""

import math
from dataclasses import replace

import pytest
import torch
from grouped_products import check, check_group, matrix, rows_of, sorted_rows, table, weights
from operands import POISON, every_code_and_scale, quantize_on_cpu, same_bits, same_tensor, small_integers

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import blockscale as bs
from blockscale import grouped, heuristics, plan
from blockscale.backends import gpu
from blockscale.problem import GroupedProblem, target_named

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
B200 = target_named("b200")
N, K = 72, 208
SIZES = (3, 0, 130, 1, 17)
MODEL = GroupedProblem(m=32, n=N, k=K, groups=5, out_dtype="fp32", bias="fp32", alphas=5, biases=5)
CONFIG = heuristics.choose(MODEL, B200).config  # one kernel for all tests that do not say otherwise
SINGLE = bs.Config((128, 128))
SINGLE_NARROW = bs.Config((128, 32), store_slots=2, schedule="clc")  # of the kernel for single products alone


def long(*values):
    return pytest.param(*values, marks=pytest.mark.prove)


@pytest.fixture
def emulator():
    with bs.emulated("sm_100a", sms=3) as active:
        yield active
        assert active.findings == []


def product(a, b, sizes, **options):
    """With alphas and biases of every group, by one kernel for all sizes."""
    given = {"alpha": alphas(len(sizes)), "bias": biases(len(sizes), b.shape[1]), "config": CONFIG}
    return bs.grouped_gemm(a, b, out_dtype=torch.float32, **{**given, **options})


def alphas(groups):
    return torch.linspace(-2, 3, groups) * 1e-3


def biases(groups, n):
    return torch.arange(groups * n).view(groups, n).float().sin()


def test_the_same_bits_in_every_order_of_completion():
    a, b = sorted_rows(SIZES, K), weights(len(SIZES), N, K)
    results = []
    for schedule, seed in SCHEDULES:
        with bs.emulated("sm_100a", sms=3, schedule=schedule, seed=seed, checks="strict") as gpu:
            results.append(product(a, b, SIZES))
            assert gpu.findings == []
            assert len(gpu.reports) == 1
    check(results[0], a, b, SIZES, alpha=alphas(5), bias=biases(5, N))
    assert all(same_bits(y, results[0]) for y in results)


@pytest.mark.prove
def test_a_loop_of_single_products_has_the_same_bits(emulator):
    a, b = sorted_rows(SIZES, K), weights(len(SIZES), N, K)
    together = product(a, b, SIZES)
    start = 0
    for e, size in enumerate(SIZES):
        if size:
            options = {"alpha": alphas(5)[e], "bias": biases(5, N)[e], "out_dtype": torch.float32, "config": SINGLE}
            alone = bs.gemm(rows_of(a, SIZES, e), matrix(b, e), **options)
            assert same_bits(together[start : start + size], alone)
        start += size


@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [
        ((0,), N, K),
        ((1,), 8, 64),
        ((0, 0, 200, 0, 0, 0, 0, 0), N, 64),
        ((1, 255), 40, 48),
        ((128, 128), 40, 48),
        ((127, 1, 129), 40, 48),
        ((16, 16, 16), N, 1),
    ],
    ids=str,
)
def test_splits(emulator, sizes, n, k):
    a, b = sorted_rows(sizes, k), weights(len(sizes), n, k)
    expected = product(a, b, sizes)
    check(expected, a, b, sizes, alpha=alphas(len(sizes)), bias=biases(len(sizes), n))
    ends = table(sizes).cumsum(0, dtype=torch.int32)
    assert same_bits(product(a, b, sizes, group_offsets=torch.nn.functional.pad(ends, (1, 0))), expected)
    assert same_bits(product(a, b, sizes, group_offsets=ends), expected)
    assert len(emulator.reports) == (3 if sum(sizes) else 0)


@pytest.mark.parametrize("experts", [60, long(512)])
def test_many_experts(emulator, experts):
    random = torch.Generator().manual_seed(experts)
    sizes = torch.bincount(torch.randint(0, experts, (64,), generator=random), minlength=experts).tolist()
    a, b = sorted_rows(sizes, 64), weights(experts, 8, 64)
    y = product(a, b, sizes)
    check(y, a, b, sizes, alpha=alphas(experts), bias=biases(experts, 8))


def test_no_group_sees_anothers_data(emulator):
    """All that belongs to other groups is replaced by NaN or the largest numbers, one group at a time."""
    sizes = (3, 130, 1, 17)
    a, b = sorted_rows(sizes, K), weights(len(sizes), N, K)
    alpha, bias = alphas(len(sizes)), biases(len(sizes), N)
    clean = product(a, b, sizes)
    start = 0
    for e, size in enumerate(sizes):
        mine = slice(start, start + size)
        start += size
        codes, weight = torch.full_like(a.codes, 0x77), torch.full_like(b.codes, 0x77)
        codes[mine], weight[e] = a.codes[mine], b.codes[e]
        scales, of_weight = (torch.full_like(t.scales.view(torch.uint8), POISON) for t in (a, b))
        atoms = slice(*a.scale_offsets[e : e + 2].tolist())
        scales[atoms], of_weight[e] = a.scales.view(torch.uint8)[atoms], b.scales.view(torch.uint8)[e]
        other = torch.arange(len(sizes)) != e
        poisoned = product(
            replace(a, codes=codes, scales=scales.view(torch.float8_e4m3fn)),
            replace(b, codes=weight, scales=of_weight.view(torch.float8_e4m3fn)),
            sizes,
            alpha=alpha.masked_fill(other, 3e38),
            bias=bias.masked_fill(other[:, None], math.nan),
        )
        assert same_bits(poisoned[mine], clean[mine])
        assert poisoned[~torch.isin(torch.arange(sum(sizes)), torch.arange(mine.start, mine.stop))].isnan().all()


@pytest.mark.parametrize("counts", [(2, 3, 0, 0, 1), (0, 0, 0, 0, 5), (0, 0, 0, 0, 0), (130, 0, 1, 130, 128)], ids=str)
def test_masked(emulator, counts):
    most = 130
    each = [every_code_and_scale(most, K, seed=e) for e in range(5)]
    a = bs.NVFP4Tensor(
        torch.stack([t.codes for t in each]),
        torch.stack([t.scales.view(torch.uint8) for t in each]).view(torch.float8_e4m3fn),
        each[0].global_scale, "128x4", torch.Size((5, most, K)),
    )  # fmt: skip
    b = weights(5, N, K)
    out = torch.full((5, most, N), 7.0)
    y = product(a, b, counts, masked_m=table(counts), out=out)
    new = product(a, b, counts, masked_m=table(counts))
    for e, count in enumerate(counts):
        if count:
            check_group(
                y[e, :count],
                each[e].with_layout("linear")[:count],
                matrix(b, e),
                alpha=alphas(5)[e],
                bias=biases(5, N)[e],
            )
        assert (y[e, count:] == 7).all()
        assert not new[e, count:].any()
        assert same_bits(new[e, :count], y[e, :count])


@pytest.mark.parametrize(("activation", "inner"), [("swiglu", 128), ("geglu", 160), long("swiglu", 96)])
def test_gates_split_at_the_logical_size(emulator, activation, inner):
    """In the kernel where both halves of a weight begin with an atom of scales; else beside it."""
    sizes = (3, 0, 40)
    a, b = sorted_rows(sizes, 128), weights(3, 2 * inner, 128)
    options = {"alpha": torch.tensor([1e-6, 1.0, 3e-6]), "bias": biases(3, 2 * inner), "activation": activation}
    y = bs.grouped_gemm(a, b, **options, out_dtype=torch.float32)
    assert y.shape == (43, inner)
    check(y, a, b, sizes, **options)


@pytest.mark.parametrize(("activation", "n"), [("swiglu", 256), long(None, 160), long("swiglu", 160)])
def test_results_in_nvfp4_are_ready_for_the_next_product(emulator, activation, n):
    sizes = (3, 0, 130, 1)
    a, b = sorted_rows(sizes, 128), weights(4, n, 128)
    options = {"alpha": 1e-3, "activation": activation}
    y = bs.grouped_gemm(a, b, **options, out_dtype=torch.float32)
    out = bs.NVFP4Tensor.zeros(y.shape, global_scale=0.25, layout="128x4-grouped", group_sizes=table((134, 0, 0, 0)))
    assert bs.grouped_gemm(a, b, **options, out=out) is out
    expected = quantize_on_cpu(y, global_scale=0.25, layout="linear", nonfinite="saturate")
    assert out.group_sizes.tolist() == list(sizes)
    assert same_tensor(out.with_layout("linear"), expected)
    second = weights(4, N, y.shape[1], seed=7)
    check(product(out, second, sizes), expected, second, sizes, alpha=alphas(4), bias=biases(4, N))


@pytest.mark.parametrize("layout", ["128x4", long("linear")])
def test_rows_beyond_a_mask_keep_what_they_hold_in_nvfp4(layout):
    """Their scales too, which share atoms with those of rows that count; padding of weights is NaN."""
    most, n, counts = 130, 40, (2, 0, 129)
    a, b = (
        bs.quantize(
            3.0 * torch.randint(-2, 3, (3, rows, 64), generator=torch.Generator().manual_seed(rows)), global_scale=1.0
        )
        for rows in (most, n)
    )
    b.scales.view(torch.uint8)[b.scales.float() == 0] = POISON
    old = bs.quantize(torch.randn(3, most, n), global_scale=0.25, nonfinite="saturate").with_layout(layout)
    out = replace(old, codes=old.codes.clone(), scales=old.scales.clone())
    with bs.emulated("sm_100a", sms=3) as gpu:
        assert bs.grouped_gemm(a, b, masked_m=table(counts), alpha=1e-2, out=out) is out
        assert gpu.findings == []
    expected = bs.grouped_gemm(a, b, masked_m=table(counts), alpha=1e-2, out=old)  # the CPU's; sums are exact
    assert same_tensor(out, expected)


def test_a_known_call_is_one_launch_and_nothing_else(emulator, monkeypatch):
    """No plan, no conversion, no copy; and values of a table that the host can see are looked at every time."""
    a, b = sorted_rows(SIZES, K), weights(len(SIZES), N, K)
    out, given = torch.empty(sum(SIZES), N), {"group_sizes": table(SIZES), "alpha": alphas(5), "bias": biases(5, N)}
    y = bs.grouped_gemm(a, b, out=out, out_dtype=torch.float32, config=CONFIG, **given).clone()
    assert len(gpu.known()) == 1
    with monkeypatch.context() as patch:
        for name in ("with_layout", "linear_scales"):
            patch.setattr(bs.NVFP4Tensor, name, None)
        patch.setattr(plan, "plan", None)
        out.fill_(math.nan)
        assert bs.grouped_gemm(a, b, out=out, out_dtype=torch.float32, config=CONFIG, **given) is out
    assert same_bits(out, y)
    assert len(emulator.reports) == 2
    other = table((130, 3, 17, 0, 1))
    moved = sorted_rows(other.tolist(), K)
    given["group_sizes"] = other
    check(bs.grouped_gemm(moved, b, out=out, out_dtype=torch.float32, config=CONFIG, **given), moved, b, other.tolist(),
          alpha=alphas(5), bias=biases(5, N))  # fmt: skip
    assert len(gpu.known()) == 1
    for bad, message in ((table((130, 3, 17, 0, 2)), "sum 152"), (table((131, 3, 17, -1, 1)), "-1 at 3")):
        given["group_sizes"] = bad
        with pytest.raises(ValueError, match=f"group_sizes: {message}"):
            bs.grouped_gemm(moved, b, out=out, out_dtype=torch.float32, config=CONFIG, **given)
    given["group_sizes"] = table(SIZES)
    with pytest.raises(ValueError, match="but a's layout '128x4-grouped' was made with"):
        bs.grouped_gemm(moved, b, out=out, out_dtype=torch.float32, config=CONFIG, **given)
    assert len(emulator.reports) == 3


def test_a_known_call_looks_at_strides(emulator):
    """Once one of dense memory is known: columns and expanded numbers as alphas, columns as the sizes of rows."""
    a, b = sorted_rows(SIZES, K), weights(len(SIZES), N, K)
    given = {"group_offsets": table(SIZES).cumsum(0, dtype=torch.int32), "alpha": alphas(5)}
    expected = product(a, b, SIZES, **given)
    beside = torch.full((5,), 1e3)
    assert same_bits(product(a, b, SIZES, **given | {"alpha": torch.stack((alphas(5), beside), 1)[:, 0]}), expected)
    shared = product(a, b, SIZES, **given | {"alpha": torch.tensor(1e-3).expand(5)})
    assert same_bits(product(a, b, SIZES, **given | {"alpha": torch.full((5,), 1e-3)}), shared)
    assert same_bits(product(a, b, SIZES, alpha=given["alpha"]), expected)
    column = torch.stack((table(SIZES), torch.full((5,), 151, dtype=torch.int32)), 1)[:, 0]
    assert same_bits(product(replace(a, group_sizes=column), b, SIZES, alpha=given["alpha"]), expected)
    assert len(emulator.reports) == 6


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ((3, -5, 130, 2, 999), (3, 0, 130, 2, 16)),
        ((3, 4, 0, 0, 0), (3, 4, 0, 0, 0)),
        ((999, 3, 3, 3, 3), (151, 0, 0, 0, 0)),
    ],
    ids=str,
)
def test_sizes_that_only_the_device_sees_stay_within_bounds(emulator, monkeypatch, given, right):
    """As on a GPU, nobody checks the table; the emulator would see every byte outside of the operands."""
    monkeypatch.setattr(grouped, "check_group_sizes", lambda *_: None)
    rows = (*right[:-1], 151 - sum(right[:-1]))
    a, b = sorted_rows(rows, 64), weights(5, N, 64)
    out = torch.full((151, N), 7.0)
    product(replace(a, group_sizes=table(given)), b, given, out=out)
    check(out[: sum(right)], a, b, right, alpha=alphas(5), bias=biases(5, N))
    assert (out[sum(right) :] == 7).all()


@pytest.mark.parametrize("layout", [long("linear"), "128x4"])
def test_rows_in_another_layout_are_copied(emulator, layout):
    (a, _), b = small_integers(20, 64, layout=layout), weights(3, 8, 64)
    y = bs.grouped_gemm(a, b, group_sizes=table((3, 0, 17)), out_dtype=torch.float32)
    wide = torch.full((20, 16), math.nan).T.contiguous().T
    assert same_bits(
        bs.grouped_gemm(a, b, group_sizes=table((3, 0, 17)), out_dtype=torch.float32, out=wide[:, 4:12]), y
    )
    assert wide[:, :4].isnan().all()
    check(y, a, b, (3, 0, 17))


def test_a_list_of_any_shapes_is_one_call_of_the_device(emulator):
    """Its products need no layout but 128x4; those that are empty have no part in it."""
    shapes = [(3, 40, 80), (130, 72, 48), (5, 5, 16), (0, 8, 64), (1, 1, 1)]
    a = [every_code_and_scale(m, k, seed=i) for i, (m, _, k) in enumerate(shapes)]
    b = [every_code_and_scale(n, k, seed=50 + i) for i, (_, n, k) in enumerate(shapes)]
    alpha = torch.arange(1.0, 6.0) * 1e-3
    memory = torch.full((131, 80), math.nan)
    out = [torch.empty(3, 40), memory[:130, 4:76], *(torch.empty(m, n) for m, n, _ in shapes[2:])]
    assert bs.grouped_gemm(a, b, alpha=alpha, out=out, out_dtype=torch.float32)[1] is out[1]
    assert [report.counters["ctas"] for report in emulator.reports][:1] == [4]
    assert len(emulator.reports) == 2  # tensor maps, then products
    assert memory.isnan().sum() == 131 * 80 - 130 * 72
    for i, y in enumerate(out):
        if len(y):
            check_group(y, a[i], b[i], alpha=alpha[i])


def test_a_known_list_is_checked_by_addresses_and_values_alone(emulator, monkeypatch):
    """No plan, no conversion, no look at shapes; results that overlap and an alpha that is no number are still seen."""
    shapes = [(3, 40, 80), (20, 40, 48), (0, 40, 64), (1, 40, 1)]

    def operands(seed):
        return [
            [every_code_and_scale(shape[side], shape[2], seed=seed + 10 * side + i) for i, shape in enumerate(shapes)]
            for side in (0, 1)
        ]

    def check_all(ys, a, b, **options):
        for i, y in enumerate(ys):
            if len(y):
                check_group(y, a[i], b[i], alpha=options["alpha"][i], bias=options["bias"][i])

    options = {"alpha": torch.arange(1.0, 5.0) * 1e-3, "bias": biases(4, 40), "out_dtype": torch.float32}
    memory = torch.full((24, 96), math.nan)
    out = list(memory[:, :40].split([3, 20, 0, 1]))
    first, second = operands(0), operands(100)
    bs.grouped_gemm(*first, out=out, **options)
    new = bs.grouped_gemm(*first, **options)
    assert len(gpu.known()) == 2  # with results given and without
    with monkeypatch.context() as patch:
        patch.setattr(bs.NVFP4Tensor, "with_layout", None)
        patch.setattr(plan, "plan", None)
        patch.setattr(grouped, "separate", None)
        memory.fill_(math.nan)
        options["alpha"] = options["alpha"] * 3
        given = bs.grouped_gemm(*second, out=out, **options)
        assert all(x is y for x, y in zip(given, out, strict=True))
        other = bs.grouped_gemm(*second, **options)
        assert len(emulator.reports) == 8  # maps and products of each
        with pytest.raises(ValueError, match=r"alpha: nan"):
            bs.grouped_gemm(*second, out=out, **{**options, "alpha": torch.tensor([1.0, math.nan, 1.0, 1.0])})
        with pytest.raises(ValueError, match=r"out\[.\]: overlaps out\[.\]"):
            bs.grouped_gemm(*second, out=[out[0], memory[2:22, :40], *out[2:]], **options)
    assert memory[:, 40:].isnan().all()
    check_all(given, *second, **options)
    assert all(same_bits(x, y) for x, y in zip(given, other, strict=True))
    options["alpha"] = torch.arange(1.0, 5.0) * 1e-3
    check_all(new, *first, **options)
    assert len(emulator.reports) == 8


@pytest.mark.prove
def test_lists_that_one_kernel_does_not_do_are_launched_one_by_one(emulator):
    a = [every_code_and_scale(3, 64, seed=i) for i in range(2)]
    b = [every_code_and_scale(32, 64, seed=50 + i) for i in range(2)]
    y = bs.grouped_gemm(a, b, alpha=1e-3, out_dtype=torch.float32, config=SINGLE_NARROW)
    assert len(emulator.reports) == 2
    out = [bs.NVFP4Tensor.zeros((3, 32), global_scale=0.25) for _ in range(2)]
    bs.grouped_gemm(a, b, alpha=1e-3, out=out, config=SINGLE_NARROW)
    for x, z in zip(out, y, strict=True):
        assert same_tensor(x, quantize_on_cpu(z, global_scale=0.25, nonfinite="saturate"))
    assert len(emulator.reports) == 4


@pytest.mark.parametrize("form", ["contiguous", "list"])
def test_b300_has_the_same_kernels(form):
    """One launch for groups, two for a list; no size is read on the host."""
    sizes = (3, 0, 40, 1)
    a, b = sorted_rows(sizes, 80), weights(4, 130, 80)
    with bs.emulated("sm_103a", sms=3, checks="strict") as gpu:
        if form == "contiguous":
            y = bs.grouped_gemm(a, b, alpha=1e-3, activation="gelu", out_dtype=torch.float32)
        else:
            lefts, rights = [rows_of(a, sizes, e).with_layout("128x4") for e in (0, 2)], [matrix(b, e) for e in (0, 2)]
            y = torch.cat(bs.grouped_gemm(lefts, rights, alpha=1e-3, out_dtype=torch.float32))
        assert len(gpu.reports) == (1 if form == "contiguous" else 2)
        assert gpu.findings == []
    if form == "contiguous":
        check(y, a, b, sizes, alpha=1e-3, activation="gelu")
    else:
        check_group(y[:3], lefts[0], rights[0], alpha=1e-3)
        check_group(y[3:], lefts[1], rights[1], alpha=1e-3)


def test_what_kernels_for_groups_do_not_do(emulator):
    b = weights(2, N, K)
    with pytest.raises(ValueError, match="a: bf16: the sm100 kernels multiply NVFP4 by NVFP4 alone"):
        bs.grouped_gemm(torch.randn(8, K).bfloat16(), b, group_sizes=table((4, 4)))
    memory = torch.zeros(8 * N * 4, dtype=torch.uint8)
    a = replace(sorted_rows((4, 4), 256), codes=memory[16 : 16 + 8 * 128].view(8, 128))
    with pytest.raises(ValueError, match="out: overlaps a"):
        bs.grouped_gemm(
            a, weights(2, N, 256), out=memory.view(torch.float32).view(8, N), out_dtype=torch.float32, config=CONFIG
        )


@pytest.mark.prove
def test_five_hundred_and_twelve_experts_of_ten_for_a_token():
    """And nothing depends on how long operands live."""
    random = torch.Generator().manual_seed(0)
    to = torch.rand(64, 512, generator=random).topk(10).indices.reshape(-1)
    sizes = torch.bincount(to, minlength=512).tolist()
    b = weights(512, 64, 128)
    with bs.emulated("sm_100a") as gpu:
        y = bs.grouped_gemm(sorted_rows(sizes, 128), b, group_sizes=table(sizes))
        assert gpu.findings == []
    check(y, sorted_rows(sizes, 128), b, sizes)
