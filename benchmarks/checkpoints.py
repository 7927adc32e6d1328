"""Loading and converting checkpoints against their goals: speed beside safetensors' own, and memory. JSON to records/.

    python benchmarks/checkpoints.py [--rounds 9] [--gigabytes 2] [--out FILE]

- loading every tensor and touching every page of it, beside safetensors' load_file and the same touching (goal: 0.6 of
  its speed), with tensors that lie on 16-byte boundaries of the file (mapped) and with such that do not (read);
- what loading holds beyond the model, all at once and a tensor at a time (goal: 1.3 x the largest tensor);
- peak resident size of `blockscale convert` on a checkpoint of 2 GB (goal: under 1 GB), and its time.
The files are in the page cache. Everything is synthetic: random codes and scales. Exit code 1: a goal is missed.
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
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import blockscale as bs
from blockscale.checkpoints.writer import FileWriter, Spec

N, K = 8192, 8192
EMBEDDING = (32_000, 4096)
RECORDS = Path(__file__).parent / "records"
PAGE = 4096


def specs(layers: int) -> Iterator[Spec]:
    yield Spec("model.embed_tokens.weight", "BF16", EMBEDDING)
    for i in range(layers):
        stem = f"model.layers.{i}.proj."
        yield Spec(f"{stem}weight", "U8", (N, K // 2))
        yield Spec(f"{stem}weight_scale", "F8_E4M3", (N, K // 16))
        yield Spec(f"{stem}weight_scale_2", "F32", ())
        yield Spec(f"{stem}input_scale", "F32", ())


def write(path: Path, layers: int, *, aligned: bool = True) -> int:
    """A checkpoint in ModelOpt's convention; its size in bytes. The header is made as long as `aligned` asks."""
    wanted = list(specs(layers))
    for padding in range(0, 16, 4):
        path.unlink(missing_ok=True)
        with FileWriter(path, wanted, {"format": "pt", "padding": "x" * padding}) as writer:
            for spec in wanted:
                writer.write(spec.name, data(spec))
        first = next(e for e in bs.checkpoints.Checkpoint(path).source.entries.values() if e.dtype == "U8")
        if (first.start % 16 == 0) == aligned:
            return path.stat().st_size
    raise AssertionError("no padding gives this alignment")


