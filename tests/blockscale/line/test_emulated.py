"""`gemm` on the software GPU: the contract, and everything that is refused before a launch."""

import contextlib
import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
from operands import POISON, every_code_and_scale, quantize_on_cpu, same_bits, small_integers

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import blockscale as bs
import ptxemu
from blockscale import reference
from blockscale.backends import gpu
from blockscale.families import supports
from blockscale.launch import emulated
from blockscale.problem import Problem, target_named


def allowed(k):
    return reference.tensor_core_tolerance(k)


def check(a, b, y, alpha=None):
    exact = reference.gemm(a, b, alpha=alpha)
    limit = reference.tolerance(a, b, exact, alpha=alpha, out_dtype=y.dtype, c=allowed(a.shape[-1]))
    reference.check(y, exact, limit)


@pytest.fixture
def emulator():
    with bs.emulated("sm_100a") as active:
        yield active
        assert active.findings == []


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_contract(emulator, out_dtype):
    a, b = every_code_and_scale(130, 200), every_code_and_scale(70, 200, seed=1)
    check(a, b, bs.gemm(a, b, alpha=1e-3, out_dtype=out_dtype), alpha=1e-3)
    assert emulator.report.counters["warps"] > 0


def test_the_kernel_runs_inside_the_block_alone():
    a, b = every_code_and_scale(3, 64), every_code_and_scale(5, 64)
    assert bs.available_backends()["sm100"]
    with bs.emulated("sm_100a") as outer:
        assert bs.available_backends()["sm100"] is None
        inside = bs.gemm(a, b)
        with bs.emulated("b200", schedule="random", seed=3) as inner:
            assert same_bits(bs.gemm(a, b), inside)
        assert same_bits(bs.gemm(a, b, backend="sm100"), inside)
        on_cpu = bs.gemm(a, b, backend="cpu")
        assert (len(outer.reports), len(inner.reports)) == (2, 1)
    assert same_bits(bs.gemm(a, b), on_cpu)
    assert len(outer.reports) == 2
    with pytest.raises(ValueError, match="backend: 'sm100' cannot run here"):
        bs.gemm(a, b, backend="sm100")


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_integers_are_exact(emulator, layout):
    (a, x), (b, y) = small_integers(37, 160, layout=layout), small_integers(25, 160, seed=1, layout=layout)
    assert torch.equal(bs.gemm(a, b, out_dtype=torch.float32).long(), x @ y.T)


@pytest.mark.parametrize("batches", [((2,), (2,)), ((3,), ()), ((), (2,)), ((2, 1), (1, 2)), ((1,), (2, 2))], ids=str)
def test_batches_broadcast(emulator, batches):
    of_a, of_b = batches
    a, b = quantize_on_cpu(torch.randn(*of_a, 5, 80)), quantize_on_cpu(torch.randn(*of_b, 9, 80))
    y = bs.gemm(a, b, out_dtype=torch.float32)
    assert y.shape == (*torch.broadcast_shapes(of_a, of_b), 5, 9)
    check(a, b, y)


def test_results_of_any_strides(emulator):
    a, b = every_code_and_scale(6, 64), every_code_and_scale(10, 64, seed=1)
    dense = bs.gemm(a, b)
    wide = torch.full((6, 16), math.nan, dtype=torch.bfloat16)
    assert same_bits(bs.gemm(a, b, out=wide[:, 3:13]), dense)
    assert wide.isnan().sum() == 6 * 6
    assert same_bits(bs.gemm(a, b, out=torch.empty(10, 6, dtype=torch.bfloat16).T), dense)
    every_other = torch.full((6, 20), math.nan, dtype=torch.bfloat16)
    assert same_bits(bs.gemm(a, b, out=every_other[:, ::2]), dense)
    assert every_other[:, 1::2].isnan().all()


