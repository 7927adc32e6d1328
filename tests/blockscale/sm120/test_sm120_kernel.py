"""The sm_120a kernel as compiled, on the emulator with its strict checks, against float64: configurations and tails."""

import math

import pytest
import torch
from operands import every_code_and_scale, small_integers

import blockscale as bs
from blockscale import reference
from blockscale.config import Config

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

SCHEDULES = (("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 0), ("random", 1), ("random", 2))
SMS = 3
CASES = {
    "one group": (Config((128, 128)), (130, 70, 300), {}),
    "long stages": (Config((128, 128), chunk=256), (30, 130, 600), {"activation": "relu"}),
    "two groups": (Config((128, 128), accumulators=2, stages=2), (260, 70, 200), {"out_dtype": torch.float32}),
    "turns of one CTA": (Config((64, 8), accumulators=2, stages=1, ctas=1), (130, 7, 300), {}),  # 3 tiles, odd laps
    "on request": (Config((128, 64), accumulators=2, schedule="clc"), (270, 60, 200), {}),
    "one on request": (Config((64, 32), schedule="clc", stages=3), (70, 100, 300), {"out_dtype": torch.float16}),
    "wide": (Config((128, 256), l2_a="evict_last"), (40, 257, 80), {}),
    "flat": (Config((64, 256), accumulators=2, raster="n", group=2), (65, 257, 80), {"bias": True}),
    "dependent": (Config((64, 64), pdl=True, chunk=256, ctas=1), (70, 70, 600), {"bias": True, "activation": "silu"}),
    "swapped": (Config((128, 16), swap=True, chunk=256), (13, 300, 700), {"bias": True}),
    "one row": (Config((64, 8), swap=True, accumulators=2, l2_b="evict_first"), (1, 200, 1000), {"activation": "gelu"}),
    "swapped 64": (Config((128, 64), swap=True), (50, 136, 300), {}),
    "narrow": (Config((64, 16)), (70, 15, 80), {}),
    "shared": (Config((64, 32), split=2), (70, 60, 300), {"bias": True}),
    "shared by more than there is of k": (Config((64, 32), split=2, ctas=2), (40, 60, 100), {}),
    "narrowest": (Config((128, 8), accumulators=2), (140, 7, 80), {"out_dtype": torch.float32}),
}


def multiply(a, b, config, *, bias=False, activation=None, out_dtype=torch.bfloat16, alpha=0.25, exact=False):
    """A product into a poisoned result with gaps between its rows; what is wrong raises."""
    n = b.shape[-2]
    row = (torch.arange(n) * 5 % 17 - 8).float() if bias else None
    wide = torch.full((*a.shape[:-1], n + 3), math.nan, dtype=out_dtype)
    y = wide[..., :n]
    bs.gemm(a, b, out=y, out_dtype=out_dtype, alpha=alpha, bias=row, activation=activation, config=config)
    x, w = reference.values(a), reference.values(b).mT
    expected = reference.activate(alpha * (x @ w) + (0 if row is None else row.double()), activation)
    assert wide[..., n:].isnan().all()
    if exact:
        assert torch.equal(y, expected.to(out_dtype))
        return y
    slack = 1.13 * reference.tensor_core_tolerance(a.shape[-1]) * (x.abs() @ w.abs()) * abs(alpha) + 2.0**-20
    info = torch.finfo(out_dtype)
    reference.check(y, expected, info.eps / 2 * (expected.abs() + slack) + info.smallest_normal * info.eps + slack)
    return y


@pytest.mark.parametrize("name", CASES)
def test_configurations_under_every_schedule(name):
    """The same bits whatever completes first; operands of all codes and scales."""
    config, (m, n, k), more = CASES[name]
    a, b = (every_code_and_scale(rows, k, positive=name == "swapped", seed=rows) for rows in (m, n))
    results = []
    for schedule, seed in SCHEDULES:
        with bs.emulated("sm_120a", schedule=schedule, seed=seed, checks="strict", sms=SMS) as gpu:  # a finding raises
            results.append(multiply(a, b, config, **more))
        assert gpu.findings == []
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("config", [Config((128, 64), split=2), Config((256, 64), schedule="clc")], ids=str)
def test_nvfp4_results_are_those_of_quantize(config):
    """Bit for bit, padding too, of the fp32 result."""
    m, n, k = 130, 100, 200
    a, b = (every_code_and_scale(rows, k, seed=rows) for rows in (m, n))
    with bs.emulated("sm_120a", schedule="random", checks="strict", sms=SMS):
        y = bs.gemm(a, b, alpha=0.25, out_dtype=torch.float32, activation="relu", config=config)
        unit = y.max() / 4000
        out = bs.NVFP4Tensor.zeros((m, n), global_scale=unit)
        out.codes.fill_(0x77)
        out.scales.view(torch.uint8).fill_(0x7F)
        bs.gemm(a, b, alpha=0.25, out=out, activation="relu", config=config)
    expected = bs.quantize(y, global_scale=unit)
    assert torch.equal(out.codes, expected.codes)
    assert torch.equal(out.scales.view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
def test_integers_are_exact_and_the_choice_is_right(arch):
    for m, n, k in ((1, 70, 64), (33, 40, 272), (140, 264, 80)):
        a, _ = small_integers(m, k, 1)
        b, _ = small_integers(n, k, 2)
        with bs.emulated(arch, checks="strict", sms=SMS):
            multiply(a, b, None, exact=True, out_dtype=torch.float32)


def test_batches():
    a = bs.quantize(torch.randn(2, 70, 80))
    b, one, few = (bs.quantize(torch.randn(*shape, 80)) for shape in ((2, 90), (90,), (30,)))
    with bs.emulated("sm_120a", checks="strict", sms=SMS):
        multiply(a, b, Config((64, 64), accumulators=2))
        multiply(a, one, Config((64, 32)))
        multiply(a, few, Config((64, 32), split=2))


@pytest.mark.parametrize("config", [Config((128, 128)), Config((128, 128), accumulators=2), Config((64, 8), swap=True)])
def test_shared_memory_is_read_without_bank_conflicts(config):
    a, b = (every_code_and_scale(rows, 512, seed=rows) for rows in (8, 130))
    with bs.emulated("sm_120a", sms=SMS) as gpu:
        multiply(a, b, config)
    shared = [traffic for traffic in gpu.report.traffic if traffic.space == "shared"]
    assert sum(traffic.units for traffic in shared) > 0
    assert sum(traffic.excess for traffic in shared) == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 512, 640, Config((256, 8), swap=True, chunk=256)),
        (16, 1024, 1024, Config((512, 16), swap=True, split=2)),
    ],
)
def test_few_rows_load_every_weight_once(m, n, k, config):
    """And the rows with every tile of weights: together within 5 % of the operands."""
    a, b = (every_code_and_scale(rows, k, seed=rows) for rows in (m, n))
    with bs.emulated("sm_120a", sms=4) as gpu:
        multiply(a, b, config)
    loads = gpu.report.counters["bytes"]["TMA load, global memory"]
    assert n * k * 9 // 16 < loads <= 1.05 * (m + n) * k * 9 // 16
