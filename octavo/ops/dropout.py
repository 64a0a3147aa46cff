"""Dropout on the inputs of adapters. What is dropped is a function of a seed, so nothing of it is kept for backward.

Value (m, k) is dropped where its 16 of the bits of Philox4x32-10, counter (k // 8, m, 0) and key the seed, are below
65536 * rate. The projections of one input share what is dropped, as they share the input (ADR 10).

Every function has two forms with the same bits, CUDA kernels and plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.ops import fused

AT_ONCE = 1 << 25  # values of the adapters' part of a gradient that exist at once
DROP_CODES = loader.Variant("drop_codes.cu", ())


@dataclass(frozen=True)
class Dropout:
    """below: of 65536."""

    seed: int
    below: int


def exact_rate(p: float) -> float:
    """The share that is dropped for p: the nearest multiple of 2**-16."""
    return round(p * 65536) / 65536


def draw(rate: float) -> Dropout | None:
    """The next dropout by torch's generator of the CPU, which checkpointing and snapshots restore; None for rate 0."""
    if not rate:
        return None
    return Dropout(int(torch.empty((), dtype=torch.int64, device="cpu").random_()), round(rate * 65536))


def dropped_codes(q: ScaledTensor, dropout: Dropout | None) -> ScaledTensor:
    """q [M, K], the dropped codes zero: NaN codes among them, too. K % 16 == 0. None: q itself."""
    if dropout is None:
        return q
    m, k = q.shape
    if not fused.on_kernels(q.codes):
        codes = torch.where(kept(m, k, dropout, q.codes.device), q.codes, 0)
        return ScaledTensor(codes, q.scale, q.spec, q.granularity)
    codes = torch.empty((m, k), dtype=torch.uint8, device=q.codes.device)
    sizes = np.int64(m), np.int32(k), np.int64(q.codes.stride(0))
    arguments = q.codes, codes, np.int64(dropout.seed), np.int32(dropout.below), *sizes
    if m:
        loader.launch(DROP_CODES, (-(-m * k // 4096),), 256, arguments, codes, True)
    return ScaledTensor(codes, q.scale, q.spec, q.granularity)


def add_kept(y: torch.Tensor, low: torch.Tensor, a: torch.Tensor, dropout: Dropout) -> None:
    """y [M, K] += (low [M, R] @ a [R, K]) without what is dropped; one 16-bit dtype, y contiguous, K % 8 == 0."""
    m, k = y.shape
    rows = max(1, AT_ONCE // k)
    variant = loader.Variant("add_kept.cu", (("X_BF16", int(y.dtype == torch.bfloat16)),))
    for first in range(0, m, rows):
        part, added = y[first : first + rows], low[first : first + rows] @ a
        if not fused.on_kernels(y):
            part.copy_(torch.where(kept(len(part), k, dropout, y.device, first), part + added, part))
            continue
        sizes = np.int64(len(part)), np.int32(k), np.int64(first)
        arguments = part, added, np.int64(dropout.seed), np.int32(dropout.below), *sizes
        loader.launch(variant, (-(-part.numel() // 2048),), 256, arguments, y, True)


def kept(m: int, k: int, dropout: Dropout, device: torch.device, first: int = 0) -> torch.Tensor:
    """Which values of rows first to first + m are kept, bool [m, k]."""
    rows, eighths = (torch.arange(size, device=device) for size in (m, -(-k // 8)))
    words = philox([eighths[None], (rows + first)[:, None], torch.zeros_like(rows)[:, None]], dropout.seed)
    halves = torch.stack([word >> shift & 0xFFFF for word in words for shift in (0, 16)], dim=-1)
    return halves.flatten(1)[:, :k] >= dropout.below


def philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Philox4x32-10 of counters (c0, c1, c2, 0), int64 tensors of 32 bits each -> four such words."""
    a, b, c = counter
    d = torch.zeros_like(a + b + c)
    key, other_key = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product, other = a * 0xD2511F53, c * 0xCD9E8D57  # the sign aside, all 64 bits
        a, b = _above(other) ^ b ^ key, other & 0xFFFFFFFF
        c, d = _above(product) ^ d ^ other_key, product & 0xFFFFFFFF
        key, other_key = (key + 0x9E3779B9) & 0xFFFFFFFF, (other_key + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def _above(product: torch.Tensor) -> torch.Tensor:
    return product >> 32 & 0xFFFFFFFF
