"""The timing core: candidates in turn, each a CUDA graph over copies of its weights that no cache can hold.

A candidate launches one product; it has one launch for every cold copy of what it reads. Its graph runs all of them,
as often as a replay of at least `LEAST_LAUNCHES` takes. `race` poisons the results, replays every graph once, compares
every result with float64, and only then times replays: one of each candidate a round, the order turned from round to
round. A wrong result, a launch that cannot be captured, or results that differ between copies end the run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COLD_BYTES = 256 * 2**20  # that the copies of a candidate's weights cover: several times the L2 of any GPU
LEAST_LAUNCHES = 40  # of a replay, so that the events around it cost nothing
ROUNDS = 21


class Wrong(Exception):
    """A candidate's result is not what it must be; the message names candidate, copy and first element."""


@dataclass(frozen=True, eq=False)
class Truth:
    """What every result has to be: float64 (M, N) on the GPU, and how far from it each element may be."""

    exact: Tensor
    allowed: Tensor


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to do a product.

    Attributes:
        launches: for each cold copy, a function that launches the product on the current stream. It waits for nothing.
        results: for each launch the tensor (M, N) that it writes; distinct memory.
        nbytes: what one launch reads of its cold copy.
        tolerance: results may be this many times as far from the truth as the contract allows; 1 but for rivals that
            promise less.
        repeatable: all results have the same bits; true but for rivals that do not promise it.
    """

    name: str
    launches: Sequence[Callable[[], object]]
    results: Sequence[Tensor]
    nbytes: int
    tolerance: float = 1.0
    repeatable: bool = True


def copies(nbytes: int) -> int:
    """How many copies of `nbytes` are cold when they are read in turn."""
    return max(2, math.ceil(COLD_BYTES / max(1, nbytes)))


def truth(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Truth:
    """x (M, K) times weight (N, K) transposed, both exact values on the GPU, and the library's contract for tensor
    cores: rounding of `out_dtype` + (4 + K/1024) x 2^-20 x sum |x||w|."""
    left, right = x.double(), weight.double()
    exact = left @ right.T
    slack = (4 + x.shape[1] / 1024) * 2.0**-20 * (left.abs() @ right.abs_().T)
    info = torch.finfo(out_dtype)
    return Truth(exact, slack + info.eps / 2 * (exact.abs() + slack) + info.smallest_normal * info.eps / 2)


def race(candidates: Sequence[Candidate], right: Truth | None, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a launch of every candidate in every round, after all were checked (`right` is None for ceilings,
    which compute nothing).

    Raises:
        Wrong: a result is. ValueError: two candidates share a name, or one has too few copies to be cold.
        RuntimeError: CUDA refuses, or a launch cannot be captured.
    """
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise ValueError(f"candidates: {', '.join(names)}, expected distinct names")
    for candidate in candidates:
        _check_cold(candidate)
    timers = [_Timer(candidate) for candidate in candidates]
    if right is not None:
        for timer in timers:
            timer.check(right)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for timer in timers[i % len(timers) :] + timers[: i % len(timers)]:
            timer.start()
        torch.cuda.synchronize()
        if i:  # the first round warms up
            for timer in timers:
                times[timer.name].append(timer.microseconds())
    if right is not None:
        for timer in timers:
            timer.check(right)  # what was timed is still right
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def _check_cold(candidate: Candidate) -> None:
    count = len(candidate.launches)
    if count != len(candidate.results):
        raise ValueError(f"{candidate.name}: {count} launches, but {len(candidate.results)} results")
    if count < copies(candidate.nbytes):
        raise ValueError(
            f"{candidate.name}: {count} copies of {candidate.nbytes} bytes, expected {copies(candidate.nbytes)}: "
            f"fewer than {COLD_BYTES} bytes stay in a cache"
        )


def compare(candidate: Candidate, right: Truth) -> None:
    """Raises Wrong unless every result is within its tolerance of the truth, and bit-equal to the first one."""
    first = candidate.results[0]
    for i, result in enumerate(candidate.results):
        if i and candidate.repeatable:
            if not torch.equal(result, first):
                at = _first(result != first)
                values = f"{float(result[at])!r}, {float(first[at])!r}"
                raise Wrong(f"{candidate.name}: copy {i} is not copy 0 at {at}: {values}")
            continue
        error = (result.double() - right.exact).abs()
        bad = ~(error <= candidate.tolerance * right.allowed)  # NaN is bad too
        if bool(bad.any()):
            at = _first(bad)
            raise Wrong(
                f"{candidate.name}: {int(bad.sum())} of {bad.numel()} elements are wrong; the first at {at}: got "
                f"{float(result[at])!r}, exact {float(right.exact[at])!r}, allowed {float(right.allowed[at]):.3e}"
            )


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in bad.nonzero()[0])


class _Timer:
    """A candidate's graph, and the events around a replay."""

    def __init__(self, candidate: Candidate) -> None:
        self.name, self._candidate = candidate.name, candidate
        rounds = math.ceil(LEAST_LAUNCHES / len(candidate.launches))
        self._launches = rounds * len(candidate.launches)
        self._graph = torch.cuda.CUDAGraph()
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call] # which torch captures on, once it is warm
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for launch in candidate.launches:
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=side):
            for _ in range(rounds):
                for launch in candidate.launches:
                    launch()

    def check(self, right: Truth) -> None:
        """Poisons every result, replays the graph, and compares. Raises Wrong."""
        for result in self._candidate.results:
            result.fill_(math.nan)
        self._graph.replay()
        torch.cuda.synchronize()
        compare(self._candidate, right)

    def start(self) -> None:
        """A replay between two events, after one that keeps the GPU busy until they are all enqueued."""
        begin, end = self._events
        self._graph.replay()
        begin.record()
        self._graph.replay()
        end.record()

    def microseconds(self) -> float:
        begin, end = self._events
        return float(begin.elapsed_time(end)) * 1e3 / self._launches
