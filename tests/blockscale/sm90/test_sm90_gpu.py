"""Weight-only products on a Hopper GPU: the contract at every shape, the same bits every time, and faults of others."""

import itertools

import pytest
import torch
from operands import same_bits, small_integers
from weight_only import DTYPES, EPILOGUES, ODD, ROWS, SIZES, check, weight

import blockscale as bs
from blockscale.backends import gpu
from blockscale.families.sm90.choice import candidates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def product(x, w, out_dtype=torch.bfloat16, **options):
    """`gemm` into a poisoned result."""
    shape = (*x.shape[:-1], w.shape[0])
    out = torch.full(shape, torch.nan, dtype=out_dtype, device="cuda")
    return bs.gemm(x, w, out=out, out_dtype=out_dtype, **options)


def uniform(*shape, dtype=torch.bfloat16, seed=1):
    """From 0 to 1: positive data hides no error of sums."""
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(*shape, device="cuda", generator=random).to(dtype)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", SIZES)
def test_contract_on_positive_data(n, k):
    w, values = weight(n, k, positive=True)
    x = uniform(max(ROWS), k)
    for m in ROWS:
        check(product(x[:m], w), x[:m], values)


@pytest.mark.parametrize("n", ODD[0])
def test_odd_sizes(n):
    for k, m in itertools.product(*ODD[1:]):
        w, values = weight(n, k)
        x = torch.randn(m, k, device="cuda").bfloat16()
        check(product(x, w), x, values)


@pytest.mark.parametrize(("a", "out", "bias", "activation"), EPILOGUES)
@pytest.mark.parametrize("tensor", [False, True])
def test_dtypes_alpha_bias_and_activation(a, out, bias, activation, tensor):
    w, values = weight(1000, 2080, unit=1 / 3000)
    row = None if bias is None else torch.randn(1000, device="cuda").to(DTYPES[bias])
    alpha = torch.tensor(-0.5, device="cuda") if tensor else -0.5
    for m in ROWS:
        x = torch.randn(m, 2080, device="cuda").to(DTYPES[a])
        y = product(x, w, DTYPES[out], alpha=alpha, bias=row, activation=activation)
        check(y, x, values, -0.5, row, activation)


@pytest.mark.parametrize("config", candidates(), ids=str)
def test_every_configuration(config):
    for n, k in ((100, 200), (1000, 4100)):
        w, values = weight(n, k, positive=True)
        for m in (1, 7, 64, 65):
            x = uniform(m, k)
            check(product(x, w, config=config), x, values)


@pytest.mark.parametrize("m", [1, 8, 17, 64])
def test_small_integers_are_exact(m):
    b, values = small_integers(200, 2000)
    x = torch.randint(-3, 4, (m, 2000)).to(torch.bfloat16)
    y = product(x.cuda(), b.to("cuda").with_layout("fragment"), torch.float32)
    assert torch.equal(y.cpu().long(), x.long() @ values.T)


def test_operands_of_any_strides_and_addresses():
    k, n = 1000, 300
    w, values = weight(n, k)
    whole = torch.randn(40, 2 * k + 8, device="cuda").bfloat16()
    wide = torch.full((20, n + 5), torch.nan, dtype=torch.bfloat16, device="cuda")
    for x in (whole[:, :k], whole[:, 1 : k + 1], whole[::2, 3 : k + 3], whole[:9, : 2 * k : 2], whole[:1, 7 : k + 7]):
        check(product(x, w), x, values)
    columns = torch.randn(k, 9, device="cuda").bfloat16().T
    check(product(columns, w), columns, values)
    bs.gemm(whole[:20, :k], w, out=wide[:, 2 : n + 2])
    check(wide[:, 2 : n + 2], whole[:20, :k], values)
    assert wide[:, :2].isnan().all()
    assert wide[:, n + 2 :].isnan().all()
    batch = torch.randn(2, 3, 5, k, device="cuda").bfloat16()
    check(product(batch, w).view(-1, n), batch.view(-1, k), values)
    check(product(batch.transpose(0, 1), w).view(-1, n), batch.transpose(0, 1).reshape(-1, k), values)