def test_alpha_is_applied_before_the_cast(emulator):
    """Sums of 3e10 with alpha 1e-6: finite and right in fp16."""
    k = 4096
    full = torch.full((2, k // 2), 0x77, dtype=torch.uint8)
    scales = torch.full((2, k // 16), 448.0).to(torch.float8_e4m3fn)
    a = bs.NVFP4Tensor.from_parts(full, scales, layout="linear")
    for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
        for alpha in (1e-6, torch.tensor(1e-6)):
            y = bs.gemm(a, a, alpha=alpha, out_dtype=out_dtype)
            assert y.isfinite().all()
            check(a, a, y, alpha=alpha)


@pytest.mark.parametrize("units", [(1e-20, 1e-20, 1e25), (3e-30, 1e20, 7.0), (1e-23, 1e-20, 1.0)])
def test_global_scales_far_from_one(emulator, units):
    """Their product may leave the normal numbers where the result does not."""
    unit_a, unit_b, alpha = units
    a, b = quantize_on_cpu(torch.randn(4, 128)), quantize_on_cpu(torch.randn(4, 128))
    a = bs.NVFP4Tensor.from_parts(a.codes, a.scales, unit_a)
    b = bs.NVFP4Tensor.from_parts(b.codes, b.scales, unit_b)
    check(a, b, bs.gemm(a, b, alpha=alpha, out_dtype=torch.float32), alpha=alpha)


@pytest.mark.parametrize("byte", [POISON, 0x7E])
@pytest.mark.parametrize("m", [1, 5, 127, 129])
def test_padding_of_scales_is_not_seen(emulator, m, byte):
    a, b = every_code_and_scale(m, 192), every_code_and_scale(40, 192, seed=1)
    clean = bs.gemm(a, b, out_dtype=torch.float32, alpha=1e-4)
    padded = a.scales.view(torch.uint8).clone()
    mine = torch.zeros(padded.numel(), dtype=torch.bool)
    mine[torch.from_numpy(reference.scale_index(a)).flatten()] = True
    padded.view(-1)[~mine] = byte
    raw = bs.gemm(
        a.codes, b.codes, padded.view(torch.float8_e4m3fn), b.scales, k=192, alpha=1e-4, out_dtype=torch.float32
    )
    raw = raw * (a.global_scale * b.global_scale)
    torch.testing.assert_close(raw, clean, rtol=1e-6, atol=0)
    dirty = bs.NVFP4Tensor.from_parts(a.codes, padded.view(torch.float8_e4m3fn), a.global_scale, check_values=False)
    assert same_bits(bs.gemm(dirty, b, out_dtype=torch.float32, alpha=1e-4), clean)


@pytest.mark.parametrize("m", [1, 5, 32, 127, 128, 129])
def test_nothing_beyond_the_result_is_written(emulator, m):
    """The emulator faults on a byte outside of the result; inside a larger buffer the canaries stay."""
    a, b = quantize_on_cpu(torch.randn(m, 64)), quantize_on_cpu(torch.randn(24, 64))
    buffer = torch.full((m + 300, 24), math.nan, dtype=torch.bfloat16)
    y = bs.gemm(a, b, out=buffer[:m])
    check(a, b, y)
    assert buffer[m:].isnan().all()


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_empty_results_launch_nothing(emulator, m, n):
    a, b = quantize_on_cpu(torch.randn(m, 64)), quantize_on_cpu(torch.randn(n, 64))
    assert bs.gemm(a, b).shape == (m, n)
    assert emulator.reports == []
    with pytest.raises(ValueError, match="out: shape"):
        bs.gemm(a, b, out=torch.empty(m + 1, n, dtype=torch.bfloat16))


A, B = bs.quantize(torch.randn(4, 64)), bs.quantize(torch.randn(6, 64))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": torch.randn(4, 64)}, ValueError, "a: fp32: the sm100 kernels multiply NVFP4 by NVFP4"),
        ({"bias": torch.ones(7)}, ValueError, r"bias: shape \(7,\) on cpu, expected \(6,\)"),
        ({"activation": "tanh"}, ValueError, "activation: 'tanh'"),
        ({"config": bs.Config(stages=99)}, ValueError, r"config\.stages: 99"),
        ({"config": bs.Config(tile=(128, 12))}, ValueError, r"config\.tile: .*12"),
        ({"config": "fast"}, TypeError, "config: str, expected None or a Config"),
        ({"alpha": math.inf}, ValueError, "alpha: inf, expected a finite number"),
        ({"alpha": True}, TypeError, "alpha: bool"),
        ({"activation": []}, ValueError, r"activation: \[\], expected one of"),
        ({"backend": []}, ValueError, r"backend: \[\], expected None or one of"),
        ({"invariant": []}, TypeError, "invariant: list, expected a bool"),
        ({"out_dtype": []}, TypeError, r"out_dtype: \[\], expected one of"),
        ({"sf_layout": []}, ValueError, r"sf_layout: \[\], expected 'linear' or"),
        ({"backend": "sm120"}, ValueError, "backend: 'sm120' cannot run here"),
        ({"out": torch.empty(4, 6, device="meta")}, TypeError, "out: torch.float32 tensor"),
        (
            {"out": torch.empty(4, 6, device="meta", dtype=torch.bfloat16)},
            ValueError,
            "out: .* on meta, expected .* on cpu",
        ),
    ],
)
def test_refused_before_any_launch(emulator, change, error, message):
    arguments = {"a": A, "b": B} | change
    with pytest.raises(error, match=message):
        bs.gemm(arguments.pop("a"), arguments.pop("b"), **arguments)
    assert emulator.reports == []


@pytest.mark.parametrize("warm", [False, True])
def test_a_result_that_overlaps_an_operand(emulator, warm):
    if warm:
        for out_dtype in (torch.bfloat16, torch.float32):
            bs.gemm(A, B, out=torch.empty(4, 6, dtype=out_dtype), out_dtype=out_dtype)
    launches = len(emulator.reports)
    for part, name in ((A.codes, "a"), (B.codes, "b"), (B.scales.view(torch.uint8), "b")):
        out = part.flatten()[8 : 8 + 48].view(torch.bfloat16).view(4, 6)
        with pytest.raises(ValueError, match=f"out: overlaps {name}"):
            bs.gemm(A, B, out=out)
    storage = torch.zeros(24)
    with pytest.raises(ValueError, match="out: overlaps alpha"):
        bs.gemm(A, B, out=storage.view(4, 6), alpha=storage[5], out_dtype=torch.float32)
    assert len(emulator.reports) == launches


def _moved(x, by):
    """A copy that begins `by` bytes after a multiple of 16."""
    storage = torch.zeros(x.numel() + 64, dtype=torch.uint8)
    start = -storage.data_ptr() % 16 + by
    return storage[start : start + x.numel()].view(x.shape).copy_(x.view(torch.uint8)).view(x.dtype)


def test_operands_that_are_not_aligned(emulator):
    """Copied on the CPU, as weights of a mapped file need; on a GPU they are refused."""
    expected = bs.gemm(A, B)
    codes, scales = _moved(A.codes, 4), _moved(A.scales, 8)
    for part in ({"codes": codes}, {"scales": scales}, {"codes": codes, "scales": scales}):
        mapped = replace(A, **part)
        assert same_bits(bs.gemm(mapped, B), expected)
        assert same_bits(bs.gemm(B, mapped), bs.gemm(B, A))
    assert bs.gemm(codes, B.codes, A.scales, B.scales).isfinite().all()  # the raw form copies too


def test_a_result_that_is_not_aligned(emulator):
    storage = torch.zeros(2 * 24 + 1, dtype=torch.uint8)
    odd = torch.from_numpy(storage.numpy()[1:].view("int16")).view(torch.bfloat16).view(4, 6)
    with pytest.raises(ValueError, match=r"out: at address 0x.*, expected a multiple of 2 bytes"):
        bs.gemm(A, B, out=odd)
    whole = bs.NVFP4Tensor.zeros((4, 6), global_scale=1.0)
    for part, by in itertools.product(("codes", "scales"), (1, 8)):
        out = replace(whole, **{part: _moved(getattr(whole, part), by)})
        with pytest.raises(ValueError, match=rf"out\.{part}: at address 0x.*, expected a multiple of 16 bytes"):
            bs.gemm(A, B, out=out)
    assert emulator.reports == []


def test_operands_with_gaps(emulator):
    """Put together by hand, past `from_parts`."""
    gaps = replace(A, codes=A.codes.repeat(1, 2)[:, : A.codes.shape[1]])
    bs.gemm(A, B)
    launches = len(emulator.reports)
    for a, b, name in ((gaps, B, "a"), (B, gaps, "b")):
        with pytest.raises(ValueError, match=rf"{name}\.codes: strides \(64, 1\), expected a contiguous tensor"):
            bs.gemm(a, b)
    assert len(emulator.reports) == launches


def test_the_second_call_is_one_look_up(emulator, monkeypatch):
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    first = bs.gemm(A, B, out=out).clone()
    again = bs.gemm(A, B)

    def fail(*arguments, **options):
        raise AssertionError("validated again")

    monkeypatch.setattr(gpu, "prepare", fail)
    monkeypatch.setattr("blockscale.api.arguments.operand", fail)
    assert same_bits(bs.gemm(A, B, out=out), first)
    bs.gemm(A, B, out=torch.empty(4, 6, dtype=torch.bfloat16), alpha=None)
    with pytest.raises(AssertionError, match="validated again"):
        bs.gemm(A, B, out=torch.empty(4, 6), out_dtype=torch.float32)
    assert same_bits(again, first)


def test_a_warm_call_is_as_strict_as_a_cold_one(emulator):
    alpha = torch.tensor(0.5)
    bs.gemm(A, B, alpha=alpha)
    bs.gemm(A, B, alpha=2)
    bs.gemm(A, B, invariant=True)
    launches = len(emulator.reports)
    alpha.fill_(math.nan)
    for options, error, message in (
        ({"alpha": alpha}, ValueError, "alpha: nan"),
        ({"alpha": 10**400}, ValueError, "alpha: inf"),
        ({"alpha": torch.tensor(0.5).to_sparse()}, (TypeError, ValueError), "alpha: "),
        ({"invariant": 1}, TypeError, "invariant: int"),
        ({"invariant": 1.0}, TypeError, "invariant: float"),
        ({"out": torch.zeros(4, 6, dtype=torch.bfloat16).to_sparse()}, (TypeError, ValueError), "out: "),
    ):
        with pytest.raises(error, match=message):
            bs.gemm(A, B, **options)
    assert len(emulator.reports) == launches


@pytest.mark.parametrize("m", [0, 4])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": bs.Config((1, 1))}, r"config\.tile: 1 rows"),
        ({"bias": torch.ones(1)}, r"bias: shape \(1,\)"),
        ({"activation": "tanh"}, "activation: 'tanh'"),
    ],
)
def test_an_empty_result_is_validated(emulator, m, options, message):
    empty = quantize_on_cpu(torch.randn(m, 64)), quantize_on_cpu(torch.randn(0, 64))
    with pytest.raises(ValueError, match=message):
        bs.gemm(*empty, **options)


