"""scaled_mm: the product of two quantized matrices."""

from __future__ import annotations

import torch

from octavo.base.errors import ShapeError, require_type
from octavo.formats.scaled import ScaledTensor
from octavo.ops import library


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
) -> torch.Tensor:
    """a [..., M, K] @ b [N, K]^T -> [..., M, N] of `out_dtype`: float32 accumulation, scales applied, one rounding.

    Not differentiable. ShapeError where the contracted lengths differ or b is not a matrix.
    """
    require_type("scaled_mm: a", a, ScaledTensor)
    require_type("scaled_mm: b", b, ScaledTensor)
    if b.codes.dim() != 2 or not a.codes.dim() or a.shape[-1] != b.shape[-1]:
        raise ShapeError("scaled_mm", got=f"{list(a.shape)} and {list(b.shape)}", need="[..., M, K] and [N, K]")
    a_rule, b_rule = (a.spec.name, *a.granularity.tile), (b.spec.name, *b.granularity.tile)
    result: torch.Tensor = library.scaled_mm(a.codes, a.scale, b.codes, b.scale, *a_rule, *b_rule, out_dtype, backend)
    return result