def test_nothing_to_compute():
    w, _ = weight(33, 64)
    assert product(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"), w).shape == (0, 33)
    check(product(uniform(3, 64), w), uniform(3, 64), weight(33, 64)[1])  # no error was left behind


def test_other_products_of_packed_weights():
    """NVFP4 or fp32 activations, and one weight a matrix: by torch's matmul."""
    w, values = weight(300, 200)
    check(bs.gemm(uniform(5, 200, dtype=torch.float32), w), uniform(5, 200, dtype=torch.float32), values)
    q = bs.quantize(torch.randn(5, 200)).to("cuda")
    check(bs.gemm(q, w), q.dequantize(), values)
    stack = bs.quantize(torch.randn(2, 300, 200)).to("cuda").with_layout("fragment")
    y = bs.gemm(uniform(2, 4, 200), stack)
    for i in range(2):
        check(y[i], uniform(2, 4, 200)[i], stack[i].dequantize().double())


def test_what_is_refused():
    x, w = uniform(5, 200), weight(300, 200)[0]
    plain = w.with_layout("128x4")
    for more in ({"invariant": True}, {"config": candidates()[0]}):
        with pytest.raises(ValueError, match="needs fp16 or bf16 activations and one weight in layout 'fragment'"):
            bs.gemm(x, plain, **more)
    with pytest.raises(ValueError, match=r"config\.tile: 128 rows, expected one of 1, 2, 4"):
        bs.gemm(x, w, config=bs.Config())


# The same bits


@pytest.mark.parametrize("m", [1, 8, 17, 64])
def test_the_same_bits_run_after_run_and_beside_other_rows_of_k(m):
    """50 runs, and nothing of what lies beside the operands."""
    w, values = weight(1000, 4100)
    whole = torch.full((m, 4608), torch.nan, device="cuda").bfloat16()
    whole[:, :4100] = uniform(m, 4100)
    first = product(whole[:, :4100], w)
    check(first, whole[:, :4100], values)
    for i in range(50):
        whole[:, 4100:] = float(i)
        assert same_bits(product(whole[:, :4100], w), first)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_the_same_bits_on_two_streams(m):
    """100 calls that overlap, and nothing that they share."""
    w, _ = weight(4096, 4096)
    xs = [uniform(m, 4096, seed=seed) for seed in (1, 2)]
    alone = [product(x, w) for x in xs]
    outs = [[torch.full_like(alone[0], torch.nan) for _ in range(50)] for _ in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for i in range(50):
        for x, stream, of_stream in zip(xs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                bs.gemm(x, w, out=of_stream[i])
    torch.cuda.synchronize()
    for expected, of_stream in zip(alone, outs, strict=True):
        assert all(same_bits(out, expected) for out in of_stream)


@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16])
def test_a_rows_bits_do_not_depend_on_the_others(a):
    """8 rows alone and among 64, bit for bit if asked for, otherwise within the contract."""
    w, values = weight(1000, 4100)
    x = torch.randn(64, 4100, device="cuda").to(a)
    whole = product(x, w, a, invariant=True)
    check(whole, x, values)
    for start, stop in ((0, 8), (0, 1), (5, 6), (13, 30), (60, 64)):
        assert same_bits(product(x[start:stop], w, a, invariant=True), whole[start:stop])
    check(product(x, w, a)[:8], x[:8], values)


# Faults of others


@pytest.mark.parametrize(("a", "out"), [("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_sums_beyond_fp16_before_a_small_alpha(a, out):
    """The raw sum is 3e10, the result 3e4."""
    codes = torch.full((64, 2048), 0x77, dtype=torch.uint8, device="cuda")
    scales = torch.full((64, 256), 0x7E, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    w = bs.NVFP4Tensor.from_parts(codes, scales, 1.0, layout="linear").with_layout("fragment")
    values = torch.full((64, 4096), 2688.0, dtype=torch.float64, device="cuda")
    for m in (1, 17, 64):
        x = torch.full((m, 4096), 2688.0, device="cuda").to(DTYPES[a])
        check(product(x, w, DTYPES[out], alpha=1e-6), x, values, 1e-6)


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("m", [1, 17, 64])
def test_captured_and_replayed_with_new_data(kind, m):
    """No copy from the host; the same plan serves the graph and the call beside it."""
    w, _ = weight(1000, 4096)
    x, out = uniform(m, 4096), torch.empty(m, 1000, dtype=torch.bfloat16, device="cuda")
    alpha = 0.5 if kind == "float" else torch.tensor(0.5, device="cuda")
    bs.gemm(x, w, alpha=alpha, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bs.gemm(x, w, alpha=alpha, out=out)
    for scale in (0.25, 3.0):
        x.normal_()
        if kind == "tensor":
            alpha.fill_(scale)
        out.fill_(torch.nan)
        graph.replay()
        assert same_bits(out, product(x, w, alpha=alpha))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_warm_call_allocates_nothing_and_waits_for_nothing():
    w, _ = weight(1000, 4096)
    x, out = uniform(4, 4096), torch.empty(4, 1000, dtype=torch.bfloat16, device="cuda")
    bs.gemm(x, w, out=out)
    bs.gemm(x, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            bs.gemm(x, w, out=out, alpha=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert any(call.plan.launcher.target.arch == "sm_90a" for call in gpu.known().values())


@pytest.mark.parametrize("m", [1, 17, 64])
def test_weights_of_more_than_2_to_the_31_bytes(m):
    """2^20 rows, of which the last alone are not zero."""
    n, k = 1 << 20, 6144
    last, values = weight(100, k)
    units = torch.zeros(n // 16, k // 128, 1152, dtype=torch.uint8, device="cuda")
    units[-7:] = last.codes
    w = bs.NVFP4Tensor(units, last.scales, last.global_scale, "fragment", torch.Size((n, k)))
    y = product(uniform(m, k), w)
    check(y[:, -112:-12], uniform(m, k), values)
    assert y[:, :-112].count_nonzero() == 0


def test_results_of_more_than_2_to_the_31_elements():
    """The last row is right, and the first not written twice."""
    m, n, k = 65_537, 32_768, 16
    w, values = weight(n, k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    y = product(x, w, config=candidates()[-1])
    for rows in (slice(0, 70), slice(32_700, 32_800), slice(-70, None)):
        check(y[rows], x[rows], values)
    assert not y.isnan().any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_operands_on_another_device():
    w, values = weight(1000, 4096)
    w, x = w.to("cuda:1"), uniform(4, 4096).to("cuda:1")
    out = torch.full((4, 1000), torch.nan, dtype=torch.bfloat16, device="cuda:1")
    bs.gemm(x, w, out=out)
    assert torch.cuda.current_device() == 0
    check(out, x, values.to("cuda:1"))


# Layers


def test_a_packed_layer_by_the_kernel_and_in_a_graph():
    """A second load of weights is seen by a graph that was captured before."""
    layers = [bs.nn.Linear.from_linear(torch.nn.Linear(4096, 1000).bfloat16()).cuda() for _ in range(2)]
    served = bs.nn.Linear.from_linear(torch.nn.Linear(4096, 1000).bfloat16()).cuda().pack()
    x = uniform(8, 4096)
    with torch.no_grad():
        served(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = served(x)
        for layer in (layers[0], layers[1], layers[0]):
            served.load_state_dict(layer.state_dict())
            graph.replay()
            bias = layer.bias.detach()
            check(y, x, layer.weight.dequantize().double(), bias=bias)
            assert same_bits(y, bs.gemm(x, layer.weight.with_layout("fragment"), bias=bias))