def test_threads_with_emulators_of_their_own():
    """Kernels that are not loaded yet, loaded and run by several threads at once; a thread inside has none."""
    a, b = every_code_and_scale(20, 64), every_code_and_scale(24, 64, seed=1)
    expected = bs.gemm(a, b, out_dtype=torch.float32)
    results, errors = [], []

    def work(columns, emulate):
        try:
            with bs.emulated("b200") if emulate else contextlib.nullcontext():
                config = bs.Config((128, columns), raster="n") if emulate else None
                results.append(bs.gemm(a, b, out_dtype=torch.float32, config=config))
        except BaseException as error:
            errors.append(error)

    with bs.emulated("b200") as outer:
        threads = [threading.Thread(target=work, args=(n, n != 8)) for n in (24, 32, 40, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outer.reports == []
    assert errors == []
    assert len(results) == 4
    for y in results:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-2 * expected.abs().max().item())


@pytest.mark.parametrize("change", ["shape", "dtype", "strides", "layout", "alpha", "config", "backend", "inference"])
def test_a_call_of_other_properties_is_validated(emulator, change):
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    bs.gemm(A, B, out=out, alpha=1.0)
    known = len(emulator.known)
    if change == "shape":
        with pytest.raises(ValueError, match="out: shape"):
            bs.gemm(A, B, out=torch.empty(4, 7, dtype=torch.bfloat16), alpha=1.0)
    elif change == "dtype":
        with pytest.raises(TypeError, match="out: "):
            bs.gemm(A, B, out=torch.empty(4, 6), alpha=1.0)
    elif change == "strides":
        with pytest.raises(ValueError, match="share memory"):
            bs.gemm(A, B, out=torch.empty(1, 6, dtype=torch.bfloat16).expand(4, 6), alpha=1.0)
    elif change == "layout":
        assert same_bits(bs.gemm(A.with_layout("linear"), B, alpha=1.0), out)
    elif change == "alpha":
        with pytest.raises(TypeError, match="alpha: str"):
            bs.gemm(A, B, out=out, alpha="1")
    elif change == "config":
        with pytest.raises(ValueError, match=r"config\.tile"):
            bs.gemm(A, B, out=out, alpha=1.0, config=bs.Config(tile=(64, 128)))
    elif change == "backend":
        with pytest.raises(ValueError, match="backend"):
            bs.gemm(A, B, out=out, alpha=1.0, backend="sm120")
    else:
        with torch.inference_mode():
            made_there = torch.empty(4, 6, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="made in inference mode"):
            bs.gemm(A, B, out=made_there, alpha=1.0)
    assert len(emulator.known) == known


@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 192, 256])
def test_what_is_said_to_be_available_runs(emulator, k):
    a, b = every_code_and_scale(4, k), every_code_and_scale(6, k, seed=1)
    assert bs.available_backends()["sm100"] is None
    assert supports(Problem(4, 6, k), target_named("b200"), bs.config_for(4, 6, k)) is None
    check(a, b, bs.gemm(a, b))


