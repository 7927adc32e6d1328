"""PTX 'cvt': every source of 8 and 16 bits, and 2^24 f32 in 64 parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.lanewise import Array, Group, exhaustive, integer_operands, program, special_floats
from comparison.program import Program

ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGRAL = ("rni", "rzi", "rmi", "rpi")
PARTS = 64  # of the f32 samples; each has every exponent


def _cvt(*forms: str, operands: str = "d, a") -> tuple[str, ...]:
    return tuple(f"cvt.{form} {operands}" for form in forms)


def from_halves() -> Iterator[Program]:
    """Every f16 and bf16."""
    for kind in ("f16", "bf16"):
        wide = _cvt(f"f32.{kind}", *([f"ftz.f32.{kind}", f"sat.f32.{kind}"] if kind == "f16" else []))
        yield program(f"{kind} to f32", Group(wide, 32, (16,)), lambda: [exhaustive(16)])
        if kind == "f16":
            yield program("f16 to f64", Group(_cvt("f64.f16", "sat.f64.f16"), 64, (16,)), lambda: [exhaustive(16)])
        for bits in (16, 32, 64):
            forms = _cvt(*(f"{r}.{s}{bits}.{kind}" for r in INTEGRAL for s in "us"))
            yield program(f"{kind} to integers of {bits} bits", Group(forms, bits, (16,)), lambda: [exhaustive(16)])
        forms = _cvt(*(f"{r}.{kind}.{kind}" for r in INTEGRAL), *([f"sat.{kind}.{kind}"] if kind == "f16" else []))
        yield program(f"{kind} to integral {kind}", Group(forms, 16, (16,)), lambda: [exhaustive(16)])
    yield program(
        "f16 to bf16", Group(_cvt(*(f"{r}.bf16.f16" for r in ROUNDINGS)), 16, (16,)), lambda: [exhaustive(16)]
    )
    yield program(
        "bf16 to f16", Group(_cvt(*(f"{r}.f16.bf16" for r in ROUNDINGS)), 16, (16,)), lambda: [exhaustive(16)]
    )
    bytes_of_half = _cvt(*(f"{r}.{s}8.f16" for r in INTEGRAL for s in "us"))
    yield program("f16 to integers of 8 bits", Group(bytes_of_half, 16, (16,)), lambda: [exhaustive(16)])


def from_bytes() -> Iterator[Program]:
    """Every pair of FP8, and every pair of halves' patterns to FP8."""
    for kind in ("e4m3", "e5m2"):
        forms = _cvt(f"rn.f16x2.{kind}x2", f"rn.relu.f16x2.{kind}x2")
        yield program(f"{kind}x2 to f16x2", Group(forms, 32, (16,)), lambda: [exhaustive(16)])
        forms = _cvt(f"rn.satfinite.{kind}x2.f16x2", f"rn.satfinite.relu.{kind}x2.f16x2")
        yield program(f"f16x2 to {kind}x2", Group(forms, 16, (32,)), _pairs_of_halves)


def _pairs_of_halves() -> list[Array]:
    """Every half above every half of another order."""
    low = exhaustive(16).astype(np.uint32)
    return [low | np.random.default_rng(1).permutation(low) << np.uint32(16)]


def from_integers() -> Iterator[Program]:
    """Every integer of 8 and 16 bits, and samples of 32 and 64."""
    for sign in "us":
        for bits in (8, 16, 32, 64):
            source = f"{sign}{bits}"

            def operands(bits: int = bits) -> list[Array]:
                return [exhaustive(bits)] if bits <= 16 else integer_operands((bits,), 1 << 15, bits)

            for to, width in (("f16", 16), ("bf16", 16), ("f32", 32), ("f64", 64)):
                if (to, bits) == ("bf16", 8):
                    continue  # there is no such form
                forms = _cvt(*(f"{r}.{to}.{source}" for r in ROUNDINGS))
                yield program(f"{source} to {to}", Group(forms, width, (bits,)), operands)
            for width in (8, 16, 32, 64):
                kinds = [f"{s}{width}" for s in "us"]
                forms = _cvt(
                    *(f"{k}.{source}" for k in kinds if k != source),
                    *(f"sat.{k}.{source}" for k in kinds if _exceeds(source, k)),
                )
                yield program(f"{source} to integers of {width} bits", Group(forms, max(width, 16), (bits,)), operands)


def _exceeds(source: str, to: str) -> bool:
    """Whether an integer type has values that another lacks; saturation is allowed only then."""
    if source[0] == "s" and to[0] == "u":
        return True
    have, room = int(source[1:]), int(to[1:])
    return have > room or (have == room and source[0] != to[0])


