"""Grouped products by Hopper's kernel on the software GPU: few rows of activations a group, and no size read on the
host."""

from dataclasses import replace

import pytest
import torch
from grouped_products import check_group, matrix, table, weights
from operands import same_bits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import blockscale as bs
from blockscale import backends
from blockscale.backends import loop

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
N, K = 40, 200
CONFIG = bs.Config((2, 32), stages=2, pdl=True, k_warps=2, chunk=512, buffers=2)
WIDE = bs.Config((8, 64), stages=1, pdl=True, wgmma=True, k_warps=1, buffers=2, accumulators=2, ctas=2)


def options(groups, **more):
    alpha = torch.linspace(-2, 3, groups) * 1e-3
    bias = torch.arange(groups * N).view(groups, N).float().sin()
    return {"alpha": alpha, "bias": bias, "out_dtype": torch.float32, "config": CONFIG, **more}


@pytest.fixture
def operands():
    plain = weights(5, N, K)
    return torch.randn(9, K).bfloat16(), plain, plain.with_layout("fragment")


@pytest.fixture(autouse=True)
def _no_loop(monkeypatch):
    """The host would read sizes there."""
    monkeypatch.setattr(loop, "prepare", None)
    monkeypatch.setattr(backends.sm90.loop, "prepare", None)


def check(y, x, plain, sizes, given):
    start = 0
    for e, size in enumerate(sizes):
        if size:
            mine = slice(start, start + size)
            check_group(y[mine], x[mine], matrix(plain, e), alpha=given["alpha"][e], bias=given["bias"][e])
        start += size


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["warps", "warpgroups"])
def test_the_same_bits_in_every_order_of_completion(operands, config):
    x, plain, packed = operands
    sizes = (3, 0, 5, 0, 1)
    results = []
    for schedule, seed in SCHEDULES:
        with bs.emulated("sm_90a", schedule=schedule, seed=seed, checks="strict") as gpu:
            results.append(bs.grouped_gemm(x, packed, group_sizes=table(sizes), **options(5, config=config)))
            assert gpu.findings == []
            assert len(gpu.reports) == 1
    check(results[0], x, plain, sizes, options(5))
    assert all(same_bits(y, results[0]) for y in results)


@pytest.mark.parametrize("sizes", [(9, 0, 0, 0, 0), (0, 0, 0, 0, 9), (1, 2, 3, 2, 1)])
def test_splits_and_offsets(operands, sizes):
    x, plain, packed = operands
    with bs.emulated("sm_90a"):
        y = bs.grouped_gemm(x, packed, group_sizes=table(sizes), **options(5))
        ends = table(sizes).cumsum(0, dtype=torch.int32)
        assert same_bits(bs.grouped_gemm(x, packed, group_offsets=ends, **options(5)), y)
    check(y, x, plain, sizes, options(5))


@pytest.mark.parametrize("counts", [(2, 3, 0, 0, 1), (0, 0, 0, 0, 3)])
def test_masked(operands, counts):
    _, plain, packed = operands
    x = torch.full((5, 3, K), torch.nan, dtype=torch.bfloat16)
    for e, count in enumerate(counts):
        x[e, :count] = torch.randn(count, K)
    out = torch.full((5, 3, N), 7.0)
    with bs.emulated("sm_90a"):
        bs.grouped_gemm(x, packed, masked_m=table(counts), out=out, **options(5))
    for e, count in enumerate(counts):
        assert (out[e, count:] == 7).all()
        if count:
            given = {name: options(5)[name][e] for name in ("alpha", "bias")}
            check_group(out[e, :count], x[e, :count], matrix(plain, e), **given)


def test_many_experts_few_rows():
    """A table of more than a warp, by the configuration that is chosen."""
    sizes = torch.bincount(
        torch.randint(0, 70, (12,), generator=torch.Generator().manual_seed(1)), minlength=70
    ).tolist()
    plain = weights(70, 16, 72)
    x = torch.randn(12, 72).half()
    with bs.emulated("sm_90a") as gpu:
        y = bs.grouped_gemm(x, plain.with_layout("fragment"), group_sizes=table(sizes))
        assert gpu.findings == []
    start = 0
    for e, size in enumerate(sizes):
        if size:
            check_group(y[start : start + size], x[start : start + size], matrix(plain, e))
        start += size


