"""One scale for all that a linear is ever given: chosen from what calibration saw of it, without keeping the inputs.

Rounding to E4M3 is relative: within its 15 octaves a scale decides not how coarse the grid is but where it lies, and
the few channels that carry most of a token's energy often repeat themselves from token to token. So the search moves
the grid, and only upwards: nothing that calibration saw saturates. Percentiles cut off the very tokens that attention
leans on; measured on SmolLM2, the noise of the outputs rises by 18 dB (benchmarks/log.md).
"""

from __future__ import annotations

import torch

from octavo.formats.codec import nearest
from octavo.formats.scale import CANDIDATES, scale_of
from octavo.formats.spec import E4M3, FloatSpec
from octavo.modules.observers import BINS, InputStats, bin_edge

METHODS = ("amax", "mse")
POINTS = 3  # magnitudes that stand for a bin: E4M3's step is two to four bins wide


def static_scale(stats: InputStats, method: str = "mse", spec: FloatSpec = E4M3) -> float | None:
    """The scale of a linear's inputs. None if no token came by.

    amax: the largest magnitude falls on the largest code. mse: of the scales up to an octave above, the one with the
    least squared error, each token's as a share of its own energy, so that one loud token does not decide for all.
    """
    if stats.amax is None:
        return None
    start = scale_of(torch.tensor(stats.amax), spec)
    if method == "amax" or not stats.amax:
        return float(start)
    energy = stats.energy.cpu()  # a few thousand bins, hundreds of operations
    noise = [relative_noise(energy, float(start) * factor, spec) for factor in CANDIDATES]
    best = min(range(len(noise)), key=noise.__getitem__)  # the first of equals: amax
    return float(start * CANDIDATES[best])


def relative_noise(energy: torch.Tensor, scale: float, spec: FloatSpec = E4M3) -> float:
    """Noise over signal when inputs are rounded with this scale. energy: float64 [BINS], see InputStats."""
    bins = [0.0, *(bin_edge(index) for index in range(BINS))]
    edges = torch.tensor(bins, dtype=torch.float64, device=energy.device)
    used = energy > 0
    low, width = edges[:-1][used], edges.diff()[used]
    noise = torch.zeros_like(low)
    for point in range(POINTS):
        x = low + width * ((point + 0.5) / POINTS)
        noise += (nearest((x / scale).float(), spec).double() * scale / x - 1).square()
    total = energy.sum()
    return float((noise * energy[used]).sum() / POINTS / total) if float(total) else 0.0
