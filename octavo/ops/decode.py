"""What stands between the products of a decoding step: norms with the residual, rotary embedding with the cache, gate.

Few tokens, one a row. Like `ops.attention` two forms each, kernels and plain torch, which round to 16 bit at the same
places as Transformers' own modules: tokens do not depend on which one runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.kernels.cuda import loader
from octavo.ops import attention
from octavo.ops.attention import CachedKV, Rotary, append, on_kernels, store
from octavo.ops.fused import activate

GATE_THREADS = 128


@dataclass(frozen=True)
class Positions:
    """cosine, sine: [capacity, D / 2] in the model's dtype. padding: int32 [B] or None, as in `Rotary`."""

    cosine: torch.Tensor
    sine: torch.Tensor
    padding: torch.Tensor | None = None


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over each head of queries and keys: weights [D]."""

    queries: torch.Tensor
    keys: torch.Tensor
    epsilon: float


def residual_norm(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """residual [M, K] += delta, in place -> RMSNorm(residual) * weight [K]. One dtype, contiguous."""
    if not on_kernels(residual):
        if delta is not None:
            residual += delta
        return norm(residual, weight, epsilon)
    m, k = residual.shape
    y = torch.empty_like(residual)
    threads = min(512, -(-k // (8 * 32)) * 32)
    rounds = -(-k // (8 * threads))
    defines = {"X_BF16": int(residual.dtype == torch.bfloat16), "THREADS": threads, "ROUNDS": rounds}
    variant = loader.Variant("residual_norm.cu", tuple(defines.items()))
    arguments = delta, residual, weight, y, np.float32(epsilon), np.int32(k)
    loader.launch(variant, (m,), threads, arguments, residual, attention.OVERLAP)
    return y


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension as Transformers rounds it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotate_and_append(
    qkv: torch.Tensor,
    kv: CachedKV,
    q_heads: int,
    positions: Positions,
    length: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """qkv [B n, (Hq + 2 H) D] -> its rotated queries [B, n, Hq, D]; keys and values go to places `length` and after.

    length: int32 [1], tokens in the cache of B rows. norms: applied before the rotation.
    """
    batch, head, heads = len(kv.keys), kv.head, kv.keys.shape[1]
    x = qkv.view(batch, len(qkv) // batch, -1, head)
    q, k, v = torch.split(x, [q_heads, heads, heads], dim=2)
    if not on_kernels(qkv):
        if norms is not None:
            q, k = norm(q, norms.queries, norms.epsilon), norm(k, norms.keys, norms.epsilon)
        place = length + torch.arange(x.shape[1], device=x.device)
        if positions.padding is not None:
            place = (place - positions.padding[:, None]).clamp(min=0)
        cosine, sine = (torch.cat((t[place],) * 2, dim=-1)[..., None, :] for t in (positions.cosine, positions.sine))
        q, k = (y * cosine + _half_turned(y) * sine for y in (q, k))
        append(kv, k.transpose(1, 2), v.transpose(1, 2), length=length)
        return q
    out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
    rotary = Rotary(q, out, positions.cosine, positions.sine, padding=positions.padding)
    if norms is not None:
        rotary = replace(rotary, q_norm=norms.queries, k_norm=norms.keys, epsilon=norms.epsilon)
    store(kv, k.transpose(1, 2), v.transpose(1, 2), 0, length, rotary)
    return out


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """(gate | up) [M, 2 K] -> act(gate) * up [M, K]. activation: `silu` or `gelu_tanh`."""
    m, k = gate_up.shape[0], gate_up.shape[1] // 2
    if not on_kernels(gate_up):
        return activate(gate_up[:, :k], activation) * gate_up[:, k:]
    h = torch.empty((m, k), dtype=gate_up.dtype, device=gate_up.device)
    bf16 = int(gate_up.dtype == torch.bfloat16)
    defines = {"X_BF16": bf16, "THREADS": GATE_THREADS, "GELU": int(activation == "gelu_tanh")}
    variant = loader.Variant("gate.cu", tuple(defines.items()))
    grid = -(-k // (8 * GATE_THREADS)), m
    loader.launch(variant, grid, GATE_THREADS, (gate_up, h, np.int32(k)), gate_up, attention.OVERLAP)
    return h


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
