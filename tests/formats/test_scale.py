import numpy as np
import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.formats import scale as scale_module
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scale import SCALE_FLOOR, ZERO_TILE_SCALE, is_power_of_two, mse_scale, power_of_two_above, scale_of
from octavo.formats.spec import E4M3, E5M2


def test_scale_is_ieee_division_by_the_largest_value():
    amax = torch.tensor([1.0, 3.0, 448.0, 1e30])
    want = (amax.numpy() / np.float32(448)).astype(np.float32)
    assert np.array_equal(scale_of(amax, E4M3).numpy(), want)
    assert scale_of(torch.tensor(57344.0), E5M2) == 1.0


def test_zero_and_tiny_amax():
    assert scale_of(torch.tensor(0.0), E4M3) == ZERO_TILE_SCALE
    assert scale_of(torch.tensor(1e-44), E4M3) == SCALE_FLOOR
    assert scale_of(torch.tensor(1e-44), E4M3, "po2") == SCALE_FLOOR


def test_power_of_two_rounds_up_and_only_up():
    exact = torch.exp2(torch.arange(-126, 128, dtype=torch.float32))
    assert torch.equal(power_of_two_above(exact), exact)
    above = torch.nextafter(exact[:-1], torch.tensor(torch.inf))
    assert torch.equal(power_of_two_above(above), exact[1:])
    below = torch.nextafter(exact[1:], torch.tensor(0.0))
    assert torch.equal(power_of_two_above(below), exact[1:])


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_po2_scales_are_powers_of_two_and_never_clip(granularity):
    x = torch.randn(40, 50)
    q = quantize_ref(x, E4M3, granularity, scale_format="po2")
    assert is_power_of_two(q.scale).all()
    assert (x.abs() / granularity.expand(q.scale, (40, 50)) <= 448).all()


@pytest.mark.parametrize("scale_format", ["fp32", "po2"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_mse_is_never_worse_than_absmax_in_any_tile(granularity, scale_format):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    x[7, 7] = torch.nan
    errors = []
    for method in ("absmax", "mse"):
        q = quantize_ref(x, E4M3, granularity, method=method, scale_format=scale_format)
        errors.append(granularity.reduce((dequantize_ref(q) - x).nan_to_num(0).square(), "sum"))
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
    if scale_format == "fp32" and granularity != PerTensor():
        assert errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_search_saturates_nothing_and_stays_within_an_octave(granularity):
    x = torch.randn(48, 64)
    ratio = mse_scale(x, E4M3, granularity) / scale_of(granularity.amax(x), E4M3)
    assert bool(((ratio >= 1) & (ratio < 2)).all())


def test_importance_decides_which_columns_fit():
    x, importance = torch.randn(32, 64), torch.full((64,), 1e-6)
    importance[5] = 1.0
    scale = mse_scale(x, E4M3, PerRow(), importance=importance)
    errors = [(dequantize_ref(quantize_ref(x, E4M3, PerRow(), scale=s)) - x)[:, 5].abs() for s in (scale, None)]
    assert errors[0].mean() < 0.2 * errors[1].mean()
    assert torch.equal(mse_scale(x, E4M3, PerRow(), importance=torch.ones(64)), mse_scale(x, E4M3, PerRow()))


def test_mse_keeps_scales_in_format():
    scale = mse_scale(torch.randn(8, 64), E4M3, PerRow(), "po2")
    assert is_power_of_two(scale).all()
    zero = mse_scale(torch.zeros(8, 64), E4M3, PerRow())
    assert torch.equal(zero, torch.full((8, 1), ZERO_TILE_SCALE))


def test_unknown_format():
    with pytest.raises(ConfigError, match="scale_format"):
        scale_of(torch.tensor(1.0), E4M3, "fp16")


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(16, 48)], ids=str)
def test_a_search_in_slices_finds_the_same(granularity, monkeypatch):
    x, importance = torch.randn(70, 100) * torch.logspace(-2, 2, 70)[:, None], torch.rand(100)
    whole = mse_scale(x, E4M3, granularity, importance=importance)
    monkeypatch.setattr(scale_module, "SLICE", 1000)
    assert torch.equal(mse_scale(x, E4M3, granularity, importance=importance), whole)
