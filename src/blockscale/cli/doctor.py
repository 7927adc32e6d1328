"""`blockscale doctor`: what this machine has, and which backends can run on it."""

import importlib.metadata
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.table import Table
from rich.text import Text

import blockscale
from blockscale.cli.terminal import FAILED, AsJson, output, plain_table, print_json, refusals
from blockscale.compile import INSTALL, c_compiler
from blockscale.problem import compiled_for, target_of_capability
from blockscale.store import default_store

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """`kernels` is the architecture whose kernels run on it; None: this version has none for it."""

    name: str
    capability: str
    memory_gib: float
    kernels: str | None


@dataclass(frozen=True)
class Cuda:
    """What torch says about CUDA; `problem` is why it sees no GPU."""

    built_for: str | None
    driver: str | None
    gpus: Sequence[Gpu]
    problem: str | None


@dataclass(frozen=True)
class Findings:
    """`backends` holds None for one that can run here, else the reason why not."""

    blockscale: str
    python: str
    platform: str
    torch: str
    threads: int
    cuda: Cuda
    cute_dsl: str | None
    tvm_ffi: str | None
    c_compiler: str | None
    kernel_store: str
    backends: Mapping[str, str | None]


def doctor(as_json: AsJson = False) -> None:
    """Show Python, torch, GPUs and compiler, and which backends can run here."""
    with refusals(as_json):
        findings = examine()
    if as_json:
        print_json(asdict(findings))
    else:
        show(findings)
    if all(findings.backends.values()):
        typer.echo("blockscale: no backend can run here", err=True)
        raise typer.Exit(FAILED)


def examine() -> Findings:
    return Findings(
        blockscale=blockscale.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        platform=platform.platform(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        cuda=examine_cuda(),
        cute_dsl=installed_version("nvidia-cutlass-dsl"),
        tvm_ffi=installed_version("apache-tvm-ffi"),
        c_compiler=shlex.join(c_compiler() or []) or None,
        kernel_store=str(default_store().root),
        backends=blockscale.available_backends(),
    )


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_cuda() -> Cuda:
    """Asks torch alone; a driver that is missing, too old or broken becomes `problem`, never an exception."""
    built_for = torch.version.cuda
    if built_for is None:
        return Cuda(None, driver_version(), [], "this torch is built without CUDA")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = [describe(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
            problem = None if gpus else "no GPU found"
        except (RuntimeError, AssertionError) as error:
            gpus, problem = [], str(error)
    if problem and caught:
        problem = str(caught[0].message)
    return Cuda(built_for, driver_version(), gpus, problem)


def describe(properties: "torch.cuda._CudaDeviceProperties") -> Gpu:
    capability = f"{properties.major}.{properties.minor}"
    target = target_of_capability((properties.major, properties.minor))
    kernels = None if target is None else target.arch
    return Gpu(properties.name, capability, round(properties.total_memory / 2**30, 1), kernels)


def driver_version() -> str | None:
    """The kernel driver's version, such as "580.65.06"; None where Linux does not show one. Needs no NVML."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def show(findings: Findings) -> None:
    console = output()
    console.print(machine_table(findings), "")
    console.print(backend_table(findings.backends))


def machine_table(findings: Findings) -> Table:
    cuda = findings.cuda
    table = plain_table("This machine", show_header=False)
    rows = [
        ("blockscale", findings.blockscale),
        ("Python", findings.python),
        ("platform", findings.platform),
        ("torch", f"{findings.torch}, {findings.threads} threads"),
        ("CUDA", f"torch is built for {cuda.built_for or 'none'}, driver {cuda.driver or 'not found'}"),
        *(
            (
                f"GPU {i}",
                f"{g.name}, sm_{g.capability.replace('.', '')}, {g.memory_gib} GiB"
                + (f"; no kernels for it, they are for {compiled_for()}" if g.kernels is None else ""),
            )
            for i, g in enumerate(cuda.gpus)
        ),
        *([("GPU", cuda.problem)] if cuda.problem else []),
        ("CuTe DSL", findings.cute_dsl or f"not installed; to compile GPU kernels: {INSTALL}"),
        ("TVM-FFI", findings.tvm_ffi or f"not installed; it calls compiled kernels: {INSTALL}"),
        (
            "C compiler",
            findings.c_compiler or "not found; it links kernels for other machines, and builds the emulator's",
        ),
        ("kernel store", findings.kernel_store),
    ]
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def backend_table(backends: Mapping[str, str | None]) -> Table:
    table = plain_table("Backends")
    for heading in ("backend", "runs here", "reason"):
        table.add_column(heading)
    for name, reason in backends.items():
        table.add_row(name, "[red]no[/]" if reason else "[green]yes[/]", Text(reason or ""))
    return table
