"""The kernels of each family on the software GPU: every pair of values, every shape, every schedule; a sample in CI."""

import collections
import itertools
import re
import time
from dataclasses import replace

import proof_record
import pytest
import sweep
import torch
from operands import every_code_and_scale
from proof_record import SWEEPS
from sweep import BATCHES, DATA, LARGE, SCHEDULES, SMALL, Shape

import blockscale as bs
from blockscale import families, reference

SHAPES = (*LARGE, *SMALL, *BATCHES)
every_family = pytest.mark.parametrize("family", SWEEPS)
every_row = [(family, number) for family, each in SWEEPS.items() for number in range(each.count)]
needs_compiler = pytest.mark.usefixtures("_compiler")


@pytest.fixture
def _compiler():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def run(row, work):
    """Products of a row under every schedule: `work` has (shape, data, gap between rows of the result). A result has to
    have the same bits whatever the schedule. Returns the entry of the record."""
    start, counts = time.perf_counter(), collections.Counter(products=0, instructions=0, findings=0)
    first = {}
    for kind, seed in SCHEDULES:
        with bs.emulated(row.sweep.target.arch, schedule=kind, seed=seed, sms=row.sms) as gpu:  # a finding raises
            for shape, data, gap in work:
                try:
                    got = row.multiply(shape, data, gap)
                    assert torch.equal(got, first.setdefault((shape, data), got)), "another schedule gave other bits"
                except Exception as error:
                    raise AssertionError(f"{row}; {shape}, {data}, {kind} {seed}: {error}") from error
                counts["products"] += 1
        counts["instructions"] += sum(report.counters["warp_instructions"] for report in gpu.reports)
        counts["findings"] += len(gpu.findings)
    assert counts["findings"] == 0
    return {**counts, "seconds": round(time.perf_counter() - start, 1)}


def work_of(row, number):
    """The shapes of a row; data and gaps turn with its number."""
    return [
        (shape, DATA[(number + i) % 3], (0, 8, 3)[(number + 2 * i) % 3]) for i, shape in enumerate(row.shapes(number))
    ]


def prove(family, case, row, work):
    if proof_record.holds(family, case, row):
        pytest.skip("in the record")
    proof_record.add(family, case, row, run(row, work))


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize(("family", "number"), every_row)
def test_pairwise(family, number):
    row = SWEEPS[family].rows[number]
    prove(family, proof_record.row_case(number, row), row, work_of(row, number))


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize(
    ("family", "number"), [(family, i) for family, each in SWEEPS.items() for i in range(len(each.competition))]
)
def test_gpu_mode(family, number):
    shape = SWEEPS[family].competition[number]
    case, row, part = SWEEPS[family].contest(shape)
    prove(family, case, row, [(part, DATA[number % 3], 0)])


@needs_compiler
@pytest.mark.parametrize(
    ("family", "number"), [(family, number) for family, number in every_row if number % SWEEPS[family].sample == 0]
)
def test_a_sample(family, number):
    """Of every twelve rows or so the first that is quick, its small shape."""
    rows = SWEEPS[family].rows
    quick = next(i for i in range(number, number + SWEEPS[family].sample) if rows[i % len(rows)].quick) % len(rows)
    work = work_of(rows[quick], quick)
    assert run(rows[quick], [work[min(1, len(work) - 1)]])["products"] == len(SCHEDULES)


@every_family
def test_the_documents_tell_no_more_than_the_record_holds(family):
    """A proof that goes on may be ahead of them."""
    text = proof_record.DOCUMENT.read_text()
    claimed = re.search(rf"^Record of {family}: (\d+) of ", text, re.MULTILINE)
    held = sum(case.startswith("row") for case in proof_record.load(family))
    assert (int(claimed[1]) if claimed else 0) <= held, "run: python tests/blockscale/prove/proof_record.py"
    assert proof_record.told(family) in proof_record.tell(text)


