"""What the sm_100a kernel for grouped products can be built as, and what it then can do."""

from __future__ import annotations

from blockscale.config import Config, Reason
from blockscale.problem import NVFP4, Problem, Target

CALL_FIELDS: tuple[str, ...] = ("ctas",)
CODE_FIELDS: tuple[str, ...] = ("tile", "stages")


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.a != NVFP4:
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply NVFP4 by NVFP4 alone; quantise a")
    return None


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    return None
