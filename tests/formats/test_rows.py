"""Scales of tiles as scales of rows: the same values."""

import pytest
import torch

from octavo.base.errors import RefusedError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rows import as_rows
from octavo.formats.spec import E4M3, E5M2


def weights(spread):
    """Blocks whose sizes differ by up to 2**spread; one of zeros, where a scale says nothing."""
    w = torch.randn(200, 136, generator=torch.Generator().manual_seed(0))
    w[:, 64:] *= 2.0**-spread
    w[64:128, :32] = 0
    w[128:160] = 0
    return w * 2.0**-12


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerBlock(32, 32), PerBlock(128, 128), PerGroup(32)], ids=str)
@pytest.mark.parametrize("spread", [0, 2, 12])
def test_the_same_values(spread, granularity, spec):
    q = quantize_ref(weights(spread), spec, granularity, scale_format="po2")
    q.codes[3, 70], q.codes[4, 1] = 0x7F, 0xFF
    rows, changed = as_rows(q)
    found, want = dequantize_ref(rows), dequantize_ref(q)
    assert rows.granularity == PerRow() and found[3, 70].isnan() and torch.equal(found.isnan(), want.isnan())
    assert int((found.nan_to_num() != want.nan_to_num()).sum()) == changed
    off = (found - want).nan_to_num().abs()
    assert bool((off <= rows.scale * spec.min_subnormal / 2).all()), "half of the finest step of its row"
    assert (changed > 0) == bool(off.any()) and changed < (0.9 if spread == 12 else 0.03) * q.codes.numel()


def test_refusals():
    w = weights(0)
    for q in (quantize_ref(w, E4M3, PerBlock(32, 32)), quantize_ref(w, E4M3, PerRow(), scale_format="po2")):
        with pytest.raises(RefusedError, match="powers of two"):
            as_rows(q)