def data(spec: Spec) -> torch.Tensor:
    if spec.dtype == "F32":
        return torch.tensor(1e-3)
    top = 127 if spec.dtype == "F8_E4M3" else 256
    block = torch.randint(0, top, (1 << 16,), dtype=torch.uint8)
    return block.repeat(-(-spec.nbytes // len(block)))[: spec.nbytes]


def touch(t: torch.Tensor) -> None:
    t.contiguous().view(-1).view(torch.uint8)[::PAGE].sum()


def load_theirs(path: Path) -> None:
    for t in load_file(path).values():
        touch(t)


def load_ours(path: Path) -> None:
    for t in dict(bs.load_checkpoint(path)).values():
        for part in (t.codes, t.scales) if isinstance(t, bs.NVFP4Tensor) else (t,):
            touch(part)


def bench_loading(folder: Path, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, aligned in (("aligned", True), ("not aligned", False)):
        path = folder / f"{aligned}.safetensors"
        size = write(path, 20, aligned=aligned)
        candidates: dict[str, Callable[[Path], None]] = {"safetensors": load_theirs, "blockscale": load_ours}
        seconds: dict[str, list[float]] = {key: [] for key in candidates}
        for i in range(rounds + 1):
            for key in sorted(candidates, reverse=i % 2 == 0):
                start = time.perf_counter()
                candidates[key](path)
                if i:
                    seconds[key].append(time.perf_counter() - start)
        medians = {key: statistics.median(times) for key, times in seconds.items()}
        found[name] = {
            "bytes": size,
            **{f"{key}_gb_per_s": round(size / medians[key] / 1e9, 2) for key in candidates},
            "speed_vs_safetensors": round(medians["safetensors"] / medians["blockscale"], 3),
            "ms": {key: [round(t * 1e3, 1) for t in times] for key, times in seconds.items()},
        }
        path.unlink()
    return found


_PEAK = """
import sys, torch, blockscale as bs
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024
def touch(t):
    for part in (t.codes, t.scales) if isinstance(t, bs.NVFP4Tensor) else (t,):
        part.contiguous().view(-1).view(torch.uint8)[::4096].sum()
checkpoint = bs.load_checkpoint(sys.argv[1])
touch(checkpoint["model.layers.0.proj.weight"])  # what the first use of torch's operators takes is not the loading's
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before, kept = status("VmRSS"), []
for name in checkpoint:
    t = checkpoint[name]
    touch(t)
    if sys.argv[2] == "keep":
        kept.append(t)
print(status("VmHWM") - before)
"""


def bench_memory(folder: Path) -> dict[str, Any]:
    """Peak resident size of a subprocess above what it held before, in units of the largest tensor."""
    largest = EMBEDDING[0] * EMBEDDING[1] * 2
    found: dict[str, Any] = {"largest_tensor_bytes": largest}
    for aligned in (True, False):
        path = folder / "x.safetensors"
        size = write(path, 20, aligned=aligned)
        for way in ("keep", "drop"):
            command = [sys.executable, "-c", _PEAK, str(path), way]
            peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            above = peak - (size if way == "keep" else 0)
            name = f"{'all at once' if way == 'keep' else 'a tensor at a time'}, {'' if aligned else 'not '}aligned"
            found[name] = {"peak_bytes": peak, "above_in_largest_tensors": round(above / largest, 3)}
        path.unlink()
    return found


def bench_convert(folder: Path, gigabytes: float) -> dict[str, Any]:
    """`blockscale convert` as a process: its peak resident size and its time."""
    source = folder / "source"
    source.mkdir()
    size = write(source / "model.safetensors", max(1, int((gigabytes * 1e9 - 262e6) // 37.75e6) + 1))
    found: dict[str, Any] = {"bytes": size}
    for to in ("compressed-tensors", "blockscale"):
        script = (
            "import sys; from blockscale.cli.app import app; app(sys.argv[1:], standalone_mode=False); "
            "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
        )
        command = [sys.executable, "-c", script, "convert", str(source), str(folder / to), "--to", to]
        start = time.perf_counter()
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        found[to] = {"peak_mib": round(int(run.stdout.split()[-1]) / 1024, 1), "seconds": round(seconds, 1)}
    return found


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "safetensors", "numpy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    today = datetime.date.today().isoformat()
    record: dict[str, Any] = {"date": today, "machine": machine()}
    with tempfile.TemporaryDirectory() as scratch:
        record["loading"] = bench_loading(Path(scratch), arguments.rounds)
        record["memory"] = bench_memory(Path(scratch))
        record["convert"] = bench_convert(Path(scratch), arguments.gigabytes)
    speeds = [record["loading"][name]["speed_vs_safetensors"] for name in ("aligned", "not aligned")]
    above = [found["above_in_largest_tensors"] for found in record["memory"].values() if isinstance(found, dict)]
    peaks = [found["peak_mib"] for found in record["convert"].values() if isinstance(found, dict)]
    goals = {
        "loading at least 0.6 of safetensors": (min(speeds), 0.6, 1),
        "memory within 1.3 largest tensors above the model": (max(above), 1.3, -1),
        "convert under 1 GB (953 MiB)": (max(peaks), 953.0, -1),
    }
    record["goals"] = {
        name: {"measured": value, "goal": goal, "met": sign * value >= sign * goal}
        for name, (value, goal, sign) in goals.items()
    }
    record["machine"]["load_average_at_end"] = os.getloadavg()[0]
    path = arguments.out or RECORDS / f"checkpoints-{today}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    for name, goal in record["goals"].items():
        print(f"{'met   ' if goal['met'] else 'MISSED'} {name}: {goal['measured']}")
    if not all(goal["met"] for goal in record["goals"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
