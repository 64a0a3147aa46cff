"""Values to codes and back, bit by bit, in plain integer and float32 arithmetic on any device: the exact codec."""

from __future__ import annotations

from functools import cache

import torch

from octavo.formats.spec import FloatSpec

LIFT = 1.5 * 2.0**23  # times a step of the grid: where float32's own step is as wide, on both sides of it


def encode(x: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """Round float values to `spec`, as uint8 codes. Any shape and float dtype.

    Round to nearest, ties to even; saturate at +-spec.max, Inf too; NaN becomes the NaN of its sign; -0 and subnormals
    are kept. The torch cast is not used: what it does on overflow changed between versions.
    """
    bits = x.float().contiguous().view(torch.int32)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    x_abs = magnitude.view(torch.float32).clamp(max=spec.max)
    # Subnormal range: adding 2**23 units of the last place leaves the rounded count of units in the low bits.
    unit = spec.min_subnormal
    lifted = (x_abs.clamp(max=spec.min_normal) + unit * 2.0**23).view(torch.int32)
    subnormal = lifted - _bits_of(unit * 2.0**23)
    # Normal range: add half a unit of the last kept bit, less one where that bit is even, and cut.
    cut = 23 - spec.mantissa
    x_bits = x_abs.view(torch.int32)
    rounded = (x_bits + ((1 << (cut - 1)) - 1) + ((x_bits >> cut) & 1)) >> cut
    normal = rounded - ((127 - spec.bias) << spec.mantissa)
    code = torch.where(x_abs < spec.min_normal, subnormal, normal)
    code = torch.where(is_nan, torch.full_like(code, spec.nan_codes[len(spec.nan_codes) // 2 - 1]), code)
    return (code | sign).to(torch.uint8)


def all_finite(x: torch.Tensor) -> bool:
    """Whether float x holds neither NaN nor Inf: one pass, and a second one only where the sum says there might be."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def nearest(y: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """Round float32 y to the values of `spec`, nearest, ties to even, saturating: decode(encode(y)) without the codes.

    The step at y is 2**(exponent(y) - mantissa bits), at least the smallest subnormal. Dividing by it is exact.
    """
    y = y.clamp(-spec.max, spec.max)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = (power * 2.0**-spec.mantissa).clamp(min=spec.min_subnormal)
    return (y / step).round_().mul_(step)


def nearest_(
    y: torch.Tensor, spec: FloatSpec, scratch: torch.Tensor | None = None, *, of: torch.Tensor | None = None
) -> torch.Tensor:
    """`nearest` in place and in fewer operations, but zeros lose their sign. scratch: shaped and typed like y.

    of: what to round, in place of y itself. To it LIFT steps are added and taken away again: float32 rounds the sum to
    whole steps.
    """
    scratch = torch.empty_like(y) if scratch is None else scratch
    exponent, lift = _lifting(spec)
    torch.clamp(y if of is None else of, -spec.max, spec.max, out=y)
    torch.bitwise_and(y.view(torch.int32), exponent, out=scratch.view(torch.int32))
    steps = scratch.mul_(lift).clamp_min_(LIFT * spec.min_subnormal)
    return y.add_(steps).sub_(steps)


@cache
def _lifting(spec: FloatSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent's bits, and what makes LIFT steps of a power of two; as tensors they cost less than as numbers."""
    factor = LIFT * 2.0**-spec.mantissa
    return torch.tensor(0x7F800000, dtype=torch.int32, device="cpu"), torch.tensor(factor, device="cpu")


def decode(codes: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """uint8 codes (or the float8 dtype of `spec`) -> float32, exact."""
    return decode_table(spec).to(codes.device)[codes.view(torch.uint8).int()]


def decode_table(spec: FloatSpec) -> torch.Tensor:
    """float32 [256]: what each byte means, from the bit layout."""
    byte = torch.arange(256, dtype=torch.int32)
    width = spec.exponent + spec.mantissa
    body = byte & ((1 << width) - 1)
    exponent, fraction = body >> spec.mantissa, (body & ((1 << spec.mantissa) - 1)).double()
    steps = 2.0**spec.mantissa
    normal = (1 + fraction / steps) * torch.exp2((exponent - spec.bias).double())
    value = torch.where((exponent > 0) | (spec.mantissa == 0), normal, fraction * spec.min_subnormal)
    if spec.ieee:
        value = torch.where(exponent == (1 << spec.exponent) - 1, torch.full_like(value, torch.inf), value)
    value[list(spec.nan_codes)] = torch.nan
    return torch.where((byte > 127) & spec.signed, -value, value).float()


def _bits_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
