"""What the documents show is what happens."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import blockscale as bs
import ptxemu
from blockscale import heuristics
from blockscale.families.sm100.grouped.counts import count
from blockscale.problem import GroupedProblem, target_named

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


def test_hoppers_table_is_its_records(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import bench_table

    record = json.loads((ROOT / "benchmarks/records/hopper-table.json").read_text())
    table = bench_table.markdown(bench_table.from_json(record))
    assert table in (ROOT / "docs/hopper.md").read_text(), "run: python tools/bench_table.py"


def _python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


of_inductor = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch 2.13's own


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md", "docs/grouped.md"])
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


@of_inductor
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


@of_inductor
def test_the_guide_to_pytorch_runs_from_top_to_bottom(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = _python_blocks(ROOT / "docs/pytorch.md")
    assert len(blocks) > 4
    scope = {"__name__": "__main__"}
    for number, source in enumerate(blocks):
        exec(compile(source, f"docs/pytorch.md, block {number}", "exec"), scope)


@pytest.mark.parametrize("name", ["grouped.md"])
def test_guides_run_from_top_to_bottom(name):
    scope = {"__name__": "__main__"}
    for number, source in enumerate(_python_blocks(ROOT / "docs" / name)):
        exec(compile(source, f"docs/{name}, block {number}", "exec"), scope)


def test_the_counts_of_grouped_products_are_those_of_the_code():
    target, rows = target_named("b200"), []
    for sizes, n, k in (
        ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
        ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
        ((192, 320), 3072, 4096),
        ((128, 384), 4096, 1536),
    ):
        problem = GroupedProblem(m=sum(sizes), n=n, k=k, groups=len(sizes), out_dtype="fp16")
        chosen = heuristics.choose(problem, target).config
        found = [count(problem, config, sizes, target.sms) for config in (chosen, bs.Config((128, 128)))]
        cells = [(f"{c.work:.3f}", f"{c.weights:.3f}", f"{c.most}, {c.ideal:.2f}") for c in found]
        assert found[0].work <= 1.15
        assert found[0].weights <= 1.05
        assert found[0].most < found[0].ideal + 1
        rows.append(" | ".join([f"| {' '.join(map(str, sizes))}", str(n), str(k), *cells[0], *cells[1]]) + " |")
    text = (ROOT / "docs/grouped.md").read_text()
    assert [row for row in rows if row not in text] == []


def test_the_readmes_examples_are_as_short_as_promised():
    lines = [len(source.strip().splitlines()) for source in README_BLOCKS]
    assert lines[:4] == [8, 7, 6, 3]
    assert [n for n, source in zip(lines, README_BLOCKS, strict=True) if "load_checkpoint" in source] == [5]


def test_the_worked_example_of_checkpoints(tmp_path):
    text = (ROOT / "docs/checkpoints.md").read_text()
    x = torch.zeros(1, 32)
    for columns, values in re.findall(r"^x\[0, ([0-9:]+)\]\s+= (\[.*\])$", text, re.MULTILINE):
        start, stop = map(int, columns.split(":"))
        x[0, start:stop] = torch.tensor(eval(values))
    shown = re.findall(r"^(fc\.\w+)\s+(\w+)\s+([0-9 x]*?)\s\s+((?:[0-9a-f]{2} ?)+)(?:  .*)?$", text, re.MULTILINE)
    for convention, rows in (("modelopt", shown[:3]), ("compressed-tensors", shown[3:])):
        path = tmp_path / f"{convention}.safetensors"
        bs.save_checkpoint({"fc.weight": bs.quantize(x)}, path, to=convention)
        found = bs.load_checkpoint(path)
        assert torch.equal(found["fc.weight"].dequantize(), x)
        written = [
            (entry.name, entry.dtype, " x ".join(map(str, entry.shape)), bytes(entry.bytes().tolist()))
            for entry in found.source.entries.values()
        ]
        expected = [(name, dtype, shape, bytes.fromhex(data)) for name, dtype, shape, data in rows]
        assert sorted(written) == sorted(expected)
        assert len(written) == 3
