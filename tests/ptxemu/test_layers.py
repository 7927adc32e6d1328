"""The emulator's rooms and the one way that imports go: numerics <- machine; text, machine <- isa <- device <- host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ptxemu

ROOT = Path(ptxemu.__file__).parent
# What each room may import, besides itself, errors and, for types alone, anything.
MAY = {
    "errors": set(),
    "numerics": set(),
    "text": set(),
    "machine": {"numerics"},
    "isa": {"numerics", "text", "machine"},
    "arguments": {"machine", "text"},
    "report": {"machine"},
    "device": {"arguments", "isa", "machine", "report", "text"},
    "testing": {"device", "machine"},
    "host": {"device", "machine", "report", "text"},
    "__main__": {"device", "host", "isa", "machine", "report"},
    "__init__": {"device", "machine", "report"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports when it runs."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "ptxemu" else [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("ptxemu.")}
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    mine = room(path)
    assert imports(path) - {mine, "errors"} <= MAY[mine]


def test_the_emulator_does_not_know_the_library() -> None:
    assert not [path for path in FILES if "blockscale" in path.read_text()]


def test_files_are_short() -> None:
    assert {
        path.name: len(path.read_text().splitlines()) for path in FILES if len(path.read_text().splitlines()) >= 500
    } == {}
