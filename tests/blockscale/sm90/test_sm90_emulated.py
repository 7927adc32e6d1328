"""The Hopper kernels on the software GPU: the same host code and PTX as on silicon, small shapes, every check."""

import re
from dataclasses import replace

import pytest
import torch
from operands import every_code_and_scale, same_bits, small_integers

import blockscale as bs
from blockscale import compile as compiler
from blockscale import families, reference
from blockscale.config import Config
from blockscale.kernels.waits import before_the_wait
from blockscale.problem import Problem, target_named

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1)]


def check(y, x, w, **options):
    exact = reference.gemm(x, w, **options)
    allowed = reference.tolerance(
        x, w, exact, **{k: v for k, v in options.items() if k != "activation"},
        out_dtype=y.dtype, c=reference.tensor_core_tolerance(x.shape[-1]),
    )  # fmt: skip
    reference.check(y, exact, allowed)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 200), (3, 17, 64), (17, 130, 136)])
def test_contract_under_every_order_of_completion(m, n, k, schedule, seed):
    plain = every_code_and_scale(n, k, positive=True)
    x = torch.rand(m, k).bfloat16()
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    with bs.emulated("sm_90a", schedule=schedule, seed=seed) as gpu:
        bs.gemm(x, plain.with_layout("fragment"), out=out)
    check(out, x, plain)
    assert gpu.findings == []


def test_small_integers_are_exact():
    w, values = small_integers(40, 200)
    x = torch.randint(-3, 4, (9, 200)).to(torch.float16)
    with bs.emulated("sm_90a"):
        y = bs.gemm(x, w.with_layout("fragment"), out_dtype=torch.float32)
    assert torch.equal(y.long(), x.long() @ values.T)


@pytest.mark.parametrize("m", [2, 9])
def test_alpha_bias_and_activation(m):
    plain = every_code_and_scale(20, 104)
    x, bias = torch.randn(m, 104).half(), torch.randn(20)
    with bs.emulated("sm_90a"):
        y = bs.gemm(x, plain.with_layout("fragment"), alpha=0.01, bias=bias, activation="silu", out_dtype=torch.float32)
    check(y, x, plain, alpha=0.01, bias=bias, activation="silu")


def test_a_rows_bits_do_not_depend_on_the_others():
    w = every_code_and_scale(20, 104).with_layout("fragment")
    x = torch.randn(19, 104).bfloat16()
    with bs.emulated("sm_90a"):
        whole = bs.gemm(x, w, invariant=True)
        assert same_bits(bs.gemm(x[17:], w, invariant=True), whole[17:])


AHEAD = [
    Config((4, 48), stages=2, pdl=True, ahead=True, k_warps=2, chunk=512, buffers=1),
    Config((8, 64), stages=2, pdl=True, ahead=True, wgmma=True, k_warps=2, split=2, buffers=4),
]


@pytest.mark.parametrize("config", AHEAD, ids=["warps", "groups"])
def test_weights_may_be_read_ahead_and_nothing_else(config):
    x, plain = torch.rand(3, 136).bfloat16(), every_code_and_scale(48, 136, positive=True)
    out = torch.full((3, 48), torch.nan, dtype=torch.bfloat16)
    with bs.emulated("sm_90a", schedule="lazy") as gpu:
        bs.gemm(x, plain.with_layout("fragment"), out=out, config=config)
    check(out, x, plain)
    assert gpu.findings == []
    target, problem = target_named("h200"), Problem(3, 48, 136, a="bf16")
    family = families.of(target)
    kernel = family.kernel(problem, target, config)
    parts = compiler.compile_function(kernel, compiler.traced_arguments(family.ENTRY, problem), target.arch, "ahead")
    ptx = parts["ptx"].decode()
    early = before_the_wait(ptx)
    assert early
    assert family.premature(config, early) == []
    assert family.premature(replace(config, ahead=False), early) == early
    without = before_the_wait(ptx.replace("griddepcontrol.wait;", ""))
    found = family.premature(config, without)  # activations, alpha and the result too
    assert any("cp.async.bulk" in line for line in found)
    assert any(re.search(r"\bst\.global", line) for line in found)
    assert not set(found) & set(early)


EARLY = Config((8, 64), stages=1, pdl=True, prefetch=2, wgmma=True, buffers=2)
SHORT = [
    (2, 40, 640, Config((2, 32), stages=1, pdl=True, prefetch=3, k_warps=2, chunk=256, buffers=2)),
    (5, 72, 904, EARLY),
    (9, 72, 520, replace(EARLY, tile=(16, 128), k_warps=2, split=2, buffers=4)),
]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize(("m", "n", "k", "config"), SHORT, ids=["warps", "one chain", "a cluster's sums"])
def test_sums_that_go_to_others(m, n, k, config, schedule):
    """In registers where chains would be too long, and to the CTA that finishes them."""
    plain = every_code_and_scale(n, k, positive=True)
    x = torch.rand(m, k).half()
    out = torch.full((m, n), torch.nan)
    with bs.emulated("sm_90a", schedule=schedule) as gpu:
        bs.gemm(x, plain.with_layout("fragment"), out=out, out_dtype=torch.float32, config=config)
    check(out, x, plain)
    assert gpu.findings == []


def test_l2_may_be_asked_for_weights_before_the_wait_and_nothing_else_done():
    target, problem = target_named("h200"), Problem(3, 48, 136, a="bf16")
    family = families.of(target)
    kernel = family.kernel(problem, target, EARLY)
    parts = compiler.compile_function(kernel, compiler.traced_arguments(family.ENTRY, problem), target.arch, "early")
    early = before_the_wait(parts["ptx"].decode())
    assert early
    assert all(line.startswith("cp.async.bulk.prefetch.L2.global ") for line in early)
    assert family.premature(EARLY, early) == []
    assert family.premature(EARLY, ["cp.async.bulk.shared::cluster.global [%r1], [%rd1], %r2, [%r3];"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 3])
def test_garbage_stays_where_it_is(m, dtype):
    """A scale of NaN makes its row NaN, as it does where weights are expanded; padding makes nothing NaN."""
    plain = every_code_and_scale(17, 64, layout="linear")
    plain.scales.view(torch.uint8)[3, 2] = 0x7F
    packed = plain.with_layout("fragment")
    dirty = packed.codes.clone()
    dirty[..., 1024:] |= torch.where(packed.codes[..., 1024:] == 0, 0xFF, 0)
    assert not torch.equal(dirty, packed.codes)
    w = bs.NVFP4Tensor.from_parts(dirty, packed.scales, shape=(17, 64), layout="fragment", check_values=False)
    x = torch.randn(m, 64).to(dtype)
    with bs.emulated("sm_90a"):
        y = bs.gemm(x, w, out_dtype=torch.float32)
    rows = torch.arange(17) == 3
    assert y[:, rows].isnan().all()
    assert y[:, ~rows].isfinite().all()
