"""The shape of the library itself: which part may import which, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

# Each room with the rooms it may import (design: arrows go one way). A room is a package, or a module of the top level.
BLOCKSCALE = {
    "_version": set(),
    "formats": set(),
    "tensor": {"formats", "threads"},
    "threads": set(),
    "quantize": {"formats", "tensor", "threads"},
    "reference": {"tensor"},
    "arguments": {"formats", "tensor"},
    "backends": {"formats", "tensor", "threads"},
    "api": {"arguments", "backends", "tensor", "threads"},
    "demo": {"", "reference"},
    "cli": {"", "demo", "reference"},
    "": {"_version", "api", "backends", "quantize", "tensor"},
    "__main__": {"cli"},
}
PTXEMU: dict[str, set[str]] = {"": set()}


def _rooms_imported(path, package):
    """Rooms of `package` that a file imports: the first name below the package, or "" for the package itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = below if node.module == package else [node.module]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == package:
                room = rest[0] if rest else ""
                known = (SRC / package / room).is_dir() or (SRC / package / f"{room}.py").is_file()
                yield room if known else ""


@pytest.mark.parametrize(("package", "allowed"), [("blockscale", BLOCKSCALE), ("ptxemu", PTXEMU)])
def test_imports_go_one_way(package, allowed):
    wrong = []
    for path in sorted((SRC / package).rglob("*.py")):
        parts = path.relative_to(SRC / package).with_suffix("").parts
        room = "" if parts == ("__init__",) else parts[0]
        assert room in allowed, f"{path}: a room without a place in the test's table"
        wrong += [
            f"{path}: {room} imports {other}"
            for other in _rooms_imported(path, package)
            if other not in {room, *allowed[room]}
        ]
    assert not wrong, "\n".join(wrong)


def test_the_emulator_never_imports_the_library_and_the_library_only_in_one_place():
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        if path.is_relative_to(SRC / "ptxemu"):
            assert "import blockscale" not in text, path
            assert "from blockscale" not in text, path
        elif path != SRC / "blockscale/launch/emulated.py":
            assert "import ptxemu" not in text, path
            assert "from ptxemu" not in text, path


def test_import_brings_no_command_line_and_no_compiler():
    heavy = ("rich", "typer", "safetensors", "tokenizers", "cutlass", "ptxemu")
    script = f"import sys, blockscale; print(*[m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_public_names():
    import blockscale

    assert set(blockscale.__all__) == {
        "NVFP4Tensor",
        "__version__",
        "available_backends",
        "dequantize",
        "gemm",
        "grouped_gemm",
        "quantize",
    }
    for name in blockscale.__all__:
        assert getattr(blockscale, name).__doc__
