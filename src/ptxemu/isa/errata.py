"""Where silicon and the manual disagree, or the manual is silent and silicon is not, and what is done here.

Read off an NVIDIA H200 (driver 580.159.04); tests/both compares, and the emulator follows silicon.  It does so on every
chip: nothing else is known of the others, and a kernel that keeps a rule of these runs on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERRATA", "Erratum"]


@dataclass(frozen=True)
class Erratum:
    """manual, silicon: what each says of the instruction.  program: the beginning of the names of the programs in
    tests/both that show it, after their family."""

    instruction: str
    manual: str
    silicon: str
    program: str


ERRATA = (
    Erratum(
        "cp.async.bulk.tensor",
        "a load may start anywhere",
        "the first coordinate is a multiple of 16 bytes, anything else is an illegal instruction",
        "refused: load at",
    ),
    Erratum(
        "cp.async.bulk.tensor, cp.reduce.async.bulk.tensor",
        "what lies outside the tensor is not written",
        "in dimension 0 a store goes on to the next multiple of 16 bytes",
        "tensor copies: store u8 none past",
    ),
    Erratum(
        "cp.async.bulk.tensor",
        "how rows shorter than the swizzle's span lie in shared memory is not said",
        "they begin a span apart, and the bytes between them stay as they are",
        "tensor copies: load rows of",
    ),
    Erratum(
        "cp.async.bulk.tensor",
        "the pattern of a NaN fill is not said",
        "0x7FF7 over and over, for every type; not rounded for tf32",
        "tensor copies: load f32 NaN fill",
    ),
    Erratum(
        "cp.async.bulk.tensor",
        "how tf32 is rounded is not said; .ftz types flush subnormals",
        "a load rounds tf32 to nearest even and flushes nothing; a store changes nothing",
        "tensor copies: load tf32",
    ),
    Erratum(
        "cp.reduce.async.bulk, cp.reduce.async.bulk.tensor",
        "additions of f32 flush subnormals",
        "they keep them; the tensor types f32.ftz and tf32.ftz flush them",
        "copies: bulk reduce add f32",
    ),
    Erratum(
        "bfe, bfi",
        "of position and length the low byte counts",
        "so it is for 32 bits; for 64 bits all of them count",
        "arithmetic: bfe of 64 bits",
    ),
    Erratum(
        "cvt",
        "NaN becomes 0 in an integer",
        "so it is where both sides have at most 32 bits; otherwise the top bit of the integer is set, and no other",
        "convert: f64 to integers",
    ),
    Erratum(
        "cvt.rna.tf32.f32",
        "NaN becomes the canonical NaN",
        "the lower 13 bits are cut off, which can leave infinity",
        "f32 conversions: f32 to words",
    ),
    Erratum(
        "atom, red",
        "a sum that is NaN is not described",
        "f64 in global memory keeps the operand's NaN, or else memory's, as it is; f32 and f16 give the canonical one",
        "atomics: atom add.f64",
    ),
    Erratum(
        "add, sub, mul, fma, mad, cvt with .sat",
        "results are limited to 0 to 1",
        "no zero among them is negative",
        "arithmetic: add f32",
    ),
    Erratum(
        "mul, fma, mad, div with .ftz",
        "subnormal results are flushed",
        "so are those that only the narrow exponent rounds up to a normal number",
        "arithmetic: fma f32",
    ),
    Erratum(
        "wgmma, mma with f16 accumulators",
        "the sign of a zero is not said",
        "no zero is negative",
        "tensor cores: mma m16n8k16 f16 f16 f16 subnormal",
    ),
)
