"""What the compiler makes of the sm_120 kernels: registers, spills, and the share of tensor-core instructions.

The table sets them beside NVIDIA's (CUTLASS's CuTe DSL examples of NVFP4 on these GPUs, cooperative and ping-pong), if
a checkout of CUTLASS is named; without one its rows stay as they are in the file:

    python tools/sass_table_sm120.py docs/notes/sm120-sass.md [CUTLASS]

Needs what `sass_table.py` needs. The main loop is the smallest one in the disassembly around tensor-core instructions;
in NVIDIA's, two groups of warps and ours alike, it is once through a stage.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from sass_table import disassembled, mma_loop, spilling, tool

from blockscale.compile import compile_kernel
from blockscale.config import Config
from blockscale.families.sm120.constraints import geometry
from blockscale.problem import Problem, target_named

MMA = "OMMA"
MOVE = "USETMAXREG"  # which the assembler drops where a role needs more registers than it may keep
TILE = (128, 128)
FIRST = "evict_first"
CONFIGS = (
    Config(TILE),
    Config(TILE, chunk=256),
    Config(TILE, accumulators=2),
    Config(TILE, accumulators=2, chunk=256),
    Config((64, 128), accumulators=2, chunk=256),
    Config((64, 64), accumulators=2, chunk=256),
    Config((128, 256)),
    Config((128, 256), schedule="clc", pdl=True, group=8, l2_a=FIRST, l2_b=FIRST, l2_scales=FIRST),
    Config(TILE, accumulators=2, schedule="clc", pdl=True, group=8, l2_a=FIRST, l2_b=FIRST, l2_scales=FIRST),
    Config((128, 64), swap=True, chunk=256),
    Config((128, 16), swap=True, chunk=256),
    Config((128, 8), swap=True, chunk=256),
    Config((512, 16), swap=True, split=4),
)
EXAMPLES = "examples/python/CuTeDSL/cute/blackwell_geforce/kernel/blockscaled_gemm"
NVIDIA = (("cooperative", 128), ("cooperative", 256), ("pingpong", 128), ("pingpong", 256))  # kind, k of a stage
HEADER = """\
| kernel | stages | registers | stack | local memory | spills | instructions | moves | in the loop | MMAs | share |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    kernel: str
    stages: int
    registers: int
    stack: int
    local: int
    spills: int
    total: int
    moves: int
    loop: int
    mmas: int

    def __str__(self) -> str:
        numbers = (
            self.stages,
            self.registers,
            self.stack,
            self.local,
            self.spills,
            self.total,
            self.moves,
            self.loop,
            self.mmas,
        )
        return f"| {self.kernel} | {' | '.join(map(str, numbers))} | {self.mmas / self.loop:.1%} |"


def row(kernel: str, stages: int, cubin: bytes) -> Row:
    used, listing = disassembled(cubin)
    loop = mma_loop(listing, MMA)
    mmas = sum(MMA in text for text in loop)
    sizes = used["REG"], used["STACK"], used["LOCAL"]
    moves = sum(MOVE in text for _, text in listing)
    return Row(kernel, stages, *sizes, spilling(listing), len(listing), moves, len(loop), mmas)


def ours(config: Config, arch: str = "sm_120a") -> Row:
    target, (rows, columns) = target_named(arch), config.tile
    m, n = (columns, rows) if config.swap else (rows, columns)
    parts = compile_kernel(target, config, Problem(m=m, n=n, k=512, out_dtype="bf16"))
    rest = str(config).removeprefix(f"tile {rows}x{columns}").removeprefix(", ")
    name = f"blockscale {rows} x {columns}" + f" ({rest})" * bool(rest) + f", {arch}" * (arch != "sm_120a")
    return row(name, geometry(config, target).slots, parts["cubin"])


def theirs(checkout: Path, kind: str, tile_k: int) -> Row:
    """NVIDIA's kernel of 128 x 128 x `tile_k`, from bf16 results of any size."""
    example = loaded(checkout / EXAMPLES / f"dense_blockscaled_gemm_persistent_{kind}.py")
    kernel = example.Sm120BlockScaledGemmKernel(cutlass.Float32, 16, (*TILE, tile_k), TILE)
    with tempfile.TemporaryDirectory() as directory:
        options = f"--gpu-arch sm_120a --keep-cubin --dump-dir {directory}"
        function = cute.compile(kernel, *operands(), 188, make_fake_stream(), options=options)
        cubin = function.__cubin__
    return row(f"NVIDIA {TILE[0]} x {TILE[1]} ({kind}, chunk {tile_k})", kernel.ab_stage, cubin)


def operands() -> list[object]:
    """a, b, their scales and the result, of sizes that are known at run time."""

    def matrix(dtype: object, rows: object, columns: object, batch: object) -> object:
        return make_fake_compact_tensor(dtype, (rows, columns, batch), stride_order=(1, 0, 2), assumed_align=16)

    def scales(rows: object, blocks: object, batch: object) -> object:
        shape = (32, 4, rows, 4, blocks, batch)
        return make_fake_compact_tensor(cutlass.Float8E4M3FN, shape, stride_order=(2, 1, 4, 0, 3, 5), assumed_align=16)

    m, n, batch = (cute.sym_int() for _ in range(3))
    k = cute.sym_int(divisibility=64)
    atoms = [cute.sym_int() for _ in range(3)]
    code = cutlass.Float4E2M1FN
    return [
        matrix(code, m, k, batch),
        matrix(code, n, k, batch),
        scales(atoms[0], atoms[2], batch),
        scales(atoms[1], atoms[2], batch),
        matrix(cutlass.BFloat16, m, cute.sym_int(divisibility=8), batch),
    ]


def loaded(path: Path) -> ModuleType:
    sys.path.append(str(path.parent))  # for what it imports
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, checkout: str | None = None) -> None:
    table = Path(path)
    rows: list[object] = [ours(config) for config in CONFIGS]
    rows.append(ours(CONFIGS[3], "sm_121a"))
    if checkout is not None:
        rows += [theirs(Path(checkout), *which) for which in NVIDIA]
    elif table.exists():
        rows += re.findall(r"^\| NVIDIA .*$", table.read_text(), re.MULTILINE)
    disassembler = tool("nvdisasm", "--version").split("release ")[1].split(",")[0]
    text = f"""\
# The sm_120 kernels in SASS

Written by `tools/sass_table_sm120.py` with nvidia-cutlass-dsl {importlib.metadata.version("nvidia-cutlass-dsl")}
and nvdisasm {disassembler}: NVFP4 to bf16, as compiled for sm_120a unless it says otherwise; NVIDIA's are the examples
of CUTLASS for these GPUs through the same compiler. Nothing here was run on a GPU. Registers are those that a kernel
starts with. Moves are those of registers (setmaxnreg): the warps that multiply take what the others give up. Where that
left a role too few, the assembler would have dropped them.

{HEADER}
"""
    table.write_text(text + "\n".join(map(str, rows)) + "\n")
    print(HEADER, *rows, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
