"""The sm_100a kernel on the software GPU: every pair of values, every shape, every schedule; a sample of it in CI."""

import collections
import itertools
import re
import time

import proof_record
import pytest
import sweep
import torch
from operands import every_code_and_scale
from sweep import DATA, GPU_MODE, SCHEDULES, SHAPES, Shape

import blockscale as bs
from blockscale import reference
from blockscale.config import Config
from blockscale.families import supports
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


def run(row, work):
    """Products of a row: `work` has (shape, schedule, data, gap between rows of the result). Returns the entry."""
    start, counts = time.perf_counter(), collections.Counter(products=0, refused=0, instructions=0, findings=0)
    for (kind, seed), group in itertools.groupby(sorted(work, key=lambda x: x[1]), key=lambda x: x[1]):
        with bs.emulated("sm_100a", schedule=kind, seed=seed) as gpu:  # a finding raises
            for shape, _, data, gap in group:
                if refused(row, shape):
                    counts["refused"] += 1
                    continue
                try:
                    sweep.multiply(row, shape, data, gap)
                except Exception as error:
                    raise AssertionError(f"{row}; {shape}, {data}, {kind} {seed}: {error}") from error
                counts["products"] += 1
        counts["instructions"] += sum(report.counters["warp_instructions"] for report in gpu.reports)
        counts["findings"] += len(gpu.findings)
    assert counts["findings"] == 0
    return {**counts, "seconds": round(time.perf_counter() - start, 1)}


def turned(number, turn, shapes):
    """What row `number` does in a pass: every shape once, the schedule turning with row and shape; six passes give
    every shape every schedule. Data and gaps turn at other rates."""
    for i, shape in enumerate(shapes):
        schedule = SCHEDULES[(number + i + turn) % len(SCHEDULES)]
        yield shape, schedule, DATA[(turn + i // 6 + number // 6) % 3], (0, 8, 3)[(number + i + turn // 2) % 3]


def resumed(case, work):
    if case in proof_record.load():
        pytest.skip("in the record")
    proof_record.add(case, work())


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("number", range(len(sweep.rows())))
@pytest.mark.parametrize("turn", range(len(SCHEDULES)), ids=lambda turn: f"pass{turn}")
def test_pairwise(turn, number):
    row = sweep.rows()[number]
    resumed(f"pass {turn}, row {number:02d}: {row}", lambda: run(row, turned(number, turn, SHAPES)))


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("shape", GPU_MODE, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
def test_gpu_mode(schedule, shape):
    """By the heuristics' choice, fp16 results, as the competition has them. The largest under one schedule."""
    if shape.m * shape.n * shape.k > 10**10 and schedule[0] != "lazy":
        pytest.skip("too large for more than one schedule")
    row = sweep.Row(bs.config_for(shape.m, shape.n, shape.k, gpu="b200"), "fp16", "float")
    data = DATA[SCHEDULES.index(schedule) % 3]
    resumed(f"GPU MODE {shape}, {schedule[0]} {schedule[1]}: {row}", lambda: run(row, [(shape, schedule, data, 0)]))


@needs_compiler
@pytest.mark.parametrize("number", range(0, len(sweep.rows()), 9))
def test_a_sample(number):
    """Every ninth row, on every eighth shape."""
    work = list(turned(number, 0, SHAPES))[number % 8 :: 8]
    entry = run(sweep.rows()[number], work)
    assert entry["products"] + entry["refused"] == len(work)


def test_the_documents_tell_no_more_than_the_record_holds():
    """A proof that goes on may be ahead of them."""
    text = proof_record.DOCUMENT.read_text()
    claimed = re.search(r"^Record: (\d+) of ", text, re.MULTILINE)
    held = sum(case.startswith("pass") for case in proof_record.load())
    assert (int(claimed[1]) if claimed else 0) <= held, "run: python tests/blockscale/prove/proof_record.py"
    assert proof_record.told() in proof_record.tell(text)
    assert len(sweep.rows()) * len(SCHEDULES) == proof_record.PAIRWISE


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
