"""What several files of this folder share: granularities, and awkward shapes and values."""

import torch

from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor

GRANULARITIES = [PerTensor(), PerRow(), PerGroup(128), PerGroup(48), PerBlock(128, 128), PerBlock(48, 80)]
MATRICES = [(200, 136), (64, 96), (1, 1), (0, 64), (64, 0), (3, 129)]


def awkward(shape, dtype=torch.float32, seed=0):
    """Normal values over 60 binades, with zeros, Inf, NaN, -0 and a zero row sprinkled in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    x = x.to(dtype)
    flat = x.view(-1)
    for step, value in enumerate((0.0, -0.0, float("inf"), -float("inf"), float("nan"))):
        flat[step :: 97 + step] = value
    if x.dim() > 1 and x.shape[-2] > 2:
        x[..., 2, :] = 0
    return x


def same(a, b):
    """Bit for bit, but any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    ints = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(torch.nan_to_num(a, nan=0.0).view(ints), torch.nan_to_num(b, nan=0.0).view(ints))