def test_gates_and_nvfp4_results_come_after_the_kernel(operands):
    x, _, packed = operands
    sizes = (3, 0, 5, 0, 1)
    given = {name: value for name, value in options(5).items() if name != "out_dtype"}
    with bs.emulated("sm_90a") as gpu:
        z = bs.grouped_gemm(x, packed, group_sizes=table(sizes), **options(5)).double()
        y = bs.grouped_gemm(x, packed, group_sizes=table(sizes), activation="swiglu", **options(5))
        assert same_bits(y, (torch.nn.functional.silu(z[:, : N // 2]) * z[:, N // 2 :]).float())
        out = bs.NVFP4Tensor.zeros((9, N), global_scale=0.25, layout="128x4-grouped", group_sizes=table(sizes))
        bs.grouped_gemm(x, packed, group_sizes=table(sizes), out=out, **given)
        assert len(gpu.reports) == 3
    expected = bs.quantize(z.float(), global_scale=0.25, layout="linear", nonfinite="saturate")
    assert same_bits(out.with_layout("linear").codes, expected.codes)
    assert same_bits(out.with_layout("linear").scales, expected.scales)


@pytest.mark.parametrize(
    "config",
    [
        replace(WIDE, tile=(16, 128), k_warps=2, buffers=6, accumulators=1, ctas=3),
        replace(WIDE, tile=(24, 64), pdl=False, stages=2, ctas=1),
        replace(WIDE, k_warps=3, buffers=6),  # more warpgroups than pairs of units
    ],
    ids=str,
)
def test_warpgroups(config):
    """Groups of more rows than a tile has, a pair of one unit, CTAs of several tiles."""
    sizes = (0, 19, 1, 20)
    plain, x = weights(4, 72, 328), torch.randn(40, 328).half()
    with bs.emulated("sm_90a", schedule="random", seed=5, checks="strict") as gpu:
        y = bs.grouped_gemm(x, plain.with_layout("fragment"), group_sizes=table(sizes), config=config)
        assert gpu.findings == []
    check(y, x, plain, sizes, dict.fromkeys(("alpha", "bias"), [None] * 4))


def test_what_is_refused():
    x, packed = torch.randn(2, K).half(), weights(2, N, K).with_layout("fragment")
    with bs.emulated("sm_90a"):
        for config, message in (
            (replace(WIDE, split=2), r"config\.split: 2, expected 1"),
            (replace(WIDE, tile=(40, 64)), r"config\.tile: 40 rows, at most 32"),
            (replace(WIDE, ctas=0), r"config\.ctas: 0, expected at least 1"),
            (replace(WIDE, accumulators=0), r"config\.accumulators: 0, expected at least 1"),
            (replace(CONFIG, ctas=2), r"config\.ctas: 2, expected None without wgmma"),
            (replace(WIDE, tile=(32, 384), stages=2), r"config\.buffers: 2: [\d,]+ bytes of shared memory"),
        ):
            with pytest.raises(ValueError, match=message):
                bs.grouped_gemm(x, packed, group_sizes=table((1, 1)), config=config)


@pytest.mark.parametrize(
    ("m", "n", "groups", "tile"),
    [
        (128, 1536, 128, (8, 256)),
        (8, 1536, 128, (8, 128)),  # eight blocks: smaller tiles keep more multiprocessors busy
        (1152, 4096, 128, (16, 256)),
        (9600, 4096, 256, (32, 256)),
        (600, 4096, 600, (1, 64)),  # more groups than the table has room for
    ],
)
def test_the_choice(m, n, groups, tile):
    assert bs.config_for(m, n, 2048, gpu="h200", groups=groups).tile == tile


def test_many_rows_a_group_are_single_products(operands, monkeypatch):
    """The kernel for groups would read a weight for every 16 rows."""
    monkeypatch.undo()
    x, plain, packed = operands
    rows = x[:1].expand(400, K)
    with bs.emulated("sm_90a") as gpu:
        y = bs.grouped_gemm(rows, packed, group_sizes=table((0, 0, 0, 0, 400)))
        assert len(gpu.reports) == 1
    check_group(y, rows, matrix(plain, 4))
