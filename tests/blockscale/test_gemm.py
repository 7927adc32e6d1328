"""The CPU product against float64, within the result contract."""

import warnings

import pytest
import torch
from operands import POISON, every_code_and_scale, same_bits, small_integers

import blockscale as bs
from blockscale import reference
from blockscale.formats import layouts, packing

F8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (1, 1, 1),
    (1, 256, 64),
    (3, 5, 70),
    (5, 256, 512),
    (64, 129, 100),
    (129, 300, 48),
    (2, 3, 8200),
    (17, 40, 4097),
]


def _check(a, b, y, **arguments):
    epilogue = {name: arguments[name] for name in ("alpha", "bias", "activation") if name in arguments}
    exact = reference.gemm(a, b, **epilogue)
    epilogue.pop("activation", None)
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=y.dtype, **epilogue))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("invariant", [False, True])
def test_all_codes_and_scales_within_the_contract(shape, positive, invariant):
    m, n, k = shape
    a, b = every_code_and_scale(m, k, positive=positive), every_code_and_scale(n, k, positive=positive, seed=1)
    for out_dtype in DTYPES:
        _check(a, b, bs.gemm(a, b, alpha=1e-3, out_dtype=out_dtype, invariant=invariant), alpha=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_only_within_the_contract(shape, dtype):
    m, n, k = shape
    b = every_code_and_scale(n, k, positive=True)
    for a in (torch.rand(m, k).to(dtype), torch.full((m, k), 1.1).to(dtype), torch.randn(m, k).to(dtype)):
        for out_dtype in DTYPES:
            _check(a, b, bs.gemm(a, b, alpha=1e-2, out_dtype=out_dtype), alpha=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e36, 1e25, 1e-25, 1e-36])
def test_activations_of_extreme_magnitude(dtype, magnitude):
    a = (torch.randn(4, 200) * magnitude).to(dtype)
    b = bs.quantize(torch.randn(10, 200) / magnitude)
    _check(a, b, bs.gemm(a, b, out_dtype=torch.float32))


@pytest.mark.parametrize(("m", "n", "k"), [(64, 48, 4096), (129, 70, 100), (8, 8, 65536)])
def test_constant_data_shows_no_drift(m, n, k):
    """Equal addends round the same way every time: the worst case of a sequential fp32 sum."""
    a, b = bs.quantize(torch.full((m, k), 1.1)), bs.quantize(torch.full((n, k), 0.37))
    _check(a, b, bs.gemm(a, b, out_dtype=torch.float32))
    for dtype in DTYPES:
        x = torch.full((m, k), 1.1).to(dtype)
        _check(x, b, bs.gemm(x, b, out_dtype=torch.float32))


