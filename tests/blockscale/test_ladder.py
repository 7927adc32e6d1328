"""docs/ladder.md: its counts are the emulator's, its arithmetic is right, its examples run."""

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import blockscale as bs
from blockscale import ladder
from blockscale.config import Config
from blockscale.families import supports
from blockscale.problem import Problem, target_named

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("ladder_tool", ROOT / "tools" / "ladder.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_steps_are_supported_and_differ_by_little():
    assert [getattr(ladder, f"V{i}") for i in range(1, 7)] == list(ladder.STEPS)
    for before, after in zip(ladder.STEPS, ladder.STEPS[1:], strict=False):
        changed = [f.name for f in fields(Config) if getattr(before, f.name) != getattr(after, f.name)]
        assert 1 <= len(changed) <= 3
    for step in ladder.STEPS:
        for size in (1, 8192, 16384):
            assert supports(Problem(size, size, size), target_named("b200"), step) is None
    assert bs.ladder is ladder


@pytest.fixture(scope="module")
def measured(tool):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return [tool.measure(step) for step in tool.NAMES]


def test_the_document_has_the_counts_as_they_are(tool, measured):
    text = tool.DOCUMENT.read_text()
    assert tool.told(text, measured) == text, "run: python tools/ladder.py"


def test_what_a_profiler_saw_is_explained(measured):
    """8192 x 8192 has 1,024 pieces: 16.8 million wavefronts of the early epilogue, 1.05 million without conflicts."""
    by_step = {counts.step: counts for counts in measured}
    for step in ("V1", "V2", "V3"):
        assert 1024 * by_step[step].wavefronts == 2**24
    assert all(1024 * counts.ideal == 2**20 for counts in measured)
    assert all(by_step[step].wavefronts == by_step[step].ideal for step in ("V4", "V5", "V6"))


def test_the_texts_figures(tool, measured):
    text = tool.DOCUMENT.read_text()
    first, second = measured[:2]
    assert first.from_l2 == 2 * (128 + 256) * 144 == 110_592
    assert second.from_l2 == (256 + 256) * 144 == 73_728
    for figure in (
        first.from_l2,
        second.from_l2,
        first.wavefronts,
        first.ideal,
        1024 * first.wavefronts,
        1024 * first.ideal,
    ):
        assert f"{figure:,}" in text
    (_, before), (_, after) = tool.footprint("V4", 16384), tool.footprint("V5", 16384)
    assert before > 126 > 2.5 * after


def test_its_pictures_are_there(tool):
    pictures = re.findall(r"!\[[^]]*\]\((pictures/[^)]+)\)", tool.DOCUMENT.read_text())
    assert len(pictures) == 6
    assert all((tool.DOCUMENT.parent / picture).exists() for picture in pictures)


def test_its_examples_run(tool, monkeypatch, tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for source in re.findall(r"^```python\n(.*?)^```", tool.DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        exec(source, scope)
    assert (tmp_path / "v1.json").exists()
