"""What the compiler makes of the sm_100 kernels: registers, spills, stages, and instructions of the MMA warp a K tile.

The table sets them beside NVIDIA's kernels (nvidia-cutlass-operators) through the same compiler, tiles of 128 rows by
one CTA and those of 256 by a pair:

    python tools/sass_table.py docs/notes/sm100-sass.md

Needs the extra `operators`, and `cuobjdump` and `nvdisasm` of CUDA 13.1 or later on the path (they are on PyPI as
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm). A K tile is 256 elements of k, four tensor-core instructions. The loop
that issues them is the smallest one in the disassembly around them; its instructions are counted, whatever they do.

Of the epilogue the shortest way is counted, through all branches, that a warp can go from one load of tensor memory by
way of a store to the next, and for each tile by way of a wait. That of a tile inside the result is such a way. A half
for each column are multiplications by alpha, which NVIDIA's kernel has not (its own operation follows the cast).
"""

from __future__ import annotations

import heapq
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    sm100_dense_blockscaled_static_persistent_impl as nvidia,
)
from cutlass.tensor_utils import LayoutEnum

from blockscale.compile import compile_kernel
from blockscale.config import Config
from blockscale.families.sm100.constraints import geometry
from blockscale.problem import Problem, target_named

TILES = tuple((rows, columns) for rows in (128, 256) for columns in (64, 128, 192, 256))
# Beside those of the plain tiles: sums that overlap, and all that is for large products together.
MORE = (
    Config((256, 256), accumulators=2),
    Config((256, 256), accumulators=2, group=8, store="tma", store_slots=1, release="early"),
    Config(
        (256, 256), accumulators=2, cluster=(4, 2), fallback_cluster=(2, 1), schedule="clc", group=8, pdl=True,
        store="tma", store_slots=1, release="early",
    ),
)  # fmt: skip
MMA = "UTCOMMA"
MMAS_A_K_TILE = 4
LOAD = re.compile(r"\bLDTM\.x(\d+)")
STORE = re.compile(r"\b(UTMASTG|STG\S*\.(?:256|128))\b")
WAIT = "SYNCS.PHASECHK"


@dataclass(frozen=True)
class Row:
    kernel: str
    stages: int
    smem: int
    registers: int
    stack: int
    local: int
    spills: int
    total: int
    loop: float
    epilogue: float

    def __str__(self) -> str:
        numbers = (self.stages, f"{self.smem:,}", self.registers, self.stack, self.local, self.spills, self.total)
        return f"| {self.kernel} | {' | '.join(map(str, numbers))} | {self.loop:g} | {self.epilogue:g} |"


HEADER = """\
| kernel | stages | dynamic shared memory | registers | stack | local memory | spills | instructions \
| of MMA a K tile | of the epilogue a tile |
|---|---|---|---|---|---|---|---|---|---|"""


def ours(config: Config) -> Row:
    target, (rows, columns) = target_named("b200"), config.tile
    parts = compile_kernel(target, config, Problem(m=rows, n=columns, k=256, out_dtype="bf16"))
    sizes = geometry(config, target)
    rest = str(config).removeprefix(f"tile {rows}x{columns}").removeprefix(", ")
    name = f"blockscale {rows} x {columns}" + f" ({rest})" * bool(rest)
    return row(name, columns, sizes.slots, sizes.smem_bytes, parts["cubin"])