@pytest.mark.parametrize("octaves", [0, 2, 4, 6, 8])
@pytest.mark.parametrize("k", [128, 384, 4096])
def test_block_scales_of_any_spread(octaves, k):
    """Positive values whose blocks differ by powers of two: fp32 sums would lose the small ones to the large."""

    def spread(rows):
        return torch.rand(rows, k) * 2.0 ** torch.randint(-octaves, octaves + 1, (rows, k // 16)).repeat_interleave(
            16, 1
        )

    for _ in range(4):
        a, b = bs.quantize(spread(64)), bs.quantize(spread(64))
        _check(a, b, bs.gemm(a, b, out_dtype=torch.float32))
        x = spread(64).bfloat16()
        _check(x, b, bs.gemm(x, b, out_dtype=torch.float32))


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("k", [256, 4096])
def test_one_large_product_and_many_below_half_an_ulp(m, k):
    codes, scales = torch.full((m, k // 2), 0x22, dtype=torch.uint8), torch.full((m, k // 16), 2.0**-6)
    scales[:, 0] = 256
    codes[:, 1:8] = 0
    codes[:, 0] = 0x02
    a = bs.NVFP4Tensor.from_parts(codes, scales.to(F8), layout="linear")
    _check(a, a, bs.gemm(a, a, out_dtype=torch.float32))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (64, 129, 1000), (129, 64, 4096)])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_small_integers_are_exact(m, n, k, layout):
    (a, x), (b, y) = small_integers(m, k, 0, layout), small_integers(n, k, 1, layout)
    exact = x @ y.T
    assert torch.equal(bs.gemm(a, b, out_dtype=torch.float32).long(), exact)
    assert torch.equal(bs.gemm(a, b, out_dtype=torch.float32, invariant=True).long(), exact)
    assert torch.equal(bs.gemm(x.float(), b, out_dtype=torch.float32).long(), exact)
    assert torch.equal(bs.gemm(x.bfloat16(), b, out_dtype=torch.float32).long(), exact)
    assert torch.equal(bs.gemm(a, b), exact.float().bfloat16())


class TestEpilogue:
    @pytest.mark.parametrize("out_dtype", DTYPES)
    def test_alpha_comes_before_the_output_is_rounded(self, out_dtype):
        """The raw sum, 3e10, is far beyond fp16; the result, 3e4, is not."""
        codes, scales = torch.full((3, 2048), 0x77, dtype=torch.uint8), torch.full((3, 256), 448.0).to(F8)
        a = bs.NVFP4Tensor.from_parts(codes, scales, layout="linear")
        y = bs.gemm(a, a, alpha=1e-6, out_dtype=out_dtype)
        assert torch.isfinite(y).all()
        _check(a, a, y, alpha=1e-6)

    @pytest.mark.parametrize("out_dtype", DTYPES)
    def test_bias_is_not_scaled_by_alpha(self, out_dtype):
        a, b = bs.quantize(torch.zeros(4, 32)), bs.quantize(torch.randn(6, 32))
        y = bs.gemm(a, b, alpha=0.01, bias=torch.full((6,), 100.0), out_dtype=out_dtype)
        assert torch.equal(y, torch.full((4, 6), 100.0, dtype=out_dtype))

    @pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
    @pytest.mark.parametrize("bias_dtype", DTYPES)
    def test_activation_of_scaled_sum_plus_bias(self, activation, bias_dtype):
        a, b = bs.quantize(torch.randn(33, 200)), bs.quantize(torch.randn(300, 200))
        arguments = {"alpha": -0.3, "bias": torch.randn(300).to(bias_dtype), "activation": activation}
        for out_dtype in DTYPES:
            for invariant in (False, True):
                _check(a, b, bs.gemm(a, b, out_dtype=out_dtype, invariant=invariant, **arguments), **arguments)

    def test_alpha_as_tensor_int_zero_and_extremes(self):
        a, b = bs.quantize(torch.randn(4, 64)), bs.quantize(torch.randn(5, 64))
        assert same_bits(bs.gemm(a, b, alpha=torch.tensor(0.5)), bs.gemm(a, b, alpha=0.5))
        assert same_bits(bs.gemm(a, b, alpha=2), bs.gemm(a, b, alpha=2.0))
        assert not bs.gemm(a, b, alpha=0.0).any()
        tiny = bs.quantize(torch.randn(4, 64) * 1e-37), bs.quantize(torch.randn(5, 64) * 1e-37)
        y = bs.gemm(*tiny, alpha=1e70, out_dtype=torch.float32)
        _check(*tiny, y, alpha=1e70)

    def test_huge_factors_keep_zero_and_limits(self):
        a, b = bs.quantize(torch.full((1, 64), -1e3)), bs.quantize(torch.full((1, 64), 1e3))
        for activation in ("silu", "gelu"):
            assert bs.gemm(a, b, alpha=1e33, activation=activation) == 0
        zero, large = bs.quantize(torch.zeros(1, 64)), bs.quantize(torch.full((1, 64), 1e38))
        assert bs.gemm(zero, large, alpha=1e300) == 0
        y = bs.gemm(a, b, alpha=-1e30, bias=torch.full((1,), -3e38), out_dtype=torch.float32)
        _check(a, b, y, alpha=-1e30, bias=torch.full((1,), -3e38))
        with pytest.raises(ValueError, match="alpha: inf, expected a finite number"):
            bs.gemm(a, b, alpha=10**400)

    def test_global_scales_take_part_on_both_sides(self):
        x, w = torch.randn(8, 64), torch.randn(8, 64)
        reference_y = bs.gemm(bs.quantize(x), bs.quantize(w), out_dtype=torch.float32)
        scaled = bs.gemm(bs.quantize(x * 32), bs.quantize(w / 32), out_dtype=torch.float32)
        assert torch.equal(reference_y, scaled)


class TestShapes:
    def test_batches_broadcast(self):
        a, b = torch.randn(2, 3, 5, 80), torch.randn(3, 7, 80)
        qa, qb = bs.quantize(a), bs.quantize(b)
        y = bs.gemm(qa, qb, out_dtype=torch.float32)
        assert y.shape == (2, 3, 5, 7)
        _check(qa, qb, y)
        for i in range(2):
            for j in range(3):
                assert same_bits(y[i, j], bs.gemm(qa[i, j], qb[j], out_dtype=torch.float32))
        one = bs.quantize(torch.randn(7, 80))
        _check(qa, one, bs.gemm(qa, one))
        _check(a, one, bs.gemm(a, one))
        wide = bs.quantize(torch.randn(2, 1, 7, 80))
        _check(qa, wide, bs.gemm(qa, wide))
        _check(qa[0, 0], wide, bs.gemm(qa[0, 0], wide))

    @pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
    def test_empty_results_after_checks(self, m, n):
        a, b = bs.quantize(torch.zeros(m, 32)), bs.quantize(torch.zeros(n, 32))
        y = bs.gemm(a, b, out_dtype=torch.float16)
        assert y.shape == (m, n)
        assert y.dtype == torch.float16
        with pytest.raises(ValueError, match="K = 32, but b has K = 48"):
            bs.gemm(a, bs.quantize(torch.zeros(n, 48)))
        with pytest.raises(ValueError, match="bias: shape"):
            bs.gemm(a, b, bias=torch.zeros(n + 1))

    @pytest.mark.parametrize("m", [1, 2, 3, 31, 64, 127])
    @pytest.mark.parametrize("k", [64, 1000, 7168])
    def test_small_m_needs_no_padding_by_the_caller(self, m, k):
        a, b = every_code_and_scale(m, k), every_code_and_scale(20, k, seed=3)
        _check(a, b, bs.gemm(a, b))

    def test_strided_activations_equal_their_contiguous_copies(self):
        big = torch.randn(64, 256).bfloat16()
        b = bs.quantize(torch.randn(9, 64))
        for x in (
            big[:, :64],
            big[:, 128:192],
            big.t()[:64].t(),
            big[::2, :64],
            big[:, ::4],
            big[:1, :64].expand(30, 64),
        ):
            assert same_bits(bs.gemm(x, b), bs.gemm(x.contiguous(), b))

    def test_nan_activations_reach_their_own_rows_only(self):
        x, b = torch.randn(6, 64), bs.quantize(torch.randn(9, 64))
        expected = bs.gemm(x, b)
        x[2, 5] = float("nan")
        y = bs.gemm(x, b)
        assert y[2].isnan().all()
        keep = [0, 1, 3, 4, 5]
        assert same_bits(y[keep], expected[keep])


class TestRaw:
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    @pytest.mark.parametrize("k", [64, 100, 592, 3696])
    def test_equals_the_wrapped_form(self, layout, k):
        a, b = bs.quantize(torch.randn(17, k), layout=layout), bs.quantize(torch.randn(9, k), layout=layout)
        alpha = float(a.global_scale) * float(b.global_scale)
        y = bs.gemm(a.codes, b.codes, a.scales, b.scales, k=k, sf_layout=layout, alpha=alpha, out_dtype=torch.float32)
        torch.testing.assert_close(y, bs.gemm(a, b, out_dtype=torch.float32), rtol=1e-6, atol=0)
        f4 = [packing.as_float4(t.codes) for t in (a, b)]
        again = bs.gemm(*f4, a.scales, b.scales, k=k, sf_layout=layout, alpha=alpha, out_dtype=torch.float32)
        assert same_bits(y, again)

    def test_k_defaults_to_twice_the_bytes(self):
        a, b = bs.quantize(torch.randn(17, 128)), bs.quantize(torch.randn(9, 128))
        assert bs.gemm(a.codes, b.codes, a.scales, b.scales).shape == (17, 9)

    def test_weight_only(self):
        x, b = torch.randn(4, 128), bs.quantize(torch.randn(9, 128))
        y = bs.gemm(x, b.codes, None, b.scales, alpha=float(b.global_scale), out_dtype=torch.float32)
        torch.testing.assert_close(y, bs.gemm(x, b, out_dtype=torch.float32), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("stale", [POISON, 0x7E, 0x80])
    @pytest.mark.parametrize(("m", "k"), [(5, 512), (5, 48), (129, 100)])
    def test_stale_padding_never_shows(self, stale, m, k):
        a, b = bs.quantize(torch.randn(m, k)), bs.quantize(torch.randn(256, k))
        clean = bs.gemm(a.codes, b.codes, a.scales, b.scales, k=k)
        rows, columns = a.scales.shape
        linear = layouts.unswizzle(a.scales, rows, columns).view(torch.uint8)
        linear[m:], linear[:, -(-k // 16) :] = stale, stale
        dirty = packing.unpack(a.codes)
        dirty[:, k:] = 7
        y = bs.gemm(packing.pack(dirty), b.codes, layouts.swizzle(linear).view(F8), b.scales, k=k)
        assert same_bits(y, clean)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"a_sf": None}, ValueError, "a_sf: missing; a holds packed codes"),
            ({"b_sf": None}, ValueError, "b_sf: missing; b holds packed codes"),
            ({"k": 65}, ValueError, r"a \(raw\): codes: 32 bytes a row, expected 33 or 64 for K = 65"),
            ({"k": 0}, ValueError, r"a \(raw\): shape: K = 0"),
            ({"k": True}, TypeError, "k: bool, expected an integer"),
            ({"k": 63.5}, TypeError, "k: float, expected an integer"),
            ({"a_sf": 1.0}, TypeError, "a_sf: float, expected a float8_e4m3fn tensor"),
            ({"sf_layout": "linear"}, ValueError, r"a \(raw\): scales: shape \(128, 4\), expected \(5, 4\)"),
            ({"sf_layout": "128x4-grouped"}, ValueError, "sf_layout: '128x4-grouped'"),
            ({"sf_layout": "8x4"}, ValueError, "sf_layout: '8x4', expected 'linear' or '128x4'"),
            ({"a": torch.zeros(5, 64)}, TypeError, "a: torch.float32 tensor, expected packed codes"),
            ({"a": torch.zeros(32, dtype=torch.uint8)}, ValueError, r"a: shape \(32,\)"),
            ({"a_sf": torch.zeros(128, 4, dtype=torch.uint8)}, TypeError, r"a \(raw\): scales: dtype torch.uint8"),
            ({"a_sf": torch.full((128, 4), 0x80, dtype=torch.uint8).view(F8)}, ValueError, "byte 0x80"),
            ({"b_sf": torch.full((128, 4), 0x7F, dtype=torch.uint8).view(F8)}, ValueError, "byte 0x7F"),
        ],
    )
    def test_bad_raw_operands(self, change, error, message):
        a, b = bs.quantize(torch.randn(5, 64)), bs.quantize(torch.randn(6, 64))
        arguments = {"a": a.codes, "b": b.codes, "a_sf": a.scales, "b_sf": b.scales, **change}
        with pytest.raises(error, match=message):
            bs.gemm(**arguments)


