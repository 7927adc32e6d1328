"""silu(gate) x up with the bits of `blockscale.quantize.before`."""

from cutlass import Float32, cute

from blockscale.kernels.parts import ieee
from blockscale.kernels.parts.exponential import INTEGERS, LEAST, LN2_HIGH, LN2_LOW, LOG2_E, MOST, POLYNOMIAL


def swiglu(gate: Float32, up: Float32) -> Float32:
    """gate / (1 + e^-gate) x up."""
    z = _bounded(gate)
    shifted = ieee.add(ieee.multiply(z, Float32(LOG2_E)), Float32(INTEGERS))
    n = ieee.subtract(shifted, Float32(INTEGERS))
    r = ieee.subtract(z, ieee.multiply(n, Float32(LN2_HIGH)))
    r = ieee.subtract(r, ieee.multiply(n, Float32(LN2_LOW)))
    p = Float32(POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        p = ieee.add(ieee.multiply(p, r), Float32(coefficient))
    y = ieee.add(ieee.add(ieee.multiply(p, ieee.multiply(r, r)), r), Float32(1.0))
    power = ieee.number(ieee.bits(shifted) - ieee.bits(Float32(INTEGERS)) + 127 << 23)
    e = ieee.multiply(y, power)
    return ieee.multiply(ieee.divide(gate, ieee.add(e, Float32(1.0))), up)


def _bounded(gate: Float32) -> Float32:
    """-gate, as far as the exponential goes; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 z;\nneg.f32 z, {$r0};\nmax.NaN.f32 z, z, {$r1};\nmin.NaN.f32 {$w0}, z, {$r2};\n}",
        write_only_types=[Float32],
        read_only_args=[gate, Float32(LEAST), Float32(MOST)],
    )
