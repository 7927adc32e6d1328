"""Which configuration a product gets: what its GPU family chooses, with an ordered list of reasons."""

from __future__ import annotations

from dataclasses import replace

from blockscale import families
from blockscale.config import Choice, Config, Reason
from blockscale.problem import TARGETS, Problem, Target


class Unsupported(ValueError):
    """A problem or configuration that a GPU's kernels do not do; the message is the `Reason`."""


def choose(problem: Problem, target: Target) -> Choice:
    """The configuration for `problem` on `target`.

    Raises:
        Unsupported: there is none.
    """
    asked, whole, reasons = problem, target, []
    if problem.invariant:
        asked = replace(problem, m=1, batch=1, batch_a=1, batch_b=1)
        whole = next((known for known in TARGETS if known.arch == target.arch), target)
        reasons.append(
            "invariant: chosen as for one row on a whole GPU, so that a row's result depends on nothing else"
        )
    found = families.unsupported(asked, whole) or families.serving(asked, target).choose(asked, whole)
    if isinstance(found, Reason):
        raise Unsupported(str(found))
    check(problem, target, found.config)
    return Choice(found.config, (*reasons, *found.reasons))


def check(problem: Problem, target: Target, config: Config) -> None:
    """Raises Unsupported, with the reason, unless `families.supports` passes."""
    reason = families.supports(problem, target, config)
    if reason is not None:
        raise Unsupported(str(reason))
