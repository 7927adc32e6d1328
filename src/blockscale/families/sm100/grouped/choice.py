"""Which configuration for which grouped problem: an ordered list of reasons."""

from __future__ import annotations

from blockscale.config import Choice, Config, Reason
from blockscale.problem import Problem, Target


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    return Choice(Config(), ("one tile for all",))
