"""The store of compiled kernels: immutable, content-addressed, safe for any number of processes.

    <root>/parts/<sha256 of the bytes>.<kind>   the parts of artefacts
    <root>/kernels/<key>.json                   one artefact: its origin, the file of each part, a digest of both
    <root>/locks/<key>                          held by the process that compiles it

A key is a digest of every input that decides the code, so an entry is never out of date. Files appear under their name
by one rename, whole. `get` checks every byte against its name and the entry against its key: what was truncated,
changed or put in another's place is a miss, and the next `put` mends it. A lock is only a courtesy (one process
compiles, the others wait): the system drops that of a process that dies, and where the file system has none everybody
compiles and the last rename wins, with equal right.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import hashlib
import json
import os
import platform
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale import families
from blockscale.config import Config
from blockscale.entry import Entry
from blockscale.problem import GroupedProblem, Problem, Target

COMPILER = "4.8.1"  # of nvidia-cutlass-dsl: the one version that kernels are compiled with
FUNCTION = "blockscale_gemm"  # what every artefact exports
FORMAT = 2
SUFFIXES = {"object": ".o", "library": ".so", "ptx": ".ptx", "cubin": ".cubin"}
REQUIRED = {"object", "ptx", "cubin"}

# CuTe DSL keeps its state for the process, and the emulator changes it: who compiles or emulates holds this.
toolchain = threading.RLock()
_ABANDONED_SECONDS = 24 * 3600  # age of a temporary file whose process must have died


@dataclass(frozen=True)
class Artefact:
    """A compiled kernel.

    Attributes:
        key: its name in the store.
        origin: what it was made from, as the function `origin` gives it.
        parts: the files: "object" (the host code, ELF), "ptx", "cubin", and "library" (the host code linked, for a
            machine without the compiler; missing where there was no linker).
    """

    key: str
    origin: Mapping[str, Any]
    parts: Mapping[str, Path]


def origin(target: Target, config: Config, problem: Problem) -> dict[str, Any]:
    """Every input that decides a kernel's code: no size of the problem, no address, nothing of this process."""
    family = families.serving(problem, target)
    code = families.code(config, target, family)
    form = {"form": problem.form} if isinstance(problem, GroupedProblem) else {}
    return origin_of(
        target,
        family.KERNEL,
        family.ENTRY,
        smem=target.smem,
        config={name: list(value) if isinstance(value, tuple) else value for name, value in code.items()},
        a=problem.a,
        b=problem.b,
        out_dtype=problem.out_dtype,
        bias=problem.bias,
        activation=problem.activation,
        **form,
    )


def origin_of(target: Target, kernel: str, entry: Entry, **fields: Any) -> dict[str, Any]:
    """Likewise for any kernel: its module, its arguments, and what else decides its code, as JSON has it."""
    return {
        "format": FORMAT,
        "function": FUNCTION,
        "compiler": COMPILER,
        "machine": platform.machine(),  # of the host code
        "sources": sources(kernel),
        "entry": entry.table(),
        "arch": target.arch,
        **fields,
    }


def key_of(origin: Mapping[str, Any]) -> str:
    """The name of the kernel that has this origin."""
    return _digest(_canonical(origin))[:32]


@functools.cache
def sources(kernel: str) -> str:
    """A digest of the text of every file that writes the code of the kernel in module `kernel`."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [here / "compile.py", here / "launch" / "runtime.c", *_imported(kernel)]:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(here).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _imported(module: str) -> list[Path]:
    """The files of a module and of all of this package that it imports, and so on, in order."""
    root = Path(__file__).parents[1]
    found: set[Path] = set()
    wanted = [module]
    while wanted:
        name = wanted.pop().replace(".", "/")
        path = next((p for p in (root / f"{name}.py", root / name / "__init__.py") if p.exists()), None)
        if path is None or path in found:  # a name within a module, or a module that was seen
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                wanted += [alias.name for alias in node.names if alias.name.startswith("blockscale.")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blockscale."):
                wanted += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)


class Store:
    """Artefacts under one directory, which is made when something is put there."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def get(self, key: str) -> Artefact | None:
        """The artefact, if it is here and every byte is as it was put; otherwise None."""
        try:
            entry = json.loads((self.root / "kernels" / f"{key}.json").read_bytes())
            origin, names = entry["origin"], entry["parts"]
            parts = {part: self.root / "parts" / name for part, name in names.items()}
            right = (
                key == key_of(origin)
                and entry["digest"] == _digest_of(origin, names)
                and parts.keys() >= REQUIRED
                and all(path.suffix == SUFFIXES[part] for part, path in parts.items())
                and all(_digest(path.read_bytes()) == path.stem for path in parts.values())
            )
            return Artefact(key, origin, parts) if right else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def put(self, origin: Mapping[str, Any], parts: Mapping[str, bytes]) -> Artefact:
        """Keep an artefact under the key of its origin; one that is there already is replaced.

        Raises:
            OSError: the directory cannot be written.
        """
        key = key_of(origin)
        names = {part: _digest(data) + SUFFIXES[part] for part, data in parts.items()}
        for part, data in parts.items():
            self._publish(self.root / "parts" / names[part], data)
        entry = {"origin": origin, "parts": names, "digest": _digest_of(origin, names)}
        self._publish(self.root / "kernels" / f"{key}.json", json.dumps(entry, indent=1, sort_keys=True).encode())
        return Artefact(key, origin, {part: self.root / "parts" / name for part, name in names.items()})

    def check_writable(self) -> None:
        """Raises OSError, naming the directory and BLOCKSCALE_CACHE, unless something can be put here."""
        try:
            self._publish(self.root / "parts" / "writable", b"")
            (self.root / "parts" / "writable").unlink(missing_ok=True)
        except OSError as error:
            hint = "name another with --store or BLOCKSCALE_CACHE"
            raise OSError(f"the store {self.root} cannot be written ({error}); {hint}") from error

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Inside, this process alone makes `key`, where the file system knows locks; the others wait here."""
        path = self.root / "locks" / key
        with contextlib.ExitStack() as stack:
            try:
                import fcntl

                path.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(open(path, "wb")), fcntl.LOCK_EX)
            except (ImportError, OSError):
                pass
            yield

    def _publish(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        temporary = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def default_store() -> Store:
    """The user's store: BLOCKSCALE_CACHE, or blockscale/ in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("BLOCKSCALE_CACHE"):
        return Store(Path(named).expanduser())
    cache = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME") and Path.home() / ".cache")
    return Store(Path(cache) / "blockscale") if cache else private_store()


def private_store() -> Store:
    """This process's own, gone with it: for kernels that no other place can keep."""
    return _store_of(os.getpid())


@functools.cache
def _store_of(process: int) -> Store:
    directory = Path(tempfile.gettempdir()) / f"blockscale-{process}-{secrets.token_hex(8)}"
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Store(directory)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest_of(origin: Any, names: Any) -> str:
    return _digest(_canonical([origin, names]))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sweep(folder: Path) -> None:
    """Removes what processes left behind that died while writing."""
    for path in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