class TestOut:
    @pytest.mark.parametrize("out_dtype", DTYPES)
    def test_is_written_whole_and_returned(self, out_dtype):
        a, b = bs.quantize(torch.randn(37, 80)), bs.quantize(torch.randn(300, 80))
        out = torch.full((37, 300), float("nan"), dtype=out_dtype)
        assert bs.gemm(a, b, out_dtype=out_dtype, out=out) is out
        assert same_bits(out, bs.gemm(a, b, out_dtype=out_dtype))

    def test_any_strides_and_nothing_beside_it(self):
        a, b = bs.quantize(torch.randn(2, 37, 80)), bs.quantize(torch.randn(30, 80))
        expected = bs.gemm(a, b)
        big = torch.full((2, 50, 80), 7.0, dtype=torch.bfloat16)
        for view in (big[:, 3:40, 2:62:2], big.transpose(1, 2)[:, :37, :30]):
            big.fill_(7)
            count = int((big == 7).sum())
            bs.gemm(a, b, out=view)
            assert torch.equal(view, expected)
            view.fill_(7)
            assert int((big == 7).sum()) == count

    @pytest.mark.parametrize(
        ("out", "error", "message"),
        [
            (torch.empty(4, 6), TypeError, "out: torch.float32 tensor, expected a tensor of out_dtype"),
            (torch.empty(4, 5, dtype=torch.bfloat16), ValueError, r"out: shape \(4, 5\) on cpu, expected \(4, 6\)"),
            (torch.empty(1, 4, 6, dtype=torch.bfloat16), ValueError, "out: shape"),
            (torch.empty(4, 6, dtype=torch.bfloat16, device="meta"), ValueError, "out: shape .* on meta"),
            (torch.empty(1, 6, dtype=torch.bfloat16).expand(4, 6), ValueError, "make elements share memory"),
            ("no tensor", TypeError, "out: str"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, out, error, message):
        a, b = bs.quantize(torch.randn(4, 64)), bs.quantize(torch.randn(6, 64))
        with pytest.raises(error, match=message):
            bs.gemm(a, b, out=out)

    def test_overlap_with_any_input_is_refused(self):
        x, b = torch.randn(64, 64).bfloat16(), bs.quantize(torch.randn(64, 64))
        with pytest.raises(ValueError, match="out: overlaps a"):
            bs.gemm(x, b, out=x)
        memory = torch.zeros(128, 64, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="out: overlaps a"):
            bs.gemm(memory[1:65], b, out=memory[:64])
        bs.gemm(memory[64:], b, out=memory[:64])
        wide = torch.randn(64, 128).bfloat16()
        expected = bs.gemm(wide[:, :64], b)
        assert torch.equal(bs.gemm(wide[:, :64], b, out=wide[:, 64:]), expected)
        bias = torch.zeros(64, 64, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="out: overlaps bias"):
            bs.gemm(x, b, bias=bias[3], out=bias)
        codes = b.codes.view(torch.bfloat16)
        with pytest.raises(ValueError, match="out: overlaps b"):
            bs.gemm(x[:16], b, out=codes.view(16, 64))


class TestInvariance:
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    def test_a_row_has_the_same_bits_alone_and_among_others(self, dtype):
        x = torch.randn(70, 4200)
        b = bs.quantize(torch.randn(300, 4200))
        whole = bs.quantize(x, layout="linear") if dtype is None else x.to(dtype)
        y = bs.gemm(whole, b, invariant=True, out_dtype=torch.float32)
        for rows in (slice(0, 8), slice(33, 34), slice(5, 70)):
            assert same_bits(bs.gemm(whole[rows], b, invariant=True, out_dtype=torch.float32), y[rows])
        if dtype is not None:
            changed = whole.clone()
            changed[10:] = 1e4
            assert same_bits(bs.gemm(changed, b, invariant=True, out_dtype=torch.float32)[:10], y[:10])

    def test_repeats_have_the_same_bits(self):
        a, b = bs.quantize(torch.randn(33, 700)), bs.quantize(torch.randn(130, 700))
        first = bs.gemm(a, b, out_dtype=torch.float32)
        assert all(same_bits(bs.gemm(a, b, out_dtype=torch.float32), first) for _ in range(20))


@pytest.mark.parametrize("k", [592, 3696])
def test_compiled_equals_eager(k):
    """Also where the scales' columns are padded, 37 -> 40 and 231 -> 232."""
    x, w = torch.randn(17, k), bs.quantize(torch.randn(24, k))

    def product(x):
        return bs.gemm(bs.quantize(x), w), bs.gemm(x.bfloat16(), w, activation="silu")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about where it breaks the graph
        compiled = torch.compile(product, backend="eager")(x)
    assert all(same_bits(y, e) for y, e in zip(compiled, product(x), strict=True))


def test_shards_along_k_add_up():
    x, w = bs.quantize(torch.randn(9, 640)), bs.quantize(torch.randn(20, 640))
    parts = [bs.gemm(x[:, i : i + 160], w[:, i : i + 160], out_dtype=torch.float32) for i in range(0, 640, 160)]
    _check(x, w, torch.stack(parts).sum(0))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads(threads):
    a, b = every_code_and_scale(33, 500), every_code_and_scale(700, 500, seed=1)
    torch.set_num_threads(threads)
    try:
        _check(a, b, bs.gemm(a, b, out_dtype=torch.float32))
    finally:
        torch.set_num_threads(1)


A, B = bs.quantize(torch.ones(4, 64)), bs.quantize(torch.ones(6, 64))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": [1]}, TypeError, "a: list, expected an NVFP4Tensor or a floating tensor"),
        ({"a": torch.ones(4, 64, dtype=torch.float64)}, TypeError, "a: dtype torch.float64"),
        ({"a": torch.ones(64)}, ValueError, r"a: shape \(64,\)"),
        ({"a": torch.ones(4, 63)}, ValueError, "a: K = 63, but b has K = 64"),
        ({"a": torch.ones(64, 64).t()[:, :0]}, ValueError, "a: K = 0"),
        ({"a": torch.ones(4, 64, device="meta")}, ValueError, "a: on meta, but b is on cpu"),
        ({"a": torch.ones(2, 4, 64), "b": bs.quantize(torch.ones(3, 6, 64))}, ValueError, "do not broadcast"),
        ({"out": torch.ones(4, 6, dtype=torch.bfloat16, requires_grad=True)}, ValueError, "out: requires grad"),
        ({"b": torch.ones(6, 64)}, TypeError, "b: torch.float32 tensor, expected an NVFP4Tensor"),
        ({"k": 64}, ValueError, "k: 64, but it goes with raw operands"),
        ({"a_sf": torch.ones(1).to(F8)}, TypeError, "a: NVFP4Tensor, expected packed codes"),
        ({"alpha": "1"}, TypeError, "alpha: str"),
        ({"alpha": True}, TypeError, "alpha: bool"),
        ({"alpha": float("nan")}, ValueError, "alpha: nan, expected a finite number"),
        ({"alpha": torch.ones(2)}, ValueError, r"alpha: torch.float32 tensor of shape \(2,\)"),
        ({"alpha": torch.ones((), dtype=torch.float64)}, ValueError, "alpha: torch.float64"),
        ({"bias": torch.ones(5)}, ValueError, r"bias: shape \(5,\) on cpu, expected \(6,\)"),
        ({"bias": torch.ones(6, dtype=torch.int32)}, TypeError, "bias: torch.int32"),
        ({"bias": 1.0}, TypeError, "bias: float"),
        ({"activation": "tanh"}, ValueError, "activation: 'tanh', expected one of None, 'relu', 'gelu', 'silu'"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype: torch.float64"),
        ({"config": 1}, TypeError, "config: int, expected None or a Config"),
        ({"config": bs.Config()}, ValueError, "config: tile 128x128, expected None: the CPU backend has no config"),
        ({"invariant": "no"}, TypeError, "invariant: str, expected a bool"),
        ({"sf_layout": "bogus"}, ValueError, "sf_layout: 'bogus', expected 'linear' or '128x4'"),
        ({"a": torch.ones(4, 64).to_sparse()}, TypeError, "a: layout torch.sparse_coo"),
        (
            {"backend": "sm120"},
            ValueError,
            r"backend: 'sm120' cannot run here: .*`with emulated\('sm_120a'\)` runs its kernels",
        ),
        ({"backend": "tpu"}, ValueError, "backend: 'tpu', expected None or one of 'cpu'"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        bs.gemm(**{"a": A, "b": B, **change})


def test_available_backends_says_why():
    reasons = bs.available_backends()
    assert list(reasons) == ["cpu", "sm90", "sm100", "sm103", "sm120"]
    assert reasons["cpu"] is None
    for name in ("sm100", "sm103", "sm120"):
        assert f"`with emulated('sm_{name[2:]}a')` runs its kernels" in reasons[name]
    assert same_bits(bs.gemm(A, B, backend="cpu"), bs.gemm(A, B))


def test_default_device_has_no_say():
    x = torch.randn(5, 64)
    expected = bs.gemm(x, B, bias=torch.ones(6))
    bias = torch.ones(6)
    with torch.device("meta"):
        assert same_bits(bs.gemm(x, B, bias=bias), expected)
