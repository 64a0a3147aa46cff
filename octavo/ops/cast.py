"""Quantization on the GPU with given scales, or one scale for a whole tensor: cast.cu."""

from __future__ import annotations

import numpy as np
import torch

from octavo.formats.granularity import Granularity, PerGroup, PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import cast_block
from octavo.ops import reference

PARTS = 256  # magnitudes that are left for the second kernel


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    """x [..., K] 16 bit, K a multiple of 8 -> E4M3 codes by `scale`, or by one for all of x: the reference's bits.

    Scales per tensor, row or group of 128; without one, per tensor by absmax.
    """
    if not x.numel():
        return reference.quantize(x, scale, rule)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    m, k = rows.shape
    block = cast_block(k)
    codes, partial = torch.empty((m, k), dtype=torch.uint8, device=x.device), None
    if scale is None:
        partial = torch.empty(min(m, block.threads, PARTS), device=x.device)
        found, kind = torch.empty((), device=x.device), 3
        sizes = np.int32(m), np.int32(k), np.int64(rows.stride(0))
        amax = loader.Variant("cast.cu", (("X_BF16", _bf16(x)), ("AMAX", 1), *block.macros))
        loader.launch(amax, (len(partial),), block.threads, (rows, partial, *sizes), x)
    else:
        found, kind = scale.contiguous(), _kind(rule.granularity)
    count = np.int32(0 if partial is None else len(partial))
    cast = loader.Variant("cast.cu", (("X_BF16", _bf16(x)), ("AMAX", 0), ("SCALES", kind), *block.macros))
    arguments = rows, found, partial, codes, np.int32(k), count, np.int64(rows.stride(0))
    loader.launch(cast, block.grid(m, k), block.threads, arguments, x)
    return ScaledTensor(codes.reshape(x.shape), found if scale is None else scale, rule.spec, rule.granularity)


def _kind(granularity: Granularity) -> int:
    return {PerTensor: 0, PerRow: 1, PerGroup: 2}[type(granularity)]


def _bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)
