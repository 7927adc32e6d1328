"""What a warm call costs before the GPU has anything to do: Python, checks, TVM-FFI, the host code, an empty launch.

    python benchmarks/call.py [--calls 20000] [--rounds 15] [--out FILE]

The artefact is the real one for sm_100a, its library loaded by the real launcher; CUDA below it is empty_cuda.c, whose
launches return at once. Operands are prebuilt and `out` is given; every call is validated. Goal: 10 us. Also measured:
compiling that kernel with nothing in the store (goal: 3 s), and taking it from the store in a new process (goal: 1 s).
Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import blockscale as bs
from blockscale import plan, store
from blockscale.launch import cuda, emulated
from blockscale.problem import Problem, target_named

HERE = Path(__file__).parent
M, N, K = 128, 4096, 7168
GOAL_US, GOAL_COMPILE, GOAL_HIT = 10.0, 3.0, 1.0
TARGET = target_named("sm_100a")


def empty_cuda(directory: str) -> ctypes.CDLL:
    """Builds empty_cuda.c and makes its functions those of the process."""
    library = f"{directory}/libempty.so"
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-o", library, HERE / "empty_cuda.c"], check=True)
    return ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


class EmptyLauncher(cuda.CudaLauncher):
    """The real launcher for memory of the CPU: the device's properties are given, not asked for."""

    def __init__(self) -> None:
        self.target, self.device, self.index = TARGET, torch.device("cpu"), 0
        self.one = torch.ones(())
        self.plans, self.known = {}, {}


def microseconds(call: Any, calls: int, rounds: int) -> list[float]:
    """Of one call, in each round."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return times[1:]


def warm_calls(directory: str, calls: int, rounds: int) -> dict[str, list[float]]:
    empty = empty_cuda(directory)
    a, b = bs.quantize(torch.randn(M, K)), bs.quantize(torch.randn(N, K))
    out = torch.empty(M, N, dtype=torch.bfloat16)
    scale = torch.ones(())
    config = bs.config_for(M, N, K, gpu="b200")
    kinds = {
        "gemm(a, b, out=)": lambda: bs.gemm(a, b, out=out),
        "and alpha=0.5": lambda: bs.gemm(a, b, out=out, alpha=0.5),
        "and alpha=tensor": lambda: bs.gemm(a, b, out=out, alpha=scale),
        "and config=": lambda: bs.gemm(a, b, out=out, config=config),
        "without out=": lambda: bs.gemm(a, b),
    }
    cpu_only = {"_cuda_getCurrentRawStream": lambda index: 0, "_cuda_getDevice": lambda: 0}
    names = {name: value for name, value in cpu_only.items() if not hasattr(torch._C, name)}
    token = emulated._active.set(EmptyLauncher())  # type: ignore[arg-type]
    with mock.patch.multiple(torch._C, create=True, **names), mock.patch.object(cuda, "open_cuda", return_value=empty):
        try:
            times = {name: microseconds(call, calls, rounds) for name, call in kinds.items()}
        finally:
            emulated._active.reset(token)
    expected = calls * (rounds + 1) * len(kinds)
    launched = ctypes.c_long.in_dll(empty, "launches").value
    assert launched == expected, f"{launched} launches for {expected} calls"
    return times


IN_A_NEW_PROCESS = """
import sys, time
import torch, blockscale
from blockscale import plan, store
from blockscale.launch import cuda
from blockscale.problem import Problem, target_named
import benchmarks_call as call
problem, target = Problem(call.M, call.N, call.K), target_named("sm_100a")
cuda.open_cuda = lambda: call.empty_cuda(sys.argv[1])
cuda.open_cuda()
config = blockscale.config_for(call.M, call.N, call.K, gpu="b200")
start = time.perf_counter()
function = cuda.load(plan.artefact(problem, target, config, store.default_store()))
print(time.perf_counter() - start, "cutlass" in sys.modules)
"""


def compile_and_hit(directory: str) -> tuple[float, float]:
    """Seconds to compile into an empty store, and to load from it in a new process, torch imported before both."""
    import tvm_ffi  # noqa: F401 (torch's own start is not the compiler's)

    problem, config = Problem(M, N, K), bs.config_for(M, N, K, gpu="b200")
    start = time.perf_counter()
    plan.artefact(problem, TARGET, config, store.default_store())
    compiled = time.perf_counter() - start
    source = IN_A_NEW_PROCESS.replace("import benchmarks_call as call", "sys.path.insert(0, sys.argv[2]); import call")
    run = subprocess.run(
        [sys.executable, "-c", source, directory, str(HERE)], check=True, capture_output=True, text=True
    )
    seconds, brought_compiler = run.stdout.split()
    assert brought_compiler == "False", "a hit imported the compiler"
    return compiled, float(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "records" / "call.json")
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, BLOCKSCALE_CACHE=f"{directory}/store"):
        compiled, hit = compile_and_hit(directory)
        times = warm_calls(directory, options.calls, options.rounds)
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {"platform": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl")},
        "load_average_before": [round(x, 2) for x in load],
        "size": [M, N, K],
        "us_median": medians,
        "us": {name: [round(x, 2) for x in values] for name, values in times.items()},
        "seconds_compile": round(compiled, 2),
        "seconds_from_store_in_a_new_process": round(hit, 3),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in record if k != "us"}, indent=1))
    missed = [name for name, us in medians.items() if us > GOAL_US and "out=" in name and "without" not in name]
    missed += ["compile"] * (compiled > GOAL_COMPILE) + ["store"] * (hit > GOAL_HIT)
    print(f"goals missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
