"""Norm and gated activation around the FP8 products of a decoder layer, and their gradients, each one pass over memory.

Every function has two forms with the same result: CUDA kernels, and plain torch for the CPU, which is the oracle.
Products themselves are in `native`. What goes in and out is 16 bit, contiguous, [M, K]; codes are E4M3 per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from octavo.formats.granularity import PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import MAX_TOKENS, gated_block, row_block
from octavo.ops import native, w8a16

ACTIVATIONS = ("silu", "gelu_tanh")
MAX_NORM_WIDTH = 512 * 4 * 8  # what a block of norm.cu holds in registers


def quantize_tokens(
    *parts: torch.Tensor,
    columns: torch.Tensor | None = None,
    epsilon: float | None = None,
    spare: int = 0,
    delta: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[ScaledTensor, torch.Tensor | None]:
    """`native.quantize_tokens`."""
    if on_kernels(parts[0]):
        added = {"delta": delta, "total": total}
        return native.quantize_tokens(*parts, columns=columns, epsilon=epsilon, spare=spare, **added)
    if delta is not None and total is not None:
        parts = (torch.add(parts[0], delta, out=total),)
    x = torch.cat(parts, dim=1).float()
    q = _with_room(quantize_ref(x if columns is None else x * columns, E4M3, PerRow()), spare)
    if epsilon is None:
        return q, None
    rstd = torch.rsqrt(x.square().mean(1) + epsilon)
    return ScaledTensor(q.codes, q.scale * rstd[:, None], E4M3, PerRow()), rstd


def codes_suffice(weight: torch.Tensor) -> bool:
    """Whether `norm_backward` may take the codes of the normalized x times this weight [K]: where no more than a
    sixteenth of it is small beside its largest value (docs/numerics.md). Waits for the GPU."""
    magnitude = weight.abs()
    return bool((magnitude < magnitude.max() / 128).float().mean() <= 1 / 16)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of x * rstd(x) * weight with respect to x; residual is added to that. weight [K] float32, frozen.

    x: itself, or the product per token as `quantize_tokens` makes it (docs/numerics.md says what that costs).
    """
    m, k = dy.shape
    if not on_kernels(dy) or k > MAX_NORM_WIDTH:
        t, norm = dy.float() * weight, rstd[:, None]
        if isinstance(x, ScaledTensor):
            xhat = torch.where(weight.abs() > 1e-30, dequantize_ref(x) / weight, 0.0)
        else:
            xhat = x.float() * norm
        dx = norm * (t - xhat * (t * xhat).mean(1, keepdim=True))
        return dx.to(dy.dtype) if residual is None else dx.to(dy.dtype) + residual
    dx = torch.empty_like(dy)
    coded = isinstance(x, ScaledTensor)
    source, scale = (x.codes, x.scale) if isinstance(x, ScaledTensor) else (x, None)
    if dy.numel():
        arguments = dy, source, scale, weight, rstd, residual, dx, np.int32(k), np.int64(source.stride(0))
        loader.launch(*_norm_kernel(dy.dtype, coded, m, k), arguments, dy, True)
    return dx


@lru_cache(maxsize=1024)
def _norm_kernel(dtype: torch.dtype, coded: bool, m: int, k: int) -> tuple[loader.Variant, tuple[int], int]:
    """The variant, grid and threads."""
    block = row_block(k)
    forms = ("X_BF16", int(dtype == torch.bfloat16)), ("CODES", int(coded))
    sizes = ("THREADS", block.threads), ("ROUNDS", block.rounds)
    return loader.Variant("norm.cu", (*forms, *sizes)), (m,), block.threads


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, spare: int = 0
) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor]:
    """act(gate) * up, gate and up, each as codes and scales per token. activation: `silu` or `gelu_tanh`.

    spare: for the codes of the product, as in `native.quantize_tokens`.
    """
    if not on_kernels(gate):
        h = activate(gate.float(), activation) * up.float()
        first, second, third = (quantize_ref(value, E4M3, PerRow()) for value in (h, gate, up))
        return _with_room(first, spare), second, third
    m, k = gate.shape
    codes = [native.roomy_codes(m, k, room, gate.device) for room in (spare, 0, 0)]
    scale = torch.empty((3, m, 1), device=gate.device)
    outputs = (part for i in range(3) for part in (codes[i], scale[i]))
    if m:
        _launch_gated((gate, up, *outputs), gate, activation, k + spare, backward=False)
    first, second, third = (ScaledTensor(codes[i], scale[i], E4M3, PerRow()) for i in range(3))
    return first, second, third


