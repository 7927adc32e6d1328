"""Times of the CPU backend against its goals: one interleaved run, medians, JSON to benchmarks/records/.

    python benchmarks/cpu.py [--rounds 15] [--out FILE]

- gemm, M=512 N=K=4096, beside torch.matmul on the same operands dequantised to fp32 (goal: 0.7 of its speed);
- what gemm holds in memory beyond operands and output: a subprocess's peak during the call (goal: 64 MiB);
- quantize of a 4096x4096 bf16 tensor beside torchao's quantiser, eager (goal: 3 times as fast) and compiled;
- what `import blockscale` adds to `import torch` (goal: 0.3 s).
Every timed product is first checked against float64 on poisoned output. Exit code 1: one is wrong, or a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import blockscale as bs
from blockscale import reference

M, N, K = 512, 4096, 4096
RECORDS = Path(__file__).parent / "records"


def interleaved(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate in every round; the order turns from round to round, one round warms up."""
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            candidates[name]()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    """For every candidate its seconds, their median, and the baseline's median over it (above 1: faster)."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "ms_median": round(medians[name] * 1e3, 2),
            "speed_vs_baseline": round(medians[baseline] / medians[name], 3),
            "ms": [round(t * 1e3, 2) for t in times],
        }
        for name, times in seconds.items()
    }


def bench_gemm(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    a, b = bs.quantize(torch.randn(M, K)), bs.quantize(torch.randn(N, K))
    a32, b32 = a.dequantize(), b.dequantize()
    a16 = a32.bfloat16()
    out32, out16 = torch.empty(M, N), torch.empty(M, N, dtype=torch.bfloat16)
    for x in (a, a16):
        out32.fill_(float("nan"))
        bs.gemm(x, b, out_dtype=torch.float32, out=out32)
        exact = reference.gemm(x, b)
        reference.check(out32, exact, reference.tolerance(x, b, exact, out_dtype=torch.float32))
    candidates: dict[str, Callable[[], Any]] = {
        "torch.matmul, fp32": lambda: torch.matmul(a32, b32.T, out=out32),
        "gemm, NVFP4 x NVFP4": lambda: bs.gemm(a, b, out_dtype=torch.float32, out=out32),
        "gemm, NVFP4 x NVFP4, bf16 out": lambda: bs.gemm(a, b, out=out16),
        "gemm, bf16 x NVFP4": lambda: bs.gemm(a16, b, out_dtype=torch.float32, out=out32),
        "gemm, fp32 x NVFP4": lambda: bs.gemm(a32, b, out_dtype=torch.float32, out=out32),
    }
    return summary(interleaved(candidates, rounds), "torch.matmul, fp32")


def bench_quantize(rounds: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    torch.manual_seed(0)
    x = torch.randn(4096, 4096).bfloat16()

    def torchao(x: torch.Tensor) -> Any:
        t = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
        return t.qdata, t.scale

    compiled = torch.compile(torchao)
    candidates: dict[str, Callable[[], Any]] = {
        "torchao, eager": lambda: torchao(x),
        "torchao, torch.compile": lambda: compiled(x),
        "blockscale, rtn, linear": lambda: bs.quantize(x, layout="linear"),
        "blockscale, rtn": lambda: bs.quantize(x),
        "blockscale, four_over_six": lambda: bs.quantize(x, method="four_over_six"),
        "blockscale, mse": lambda: bs.quantize(x, method="mse"),
    }
    return summary(interleaved(candidates, rounds), "torchao, eager")


_PEAK = """
import sys, torch, blockscale as bs
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))
a, b = (bs.NVFP4Tensor.load(f"{sys.argv[1]}/{name}") for name in "ab")
out = torch.ones(a.shape[0], b.shape[0], dtype=torch.bfloat16)
small = torch.ones(64, 64)
small @ small  # the matmul library's own start-up is not the product's
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = status("VmRSS")
bs.gemm(a, b, out=out)
print(before, status("VmHWM"))
"""


def bench_memory() -> dict[str, Any]:
    """Peak resident size of a subprocess during one gemm, above what it held before (operands and output)."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        bs.quantize(torch.randn(M, K)).save(f"{folder}/a")
        bs.quantize(torch.randn(N, K)).save(f"{folder}/b")
        command = [sys.executable, "-c", _PEAK, folder]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    above = [(int(peak) - int(before)) / 1024 for before, peak in runs]
    return {"above_operands_and_output_mib": round(max(above), 1), "runs_mib": [round(mib, 1) for mib in above]}


def bench_import(rounds: int) -> dict[str, Any]:
    script = "import time, torch; start = time.perf_counter(); import blockscale; print(time.perf_counter() - start)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(rounds)
    ]
    return {"seconds_added_median": round(statistics.median(seconds), 4), "seconds_added_max": round(max(seconds), 4)}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"blockscale": bs.__version__, **{name: version(name) for name in ("torch", "torchao", "numpy")}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    today = datetime.date.today().isoformat()
    record: dict[str, Any] = {"date": today, "machine": machine()}
    record["gemm_512x4096x4096"] = bench_gemm(arguments.rounds)
    record["gemm_memory"] = bench_memory()
    record["quantize_4096x4096_bf16"] = bench_quantize(arguments.rounds)
    record["import"] = bench_import(max(3, arguments.rounds // 3))
    product, quantiser = record["gemm_512x4096x4096"], record["quantize_4096x4096_bf16"]
    goals = {
        "gemm at least 0.7 of torch.matmul": (product["gemm, NVFP4 x NVFP4"]["speed_vs_baseline"], 0.7, 1),
        "gemm memory under 64 MiB": (record["gemm_memory"]["above_operands_and_output_mib"], 64, -1),
        "quantize at least 3 x torchao eager": (quantiser["blockscale, rtn"]["speed_vs_baseline"], 3, 1),
        "import under 0.3 s": (record["import"]["seconds_added_median"], 0.3, -1),
    }
    record["goals"] = {
        name: {"measured": value, "goal": goal, "met": sign * value >= sign * goal}
        for name, (value, goal, sign) in goals.items()
    }
    record["machine"]["load_average_at_end"] = os.getloadavg()[0]
    text = json.dumps(record, indent=2)
    path = arguments.out or RECORDS / f"cpu-{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    for name, goal in record["goals"].items():
        print(f"{'met   ' if goal['met'] else 'MISSED'} {name}: {goal['measured']}")
    if not all(goal["met"] for goal in record["goals"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
