"""Lane-wise instructions: floating point with every rounding, comparison, integers, bits."""

from __future__ import annotations

from collections.abc import Iterator

from comparison.lanewise import Array, Group, float_operands, integer_operands, program
from comparison.program import Program

SIZE = 1 << 14
ROUNDINGS = ("rn", "rz", "rm", "rp")
KINDS = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}


def _forms(operands: str, *forms: str) -> tuple[str, ...]:
    return tuple(f"{form} {operands}" for form in forms)


def _floats(name: str, operands: str, kind: str, *forms: str, result: int | None = None) -> Program:
    count = operands.count(",")
    bits = KINDS[kind]
    group = Group(_forms(operands, *forms), bits if result is None else result, (bits,) * count)
    return program(name, group, lambda: float_operands(kind, count, SIZE, len(name)))


def singles() -> Iterator[Program]:
    flags = ("", ".ftz", ".sat", ".ftz.sat")
    for op in ("add", "sub", "mul"):
        yield _floats(f"{op} f32", "d, a, b", "f32", *(f"{op}.{r}{m}.f32" for r in ROUNDINGS for m in flags))
    for op in ("fma", "mad"):
        yield _floats(f"{op} f32", "d, a, b, c", "f32", *(f"{op}.{r}{m}.f32" for r in ROUNDINGS for m in flags))
    yield _floats("div f32", "d, a, b", "f32", *(f"div.{r}{m}.f32" for r in ROUNDINGS for m in ("", ".ftz")))
    roots = [f"{op}.{r}{m}.f32" for op in ("rcp", "sqrt") for r in ROUNDINGS for m in ("", ".ftz")]
    yield _floats("rcp and sqrt f32", "d, a", "f32", *roots)
    extremes = [
        f"{op}{f}{n}{x}.f32"
        for op in ("min", "max")
        for f in ("", ".ftz")
        for n in ("", ".NaN")
        for x in ("", ".xorsign.abs")
    ]
    yield _floats("min and max f32", "d, a, b", "f32", *extremes)
    yield _floats("signs f32", "d, a", "f32", "abs.f32", "abs.ftz.f32", "neg.f32", "neg.ftz.f32")
    yield _floats("copysign f32", "d, a, b", "f32", "copysign.f32")


def doubles() -> Iterator[Program]:
    pairs = [f"{op}.rn.f64" for op in ("add", "sub", "mul", "div")] + ["min.f64", "max.f64", "copysign.f64"]
    yield _floats("pairs f64", "d, a, b", "f64", *pairs)
    yield _floats("fma f64", "d, a, b, c", "f64", "fma.rn.f64")
    yield _floats("single f64", "d, a", "f64", "rcp.rn.f64", "sqrt.rn.f64", "abs.f64", "neg.f64")


def halves() -> Iterator[Program]:
    for kind, flags in (("f16", ("", ".ftz", ".sat", ".ftz.sat")), ("bf16", ("",))):
        pairs = [f"{op}{r}{m}.{kind}" for op in ("add", "sub", "mul") for r in ("", ".rn") for m in flags]
        ftz = ("", ".ftz") if kind == "f16" else ("",)
        pairs += [
            f"{op}{f}{n}{x}.{kind}"
            for op in ("min", "max")
            for f in ftz
            for n in ("", ".NaN")
            for x in ("", ".xorsign.abs")
        ]
        yield _floats(f"pairs {kind}", "d, a, b", kind, *pairs)
        fused = [f"fma.rn{m}.{kind}" for m in (*flags, ".relu")]
        yield _floats(f"fma {kind}", "d, a, b, c", kind, *fused)
        yield _floats(f"signs {kind}", "d, a", kind, f"abs.{kind}", f"neg.{kind}")
        packed = Group(_forms("d, a, b", *(form.replace(f".{kind}", f".{kind}x2") for form in pairs)), 32, (32, 32))
        yield program(f"pairs {kind}x2", packed, lambda kind=kind: _packed(kind, 2))
        signs = Group(_forms("d, a", f"abs.{kind}x2", f"neg.{kind}x2"), 32, (32,))
        yield program(f"signs {kind}x2", signs, lambda kind=kind: _packed(kind, 1))
        packed = Group(_forms("d, a, b, c", *(form.replace(f".{kind}", f".{kind}x2") for form in fused)), 32, (32,) * 3)
        yield program(f"fma {kind}x2", packed, lambda kind=kind: _packed(kind, 3))


def _packed(kind: str, count: int) -> list[Array]:
    return [column.view("<u4") for column in float_operands(kind, count, SIZE, 9)]


def comparisons() -> Iterator[Program]:
    names = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    for kind in KINDS:
        ftz = ("", ".ftz") if kind in ("f32", "f16") else ("",)
        forms = [f"setp.{c}{f}.{kind}" for c in names for f in ftz]
        yield _floats(f"setp {kind}", "d, a, b", kind, *forms, result=1)
    for bits in (16, 32, 64):
        forms = [f"setp.{c}.{s}{bits}" for s in "us" for c in ("eq", "ne", "lt", "le", "gt", "ge")]
        forms += [f"setp.{c}.u{bits}" for c in ("lo", "ls", "hi", "hs")]
        yield _integers(f"setp of {bits} bits", "d, a, b", 1, (bits, bits), *forms)
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    for kind in ("f32", "f64"):
        yield _floats(f"testp {kind}", "d, a", kind, *(f"testp.{t}.{kind}" for t in tests), result=1)


