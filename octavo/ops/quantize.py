"""quantize, dequantize, fake_quantize: tensors in, ScaledTensor out, and back."""

from __future__ import annotations

import torch

from octavo.base.errors import ConfigError, ShapeError, require_type
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.ops import library

DEFAULT_RULE = Rule()


def quantize(
    x: torch.Tensor, rule: Rule | None = None, *, scale: torch.Tensor | None = None, backend: str = "auto"
) -> ScaledTensor:
    """x [..., N, K], any float dtype -> codes RNE(x / scale) and float32 scales, x ~ decode(codes) * scale.

    rule: default E4M3, one absmax scale per row. scale: use this one (float32, of shape
    `rule.granularity.scale_shape(x.shape)`) instead of computing it. Values saturate at +-spec.max, NaN stays NaN.
    Not differentiable; `fake_quantize` is. ShapeError for a wrong scale, UnsupportedError for a backend that cannot.
    """
    rule = check(x, rule or DEFAULT_RULE, scale)
    codes, out_scale = library.quantize(
        x.detach(), scale, rule.spec.name, *rule.granularity.tile, rule.method, rule.scale_format, backend
    )
    return ScaledTensor(codes, out_scale, rule.spec, rule.granularity)


def dequantize(q: ScaledTensor, dtype: torch.dtype = torch.float32, *, backend: str = "auto") -> torch.Tensor:
    """code * scale in float32, rounded once to `dtype` (float16, bfloat16, float32 or float64). Shape of the codes."""
    require_type("dequantize: q", q, ScaledTensor)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError("dequantize", got=str(dtype), need="float16, bfloat16, float32 or float64")
    result: torch.Tensor = library.dequantize(q.codes, q.scale, q.spec.name, *q.granularity.tile, dtype, backend)
    return result


def fake_quantize(
    x: torch.Tensor, rule: Rule | None = None, *, scale: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """x as it is after quantizing and dequantizing, in x's shape and dtype. The gradient passes straight through."""
    rule = check(x, rule or DEFAULT_RULE, scale)
    settings = (rule.spec.name, *rule.granularity.tile, rule.method, rule.scale_format, backend)
    result: torch.Tensor = library.fake_quantize(x, scale, *settings)
    return result


def check(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None) -> Rule:
    """Say no before the op does: its errors name no remedy."""
    require_type("quantize: x", x, torch.Tensor)
    require_type("quantize: rule", rule, Rule)
    if not x.is_floating_point() or x.dtype.itemsize < 2 or x.dim() < 1:
        raise ShapeError("quantize", got=f"{x.dtype} {list(x.shape)}", need="float values of at least one dimension")
    if not rule.spec.mantissa:
        raise ConfigError(f"{rule.spec} holds scales, not values", fix="Use E4M3 or E5M2.")
    if rule.rounding != "nearest":
        raise ConfigError(
            f"rounding '{rule.rounding}' needs the inputs of the layer", fix="Calibrate first, or use 'nearest'."
        )
    if scale is not None:
        want = rule.granularity.scale_shape(tuple(x.shape))
        if tuple(scale.shape) != want or scale.dtype != torch.float32:
            got = f"{scale.dtype} {list(scale.shape)} for x {list(x.shape)}"
            raise ShapeError(f"quantize: scale, {rule.granularity}", got=got, need=f"float32 {list(want)}")
    return rule
