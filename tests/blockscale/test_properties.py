"""Properties that hold for any input."""

import re

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from operands import same_bits, same_tensor

import blockscale as bs
from blockscale import reference
from blockscale.formats import layouts, packing
from blockscale.quantize import METHODS

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=finite)
any_floats = arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=20), elements=st.floats(width=32))
methods = st.sampled_from(sorted(METHODS))


@given(matrices, methods)
def test_quantise_equals_the_scalar_reference(x, method):
    codes, scales, unit = reference.quantize(torch.from_numpy(x), method)
    q = bs.quantize(torch.from_numpy(x), method=method, layout="linear")
    assert q.global_scale.numpy() == unit
    assert np.array_equal(packing.unpack(q.codes)[:, : x.shape[1]].numpy(), codes)
    assert np.array_equal(q.scales.view(torch.uint8)[:, : scales.shape[1]].numpy(), scales)


@given(matrices, methods, st.sampled_from(["linear", "128x4"]))
def test_values_are_finite_signed_like_the_input_and_within_a_step(x, method, layout):
    x = torch.from_numpy(x)
    y = bs.quantize(x, method=method, layout=layout).dequantize()
    assert y.shape == x.shape
    assert torch.isfinite(y).all()
    assert ((y == 0) | (y.sign() == x.sign())).all()
    if method == "rtn":  # half the widest step is 1/6 of the block's largest value, plus the scale's own rounding
        block = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[1] % 16)).unflatten(1, (-1, 16)).amax(-1)
        unit = float(bs.quantize(x).global_scale)
        allowed = block / 6 * 1.2 + 6 * 2.0**-10 * unit
        error = torch.nn.functional.pad((y.double() - x.double()).abs(), (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
        assert (error.amax(-1) <= allowed).all()


@given(any_floats, methods)
def test_saturating_never_fails_and_never_gives_nan(x, method):
    q = bs.quantize(torch.from_numpy(x), method=method, nonfinite="saturate", layout="linear")
    assert torch.isfinite(q.dequantize()).all()
    assert same_tensor(bs.NVFP4Tensor.from_parts(q.codes, q.scales, q.global_scale, shape=q.shape, layout="linear"), q)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 2))
def test_swizzle_round_trips(rows, blocks, batch):
    scales = torch.randint(0, 127, (*[2] * batch, rows, blocks), dtype=torch.uint8)
    swizzled = layouts.swizzle(scales)
    assert swizzled.shape[-2:] == (-(-rows // 128) * 128, -(-blocks // 4) * 4)
    assert torch.equal(layouts.unswizzle(swizzled, rows, blocks), scales)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(1, 90))
def test_grouped_layout_round_trips(sizes, k):
    q = bs.quantize(torch.randn(sum(sizes), k), layout="linear")
    grouped = q.with_layout("128x4-grouped", torch.tensor(sizes))
    assert same_tensor(grouped.with_layout("linear"), q)


@given(
    st.integers(0, 9),
    st.integers(0, 300),
    st.integers(1, 600),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_products_are_within_the_contract(m, n, k, out_dtype, a_dtype, positive):
    x, w = torch.randn(m, k), torch.randn(n, k)
    if positive:
        x, w = x.abs(), w.abs()
    a = bs.quantize(x) if a_dtype is None else x.to(a_dtype)
    b = bs.quantize(w)
    exact = reference.gemm(a, b)
    y = bs.gemm(a, b, out_dtype=out_dtype)
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=out_dtype))


@given(st.integers(1, 8), st.integers(1, 300), st.data())
def test_slices_on_blocks_equal_slices_of_the_values(rows, k, data):
    q = bs.quantize(torch.randn(rows, k), layout=data.draw(st.sampled_from(["linear", "128x4"])))
    k0 = 16 * data.draw(st.integers(0, (k - 1) // 16))
    k1 = min(k, k0 + 16 * data.draw(st.integers(1, 20)))
    r0 = data.draw(st.integers(0, rows))
    assert same_bits(q[r0:, k0:k1].dequantize(), q.dequantize()[r0:, k0:k1])


TENSORS = st.sampled_from(
    [
        torch.ones(4, 64),
        torch.ones(4, 63),
        torch.ones(64),
        torch.ones(2, 4, 64).bfloat16(),
        torch.ones(64, 4).t(),
        torch.ones(1, 64).expand(4, 64),
        torch.ones(4, 64, dtype=torch.float64),
        torch.ones(4, 64, dtype=torch.int32),
        torch.ones(4, 64, device="meta"),
        torch.ones(4, 64).to_sparse(),
        torch.zeros(4, 32, dtype=torch.uint8),
        torch.zeros(4, 4).to(torch.float8_e4m3fn),
        torch.full((4, 64), float("nan")),
        torch.ones(0, 64),
        torch.ones(4, 0),
        torch.ones(()),
        torch.ones(4),
    ]
)
ANYTHING = st.one_of(TENSORS, st.none(), st.integers(), st.floats(), st.text(max_size=3), st.just([1]), st.booleans())
ARGUMENTS = (
    *("a", "b", "a_sf", "b_sf", "k", "sf_layout", "alpha", "bias", "activation"),
    *("out_dtype", "out", "config", "backend", "invariant"),
)
QUANTIZE_ARGUMENTS = ("x", "method", "global_scale", "layout", "group_sizes", "nonfinite", "seed")


def _argument_refused(call, arguments):
    """The name that the refusal of `call` begins with, or None if it is not refused."""
    try:
        call(**arguments)
    except (TypeError, ValueError) as error:
        return re.match(r"\w*", str(error))[0]
    return None


@given(st.dictionaries(st.sampled_from(sorted(ARGUMENTS)), ANYTHING, min_size=1, max_size=3))
def test_gemm_takes_any_arguments_or_names_the_one_it_refuses(changed):
    good = {"a": torch.ones(4, 64), "b": bs.quantize(torch.ones(6, 64))}
    assert _argument_refused(bs.gemm, {**good, **changed}) in {None, *ARGUMENTS}


@given(st.dictionaries(st.sampled_from(QUANTIZE_ARGUMENTS), ANYTHING, min_size=1, max_size=3))
def test_quantize_takes_any_arguments_or_names_the_one_it_refuses(changed):
    assert _argument_refused(bs.quantize, {"x": torch.ones(4, 64), **changed}) in {None, *QUANTIZE_ARGUMENTS}
