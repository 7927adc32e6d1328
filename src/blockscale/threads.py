"""Coarse parallelism: whole tiles on Python threads, each with torch's operators on one thread.

A tile takes dozens of short operators. Split each of them over all cores, and every core waits for the slowest at every
operator; on a busy machine that costs tens of times more than it gains. Tiles on threads of their own meet once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def for_each(task: Callable[[T], None], items: Sequence[T]) -> None:
    """`task(item)` for every item, on as many threads as torch uses here; the caller is within `exact_arithmetic`.

    Threads live for the call: a pool that is kept would be dead in a forked child.
    """
    count = torch.get_num_threads()
    if min(count, len(items)) <= 1:
        for item in items:
            task(item)
        return

    def run(item: T) -> None:
        with torch.no_grad():
            task(item)

    def start() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)

    try:
        with ThreadPoolExecutor(min(count, len(items)), initializer=start) as pool:
            list(pool.map(run, items))
    finally:
        torch.set_num_threads(count)  # the number that threads to come start with; `start` has changed it


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """No gradients, and this thread's flushing of subnormal numbers (torch.set_flush_denormal) off for the time."""
    flushes = not bool(torch.tensor(2.0**-127, device="cpu").mul(1.0).ne(0))
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with torch.no_grad():
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)
