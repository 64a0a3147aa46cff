"""The oracle: quantize, dequantize and multiply, exact on any device, in plain integer and float32 arithmetic.

Everything faster is checked against this file, and it is the backend of last resort.
"""

from __future__ import annotations

import torch

from octavo.formats.codec import decode, encode
from octavo.formats.granularity import Granularity
from octavo.formats.scale import mse_scale, scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import FloatSpec


def quantize_ref(
    x: torch.Tensor,
    spec: FloatSpec,
    granularity: Granularity,
    *,
    method: str = "absmax",
    scale_format: str = "fp32",
    scale: torch.Tensor | None = None,
) -> ScaledTensor:
    """x (any float dtype, [..., N, K]) -> codes and scales; codes are RNE(x / scale) with an IEEE float32 division.

    scale: use this one (float32, `granularity.scale_shape(x.shape)`) instead of computing it.
    """
    if scale is None:
        if method == "mse":
            scale = mse_scale(x, spec, granularity, scale_format)
        else:
            scale = scale_of(granularity.amax(x), spec, scale_format)
    codes = encode(x.float() / granularity.expand(scale, tuple(x.shape)), spec)
    return ScaledTensor(codes, scale, spec, granularity)


def dequantize_ref(q: ScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """code * scale in float32, rounded once to `dtype`."""
    return (decode(q.codes, q.spec) * q.granularity.expand(q.scale, tuple(q.codes.shape))).to(dtype)


def scaled_mm_ref(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """a [..., M, K] @ b [N, K]^T -> [..., M, N]: dequantized operands, float32 arithmetic, one final rounding."""
    return (dequantize_ref(a) @ dequantize_ref(b).mT).to(dtype)
