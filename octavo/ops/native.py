"""Backend `native`: FP8 tensor cores through torch's scaled_mm (cuBLAS), SM89 and later.

Weights per tensor or row take activations per tensor (static) or token; 128 x 128 blocks take groups of 128, on SM90.
The gradient dX = dY W needs no second quantization of W: the scales of W's rows, which lie on the contracted dimension,
are folded into dY in float32 before dY is quantized per token, and what is left of W is its codes, transposed bytes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from octavo.base.errors import ShapeError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.recipe import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import quantize_grid
from octavo.ops import reference

PER_TOKEN = Rule(E4M3, PerRow())


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    """x [M, K], 16 bit -> codes and scales per token or group of 128, the bits of the reference.

    Given scales, searched ones and powers of two are left to the reference.
    """
    if scale is not None or rule.method != "absmax" or rule.scale_format != "fp32":
        return reference.quantize(x, scale, rule)
    return _quantize(x, rule)


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] bfloat16, quantized as `activation` says, times w [N, K] -> [M, N]; bias added in float32."""
    rule = reference.activation_rule(activation)
    if input_scale is not None:
        a = reference.quantize(x, input_scale, rule)
    else:
        a = _quantize(x, rule, scale_by_columns=isinstance(w.granularity, PerBlock))
    y = scaled_mm(a, w, x.dtype)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    """grad [M, N] bfloat16 -> grad @ dequantize(w) [M, K]: FP8 operands, w's scales folded into grad."""
    folded = w.per_row().scale.flatten()
    a = _quantize(grad, PER_TOKEN, folded)
    ones = torch.ones((1, w.shape[1]), device=grad.device)
    b = transposed(w.codes).view(w.spec.dtype).mT
    return F.scaled_mm(
        a.as_float8(), b, a.scale, F.ScalingType.RowWise, ones, F.ScalingType.RowWise, output_dtype=grad.dtype
    )


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] of `dtype`. ShapeError where the scales of a do not go with those of b."""
    if isinstance(b.granularity, PerBlock):
        if a.granularity != PerGroup(128):
            raise ShapeError("scaled_mm with block128x128 weights", got=f"inputs per {a.granularity}", need="group128")
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        scales = a.scale.mT.contiguous().mT, b.scale.mT  # cuBLAS reads the scales of a column by column
    elif isinstance(a.granularity, PerTensor) and isinstance(b.granularity, PerTensor):
        recipes = F.ScalingType.TensorWise, F.ScalingType.TensorWise
        scales = a.scale, b.scale
    else:
        recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
        scales = a.per_row().scale, b.per_row().scale.mT
    return F.scaled_mm(
        a.as_float8(), b.as_float8().mT, scales[0], recipes[0], scales[1], recipes[1], output_dtype=dtype
    )


def transposed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] -> [K, N], contiguous."""
    n, k = codes.shape
    out = codes.new_empty(k, n)
    arguments = codes, out, np.int32(n), np.int32(k)
    loader.launch(loader.Variant("transpose.cu", ()), (-(-n // 128), -(-k // 128)), 256, arguments, codes)
    return out


def _quantize(
    x: torch.Tensor, rule: Rule, columns: torch.Tensor | None = None, scale_by_columns: bool = False
) -> ScaledTensor:
    m, k = x.shape
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    grouped = isinstance(rule.granularity, PerGroup)
    grid = quantize_grid(m, k, grouped)
    defines = {"X_BF16": int(x.dtype == torch.bfloat16), "GROUPED": int(grouped), "FOLD": int(columns is not None)}
    variant = loader.Variant("quantize.cu", (*defines.items(), ("ROUNDS", grid.rounds)))
    codes = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    rows, groups = rule.granularity.scale_shape((m, k))
    scale = (
        torch.empty((groups, rows), device=x.device).mT
        if scale_by_columns
        else torch.empty((rows, groups), device=x.device)
    )
    if not codes.numel():
        return ScaledTensor(codes, scale.fill_(1.0), rule.spec, rule.granularity)
    sizes = np.int64(m), np.int32(k), np.int64(x.stride(0)), *(np.int64(stride) for stride in scale.stride())
    loader.launch(variant, (grid.blocks,), 256, (x, columns, codes, scale, *sizes), x)
    return ScaledTensor(codes, scale, rule.spec, rule.granularity)
