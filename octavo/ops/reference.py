"""Backend `reference`: formats.reference behind the interface of a backend. Exact, any device, any float dtype.

Products are taken in float32 (float64 for float64 inputs) over dequantized operands and rounded once, to the dtype of
x. Everything faster is checked against this file.
"""

from __future__ import annotations

import torch

from octavo.formats.granularity import Granularity, PerGroup, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref, scaled_mm_ref
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3

# What an engine does to the input of a linear, per activation mode: E4M3 with one scale per tensor, row or 128 values.
ACTIVATION_GRANULARITY: dict[str, Granularity] = {"static": PerTensor(), "token": PerRow(), "group128": PerGroup(128)}


def activation_rule(activation: str) -> Rule:
    """The rule that an activation mode other than `none` applies to x [M, K]."""
    return Rule(E4M3, ACTIVATION_GRANULARITY[activation])


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    return quantize_ref(x, rule.spec, rule.granularity, method=rule.method, scale_format=rule.scale_format, scale=scale)


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_ref(q, dtype)


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if activation != "none":
        x_in = dequantize_ref(quantize(x, input_scale, activation_rule(activation))).to(wide)
    else:
        x_in = x.to(wide)
    y = x_in @ dequantize_ref(w).to(wide).mT
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) @ dequantize_ref(w).to(wide)).to(grad.dtype)


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return scaled_mm_ref(a, b, dtype)
