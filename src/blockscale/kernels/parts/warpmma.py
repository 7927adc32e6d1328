"""Products of one warp, m16n8k16, and its operand B from shared memory (PTX: mma.m16n8k16, ldmatrix)."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

NAMES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}


def multiply(sums: Any, a: Any, b: Any, dtype: Any) -> Any:
    """sums + a @ b: 4 fp32; a lane 4g + t has columns 2t and 2t + 1 of rows g and g + 8."""
    name = NAMES[dtype]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )


def load_columns(address: Int32) -> Any:
    """Operand B of two steps: 8 rows of 32 consecutive elements; lane 8i + r gives the address of part i of row r."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )
