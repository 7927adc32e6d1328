"""PTX 'Extended-Precision Integer Arithmetic Instructions': carries through chains, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from lane_kernel import HEADER, missing_forms

import ptxemu

# Every chain takes words of a and b, lowest first, and gives four words of the result.
CHAINS = {
    "add": "add.cc.T r0, a0, b0; addc.cc.T r1, a1, b1; addc.cc.T r2, a2, b2; addc.T r3, a3, b3;",
    "sub": "sub.cc.T r0, a0, b0; subc.cc.T r1, a1, b1; subc.cc.T r2, a2, b2; subc.T r3, a3, b3;",
    "mul": """mul.lo.T r0, a0, b0; mul.hi.T r1, a0, b0; mov.T r2, 0; mov.T r3, 0;
        mad.lo.cc.T r1, a0, b1, r1; madc.hi.cc.T r2, a0, b1, r2; addc.T r3, r3, 0;
        mad.lo.cc.T r1, a1, b0, r1; madc.hi.cc.T r2, a1, b0, r2; addc.T r3, r3, 0;
        mad.lo.cc.T r2, a1, b1, r2; madc.hi.T r3, a1, b1, r3;""",
}


def kernel(chain: str, kind: str, uniform: bool) -> str:
    bits = int(kind[1:])
    size = bits // 8
    load = "".join(f"ld.global.b{bits} {x}{n}, [p{x}+{n * size}];" for x in "ab" for n in range(4))
    store = "".join(f"st.global.b{bits} [po+{n * size}], r{n};" for n in range(4))
    places = "" if uniform else "".join(f"mad.wide.u32 p{x}, j, {4 * size}, p{x};" for x in "ab")
    return f"""{HEADER}.visible .entry k(.param .u64 o, .param .u64 a, .param .u64 b) {{
        .reg .b32 j;
        .reg .b64 po, pa, pb;
        .reg .b{bits} a<4>, b<4>, r<4>;
        mov.u32 j, %laneid;
        ld.param.u64 po, [o];
        ld.param.u64 pa, [a];
        ld.param.u64 pb, [b];
        mad.wide.u32 po, j, {4 * size}, po;
        {places}
        {load}
        {CHAINS[chain].replace(".T", f".{kind}")}
        {store}
    }}"""


def number(words: np.ndarray, bits: int, count: int = 4) -> int:
    return sum(int(word) << bits * i for i, word in enumerate(words[:count]))


@pytest.mark.parametrize("kind", ["u32", "u64"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("uniform", [False, True])
def test_chains(chain: str, kind: str, uniform: bool) -> None:
    bits = int(kind[1:])
    random = np.random.default_rng(bits)
    top = (1 << bits) - 1
    a, b = (random.integers(0, top, (32, 4), dtype=f"u{bits // 8}", endpoint=True) for _ in range(2))
    a[::3], b[::5] = top, 1  # carries that run through every word
    out = np.zeros_like(a)
    ptxemu.Device("sm_100a").launch(kernel(chain, kind, uniform), args=[out, a, b])
    for lane in range(32):
        row = 0 if uniform else lane
        words = 2 if chain == "mul" else 4
        x, y = number(a[row], bits, words), number(b[row], bits, words)
        want = {"add": x + y, "sub": x - y, "mul": x * y}[chain] % (1 << 4 * bits)
        assert number(out[lane], bits) == want


def test_signed_products() -> None:
    text = kernel("add", "s32", False).replace(CHAINS["add"].replace(".T", ".s32"), SIGNED)
    a, b = (np.random.default_rng(i).integers(-(1 << 31), 1 << 31, (32, 4)).astype(np.int32) for i in range(2))
    out = np.zeros_like(a)
    ptxemu.Device("sm_100a").launch(text, args=[out, a, b])
    for lane in range(32):
        product = int(a[lane, 0]) * int(b[lane, 0])
        assert out[lane, 0] == np.array(product + int(a[lane, 1])).astype(np.int64).astype(np.int32)
        assert out[lane, 1] == np.array((product >> 32) + int(b[lane, 1])).astype(np.int32)


SIGNED = "mad.lo.cc.s32 r0, a0, b0, a1; mad.hi.cc.s32 r1, a0, b0, b1; mov.s32 r2, 0; mov.s32 r3, 0;"


def test_every_form_has_a_case() -> None:
    text = kernel("mul", "u32", False).replace("madc.hi.T", "madc.hi")
    more = text.replace("mov.u32 j, %laneid;", "mov.u32 j, %laneid; madc.lo.cc.u32 r0, a0, b0, r0;")
    assert missing_forms(["extended"], [kernel("add", "u32", False), kernel("sub", "u32", False), more]) == []
