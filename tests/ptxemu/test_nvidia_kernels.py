"""NVIDIA's sm_100 kernels run unchanged on the emulator, through their own host code, and match float64.

Every kernel of `CASES` has to decode.  Those of `RUNS` run under each schedule of the asynchronous units; sizes are
such that tiles overhang, clusters take several tiles, and a batch has more than one matrix.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("cutlass.operators", reason="nvidia-cutlass-operators is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from cutlass import operators
from cutlass.operators.arguments import ScaledOperand, ScaleMode, ScaleSwizzleMode
from nvidia_kernels import CASES, STUCK, BlockScaled, Case, Dense, MixedInput, Problem, compiled, mistakes

import ptxemu
from ptxemu.host import installed
from ptxemu.isa.generate import generate
from ptxemu.text import parse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]

ONE_CTA = BlockScaled(tile=(128, 64), clusters=2)
TWO_CTAS = BlockScaled(tile=(256, 128), cluster=(2, 1), out="Float16", clusters=2)
RUNS: tuple[tuple[Case, Problem], ...] = (
    (ONE_CTA, Problem(200, 160, 320)),  # 6 tiles for 2 CTAs
    (TWO_CTAS, Problem(300, 160, 576)),  # 4 tiles for 2 pairs of CTAs
    (BlockScaled(tile=(256, 64), cluster=(4, 2), out="Float32"), Problem(300, 96, 288)),  # multicast
    (MixedInput(), Problem(130, 96, 160)),
    (MixedInput("Int4", group=128, tile=(128, 64, 128)), Problem(160, 96, 256)),
    (Dense(tile=(128, 64)), Problem(150, 96, 96, 2)),  # tiles by cluster launch control
)


@pytest.fixture(params=SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
def device(request: pytest.FixtureRequest) -> ptxemu.Device:
    schedule, seed = request.param
    return ptxemu.Device("sm_100a", schedule=schedule, seed=seed)


def run(case: Case, problem: Problem, device: ptxemu.Device, *, tvm_ffi: bool = False) -> ptxemu.Report:
    operands = case.operands(problem, seed=problem.m + problem.n + problem.k)
    with installed(device, operands.memory) as emulator:
        function = compiled(case, "--enable-tvm-ffi" if tvm_ffi else "")
        case.call(function, problem, operands, tvm_ffi=tvm_ffi)
    (report,) = emulator.reports
    assert mistakes(case, operands, problem) is None
    return report


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_decodes(case: Case) -> None:
    with installed(ptxemu.Device("sm_100a"), []) as emulator:
        case.compile()
    (ptx,) = emulator.ptx
    module = parse(ptx)
    assert [generate(module, kernel).name for kernel in module.entries] == list(module.entries)


@pytest.mark.parametrize(("case", "problem"), RUNS, ids=str)
def test_result(case: Case, problem: Problem, device: ptxemu.Device) -> None:
    run(case, problem, device)


FEW = [
    (Dense(tile=(128, 64)), 2),
    (Dense("BFloat16", "Float32", True, (256, 128), (2, 1)), 4),
    (Dense(two_ctas=True, tile=(256, 64), cluster=(2, 1), preferred=(4, 2)), 8),
]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize(("case", "sms"), FEW, ids=str)
def test_tiles_taken_over(case: Dense, sms: int, schedule: str) -> None:
    """With few multiprocessors, clusters that run cancel those that wait and do their tiles."""
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=1, sms=sms)
    report = run(case, Problem(300, 192, 96, 2), device)
    assert report.counters["ctas"] < 18


def test_result_through_tvm_ffi() -> None:
    run(ONE_CTA, Problem(128, 64, 256), ptxemu.Device("sm_100a", schedule="lazy"), tvm_ffi=True)


@pytest.mark.parametrize("case", STUCK, ids=str)
def test_a_deadlock_of_theirs(case: BlockScaled) -> None:
    """The report names the barrier of the accumulator, at which one lane of each of the epilogue's warps arrived."""
    arrivals = 4 * case.cluster[0]
    with pytest.raises(ptxemu.Deadlock, match=f"{32 * arrivals - arrivals} of {32 * arrivals} arrivals pending"):
        run(case, Problem(128, 256, 256), ptxemu.Device("sm_100a"))


@pytest.mark.parametrize("tvm_ffi", [False, True])
def test_the_package_itself(tvm_ffi: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package chooses the kernel, compiles it and runs it, on CPU tensors."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(operators.config.GlobalOptions(), "use_tvm_ffi", tvm_ffi)
    problem = Problem(160, 96, 192)
    operands = BlockScaled().operands(problem, seed=4)
    codes_a, codes_b, scales_a, scales_b, _ = (torch.from_numpy(array) for array in operands.memory)
    a, b = (x.view(torch.float4_e2m1fn_x2).view(-1, problem.k // 2) for x in (codes_a, codes_b))
    scales = [x.view(torch.float8_e4m3fn) for x in (scales_a, scales_b)]
    out = torch.full((problem.m, problem.n), float("nan"), dtype=torch.bfloat16)
    mode, swizzle = ScaleMode.Blockwise1x16, ScaleSwizzleMode.Swizzle32x4x4
    with installed(ptxemu.Device("sm_100a", schedule="random", seed=4)) as emulator:
        arguments = operators.GemmArguments(
            ScaledOperand(a, scales[0], mode, swizzle),
            ScaledOperand(b.t(), scales[1], mode, swizzle),
            out,
            accumulator_type=torch.float32,
        )
        operators.get_operators(arguments, target_sm="100a")[0].run(arguments, stream=0)
    assert len(emulator.reports) == 1
    operands.memory[-1] = out.view(torch.uint8).numpy()
    assert mistakes(BlockScaled(), operands, problem) is None


@pytest.mark.prove
@pytest.mark.parametrize("size", [(256, 256, 256), (136, 104, 224), (520, 320, 1056)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case not in STUCK], ids=str)
def test_sweep(case: Case, size: tuple[int, int, int], device: ptxemu.Device) -> None:
    m, n, k = size
    rows = 32 if isinstance(case, MixedInput) and case.group else 1  # its scales are stored along the rows
    run(case, Problem(-(-m // rows) * rows, -(-n // 32) * 32, -(-k // case.k_step) * case.k_step, 2), device)
