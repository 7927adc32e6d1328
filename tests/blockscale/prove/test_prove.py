"""The sm_100a kernel on the software GPU: every pair of values, every shape, every schedule; a sample of it in CI."""

import time

import pytest
import record
import sweep
import torch
from operands import every_code_and_scale
from sweep import DATA, GPU_MODE, SCHEDULES, SHAPES, Shape

import blockscale as bs
from blockscale import reference
from blockscale.config import Config, supports
from blockscale.problem import Problem

needs_compiler = pytest.mark.usefixtures("_compiler")


@pytest.fixture
def _compiler():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def refused(row, shape):
    """Why the row's configuration does not do this shape, or None."""
    batch = max(shape.batch_a, shape.batch_b, 1)
    problem = Problem(
        shape.m, shape.n, shape.k, batch, max(shape.batch_a, 1), max(shape.batch_b, 1), out_dtype=row.out_dtype
    )
    return supports(problem, sweep.B200, row.config)


def run(row, shapes, schedule, number):
    """A row on shapes under one schedule; data and gaps between rows turn with the case. Returns the record's entry."""
    start, products, skipped = time.perf_counter(), 0, 0
    kind, seed = schedule
    with bs.emulated("sm_100a", schedule=kind, seed=seed, on_finding="raise") as gpu:
        for i, shape in enumerate(shapes):
            if refused(row, shape):
                skipped += 1
                continue
            turn = number + i
            try:
                sweep.multiply(row, shape, DATA[turn % 3], (0, 8, 3)[turn // 3 % 3])
            except Exception as error:
                raise AssertionError(f"{row}; {shape}, {DATA[turn % 3]}, {kind} {seed}: {error}") from error
            products += 1
        instructions = sum(report.counters["warp_instructions"] for report in gpu.reports)
        assert gpu.findings == []
    seconds = round(time.perf_counter() - start, 1)
    return {
        "products": products,
        "refused": skipped,
        "instructions": instructions,
        "findings": len(gpu.findings),
        "seconds": seconds,
    }


def resumed(case, work):
    if case in record.load():
        pytest.skip("in the record")
    record.add(case, work())


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
@pytest.mark.parametrize("number", range(len(sweep.rows())))
def test_pairwise(number, schedule):
    row = sweep.rows()[number]
    turn = number + SCHEDULES.index(schedule)
    resumed(f"{number:03d} {row}; {schedule[0]} {schedule[1]}", lambda: run(row, SHAPES, schedule, turn))


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
@pytest.mark.parametrize("shape", GPU_MODE, ids=str)
def test_gpu_mode(shape, schedule):
    """By the heuristics' choice, fp16 results, as the competition has them. The largest under one schedule."""
    if shape.m * shape.n * shape.k > 10**10 and schedule[0] != "lazy":
        pytest.skip("too large for more than one schedule")
    row = sweep.Row(bs.config_for(shape.m, shape.n, shape.k, gpu="b200"), "fp16", "float")
    turn = SCHEDULES.index(schedule)
    resumed(f"GPU MODE {shape}: {row}; {schedule[0]} {schedule[1]}", lambda: run(row, [shape], schedule, turn))


@needs_compiler
@pytest.mark.parametrize("number", range(0, len(sweep.rows()), 9))
def test_a_sample(number):
    """Every ninth row, on every eighth shape, under a schedule in turn."""
    shapes = SHAPES[number % 8 :: 8]
    entry = run(sweep.rows()[number], shapes, SCHEDULES[number // 9 % len(SCHEDULES)], number)
    assert entry["products"] + entry["refused"] == len(shapes)


def test_no_pair_of_values_is_left_out():
    covered = set().union(*(sweep.pairs(row) for row in sweep.rows()))
    assert sorted(sweep.possible_pairs() - covered, key=repr) == []
    assert all(row.builds() for row in sweep.rows())
    values = {name: {row.values()[name] for row in sweep.rows()} for name in sweep.VALUES}
    assert values == {name: set(given) for name, given in sweep.VALUES.items()}


def test_every_field_of_a_configuration_is_swept():
    assert set(sweep.VALUES) >= sweep.CONFIG
    assert len(set(SHAPES)) >= 40
    assert {1, 15, 16, 48, 64, 100, 256} <= {shape.k for shape in SHAPES}
    assert all(supports(Problem(s.m, s.n, s.k), sweep.B200, Config((128, 64))) is None for s in SHAPES + GPU_MODE)


def test_operands_hold_every_code_and_every_finite_scale():
    codes, scales = set(), set()
    for shape in SHAPES:
        a, b, *_ = sweep.operands(shape, DATA[0])
        for t in (a, b):
            codes |= set((t.codes & 15).flatten().tolist()) | set((t.codes >> 4).flatten().tolist())
            scales |= set(t.with_layout("linear").scales.view(torch.uint8).flatten().tolist())
    assert codes == set(range(16))
    assert scales == set(range(0x7F))


# A judge that overlooked these would prove nothing.

MUTATIONS = {
    "two scales swapped": lambda codes, scales: (codes, scales[:, [1, 0, *range(2, scales.shape[1])]]),
    "scales of two rows swapped": lambda codes, scales: (codes, scales[[1, 0, *range(2, len(scales))]]),
    "nibbles swapped": lambda codes, scales: (codes >> 4 | codes << 4, scales),
    "a slice of k skipped": lambda codes, scales: (torch.cat([codes[:, :-8], 0 * codes[:, -8:]], 1), scales),
    "a row taken twice": lambda codes, scales: (codes[[0, 0, *range(2, len(codes))]], scales),
    "one code": lambda codes, scales: (codes ^ torch.eye(*codes.shape).byte(), scales),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("m", [64, 129])
def test_the_judge_sees_a_mutation(m, mutation, data):
    shape = Shape(m, 40, 192)
    a, b, product, magnitude = sweep.operands(shape, data)
    sweep.judge(bs.gemm(a, b, out_dtype=torch.float32), product, magnitude, None, 192, exact=data == DATA[2])
    codes, scales = MUTATIONS[mutation](a.codes, a.with_layout("linear").scales.view(torch.uint8))
    wrong = bs.NVFP4Tensor.from_parts(
        codes.contiguous(), scales.contiguous().view(torch.float8_e4m3fn), a.global_scale, layout="linear"
    )
    y = bs.gemm(wrong, b, out_dtype=torch.float32)
    with pytest.raises(AssertionError):
        sweep.judge(y, product, magnitude, None, 192, exact=data == DATA[2])


def test_the_judge_sees_nan_and_a_bit():
    a, b = every_code_and_scale(3, 64), every_code_and_scale(3, 64, seed=1)
    exact = reference.gemm(a, b)
    y = bs.gemm(a, b, out_dtype=torch.float32)
    for wrong in (y.clone().fill_(float("nan")), y + y.abs() * 2**-12):
        with pytest.raises(AssertionError):
            sweep.judge(wrong, exact, exact.abs(), None, 64, exact=False)
