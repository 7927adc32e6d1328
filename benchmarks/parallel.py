"""A column and a row parallel layer on several GPUs against the same pair on one: does it agree, and how does it scale?

    python benchmarks/parallel.py [--ranks 2] [--rounds 30] [--out FILE]     # measure, write a JSON record
    python benchmarks/parallel.py --check                                    # compare results alone

The pair is a feed-forward block's: up (HIDDEN x WIDTH), gelu, down (WIDTH x HIDDEN), bf16 activations, NVFP4 weights,
the sm90 backend (weights expanded for every call, so figures say nothing about NVFP4 kernels). Sizes of M: decode 1
and 16, prefill 512 and 4096. Every rank times each round with CUDA events, and a round is as slow as its slowest rank.
Each rank also runs the whole pair by itself, in the same process and interleaved, in alternating order. Times are
medians of rounds. Excluded: quantising, sharding, the first three rounds. Exit code 1: results leave the contract.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import blockscale as bs
from blockscale import reference
from blockscale.parallel import ColumnParallel, RowParallel

HIDDEN, WIDTH = 4096, 14336
SIZES = {"decode 1": 1, "decode 16": 16, "prefill 512": 512, "prefill 4096": 4096}
INNER = 10  # calls a round
CHECKED = 64, 256, 768  # M, HIDDEN, WIDTH of the comparison of results


def block(hidden: int, width: int) -> nn.Sequential:
    """The same on every rank: made and quantised on the CPU from one seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden)).bfloat16()
    bs.nn.quantize_model(model, backend="sm90")
    return model.cuda()


def check(mesh: Any) -> None:
    """Both layers against float64, on positive data. Raises AssertionError."""
    m, hidden, width = CHECKED
    whole = block(hidden, width)
    mine = parallelize_module(block(hidden, width), mesh, {"0": ColumnParallel(), "2": RowParallel()})
    torch.manual_seed(1)
    x = torch.rand(m, hidden, device="cuda").bfloat16()
    h = mine[1](mine[0](x))
    parts = [torch.empty_like(h) for _ in range(mesh.size())]
    dist.all_gather(parts, h)
    y, together = mine[2](h), torch.cat(parts, dim=-1)
    torch.testing.assert_close(together, whole[1](whole[0](x)))
    layer = whole[2].cpu()
    a, bias = together.cpu(), layer.bias.detach()
    exact = reference.gemm(a, layer.weight, bias=bias)
    slack = (4 + width / 1024) * 2.0**-20
    reference.check(y, exact, reference.tolerance(a, layer.weight, exact, bias=bias, c=slack))


def time_round(model: nn.Module, x: Tensor) -> float:
    """Microseconds a call, of this rank."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(INNER):
        model(x)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1000 / INNER


def slowest(microseconds: float) -> float:
    worst = torch.tensor(microseconds, device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def measure(mesh: Any, rounds: int) -> dict[str, Any]:
    """For each size the medians of one GPU and of all."""
    whole = block(HIDDEN, WIDTH)
    sharded = parallelize_module(block(HIDDEN, WIDTH), mesh, {"0": ColumnParallel(), "2": RowParallel()})
    found: dict[str, Any] = {}
    for name, m in SIZES.items():
        x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
        times: dict[str, list[float]] = {"one": [], "all": []}
        for number in range(rounds + 3):
            order = [("one", whole), ("all", sharded)]
            for kind, model in order if number % 2 else reversed(order):
                took = slowest(time_round(model, x))
                if number >= 3:
                    times[kind].append(took)
        one, every = (statistics.median(times[kind]) for kind in ("one", "all"))
        assert one > 0
        assert every > 0
        found[name] = {"m": m, "one_us": round(one, 1), "all_us": round(every, 1), "speedup": round(one / every, 3)}
    return found


@torch.no_grad()
def work(rank: int, ranks: int, options: argparse.Namespace, meeting: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    mesh = init_device_mesh("cuda", (ranks,))
    check(mesh)
    if not options.check:
        found = measure(mesh, options.rounds)
        if rank == 0:
            write(found, ranks, options)
    dist.destroy_process_group()


def write(found: dict[str, Any], ranks: int, options: argparse.Namespace) -> None:
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "ranks": ranks,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "backend": "sm90",
        "hidden": HIDDEN,
        "width": WIDTH,
        "rounds": options.rounds,
        "calls_a_round": INNER,
        "sizes": found,
    }
    for name, row in found.items():
        print(
            f"{name:>13}: one GPU {row['one_us']:9.1f} us, {ranks} GPUs {row['all_us']:9.1f} us, {row['speedup']:.2f}x"
        )
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"{options.ranks} GPUs are needed; torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        torch.multiprocessing.spawn(work, (options.ranks, options, meeting), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
