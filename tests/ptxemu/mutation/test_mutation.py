"""Faults show: a seeded sample of the mutants of our own small kernels here, all of every kernel under `make prove`.

docs/mutations.md says what the suite is, what it caught when record.json was written, and why each survivor survives.
"""

from __future__ import annotations

from collections import Counter

import pytest
import record
import tables
from cases import OWN
from explanations import explain
from suite import Kernel, sample

from ptxemu.testing import RUNS

CAUGHT = 0.95  # at least, of the faults that change something; of a single kernel's with strict checks too
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers


@pytest.mark.parametrize("name", OWN)
def test_kernels_are_clean_before(name: str) -> None:
    assert not Kernel(OWN[name]()).run("", None).message


@pytest.mark.parametrize("name", OWN)
def test_a_sample_of_faults_is_caught(name: str) -> None:
    """What is not has an explanation."""
    kernel = Kernel(OWN[name]())
    for text, mutant in sample(kernel, seed=1, each=2):
        if not kernel.run(text, mutant).caught:
            place = {"text": text, "line": mutant.line, "operator": mutant.operator, "change": mutant.change}
            strict = kernel.strict(text, mutant) - kernel.strict("", None, RUNS)
            survivor = place | {"before": mutant.before, "reached": True, "strict": str(strict or "")}
            assert explain(name, survivor).kind in ("equivalent", "strict"), f"{text}: {mutant}"


def test_the_record_is_complete() -> None:
    found = tables.record()
    assert found["schedules"] == [f"{schedule}-{seed}" for schedule, seed in RUNS]
    assert set(OWN) | {"nvidia-1cta", "nvidia-multicast", "nvidia-clc"} <= set(found["kernels"])
    for name, setup in OWN.items():
        total = sum(n for _, n in found["kernels"][name]["counts"].values())
        assert total == len(Kernel(setup()).mutants), f"{name} has changed: run tests/ptxemu/mutation/record.py"
    kinds = tables.judged(found["kernels"])
    assert tables.rate(sum(kinds.values(), Counter())) >= CAUGHT
    assert {name: k for name, k in kinds.items() if tables.rate(k, strict=True) < CAUGHT} == {}
    assert not [name for name, part in found["kernels"].items() if "Error" in part["how"]]  # one that nobody foresaw


def test_every_survivor_is_explained() -> None:
    kernels = tables.record()["kernels"]
    survivors = [(name, survivor) for name, part in kernels.items() for survivor in part["survivors"]]
    assert [s for s in survivors if explain(*s).why == "not explained"] == []


def test_the_document_shows_the_record() -> None:
    text = tables.DOCUMENT.read_text()
    assert text == tables.document(text, tables.record()["kernels"])


@pytest.mark.prove
@pytest.mark.parametrize("name", record.setups())
def test_the_whole_suite(name: str) -> None:
    part = record.run(name, record.setups()[name]())
    kinds = tables.judged({name: part})[name]
    assert tables.rate(kinds, strict=True) >= CAUGHT, tables.survivors({name: part})
