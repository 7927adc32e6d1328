"""Imports go one way: what each room of the two packages may import, and that the packages stay apart.

A room is a package's folder or top-level module, or a module within with a row of its own; "" is the package's own
__init__. Imports for types alone are free.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

ROOMS = {
    "blockscale": {
        "_version": set(),
        "threads": set(),
        "formats": set(),
        "progress": set(),
        "ops": {"formats", "problem"},
        "tensor_checks": {"formats"},
        "tensor": {"formats", "ops", "tensor_checks", "threads"},
        "quantize": {
            "entry",
            "formats",
            "kernels",
            "kernels.parts.exponential",
            "launch",
            "ops",
            "plan",
            "problem",
            "store",
            "compile",
            "tensor",
            "threads",
        },
        "reference": {"tensor"},
        "arguments": {"formats", "tensor"},
        "grouped": {"arguments", "formats", "problem", "tensor"},
        "problem": set(),
        "kernels.parts.exponential": set(),
        "kernels.parts.geometry": set(),
        "kernels.parts.geometry96": {"kernels.parts.geometry"},
        "kernels.parts.order": set(),
        "kernels.parts.staging": set(),
        "kernels.parts.warptile": {"kernels.parts.geometry"},
        "kernels.waits": set(),
        "kernels.parts.chains": {"formats"},
        "kernels.parts.hopper_memory": {"formats"},
        "kernels": {
            "formats",
            "kernels.parts.chains",
            "kernels.parts.exponential",
            "kernels.parts.geometry",
            "kernels.parts.geometry96",
            "kernels.parts.hopper_memory",
            "kernels.parts.order",
            "kernels.parts.staging",
            "kernels.parts.warptile",
        },
        "config": set(),
        "ladder": {"config"},
        "entry": set(),
        "families": {
            "config",
            "entry",
            "formats",
            "kernels",
            "kernels.parts.chains",
            "kernels.parts.geometry",
            "kernels.parts.geometry96",
            "kernels.parts.hopper_memory",
            "kernels.parts.staging",
            "kernels.parts.warptile",
            "problem",
            "tensor",
        },
        "heuristics": {"config", "families", "problem"},
        "pytree": {"formats", "tensor"},
        "calls": {"arguments", "config", "formats", "ops", "tensor"},
        "store": {"config", "entry", "families", "problem"},
        "compile": {"config", "entry", "families", "kernels.waits", "problem", "store"},
        "plan": {"compile", "config", "families", "heuristics", "problem", "store"},
        "launch": {"problem", "store"},
        "expansion": {"compile", "entry", "formats", "kernels", "plan", "problem", "store", "tensor"},
        "backends": {
            "arguments",
            "config",
            "entry",
            "expansion",
            "families",
            "formats",
            "grouped",
            "heuristics",
            "launch",
            "plan",
            "problem",
            "quantize",
            "tensor",
            "threads",
        },
        "api": {
            "arguments",
            "backends",
            "config",
            "families",
            "grouped",
            "heuristics",
            "launch",
            "ops",
            "problem",
            "tensor",
            "threads",
            "calls",
        },
        "op_kernels": {"api", "backends", "formats", "ops", "problem", "quantize", "tensor", "threads", "calls"},
        "checkpoints": {"_version", "formats", "quantize", "tensor", "threads"},
        "nn": {"api", "arguments", "backends", "checkpoints", "formats", "ops", "progress", "quantize", "tensor"},
        "parallel": {"api", "formats", "nn", "ops", "quantize", "tensor"},
        "": {
            "_version",
            "api",
            "backends",
            "checkpoints",
            "config",
            "ladder",
            "launch",
            "nn",
            "op_kernels",
            "pytree",
            "quantize",
            "tensor",
        },
        "demo": {"", "compile", "formats", "quantize", "reference"},
        "bench.timing": set(),
        "bench.triton_kernels": set(),
        "bench": {"", "backends", "bench.timing", "bench.triton_kernels", "families", "formats", "problem"},
        "cli": {
            "",
            "backends",
            "bench",
            "bench.timing",
            "checkpoints",
            "compile",
            "config",
            "demo",
            "expansion",
            "families",
            "heuristics",
            "plan",
            "problem",
            "progress",
            "quantize",
            "reference",
            "store",
        },
        "__main__": {"cli"},
    },
    "ptxemu": {
        "errors": set(),
        "numerics": set(),
        "text": {"errors"},
        "machine": {"errors", "numerics"},
        "isa": {"errors", "numerics", "text", "machine"},
        "arguments": {"errors", "machine", "text"},
        "watch": {"errors", "machine"},
        "report": {"errors", "machine", "watch"},
        "stream": {"errors", "machine"},
        "parallel": {"machine", "watch"},
        "device": {"arguments", "errors", "isa", "machine", "parallel", "report", "stream", "text", "watch"},
        "": {"arguments", "device", "errors", "machine", "report"},
        "testing": {"", "device", "errors", "machine"},
        "host": {"", "device", "errors", "machine", "report", "text"},
        "__main__": {"", "device", "errors", "host", "isa", "machine", "report"},
    },
}
FILES = [path for package in ROOMS for path in sorted((SRC / package).rglob("*.py"))]


def room_of(path: Path) -> tuple[str, str]:
    """(package, room) of a file."""
    package, *below = path.relative_to(SRC).with_suffix("").parts
    return package, "" if below == ["__init__"] else _narrowest(package, below) or below[0]


def _narrowest(package: str, below: list[str]) -> str:
    """The room of the longest dotted name that has one; "" if none has."""
    names = (".".join(below[:length]) for length in range(len(below), 0, -1))
    return next((name for name in names if name in ROOMS[package]), "")


def imported_rooms(path: Path, package: str) -> set[str]:
    """The rooms of its own package that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names += below if node.module == package else [node.module]
    return {_narrowest(package, name.split(".")[1:]) for name in names if name.split(".")[0] == package}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_one_way(path):
    package, room = room_of(path)
    assert room in ROOMS[package], "a room without a place in the table"
    assert imported_rooms(path, package) - {room} <= ROOMS[package][room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_the_emulator_never_imports_the_library_and_the_library_it_in_one_place(path):
    package, _ = room_of(path)
    other = "blockscale" if package == "ptxemu" else "ptxemu"
    if path != SRC / "blockscale/launch/emulated.py":
        assert not re.search(rf"^\s*(import|from) {other}\b", path.read_text(), re.MULTILINE)


def test_modules_of_tests_have_names_of_their_own():
    """They are imported by their file's name alone: of two with one name the second would be the first."""
    files = [path for path in Path(__file__).parent.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in files if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
