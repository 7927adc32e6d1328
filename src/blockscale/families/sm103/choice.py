"""Which configuration for which problem."""

from __future__ import annotations

from blockscale.config import Choice, Reason
from blockscale.families import sm100
from blockscale.problem import Problem, Target


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    return sm100.choose(problem, target)