def _integers(name: str, operands: str, result: int, sources: tuple[int, ...], *forms: str) -> Program:
    group = Group(_forms(operands, *forms), result, sources)
    return program(name, group, lambda: integer_operands(sources, SIZE, len(name)))


def integers() -> Iterator[Program]:
    for bits in (16, 32, 64):
        pairs = [f"{op}.{s}{bits}" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max") for s in "us"]
        pairs += ["add.sat.s32", "sub.sat.s32"] if bits == 32 else []
        pairs += [f"{op}.b{bits}" for op in ("and", "or", "xor")]
        yield _integers(f"pairs of {bits} bits", "d, a, b", bits, (bits, bits), *pairs)
        triples = [f"{op}.{s}{bits}" for op in ("mad.lo", "mad.hi", "sad") for s in "us"]
        yield _integers(f"triples of {bits} bits", "d, a, b, c", bits, (bits,) * 3, *triples)
        single = [f"abs.s{bits}", f"neg.s{bits}", f"not.b{bits}", f"cnot.b{bits}"]
        single += [f"brev.b{bits}"] if bits > 16 else []
        yield _integers(f"single of {bits} bits", "d, a", bits, (bits,), *single)
        shifts = [f"shl.b{bits}", f"shr.u{bits}", f"shr.s{bits}"]
        yield _integers(f"shifts of {bits} bits", "d, a, b", bits, (bits, 32), *shifts)
        if bits < 64:
            wide = [f"mul.wide.{s}{bits}" for s in "us"]
            yield _integers(f"wide products of {bits} bits", "d, a, b", 2 * bits, (bits, bits), *wide)
            wide = [f"mad.wide.{s}{bits}" for s in "us"]
            yield _integers(f"wide sums of {bits} bits", "d, a, b, c", 2 * bits, (bits, bits, 2 * bits), *wide)


def divisions() -> Iterator[Program]:
    """The divisor is never 0, which the manual leaves open."""
    for bits in (16, 32, 64):
        forms = _forms("d, a, b", *(f"{op}.{s}{bits}" for op in ("div", "rem") for s in "us"))
        yield program(
            f"div and rem of {bits} bits", Group(forms, bits, (bits, bits)), lambda bits=bits: _divisors(bits)
        )


def _divisors(bits: int) -> list[Array]:
    left, right = integer_operands((bits, bits), SIZE, 5)
    right[right == 0] = 3
    return [left, right]


def bit_fields() -> Iterator[Program]:
    for bits in (32, 64):
        counts = [f"popc.b{bits}", f"clz.b{bits}", *(f"bfind{m}.{s}{bits}" for m in ("", ".shiftamt") for s in "us")]
        yield _integers(f"counts of {bits} bits", "d, a", 32, (bits,), *counts)
        extracts = [f"bfe.{s}{bits}" for s in "us"]
        yield _integers(f"bfe of {bits} bits", "d, a, b, c", bits, (bits, 32, 32), *extracts)
        inserts = _forms(f"d, a, b, c, {5 if bits == 32 else 40}", f"bfi.b{bits}")
        yield program(
            f"bfi of {bits} bits", Group(inserts, bits, (bits, bits, 32)),
            lambda bits=bits: integer_operands((bits, bits, 32), SIZE, 7),
        )  # fmt: skip
    masks = [
        f"{op}.{m}.{t}" for m in ("clamp", "wrap") for op, t in (("bmsk", "b32"), ("szext", "u32"), ("szext", "s32"))
    ]
    yield _integers("bmsk and szext", "d, a, b", 32, (32, 32), *masks)
    shifts = [f"shf.{w}.{m}.b32" for w in "lr" for m in ("clamp", "wrap")]
    dots = [f"dp4a.{x}32.{y}32" for x in "us" for y in "us"]
    permutes = ["prmt.b32", *(f"prmt.b32.{m}" for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"))]
    yield _integers("words of three", "d, a, b, c", 32, (32, 32, 32), *shifts, *dots, *permutes)
    yield program("fns", Group(("fns.b32 d, a, b, c",), 32, (32, 32, 32)), _set_bits)
    tables = (0x00, 0x80, 0xFE, 0x96, 0xCA, 0x1B, 0xE2, 0x6A, 0xF8, 0x01)
    logic = Group(tuple(f"lop3.b32 d, a, b, c, {table}" for table in tables), 32, (32, 32, 32))
    yield program("lop3", logic, lambda: integer_operands((32, 32, 32), SIZE, 8))


def _set_bits() -> list[Array]:
    """Masks; places, which have to lie in the word; small offsets of both signs."""
    mask, place, offset = integer_operands((32, 32, 32), SIZE, 11)
    return [mask, place & 31, (offset % 17 - 8).astype(offset.dtype)]


def programs() -> Iterator[Program]:
    yield from singles()
    yield from doubles()
    yield from halves()
    yield from comparisons()
    yield from integers()
    yield from divisions()
    yield from bit_fields()
