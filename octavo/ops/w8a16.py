"""Backend `w8a16`: FP8 weights times 16-bit inputs in one kernel, for the few tokens of decoding. SM80 and later."""

from __future__ import annotations

import numpy as np
import torch

from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import Tile, w8a16_tile


def variant(w: ScaledTensor, dtype: torch.dtype, tile: Tile) -> loader.Variant:
    scales = 0 if isinstance(w.granularity, PerTensor) else 1 if isinstance(w.granularity, PerRow) else 2
    defines = {
        "X_BF16": int(dtype == torch.bfloat16),
        "E5M2": int(w.spec.name == "e5m2"),
        "SCALES": scales,
        "TILES_N": tile.tiles_n,
        "TILES_M": tile.tiles_m,
        "WARPS_N": tile.warps_n,
        "WARPS_K": tile.warps_k,
        "DEPTH": tile.depth,
    }
    return loader.Variant("w8a16.cu", tuple(defines.items()))


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T + bias -> [M, N]: exact decoding, float32 sums, scale and bias in float32, one rounding."""
    m, (n, k) = x.shape[0], w.shape
    if x.stride(1) != 1 or x.stride(0) % 8:
        x = x.contiguous()
    x, codes = _on_16_bytes(x), _on_16_bytes(w.codes.contiguous())
    bias = bias.to(x.dtype).contiguous() if bias is not None else None
    y = x.new_empty(m, n)
    tile = w8a16_tile(m)
    sizes = np.int32(m), np.int32(n), np.int32(k), np.int64(x.stride(0))
    arguments = (codes, w.scale.contiguous(), x, bias, y, *sizes)
    loader.launch(variant(w, x.dtype, tile), tile.grid(m, n), tile.threads, arguments, x)
    return y


def _on_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view may begin anywhere; the kernel loads 16 bytes at once. An allocation begins on 512."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
