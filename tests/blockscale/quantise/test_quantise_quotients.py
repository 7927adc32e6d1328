"""What `kernels.parts.ieee.ShortQuotients` rests on, gone through with whole numbers and fractions."""

from fractions import Fraction

import numpy as np
import pytest

BETWEEN_CODES = [Fraction(n, 4) for n in (1, 3, 5, 7, 10, 14, 20)]
BETWEEN_SCALES = [Fraction(2 * n + 1, 16) for n in range(8, 16)]  # of one binade; block scales are normal there
BITS = {"bf16": 8, "fp16": 11}
TOO_LARGE = Fraction(1, 2**42)  # the most, as a part of it, by which a short quotient is above x / d before rounding


def short(bits):
    """Every significand of so many bits."""
    return [Fraction(n) for n in range(2 ** (bits - 1), 2**bits)]


def rounded_to_24(value):
    """The nearest fp32 number, as if exponents had no end; and its unit in the last place."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 24
    unit = Fraction(2) ** exponent
    while value / unit >= 2**24:
        unit *= 2
    while value / unit < 2**23:
        unit /= 2
    return round(value / unit) * unit, unit


def middles(point):
    """The middles between an fp32 number and its two neighbours."""
    _, unit = rounded_to_24(point)
    below = unit / 2 if (point / unit) == 2**23 else unit
    return point - below / 2, point + unit / 2


def sixths(bits):
    """fp32 significands of x / 6. None is near a middle, so that two rounded products add up to the nearest one."""
    found = set()
    for x in short(bits):
        nearest, unit = rounded_to_24(x / 6)
        assert abs(x / 6 - nearest) <= unit * Fraction(34, 100)
        found.add(nearest)
    return found


CASES = [(BETWEEN_CODES, short(bits)) for bits in BITS.values()]
CASES += [(BETWEEN_SCALES, numbers(bits)) for bits in BITS.values() for numbers in (sixths, short)]


@pytest.mark.parametrize(("points", "numbers"), CASES, ids=range(len(CASES)))
def test_no_middle_lies_between_a_quotient_and_what_is_a_little_larger(points, numbers):
    """x / d < middle <= x / d (1 + TOO_LARGE) for no fp32 number d: of those below x / middle the nearest is the worst.
    Nor does x / d hit a middle, from where rounding to even would go another way than rounding up."""
    for point in points:
        for middle in middles(point):
            for x in numbers:
                edge = x / middle
                nearest, unit = rounded_to_24(edge)
                assert nearest != edge
                above = nearest if nearest > edge else nearest + unit
                assert x / above * (1 + TOO_LARGE) < middle


def test_the_one_quotient_that_is_just_above_a_middle():
    """1/4 by 1 - 2^-24 is above the middle by its 2^48th, which only a sum that is too large shows."""
    d = np.float32(1 - 2.0**-24)
    assert Fraction(1, 4) / Fraction(float(d)) > middles(Fraction(1, 4))[1]
    for y in (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), d):
        assert _short_quotient(np.float32(0.25), d, y) == np.nextafter(np.float32(0.25), np.float32(1))


def test_quotients_of_random_numbers_are_on_the_right_side():
    random = np.random.default_rng(0)
    x = (random.integers(128, 256, 200_000) * 2.0 ** random.integers(-12, -3, 200_000)).astype(np.float32)
    d = random.uniform(0.5, 8, 200_000).astype(np.float32)
    d[::2] = (x[::2] / random.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], 100_000)).astype(np.float32)
    y = (1 / d.astype(np.float64)).astype(np.float32)
    points = np.array([float(p) for p in BETWEEN_CODES], dtype=np.float32)[:, None]
    exact = x / d
    for near in (y, np.nextafter(y, np.float32(0)), np.nextafter(y, np.float32(9))):
        found = _short_quotient(x, d, near)
        assert np.array_equal(found > points, exact > points)
        assert np.array_equal(found >= points, exact >= points)


def _short_quotient(x, d, y):
    """As the kernel has it, from any y near 1 / d; sums in numbers of 64 bits are exact before they are rounded."""
    wide = np.longdouble
    if np.finfo(wide).nmant < 63:
        pytest.skip("long double has fewer than 64 bits")
    e = (1 - wide(d) * wide(y)).astype(np.float32)
    rest = (wide(e) * wide(y) + wide(y) * wide(2.0**-43)).astype(np.float32)
    return (wide(x) * wide(y) + wide((wide(x) * wide(rest)).astype(np.float32))).astype(np.float32)
