"""The programs on ptxemu, against what an H200 gave (benchmarks/records/silicon.json); on a Hopper GPU against that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import on_emulator
import on_gpu
import pytest
import silicon
import torch
from comparison import FAMILIES, convert, refused, singles, tensor_maps
from comparison.program import Program, digests, first_difference

from ptxemu.isa.errata import ERRATA, Erratum
from ptxemu.machine.tensormap import InvalidTensorMap

RECORD = json.loads(silicon.RECORD.read_text())["families"]
SCHEDULES = ("eager", "lazy", "fifo", "random")
ELEMENTS = 96  # of a lane-wise program that run as PTX in CI; the rest goes through the same functions at once


def emulated(program: Program, schedule: str = "lazy") -> dict[str, np.ndarray]:
    """The whole of a program on ptxemu; lane-wise ones as arrays, and their first elements as PTX."""
    if program.group is None:
        return on_emulator.run(program, schedule=schedule)
    found = on_emulator.run_lanewise(program)
    few = on_emulator.run(on_emulator.first_elements(program, ELEMENTS), checks="none")
    for name, array in few.items():
        assert not first_difference(found[name][: array.size], array), f"{program.name}: {name} as arrays and as PTX"
    return found


def different(family: str, programs: Iterator[Program], schedule: str | None = None) -> list[str]:
    """The arrays that are not as recorded; without a schedule each program takes the next."""
    wrong = []
    for i, program in enumerate(programs):
        want = RECORD[family][program.name]
        got = digests(program, emulated(program, schedule or SCHEDULES[i % 4]))
        assert want.keys() == got.keys()
        wrong += [f"{program.name}: {name}" for name in want if want[name] != got[name]]
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recorded_program_exists_and_is_recorded(family: str) -> None:
    names = [program.name for program in FAMILIES[family]()]
    assert sorted(names) == sorted(RECORD[family])


# One of how many programs of a family runs here; `make prove` and a GPU take all.
SAMPLE = {"tensor copies": 12, "tensor cores": 12, "convert": 2, "arithmetic": 2, "copies": 2, "clusters": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_ptxemu_gives_what_silicon_gave(family: str) -> None:
    assert not different(family, itertools.islice(FAMILIES[family](), 0, None, SAMPLE.get(family, 1)))


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ptxemu_gives_all_that_silicon_gave(family: str, schedule: str) -> None:
    assert not different(family, FAMILIES[family](), schedule)


@pytest.mark.parametrize("part", range(0, convert.PARTS, 16))
def test_conversions_of_f32_give_what_silicon_gave(part: int) -> None:
    """One of sixteen parts."""
    assert not different("f32 conversions", convert.singles(part))


@pytest.mark.prove
def test_all_conversions_of_f32_give_what_silicon_gave() -> None:
    assert not different("f32 conversions", singles())


def test_tensor_maps_are_encoded_as_the_driver_does() -> None:
    recorded = RECORD["tensor map bytes"]
    maps = tensor_maps.maps()
    assert len(recorded) == len(maps)
    for i, each in enumerate(maps):
        assert each.at(tensor_maps.ADDRESS).encode()[:64].hex() == recorded[str(i)], each


@pytest.mark.parametrize("program", list(refused.programs()), ids=lambda p: p.name)
def test_what_silicon_refuses_is_refused(program: Program) -> None:
    assert RECORD["refused"][program.name] == "CUDA_ERROR_ILLEGAL_INSTRUCTION"
    with pytest.raises(InvalidTensorMap):
        on_emulator.run(program)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the programs are for a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("family", FAMILIES)
def test_silicon_gives_the_same_bits(family: str) -> None:
    """Array by array, so that a difference shows where it is."""
    for program in FAMILIES[family]():
        want, got = emulated(program), on_gpu.run(program)
        wrong = {name: first_difference(want[name], got[name]) for name in want}
        assert not any(wrong.values()), f"{program.name}: {wrong}"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("family", ["f32 conversions", "tensor map bytes", "refused"])
def test_silicon_gives_what_is_recorded(family: str) -> None:
    assert silicon.record([family])[family] == RECORD[family]


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda e: e.program)
def test_every_erratum_names_a_program_that_ran(erratum: Erratum) -> None:
    family, _, name = erratum.program.partition(": ")
    assert any(program.startswith(name) for program in RECORD[family])
