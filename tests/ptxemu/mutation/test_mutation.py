"""Faults show: a seeded sample of the mutants of our own small kernels here, all of every kernel under `make prove`.

docs/mutations.md says what the suite is, what it caught when record.json was written, and why each survivor survives.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import record
import tables
from cases import OWN
from explanations import GENERAL, JUDGED, UNEXPLAINED, explain
from mutants import Mutant
from suite import Kernel, Result, sample

from ptxemu.testing import RUNS

CAUGHT = 0.95  # at least, of the faults that change something; of a single kernel's with strict checks too
SETUPS = record.setups()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers


@functools.cache
def kernel(name: str) -> Kernel:
    return Kernel(SETUPS[name]())


@pytest.mark.parametrize("name", OWN)
def test_kernels_are_clean_before(name: str) -> None:
    assert kernel(name).run("", None) == Result("")


@pytest.mark.parametrize("name", OWN)
def test_a_sample_of_faults_is_caught(name: str) -> None:
    """What is not has an explanation, or strict checks see it."""
    known = kernel(name).strict("", None, RUNS)
    for text, mutant in sample(kernel(name), seed=1, each=2):
        if not kernel(name).run(text, mutant).caught:
            survivor = record.survivor(kernel(name), text, mutant, known)
            assert explain(name, kernel(name).setup.digest, survivor).kind != "missed", survivor


def test_rules_say_for_which_instruction_of_which_text_they_are() -> None:
    """A kernel that has changed has to be judged anew."""
    for name, judged in JUDGED.items():
        assert all(rule.why and rule.operator and rule.before for rule in (*judged.rules, *GENERAL))
        if name in OWN:
            assert judged.ptx == kernel(name).setup.digest, f"{name} has changed"


def test_the_record_is_complete() -> None:
    found = tables.record()
    assert found["schedules"] == [f"{schedule}-{seed}" for schedule, seed in RUNS]
    assert set(found["kernels"]) == set(record.ORDER)
    for name in OWN:
        part = found["kernels"][name]
        assert sum(n for _, n in part["counts"].values()) == part["mutants"] == len(kernel(name).mutants)
        assert part["ptx"] == kernel(name).setup.digest
    assert not [name for name, part in found["kernels"].items() if "Error" in part["how"]]  # one that nobody foresaw


def test_faults_are_caught() -> None:
    kinds = tables.judged(tables.record()["kernels"])
    assert tables.rate(sum(kinds.values(), Counter())) >= CAUGHT
    assert {name: k for name, k in kinds.items() if tables.rate(k, strict=True) < CAUGHT} == {}


def test_every_survivor_is_explained() -> None:
    kernels = tables.record()["kernels"]
    survivors = [(name, part["ptx"], survivor) for name, part in kernels.items() for survivor in part["survivors"]]
    assert [s for s in survivors if explain(*s) is UNEXPLAINED] == []


def test_the_document_shows_the_record() -> None:
    text = tables.DOCUMENT.read_text()
    assert text == tables.document(text, tables.record()["kernels"])


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", SETUPS)
def test_no_false_alarm(name: str, seed: int) -> None:
    """Nothing is found in a kernel that is as it should be."""
    assert kernel(name).run("", None, runs=[("random", seed)]) == Result("")


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name, judged in JUDGED.items() if judged.last_waits and name in SETUPS])
def test_last_waits(name: str) -> None:
    """Nothing needs them: not even without all waits of such a place does anything show."""
    (text,) = kernel(name).setup.texts
    for first, last in JUDGED[name].last_waits:
        waits = [m for _, m in kernel(name).mutants if m.operator == "drop_wait" and first <= m.line <= last]
        without = Mutant("drop_wait", first, "", "all", tuple(edit for wait in waits for edit in wait.edits))
        assert waits
        assert kernel(name).run(text, without) == Result("")


@pytest.mark.prove
@pytest.mark.parametrize("name", SETUPS)
def test_the_whole_suite(name: str) -> None:
    part = record.run(name, SETUPS[name]())
    kinds = tables.judged({name: part})[name]
    assert tables.rate(kinds, strict=True) >= CAUGHT, tables.survivors({name: part})
