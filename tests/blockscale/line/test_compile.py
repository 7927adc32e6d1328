"""What the compiler makes, and what it says when it cannot."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import pytest

from blockscale import compile as compiler
from blockscale import plan
from blockscale.config import Config
from blockscale.problem import Problem, target_named
from blockscale.store import COMPILER, Store, default_store

B200 = target_named("b200")
PROBLEM, CONFIG = Problem(1, 256, 64), Config()


def versions(monkeypatch, **known):
    def version(name):
        if known.get(name.replace("-", "_")) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_no_compiler(monkeypatch, tmp_path):
    versions(monkeypatch)
    with pytest.raises(
        compiler.CompilerMissing, match=r"nvidia-cutlass-dsl is not installed: pip install '.\[kernels\]'"
    ):
        plan.artefact(PROBLEM, B200, CONFIG, Store(tmp_path))
    assert not list(tmp_path.iterdir())


def test_another_version_of_the_compiler(monkeypatch, tmp_path):
    versions(monkeypatch, nvidia_cutlass_dsl="4.9.0")
    with pytest.raises(compiler.CompilerMissing, match=r"is 4\.9\.0; kernels are compiled with 4\.8\.1 alone"):
        plan.artefact(PROBLEM, B200, CONFIG, Store(tmp_path))


def test_no_tvm_ffi(monkeypatch, tmp_path):
    versions(monkeypatch, nvidia_cutlass_dsl=COMPILER)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(compiler.CompilerMissing, match="apache-tvm-ffi is not installed"):
        plan.artefact(PROBLEM, B200, CONFIG, Store(tmp_path))


def test_parts_of_an_artefact():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    made = plan.artefact(PROBLEM, B200, CONFIG, default_store())
    assert made.origin["arch"] == "sm_100a"
    assert ".target sm_100a" in made.parts["ptx"].read_text()
    assert made.parts["cubin"].read_bytes().startswith(b"\x7fELF")
    assert b"__tvm_ffi_blockscale_gemm" in made.parts["object"].read_bytes()
    again = plan.artefact(PROBLEM, B200, CONFIG, default_store())
    assert again == made


def test_a_dependent_launch_that_does_not_wait_is_not_built(monkeypatch, tmp_path):
    """Stale reads would be rare, and only under load."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cutlass import cute

    monkeypatch.setattr(cute.arch, "griddepcontrol_wait", lambda: None)
    with pytest.raises(compiler.CompileError, match=r"pdl True, .* touches global memory before griddepcontrol\.wait"):
        plan.artefact(PROBLEM, B200, Config(pdl=True), Store(tmp_path))
    assert not list(tmp_path.rglob("*.json"))


def test_a_library_exports_the_function_and_imports_no_compiler():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    made = plan.artefact(PROBLEM, B200, CONFIG, default_store())
    listed = subprocess.run(["nm", "-D", made.parts["library"]], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1] for line in listed.splitlines() if " U " in line}
    names = {name for name in wanted if not name.startswith(("TVMFFI", "_GLOBAL", "mem", "malloc", "free"))}
    assert all(name.startswith(("cuda", "cuKernelGetAttribute")) for name in names), names
    assert "T __tvm_ffi_blockscale_gemm" in listed


def test_without_a_linker_there_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "host.o").write_bytes(b"")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiler.link(tmp_path / "host.o") is None


def test_a_linker_that_fails_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "host.o").write_bytes(b"no object")
    with pytest.raises(compiler.CompileError, match="could not link the host code"):
        compiler.link(tmp_path / "host.o")
    monkeypatch.setenv("CC", "false --really")
    with pytest.raises(compiler.CompileError, match=r"false --really could not link .* its exit code is 1"):
        compiler.link(tmp_path / "host.o")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_linker_with_options(tmp_path, monkeypatch):
    (tmp_path / "host.c").write_text("int host;")
    subprocess.run(["cc", "-c", "-fPIC", "-o", tmp_path / "host.o", tmp_path / "host.c"], check=True)
    monkeypatch.setenv("CC", "cc -g")
    assert compiler.link(tmp_path / "host.o")["library"].startswith(b"\x7fELF")


def test_what_the_environment_asks_of_the_compiler_is_not_heard(monkeypatch, tmp_path):
    """It would change the code under the same key."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cutlass.cutlass_dsl import CuTeDSL

    engine = CuTeDSL._get_dsl()
    plain = plan.artefact(PROBLEM, B200, CONFIG, default_store()).parts
    monkeypatch.setattr(engine.envar, "lineinfo", True)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "remarks{ptx}")
    before = engine.envar
    made = plan.artefact(PROBLEM, B200, CONFIG, Store(tmp_path)).parts
    assert made["ptx"].read_text() == plain["ptx"].read_text()
    assert made["cubin"].stat().st_size == plain["cubin"].stat().st_size
    assert engine.envar is before
    assert os.environ["CUTE_DSL_LINEINFO"] == "1"


def test_a_target_that_the_assembler_does_not_know(tmp_path):
    """The message names the kernel, the target and the toolkit."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    sys.path.insert(0, str(tmp_path))
    try:
        from cutlass import cute

        (tmp_path / "nothing_kernel.py").write_text(
            "from cutlass import cute\n\n@cute.kernel\ndef nothing():\n    pass\n\n"
            "@cute.jit\ndef launch():\n    nothing().launch(grid=[1, 1, 1], block=[32, 1, 1])\n"
        )
        import nothing_kernel

        assert cute
        with pytest.raises(compiler.CompileError, match=r"nothing for sm_999a: nvidia-cutlass-dsl 4\.8\.1 refused it"):
            compiler.compile_function(nothing_kernel.launch, [], "sm_999a", "nothing")
    finally:
        sys.path.remove(str(tmp_path))
