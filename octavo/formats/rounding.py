"""Rounding onto the grid: nearest, and error-compensated.

Compensated rounding chooses codes that keep the layer's *outputs*: it lowers tr((W - Q) H (W - Q)^T), with H the second
moments of the layer's inputs. Columns are rounded one after another, and what each rounding gets wrong is corrected in
the columns still to come (GPTQ: arXiv 2210.17323, algorithm 1, with its Cholesky form and activation order); then
coordinate descent visits every column again with all the others fixed, which can only lower the error. The codes are
ordinary FP8 codes: same format, same size, same speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.base.errors import DataError, ShapeError
from octavo.formats.granularity import Granularity
from octavo.formats.reference import encode
from octavo.formats.spec import FloatSpec

BLOCK = 128  # columns whose corrections are applied at once, by one GEMM
DAMPING = 0.01  # of the mean diagonal of H; GPTQ's own default
MOST_DAMPING = 1.0e3


@dataclass(frozen=True)
class Rounded:
    """codes: uint8 [N, K]. error, error_nearest: tr(E H E^T) per row, [N], for these codes and for nearest rounding.

    damping: what the factorization finally needed, as a share of the mean diagonal.
    """

    codes: torch.Tensor
    error: torch.Tensor
    error_nearest: torch.Tensor
    damping: float


def nearest(y: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """Round float32 y to the values of `spec`, nearest, ties to even, saturating: decode(encode(y)) without the codes.

    The step at y is 2**(exponent(y) - mantissa bits), at least the smallest subnormal. Dividing by it is exact.
    """
    y = y.clamp(-spec.max, spec.max)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = (power * 2.0**-spec.mantissa).clamp(min=spec.min_subnormal)
    return (y / step).round_().mul_(step)


def compensated(
    weight: torch.Tensor,
    moments: torch.Tensor,
    scale: torch.Tensor,
    granularity: Granularity,
    spec: FloatSpec,
    *,
    damping: float = DAMPING,
    sweeps: int = 2,
) -> Rounded:
    """weight [N, K], moments [K, K] = sum of x x^T over tokens x, scale [granularity.scale_shape((N, K))] -> Rounded.

    Inputs that were always zero are rounded to nearest: nothing depends on them. A row keeps nearest rounding where
    that has the lower error, so no row is ever worse. Deterministic for one device and thread count.

    Raises DataError if moments are not finite, ShapeError if they are not [K, K].
    """
    n, k = weight.shape
    if tuple(moments.shape) != (k, k):
        raise ShapeError("second moments", got=str(list(moments.shape)), need=f"[{k}, {k}]")
    if not bool(torch.isfinite(moments).all()):
        raise DataError("second moments hold NaN or Inf", fix="Look for NaN in the calibration activations.")
    wide = granularity.expand(scale, (n, k)).expand(n, k)
    target = weight.float() / wide
    plain = nearest(target, spec)
    h = moments.float().clone()
    dead = h.diagonal() <= 0
    if bool(dead.all()) or n == 0:
        zero = torch.zeros(n, device=weight.device)
        return Rounded(encode(plain, spec), zero, zero, 0.0)
    h[dead, :] = h[:, dead] = 0.0

    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    h_ordered = h[order][:, order]
    inverse, used = _inverse_factor(h_ordered, dead[order], damping)
    w_ordered, s_ordered = weight.float()[:, order], wide[:, order]
    chosen = _compensate(w_ordered, s_ordered, inverse, spec)
    chosen = _descend(w_ordered, s_ordered, chosen, h_ordered, spec, sweeps)
    codes_y = torch.empty_like(target)
    codes_y[:, order] = chosen
    codes_y[:, dead] = plain[:, dead]

    error, error_nearest = _error(target - codes_y, wide, h), _error(target - plain, wide, h)
    worse = error > error_nearest
    codes_y[worse] = plain[worse]
    kept = torch.where(worse, error_nearest, error)
    return Rounded(_keep_special(encode(codes_y, spec), target, spec), kept, error_nearest, used)


def _inverse_factor(h: torch.Tensor, dead: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """Upper U with U^T U = (h + damping * mean diagonal)^-1; damping grows tenfold until the factorization succeeds."""
    mean = h.diagonal()[~dead].mean()
    while damping <= MOST_DAMPING:
        damped = h + torch.diag(torch.where(dead, mean, damping * mean))
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if int(info) == 0 and bool(torch.isfinite(upper).all()):
                return upper, damping
        damping *= 10
    raise DataError("second moments cannot be factorized", fix="Calibrate on more, and more varied, text.")


def _compensate(weight: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """One pass over the columns, left to right; returns decoded codes [N, K]."""
    _n, k = weight.shape
    work, out = weight.clone(), torch.empty_like(weight)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        local = work[:, start:stop].mT.contiguous()  # columns as rows: contiguous in memory
        scales = scale[:, start:stop].mT.contiguous()
        errors = torch.empty_like(local)
        factor = inverse[start:stop, start:stop]
        for j in range(stop - start):
            y = nearest(local[j] / scales[j], spec)
            out[:, start + j] = y
            errors[j] = (local[j] - y * scales[j]) / factor[j, j]
            local[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        if stop < k:
            work[:, stop:].addmm_(errors.mT, inverse[start:stop, stop:], alpha=-1)
    return out


def _descend(
    weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, h: torch.Tensor, spec: FloatSpec, sweeps: int
) -> torch.Tensor:
    """Coordinate descent on tr(E H E^T): each column moves to the code nearest its optimum, the others fixed."""
    k = weight.shape[1]
    diagonal = h.diagonal()
    live = (diagonal > 0).tolist()  # once: asking the device for each column would wait for it each time
    y = y.clone()
    for _ in range(sweeps):
        gradient = (weight - y * scale) @ h
        for start in range(0, k, BLOCK):
            stop = min(start + BLOCK, k)
            local = gradient[:, start:stop].mT.contiguous()
            scales, codes = scale[:, start:stop].mT.contiguous(), y[:, start:stop].mT.contiguous()
            moved = torch.zeros_like(local)
            inner = h[start:stop, start:stop]
            for j in range(stop - start):
                if not live[start + j]:
                    continue
                better = nearest(codes[j] + local[j] / diagonal[start + j] / scales[j], spec)
                moved[j] = (better - codes[j]) * scales[j]
                codes[j] = better
                local.addr_(inner[j], moved[j], alpha=-1)
            y[:, start:stop] = codes.mT
            if stop < k:
                gradient[:, stop:].addmm_(moved.mT, h[start:stop, stop:], alpha=-1)
    return y


def _error(error: torch.Tensor, scale: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Per row e H e^T, with e in units of the weights."""
    e = error * scale
    return ((e @ h) * e).sum(1).clamp(min=0)


def _keep_special(codes: torch.Tensor, target: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """Inf and NaN of the source get the codes that nearest rounding gives them."""
    special = ~torch.isfinite(target)
    return torch.where(special, encode(target, spec), codes) if bool(special.any()) else codes
