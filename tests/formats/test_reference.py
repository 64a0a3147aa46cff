"""The oracle against a plain loop, and the special tiles."""

import pytest
import torch

from octavo.formats.codec import decode, encode
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref, scaled_mm_ref
from octavo.formats.spec import E4M3

GRANULARITIES = pytest.mark.parametrize(
    "granularity", [PerTensor(), PerRow(), PerGroup(128), PerGroup(7), PerBlock(128, 128), PerBlock(3, 5)], ids=str
)


@GRANULARITIES
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (3, 5), (2, 130, 7), (0, 8), (8, 0)], ids=str)
def test_quantize_matches_a_plain_loop(granularity, shape):
    """Every tile by hand: amax, division, rounding."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q = quantize_ref(x, E4M3, granularity)
    assert q.scale.shape == granularity.scale_shape(shape)
    if x.numel() == 0:
        return
    back = dequantize_ref(q)
    rows, cols = granularity.tile
    n, k = shape[-2:]
    matrices = x.reshape(-1, n, k) if (rows, cols) != (0, 0) else x.reshape(1, 1, -1)
    outputs = back.reshape(matrices.shape)
    for matrix, output in zip(matrices, outputs, strict=True):
        height, width = rows or matrix.shape[0], cols or matrix.shape[1]
        for i in range(0, matrix.shape[0], height):
            for j in range(0, matrix.shape[1], width):
                tile = matrix[i : i + height, j : j + width]
                scale = tile.abs().max() / 448
                want = encode(tile / scale, E4M3)
                assert torch.equal(output[i : i + height, j : j + width], decode(want, E4M3) * scale)


@GRANULARITIES
def test_special_tiles(granularity):
    """Zero, Inf, NaN and denormal inputs: finite scales, exact zeros, saturation, NaN stays where it was."""
    zero = quantize_ref(torch.zeros(9, 9), E4M3, granularity)
    assert torch.isfinite(zero.scale).all() and (zero.scale > 0).all()
    assert torch.equal(dequantize_ref(zero), torch.zeros(9, 9))

    x = torch.ones(9, 9)
    x[0, 0], x[4, 4], x[8, 8] = torch.inf, torch.nan, -torch.inf
    q = quantize_ref(x, E4M3, granularity)
    assert torch.isfinite(q.scale).all()
    back = dequantize_ref(q)
    assert torch.equal(back.isnan(), x.isnan())
    assert back[0, 0] == back[0, 0].abs() > 0 and back[8, 8] < 0
    ones = torch.isfinite(x)
    assert torch.equal(back[ones], x[ones])

    denormal = torch.full((9, 9), 1e-42)
    tiny = quantize_ref(denormal, E4M3, granularity)
    assert torch.isfinite(dequantize_ref(tiny)).all() and (tiny.scale >= 2.0**-126).all()


@pytest.mark.parametrize("power", [-24, -60, 24])
def test_codes_do_not_depend_on_magnitude(power):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    for granularity in (PerTensor(), PerRow(), PerBlock(32, 32)):
        a, b = quantize_ref(x, E4M3, granularity), quantize_ref(x * 2.0**power, E4M3, granularity)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scale * 2.0**power, b.scale)


def test_given_scale_is_used():
    x = torch.randn(4, 8)
    q = quantize_ref(x, E4M3, PerTensor(), scale=torch.tensor(0.5))
    assert q.scale == 0.5 and torch.equal(q.codes, encode(x / 0.5, E4M3))


def test_scaled_mm_is_the_product_of_the_dequantized():
    a = quantize_ref(torch.randn(5, 64), E4M3, PerRow())
    b = quantize_ref(torch.randn(7, 64), E4M3, PerBlock(4, 16))
    want = dequantize_ref(a).double() @ dequantize_ref(b).double().T
    torch.testing.assert_close(scaled_mm_ref(a, b).double(), want, rtol=1e-5, atol=1e-5)
    assert scaled_mm_ref(a, b, torch.bfloat16).dtype == torch.bfloat16
