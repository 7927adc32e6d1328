"""The Hopper kernels on the software GPU: the same host code and PTX as on silicon, small shapes, every check."""

import pytest
import torch
from operands import every_code_and_scale, same_bits, small_integers

import blockscale as bs
from blockscale import reference
from ptxemu.device import TARGETS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.skipif("sm_90a" not in TARGETS, reason="this ptxemu does not know sm_90a")
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
