"""Builds the C stand-in for CuTe DSL's runtime library, once for each source text and machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ptxemu.host.errors import CompilerMissing

__all__ = ["runtime_library"]

SOURCE = Path(__file__).with_name("runtime.c")
NAME = "libcute_dsl_runtime.so"  # CuTe DSL recognises its runtime by this file name
FLAGS = ("-O2", "-fPIC", "-shared", "-Wall", "-Werror", f"-Wl,-soname,{NAME}")


def runtime_library() -> Path:
    """The path of the built library, under PTXEMU_CACHE, XDG_CACHE_HOME/ptxemu or ~/.cache/ptxemu.

    Raises:
        CompilerMissing: neither `cc` nor what CC names is on the path, or it fails; the message holds its output.
    """
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + platform.machine().encode() + " ".join(FLAGS).encode()).hexdigest()[:16]
    path = _cache() / f"runtime-{key}" / NAME
    if not path.exists():
        _build(path)
    return path


def _cache() -> Path:
    if named := os.environ.get("PTXEMU_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxemu"


def _build(path: Path) -> None:
    """Compiles next to the final place and moves the file there, so that another process never sees half of it."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise CompilerMissing(
            f"no C compiler: {compiler!r} is not on the path; ptxemu.host builds a small library with it once "
            "(install gcc or clang, or name a compiler in CC)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / NAME
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise CompilerMissing(f"the C compiler failed: {' '.join(command)}\n{result.stderr.strip()}")
        os.replace(built, path)
