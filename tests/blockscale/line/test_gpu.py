"""The launcher on silicon: the whole line from `gemm` on, with a naive kernel for Hopper from a store (naive_store.py).

Streams, graphs, threads, devices, errors, no waiting and no allocation; and what a call costs.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import naive_store
import pytest
import torch
from naive_store import CONFIG, HOPPER
from operands import every_code_and_scale, same_bits, small_integers

import blockscale as bs
from blockscale import backends, plan, reference, store
from blockscale.backends import gpu
from blockscale.launch import cuda
from blockscale.problem import Problem

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


def use_naive_kernel(replace):
    """A backend "naive" for Hopper, whose kernel is in the store; `replace(owner, name, value)` puts it in."""
    naive = SimpleNamespace(prepare=partial(gpu.prepare, target=HOPPER), why_not=lambda: None)
    replace(backends, "_BUILT", {**backends._BUILT, "naive": naive})
    replace(backends, "NAMES", (*backends.NAMES, "naive"))


@pytest.fixture(autouse=True)
def _naive_kernel(monkeypatch):
    if torch.cuda.get_device_capability() != HOPPER.capability:
        pytest.skip("the naive kernel is compiled for Hopper")
    if store.default_store().get(naive_store.key("bf16")) is None:
        pytest.skip("BLOCKSCALE_CACHE has no naive kernel; see naive_store.py")
    use_naive_kernel(monkeypatch.setattr)


def pair(m=37, n=25, k=160, device="cuda"):
    a, b = every_code_and_scale(m, k), every_code_and_scale(n, k, seed=1)
    return a.to(device), b.to(device)


def gemm(a, b, **options):
    return bs.gemm(a, b, config=CONFIG, backend="naive", **options)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [None, 1e-3, "tensor"])
def test_the_contract(out_dtype, alpha):
    a, b = pair()
    value = torch.tensor(1e-3, device="cuda") if alpha == "tensor" else alpha
    y = gemm(a, b, alpha=1e-3 if alpha is None else value, out_dtype=out_dtype)
    exact = reference.gemm(a, b, alpha=1e-3)
    limit = reference.tolerance(a, b, exact, alpha=1e-3, out_dtype=out_dtype, c=reference.tensor_core_tolerance(160))
    reference.check(y, exact, limit)
    assert y.device == a.device


def test_batches_and_strides():
    (a, x), (b, y) = small_integers(6, 64), small_integers(10, 64, seed=1)
    a, b = a.to("cuda"), b.to("cuda")
    wide = torch.full((6, 16), float("nan"), device="cuda")
    gemm(a, b, out=wide[:, 3:13], out_dtype=torch.float32)
    assert torch.equal(wide[:, 3:13].cpu().long(), x @ y.T)
    assert wide.isnan().sum() == 36
    three = bs.quantize(torch.randn(3, 6, 64)).to("cuda")
    together = gemm(three, b, out_dtype=torch.float32)
    for i in range(3):
        one = bs.NVFP4Tensor.from_parts(three.codes[i], three.scales[i], three.global_scale)
        assert same_bits(together[i], gemm(one, b, out_dtype=torch.float32))


def test_the_current_stream_is_used():
    """Operands change late on a side stream; a launch anywhere else would see the old ones."""
    (a, b), other = pair(), every_code_and_scale(37, 160, seed=5).to("cuda")
    expected = gemm(other, b)
    out = torch.empty_like(expected)
    gemm(a, b, out=out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for name in ("codes", "scales", "global_scale"):
            getattr(a, name).copy_(getattr(other, name))
        gemm(a, b, out=out)
    side.synchronize()
    assert same_bits(out.cpu(), expected.cpu())


def test_a_graph_replays_on_new_data():
    (a, b), other = pair(), every_code_and_scale(37, 160, seed=5).to("cuda")
    alpha = torch.tensor(0.5, device="cuda")
    out = torch.empty(37, 25, dtype=torch.float32, device="cuda")
    eager = partial(gemm, b=b, alpha=alpha, out_dtype=torch.float32)
    eager(a, out=out)  # loads the kernel, which cannot be done while capturing
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager(a, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert same_bits(out.cpu(), first.cpu())
    a.codes.copy_(other.codes)
    a.scales.view(torch.uint8).copy_(other.scales.view(torch.uint8))
    alpha.fill_(2.0)
    graph.replay()
    assert same_bits(out.cpu(), eager(a).cpu())
    assert not same_bits(out.cpu(), first.cpu())


def test_threads_on_streams_of_their_own():
    pairs = [pair(m=64, n=64), (every_code_and_scale(64, 160, seed=7).to("cuda"), pair(m=64, n=64)[1])]
    expected = [gemm(a, b).cpu() for a, b in pairs]
    wrong = []

    def work(i):
        stream = torch.cuda.Stream()
        a, b = pairs[i]
        with torch.cuda.stream(stream):
            for _ in range(100):
                out = gemm(a, b)
                stream.synchronize()
                if not same_bits(out.cpu(), expected[i]):
                    wrong.append(i)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def without_waiting():
    """A context manager: inside, an operation that waits for the GPU raises."""

    @contextlib.contextmanager
    def forbidden():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    yield forbidden
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_warm_call_waits_for_nothing_and_allocates_nothing(without_waiting):
    a, b = pair()
    out = torch.empty(37, 25, dtype=torch.bfloat16, device="cuda")
    alpha = torch.ones((), device="cuda")
    gemm(a, b, out=out, alpha=alpha)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with without_waiting():
        for _ in range(10):
            gemm(a, b, out=out, alpha=alpha)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("where", ["a", "b", "out", "alpha"])
def test_operands_of_two_devices(where):
    given = dict(zip("ab", pair(), strict=True))
    given |= {"out": torch.empty(37, 25, dtype=torch.bfloat16, device="cuda"), "alpha": torch.ones((), device="cuda")}
    gemm(given["a"], given["b"], out=given["out"], alpha=given["alpha"])
    given[where] = given[where].to("cpu")
    with pytest.raises(ValueError, match=r"on cpu|on cuda:0"):
        gemm(given["a"], given["b"], out=given["out"], alpha=given["alpha"])
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_operands_that_are_not_aligned():
    a, b = pair()
    storage = torch.zeros(a.codes.numel() + 64, dtype=torch.uint8, device="cuda")
    moved = storage[4 : 4 + a.codes.numel()].view(a.codes.shape).copy_(a.codes)
    gemm(a, b)
    with pytest.raises(ValueError, match=r"a\.codes: at address 0x.*, expected a multiple of 16 bytes"):
        gemm(replace(a, codes=moved), b)


def test_a_launch_that_cuda_refuses_is_named_and_leaves_no_trace():
    launcher = cuda.launcher(HOPPER, torch.device("cuda:0"))
    function = launcher.load(store.default_store().get(naive_store.key("bf16")))
    one = launcher.one.data_ptr()
    too_many = (1.0, 1, 1, 64, 1, 70_000, 1, 1, 1)  # matrices: more than a grid has in y
    with pytest.raises(RuntimeError, match="cudaError"):
        launcher.launch(function, [one] * 8, [4] * 8, too_many)
    torch.cuda.synchronize()
    a, b = pair()
    assert gemm(a, b).isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_launch_on_another_gpu_than_the_current():
    a, b = pair(device="cuda:1")
    out = torch.empty(37, 25, dtype=torch.bfloat16, device="cuda:1")
    for _ in range(2):
        gemm(a, b, out=out)
    assert torch.cuda.current_device() == 0
    assert same_bits(out.cpu(), gemm(*pair()).cpu())
    with pytest.raises(ValueError, match="on cuda:1"):
        gemm(a, pair()[1])


def test_persisting_l2_sets_the_limit_and_puts_it_back():
    import ctypes

    cudart = cuda.open_cuda()

    def limit():
        value = ctypes.c_size_t()
        assert cudart.cudaDeviceGetLimit(ctypes.byref(value), 6) == 0
        return value.value

    torch.ones(1, device="cuda")
    before = limit()
    with bs.persisting_l2(4):
        assert limit() >= 4 << 20
        assert gemm(*pair()).isfinite().all()
    assert limit() == before


IN_A_NEW_PROCESS = """
import sys, time
sys.modules["cutlass"] = None
sys.path[:0] = sys.argv[1:]
import torch
import test_gpu
test_gpu.use_naive_kernel(setattr)
a, b = test_gpu.pair()
torch.cuda.synchronize()
start = time.perf_counter()
test_gpu.gemm(a, b)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_a_new_process_has_the_kernel_within_a_second():
    """The first product there, from the call to the end: no compiler, one look into the store."""
    paths = [str(ROOT / "tests/blockscale/line"), str(ROOT / "tests/blockscale")]
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [inherited])])}
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, *paths]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    note("seconds_of_the_first_product_in_a_new_process", round(float(run.stdout), 3))
    assert float(run.stdout) < 1


def test_what_a_call_costs():
    """From Python to the launch, while the GPU keeps up: batches of calls that fit into the queue of launches."""
    a, b = pair(m=1, n=8, k=64)
    out = torch.empty(1, 8, dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            gemm(a, b, out=out)
        times.append((time.perf_counter() - start) / 100 * 1e6)
    note("us_of_a_warm_call", round(statistics.median(times), 2))
    made = plan.plan(Problem(1, 8, 64), cuda.launcher(HOPPER, out.device), CONFIG, 8)
    pointers, factor, _ = gpu.Call(made, "bf16", out.shape).arguments(a, b, out, None, None)
    launches = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            made.run(pointers, factor)
        launches.append((time.perf_counter() - start) / 100 * 1e6)
    note("us_of_the_launch_alone", round(statistics.median(launches), 2))
    assert statistics.median(times) < 10 + statistics.median(launches)


def note(name, value):
    """Prints a measurement, and adds it to the file that BLOCKSCALE_RECORD names."""
    print(f"{name}: {value}")
    if path := os.environ.get("BLOCKSCALE_RECORD"):
        file = Path(path)
        record = json.loads(file.read_text()) if file.exists() else {}
        record |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, name: value}
        file.write_text(json.dumps(record, indent=1) + "\n")
