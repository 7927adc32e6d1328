"""What the compiler makes of the sm_103 kernels, beside CUTLASS's: instructions of the MMA warp a K tile of 768.

    python tools/sm103_sass.py CUTLASS docs/notes/sm103-sass.md

CUTLASS is a checkout of NVIDIA's repository of that name, which has a kernel for sm_103 among its CuTe DSL examples;
only what is counted goes into the document. Needs what tools/sass_table.py needs, which counts here too. A K tile is
768 elements of k, eight tensor-core instructions, after which slots and instructions meet again. Bytes are counted by
the software GPU, which runs a tile of both kernels.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import numpy as np
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr
from sass_table import HEADER, Row, row, tool

import blockscale as bs
import ptxemu
from blockscale.compile import compile_kernel
from blockscale.config import Config
from blockscale.families.sm103.constraints import geometry
from blockscale.families.sm103.presets import PRESETS
from blockscale.problem import Problem, target_named
from ptxemu.host import installed

EXAMPLE = "examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py"
B300 = target_named("b300")
MMAS_A_K_TILE = 8
PAIR = Config((256, 256), mma_k=96, accumulators=2, release="preload")
MINE = (
    Config((128, 256), mma_k=96),
    Config((256, 256), mma_k=96),
    PAIR,
    *(preset.config for _, preset in sorted(PRESETS.items())),
)
THEIRS = (((128, 256), False), ((256, 256), False), ((256, 256), True))  # (tile, whether results leave by TMA)


def ours(config: Config) -> Row:
    (rows, columns), (m, n, k) = config.tile, config.fixed or (256, 256, 768)
    parts = compile_kernel(B300, config, Problem(m, n, k, out_dtype="fp16"))
    sizes = geometry(config, B300, "fp16")
    rest = str(config).removeprefix(f"tile {rows}x{columns}").replace(", mma_k 96", "").removeprefix(", ")
    name = f"blockscale {rows} x {columns}" + f" ({rest})" * bool(rest)
    return row(name, columns, sizes.slots, sizes.smem_bytes, parts["cubin"], MMAS_A_K_TILE)


def theirs(module: Any, tile: tuple[int, int], by_tma: bool) -> Row:
    kernel = module.Sm103BlockScaledPersistentDenseGemmKernel(16, tile, (tile[0] // 128, 1), by_tma)

    def size(multiple: int = 1) -> Any:
        return cute.sym_int32(divisibility=multiple)

    def matrix(dtype: Any, rows: Any, columns: Any, align: int) -> Any:
        return make_fake_compact_tensor(dtype, (rows, columns, batch), stride_order=(1, 0, 2), assumed_align=align)

    m, n, k, batch = size(), size(64), size(64), size()
    codes = matrix(cutlass.Float4E2M1FN, m, k, 16), matrix(cutlass.Float4E2M1FN, n, k, 16)
    scales = (make_fake_compact_tensor(cutlass.Float8E4M3FN, (size(),), assumed_align=32) for _ in range(2))
    out = matrix(cutlass.Float16, m, n, 32)
    with tempfile.TemporaryDirectory() as directory:
        options = f"--gpu-arch sm_103a --keep-cubin --dump-dir {directory}"
        function = cute.compile(kernel, *codes, *scales, out, B300.sms // 2, make_fake_stream(), options=options)
        cubin = function.__cubin__
    name = f"NVIDIA {tile[0]} x {tile[1]}" + " (TMA store)" * by_tma
    return row(name, tile[1], kernel.num_ab_stage, kernel.shared_storage.size_in_bytes(), cubin, MMAS_A_K_TILE)


class OneTile:
    """CUTLASS's kernel for a product of 256 x 256 x k, from pointers."""

    def __init__(self, module: Any, k: int) -> None:
        self.kernel, self.k = module.Sm103BlockScaledPersistentDenseGemmKernel(16, (256, 256), (2, 1), False), k

    @cute.jit
    def __call__(self, a, b, sfa, sfb, out, stream):  # type: ignore[no-untyped-def] # traced
        def matrix(pointer, columns):  # type: ignore[no-untyped-def]
            return cute.make_tensor(pointer, cute.make_layout((256, columns, 1), stride=(columns, 1, 256 * columns)))

        scales = [cute.make_tensor(x, cute.make_layout((256 * self.k // 16,))) for x in (sfa, sfb)]
        self.kernel(matrix(a, self.k), matrix(b, self.k), *scales, matrix(out, 256), 1, stream)


def their_bytes(module: Any, k: int) -> tuple[int, int]:
    """What TMA reads of global memory for a tile, and what arrives in shared memory."""
    code, scale = (cutlass.Float4E2M1FN, 16), (cutlass.Float8E4M3FN, 32)
    kinds = (code, code, scale, scale, (cutlass.Float16, 32))
    sizes = (128 * k, 128 * k, 16 * k, 16 * k, 2 * 256 * 256)
    memory = [np.zeros(size + 128, np.uint8) for size in sizes]
    addresses = [-(-x.ctypes.data // 128) * 128 for x in memory]
    pointers = [
        make_ptr(dtype, at, cutlass.AddressSpace.gmem, assumed_align=align)
        for at, (dtype, align) in zip(addresses, kinds, strict=True)
    ]
    with installed(ptxemu.Device("sm_103a", sms=2, checks="none"), memory) as emulator:
        function = cute.compile(OneTile(module, k), *pointers, driver.CUstream(0))
        emulator.call(function, *pointers, driver.CUstream(0))
    return _loaded(emulator.reports[0])


def our_bytes(k: int) -> tuple[int, int]:
    a, b = (bs.quantize(torch.ones(256, k)) for _ in range(2))
    with bs.emulated("sm_103a", sms=2, checks="none") as gpu:
        bs.gemm(a, b, out_dtype=torch.float16, config=Config((256, 256), mma_k=96))
    return _loaded(gpu.report)


def _loaded(report: Any) -> tuple[int, int]:
    moved = report.counters["bytes"]
    return moved["TMA load, global memory"], moved["TMA load, shared memory"]


def bytes_table(module: Any) -> str:
    lines = ["| k | NVIDIA from L2 | blockscale from L2 | NVIDIA to shared memory | blockscale to shared memory |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for k in (768, 1024, 1536, 4096):
        (theirs_l2, theirs_shared), (ours_l2, ours_shared) = their_bytes(module, k), our_bytes(k)
        lines.append(f"| {k} | {theirs_l2:,} | {ours_l2:,} | {theirs_shared:,} | {ours_shared:,} |")
    return "\n".join(lines)


def example(checkout: Path) -> tuple[Any, str]:
    """CUTLASS's kernel, and the commit that it is of."""
    path = checkout / EXAMPLE
    spec = importlib.util.spec_from_file_location("cutlass_sm103_example", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise SystemExit(f"{path}: there is no such file; expected a checkout of CUTLASS with its CuTe DSL examples")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    head = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True
    )
    return module, head.stdout.strip() or "an unknown commit"


def main(checkout: str, path: str) -> None:
    module, commit = example(Path(checkout))
    rows = [theirs(module, *what) for what in THEIRS] + [ours(config) for config in MINE]
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    disassembler = tool("nvdisasm", "--version").split("release ")[1].split(",")[0]
    text = f"""\
# The sm_103 kernels in SASS

Written by `tools/sm103_sass.py` with nvidia-cutlass-dsl {version}, nvdisasm {disassembler} and the CuTe DSL example
for sm_103 of CUTLASS at {commit}: NVFP4 to fp16 with K = 96 instructions, as compiled for sm_103a.
Nothing here was run on a GPU. Stages are slots of 256 k of codes. The last columns count the instructions of the loop
that issues the tensor-core instructions, for 768 elements of k, and those of an epilogue's warp for a tile, of which
our multiplications by alpha, which NVIDIA's kernel has not, are half as many as the tile has columns.

{HEADER}
"""
    text += "\n".join(map(str, rows))
    text += f"""

## Bytes

What TMA moves for a tile of 256 x 256 by a pair of CTAs, as the software GPU counted: read from L2, once for all CTAs
that get the same, and arriving in shared memory. NVIDIA's kernel loads whole K tiles of 768.

{bytes_table(module)}
"""
    Path(path).write_text(text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
