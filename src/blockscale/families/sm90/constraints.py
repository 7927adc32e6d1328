"""What the sm_90a kernels can be built as, and what they then can do."""

from __future__ import annotations

from blockscale.config import Config, Reason
from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.problem import Problem, Target

CODE_FIELDS: tuple[str, ...] = ("tile", "stages", "k_warps", "chunk")
CALL_FIELDS: tuple[str, ...] = ()

TOKENS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
ROW_WARPS = (1, 2, 4, 8)
K_WARPS = (1, 2, 4, 8, 16)
STAGES = range(1, 9)
MOST_WARPS = 32
SKEW = 8  # elements that a row of activations in shared memory is longer, for its banks
MOST_TOKEN_TILES = 65_535  # of a grid's second dimension


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.a not in ("fp16", "bf16"):
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply fp16 or bf16 by NVFP4 alone")
    if problem.out_dtype == "nvfp4":
        return Reason("out", "an NVFP4Tensor: the sm90 kernels quantise no result")
    if problem.batch_b > 1 or (problem.batch > 1 and problem.batch_a == 1):
        return Reason("b", f"{problem.batch_b} matrices: the {target.backend} kernels multiply by one")
    return None


def unbuildable(config: Config, target: Target) -> Reason | None:
    """Why there can be no such kernel, for any problem, or None."""
    tokens, rows = config.tile
    if tokens not in TOKENS:
        return Reason("config.tile", f"{tokens} rows, expected one of {', '.join(map(str, TOKENS))}")
    if rows % ROWS or rows // ROWS not in ROW_WARPS:
        allowed = ", ".join(str(ROWS * warps) for warps in ROW_WARPS)
        return Reason("config.tile", f"{rows} columns, expected one of {allowed}")
    if config.k_warps not in K_WARPS:
        return Reason("config.k_warps", f"{config.k_warps}, expected one of {', '.join(map(str, K_WARPS))}")
    if rows // ROWS * config.k_warps > MOST_WARPS:
        return Reason("config.k_warps", f"{config.k_warps} x {rows // ROWS} warps, at most {MOST_WARPS} a CTA")
    if config.stages not in STAGES:
        return Reason("config.stages", f"{config.stages}, expected {STAGES[0]} to {STAGES[-1]}")
    return _unbuildable_chunk(config, target)


def _unbuildable_chunk(config: Config, target: Target) -> Reason | None:
    assert config.stages is not None
    turn = DEPTH * config.k_warps * config.stages
    if config.chunk is None or config.chunk < 1 or config.chunk % turn:
        return Reason("config.chunk", f"{config.chunk}, expected a multiple of 128 x k_warps x stages = {turn}")
    needed = smem(config)
    if needed > target.smem:
        return Reason("config.chunk", f"{config.chunk}: {needed:,} bytes of shared memory, {target.smem:,} at most")
    return None


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why a kernel that can be built does not serve `problem`, or None."""
    tiles = -(-problem.m * problem.batch // config.tile[0])
    if tiles > MOST_TOKEN_TILES:
        return Reason("config.tile", f"{tiles} tiles of {config.tile[0]} rows, at most {MOST_TOKEN_TILES}")
    return None


def smem(config: Config) -> int:
    """Bytes of shared memory: two chunks of activations, and after the last product the sums of the warps."""
    tokens, rows = config.tile
    assert config.chunk is not None
    activations = 2 * tokens * (config.chunk + SKEW) * 2
    sums = config.k_warps * -(-tokens // 8) * 8 * (rows + 4) * 4
    return max(activations, sums)
