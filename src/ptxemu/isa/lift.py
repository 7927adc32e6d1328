"""Helpers of lane-wise functions: one definition for ints and for arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["choose", "lifted", "whole"]


def whole(*values: Any) -> bool:
    """Whether all values are Python ints."""
    return all(type(value) is int for value in values)


def lifted(function: Callable[..., int]) -> Callable[..., Any]:
    """A function of Python ints, applied lane by lane when an operand is an array.  For rare instructions."""

    @functools.wraps(function)
    def apply(*args: Any, **options: Any) -> Any:
        if whole(*args):
            return function(*args, **options)
        lists = [arg.tolist() for arg in np.broadcast_arrays(*args)]
        found = (function(*each, **options) & 0xFFFFFFFFFFFFFFFF for each in zip(*lists, strict=True))
        return np.fromiter(found, np.uint64)

    return apply


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`."""
    if isinstance(condition, bool | int):
        return yes if condition else no
    return np.where(condition, yes, no)
