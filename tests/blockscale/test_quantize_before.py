"""What numbers go through before they are quantised: near the exact value, the same bits in any batch, refusals."""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.quantize import before


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_swiglu_is_near_the_exact_one():
    """Five roundings and the exponential's 1.5 x 2^-24; gates as far as it goes."""
    gate = torch.cat((random(1 << 14) * 8, torch.linspace(-87.9, 90, 1 << 14), torch.tensor([0.0, -0.0, 1e30, 1e-40])))
    up = random(len(gate), seed=1)
    found = before.swiglu(torch.cat((gate, up)))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert bool(((found - exact).abs() <= 5 * 2.0**-24 * exact.abs() + 2.0**-149).all())
    far = before.swiglu(torch.tensor([-1000.0, 1.0]))
    assert abs(float(far)) <= 1e-35


def test_rms_norm_is_near_the_exact_one():
    x, weight = random(7, 5000) * 3, random(5000, seed=1)
    found = before.rms_norm(x, weight, 1e-6)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert bool(((found - exact).abs() <= 2.0**-20 * exact.abs()).all())


def test_rms_norm_rounds_as_numpy_does():
    """In a second writing of the same order; numpy's root is IEEE's."""
    x, weight = random(200, 520) * 3, random(520, seed=1)
    numbers = np.zeros((200, 1024), np.float32)
    numbers[:, :520] = x.numpy()
    sums = (numbers * numbers).reshape(200, 2, 32, 16)
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    total = sums[:, 0, :, 0] + sums[:, 1, :, 0]
    for half in (16, 8, 4, 2, 1):
        total = total[:, :half] + total[:, half:]
    inverse = np.float32(1) / np.sqrt(total / np.float32(520) + np.float32(1e-6))
    expected = (x.numpy() * inverse) * weight.numpy()
    assert np.array_equal(before.rms_norm(x, weight, 1e-6).numpy(), expected)


def test_a_rows_norm_depends_on_nothing_else():
    x, weight = random(9, 700).bfloat16(), random(700, seed=1)
    whole = before.rms_norm(x, weight, 1e-5)
    assert torch.equal(whole[4:5], before.rms_norm(x[4:5], weight, 1e-5))
    assert torch.equal(whole.view(3, 3, 700), before.rms_norm(x.view(3, 3, 700), weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_takes_what_comes_out(dtype):
    x, weight = random(6, 160).to(dtype), random(160, seed=1).to(dtype)
    for options, values in (
        ({"activation": "swiglu"}, before.swiglu(x)),
        ({"norm_weight": weight, "eps": 1e-5}, before.rms_norm(x, weight, 1e-5)),
    ):
        found, expected = bs.quantize(x, **options), bs.quantize(values)
        assert found.shape == expected.shape
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))
        assert torch.equal(found.global_scale, expected.global_scale)


def test_under_a_tracer():
    """The operator says the shapes that it returns, and returns what the function does."""
    x = random(6, 160)
    arguments = "rtn", None, None, "128x4", None, "error", "swiglu", None, 1e-6
    torch.library.opcheck(torch.ops.blockscale.quantize, (x, *arguments))
    codes, _, _ = torch.ops.blockscale.quantize(x, *arguments)
    assert torch.equal(codes, bs.quantize(x, activation="swiglu").codes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "gelu"}, ValueError, "activation: 'gelu', expected None or 'swiglu'"),
        ({"activation": "geglu"}, ValueError, "activation: 'geglu', expected None or 'swiglu'"),
        ({"activation": "swiglu", "norm_weight": torch.ones(33)}, ValueError, "norm_weight: given, but it does not go"),
        ({"activation": "swiglu"}, ValueError, "x: last dimension 33, expected 2 K"),
        ({"norm_weight": torch.ones(32)}, ValueError, r"norm_weight: shape \(32,\) on cpu, expected \(33,\)"),
        ({"norm_weight": torch.ones(33, dtype=torch.int32)}, TypeError, "norm_weight: dtype torch.int32"),
        ({"norm_weight": 1.0}, TypeError, "norm_weight: float, expected a tensor"),
        ({"norm_weight": torch.ones(33), "eps": -1.0}, ValueError, "eps: -1.0, expected 0 to 1"),
        ({"norm_weight": torch.ones(33), "eps": "x"}, TypeError, "eps: str, expected a float"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        bs.quantize(random(2, 33), **options)
