"""Grouped products of few rows an expert on a Hopper GPU, beside a loop over single products, the package
humming-kernels, and reading the same weights. JSON to records/.

    python benchmarks/grouped.py [--rounds 9] [--shapes E,N,K ...] [--out FILE]

For each shape of weights (experts, N, K) rows are split evenly, 1, 4, 8 or 16 an expert, and as a router would that
sends each of T tokens to 8 experts; some experts then have none. What counts is the weights of the experts that have
rows: `read_us` is the time in which the best of several kernels reads as many bytes and does nothing else, and the goal
is 75% of that rate. The protocol is that of `blockscale bench`: CUDA graphs over cold copies in turn, every result of
every candidate compared with float64 before and after. The loop knows on the host how rows are split, so that it is a
graph of launches; in use it would have to ask. Exit code 1: the goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from blockscale.bench import ceilings, record, rivals
from blockscale.bench.timing import Candidate, Truth, copies, race, truth

GOAL = 0.75
TOP = 8  # experts a token
EVEN = (1, 4, 8, 16)
ROUTED = (1, 16, 64, 128)  # tokens
SHAPES = ((128, 1536, 2048), (128, 2048, 768), (64, 4096, 4096), (256, 7168, 2048), (256, 4096, 7168))
MOST_LAYERS = 8  # cold copies of humming-kernels' weights, which take seconds each
UNIT = 2.0**-6
DTYPE = torch.bfloat16

Launch = Callable[[Any, Tensor], object]


def weights(experts: int, n: int, k: int, device: torch.device) -> bs.NVFP4Tensor:
    """(E, N, K) in layout "fragment": random codes, and scales that all experts share."""
    random = torch.Generator(device).manual_seed(experts * n + k)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=random)
    scales = torch.randint(0x20, 0x50, (n, k // 16), dtype=torch.uint8, device=device, generator=random)
    parts = codes, scales.view(torch.float8_e4m3fn), UNIT
    first = bs.NVFP4Tensor.from_parts(*parts, shape=(n, k), layout="linear").with_layout("fragment")
    units = first.codes.expand(experts, *first.codes.shape).contiguous()
    for own in units[1:]:
        own[..., :1024].random_(0, 256, generator=random)
    return replace(first, codes=units, shape=torch.Size((experts, n, k)))


def expert(w: bs.NVFP4Tensor, e: int) -> bs.NVFP4Tensor:
    return replace(w, codes=w.codes[e], shape=w.shape[1:])


def splits(experts: int) -> Iterator[tuple[str, list[int]]]:
    """What is said of it, and the rows of every expert."""
    for rows in EVEN:
        yield f"{rows} each", [rows] * experts
    for tokens in ROUTED:
        random = torch.Generator().manual_seed(tokens)
        chosen = torch.rand(tokens, experts, generator=random).topk(TOP, 1).indices
        yield f"{tokens} tokens x {TOP}", torch.bincount(chosen.flatten(), minlength=experts).tolist()


def all_truth(x: Tensor, w: bs.NVFP4Tensor, sizes: Sequence[int]) -> Truth:
    parts, start = [], 0
    for e, size in enumerate(sizes):
        if size:
            parts.append(truth(x[start : start + size], expert(w, e).dequantize(), x.dtype))
        start += size
    return Truth(torch.cat([p.exact for p in parts]), torch.cat([p.allowed for p in parts]))


def ours(table: Tensor, x: Tensor) -> Launch:
    return lambda w, out: bs.grouped_gemm(x, w, group_sizes=table, out=out)


def loop(sizes: Sequence[int], x: Tensor) -> Launch:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()

    def launch(w: bs.NVFP4Tensor, out: Tensor) -> None:
        for e, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                bs.gemm(x[start:stop], expert(w, e), out=out[start:stop])

    return launch


class Weights:
    """Cold copies of a weight, as each candidate has it, made when they are first asked for."""

    def __init__(self, experts: int, n: int, k: int, device: torch.device) -> None:
        self.ours = [weights(experts, n, k, device)]
        self.theirs: list[Any] = []
        self.read_us: dict[int, float] = {}

    def copies(self, count: int) -> list[bs.NVFP4Tensor]:
        first = self.ours[0]
        self.ours += [replace(first, codes=first.codes.clone()) for _ in range(count - len(self.ours))]
        return self.ours[:count]

    def layers(self, count: int) -> list[Any]:
        """Of humming-kernels."""
        from humming.layer import HummingLayer

        first = self.ours[0]
        experts, n, k = first.shape
        how = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        parts: dict[str, Tensor] = {}
        while len(self.theirs) < count:
            if not parts:
                linear, unit = first.with_layout("linear"), first.global_scale.expand(experts).contiguous()
                parts = {"weight": linear.codes, "weight_scale": linear.scales, "weight_scale_2": unit}
            layer = HummingLayer(shape_n=n, shape_k=k, num_experts=experts, weight_config=how, torch_dtype=DTYPE)
            layer = layer.to(first.device)
            layer.load_from_tensors(parts)
            layer.transform()
            self.theirs.append(layer)
        return self.theirs[:count]

    def reading(self, nbytes: int, rounds: int) -> float:
        if nbytes not in self.read_us:
            self.read_us[nbytes] = ceilings.reading(nbytes // 4096 * 4096, self.ours[0].device, rounds)
        return self.read_us[nbytes]


def humming(sizes: Sequence[int], x: Tensor, layer: Any) -> Launch:
    """By its own heuristics for so many rows in all."""
    from humming.tune import get_heuristics_config

    form = "grouped_contiguous"
    tuning = json.dumps(get_heuristics_config(layer.humming_config, shape_m=len(x), gemm_type=form))
    ends = torch.tensor([0, *sizes], device=x.device).cumsum(0)
    given = {"compute_config": json.dumps({"gemm_type": form}), "tuning_config": tuning, "expert_layout": ends}
    return lambda layer, out: layer(x, outputs=out, **given)


def candidate(name: str, launch: Launch, operands: Sequence[Any], outs: Sequence[Tensor], nbytes: int) -> Candidate:
    def on(i: int) -> Callable[[], object]:
        return lambda: launch(operands[i % len(operands)], outs[i])

    return Candidate(name, [on(i) for i in range(len(outs))], outs, nbytes)


def measure(w: Weights, name: str, sizes: Sequence[int], rounds: int, skipped: dict[str, str]) -> dict[str, Any]:
    """One product: medians and quartiles of every candidate, and of reading alone."""
    first = w.ours[0]
    experts, n, k = first.shape
    touched = sum(size > 0 for size in sizes)
    nbytes = touched * first.nbytes // experts
    x = torch.randn(sum(sizes), k, device=first.device).to(DTYPE)
    table = torch.tensor(sizes, dtype=torch.int32, device=first.device)
    count = copies(nbytes)
    outs = [[torch.empty(len(x), n, dtype=DTYPE, device=first.device) for _ in range(count)] for _ in range(3)]
    racing = [
        candidate("ours", ours(table, x), w.copies(count), outs[0], nbytes),
        candidate("loop", loop(sizes, x), w.copies(count), outs[1], nbytes),
    ]
    if rivals.HUMMING not in skipped and count <= MOST_LAYERS:
        layers = w.layers(count)
        theirs = candidate("humming", humming(sizes, x, layers[0]), layers, outs[2], nbytes)
        racing.append(replace(theirs, tolerance=rivals.HUMMING_TOLERANCE, repeatable=False))
    times = race(racing, all_truth(x, first, sizes), rounds)
    reads = w.reading(nbytes, rounds)
    quartiles = {name: statistics.quantiles(values, n=4)[::2] for name, values in times.items()}
    return {
        "experts": experts,
        "n": n,
        "k": k,
        "split": name,
        "rows": len(x),
        "most_rows": max(sizes),
        "touched": touched,
        "nbytes": nbytes,
        "us": {name: round(statistics.median(values), 2) for name, values in times.items()},
        "quartiles": {name: [round(us, 2) for us in both] for name, both in quartiles.items()},
        "read_us": round(reads, 2),
        "of_read_rate": round(reads / statistics.median(times["ours"]), 3),
        "config": str(bs.config_for(len(x), n, k, groups=experts)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", default=[",".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "grouped-hopper.json")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    reason = rivals.why_not("humming")
    skipped = {} if reason is None else {rivals.HUMMING: reason}
    found = {**record.circumstances(device, options.rounds), "skipped": skipped, "products": []}
    for shape in options.shapes:
        experts, n, k = map(int, shape.split(","))
        w = Weights(experts, n, k, device)
        for name, sizes in splits(experts):
            made = measure(w, name, sizes, options.rounds, skipped)
            found["products"].append(made)
            options.out.write_text(json.dumps(found) + "\n")
            us = ", ".join(f"{key} {value}" for key, value in made["us"].items())
            print(f"{shape} {name}: {us}; reading {made['read_us']} ({made['of_read_rate']:.0%})", flush=True)
            torch.cuda.empty_cache()
    missed = [p for p in found["products"] if p["most_rows"] <= max(EVEN) and p["of_read_rate"] < GOAL]
    print(f"goals missed: {len(missed)} of {len(found['products'])}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
