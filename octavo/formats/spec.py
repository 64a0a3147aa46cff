"""FloatSpec: an 8-bit float described by its bit layout; every limit follows from the layout.

E4M3 and E5M2 are those of "FP8 Formats for Deep Learning" (arXiv 2209.05433, table 1): E4M3 has no infinity and one
NaN pattern per sign (torch.float8_e4m3fn), E5M2 follows IEEE 754. E8M0 is the scale format of the OCP
Microscaling specification 1.0: an unsigned power of two, 0xFF is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FloatSpec:
    """exponent and mantissa: widths in bits. bias: of the exponent. ieee: the top exponent means Inf and NaN."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    signed: bool
    ieee: bool
    dtype: torch.dtype

    @cached_property
    def max(self) -> float:
        """The largest finite value: 448 for E4M3, 57344 for E5M2, 2**127 for E8M0."""
        top = 2**self.exponent - 1 - self.bias
        if self.ieee:
            return (2 - _pow2(-self.mantissa)) * _pow2(top - 1)
        if self.mantissa:
            return (2 - 2 * _pow2(-self.mantissa)) * _pow2(top)  # the all-ones pattern is NaN
        return _pow2(top - 1)

    @cached_property
    def min_normal(self) -> float:
        """The smallest normal value: 2**-6 for E4M3, 2**-14 for E5M2. E8M0 has no subnormals: 2**-127."""
        return _pow2(1 - self.bias) if self.mantissa else _pow2(-self.bias)

    @cached_property
    def min_subnormal(self) -> float:
        """The smallest positive value: 2**-9 for E4M3, 2**-16 for E5M2."""
        return self.min_normal * _pow2(-self.mantissa)

    @cached_property
    def nan_codes(self) -> tuple[int, ...]:
        """Every byte that decodes to NaN: 0x7F and 0xFF for E4M3, six for E5M2, 0xFF for E8M0."""
        if not self.mantissa:
            return (0xFF,)
        ones = (1 << (self.exponent + self.mantissa)) - 1
        first = (ones - (1 << self.mantissa) + 2) if self.ieee else ones
        positive = range(first, ones + 1)
        return tuple(positive) + tuple(code | 0x80 for code in positive)

    def __str__(self) -> str:
        return self.name


E4M3 = FloatSpec("e4m3", exponent=4, mantissa=3, bias=7, signed=True, ieee=False, dtype=torch.float8_e4m3fn)
E5M2 = FloatSpec("e5m2", exponent=5, mantissa=2, bias=15, signed=True, ieee=True, dtype=torch.float8_e5m2)
E8M0 = FloatSpec("e8m0", exponent=8, mantissa=0, bias=127, signed=False, ieee=False, dtype=torch.float8_e8m0fnu)

SPECS = {spec.name: spec for spec in (E4M3, E5M2, E8M0)}


def _pow2(exponent: int) -> float:
    return float(2.0**exponent)