def samples(part: int) -> Array:
    """2^18 of 2^24 f32: their upper 24 bits are all different, the low 8 from a mixing function."""
    index = np.arange(part, 1 << 24, PARTS, dtype=np.uint64)
    mixed = (index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return ((index << np.uint64(8)) | (mixed & np.uint64(0xFF))).astype(np.uint32)


def singles(part: int) -> Iterator[Program]:
    """One part of the f32 samples to every narrower type."""
    halves = [f"{r}.{k}.f32" for k in ("f16", "bf16") for r in ("rn", "rz")] + ["rm.f16.f32", "rp.f16.f32"]
    halves += ["rn.relu.f16.f32", "rz.relu.bf16.f32", "rn.sat.f16.f32", "rn.satfinite.f16.f32"]
    yield program(f"f32 to halves, part {part}", Group(_cvt(*halves), 16, (32,)), lambda: [samples(part)])
    pairs = _cvt(*(f"rn.satfinite{r}.{k}x2.f32" for k in ("e4m3", "e5m2") for r in ("", ".relu")), operands="d, a, b")
    yield program(f"f32 to FP8, part {part}", Group(pairs, 16, (32, 32)), lambda: _two_orders(part))
    words = [f"{r}.{s}32.f32" for r in INTEGRAL for s in "us"] + [f"{r}.f32.f32" for r in INTEGRAL]
    words += ["rna.tf32.f32", "rn.tf32.f32", "rz.tf32.f32", "rn.relu.tf32.f32", "sat.f32.f32", "ftz.f32.f32"]
    words += ["rni.ftz.s32.f32"]
    yield program(f"f32 to words, part {part}", Group(_cvt(*words), 32, (32,)), lambda: [samples(part)])
    packed = [f"{r}{m}.{k}x2.f32" for k in ("f16", "bf16") for r in ("rn", "rz") for m in ("", ".relu")]
    yield program(
        f"f32 to pairs, part {part}", Group(_cvt(*packed, operands="d, a, b"), 32, (32, 32)), lambda: _two_orders(part)
    )


def _two_orders(part: int) -> list[Array]:
    first = samples(part)
    return [first, first[::-1].copy()]


def from_floats() -> Iterator[Program]:
    """f32 and f64: edges and samples, to 64 bits and back."""
    yield program(
        "f32 to f64", Group(_cvt("f64.f32", "ftz.f64.f32", "sat.f64.f32"), 64, (32,)), lambda: [samples(0)[::8].copy()]
    )
    longs = _cvt(*(f"{r}.{s}64.f32" for r in INTEGRAL for s in "us"))
    yield program("f32 to integers of 64 bits", Group(longs, 64, (32,)), lambda: [samples(1)[::8].copy()])
    for to, bits in (("f16", 16), ("bf16", 16), ("f32", 32)):
        forms = _cvt(*(f"{r}.{to}.f64" for r in ROUNDINGS))
        yield program(f"f64 to {to}", Group(forms, bits, (64,)), _doubles)
    for bits in (16, 32, 64):
        forms = _cvt(*(f"{r}.{s}{bits}.f64" for r in INTEGRAL for s in "us"))
        yield program(f"f64 to integers of {bits} bits", Group(forms, bits, (64,)), _doubles)
    yield program("f64 to integral f64", Group(_cvt(*(f"{r}.f64.f64" for r in INTEGRAL)), 64, (64,)), _doubles)


def _doubles() -> list[Array]:
    """Edges; doubles near the numbers that f32 has; doubles of every size."""
    generator = np.random.default_rng(3)
    size = 1 << 13
    singles = generator.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        near = singles.astype(np.float64).view(np.uint64)
    near += generator.choice([0, 1, (1 << 28) - 1, 1 << 28], size).astype(np.uint64)
    halves = np.arange(size, dtype=np.uint16).view(np.float16).astype(np.float64).view(np.uint64)
    halves += generator.choice([0, 1, 1 << 40, 1 << 41], size).astype(np.uint64)
    small = np.ldexp(generator.uniform(-1, 1, size), generator.integers(-30, 70, size)).view(np.uint64)
    random = generator.integers(0, 1 << 64, size, dtype=np.uint64)
    return [np.concatenate([special_floats("f64"), near, halves, small, random]).astype(np.uint64)]


def programs() -> Iterator[Program]:
    yield from from_halves()
    yield from from_bytes()
    yield from from_integers()
    yield from from_floats()
