"""What the documents show is what happens."""

import re
from pathlib import Path

import pytest
import torch

import blockscale as bs

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


README_BLOCKS = _python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("source", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_the_readmes_examples_run(source, capsys):
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    for expected in re.findall(r"#> (.*)", source):
        assert expected in capsys.readouterr().out


def test_the_readme_has_an_example_of_eight_lines():
    assert len(README_BLOCKS[0].strip().splitlines()) == 8
