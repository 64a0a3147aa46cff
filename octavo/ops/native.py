"""Backend `native`: FP8 tensor cores through torch's scaled_mm (cuBLAS), SM89 and later.

Weights per tensor or row take activations per tensor (static) or token; 128 x 128 blocks take groups of 128, on SM90.
The gradient dX = dY W needs no second quantization of W: the scales of W's rows, which lie on the contracted dimension,
are folded into dY in float32 before dY is quantized per token, and what is left of W is its codes, transposed bytes.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from octavo.base.errors import ShapeError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import group_block, row_block
from octavo.ops import cast, reference

FAST_SUMS = 8192
TRANSPOSE = loader.Variant("transpose.cu", ())
_PER_ROW = PerRow()


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    """x [..., K], 16 bit -> codes and scales per tensor, token or group of 128, or by given ones: the reference's bits.

    Searched scales and powers of two are left to the reference.
    """
    if scale is not None:
        return cast.quantize(x, scale, rule)
    if rule.method != "absmax" or rule.scale_format != "fp32":
        return reference.quantize(x, scale, rule)
    if isinstance(rule.granularity, PerTensor):
        return cast.quantize(x, None, rule)
    q = _quantize(x.reshape(-1, x.shape[-1]), rule)
    shape = rule.granularity.scale_shape(tuple(x.shape))
    return ScaledTensor(q.codes.reshape(x.shape), q.scale.reshape(shape), q.spec, q.granularity)


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] bfloat16, quantized as `activation` says, times w [N, K] -> [M, N]; bias added in float32."""
    rule = reference.activation_rule(activation)
    if input_scale is not None:
        a = cast.quantize(x, input_scale, rule)
    else:
        a = _quantize(x, rule, scale_by_columns=isinstance(w.granularity, PerBlock))
    y = scaled_mm(a, w, x.dtype)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    """grad [M, N] bfloat16 -> grad @ dequantize(w) [M, K]: FP8 operands, w's scales folded into grad."""
    folded = w.per_row().scale.flatten()
    return product_with_codes(quantize_tokens(grad, columns=folded)[0], transposed(w.codes), grad.dtype)


