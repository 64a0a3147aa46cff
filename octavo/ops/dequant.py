"""Backend `dequant`: any GPU; 16-bit operands, one matrix product. Correct, and not yet fast.

E4M3 and E5M2 codes are exact in FP16 and BF16 but code * scale is not, so scales per tensor or per output row stay out
of the product and multiply its float32 result. Block and group scales are rounded into a 16-bit weight (half a unit
of its last place, 8 bits in BF16), and so is the weight of the backward pass, whose contracted dimension the row
scales vary along.
"""

from __future__ import annotations

import torch

from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.ops import reference

quantize = reference.quantize


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return (q.as_float8().float() * q.granularity.expand(q.scale, tuple(q.shape))).to(dtype)


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    if activation == "none":
        a, a_scale = x, None
    else:
        rule: Rule = reference.activation_rule(activation)
        a, a_scale = _operand(reference.quantize(x, input_scale, rule), x.dtype)
    b, b_scale = _operand(w, x.dtype)
    y = _matmul(a, b)
    if a_scale is not None:
        y = y * a_scale
    if b_scale is not None:
        y = y * b_scale.mT
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    return grad @ dequantize(w, grad.dtype)


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    x, a_scale = _operand(a, dtype)
    w, b_scale = _operand(b, dtype)
    y = _matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])
    if a_scale is not None:
        y = y * a_scale
    if b_scale is not None:
        y = y * b_scale.mT
    return y.to(dtype)


def _operand(q: ScaledTensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix of `dtype` and the scale [rows or 1, 1] left to apply to the product, None if it is in the matrix."""
    if isinstance(q.granularity, (PerTensor, PerRow)):
        return q.as_float8().to(dtype), q.scale.reshape(1, 1) if isinstance(q.granularity, PerTensor) else q.scale
    return dequantize(q, dtype), None


def _matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T -> float32 [M, N], accumulated in float32."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return x.float() @ w.float().mT
    return torch.mm(x, w.mT, out_dtype=torch.float32)
