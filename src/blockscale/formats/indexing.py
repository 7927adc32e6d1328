"""What an index of a batch of matrices may be: rows and columns are slices, the rest as Python has it."""

from __future__ import annotations

from typing import Any


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """An entry for each of `ndim` dimensions. Raises IndexError, TypeError, ValueError: what is no such index."""
    index = index if isinstance(index, tuple) else (index,)
    if index.count(Ellipsis) > 1 or len(index) - index.count(Ellipsis) > ndim:
        raise IndexError(f"index: {len(index)} entries for {ndim} dimensions")
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    fill = (slice(None),) * (ndim - (len(index) - index.count(Ellipsis)))
    full = (*index[:at], *fill, *index[at + 1 :])
    for entry in full[:-2]:
        if isinstance(entry, bool) or not isinstance(entry, (int, slice)):
            raise TypeError(f"index: {type(entry).__name__} in a batch dimension, expected an integer or a slice")
        if isinstance(entry, slice) and (entry.step or 1) < 1:
            raise ValueError(f"index: {entry!r} in a batch dimension, expected a step of at least 1")
    return full


def unit_slice(entry: Any, size: int, name: str) -> tuple[int, int]:
    """First and end of a slice of step 1 of a dimension. Raises TypeError: it is something else."""
    if not isinstance(entry, slice) or entry.step not in (None, 1):
        raise TypeError(f"index: {entry!r} in dimension {name}, expected a slice of step 1")
    start, stop, _ = entry.indices(size)
    return start, max(start, stop)
