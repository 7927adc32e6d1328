"""Damage checkpoints and record what becomes of them: read rightly, or refused in one line. Anything else fails.

    python tools/fuzz_checkpoints.py [--count 10000] [--out benchmarks/records/checkpoint-fuzz.json]

The mutations are those of the tests (tests/blockscale/checkpoint_mutations.py), numbered, so that each can be repeated.
"""

import argparse
import collections
import datetime
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "blockscale"))
from checkpoint_mutations import judge, mutate

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("torch", "safetensors", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records" / "checkpoint-fuzz.json")
    args = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    slowest, start = 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.count):
            what = mutate(number, Path(scratch) / "m")
            began = time.perf_counter()
            try:
                outcome = judge(Path(scratch) / "m")
            except Exception as error:
                raise SystemExit(f"mutation {number}, {what}: {type(error).__name__}: {error}") from error
            slowest = max(slowest, time.perf_counter() - began)
            outcomes[outcome] += 1
            kinds[f"{what.partition(' of ')[0].rpartition(': ')[2] if '.json' not in what else 'json'}: {outcome}"] += 1
    record = {
        "date": datetime.date.today().isoformat(),
        "mutations": args.count,
        "outcomes": dict(sorted(outcomes.items())),
        "by_kind": dict(sorted(kinds.items())),
        "slowest_seconds": round(slowest, 3),
        "seconds": round(time.perf_counter() - start, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONS},
    }
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["outcomes"]))


if __name__ == "__main__":
    main()
