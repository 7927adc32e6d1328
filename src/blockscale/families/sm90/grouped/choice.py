"""What the sm_90a kernel for grouped products does, and which configuration it gets. Nothing was measured with it."""

from __future__ import annotations

from blockscale.config import Choice, Config, Reason
from blockscale.families.sm90 import constraints
from blockscale.families.sm90.constraints import MOST_TOKEN_TILES, TOKENS
from blockscale.formats.fragment import ROWS
from blockscale.problem import GATED, GroupedProblem, Problem, Target

CUTS = ((4, 4), (8, 2))  # (warps along k, tiles of 16 rows of a weight) of a CTA; the second for long k
STAGES = 2
MOST_ROWS = 64  # of a group, on average, that the kernel is asked for: it reads a weight for every 16 of them


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.activation in GATED:
        return Reason("activation", f"{problem.activation!r}: the {target.backend} kernels have no gates")
    return constraints.unsupported(problem, target)


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    assert isinstance(problem, GroupedProblem)
    reason = constraints.unfit(problem, target, config)
    blocks = most_blocks(problem, config)
    if reason is None and blocks > MOST_TOKEN_TILES:
        return Reason("config.tile", f"up to {blocks} tiles of {config.tile[0]} rows, at most {MOST_TOKEN_TILES}")
    return reason


def most_blocks(problem: GroupedProblem, config: Config) -> int:
    """Of tokens, as many as there can be, whatever the sizes of groups."""
    tokens = config.tile[0]
    if problem.form == "masked":
        return problem.groups * -(-problem.m // tokens)
    groups = min(problem.groups, problem.m)
    return groups + (problem.m - groups) // tokens


def choose(problem: Problem, target: Target) -> Choice | Reason:
    """The configuration for a problem that `unsupported` passes, or why there is none."""
    assert isinstance(problem, GroupedProblem)
    mean = problem.m if problem.form == "masked" else -(-problem.m // problem.groups)
    tokens = next((rows for rows in TOKENS[False] if rows >= mean), TOKENS[False][-1])
    reasons = [f"tiles of {tokens} rows of activations: the fewest that hold {mean}, or the most there are (derived)"]
    for k_warps, tiles in CUTS:
        chunk = 128 * k_warps * STAGES
        rings = {"stages": STAGES, "k_warps": k_warps, "chunk": chunk, "buffers": 4 if tokens <= 4 else 2}
        config = Config((tokens, ROWS * tiles), pdl=True, **rings)  # type: ignore[arg-type] # integers
        refused = unfit(problem, target, config)
        if refused is None:
            reasons.append(f"{k_warps} warps along k: enough for the contract at k = {problem.k} (derived)")
            return Choice(config, tuple(reasons))
    assert refused is not None
    return refused
