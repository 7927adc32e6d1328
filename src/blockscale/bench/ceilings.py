"""What the GPU can do at best, measured in the run that it is compared with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from blockscale.bench.timing import Candidate, copies, medians, race

COPY_BYTES = 2**31
MATMUL = 8192


def reading(nbytes: int, device: torch.device, rounds: int) -> float:
    """Microseconds to read `nbytes` once, cold, and do nothing else: the best of several kernels."""
    from blockscale.bench.triton_kernels import READS, read

    words = nbytes // 4
    sources = [torch.randint(-9, 9, (words,), dtype=torch.int32, device=device) for _ in range(copies(nbytes))]
    sinks = [torch.empty(4096, dtype=torch.int32, device=device) for _ in sources]

    def candidate(how: tuple[int, int, int]) -> Candidate:
        launches = [partial(read, source, sink, how) for source, sink in zip(sources, sinks, strict=True)]
        return Candidate(f"read {how}", launches, sinks, nbytes)

    return min(medians(race([candidate(how) for how in READS], None, rounds)).values())


def copying(device: torch.device, rounds: int) -> float:
    """GB/s of a kernel that reads `COPY_BYTES` and writes as many, both together; a plain copy would be the copy
    engine's in a graph."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=device).random_()
    targets = [torch.empty_like(source) for _ in range(2)]
    launches = [partial(torch.bitwise_not, source, out=target) for target in targets]
    (us,) = medians(race([Candidate("copy", launches, targets, COPY_BYTES)], None, rounds)).values()
    return 2 * COPY_BYTES / us / 1e3


def multiplying(device: torch.device, rounds: int) -> dict[str, float]:
    """TFLOP/s of torch.matmul, 8192 x 8192 x 8192, in bf16 and fp16, on normally distributed operands."""
    candidates = [_square(name, dtype, device) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))]
    times = medians(race(candidates, None, rounds))
    return {name: 2 * MATMUL**3 / us / 1e6 for name, us in times.items()}


def _square(name: str, dtype: torch.dtype, device: torch.device) -> Candidate:
    def operand() -> Tensor:
        return torch.randn(MATMUL, MATMUL, dtype=torch.float32, device=device).to(dtype)

    left = operand()
    rights = [operand() for _ in range(copies(left.nbytes))]
    results = [torch.empty_like(left) for _ in rights]
    launches = [partial(torch.matmul, left, right, out=out) for right, out in zip(rights, results, strict=True)]
    return Candidate(name, launches, results, left.nbytes)
