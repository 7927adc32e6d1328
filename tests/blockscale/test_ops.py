"""The operators: what torch checks of any operator, compiled and exported calls equal to eager ones, gradients."""

import sys

import pytest
import torch
from operands import POISON, every_code_and_scale, same_bits, same_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale import calls, ops

M, N, K = 5, 40, 80
SIZES = torch.tensor([2, 0, 3], dtype=torch.int32)
SHOULD_PASS = ("test_schema", "test_faketensor", "test_autograd_registration")


class Recorder(TorchDispatchMode):
    """Names of the library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "blockscale":
            self.seen.append(func._schema.name.removeprefix("blockscale::"))
            self.last = func, args
        return func(*args, **(kwargs or {}))


def _calls():
    w, x = bs.quantize(torch.randn(N, K)), torch.randn(M, K)
    stack = bs.quantize(torch.randn(3, N, K))
    q = bs.quantize(x)
    grad, alpha, bias = torch.randn(M, N), torch.tensor(0.5), torch.randn(N, requires_grad=True)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    floating = x.clone().requires_grad_()
    backward = (
        *(grad, x, None, None, None, "linear", *w.operand(), K),
        *(*ops.epilogue(alpha, bias.detach(), "gelu"), None, [True, True, True]),
    )
    return {
        "quantize": lambda: bs.quantize(x, method="mse"),
        "quantize, grouped": lambda: bs.quantize(x, layout="128x4-grouped", group_sizes=SIZES),
        "dequantize": lambda: q.dequantize(torch.bfloat16),
        "fake_quantize": lambda: torch.ops.blockscale.fake_quantize(floating, torch.tensor(0.01)),
        "gemm": lambda: bs.gemm(q, w, alpha=alpha, activation="relu"),
        "gemm, gradients": lambda: bs.gemm(floating, w, alpha=2.0, bias=bias, activation="silu"),
        "gemm, raw": lambda: bs.gemm(q.codes, w.codes, q.scales, w.scales, k=K, alpha=alpha),
        "gemm_out": lambda: bs.gemm(x, w, out=out),
        "gemm_backward": lambda: torch.ops.blockscale.gemm_backward(*backward),
        "grouped_gemm": lambda: bs.grouped_gemm(floating, stack, group_sizes=SIZES, bias=bias),
        "grouped_gemm_out": lambda: bs.grouped_gemm(x, stack, group_sizes=SIZES, out=out),
    }


@pytest.mark.parametrize("name", _calls())
def test_opcheck(name):
    call = _calls()[name]
    with Recorder() as recorder:
        call()
    assert recorder.seen == [name.partition(",")[0]]
    operator, arguments = recorder.last
    torch.library.opcheck(operator, arguments, test_utils=SHOULD_PASS)


def test_opcheck_through_the_compilers_middle_end():
    x, w, bias = (
        torch.randn(M, K, requires_grad=True),
        bs.quantize(torch.randn(N, K)),
        torch.randn(N, requires_grad=True),
    )
    with Recorder() as recorder:
        bs.gemm(x, w, bias=bias, activation="gelu")
    operator, arguments = recorder.last
    torch.library.opcheck(operator, arguments, test_utils="test_aot_dispatch_dynamic")


def test_eager_calls_go_past_the_dispatcher_and_add_little():
    """Asking whether a call needs an operator takes a handful of function calls, however the machine is loaded."""
    x, made = torch.randn(M, K), []
    sys.setprofile(lambda frame, event, what: made.append(event) if event in ("call", "c_call") else None)
    try:
        needed = ops.must_trace(x, x, None, None, None) or ops.needs_gradient(x, None)
    finally:
        sys.setprofile(None)
    assert not needed
    assert len(made) <= 12, made


def _poison_the_allocator():
    """Memory that a later allocation of these sizes is likely to find."""
    for size in (N * K, 128 * 8, N * K // 2, 2 * 128 * 40):
        torch.full((size,), POISON, dtype=torch.uint8)


@pytest.mark.parametrize("k", [592, 80])  # 37 and 5 blocks a row, stored as 40 and 8
def test_compiled_equals_eager_where_scale_columns_are_padded(k):
    w = every_code_and_scale(N, k)

    def run(x, w):
        q = bs.quantize(x)
        return bs.gemm(q, w, activation="gelu", out_dtype=torch.float32), bs.gemm(x.bfloat16(), w), q

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (17, 3):
        x = torch.randn(rows, k)
        expected = run(x, w)
        _poison_the_allocator()
        for _ in range(2):
            results = compiled(x, w)
            assert all(same_bits(*pair) for pair in zip(results[:2], expected[:2], strict=True))
            assert same_tensor(results[2], expected[2])


def test_compiled_with_gradients_and_out():
    w, bias = bs.quantize(torch.randn(N, K)), torch.randn(N, requires_grad=True)

    def loss(x, bias):
        return bs.gemm(x, w, alpha=0.5, bias=bias, activation="silu", out_dtype=torch.float32).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for run in (loss, compiled):
        x = torch.linspace(-1, 1, M * K).view(M, K).requires_grad_()
        found.append(torch.autograd.grad(run(x, bias), (x, bias)))
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
    x, out = torch.randn(M, K), torch.empty(M, N, dtype=torch.bfloat16)
    into = torch.compile(lambda x, out: bs.gemm(x, w, out=out), fullgraph=True, backend="aot_eager")
    into(x, out)
    assert same_bits(out, bs.gemm(x, w))


def test_no_rows_and_configurations_go_through_operators():
    w, config = bs.quantize(torch.randn(N, K)), bs.Config(tile=(128, 64), stages=3, raster="n")
    assert calls.decode(calls.encode(config)) == config
    assert calls.decode(calls.encode(None)) is None
    empty = torch.randn(0, K, requires_grad=True)
    y = bs.gemm(empty, w, out_dtype=torch.float32)
    assert y.shape == (0, N)
    y.sum().backward()
    assert empty.grad.shape == (0, K)
    compiled = torch.compile(lambda x: bs.gemm(x, w, config=config), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="config: tile 128x64, stages 3, raster n, expected None: the CPU backend"):
        compiled(torch.randn(M, K))


class Mixed(torch.nn.Module):
    def forward(self, x, w, sizes, stack):
        y = bs.gemm(bs.quantize(x), w, out_dtype=torch.float32)
        return y + bs.grouped_gemm(x, stack, group_sizes=sizes, out_dtype=torch.float32)


def test_exported_with_a_dynamic_number_of_rows():
    w, stack = bs.quantize(torch.randn(N, K)), bs.quantize(torch.randn(3, N, K))
    x = torch.randn(M, K)
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}, "w": [None] * 6, "sizes": None, "stack": [None] * 6}
    program = torch.export.export(Mixed(), (x, w, SIZES, stack), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if "blockscale" in str(node.target)]
    assert targets == ["blockscale.quantize.default", "blockscale.gemm.default", "blockscale.grouped_gemm.default"]
    for sizes in ([2, 0, 3], [100, 28, 30]):
        arguments = (torch.randn(sum(sizes), K), w, torch.tensor(sizes, dtype=torch.int32), stack)
        assert same_bits(program.module()(*arguments), Mixed()(*arguments))


def test_fake_tensors_of_a_device_give_results_of_that_device():
    """No host value is looked at, and nothing lands on the default device, on a device that is not even here."""
    q = bs.quantize(torch.randn(3, 7, K))
    with FakeTensorMode(), torch.device("meta"):
        parts = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (q.codes, q.scales, q.global_scale))
        w, x = bs.NVFP4Tensor(*parts, q.layout, q.shape), torch.empty(3, M, K, device="cuda")
        y = bs.gemm(x, w, alpha=torch.ones((), device="cuda"), bias=torch.ones(7, device="cuda"))
        z = bs.gemm(x, w, alpha=2.0)
        made = (y, z, w.dequantize())
    assert y.shape == (3, M, 7)
    assert [t.device.type for t in made] == ["cuda"] * len(made)


def test_layouts_change_on_the_tensors_own_device():
    q = bs.quantize(torch.randn(130, K))
    there_and_back = torch.compile(lambda t: t.with_layout("linear").with_layout("128x4"), backend="aot_eager")
    with torch.device("meta"):
        for made in (q.with_layout("linear").with_layout("128x4"), there_and_back(q)):
            assert made.scales.device.type == "cpu"
            assert same_tensor(made, q)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_are_those_through_the_dequantised_weight(activation):
    w = bs.quantize(torch.randn(N, K))
    acts = {None: lambda z: z, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    inputs = [torch.randn(2, M, K), torch.tensor(0.7), torch.randn(N)]
    grad = torch.randn(2, M, N)

    def gradients(run):
        x, alpha, bias = (t.clone().requires_grad_() for t in inputs)
        return torch.autograd.grad(run(x, alpha, bias), (x, alpha, bias), grad)

    found = gradients(
        lambda x, alpha, bias: bs.gemm(x, w, alpha=alpha, bias=bias, activation=activation, out_dtype=torch.float32)
    )
    expected = gradients(
        lambda x, alpha, bias: acts[activation](
            alpha.double() * (x.double() @ w.dequantize().double().T) + bias.double()
        ).float()
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["group_sizes", "group_offsets", "masked_m", "list"])
def test_grouped_gradients_are_those_of_a_loop(form):
    stack, sizes = bs.quantize(torch.randn(3, N, K)), SIZES.tolist()
    shape = (3, 4, K) if form == "masked_m" else (M, K)
    x, alpha, bias = torch.randn(shape), torch.randn(3), torch.randn(3, N)
    starts = [sum(sizes[:e]) for e in range(3)]
    rows = [
        (e, slice(0, n)) if form == "masked_m" else slice(s, s + n)
        for e, (s, n) in enumerate(zip(starts, sizes, strict=True))
    ]

    def grouped(x, alpha, bias):
        if form == "list":
            w = [stack[e] for e in range(3)]
            return bs.grouped_gemm(
                [x[r] for r in rows], w, alpha=alpha, bias=bias, activation="gelu", out_dtype=x.dtype
            )
        groups = SIZES.cumsum(0).int() if form == "group_offsets" else SIZES
        y = bs.grouped_gemm(
            x, stack, **{form: groups}, alpha=alpha, bias=bias, activation="gelu", out_dtype=torch.float32
        )
        return [y[r] for r in rows]

    def loop(x, alpha, bias):
        return [
            bs.gemm(x[r], stack[e], alpha=alpha[e], bias=bias[e], activation="gelu", out_dtype=torch.float32)
            for e, r in enumerate(rows)
        ]

    found = []
    for run in (grouped, loop):
        leaves = [t.clone().requires_grad_() for t in (x, alpha, bias)]
        total = sum((y * (e + 1)).square().sum() for e, y in enumerate(run(*leaves)))
        found.append(torch.autograd.grad(total, leaves))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_tracing_refuses_what_eager_refuses():
    w, x = bs.quantize(torch.randn(N, K)), torch.randn(M, K, requires_grad=True)
    with pytest.raises(ValueError, match="a: K = 80, but b has K = 64"):
        bs.gemm(x, bs.quantize(torch.randn(N, 64)))
    with pytest.raises(TypeError, match=r"b: torch.float32 tensor"):
        bs.gemm(x, torch.randn(N, K))
    with pytest.raises(ValueError, match="activation: 'tanh'"):
        bs.gemm(x, w, activation="tanh")
    with pytest.raises(ValueError, match="a_sf, k: given"):
        bs.gemm(bs.quantize(x), w, k=K, bias=torch.ones(N, requires_grad=True))


def test_a_gradient_of_a_gradient_is_refused():
    w, x = bs.quantize(torch.randn(N, K)), torch.randn(M, K, requires_grad=True)
    y = bs.gemm(x, w, activation="silu", out_dtype=torch.float32).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="there are no gradients of gradients"):
        gradient.square().sum().backward()


def test_fake_kernels_refuse_a_bias_that_does_not_fit():
    w = bs.quantize(torch.randn(N, K))
    with FakeTensorMode() as mode:
        parts = (mode.from_tensor(t) for t in (w.codes, w.scales, w.global_scale))
        fake, x, bias = bs.NVFP4Tensor(*parts, w.layout, w.shape), torch.empty(M, K), torch.empty(5)
        with pytest.raises(ValueError, match=r"bias: shape \(5,\), but b has N = 40"):
            bs.gemm(x, fake, bias=bias)
