"""e^z for -87 <= z <= 88 in products and sums that are each rounded to fp32, so that every machine gets the same bits.

z = n ln 2 + r with the integer n nearest to z / ln 2, and e^z = 2^n (1 + r + r^2 p(r)). n is made by adding 3 x 2^22,
whose unit in the last place is 1; n x LN2_HIGH is exact. p interpolates (e^r - 1 - r) / r^2 at Chebyshev's nodes of
|r| <= 0.34662. Within 1.5 x 2^-24 of e^z. The steps, in this order, every operation rounded:

    s = z LOG2_E + INTEGERS,  n = s - INTEGERS,  r = (z - n LN2_HIGH) - n LN2_LOW
    p = POLYNOMIAL by Horner's rule,  y = (p (r r) + r) + 1,  y 2^n
"""

LEAST, MOST = -87.0, 88.0
INTEGERS = 1.5 * 2.0**23
LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62ep-1")
LN2_LOW = float.fromhex("0x1.0bfbe8p-15")
POLYNOMIAL = tuple(map(float.fromhex, ("0x1p-1", "0x1.5554dcp-3", "0x1.55551ap-5", "0x1.120b72p-7", "0x1.6d110ep-10")))
