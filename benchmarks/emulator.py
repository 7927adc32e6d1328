"""How fast ptxemu runs NVIDIA's 2-CTA 256x256 NVFP4 GEMM: `python benchmarks/emulator.py [--out results.json]`.

The kernel comes from nvidia-cutlass-operators and is called by its own host code.  Its 256-column variant initialises
the barrier of its accumulator with 256 arrivals but arrives 8 times, so that it would wait for ever; the count is
corrected in the PTX before it runs.  Every result is compared with float64 first; a wrong one ends the benchmark.

Seconds are those of the launch alone, process time on one core: compiling, decoding and the comparison are not in it.
Launches without checks (`checks="none"`, which leaves the counters on) and with them take turns, so that both see the
same machine.  Memory is the process's peak so far, everything that it has imported included.

Then one and two processes take turns, with checks, by the clock on the wall, which other work on the machine makes
worth little: "load_average" says how much there was.  Their outputs have to be the same, bit for bit, and no launch
may have a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # spinning BLAS threads make the emulator many times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ptxemu"))

import numpy as np

import ptxemu
from ptxemu.host import installed

SIZES = (512, 2048)
REPEATS = {512: 9, 2048: 3}
CHECKS = ("none", "all")
ARRIVALS = re.compile(r"(mov\.b32\s+(%r\d+), )256(;\s+mbarrier\.init\.shared\.b64\s+\[%r\d+\], \2;)")


class CorrectedDevice(ptxemu.Device):
    """Corrects the arrival count before a launch, and measures the launch."""

    seconds = wall_seconds = 0.0

    def launch(self, ptx: Any, *arguments: Any, **options: Any) -> ptxemu.Report:
        corrected, count = ARRIVALS.subn(r"\g<1>8\3", ptx)
        if count != 1:
            raise SystemExit(f"the kernel has {count} places to correct instead of 1")
        self._load(corrected).program(options["kernel"])  # decoded before the clock starts
        start, wall = time.process_time(), time.perf_counter()
        report = super().launch(corrected, *arguments, **options)
        self.seconds, self.wall_seconds = time.process_time() - start, time.perf_counter() - wall
        return report


def measure(size: int, schedule: str) -> dict[str, Any]:
    """Medians of several launches of a size^3 problem, in turn without and with checks."""
    from nvidia_kernels import BlockScaled, Problem, compiled, mistakes

    case, problem = BlockScaled(tile=(256, 256), cluster=(2, 1), clusters=74), Problem(size, size, size)
    operands = case.operands(problem, seed=0)
    devices = {checks: CorrectedDevice("sm_100a", schedule=schedule, checks=checks) for checks in CHECKS}
    seconds: dict[str, list[float]] = {checks: [] for checks in CHECKS}
    peak = {}
    for _ in range(REPEATS[size]):
        for checks, device in devices.items():
            with installed(device, operands.memory) as emulator:
                function = compiled(case)
                operands.output[:] = 0
                case.call(function, problem, operands)
            if wrong := mistakes(case, operands, problem):
                raise SystemExit(f"{size}^3: {wrong}")
            seconds[checks].append(device.seconds)
            peak.setdefault(checks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    counters = emulator.reports[-1].counters
    median = {checks: statistics.median(times) for checks, times in seconds.items()}
    return {
        "size": size,
        "schedule": schedule,
        "seconds": {checks: [round(s, 4) for s in times] for checks, times in seconds.items()},
        "median_seconds": {checks: round(median[checks], 4) for checks in CHECKS},
        "cost_of_checks": round(median["all"] / median["none"], 3),
        "peak_mib_after_first_run": {checks: round(mib) for checks, mib in peak.items()},
        "warp_instructions": counters["warp_instructions"],
        "warp_instructions_a_second": {
            checks: round(float(str(counters["warp_instructions"])) / median[checks]) for checks in CHECKS
        },
        "asynchronous_operations": counters["asynchronous_operations"],
    }


def divided(size: int, schedule: str, processes: int) -> dict[str, Any]:
    """Medians of launches in one and in several processes, in turn."""
    from nvidia_kernels import BlockScaled, Problem, compiled

    case, problem = BlockScaled(tile=(256, 256), cluster=(2, 1), clusters=74), Problem(size, size, size)
    operands = case.operands(problem, seed=0)
    devices = {n: CorrectedDevice("sm_100a", schedule=schedule, processes=n) for n in (1, processes)}
    seconds: dict[int, list[float]] = {n: [] for n in devices}
    load, outputs = os.getloadavg()[0], []
    for _ in range(REPEATS[size]):
        for n, device in devices.items():
            with installed(device, operands.memory):
                function = compiled(case)
                operands.output[:] = 0
                case.call(function, problem, operands)
            seconds[n].append(device.wall_seconds)
            outputs.append(operands.output.copy())
    if any((output != outputs[0]).any() for output in outputs):
        raise SystemExit(f"{size}^3: results differ with the number of processes")
    median = {n: statistics.median(times) for n, times in seconds.items()}
    return {
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "wall_seconds": {str(n): [round(s, 4) for s in times] for n, times in seconds.items()},
        "speed_up": round(median[1] / median[processes], 3),
    }


def machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else [platform.processor()]
    return {"cpu": names[0], "cores": str(os.cpu_count()), "python": platform.python_version(), "numpy": np.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "emulator.json")
    parser.add_argument("--schedule", default="lazy")
    options = parser.parse_args()
    results, load = [], [round(x, 2) for x in os.getloadavg()]
    for size in SIZES:
        result = measure(size, options.schedule)
        result["processes"] = divided(size, options.schedule, 2)
        results.append(result)
        without, checked = (result["median_seconds"][checks] for checks in CHECKS)
        print(f"{size}^3: {without} s without checks, {checked} s with: {result['cost_of_checks']} times")
        print(f"{size}^3: two processes {result['processes']['speed_up']} times as fast as one")
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_average_before": load,  # process time is longer where other work shares the cores
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
