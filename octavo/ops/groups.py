"""What octavo.ops.fused does per token, per group of 128: the inputs that weights with scales per 128 x 128 block take.

The same functions with the same two forms. A weight's scales belong to blocks of both dimensions, so dX takes the codes
and the scales transposed and nothing is folded into dY. Scales [M, K / 128] lie column by column, as cuBLAS reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from octavo.formats.granularity import PerBlock, PerGroup
from octavo.formats.reference import dequantize_ref, quantize_ref, scaled_mm_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import row_block
from octavo.ops import fused, native

GROUP, BLOCK = PerGroup(128), PerBlock(128, 128)
THREADS = 256  # of a block of gated_groups.cu


def quantize_tokens(
    *parts: torch.Tensor, columns: torch.Tensor | None = None, epsilon: float | None = None, spare: int = 0
) -> tuple[ScaledTensor, torch.Tensor | None]:
    """Up to three matrices beside each other, or RMSNorm of one with weight `columns`; see `native.quantize_tokens`."""
    m, ends = parts[0].shape[0], list(accumulate(part.shape[1] for part in parts))
    k, device = ends[-1], parts[0].device
    q = _empty(m, k, spare, device)
    if not fused.on_kernels(parts[0]):
        x = torch.cat(parts, dim=1).float()
        _fill(q, quantize_ref(x if columns is None else x * columns, E4M3, GROUP))
        if epsilon is None:
            return q, None
        rstd = torch.rsqrt(x.square().mean(1) + epsilon)
        q.scale.mul_(rstd[:, None])
        return q, rstd
    parts = tuple(native.aligned(part) for part in parts)
    root = torch.empty(m, device=device) if epsilon is not None else None
    block = row_block(k)
    defines = {
        "X_BF16": int(parts[0].dtype == torch.bfloat16),
        "NORM": int(epsilon is not None),
        "THREADS": block.threads,
        "ROUNDS": block.rounds,
    }
    three = (*parts, *[None] * (3 - len(parts)))
    sizes = np.float32(epsilon or 0.0), *(np.int32(size) for size in (ends[0], ends[min(1, len(ends) - 1)], k))
    strides = (np.int64(part.stride(0) if part is not None else 0) for part in three)
    arguments = *three, columns, q.codes, q.scale, root, *sizes, np.int64(k + spare), np.int64(m), *strides
    if m:
        variant = loader.Variant("groups.cu", tuple(defines.items()))
        loader.launch(variant, (m,), block.threads, arguments, parts[0], True)
    return q, root


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, spare: int = 0
) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor]:
    """act(gate) * up, gate and up; see `fused.gated`."""
    m, k = gate.shape
    first, second, third = (_empty(m, k, room, gate.device) for room in (spare, 0, 0))
    if not fused.on_kernels(gate):
        h = fused.activate(gate.float(), activation) * up.float()
        for q, value in ((first, h), (second, gate), (third, up)):
            _fill(q, quantize_ref(value, E4M3, GROUP))
    elif m:
        outputs = (part for q in (first, second, third) for part in (q.codes, q.scale))
        _launch_gated((gate, up, *outputs), gate, activation, k + spare, backward=False)
    return first, second, third


def gated_backward(
    dh: torch.Tensor,
    gate: ScaledTensor,
    up: ScaledTensor,
    columns: torch.Tensor | None,
    activation: str,
    spare: int = 0,
    reuse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, ScaledTensor]:
    """dGate, dUp [M, K] and dGate | dUp quantized [M, 2 K]; see `fused.gated_backward`. columns: None."""
    m, k = dh.shape
    if not fused.on_kernels(dh):
        dgate, dup = fused.gated_gradients(dh, dequantize_ref(gate), dequantize_ref(up), activation)
        return dgate, dup, quantize_tokens(dgate, dup, spare=spare)[0]
    dgate, dup = dh if reuse else torch.empty_like(dh), torch.empty_like(dh)
    q = _empty(m, 2 * k, spare, dh.device)
    if m:
        read = dh, gate.codes, gate.scale, up.codes, up.scale
        _launch_gated((*read, dgate, dup, q.codes, q.scale), dh, activation, 2 * k + spare, backward=True)
    return dgate, dup, q


def transposed(codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> ScaledTensor:
    """Weights [N_i, K] per block below each other, transposed: [K, sum of N_i], as one right operand for dX.

    Codes that lack scales, the last ones, take 1.
    """
    turned, scale = fused.transposed(*codes), torch.cat(list(scales))
    scale = F.pad(scale, (0, 0, 0, turned.shape[1] // 128 - len(scale)), value=1.0)
    return ScaledTensor(turned, scale.mT.contiguous(), E4M3, BLOCK)


def product(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] per group @ b [N, K]^T per block -> [M, N]."""
    return native.scaled_mm(a, b, dtype) if a.codes.is_cuda else scaled_mm_ref(a, b, dtype)


def _empty(m: int, k: int, spare: int, device: torch.device) -> ScaledTensor:
    """Not set; rows of codes, and the scales, with room for `spare` columns more."""
    scale = torch.empty(((k + spare) // 128, m), device=device).mT[:, : k // 128]
    return ScaledTensor(native.roomy_codes(m, k, spare, device), scale, E4M3, GROUP)


def _fill(q: ScaledTensor, values: ScaledTensor) -> None:
    q.codes.copy_(values.codes)
    q.scale.copy_(values.scale)


def _launch_gated(
    arguments: tuple[object, ...], x: torch.Tensor, activation: str, pitch: int, *, backward: bool
) -> None:
    m, k = x.shape
    defines = {
        "X_BF16": int(x.dtype == torch.bfloat16),
        "BACKWARD": int(backward),
        "GELU": int(activation == "gelu_tanh"),
        "THREADS": THREADS,
    }
    variant = loader.Variant("gated_groups.cu", tuple(defines.items()))
    grid = (m * -(-k // (8 * THREADS)),)
    loader.launch(variant, grid, THREADS, (*arguments, np.int64(m), np.int32(k), np.int64(pitch)), x, True)
