"""From a configuration to an artefact's parts. Needs CuTe DSL and no GPU; imported only when the store has nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockscale import families, store
from blockscale.config import Config
from blockscale.entry import Entry
from blockscale.kernels.waits import before_the_wait
from blockscale.problem import Problem, Target
from blockscale.store import COMPILER, FUNCTION

INSTALL = "pip install '.[kernels]' in a clone of the repository (Linux)"
RUNTIME = Path(__file__).parent / "launch" / "runtime.c"


class CompilerMissing(RuntimeError):
    """A kernel has to be compiled, and CuTe DSL is not here, or not in the version that the kernels are written for."""


class CompileError(RuntimeError):
    """The compiler refused a kernel: the message names the kernel, the target, the compiler's version and its words."""


def compile_kernel(target: Target, config: Config, problem: Problem) -> dict[str, bytes]:
    """The parts of the artefact (see `store.Artefact`) for a configuration that `supports` has passed.

    `check_compiler` has passed too.

    Raises:
        CompileError: the compiler refuses, or a dependent launch would not wait for what it reads.
    """
    family = families.serving(problem, target)
    kernel = family.kernel(problem, target, config)
    what = f"{config}, {problem.out_dtype}"
    parts = compile_entry(kernel, family.ENTRY, target.arch, what, problem)
    if config.pdl and (early := family.premature(config, before_the_wait(parts["ptx"].decode()))):
        raise CompileError(
            f"{what} for {target.arch}: it may start before the kernel ahead of it has ended, and yet "
            f"{early[0]!r} touches global memory before griddepcontrol.wait"
        )
    return parts


def compile_entry(kernel: Any, entry: Entry, arch: str, what: str, problem: Problem | None = None) -> dict[str, bytes]:
    """The parts of the artefact of a kernel that takes `entry`, whose types may be those of a problem.

    Raises: as `compile_function`.
    """
    _check_entry(kernel, entry)
    return compile_function(kernel, traced_arguments(entry, problem), arch, what)


def check_compiler() -> None:
    """Raises CompilerMissing unless CuTe DSL and TVM-FFI are installed, the former in exactly the version needed."""
    how = f"{INSTALL}, or bring a store that `blockscale compile` (--shapes, --quantize) filled elsewhere"
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise CompilerMissing(f"no compiled kernel, and nvidia-cutlass-dsl is not installed: {how}") from None
    if found != COMPILER:
        raise CompilerMissing(f"nvidia-cutlass-dsl is {found}; kernels are compiled with {COMPILER} alone: {how}")
    if importlib.util.find_spec("tvm_ffi") is None:
        raise CompilerMissing(f"no compiled kernel, and apache-tvm-ffi is not installed: {how}")


def compile_function(function: Any, arguments: Sequence[Any], arch: str, what: str) -> dict[str, bytes]:
    """The parts of an artefact whose host function is `function`, traced with `arguments`, named FUNCTION.

    Raises:
        CompileError: whatever the compiler or the assembler raises.
    """
    from cutlass import cute

    with store.toolchain, tempfile.TemporaryDirectory(prefix="blockscale-") as directory, _own_settings():
        options = f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {directory}"
        try:
            compiled = cute.compile(function, *arguments, options=options)
            compiled.export_to_c(f"{directory}/host.o", FUNCTION)
            parts = {
                "object": Path(f"{directory}/host.o").read_bytes(),
                "ptx": compiled.__ptx__.encode(),
                "cubin": compiled.__cubin__,
            }
        except Exception as error:
            words = str(error).strip() or type(error).__name__
            raise CompileError(f"{what} for {arch}: nvidia-cutlass-dsl {COMPILER} refused it: {words}") from error
        return parts | (link(Path(f"{directory}/host.o")) or {})


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Inside, what the environment asks of CuTe DSL is not heard: it would change the code, but not its key.

    The names are private to CuTe DSL, hence the exact version.
    """
    from cutlass.cutlass_dsl import cutlass

    engines = [cutlass.CuTeDSL._get_dsl(), cutlass.CuteExperimentalDSL._get_dsl()]
    heard = [engine.envar for engine in engines]
    prefixes = tuple(f"{engine.name}_" for engine in engines)
    asked = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefixes)}
    try:
        for engine in engines:
            engine.envar = type(engine.envar)(engine.name)
        yield
    finally:
        os.environ.update(asked)
        for engine, envar in zip(engines, heard, strict=True):
            engine.envar = envar


def c_compiler() -> list[str] | None:
    """The command that CC holds, or `cc`, with its options; None if there is no such program."""
    command = shlex.split(os.environ.get("CC") or "cc")
    return command if command and shutil.which(command[0]) else None


def link(host_object: Path) -> dict[str, bytes] | None:
    """{"library": the host code as a shared library that needs CUDA and TVM-FFI alone}; None without a C compiler.

    The compiler is `cc`, or what CC names.

    Raises:
        CompileError: it fails.
    """
    linker = c_compiler()
    if linker is None:
        return None
    flags = ["-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,lazy"]
    with tempfile.TemporaryDirectory(prefix="blockscale-") as directory:
        library = Path(directory) / "host.so"
        command = [*linker, *flags, "-o", str(library), str(host_object), str(RUNTIME)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode or not library.exists():
            words = run.stderr.strip() or f"it says nothing, and its exit code is {run.returncode}"
            raise CompileError(f"{shlex.join(linker)} could not link the host code: {words}")
        return {"library": library.read_bytes()}


def traced_arguments(entry: Entry, problem: Problem | None) -> list[Any]:
    """What a kernel's `__call__` is traced with: the types of the entry's arguments, no addresses and no sizes."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    types: dict[str, Any] = {
        "uint8": cutlass.Uint8,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
        "fp16": cutlass.Float16,
        "bf16": cutlass.BFloat16,
        "fp32": cutlass.Float32,
        "fp64": cutlass.Float64,
    }
    types["nvfp4"] = types["uint8"]  # codes
    if problem is not None:
        types |= {f"problem.{name}": types[getattr(problem, name) or "fp32"] for name in ("a", "bias", "out_dtype")}
    pointers = [
        make_ptr(types[kind], 0, cute.AddressSpace.gmem, assumed_align=align or types[kind].width // 8)
        for kind, align in entry.pointers.values()
    ]
    return [*pointers, *(types[kind](0) for kind in entry.values.values()), make_fake_stream()]


def _check_entry(kernel: Any, entry: Entry) -> None:
    """That a kernel takes what a plan passes: it would be a mistake of ours, which no compiler sees."""
    taken = tuple(inspect.signature(type(kernel).__call__).parameters)[1:]
    if taken != entry.arguments:
        raise TypeError(f"{type(kernel).__name__} takes {taken}, expected {entry.arguments}")