def gated_backward(
    dh: torch.Tensor,
    gate: ScaledTensor,
    up: ScaledTensor,
    columns: torch.Tensor,
    activation: str,
    spare: int = 0,
    reuse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, ScaledTensor]:
    """dGate, dUp [M, K], and (dGate | dUp) * columns [2 K] quantized per token, [M, 2 K], in rows with room.

    reuse: dh is not needed any more; dGate takes its place.
    """
    m, k = dh.shape
    if not on_kernels(dh):
        dgate, dup = gated_gradients(dh, dequantize_ref(gate), dequantize_ref(up), activation)
        return dgate, dup, quantize_tokens(dgate, dup, columns=columns, spare=spare)[0]
    dgate, dup = dh if reuse else torch.empty_like(dh), torch.empty_like(dh)
    q = ScaledTensor(
        native.roomy_codes(m, 2 * k, spare, dh.device),
        torch.empty((m, 1), device=dh.device),
        E4M3,
        PerRow(),
    )
    if m:
        read = dh, gate.codes, gate.scale, up.codes, up.scale, columns
        _launch_gated((*read, dgate, dup, q.codes, q.scale), dh, activation, 2 * k + spare, backward=True)
    return dgate, dup, q


def gated_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dGate, dUp in the dtype of dh, by autograd; gate and up float32."""
    gate = gate.requires_grad_()
    with torch.enable_grad():
        value = activate(gate, activation)
        slope = torch.autograd.grad(value.sum(), gate)[0]
    return (dh.float() * up * slope).to(dh.dtype), (dh.float() * value.detach()).to(dh.dtype)


def low_rank(q: ScaledTensor, adapters: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """dequantize(q) [M, K] @ a [r, K]^T -> [M, r] of each adapter, straight from the codes where r is small."""
    narrow = all(a.shape[0] <= MAX_TOKENS for a in adapters) and q.shape[1] % 16 == 0
    if on_kernels(q.codes) and narrow:
        return [w8a16.linear(a.to(dtype), q, None, "none", None).mT for a in adapters]
    wide = dequantize(q, dtype)
    together = wide @ torch.cat([a.to(dtype) for a in adapters]).mT
    return list(torch.split(together, [a.shape[0] for a in adapters], dim=1))


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of the reference."""
    return w8a16.dequantize(q, dtype) if on_kernels(q.codes) else dequantize_ref(q, dtype)


def transposed(*codes: torch.Tensor) -> torch.Tensor:
    """`native.transposed`."""
    return native.transposed(*codes) if on_kernels(codes[0]) else torch.cat(codes).mT.contiguous()


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _with_room(q: ScaledTensor, spare: int) -> ScaledTensor:
    m, k = q.shape
    codes = native.roomy_codes(m, k, spare, q.codes.device).copy_(q.codes)
    return ScaledTensor(codes, q.scale, q.spec, q.granularity)


def on_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


def _launch_gated(
    tensors: tuple[torch.Tensor, ...], x: torch.Tensor, activation: str, pitch: int, *, backward: bool
) -> None:
    m, k = x.shape
    arguments = *tensors, np.int64(m), np.int32(k), np.int64(pitch)
    loader.launch(*_gated_kernel(x.dtype, activation, m, k, backward, x.device), arguments, x, True)


@lru_cache(maxsize=1024)
def _gated_kernel(
    dtype: torch.dtype, activation: str, m: int, k: int, backward: bool, device: torch.device
) -> tuple[loader.Variant, tuple[int], int]:
    """The variant, grid and threads."""
    multiprocessors, shared = loader.limits(device)
    block = gated_block(k, backward, shared)
    defines = {
        "X_BF16": int(dtype == torch.bfloat16),
        "BACKWARD": int(backward),
        "GELU": int(activation == "gelu_tanh"),
        **block.defines,
    }
    variant = loader.Variant("gated.cu", tuple(defines.items()), block.shared_bytes(2))
    return variant, block.grid(m, multiprocessors), block.threads
