"""From magnitudes to scales. A scale always decodes: x ~ code * scale, as checkpoints store it.

Two constants have their home here:
- ZERO_TILE_SCALE: a tile without a finite non-zero value gets this scale, so that it decodes to exact zeros.
- SCALE_FLOOR: 2**-126, the smallest normal float32. Below it GPUs may flush a scale to zero and 0/0 is NaN. It is
  reached only where amax < 448 * 2**-126 = 5e-36, so a tensor of ordinary values times 2**-24 keeps its codes.
"""

from __future__ import annotations

import torch

from octavo.base.errors import ConfigError
from octavo.formats.codec import all_finite, nearest_
from octavo.formats.granularity import Granularity
from octavo.formats.spec import FloatSpec

ZERO_TILE_SCALE = 1.0
SCALE_FLOOR = 2.0**-126

SCALE_FORMATS = ("fp32", "po2")
SCALE_METHODS = ("absmax", "mse", "hessian")

# What a search tries, times the absmax scale; 1.0 first, so that ties keep absmax. E4M3 repeats its relative grid every
# factor of two, so one octave holds all there is to find; upwards, where nothing saturates.
CANDIDATES = tuple(2.0 ** (step / 16) for step in range(16))
PO2_CANDIDATES = (1.0, 0.5)
SLICE = 1 << 16  # values that a CPU searches at once: a dozen passes over them stay in its cache


def scale_of(amax: torch.Tensor, spec: FloatSpec, scale_format: str = "fp32") -> torch.Tensor:
    """amax (any shape, finite, >= 0) -> scale, float32: amax / spec.max by IEEE division, or the power of two above."""
    amax = amax.float()
    # Divided by a tensor: CUDA divides by a Python number by multiplying with its rounded reciprocal.
    scale = (amax / torch.full_like(amax, spec.max)).clamp(min=SCALE_FLOOR)
    if scale_format == "po2":
        scale = power_of_two_above(scale)
    elif scale_format != "fp32":
        raise ConfigError("scale_format", got=repr(scale_format), need=" or ".join(SCALE_FORMATS))
    return torch.where(amax > 0, scale, torch.full_like(scale, ZERO_TILE_SCALE))


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= x, for positive normal float32 x. On the bits: log2 rounds near powers of two."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def is_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """True where a positive float32 scale has an empty mantissa."""
    return (scale.float().view(torch.int32) & 0x7FFFFF) == 0


def mse_scale(
    x: torch.Tensor,
    spec: FloatSpec,
    granularity: Granularity,
    scale_format: str = "fp32",
    importance: torch.Tensor | None = None,
    every: int = 1,
) -> torch.Tensor:
    """Per tile, the scale with the least squared error among CANDIDATES * absmax scale; one in `every` is tried.

    importance: float32 [K], of the columns' errors; with the mean squares of a layer's inputs it is the error of the
    layer's outputs, correlations aside. Never worse than absmax. Inf and NaN carry no weight.
    """
    rows = granularity.tile[0]
    if rows and x.dim() == 2 and x.device.type == "cpu" and x.numel() > SLICE and len(x) > rows:
        step = max(SLICE // x.shape[1] // rows, 1) * rows
        parts = [mse_scale(part, spec, granularity, scale_format, importance, every) for part in torch.split(x, step)]
        return torch.cat(parts)
    x = x.float() if all_finite(x) else torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
    amax = granularity.amax(x)
    start = best_scale = scale_of(amax, spec, scale_format)
    # In units of the absmax scale: a candidate's error is factor^2 times that of rounding x / (start factor).
    x = x / granularity.expand(start, tuple(x.shape))
    scaled, rounded, scratch = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    best_error: torch.Tensor | None = None
    for factor in CANDIDATES[::every] if scale_format == "fp32" else PO2_CANDIDATES:
        scale = torch.where(amax > 0, (start * factor).clamp(min=SCALE_FLOOR), start)
        torch.mul(x, 1 / factor, out=scaled)
        square = nearest_(rounded, spec, scratch, of=scaled).sub_(scaled).square_()
        error = granularity.reduce(square if importance is None else square.mul_(importance), "sum") * factor**2
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_scale
