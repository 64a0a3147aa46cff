"""How good a quantized tensor is: error in dB, saturation, underflow, and what is left of a delta."""

from __future__ import annotations

import math

import torch

from octavo.formats.reference import dequantize_ref
from octavo.formats.scaled import ScaledTensor


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """10 log10(|expected|^2 / |actual - expected|^2), dB; inf when equal, -inf for NaN or Inf in `actual`."""
    signal = _energy(_wide(expected))
    noise = _energy(_wide(actual) - _wide(expected))
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32: a difference of two float32 values is off by 2**-24 of itself, which no figure in dB shows."""
    return x if x.dtype == torch.float64 else x.float()


def _energy(x: torch.Tensor) -> float:
    """Sum of squares, accumulated in float64 without a float64 copy."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def saturation(q: ScaledTensor) -> float:
    """The share of values at the largest code. One per tile is what an absmax scale gives."""
    top = (q.codes & 0x7F) == _top_code(q)
    return float(top.float().mean()) if q.codes.numel() else 0.0


def underflow(q: ScaledTensor, source: torch.Tensor) -> float:
    """The share of non-zero source values whose code is zero."""
    nonzero = source != 0
    lost = ((q.codes & 0x7F) == 0) & nonzero
    return float(lost.sum() / nonzero.sum().clamp(min=1))


def delta_kept(base: torch.Tensor, target: torch.Tensor, q: ScaledTensor) -> float:
    """How much of `target - base` is left in the quantized target: <D(q) - base, d> / <d, d>, d = target - base.

    base: the weights before a merge as they would be served (dequantized), target: base plus delta, exactly.
    1.0 is all of it, 0.0 nothing, and more than 1 is possible, since rounding may go the delta's way. nan if d = 0.
    """
    delta = target.double() - base.double()
    kept = dequantize_ref(q).double() - base.double()
    norm = float(delta.square().sum())
    return float((kept * delta).sum()) / norm if norm else math.nan


def _top_code(q: ScaledTensor) -> int:
    return {"e4m3": 0x7E, "e5m2": 0x7B}[q.spec.name]
