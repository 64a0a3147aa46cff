"""Backend `w8a16`: FP8 weights times 16-bit inputs, SM80 and later. No FP8 units needed.

Few tokens (decoding): one kernel reads the codes once and decodes them in registers. More tokens: the weight is
decoded into a 16-bit matrix that lives for one product.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import Tile, w8a16_tile
from octavo.ops import dequant


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T + bias -> [M, N], float32 sums; few tokens: exact weights and one rounding."""
    m, (n, k) = x.shape[0], w.shape
    bias = bias.to(x.dtype).contiguous() if bias is not None else None
    tile = w8a16_tile(m, n, k)
    if tile is None:
        wide = dequantize(w, x.dtype)
        return torch.addmm(bias, x, wide.mT) if bias is not None else x @ wide.mT
    if x.stride(1) != 1 or x.stride(0) % 8:
        x = x.contiguous()
    x, codes = _on_16_bytes(x), _on_16_bytes(w.codes.contiguous())
    y = x.new_empty(m, n)
    sizes = np.int32(m), np.int32(n), np.int32(k), np.int64(x.stride(0))
    variant = few_tokens(tile, x.dtype, w)
    loader.launch(variant, tile.grid(m, n), tile.threads, (codes, w.scale.contiguous(), x, bias, y, *sizes), x)
    return y


def few_tokens(tile: Tile, dtype: torch.dtype, w: ScaledTensor) -> loader.Variant:
    """w8a16.cu for inputs of this dtype and weights like w."""
    defines = {
        "X_BF16": int(dtype == torch.bfloat16),
        "E5M2": int(w.spec.name == "e5m2"),
        "SCALES": _scales(w),
        "TILES_N": tile.tiles_n,
        "TILES_M": tile.tiles_m,
        "WARPS_N": tile.warps_n,
        "WARPS_K": tile.warps_k,
        "DEPTH": tile.depth,
    }
    return loader.Variant("w8a16.cu", tuple(defines.items()))


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    """grad [M, N] @ w [N, K] -> [M, K], from the same codes."""
    return grad @ dequantize(w, grad.dtype)


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """code * scale in float32, rounded once to `dtype`: the bits of the reference, NaN codes included."""
    if q.codes.dim() != 2:  # stacked matrices, each with scales of its own
        return dequant.dequantize(q, dtype)
    n, k = q.shape
    out = torch.empty((n, k), dtype=dtype, device=q.codes.device)
    defines = {"OUT_BF16": int(dtype == torch.bfloat16), "SCALES": _scales(q), "ALIGNED": int(k % 16 == 0)}
    segments = -(-k // 16)
    arguments = (
        _on_16_bytes(q.codes.contiguous()),
        q.scale.contiguous(),
        out,
        np.int64(n),
        np.int32(k),
        np.int32(segments),
    )
    variant = loader.Variant("dequantize.cu", tuple(defines.items()))
    loader.launch(variant, (-(-n * segments // 256),), 256, arguments, out)
    return out


def _scales(q: ScaledTensor) -> int:
    return 0 if isinstance(q.granularity, PerTensor) else 1 if isinstance(q.granularity, PerRow) else 2


def _on_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view may begin anywhere; the kernel loads 16 bytes at once. An allocation begins on 512."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
