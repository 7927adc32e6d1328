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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_wrong_program_reports_its_kind(example: Example) -> None:
    assert example.right != example.wrong
    shown = findings.reported(example)
    assert shown.startswith((f"{example.kind}", f"ptxemu.{example.kind}: "))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_schedule_finds_something(example: Example, schedule: tuple[str, int]) -> None:
    """Which fault is named first depends on the order; that there is one does not, but where only late operations
    show it."""
    try:
        reports = findings.run(example, example.wrong, *schedule)
    except ptxemu.Error:
        return
    found = [finding for report in reports for finding in report.findings]
    assert found or (example.kind == "operation outstanding at exit" and schedule[0] != "lazy")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_its_right_twin_is_clean(example: Example, schedule: tuple[str, int]) -> None:
    reports = findings.run(example, example.right, *schedule)
    assert [str(finding) for report in reports for finding in report.findings] == []


def test_the_page_shows_what_is_reported() -> None:
    page = findings.PAGE.read_text()
    assert page == findings.page(page), "python tools/findings.py rewrites it"