def product_with_codes(a: ScaledTensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a [M, N] per token times the E4M3 codes b [K, N]^T as they are -> [M, K] of `dtype`."""
    return scaled_mm(a, ScaledTensor(b, _ones(b.shape[0], b.device), E4M3, _PER_ROW), dtype)


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, short_sums: bool = True) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] of `dtype`. ShapeError where the scales of a do not go with those of b.

    short_sums: where they are good enough for operands in E4M3, let the tensor cores keep them (docs/numerics.md).
    """
    if isinstance(b.granularity, PerBlock):
        if a.granularity != PerGroup(128):
            raise ShapeError("scaled_mm with block128x128 weights", got=f"inputs per {a.granularity}", need="group128")
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        # cuBLAS reads the scales of a column by column, those of b in rows of a multiple of four.
        scales = a.scale.mT.contiguous().mT, F.pad(b.scale, (0, -b.scale.shape[1] % 4)).mT
    elif isinstance(a.granularity, PerTensor) and isinstance(b.granularity, PerTensor):
        recipes = F.ScalingType.TensorWise, F.ScalingType.TensorWise
        scales = a.scale, b.scale
    else:
        recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
        scales = a.per_row().scale, b.per_row().scale.mT
    fast = short_sums and recipes[0] == F.ScalingType.RowWise and sums_may_be_fast(a.shape[1])
    return F.scaled_mm(
        a.as_float8(),
        b.as_float8().mT,
        scales[0],
        recipes[0],
        scales[1],
        recipes[1],
        output_dtype=dtype,
        use_fast_accum=fast,
    )


def sums_may_be_fast(k: int) -> bool:
    """Whether FP8 tensor cores may keep their short sums over k products (docs/numerics.md)."""
    return k <= FAST_SUMS


def transposed(*codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N_i, K] of up to four matrices -> [K, sum of N_i], contiguous."""
    rows, k = [part.shape[0] for part in codes], codes[0].shape[1]
    ends = list(accumulate(rows))
    out = codes[0].new_empty(k, ends[-1])
    four = (*codes, None, None, None)[:4]
    sizes = [np.int32(end) for end in (*ends, *[ends[-1]] * 3)[:4]]
    grid = -(-max(rows) // 128), -(-k // 128), len(codes)
    loader.launch(TRANSPOSE, grid, 256, (*four, out, *sizes, np.int32(k), np.int64(ends[-1])), out, True)
    return out


def quantize_tokens(
    *parts: torch.Tensor,
    columns: torch.Tensor | None = None,
    epsilon: float | None = None,
    spare: int = 0,
    delta: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[ScaledTensor, torch.Tensor | None]:
    """x = up to three 16-bit matrices [M, K_i] beside each other -> codes [M, K] and one scale a token; and rstd.

    columns [K] float32 are multiplied in first. With epsilon they are the weight of an RMSNorm and rstd [M] float32 is
    (mean(x^2) + epsilon)^-1/2: the result is the normalized row, whose values are never written. Else rstd is None.
    The codes are the front of rows with `spare` bytes more, which are not written: room for columns of an adapter.
    delta [M, K], with one part: added to it first; total [M, K] takes the sum, contiguous.
    """
    parts = tuple([aligned(part) for part in parts])
    x, ends = parts[0], tuple(accumulate([part.shape[1] for part in parts]))
    m, k, device = x.shape[0], ends[-1], x.device
    codes = roomy_codes(m, k, spare, device)
    scale = torch.empty((m, 1), device=device)
    rstd = torch.empty(m, device=device) if epsilon is not None else None
    q = ScaledTensor(codes, scale, E4M3, _PER_ROW)
    if not codes.numel():
        scale.fill_(1.0)
        return q, rstd
    if delta is not None and total is not None and row_block(k, columns is not None).rounds > 4:
        x, delta = torch.add(x, delta, out=total), None
        parts = (x,)
    added = delta is not None
    variant, threads, grid, sizes = _token_kernel(x.dtype, m, ends, spare, columns is not None, epsilon, added, device)
    three = (*parts, aligned(delta) if delta is not None else None, None, None)[:3]
    strides = [np.int64(part.stride(0) if part is not None else 0) for part in three]
    loader.launch(variant, grid, threads, (*three, columns, codes, scale, rstd, *sizes, *strides, total), x, True)
    return q, rstd


@lru_cache(maxsize=1024)
def _token_kernel(
    dtype: torch.dtype,
    m: int,
    ends: tuple[int, ...],
    spare: int,
    fold: bool,
    epsilon: float | None,
    added: bool,
    device: torch.device,
) -> tuple[loader.Variant, int, tuple[int], tuple[np.generic, ...]]:
    """quantize.cu for tokens: the variant, threads, grid, and the arguments that are sizes. Kept: steps repeat."""
    k = ends[-1]
    block = row_block(k, fold)
    defines = {
        "X_BF16": int(dtype == torch.bfloat16),
        "GROUPED": 0,
        "FOLD": int(fold),
        "PARTS": len(ends),
        "NORM": int(epsilon is not None),
        "ADD": int(added),
        **block.defines,
    }
    variant = loader.Variant("quantize.cu", tuple(defines.items()), block.shared_bytes(2 if added else 1))
    of_parts = np.float32(epsilon or 0.0), np.int32(ends[0]), np.int32(ends[min(1, len(ends) - 1)])
    sizes = *of_parts, np.int64(m), np.int32(k), np.int64(k + spare)
    return variant, block.threads, block.grid(m, loader.limits(device)[0]), sizes


def roomy_codes(m: int, k: int, spare: int, device: torch.device) -> torch.Tensor:
    """Codes [m, k], not set, in rows of k + spare bytes."""
    codes = torch.empty((m, k + spare), dtype=torch.uint8, device=device)
    return codes[:, :k] if spare else codes


def _quantize(
    x: torch.Tensor, rule: Rule, columns: torch.Tensor | None = None, scale_by_columns: bool = False
) -> ScaledTensor:
    if not isinstance(rule.granularity, PerGroup):
        return quantize_tokens(x, columns=columns)[0]
    x = aligned(x)
    m, k = x.shape
    defines = {"X_BF16": int(x.dtype == torch.bfloat16), "GROUPED": 1, "FOLD": int(columns is not None)}
    block = group_block(k)
    variant = loader.Variant("quantize.cu", (*defines.items(), ("THREADS", block.threads), ("ROUNDS", block.rows)))
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
    loader.launch(variant, block.grid(m, k), block.threads, (x, columns, codes, scale, *sizes), x, True)
    return ScaledTensor(codes, scale, rule.spec, rule.granularity)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows that begin on 16 bytes, which is how they are loaded."""
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


@lru_cache(maxsize=64)
def _ones(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones((rows, 1), device=device)
