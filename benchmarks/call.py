"""What a warm call costs before the GPU has anything to do: Python, checks, TVM-FFI, the host code, an empty launch.

    python benchmarks/call.py [--calls 20000] [--rounds 15] [--out FILE]

The artefact is the real one for sm_100a, its library loaded by the real launcher; CUDA below it is empty_cuda.c, whose
launches return at once: on a GPU the driver's part comes on top. A tensor alpha lies on the CPU here, so its value is
checked at every call, which on a GPU it is not. Operands are prebuilt and `out` is given, but for the last kind of
call; every call is validated. Goal: 10 us, where `out` is given. Also measured: compiling that kernel with nothing in
the store (goal: 3 s), and taking it from the store in a new process (goal: 1 s; imports not counted). Goals are judged
by processor time, which other work on the machine changes less than wall time, which is in the record beside it: of
this thread for a call, of this process and its children for the two others. The load before is in the record too. Exit
code 1: a goal is missed.
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


Times = dict[str, list[float]]
"""In each round: "cpu" and "wall"."""


def processor_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def microseconds(call: Any, calls: int, rounds: int) -> Times:
    """Of one call."""
    times: Times = {"cpu": [], "wall": []}
    for i in range(rounds + 1):
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            call()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if i:
            times["cpu"].append(round(cpu / calls * 1e6, 2))
            times["wall"].append(round(wall / calls * 1e6, 2))
    return times


def warm_calls(directory: str, calls: int, rounds: int) -> dict[str, Times]:
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


# Its arguments: a directory for the library of empty_cuda.c, and the directory of this file.
IN_A_NEW_PROCESS = """
import sys, time
import torch, blockscale
from blockscale import plan, store
from blockscale.launch import cuda
from blockscale.problem import Problem, target_named
sys.path.insert(0, sys.argv[2])
import call
problem, target = Problem(call.M, call.N, call.K), target_named("sm_100a")
cuda.open_cuda = lambda: call.empty_cuda(sys.argv[1])
cuda.open_cuda()
config = blockscale.config_for(call.M, call.N, call.K, gpu="b200")
wall, cpu = time.perf_counter(), call.processor_seconds()
function = cuda.load(plan.artefact(problem, target, config, store.default_store()))
print(call.processor_seconds() - cpu, time.perf_counter() - wall, "cutlass" in sys.modules)
"""


def compile_and_hit(directory: str) -> dict[str, dict[str, float]]:
    """Seconds to compile into an empty store, and to load from it in a new process, torch imported before both."""
    import tvm_ffi  # noqa: F401 (torch's own start is not the compiler's)

    problem, config = Problem(M, N, K), bs.config_for(M, N, K, gpu="b200")
    wall, cpu = time.perf_counter(), processor_seconds()
    plan.artefact(problem, TARGET, config, store.default_store())
    cpu, wall = processor_seconds() - cpu, time.perf_counter() - wall
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, directory, str(HERE)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    *hit, brought_compiler = run.stdout.split()
    assert brought_compiler == "False", "a hit imported the compiler"
    hit_cpu, hit_wall = (round(float(seconds), 3) for seconds in hit)
    return {
        "compile": {"cpu": round(cpu, 2), "wall": round(wall, 2)},
        "from_store_in_a_new_process": {"cpu": hit_cpu, "wall": hit_wall},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "records" / "call.json")
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, BLOCKSCALE_CACHE=f"{directory}/store"):
        seconds = compile_and_hit(directory)
        times = warm_calls(directory, options.calls, options.rounds)
    medians = {
        name: {kind: round(statistics.median(rounds), 2) for kind, rounds in by_kind.items()}
        for name, by_kind in times.items()
    }
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {"platform": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl")},
        "load_average_before": [round(x, 2) for x in load],
        "size": [M, N, K],
        "us_median": medians,
        "seconds": seconds,
        "us": times,
    }
    options.out.write_text(json.dumps(record) + "\n")
    print(json.dumps({k: record[k] for k in record if k != "us"}, indent=1))
    missed = [name for name, us in medians.items() if us["cpu"] > GOAL_US and name != "without out="]
    goals = {"compile": GOAL_COMPILE, "from_store_in_a_new_process": GOAL_HIT}
    missed += [name for name, goal in goals.items() if seconds[name]["cpu"] > goal]
    print(f"goals missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