@every_family
def test_no_pair_of_values_is_left_out(family):
    swept = SWEEPS[family]
    covered = set().union(*(row.pairs() for row in swept.rows))
    assert sorted(swept.possible_pairs.keys() - covered, key=repr) == []
    assert all(row.builds() for row in swept.rows)
    values = {name: {row.values()[name] for row in swept.rows} for name in swept.values}
    assert values == {name: set(given) for name, given in swept.values.items()}
    assert len(swept.rows) == swept.count


@every_family
def test_pairs_that_no_kernel_has_are_those_that_are_refused(family):
    """What is left out of the pairs is so for a reason that is known."""
    pairs, values = SWEEPS[family].possible_pairs, SWEEPS[family].values
    excluded = set()
    for (one, ones), (other, others) in itertools.combinations(values.items(), 2):
        if not all(((one, x), (other, y)) in pairs for x in ones for y in others):
            excluded.add((one, other))
    assert excluded == SWEEPS[family].never


@every_family
def test_the_emulated_gpu_has_room_for_the_competition(family):
    """Configurations are chosen for the whole GPU."""
    for shape in SWEEPS[family].competition:
        _, row, part = SWEEPS[family].contest(shape)
        gpu = replace(row.sweep.target, sms=row.sms)
        assert families.supports(row.problem(part), gpu, row.config) is None, (row, shape)


@pytest.mark.parametrize("family", ["sm100", "sm103", "sm120"])
def test_shapes_are_of_every_kind(family):
    rows = SWEEPS[family].rows
    every = {shape for number, row in enumerate(rows) for shape in row.shapes(number)}
    assert len(every) >= 30
    assert {1, 15, 16, 48, 64, 80, 256, 2304} <= {shape.k for shape in every}
    counts = [len(row.shapes(number)) for number, row in enumerate(rows)]
    assert set(counts) <= {1, 3}  # one where clusters are wide and an element takes many instructions
    assert counts.count(3) > 0.8 * len(counts)


@pytest.mark.parametrize("family", ["sm100-grouped"])
def test_groups_are_of_every_kind(family):
    """Empty ones, one alone, those of a row and of more than an atom of scales has."""
    rows = SWEEPS[family].rows
    every = [(row, shape) for number, row in enumerate(rows) for shape in row.shapes(number)]
    assert {len(shape.sizes) for _, shape in every} == {1, 3, 5, 8, 60, 64, 256}
    for form in ("contiguous", "masked", "list"):
        sizes = {shape.sizes for row, shape in every if row.form == form}
        assert {0, 1, 129} <= set().union(*sizes)
        assert any(sum(1 for size in own if size) == 1 for own in sizes) == (form != "list")
    assert {1, 16, 64, 80, 320, 529, 640} <= {shape.k for _, shape in every}
    assert all(shape.sizes.count(0) for _, shape in every if len(shape.sizes) >= 60)


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
    sweep.judge(
        bs.gemm(a, b, out_dtype=torch.float32), product, magnitude, None, None, None, 192, exact=data == DATA[2]
    )
    codes, scales = MUTATIONS[mutation](a.codes, a.with_layout("linear").scales.view(torch.uint8))
    wrong = bs.NVFP4Tensor.from_parts(
        codes.contiguous(), scales.contiguous().view(torch.float8_e4m3fn), a.global_scale, layout="linear"
    )
    y = bs.gemm(wrong, b, out_dtype=torch.float32)
    with pytest.raises(AssertionError):
        sweep.judge(y, product, magnitude, None, None, None, 192, exact=data == DATA[2])


def test_the_judge_sees_nan_and_a_bit():
    a, b = every_code_and_scale(3, 64), every_code_and_scale(3, 64, seed=1)
    exact = reference.gemm(a, b)
    y = bs.gemm(a, b, out_dtype=torch.float32)
    for wrong in (y.clone().fill_(float("nan")), y + y.abs() * 2**-12):
        with pytest.raises(AssertionError):
            sweep.judge(wrong, exact, exact.abs(), None, None, None, 64, exact=False)
