"""What the documents show is what happens."""

import re
from pathlib import Path

import pytest
import torch

import blockscale as bs
import ptxemu

ROOT = Path(__file__).parents[2]


def test_the_worked_example_of_the_format():
    text = (ROOT / "docs/format.md").read_text()
    x = torch.tensor([eval(re.search(r"^x = (\[.*\])$", text, re.MULTILINE)[1])])
    codes = bytes.fromhex(re.search(r"^codes\s+([0-9a-f ]+)$", text, re.MULTILINE)[1])
    scales = bytes.fromhex(re.search(r"^scales\s+([0-9a-f ]+)$", text, re.MULTILINE)[1])
    q = bs.quantize(x, layout="linear")
    assert bytes(q.codes.flatten().tolist()) == codes
    assert bytes(q.scales.view(torch.uint8).flatten().tolist()) == scales
    assert q.global_scale.numpy().tobytes() == bytes.fromhex("0000003d")
    restored = x.clone()
    restored[0, 19] = 0
    assert torch.equal(q.dequantize(), restored)


def _python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_lines_fit_an_editor(name):
    """Those of programs' output excepted."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_files_that_are_named_are_there(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"^\[[^]]+\]: (\S+)", text, re.MULTILINE)
    assert len(targets) > 5
    assert [target for target in targets if not ((ROOT / name).parent / target).exists()] == []


README_BLOCKS = _python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("source", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_the_readmes_examples_run(source, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = compile(source, "README.md", "exec")
    if "emulated" in source:
        pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    if "deadlock" in source:
        with pytest.raises(ptxemu.Deadlock) as caught:
            exec(code, {"__name__": "__main__"})
        assert str(caught.value) in (ROOT / "README.md").read_text()
    else:
        exec(code, {"__name__": "__main__"})
        printed = capsys.readouterr().out
        promised = re.findall(r"#> (.*)", source)
        assert promised
        assert all(expected in printed for expected in promised)


def test_the_readmes_examples_are_as_short_as_promised():
    assert [len(source.strip().splitlines()) for source in README_BLOCKS[:3]] == [8, 7, 3]