def theirs(tile: tuple[int, int]) -> Row:
    kernel = nvidia.PersistentDenseBlockScaledGemmKernel(16, tile, (tile[0] // 128, 1))
    code, scale = (cutlass.Float4E2M1FN, 16), (cutlass.Float8E4M3FN, 32)
    pointers = [
        make_ptr(dtype, 0, cutlass.AddressSpace.gmem, assumed_align=align)
        for dtype, align in (code, code, scale, scale, (cutlass.BFloat16, 16))
    ]
    layouts = (OperandMajorMode.K, OperandMajorMode.K, LayoutEnum.ROW_MAJOR)
    size = (cutlass.Int32(0),) * 4
    with tempfile.TemporaryDirectory() as directory:
        options = f"--gpu-arch sm_100a --keep-cubin --dump-dir {directory}"
        function = cute.compile(kernel, *pointers, layouts, size, 148, make_fake_stream(), lambda x: x, options=options)
        cubin = function.__cubin__
    name = f"NVIDIA {tile[0]} x {tile[1]}"
    return row(name, tile[1], kernel.num_ab_stage, kernel.shared_storage.size_in_bytes(), cubin)


def row(kernel: str, columns: int, stages: int, smem: int, cubin: bytes, mmas_a_k_tile: int = MMAS_A_K_TILE) -> Row:
    used, listing = disassembled(cubin)
    loop = mma_loop(listing)
    mmas = sum(MMA in text for text in loop)
    return Row(
        kernel,
        stages,
        smem,
        used["REG"],
        used["STACK"],
        used["LOCAL"],
        spilling(listing),
        len(listing),
        len(loop) * mmas_a_k_tile / mmas,
        epilogue(listing, columns),
    )


def disassembled(cubin: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Registers, stack and local memory of a thread (REG, STACK, LOCAL), and the instructions with their labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        sass = tool("nvdisasm", "-c", file.name)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return used, list(instructions(sass))


def spilling(listing: list[tuple[str, str]]) -> int:
    """Instructions that move registers to local memory or back."""
    return sum(bool(re.match(r"(@!?U?P\d+ )?(LDL|STL)\b", text)) for _, text in listing)


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> Iterator[tuple[str, str]]:
    """(labels that stand before it, text) of each instruction."""
    labels: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels.append(label[1])
        elif text := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            yield " ".join(labels), text[1]
            labels = []


def epilogue(listing: list[tuple[str, str]], columns: int) -> float:
    """Instructions for a tile of so many columns: once around by way of a wait, and the rest of the loads without."""
    loads = [i for i, (_, text) in enumerate(listing) if LOAD.search(text)]
    around = [way for i in loads if (way := shortest(listing, i, waits=False))]
    total, loaded = min(way for i in loads if (way := shortest(listing, i, waits=True)))
    if loaded < columns:
        length, step = min(around)
        total += length * (columns - loaded) / step
    return total


def shortest(listing: list[tuple[str, str]], start: int, waits: bool) -> tuple[int, int] | None:
    """(instructions, columns loaded) of the shortest way from a load back to it, by a store, and by a wait or none."""
    after = successors(listing)
    ways = [(0, 0, start, False, False)]
    done: set[tuple[int, bool, bool]] = set()
    while ways:
        length, columns, at, stored, waited = heapq.heappop(ways)
        if length and at == start and stored and waited == waits:
            return length, columns
        if (at, stored, waited) in done or (length and at == start):
            continue
        done.add((at, stored, waited))
        text = listing[at][1]
        stored, waited = stored or bool(STORE.search(text)), waited or WAIT in text
        if load := LOAD.search(text):
            columns += int(load[1])
        if waits or not waited:
            for following in after[at]:
                heapq.heappush(ways, (length + 1, columns, following, stored, waited))
    return None


def successors(listing: list[tuple[str, str]]) -> list[list[int]]:
    """Which instructions may come after each."""
    place = {label: i for i, (labels, _) in enumerate(listing) for label in labels.split()}
    after = []
    for i, (_, text) in enumerate(listing):
        following = [i + 1] if i + 1 < len(listing) and not re.match(r"EXIT|RET", text) else []
        if branch := re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", text):
            conditional = re.match(r"@|BRA\.U !?UP\d", text)
            following = [place[branch[1]], *(following if conditional else [])]
        after.append(following)
    return after


def mma_loop(listing: list[tuple[str, str]], mma: str = MMA) -> list[str]:
    """The instructions of the smallest loop with a tensor-core instruction: from a label to a branch back to it."""
    place = {label: i for i, (labels, _) in enumerate(listing) for label in labels.split()}
    loops = []
    for end, (_, text) in enumerate(listing):
        branch = re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", text)
        if branch and place[branch[1]] < end:
            loops.append([text for _, text in listing[place[branch[1]] : end + 1]])
    return min((loop for loop in loops if any(mma in text for text in loop)), key=len)


def main(path: str) -> None:
    rows = [row for tile in TILES for row in (ours(Config(tile)), theirs(tile))]
    rows += map(ours, MORE)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-operators")
    )
    disassembler = tool("nvdisasm", "--version").split("release ")[1].split(",")[0]
    text = f"""\
# The sm_100 kernels in SASS

Written by `tools/sass_table.py` with {versions}
and nvdisasm {disassembler}: NVFP4 to bf16, as compiled for sm_100a; tiles of 256 rows
are those of a pair of CTAs. Nothing here was run on a GPU. The last columns count the instructions of the loop
that issues the tensor-core instructions, for 256 elements of k, and those of an epilogue's warp for a tile, of which
our multiplications by alpha are half as many as the tile has columns.

{HEADER}
"""
    Path(path).write_text(text + "\n".join(map(str, rows)) + "\n")
    print(HEADER, *rows, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
