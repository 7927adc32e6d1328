"""Runs every program on the GPU and writes what came out: `python tests/both/silicon.py [--out FILE] [FAMILY ...]`.

Families run side by side, each in a process of its own, since an illegal instruction ends a process's use of the GPU
and a wrong byte count could make it wait.  Needs numpy, libcuda and a Hopper GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "benchmarks" / "records" / "silicon.json"
SECONDS = 60.0  # that a family may take
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import on_gpu  # noqa: E402
from comparison import FAMILIES, refused, singles  # noqa: E402
from comparison.program import Program, digests  # noqa: E402

FAILED = "failed"


def families() -> list[str]:
    return [*FAMILIES, "f32 conversions", "tensor map bytes", "refused"]


def run_family(name: str) -> dict[str, object]:
    """The digests of a family's programs, by program and array."""
    if name == "tensor map bytes":
        return on_gpu.tensor_map_bytes()
    if name == "refused":
        return {program.name: _refusal(program.name) for program in refused.programs()}
    programs = singles() if name == "f32 conversions" else FAMILIES[name]()
    return {program.name: _digests(program) for program in programs}


def _digests(program: Program) -> dict[str, str]:
    arrays, before = on_gpu.run(program), program.arrays()
    for name in program.inputs:
        if arrays[name].tobytes() != before[name].tobytes():
            raise on_gpu.DriverError(f"{program.name}: its input {name} was written")
    return digests(program, arrays)


def _refusal(name: str) -> str:
    """How the GPU ends a program that it refuses; a process of its own, whose context that ends."""
    command = [sys.executable, __file__, "--refused", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout.strip()


def _run_refused(name: str) -> None:
    program = next(p for p in refused.programs() if p.name == name)
    try:
        on_gpu.run(program)
    except on_gpu.DriverError as error:
        print(str(error).split()[1])
    else:
        print("ran")


def record(wanted: list[str]) -> dict[str, object]:
    """The record of families, each run by a process of its own, all at a time."""
    running = {
        name: subprocess.Popen([sys.executable, __file__, "--family", name], stdout=subprocess.PIPE, text=True)
        for name in wanted
    }
    found: dict[str, object] = {}
    for name, process in running.items():
        try:
            out, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out = ""
        found[name] = json.loads(out) if process.returncode == 0 and out else FAILED
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of: {', '.join(families())}; by default all")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--family", help=argparse.SUPPRESS)
    parser.add_argument("--refused", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.family:
        print(json.dumps(run_family(args.family)))
        return 0
    if args.refused:
        _run_refused(args.refused)
        return 0
    wanted = args.families or families()
    if unknown := [name for name in wanted if name not in families()]:
        parser.error(f"{unknown[0]}: no such family")
    found = record(wanted)
    machine = on_gpu.gpu().description() | {"driver": on_gpu.driver_version(), "date": str(datetime.date.today())}
    failed = [name for name, result in found.items() if result == FAILED]
    if not failed:
        args.out.write_text(json.dumps({"machine": machine, "families": found}, indent=1, sort_keys=True) + "\n")
    print(f"{machine}: {sum(map(len, found.values()))} programs" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
