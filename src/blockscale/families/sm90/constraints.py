"""What the sm_90a kernels can be built as, and what they then can do."""

from __future__ import annotations

from blockscale.config import Config, Reason
from blockscale.families.sm90 import prefill
from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.kernels.parts import chains, hopper_memory
from blockscale.problem import NVFP4, Problem, Target

CODE_FIELDS: tuple[str, ...] = (
    *("tile", "stages", "pdl", "ahead", "prefetch", "wgmma", "k_warps", "split", "cluster", "chunk", "buffers"),
    *("group", "ctas"),  # of many tokens
)
CALL_FIELDS: tuple[str, ...] = ("expand",)

TOKENS = {False: (1, 2, 4, 8, 16), True: tuple(range(8, 65, 8))}  # rows of a that a CTA can take, by `wgmma`
GROUP = 4  # warps of a warpgroup
MOST_WARPS = {False: 31, True: 28}  # that multiply, by `wgmma`: one more fetches
STAGES = range(1, 9)
BUFFERS = range(1, 17)
SPLITS = (1, 2)
PREFETCH = range(17)  # units of a warp that L2 is asked for before the kernel ahead has ended
MOST_TOKEN_TILES = 65_535  # of a grid's second dimension


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.a not in ("fp16", "bf16"):
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply fp16 or bf16 by NVFP4 alone")
    if problem.out_dtype == NVFP4:
        return Reason("out", f"an NVFP4Tensor: the {target.backend} kernels quantise no result")
    if problem.batch_b > 1 or (problem.batch > 1 and problem.batch_a == 1):
        return Reason("b", f"{problem.batch_b} matrices: the {target.backend} kernels multiply by one")
    return None


def unbuildable(config: Config, target: Target) -> Reason | None:
    """Why there can be no such kernel, for any problem, or None."""
    if prefill.serves(config):
        return prefill.unbuildable(config, target)
    tokens, rows = config.tile
    unit = GROUP * ROWS if config.wgmma else ROWS
    allowed = TOKENS[config.wgmma]
    if tokens not in allowed:
        return Reason("config.tile", f"{tokens} rows, expected one of {', '.join(map(str, allowed))}")
    if rows < unit or rows % unit:
        return Reason("config.tile", f"{rows} columns, expected a multiple of {unit}")
    most = MOST_WARPS[config.wgmma]
    if config.k_warps < 1 or warps(config) > most:
        return Reason("config.k_warps", f"{config.k_warps}: {warps(config)} warps, expected 1 to {most} in a CTA")
    ranges = (("stages", STAGES), ("buffers", BUFFERS), ("split", SPLITS), ("prefetch", PREFETCH))
    for name, values in ranges:
        if getattr(config, name) not in values:
            expected = ", ".join(map(str, values))
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected one of {expected}")
    if config.ahead and not config.pdl:
        return Reason("config.ahead", "True, expected False without pdl")
    if config.prefetch and not config.pdl:
        return Reason("config.prefetch", f"{config.prefetch}, expected 0 without pdl")
    for name, only in (("cluster", None), ("ctas", None), ("group", 1)):
        if getattr(config, name) != only:
            return Reason(f"config.{name}", f"{getattr(config, name)}, expected {only} with so few rows")
    reason = _unbuildable_group(config) if config.wgmma else _unbuildable_warp(config)
    if reason is not None:
        return reason
    needed = smem(config)
    if needed > target.smem:
        return Reason("config.buffers", f"{config.buffers}: {needed:,} bytes of shared memory, at most {target.smem:,}")
    return None


def _unbuildable_warp(config: Config) -> Reason | None:
    assert config.stages is not None
    turn = DEPTH * config.k_warps * config.stages
    if config.chunk is None or config.chunk < 1 or config.chunk % turn:
        return Reason("config.chunk", f"{config.chunk}, expected a multiple of {DEPTH} x k_warps x stages = {turn}")
    longest = chains.longest(min(config.k_warps, max(chains.CHAIN))) or 0
    if config.chunk > longest * config.k_warps:
        reason = f"at most {longest} for each of {config.k_warps} warps along k, for the result contract"
        return Reason("config.chunk", f"{config.chunk}, {reason}")
    if config.split != 1:
        return Reason("config.split", f"{config.split}, expected 1 without wgmma")
    return None


def _unbuildable_group(config: Config) -> Reason | None:
    assert config.buffers is not None
    if config.chunk is not None:
        return Reason("config.chunk", f"{config.chunk}, expected None with wgmma: a chunk is a unit of {DEPTH}")
    if config.buffers % config.k_warps or config.buffers < 2 * config.k_warps:  # a slot is given back one turn late
        expected = f"a multiple of k_warps = {config.k_warps}, at least twice that"
        return Reason("config.buffers", f"{config.buffers}, expected {expected}")
    return None


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    if config.expand:
        return unexpandable(config)
    reason = unbuildable(config, target)
    if reason is not None:
        return reason
    if prefill.serves(config):
        return prefill.unfit(problem, config)
    tiles = -(-problem.m * problem.batch // config.tile[0])
    if tiles > MOST_TOKEN_TILES:
        return Reason("config.tile", f"{tiles} tiles of {config.tile[0]} rows, at most {MOST_TOKEN_TILES}")
    parts = config.k_warps * config.split
    long = chains.longest(parts) is None and not chains.kept(parts, problem.k, problem.a)
    if config.wgmma and (long or (parts == 1 and problem.k < chains.LEAST)):
        return Reason("config.k_warps", f"{parts} parts of k = {problem.k} with split: too few for the result contract")
    return None


def warps(config: Config) -> int:
    """Those of a CTA that multiply."""
    return config.tile[1] // ROWS * config.k_warps


def smem(config: Config) -> int:
    """Bytes of shared memory."""
    if prefill.serves(config):
        return prefill.smem(config)
    tokens = config.tile[0]
    assert config.stages is not None
    assert config.buffers is not None
    if config.wgmma:
        return hopper_memory.of_groups(tokens, warps(config), config.stages, config.buffers, config.split)
    assert config.chunk is not None
    _, whole = hopper_memory.of_warps(tokens, warps(config), config.chunk, config.buffers)
    return whole


def unexpandable(config: Config) -> Reason | None:
    """Why a configuration that sets `expand` says something else, or None."""
    if config.expand > 0 and config == Config(expand=config.expand):
        return None
    return Reason("config.expand", f"{config.expand}, expected rows of a weight and nothing else")
