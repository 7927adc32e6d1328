"""Grouped weight-only products on a Hopper GPU: the contract of every group, whatever the device's sizes say."""

import pytest
import torch
from expert_weights import EPILOGUES, MEANS, check_groups, experts, table
from operands import same_bits
from weight_only import DTYPES

import blockscale as bs
from blockscale.backends import loop, sm90
from blockscale.families.sm90.grouped.choice import candidates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

GROUPS, N, K = 6, 200, 520


@pytest.fixture(autouse=True)
def _no_loop(monkeypatch):
    """The host would read sizes there."""
    monkeypatch.setattr(sm90, "loop", None)
    monkeypatch.setattr(loop, "prepare", None)


def rows(count, k=K, dtype=torch.bfloat16, seed=1):
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(count, k, device="cuda", generator=random).to(dtype)


def splits(total, groups=GROUPS):
    """Of so many rows: even, all to one group, and at random, some empty."""
    random = torch.Generator().manual_seed(total)
    yield [total // groups + (e < total % groups) for e in range(groups)]
    yield [0] * (groups - 1) + [total]
    drawn = torch.randint(0, groups // 2, (total,), generator=random) * 2
    yield torch.bincount(drawn, minlength=groups).tolist()


def product(x, w, sizes, out_dtype=torch.bfloat16, **options):
    """Into a poisoned result."""
    out = torch.full((len(x), w.shape[1]), torch.nan, dtype=out_dtype, device="cuda")
    return bs.grouped_gemm(x, w, group_sizes=table(sizes), out=out, out_dtype=out_dtype, **options)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("k", [K, 7168])
def test_contract_on_positive_data(mean, k):
    w, values = experts(GROUPS, N, k, positive=True)
    x = rows(mean * GROUPS, k)
    for sizes in splits(len(x)):
        y = product(x, w, sizes)
        check_groups(y, x, values, sizes)
        out = torch.full_like(y, torch.nan)
        ends = table(sizes).cumsum(0, dtype=torch.int32)
        assert same_bits(bs.grouped_gemm(x, w, group_offsets=ends, out=out), y)


@pytest.mark.parametrize("config", candidates(), ids=str)
def test_every_configuration(config):
    w, values = experts(GROUPS, N, K)
    for total in (1, 7, 41, 300):
        x = torch.randn(total, K, device="cuda").bfloat16()
        for sizes in splits(total):
            check_groups(product(x, w, sizes, config=config), x, values, sizes)


@pytest.mark.parametrize("mean", MEANS)
def test_masked(mean):
    w, values = experts(GROUPS, N, K)
    x = torch.full((GROUPS, mean, K), torch.nan, device="cuda").bfloat16()
    counts = [mean, 0, mean // 2, 1, mean, mean - 1]
    for e, count in enumerate(counts):
        x[e, :count] = torch.randn(count, K, device="cuda")
    out = torch.full((GROUPS, mean, N), 7.0, device="cuda").bfloat16()
    bs.grouped_gemm(x, w, masked_m=table(counts), out=out)
    for e, count in enumerate(counts):
        check_groups(out[e, :count], x[e, :count], values[e : e + 1], [count])
        assert (out[e, count:] == 7).all()


@pytest.mark.parametrize(("a", "out", "bias", "activation"), EPILOGUES)
@pytest.mark.parametrize("mean", MEANS)
def test_dtypes_alphas_biases_and_activation(a, out, bias, activation, mean):
    w, values = experts(GROUPS, N, K)
    alpha = torch.linspace(-1, 1, GROUPS, device="cuda")
    own = None if bias is None else torch.randn(GROUPS, N, device="cuda").to(DTYPES[bias])
    x = torch.randn(mean * GROUPS, K, device="cuda").to(DTYPES[a])
    for sizes in splits(len(x)):
        y = product(x, w, sizes, DTYPES[out], alpha=alpha, bias=own, activation=activation)
        check_groups(y, x, values, sizes, alpha, own, activation)


@pytest.mark.parametrize("mean", [1, 4, 16, 40])
def test_other_groups_have_no_part_in_a_groups_bits(mean):
    """All of another group, and rows of no group, NaN in turn."""
    w, _ = experts(GROUPS, N, K)
    x = torch.randn(mean * GROUPS, K, device="cuda").bfloat16()
    for sizes in splits(len(x)):
        first = product(x, w, sizes)
        for poisoned in range(GROUPS):
            start, stop = sum(sizes[:poisoned]), sum(sizes[: poisoned + 1])
            bad = x.clone()
            bad[start:stop] = torch.nan
            scales = w.codes.clone()
            scales[poisoned, ..., 1024:] = 0x7F
            y = product(bad, bs.NVFP4Tensor(scales, w.scales, w.global_scale, w.layout, w.shape), sizes)
            assert same_bits(y[:start], first[:start])
            assert same_bits(y[stop:], first[stop:])
            assert y[start:stop].isnan().all()


@pytest.mark.parametrize("mean", [1, 4, 16, 40])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_one_graph_serves_changing_sizes_and_nothing_waits(mean):
    w, values = experts(GROUPS, N, K)
    x = torch.randn(mean * GROUPS, K, device="cuda").bfloat16()
    sizes, out = table(next(splits(len(x)))), torch.empty(len(x), N, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        bs.grouped_gemm(x, w, group_sizes=sizes, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        bs.grouped_gemm(x, w, group_sizes=sizes, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bs.grouped_gemm(x, w, group_sizes=sizes, out=out)
    for split in splits(len(x)):
        sizes.copy_(table(split))
        out.fill_(torch.nan)
        graph.replay()
        check_groups(out, x, values, split)


def test_sizes_that_are_none():
    """Nothing is read or written outside of operands, and no row twice, whatever the table holds."""
    w, _ = experts(GROUPS, N, K)
    x = torch.randn(24, K, device="cuda").bfloat16()
    guarded = torch.full((40, N), 3.0, device="cuda").bfloat16()
    for sizes in ([-5, 4, 2**31 - 1, 2**31 - 1, 7, -(2**31)], [2**31 - 1] * 6, [-1] * 6, [30, -30, 24, 24, 0, 0]):
        for name in ("group_sizes", "group_offsets"):
            bs.grouped_gemm(x, w, **{name: table(sizes)}, out=guarded[8:32])
    torch.cuda.synchronize()
    assert (guarded[:8] == 3).all()
    assert (guarded[32:] == 3).all()


@pytest.mark.parametrize("mean", [1, 8, 40])
def test_the_same_bits_on_two_streams(mean):
    w, _ = experts(GROUPS, N, 7168)
    xs = [torch.randn(mean * GROUPS, 7168, device="cuda").bfloat16() for _ in range(2)]
    every = [list(splits(len(x)))[2 * i] for i, x in enumerate(xs)]
    alone = [product(x, w, sizes) for x, sizes in zip(xs, every, strict=True)]
    tables = [table(sizes) for sizes in every]
    outs = [[torch.full_like(y, torch.nan) for _ in range(30)] for y in alone]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for i in range(30):
        for x, sizes, stream, of_stream in zip(xs, tables, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                bs.grouped_gemm(x, w, group_sizes=sizes, out=of_stream[i])
    torch.cuda.synchronize()
    for expected, of_stream in zip(alone, outs, strict=True):
        assert all(same_bits(out, expected) for out in of_stream)


@pytest.mark.parametrize("count", [128, 512])
def test_many_experts(count):
    w, values = experts(count, 72, 264)
    sizes = torch.bincount(torch.randint(0, count, (count,)), minlength=count).tolist()
    x = torch.randn(count, 264, device="cuda").bfloat16()
    check_groups(product(x, w, sizes), x, values, sizes)
