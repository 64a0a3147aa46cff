"""An oracle that shares nothing with the package: the grid written out from the formats' published tables, rounding
by comparing exact rationals."""

from fractions import Fraction

import numpy as np

# name: (exponent bits, mantissa bits, bias, largest finite, smallest subnormal, NaN code of the positive sign)
# arXiv 2209.05433 table 1; the NaN is torch's own choice for E5M2 (any of 0x7D..0x7F is one).
TABLE = {
    "e4m3": (4, 3, 7, Fraction(448), Fraction(1, 512), 0x7F),
    "e5m2": (5, 2, 15, Fraction(57344), Fraction(1, 65536), None),
}


def grid(name: str) -> list[Fraction]:
    """Non-negative finite values; the index is the code."""
    _, mantissa, bias, largest, smallest, _ = TABLE[name]
    values, code = [], 0
    while not values or values[-1] < largest:
        exponent, fraction = code >> mantissa, Fraction(code & ((1 << mantissa) - 1), 1 << mantissa)
        lead, power = (1, exponent - bias) if exponent else (0, 1 - bias)
        values.append((lead + fraction) * Fraction(2) ** power)
        code += 1
    assert values[1] == smallest and values[-1] == largest
    return values


def nearest_code(x: float, name: str) -> int:
    """The code of |x| for a finite x: nearest, ties to the even code, saturating."""
    values, target = grid(name), abs(Fraction(x))
    if target >= values[-1]:
        return len(values) - 1
    above = next(i for i, v in enumerate(values) if v > target)
    low, high = target - values[above - 1], values[above] - target
    if low == high:
        return above - 1 if (above - 1) % 2 == 0 else above
    return above - 1 if low < high else above


def nearest_codes(x: np.ndarray, name: str) -> np.ndarray:
    """The same for an array of finite float32: midpoints of the grid are exact in float64, so comparing is exact."""
    values = np.array([float(v) for v in grid(name)])
    middle = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x.astype(np.float64))
    low = np.searchsorted(middle, magnitude, side="left")  # a tie stays below
    tie = (low < len(middle)) & (middle[np.minimum(low, len(middle) - 1)] == magnitude)
    return np.where(tie & (low % 2 == 1), low + 1, low).astype(np.uint8)
