"""Coarse parallelism: whole tiles on Python threads, each with torch's operators on one thread.

A tile takes dozens of short operators. Split each of them over all cores, and every core waits for the slowest at every
operator; on a busy machine that costs tens of times more than it gains. Tiles on threads of their own meet once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_pools: dict[int, ThreadPoolExecutor] = {}
_starting = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork


def map_each(task: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`task(item)` for every item, on as many threads as torch uses here; the caller is within `exact_arithmetic`."""
    count = torch.get_num_threads()
    if min(count, len(items)) <= 1:
        return [task(item) for item in items]
    inference = torch.is_inference_mode_enabled()

    def run(item: T) -> R:
        with torch.inference_mode(inference), torch.no_grad():
            return task(item)

    return list(_pool(count).map(run, items))


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """The caller's settings that would change bits or write a graph are off for the time: gradients, autocast, and
    this thread's flushing of subnormal numbers (torch.set_flush_denormal)."""
    flushes = not bool(torch.tensor(2.0**-127, dtype=torch.float32, device="cpu").mul(1.0).ne(0))
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _pool(count: int) -> ThreadPoolExecutor:
    """A pool of `count` threads that run torch's operators on one thread each, made once a process."""
    with _starting:
        if count not in _pools:
            together = threading.Barrier(count)

            def start() -> None:
                torch.get_num_threads()  # a thread's first look sets its number to the process's; only then change it
                torch.set_num_threads(1)
                torch.set_flush_denormal(False)

            pool = ThreadPoolExecutor(count, thread_name_prefix="blockscale", initializer=start)
            list(pool.map(lambda _: together.wait(), range(count)))  # every thread has started
            torch.set_num_threads(count)  # `start` has changed the number that threads to come begin with
            _pools[count] = pool
        return _pools[count]