def test_grouped_products_are_a_loop_of_the_kernel(emulator):
    a, b = quantize_on_cpu(torch.randn(9, 64)), quantize_on_cpu(torch.randn(3, 5, 64))
    sizes = torch.tensor([4, 0, 5], dtype=torch.int32)
    y = bs.grouped_gemm(a, b, group_sizes=sizes)
    assert same_bits(y[:4], bs.gemm(a[:4], b[0]))
    assert same_bits(y[4:], bs.gemm(a[4:], b[2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "never"}, "schedule"),
        ({"checks": "some"}, "checks"),
        ({"sms": 0}, "sms"),
        ({"on_finding": 1}, "on"),
    ],
)
def test_options_of_the_emulator(options, message):
    with pytest.raises(ValueError, match=message), bs.emulated("sm_100a", **options):
        pass


def test_nothing_is_written_unless_every_product_of_a_list_can_be(emulator):
    out = [torch.full((4, 6), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    odd = torch.zeros(2 * 24 + 1, dtype=torch.uint8).numpy()[1:].view("int16")
    bad = torch.from_numpy(odd).view(torch.bfloat16).view(4, 6)
    with pytest.raises(ValueError, match="out: at address"):
        bs.grouped_gemm([A, A], [B, B], out=[out[0], bad])
    wide = quantize_on_cpu(torch.randn(16, 64))
    with pytest.raises(ValueError, match=r"config\.tile: .* have to cover all n = 16"):
        bs.grouped_gemm([A, A], [B, wide], out=[out[0], out[1].new_empty(4, 16)], config=bs.Config((128, 8)))
    assert out[0].isnan().all()
    assert emulator.reports == []


def test_a_number_of_multiprocessors_is_no_bool():
    with pytest.raises(TypeError, match="sms: bool"), bs.emulated("sm_100a", sms=True):
        pass


def test_a_report_before_any_launch():
    with bs.emulated("sm_100a") as active, pytest.raises(RuntimeError, match="nothing has been launched"):
        _ = active.report


def test_a_launch_that_fails_leaves_its_report(emulator):
    """Whatever ends it on its way, here a result that has less memory than the kernel writes."""
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    bs.gemm(A, B, out=out)
    (call,) = emulator.known.values()
    pointers, factor, _held = call.arguments(A, B, out, None)
    sizes = [*call.plan.sizes[:4], 2, *call.plan.sizes[5:]]
    with pytest.raises(ptxemu.MemoryFault) as caught:
        emulator.launch(call.plan.function, pointers, sizes, (factor, *call.plan.values))
    first, failed = emulator.reports
    assert failed is caught.value.report is emulator.report is not first
    assert 0 < failed.counters["warp_instructions"] < first.counters["warp_instructions"]


def test_an_emulator_is_entered_once():
    once = bs.emulated("sm_100a")
    with once, pytest.raises(RuntimeError, match="emulated: this one was entered before"):
        once.__enter__()
    with pytest.raises(RuntimeError, match="call `emulated` again"), once:
        pass
    assert emulated.active() is None
