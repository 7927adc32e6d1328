"""The wrong programs of docs/examples/findings report what docs/emulator.md shows, and their right twins nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ptxemu

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import findings
from findings import Example

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 0), ("random", 1), ("random", 2)]
EXAMPLES = findings.examples()
# What else a wrong program shows under some schedule: who reads too early may find what nobody has written, and a copy
# whose bytes nobody waits for may be late.
ALSO = {
    "01_race_shared": "uninitialised read",
    "10_race_tensor_memory": "uninitialised read",
    "22_transaction_bytes": "operation outstanding at exit",
}
# A store that comes after its columns were freed ends the launch before anything is said about its order.
INSTEAD = {"10_race_tensor_memory": "MemoryFault", "12_wait_st": "MemoryFault"}
UNSEEN = {("25_operation_outstanding", "eager")}  # an operation that is complete at once is not outstanding


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_wrong_program_reports_its_kind(example: Example) -> None:
    assert example.right != example.wrong
    shown = findings.reported(example)
    assert shown.startswith((f"{example.kind}", f"ptxemu.{example.kind}: "))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_schedule_shows_its_kind(example: Example, schedule: tuple[str, int]) -> None:
    """And nothing else but what follows from it."""
    try:
        reports = findings.run(example, example.wrong, *schedule)
        found = {finding.kind for report in reports for finding in report.findings}
    except ptxemu.Error as error:
        found = {type(error).__name__}
    if (example.name, schedule[0]) in UNSEEN:
        assert not found
    else:
        assert found & {example.kind, INSTEAD.get(example.name)}
        assert found <= {example.kind, INSTEAD.get(example.name), ALSO.get(example.name)}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_its_right_twin_is_clean(example: Example, schedule: tuple[str, int]) -> None:
    reports = findings.run(example, example.right, *schedule)
    assert [str(finding) for report in reports for finding in report.findings] == []


def test_the_page_shows_what_is_reported() -> None:
    page = findings.PAGE.read_text()
    assert page == findings.page(page), "python tools/findings.py rewrites it"
